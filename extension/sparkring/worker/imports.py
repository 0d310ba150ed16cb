"""Calls a function of ours when the user's code has imported a module, without importing it ourselves."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # The import system asks for their methods only, and importlib.abc takes a sixth of a rank's start-up.
    Loader = MetaPathFinder = object

Action = Callable[[types.ModuleType], None]

_actions: dict[str, Action] = {}


def when_imported(name: str, action: Action) -> None:
    """Call `action(module)` once the code of module `name` has run, or now if it has; a module has one action."""
    _actions[name] = action
    if name in sys.modules:
        action(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Lets the others find the module, and acts on it when its code has run."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._busy or fullname not in _actions:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, real: Loader) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._real.exec_module(module)
        _actions[module.__name__](module)
