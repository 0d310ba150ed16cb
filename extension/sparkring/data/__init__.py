"""Reads data sets: they are divided evenly among the ranks, and each rank reads its shard."""
