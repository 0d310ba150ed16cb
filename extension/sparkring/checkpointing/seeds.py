"""New random states for a rank that has none in the checkpoint."""

from __future__ import annotations

import hashlib
import random
import sys


def seed_from(*what: object) -> None:
    """Seed every generator of the frameworks that are imported: alike for the same `what`, unlike for another."""
    number = int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big")
    random.seed(number)
    numpy, torch, tensorflow, keras = (sys.modules.get(name) for name in ("numpy", "torch", "tensorflow", "keras"))
    if numpy is not None:
        numpy.random.seed(number)
    if torch is not None:
        torch.manual_seed(number)
    if tensorflow is not None:
        tensorflow.random.set_seed(number)
    if keras is not None:
        keras.utils.set_random_seed(number)  # it has a generator of its own for the seeds of its layers
