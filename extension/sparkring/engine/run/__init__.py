"""Carries out a run of a cell, from its options to its outcome: on new ranks or a warm gang, waiting for it or not."""
