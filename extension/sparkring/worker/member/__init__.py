"""The process that starts one rank, owns its output, and ends it."""
