"""Finds names that a cell changes but does not read, as in `results.append(x)`: on a rank, such a change is lost."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterable, Mapping

_CHANGING = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "__setitem__"})


def changed_only(tree: ast.AST, values: Mapping[str, object]) -> list[str]:
    """Return the names, sorted, that `tree` uses only to change a container among `values`, such as a list.

    A name that the code also reads is left out, since the code itself may need the change.
    """
    changed: set[str] = set()
    other: set[str] = set()
    changes = {id(name) for node in ast.walk(tree) for name in _changed_by(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (changed if id(node) in changes else other).add(node.id)
    return sorted(name for name in changed - other if _is_container(values.get(name)))


def _changed_by(node: ast.AST) -> Iterable[ast.Name]:
    """Yield the names that a statement uses only to change their values, for example `a` in `a["x"].append(1)`."""
    places: list[ast.expr]
    match node:
        case ast.Expr(ast.Call(ast.Attribute(value, method))) if method in _CHANGING:
            places = [value]
        case ast.Assign(targets):
            places = [target.value for target in targets if isinstance(target, ast.Subscript)]
        case ast.AugAssign(ast.Subscript(value)):
            places = [value]
        case _:
            return
    for place in places:
        while isinstance(place, ast.Subscript | ast.Attribute):
            place = place.value
        if isinstance(place, ast.Name):
            yield place


def _is_container(value: object) -> bool:
    if isinstance(value, list | set | dict | collections.deque):
        return True
    return type(value).__module__.partition(".")[0] in ("pandas", "numpy") and hasattr(value, "__setitem__")
