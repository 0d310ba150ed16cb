"""What the other packages need of Spark: the session, its slots, jobs and Python, and messages for Java's errors."""
