"""Carries out a run, from its options to its outcome: on new ranks or a warm gang, waited for or in the background."""
