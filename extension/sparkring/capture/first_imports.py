"""Finds the modules that a cell imports at its top level, before the first one that the user may have written."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

from sparkring.capture.syntax import parsed

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]").search


def first_imports(source: str) -> list[str]:
    """Return the modules that `source` imports at its top level, and the packages that contain them, in order.

    The search ends at the first module that is neither installed nor part of Python, since its code may be the user's.
    `from a import b` counts as an import of a.b, too, since b may be a module.
    """
    try:
        tree = parsed(source)
    except SyntaxError:  # the ranks raise it
        return []
    names = itertools.takewhile(_is_installed, _imported(tree.body))
    join = "{}.{}".format
    return list(dict.fromkeys(prefix for name in names for prefix in itertools.accumulate(name.split("."), join)))


def _imported(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        match statement:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                yield from (f"{module}.{alias.name}" for alias in aliases)


def _is_installed(name: str) -> bool:
    package = name.partition(".")[0]
    spec: ModuleSpec | None = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
    return package in {*sys.stdlib_module_names, "sparkring"} or bool(spec and _INSTALLED(spec.origin or ""))
