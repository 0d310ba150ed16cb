"""Ranks as tasks of a Spark barrier stage: the session, its Python and slots, a DataFrame's partitions, a launcher."""
