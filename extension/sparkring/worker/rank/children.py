"""Sends a rank's definitions to processes that it starts with multiprocessing's `spawn` or `forkserver`.

Such a process is a new Python, which looks in its `__main__` for the functions and classes that it uses. If
`__main__` is a script, multiprocessing runs it again to define them. But a rank has no script, or only the text of one.
So the rank sends what its `__main__` defines at that moment, and the child runs child_main.py, which loads it.
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
_PLACE = "_sparkring_main"  # an attribute of `sys` in the child

Main = Callable[[], dict[str, Any]]

_DEFINITIONS = (types.FunctionType, type, functools._lru_cache_wrapper)


def prepare_children(main: Main) -> None:
    """From now on, send the functions and classes in `main()` to each process that this one starts.

    `main` is called for each process, since `__main__` changes: while a rank runs a script, the script is `__main__`.
    """
    # Not imported here: most ranks start no processes, and the import takes a while.
    when_imported("multiprocessing.spawn", functools.partial(_install, main))


def main_of_rank() -> dict[str, Any]:
    """Return the names of `__main__` as it is now."""
    return vars(sys.modules["__main__"])


def _install(main: Main, spawn: Any) -> None:
    original: Callable[[str], dict[str, Any]] = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        from sparkring.capture.stand_in import StandIn

        # Unpickling this sets an attribute of `sys`: the child cannot import sparkring yet.
        sent = StandIn(setattr, StandIn(importlib.import_module, "sys"), _PLACE, _definitions(main()))
        return {**original(name), "init_main_from_name": _MAIN, "sparkring_main": sent}

    spawn.get_preparation_data = get_preparation_data


def _definitions(namespace: dict[str, Any]) -> tuple[Any, ...]:
    """Pack the functions and classes of `__main__` with what they use; also return why some cannot be packed."""
    from sparkring.capture.packing import pack

    found = {
        name: value
        for name, value in namespace.items()
        if isinstance(value, _DEFINITIONS) and value.__module__ == "__main__"
    }
    packed = pack(found, namespace)
    problems = {name: f"`{name}` cannot be used in a process that a rank starts: {problem}"
                for name, problem in packed.problems.items()}  # fmt: skip
    return packed.payload, [bytearray(buffer) for buffer in packed.buffers], problems


def load(namespace: dict[str, Any]) -> None:
    """In the child: load the rank's definitions into `namespace`, which is that of `__main__`."""
    from sparkring.capture.packing import unpack_names

    payload, buffers, problems = vars(sys).pop(_PLACE)
    unpack_names(payload, namespace, buffers)
    namespace.update((name, _unavailable(problem)) for name, problem in problems.items())
    prepare_children(lambda: namespace)  # not `__main__`, which runpy replaces by a copy of `namespace`


def _unavailable(problem: str) -> Callable[..., Any]:
    def unavailable(*_: object, **__: object) -> Any:
        from sparkring.errors import CaptureError

        raise CaptureError(problem)

    return unavailable
