"""Runs a script on a rank as IPython's %run does: sets `__main__`, sys.argv and sys.path for the script."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from sparkring.capture.source_lines import keep_lines
from sparkring.wire.messages import Script
from sparkring.worker.rank.cell import compile_cell

files: set[str] = set()  # the file names, as tracebacks show them, of all scripts that have been run


def run_script(script: Script, arguments: Sequence[str] = ()) -> None:
    """Run a script, and put the names that it binds into the rank's `__main__`, even after an error.

    Raise SystemExit if the script ends with an exit code other than 0, unless `script.any_exit`.
    """
    from sparkring.capture.names import IMPLICIT

    cell = vars(sys.modules["__main__"])
    for name, source in script.parts:
        files.add(name)
        keep_lines(name, source)
    try:
        if script.inside:
            with _program(script, arguments), _borrowed(cell, script):
                for name, source in script.parts:
                    compile_cell(source, name).run(cell)
        else:
            module = types.ModuleType(script.name)
            with _program(script, arguments), _in_place(module):
                try:
                    exec(_code(script, module), vars(module))
                finally:
                    cell.update({name: value for name, value in vars(module).items() if name not in IMPLICIT})
    except SystemExit as error:
        if error.code not in (None, 0) and not script.any_exit:
            raise


def _code(script: Script, module: types.ModuleType) -> types.CodeType:
    """Return the code to run as `module`, and set the module's `__file__` and similar attributes."""
    if not script.module:
        module.__file__ = script.path
        ((name, source),) = script.parts
        return compile(source, name, "exec", dont_inherit=True)
    import importlib.util

    spec = importlib.util.find_spec(script.module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{script.module}.__main__")
    code: Any = getattr(spec.loader, "get_code", lambda name: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {script.module!r} that can be run", name=script.module)
    module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent
    sys.argv[0] = spec.origin or script.module
    return code  # type: ignore[no-any-return]


@contextlib.contextmanager
def _program(script: Script, arguments: Sequence[str]) -> Iterator[None]:
    """While the script runs, set sys.argv for it and put its folder first on sys.path."""
    folder = os.path.dirname(script.path)
    before = sys.argv
    sys.argv = [script.written, *arguments]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = before
        with contextlib.suppress(ValueError):  # the script may have removed the folder from sys.path
            sys.path.remove(folder)


@contextlib.contextmanager
def _in_place(module: types.ModuleType) -> Iterator[None]:
    """While `module` runs, put it into sys.modules, so that pickle finds the functions and classes that it defines."""
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        sys.modules.pop(module.__name__, None)
        if before is not None:
            sys.modules[module.__name__] = before


@contextlib.contextmanager
def _borrowed(cell: dict[str, Any], script: Script) -> Iterator[None]:
    """While the script runs in the namespace `cell`, set `__name__` and `__file__` there to the script's values."""
    before: dict[str, Any] = {name: cell[name] for name in ("__name__", "__file__") if name in cell}
    cell.update(__name__=script.name, __file__=script.path)
    try:
        yield
    finally:
        cell.pop("__file__", None)
        cell.update(before)
