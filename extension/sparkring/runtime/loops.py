"""Reads off a cell's code and names how much of its training loop is complete.

This is done only where it is certain: a loop of the cell itself, outside functions, that counts over a range or the
batches of a DataLoader, perhaps with tqdm. log() reports the result, so that the panel can show the progress of cells
that do not give `steps=` and `epochs=`. If a cell does not call log(), the rank looks at its only loop now and then.
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sparkring.history.stacks import CELL_NAME

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def completed(frame: types.FrameType | None) -> tuple[int, int] | None:
    """Return how many iterations of the cell's training loop are complete, and how many there are; None if unknown.

    `frame` calls log(). If a loop inside the training loop is known, too, its iterations are counted.
    """
    cell = _cell_frame(frame)
    loop = None if cell is None else _training_loop(cell.f_code, cell.f_lineno)
    return None if cell is None or loop is None else _iterations(cell, loop, logs=True)


def under_way(frame: types.FrameType | None) -> tuple[int, int] | None:
    """Return the same for a `frame` that calls no log(). It is known only if the cell has a single loop."""
    cell = _cell_frame(frame)
    loop = None if cell is None else _only_loop(cell.f_code)
    is_known = cell is not None and isinstance(loop, ast.For) and _covers(loop, cell.f_lineno) and not _logs(loop)
    return _iterations(cell, loop, logs=False) if is_known else None  # type: ignore[arg-type]


def _cell_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the frame that runs the cell itself, if `frame` is called from there."""
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != (CELL_NAME, "<module>"):
        frame = frame.f_back
    return frame


def _iterations(cell: types.FrameType, loop: ast.For, *, logs: bool) -> tuple[int, int] | None:
    """Return the complete iterations of a loop, and their number. log() is called when an inner iteration is done."""
    names = cell.f_globals
    place = _place(loop, names)
    if place is None:
        return None
    inner = _only_inner(loop)
    within = _place(inner, names) if inner is not None and _covers(inner, cell.f_lineno) else None
    (at, count), (at_inner, count_inner) = place, within or (0, 1)
    return at * count_inner + at_inner + (logs and within is not None), count * count_inner


@functools.lru_cache(maxsize=256)
def _training_loop(code: types.CodeType, line: int) -> ast.For | None:
    """Return the outermost loop around a line of the cell, if no other loop of the cell reports metrics."""
    tree = _tree(code)
    loops = list(_outermost(tree.body))
    loop = next((loop for loop in loops if _covers(loop, line)), None)
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    is_only = len(loops) == 1 or not any(map(_logs, [*functions, *(other for other in loops if other is not loop)]))
    return loop if isinstance(loop, ast.For) and is_only else None


@functools.lru_cache(maxsize=8)
def _only_loop(code: types.CodeType) -> ast.stmt | None:
    """Return the cell's outermost loop, if it has only one."""
    loops = list(_outermost(_tree(code).body))
    return loops[0] if len(loops) == 1 else None


def _tree(code: types.CodeType) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return ast.Module([], [])


@functools.lru_cache(maxsize=8)
def _only_inner(loop: ast.For) -> ast.stmt | None:
    inner = list(_outermost(loop.body))
    return inner[0] if len(inner) == 1 else None


@functools.lru_cache(maxsize=8)
def _stored(loop: ast.For) -> Counter[str]:
    """Return how often the loop gives each name a value, including its own target."""
    return Counter(
        node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )


def _outermost(body: list[ast.stmt]) -> Iterator[ast.For | ast.AsyncFor | ast.While]:
    """Yield the loops that are in no other loop, and in no function."""
    nodes: list[ast.AST] = [*body]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, _LOOPS):
            yield node
        elif not isinstance(node, _FUNCTIONS):
            nodes = [*ast.iter_child_nodes(node), *nodes]


def _covers(loop: ast.stmt, line: int) -> bool:
    return loop.lineno <= line <= (loop.end_lineno or loop.lineno)


def _logs(node: ast.AST) -> bool:
    names = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
    return any(getattr(name, "id", getattr(name, "attr", "")) == "log" for name in names)


def _place(loop: ast.stmt, names: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many iterations of a loop have ended, and their number; None if they are not known."""
    if not isinstance(loop, ast.For):
        return None
    target, (function, arguments) = loop.target, _call(loop.iter, names)
    if function == "enumerate" and isinstance(target, ast.Tuple) and len(arguments) == 1:
        target, loader = target.elts[0], _call(arguments[0], names)[1]
        numbers = range(_batches(loader[0], names)) if loader else range(0)
        arguments = loader
    else:
        numbers = _range(arguments, names) if function in ("range", "trange") else range(0)
    if not isinstance(target, ast.Name):
        return None
    stored = _stored(loop)
    used = {node.id for node in arguments if isinstance(node, ast.Name)}
    value: Any = names.get(target.id)
    is_known = type(value) is int and value in numbers and stored[target.id] == 1 and used.isdisjoint(stored)
    return (numbers.index(value), len(numbers)) if is_known else None


def _call(node: ast.expr, names: Mapping[str, Any]) -> tuple[str, list[ast.expr]]:
    """Return the name and the arguments of the function that a node calls, without tqdm around it.

    The name is "" if the node calls no function of Python or tqdm, or passes keywords to it.
    """
    if not isinstance(node, ast.Call) or not node.args:
        return "", [node]
    function = node.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    value = names.get(name) if isinstance(function, ast.Name) else _attribute(function, names)
    if str(getattr(value, "__module__", "")).partition(".")[0] == "tqdm":
        return (name, node.args) if name == "trange" else _call(node.args[0], names)
    is_builtin = isinstance(function, ast.Name) and name in ("range", "enumerate") and name not in names
    return (name, node.args) if is_builtin and not node.keywords else ("", [node])


def _attribute(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression such as `tqdm.auto.tqdm`, if modules have these names."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    owner = _attribute(node.value, names) if isinstance(node, ast.Attribute) else None
    return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None  # type: ignore[attr-defined]


def _range(arguments: list[ast.expr], names: Mapping[str, Any]) -> range:
    values: list[Any] = [
        node.value if isinstance(node, ast.Constant) else names.get(getattr(node, "id", "")) for node in arguments
    ]
    return range(*values) if len(values) <= 3 and all(type(value) is int for value in values) else range(0)


def _batches(node: ast.expr, names: Mapping[str, Any]) -> int:
    """Return the number of batches of torch's DataLoader; 0 for another object, or if its length is an estimate."""
    loader: Any = names.get(node.id) if isinstance(node, ast.Name) else None
    if not _is("torch", "DataLoader", loader) or _is("torch", "IterableDataset", loader.dataset):
        return 0
    return len(loader)


def _is(package: str, name: str, value: object) -> bool:
    return any(base.__name__ == name and base.__module__.startswith(package) for base in type(value).__mro__)
