"""Ranks as tasks of a Spark barrier stage: the session, its slots, a DataFrame's partitions, and the launcher."""
