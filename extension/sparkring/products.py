"""What each product brings: public names, the magics that are registered with it, and observers of runs.

Each product says this in its own `__init__`, and `sparkring/__init__.py` lists the products. Nothing else imports a
product, so removing its line, its folder and the modules of its magics removes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkring.history.observer import Observer

HOMES: dict[str, str] = {}  # by public name, the module that defines it
MAGICS: list[str] = []  # modules of sparkring.notebook; each lists its magics in its own MAGICS
OBSERVERS: list[Callable[[], Observer]] = []  # called for each run of this process: what they make follows the run


def offer(product: str, names: Mapping[str, str], magics: str = "") -> None:
    """Say what `product`, a package, brings: public names, by the module that defines them, and modules with magics.

    Modules are relative to sparkring and to sparkring.notebook. Names and modules are separated by spaces. They are
    imported when they are first used.
    """
    sys.modules[product].__all__ = []  # type: ignore[attr-defined]  # `import *` is for type checkers only
    HOMES.update({name: f"sparkring.{module}" for module, defined in names.items() for name in defined.split()})
    MAGICS.extend(magics.split())
