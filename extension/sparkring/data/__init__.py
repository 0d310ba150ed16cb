"""What ranks read: each its shard, even by construction."""
