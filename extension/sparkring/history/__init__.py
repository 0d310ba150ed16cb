"""What happened in a run: events, the record that they add up to, saved runs, and a record described in words."""
