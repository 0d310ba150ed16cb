"""Finds names in annotations that are text; `typing.get_type_hints` looks these names up on the ranks."""

from __future__ import annotations

import ast
import contextlib
import types
import typing
from collections.abc import Iterable, Iterator


def names_in_hints_of(value: object) -> set[str]:
    """The names in those annotations of a function or a class that are text or contain text."""
    if not isinstance(value, (type, types.FunctionType)):
        return set()
    try:
        annotations = vars(value).get("__annotations__") if isinstance(value, type) else value.__annotations__
    except Exception:  # from Python 3.14 on, annotations are evaluated here and may raise anything
        return set()
    found = annotations.values() if isinstance(annotations, dict) else ()
    return {name for text in _texts(found) for name in _names(text)}


def names_in_hints(source: str) -> set[str]:
    """The names in annotations of a cell that are text; with `from __future__ import annotations` all of them are."""
    found: set[str] = set()
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    are_text = any(alias.name == "annotations" for node in imports for alias in node.names)
    for node in ast.walk(tree):
        for key in ("annotation", "returns"):
            hint = getattr(node, key, None)
            for part in ast.walk(hint) if isinstance(hint, ast.expr) else ():
                if isinstance(part, ast.Name) and are_text:
                    found.add(part.id)
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    found.update(_names(part.value))
    return found


def _texts(annotations: Iterable[object]) -> Iterator[str]:
    for annotation in annotations:
        if isinstance(annotation, str):
            yield annotation
        elif isinstance(annotation, typing.ForwardRef):
            yield annotation.__forward_arg__
        else:
            arguments = getattr(annotation, "__args__", ())
            yield from _texts(arguments if isinstance(arguments, tuple) else ())


def _names(text: str) -> Iterator[str]:
    with contextlib.suppress(SyntaxError):  # it is not a type, as in typing.Annotated or Literal
        yield from (part.id for part in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(part, ast.Name))
