"""The process that runs the cell."""
