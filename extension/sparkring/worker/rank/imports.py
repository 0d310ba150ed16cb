"""Runs actions on modules as soon as the user's code imports them, and finds out whether an import is under way."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    # These base classes are needed only for type checks. Importing importlib.abc would take a sixth of a rank's
    # start-up time.
    Loader = MetaPathFinder = object

Action = Callable[[types.ModuleType], object]
_actions: dict[str, list[Action]] = {}
_around: dict[str, list[Callable[[], Action]]] = {}
_noted: frozenset[str] = frozenset()
_order: dict[str, None] = {}
_INSTALLED = re.compile(r"/(site|dist)-packages/").search


def when_imported(name: str, action: Action) -> None:
    """Call `action(module)` now if the module `name` has been imported, otherwise right after its import."""
    if name in sys.modules:
        action(sys.modules[name])
    if action not in _actions.setdefault(name, []):
        _actions[name].append(action)
    _look_for_imports()


def around_import(name: str, begin: Callable[[], Action]) -> None:
    """Call `begin()` before the module is imported. The action that `begin()` returns is called after the import."""
    _around.setdefault(name, []).append(begin)
    _look_for_imports()


def note_order(names: frozenset[str]) -> None:
    """From now on, note in which order the modules `names` are imported; order() returns it."""
    global _noted
    _noted = names
    _look_for_imports()


def order() -> list[str]:
    """Return the names from note_order() that have been imported, in the order in which their imports began."""
    return [name for name in _order if name in sys.modules]


def is_installed(module: types.ModuleType) -> bool:
    """Return whether the module belongs to an installed package, and not to the user's own code."""
    return is_installed_file(getattr(module, "__file__", None) or "")


def is_installed_file(path: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return bool(_INSTALLED(path))


def _look_for_imports() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def under_way(frame: types.FrameType | None) -> bool:
    """Return whether `frame` or one of its callers is importing an installed module (running its top-level code).

    The user's own modules do not count: importing such a module may be the training itself.
    """
    while frame is not None:
        is_main = frame.f_globals.get("__name__") == "__main__"
        if frame.f_code.co_name == "<module>" and not is_main and _INSTALLED(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


class _Finder(MetaPathFinder):
    """Asks the other finders for modules that have actions, and makes the loaders of these modules call the actions."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _noted:
            _order.setdefault(fullname)
        if not (fullname in _actions or fullname in _around) or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
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
        name = module.__name__
        actions = [begin() for begin in _around.get(name, ())]
        self._real.exec_module(module)
        for action in [*_actions.get(name, ()), *actions]:
            action(module)
