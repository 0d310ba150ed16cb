"""What the other packages need of Spark: the session, its slots, jobs and Python, and the messages of Java's errors."""
