"""The interface to IPython: the magics, their parsers and completion, and the source of cells."""
