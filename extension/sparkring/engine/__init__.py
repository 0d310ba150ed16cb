"""Carries out a run, from its options to its outcome, on new ranks or a warm gang, in the foreground or background."""
