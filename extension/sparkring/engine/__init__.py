"""One run from its options to its outcome: preparation, supervision, restarts, warm gangs, background runs."""
