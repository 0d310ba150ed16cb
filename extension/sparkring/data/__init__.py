"""Reads data sets: each rank reads its shard, and all shards are even."""
