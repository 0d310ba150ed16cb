"""The ranks that run for a notebook: which are up, what they are asked to run, and how they end."""
