"""Finds what a cell does to the notebook's names on the ranks only: the notebook keeps the values that it has."""

from __future__ import annotations

import ast
import collections
import types
from collections.abc import Iterable, Mapping

from sparkring.capture.syntax import parsed

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


def assigned_again(source: str, values: Mapping[str, object], cells: Iterable[str] = ()) -> list[str]:
    """Return the names in `values` to which a cell assigns new values, in the order of the cell.

    Left out are names of modules, functions and classes, assignments of constants and in loops, and assignments that
    also stand in one of the notebook's other `cells`: the cell probably makes such a name for itself.
    """
    others = "\n".join(cells)
    names: dict[str, None] = {}
    for statement in _in_blocks(parsed(source).body):
        match statement:
            case ast.Assign(targets=targets, value=value) if not isinstance(value, ast.Constant):
                pass
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target, value=ast.expr()):
                targets = [target]
            case _:
                continue
        if (ast.get_source_segment(source, statement) or "\n") in others:
            continue
        parts = [part for target in targets for part in getattr(target, "elts", [target])]
        names.update((part.id, None) for part in parts if isinstance(part, ast.Name))
    return [name for name in names if name in values and _is_data(name, values[name])]


def _in_blocks(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.With | ast.Try):
            yield from _in_blocks([*statement.body, *getattr(statement, "orelse", ())])
        else:
            yield statement


def _is_data(name: str, value: object) -> bool:
    kinds = types.ModuleType | types.FunctionType | types.BuiltinFunctionType | type | None
    return not (name.startswith("_") or isinstance(value, kinds))
