"""Finds the submodules that code uses through their package, such as `a.b` in code that reads `a.b.x`.

A module is sent to the ranks as its name, and the ranks import it. Importing the package `a` does not always import
`a.b`, so the names of such submodules are sent, too.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterable

missing: dict[str, str] = {}  # on a rank: submodules that could not be imported, and why


def imported_submodules(chains: Iterable[tuple[str, ...]], value_of: Callable[[str], object]) -> set[str]:
    """Return the names of the imported submodules that occur in `chains`, such as `a.b` in `("a", "b", "x")`.

    `value_of` returns the value of a chain's first name. A chain is skipped if this value is not a module.
    """
    names: set[str] = set()
    for root, *attributes in chains:
        module = value_of(root)
        for attribute in attributes:
            if not issubclass(type(module), types.ModuleType):
                break
            inside = vars(module)  # getattr() could make a lazily loaded module import something
            name = f"{inside.get('__name__')}.{attribute}"
            module = inside.get(attribute)
            if module is not None and sys.modules.get(name) is module:
                names.add(name)
    return names


def import_submodule(name: str) -> None:
    """Import a submodule. A failure is only noted in `missing`, because the code may never use the submodule."""
    try:
        importlib.import_module(name)
        missing.pop(name, None)
    except Exception as error:  # whatever the module's own code raises
        missing[name] = f"{type(error).__name__}: {error}"
