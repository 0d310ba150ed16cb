"""Finds submodules that the notebook has imported, and that code reaches through a package: `a.b.x` after `import a.b`.

A module is sent as its name. Importing a package on a rank does not import its submodules, so their names are sent too.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterable

missing: dict[str, str] = {}  # on a rank: submodules that could not be imported, and why


def imported_submodules(chains: Iterable[tuple[str, ...]], value_of: Callable[[str], object]) -> set[str]:
    """Find the submodules that attribute chains reach. A chain counts only if its first name is that of a module."""
    found: set[str] = set()
    for root, *attributes in chains:
        module = value_of(root)
        for attribute in attributes:
            if not issubclass(type(module), types.ModuleType):
                break
            inside = vars(module)  # getattr() could make a lazily loaded module import something
            name = f"{inside.get('__name__')}.{attribute}"
            module = inside.get(attribute)
            if module is not None and sys.modules.get(name) is module:
                found.add(name)
    return found


def import_submodule(name: str) -> None:
    """Import a submodule. If this fails, note it in `missing`: it matters only to code that uses the submodule."""
    try:
        importlib.import_module(name)
        missing.pop(name, None)
    except Exception as error:  # whatever the module's own code raises
        missing[name] = f"{type(error).__name__}: {error}"
