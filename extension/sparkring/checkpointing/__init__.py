"""Checkpoints: what they contain, how they are stored, and how a training continues from one."""
