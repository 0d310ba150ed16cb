"""Access to Spark: its session, slots, jobs, DataFrames and Python, and the messages of Java's errors."""
