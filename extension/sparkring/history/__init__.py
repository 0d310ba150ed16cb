"""What happened in a run: events, the record that is computed from them, saved runs, and descriptions of a record."""
