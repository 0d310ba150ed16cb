"""Captures what a cell needs: the names that it reads, packed for the ranks, unless the ranks already have them."""
