"""Console commands that prepare an environment for sparkring."""
