"""Console commands that set up the environment of sparkring."""
