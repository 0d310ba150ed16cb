"""Gangs of ranks: their connections, the requests that they execute, and how they end."""
