"""Finds the names of the notebook that a cell reads, and packs the values that the ranks do not have yet."""
