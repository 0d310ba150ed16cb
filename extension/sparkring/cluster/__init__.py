"""All that the rest needs of Spark: the session, its slots, jobs and Python, and Java's errors in words."""
