"""The process that has a model, and what Spark tasks and ranks need to send it rows."""
