"""Seeds the random numbers of an item, so that its results do not depend on which process runs it, or after what.

A library that an item is the first to import is seeded then, and the import leaves the other random numbers as they
are. So the item draws the same numbers in a process that had imported the library before. Generators that are made
without a seed and ask the system for one (`default_rng()`) are not seeded.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable
from typing import Any

from sparkring.worker.rank.imports import Action, around_import

Plant = Callable[[Any, int], object]

_seed: int | None = None  # None until the first item


def begin(seed: int) -> None:
    """Start an item: seed Python's random numbers, and those of the libraries that are imported, now or later."""
    global _seed
    first, _seed = _seed is None, seed
    random.seed(seed)
    for name, plant in _LIBRARIES.items():
        if name in sys.modules:
            plant(sys.modules[name], seed)
        if first:
            around_import(name, functools.partial(_importing, plant))


def _importing(plant: Plant) -> Action:
    """Note the random numbers before an import; returns what is to be done after it."""
    put_back = _noted()

    def after(module: types.ModuleType) -> None:
        put_back()
        if _seed is not None:
            plant(module, _seed)

    return after


def _noted() -> Callable[[], None]:
    """Note the state of Python's and NumPy's generators; the function that is returned puts it back."""
    numpy: Any = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if hasattr(numpy, "random") else None

    def put_back() -> None:
        random.setstate(python_state)
        imported: Any = sys.modules.get("numpy")
        if numpy_state is not None:
            imported.random.set_state(numpy_state)
        elif hasattr(imported, "random"):
            imported.random.seed(_seed)

    return put_back


def _keras(module: Any, seed: int) -> None:
    """Seed the generators that Keras has of its own. Its function seeds Python's and NumPy's, too."""
    put_back = _noted()
    module.utils.set_random_seed(seed)
    put_back()


# In this order: Keras seeds TensorFlow, too.
_LIBRARIES: dict[str, Plant] = {
    "numpy": lambda module, seed: module.random.seed(seed),
    "keras": _keras,
    "tf_keras": _keras,
    "tensorflow": lambda module, seed: module.random.set_seed(seed),
    "torch": lambda module, seed: module.manual_seed(seed),
}
