"""Sends a rank's definitions to processes that it starts with multiprocessing's `spawn` or `forkserver`.

Such a process runs a new Python, which looks in its `__main__` for the functions and classes that it is to use.
Usually, multiprocessing defines them by running the parent's script again in the child. But a rank has no script file.
So when a rank starts a child, it sends the functions and classes that the rank's `__main__` has at that moment, and the
child runs child_main.py, which loads them.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

from sparkring.worker.rank.imports import when_imported

_MAIN = "sparkring.worker.rank.child_main"
_PLACE = "_sparkring_main"  # the attribute of `sys` in which the child finds the definitions

Main = Callable[[], dict[str, Any]]

_DEFINITIONS = (types.FunctionType, type, functools._lru_cache_wrapper)


def prepare_children(main: Main) -> None:
    """From now on, send the functions and classes in `main()` to each child process that multiprocessing starts.

    `main` is called for each child, because `__main__` is another module while the rank is running a script.
    """
    when_imported("multiprocessing.spawn", functools.partial(_install, main))


def main_of_rank() -> dict[str, Any]:
    """Return the namespace of the module that is `__main__` at this moment."""
    return vars(sys.modules["__main__"])


def _install(main: Main, spawn: Any) -> None:
    original: Callable[[str], dict[str, Any]] = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        from sparkring.capture.stand_in import StandIn

        # The child unpickles this before it sets its sys.path, so it cannot import sparkring yet. Therefore unpickling
        # only sets an attribute of `sys`, and load() loads the definitions later.
        sent = StandIn(setattr, StandIn(importlib.import_module, "sys"), _PLACE, _definitions(main()))
        return {**original(name), "init_main_from_name": _MAIN, "sparkring_main": sent}

    spawn.get_preparation_data = get_preparation_data


def _definitions(namespace: dict[str, Any]) -> tuple[Any, ...]:
    """Pack the functions and classes that `__main__` defines, with what they use.

    Return the pickled definitions, their buffers, and a dict with an error message for each name that cannot be packed.
    """
    from sparkring.capture.packing import pack

    definitions = {
        name: value
        for name, value in namespace.items()
        if isinstance(value, _DEFINITIONS) and value.__module__ == "__main__"
    }
    packed = pack(definitions, namespace)
    problems = {name: str(problem) for name, problem in packed.problems.items()}
    return packed.payload, [bytearray(buffer) for buffer in packed.buffers], problems


def load(namespace: dict[str, Any]) -> None:
    """Load the rank's definitions into `namespace`, the namespace of the child's `__main__`.

    A name that the rank could not pack becomes a function that raises CaptureError.
    """
    from sparkring.capture.packing import unpack_names

    payload, buffers, problems = vars(sys).pop(_PLACE)
    unpack_names(payload, namespace, buffers)
    namespace.update((name, _unavailable(name, problem)) for name, problem in problems.items())
    # Do not use main_of_rank() here: runpy replaces the child's `__main__` by a module with a copy of `namespace`.
    prepare_children(lambda: namespace)


def _unavailable(name: str, problem: str) -> Callable[..., Any]:
    def unavailable(*_: object, **__: object) -> Any:
        from sparkring.errors import CaptureError

        raise CaptureError(f"`{name}` cannot be used in a process that a rank starts: {problem}")

    return unavailable
