"""What IPython sees: the magics, their parsers and completion, and the source of cells."""
