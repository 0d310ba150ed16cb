"""Finds the user's own modules that a rank has imported, and loads those again whose files have changed since."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple

from sparkring.worker.rank.imports import is_installed_file
from sparkring.worker.rank.reloading import reload

_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_MOST = 300  # at most this many modules are watched, since each of them needs a system call in every cell


class _Watched(NamedTuple):
    spec: ModuleSpec  # importlib.reload() makes a new one
    time: float  # changes of the file up to this time have been loaded or reported


class OwnModules:
    """The user's own modules that this rank has imported."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._watched: dict[str, _Watched] = {}

    def reload_changed(self, since: float) -> list[str]:
        """Load modules again if their files have changed since the previous call, and return the names.

        For a module that was imported or reloaded after the previous call, look for changes after `since`, a time at
        which the module was already loaded. If a module raises an error, the next call tries it again.
        """
        for name in [name for name in sys.modules.copy() if name not in self._seen]:
            self._seen.add(name)
            spec = _spec(name)
            if spec is not None and _is_own(spec) and len(self._watched) < _MOST:
                self._watched[name] = _Watched(spec, since)
        names = []
        # A module is imported after those that imported it first, and loaded again before them.
        for name, (old, last) in reversed(list(self._watched.items())):
            spec = _spec(name)
            if spec is None or spec.origin is None:
                continue
            try:
                now = os.stat(spec.origin).st_mtime
            except OSError:  # the file is gone
                continue
            if spec is not old:  # the module was reloaded after the previous call
                last = since
            if now > last:
                reload(sys.modules[name])
                names.append(name)
            self._watched[name] = _Watched(spec, max(now, last))
        return names


def own_modules() -> list[ModuleType]:
    """Return the user's own modules that this process has imported, the newest first."""
    return [
        module
        for name, module in reversed(sys.modules.copy().items())
        if (spec := _spec(name)) is not None and _is_own(spec)
    ]


def own_files() -> list[str]:
    """Return the paths of the user's own modules that this process has imported."""
    specs = [spec for name in list(sys.modules) if (spec := _spec(name)) is not None and _is_own(spec)]
    return [spec.origin or "" for spec in specs]


def _spec(name: str) -> ModuleSpec | None:
    """Return a module's spec, without reading an attribute, which would load a lazy module."""
    try:
        spec = object.__getattribute__(sys.modules.get(name), "__dict__").get("__spec__")
    except AttributeError:  # not a module
        return None
    return spec if isinstance(spec, ModuleSpec) else None


def _is_own(spec: ModuleSpec) -> bool:
    path = spec.origin or ""
    return (
        path.endswith(".py")
        and not is_installed_file(path)
        and not path.startswith(_STANDARD_LIBRARY)
        and spec.name.partition(".")[0] != "sparkring"
    )
