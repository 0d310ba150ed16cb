"""Seeds an item's random numbers, so that its results do not depend on the process that runs it.

If an item is the first in its process to import a library, the library is seeded right after the import, and the other
generators are put back into the state that they had before the import. So the item draws the same numbers as in a
process that had already imported the library. A generator that gets its seed from the system, such as `default_rng()`
without an argument, is not seeded.
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
    """Begin an item: seed the random generators of Python and of all libraries that are imported now or later."""
    global _seed
    first, _seed = _seed is None, seed
    random.seed(seed)
    for name, plant in _LIBRARIES.items():
        if name in sys.modules:
            plant(sys.modules[name], seed)
        if first:
            around_import(name, functools.partial(_importing, plant))


def _importing(plant: Plant) -> Action:
    """Save the state of the generators before an import, and return the action to run after the import."""
    put_back = _noted()

    def after(module: types.ModuleType) -> None:
        put_back()
        if _seed is not None:
            plant(module, _seed)

    return after


def _noted() -> Callable[[], None]:
    """Return a function that puts the generators of Python and NumPy back into their present state.

    If NumPy is imported in between, its generator is seeded instead.
    """
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
    """Seed Keras' own generators. set_random_seed() also seeds those of Python and NumPy, which are put back."""
    put_back = _noted()
    module.utils.set_random_seed(seed)
    put_back()


# TensorFlow is listed after Keras, whose set_random_seed() also seeds TensorFlow.
_LIBRARIES: dict[str, Plant] = {
    "numpy": lambda module, seed: module.random.seed(seed),
    "keras": _keras,
    "tf_keras": _keras,
    "tensorflow": lambda module, seed: module.random.set_seed(seed),
    "torch": lambda module, seed: module.manual_seed(seed),
}
