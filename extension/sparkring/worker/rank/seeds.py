"""Seeds the random numbers of an item, so that its results do not depend on which process runs it, or after what.

A library that an item imports first is seeded right after its import, and so draws what it draws in a process that had
imported it before. Generators that are made without a seed and ask the system for one (`default_rng()`) are not seeded.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

from sparkring.worker.rank.imports import when_imported

_seed: int | None = None  # None until the first item


def begin(seed: int) -> None:
    """Start an item: seed Python's random numbers, and those of the libraries that are imported, now or later."""
    global _seed
    first, _seed = _seed is None, seed
    random.seed(seed)
    if first:
        for name, plant in _LIBRARIES.items():
            when_imported(name, functools.partial(_plant, plant))
    else:
        for name, plant in _LIBRARIES.items():
            if name in sys.modules:
                plant(sys.modules[name], seed)


def _plant(plant: Callable[[Any, int], object], module: Any) -> None:
    if _seed is not None:
        plant(module, _seed)


def _keras(module: Any, seed: int) -> None:
    """Seed the generators that Keras has of its own.

    set_random_seed() seeds Python's and NumPy's generators, too, but an item that imports Keras may have used these.
    """
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    module.utils.set_random_seed(seed)
    random.setstate(python_state)
    if numpy is not None:
        numpy.random.set_state(numpy_state)


# In this order: Keras seeds TensorFlow, too.
_LIBRARIES: dict[str, Callable[[Any, int], object]] = {
    "numpy": lambda module, seed: module.random.seed(seed),
    "keras": _keras,
    "tf_keras": _keras,
    "tensorflow": lambda module, seed: module.random.set_seed(seed),
    "torch": lambda module, seed: module.manual_seed(seed),
}
