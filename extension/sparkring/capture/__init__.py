"""What a cell takes along: the names that it reads, packed for the ranks, and what the ranks hold already."""
