"""The ranks that run for a notebook: their connections, the requests that they execute, and how they end."""
