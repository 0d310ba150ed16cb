"""Finds paths below /dbfs in what a cell uses. Where there is no such mount, only sparkring's functions find them."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import textwrap
import types
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import sparkring
from sparkring.capture.calls import source_of
from sparkring.capture.syntax import parsed
from sparkring.runtime.storage import DBFS_MOUNT, dbfs_root

_IS_BELOW = re.compile(rf"{DBFS_MOUNT}(/|$)").match
_PICKLED = re.compile(rb"\x8c(.)(?=" + DBFS_MOUNT.encode() + rb")", re.DOTALL)  # a short string, after its length
_OURS = {*sparkring.__all__, "tfrecords"} - {"log", "run"}  # other functions have these two names, too
_HARMLESS = {"exists", "isdir", "isfile", "ismount", "print", "removeprefix", "replace", "startswith"}


def notices(sources: Sequence[str], values: Mapping[str, object], payload: bytes) -> list[str]:
    """Return a notice if code would look for a path below /dbfs, and this machine has no /dbfs.

    `sources` is the code, `values` are the notebook's values that it uses, by name, and `payload` is the values'
    pickle.
    """
    texts = {name: str(value) for name, value in values.items() if isinstance(value, str | PurePath)}
    is_named = DBFS_MOUNT.encode() in payload or any(DBFS_MOUNT in text for text in (*sources, *texts.values()))
    if not is_named or os.path.isdir(DBFS_MOUNT):
        return []
    functions = [value for value in values.values() if isinstance(value, (type, types.FunctionType))]
    paths = _Paths(texts)
    for source in (*sources, *map(source_of, functions)):
        with contextlib.suppress(SyntaxError):  # the source of a lambda may be a part of a statement
            paths.visit(parsed(textwrap.dedent(source)))
    pickled = [payload[match.end() : match.end() + match[1][0]] for match in _PICKLED.finditer(payload)]
    in_values = {text.decode(errors="ignore") for text in pickled} - paths.of_ours
    used = sorted({*paths.used, *filter(_IS_BELOW, in_values)})
    if not used:
        return []
    return [
        f"{used[0]}{f' and {len(used) - 1} more' if len(used) > 1 else ''}: this machine has no {DBFS_MOUNT}, so only "
        f"sparkring's own functions find this path. Elsewhere, write sparkring.local_path({used[0]!r}), or run `sudo "
        f"ln -s {dbfs_root()} {DBFS_MOUNT}` once, which makes such paths valid for every program."
    ]


class _Paths(ast.NodeVisitor):
    """The paths in code: those that sparkring's functions get (`of_ours`), and all others (`used`).

    `texts` are the values of the variables that hold strings.
    """

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.used: set[str] = set()
        self.of_ours: set[str] = set()

    def visit_Assign(self, node: ast.Assign) -> None:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(str(text))):  # what matters is where the variable is used
                self.texts[name] = text
                self.of_ours.add(text)
            case _:
                self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in _OURS and name not in _HARMLESS:
            self.generic_visit(node)
            return
        inner = _Paths(self.texts)
        for part in (node.func, *node.args, *node.keywords):
            inner.visit(part)
        self.of_ours |= inner.used | inner.of_ours

    def visit_Compare(self, node: ast.Compare) -> None:
        """A path is only compared."""

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _IS_BELOW(node.value):
            self.used.add(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        text = self.texts.get(node.id, "")
        if isinstance(node.ctx, ast.Load) and _IS_BELOW(text):
            self.used.add(text)
