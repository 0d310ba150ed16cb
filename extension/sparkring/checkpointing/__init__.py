"""Checkpoints: what they contain, how they are stored, and how training continues from them."""
