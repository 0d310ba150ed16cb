"""Checkpoints: what they hold, how they lie in storage, and how a training goes back to one."""
