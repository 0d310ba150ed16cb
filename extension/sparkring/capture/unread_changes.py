"""Finds what a cell does to the notebook's names on the ranks only: the notebook keeps the values that it has."""

from __future__ import annotations

import ast
import collections
import types
from collections.abc import Iterable, Iterator, Mapping

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

    Left out are names of modules, functions and classes, and names that the cell probably makes for itself: their first
    assignment is one of a constant, also stands in one of the notebook's other `cells`, or is in a loop and does not
    use the name's value.
    """
    others = "\n".join(cells)
    names: dict[str, None] = {}
    own: set[str] = set()
    for statement, looped in _in_blocks(parsed(source).body):
        match statement:
            case ast.Assign(targets=targets, value=value):
                reads = _names(value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                targets, reads = [target], _names(value)
            case ast.AugAssign(target=target, value=value):
                targets, reads = [target], _names(target)
            case ast.For(target=target) | ast.AsyncFor(target=target):
                own.update(_names(target).keys() - names.keys())
                continue
            case _:
                continue
        assigned = {name: None for target in targets for name, stored in _names(target).items() if stored}
        first = assigned.keys() - names.keys()
        constant = isinstance(value, ast.Constant) and not isinstance(statement, ast.AugAssign)
        repeated = (ast.get_source_segment(source, statement) or "\n") in others
        own |= first if constant or repeated else first - reads.keys() if looped else set()
        names.update((name, None) for name in assigned if name not in own)
    return [name for name in names if name in values and _is_data(name, values[name])]


def _names(node: ast.AST) -> dict[str, bool]:
    """Return the names in an expression, in their order, and whether the expression is a target that stores to them."""
    return {
        part.id: isinstance(part.ctx, ast.Store)
        for part in sorted(
            (part for part in ast.walk(node) if isinstance(part, ast.Name)),
            key=lambda name: (name.lineno, name.col_offset),
        )
    }


def _in_blocks(body: Iterable[ast.stmt], looped: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield statements, also those in blocks, and whether they are in a loop. Bodies of functions are left out."""
    for statement in body:
        yield statement, looped
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        inside = looped or isinstance(statement, ast.For | ast.AsyncFor | ast.While)
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.stmt):
                yield from _in_blocks([part], inside)
            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                yield from _in_blocks(part.body, inside)


def _is_data(name: str, value: object) -> bool:
    kinds = types.ModuleType | types.FunctionType | types.BuiltinFunctionType | type | None
    return not (name.startswith("_") or isinstance(value, kinds))
