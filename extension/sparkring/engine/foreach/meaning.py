"""Computes a digest of the code and settings on which items' results depend. The keys of kept results contain it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import textwrap
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from sparkring.capture.calls import source_of
from sparkring.capture.names import global_names
from sparkring.capture.picklability import walk
from sparkring.checkpointing.compatibility import meaning
from sparkring.engine.foreach.content import PLAIN, digest

_OBJECTS = 2_000  # at most this many objects are examined in one value
_MEMBERS = 100  # a setting has at most this many members
_DEPTH = 20  # how often the containers of a setting may be nested


def meaning_of(
    sources: Iterable[str], used: Mapping[str, Any], namespace: Mapping[str, Any], hidden: Container[str]
) -> str:
    """Return a digest of code and of everything that the code uses from the notebook.

    `sources` is the code itself; its comments do not count. `namespace` contains the notebook's names and values, and
    `used` the names that the code uses, with their values. For functions and classes of the notebook, the digest covers
    their code and everything that they use, except for names in `hidden`. For settings, the digest covers the values.
    Other data is left out, since comparing such data may be slow or impossible.
    """
    parts = {
        name: [*([value] if is_setting(value) else ()), *_code(value, namespace)]
        for name, value in all_used(used, namespace, hidden)
    }
    return digest([meaning(source) for source in sources], {name: part for name, part in parts.items() if part})


def all_used(
    used: Mapping[str, Any], namespace: Mapping[str, Any], hidden: Container[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the names and values in `used`, and the notebook's names and values that functions among them use."""
    waiting, seen = dict(used), set(used)
    while waiting:
        name, value = waiting.popitem()
        yield name, value
        for function in _held(value):
            if _is_own(function, namespace):
                reads = global_names(function.__code__).reads
                found = {
                    read: namespace[read] for read in reads.keys() - seen if read in namespace and read not in hidden
                }
                waiting.update(found)
                seen.update(found)


def _code(value: Any, namespace: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the code and settings of the notebook's functions and classes that `value` is or contains."""
    for each in _held(value):
        if _is_own(each, namespace):
            yield meaning(textwrap.dedent(source_of(each)))
            yield _settings({"defaults": each.__defaults__, **(each.__kwdefaults__ or {}), **_closure(each)})
        elif isinstance(each, functools.partial):
            yield [argument for argument in each.args if is_setting(argument)]
            yield _settings(each.keywords)
        elif isinstance(each, type) and each.__module__ == "__main__":
            attributes = {name: member for name, member in vars(each).items() if not name.startswith("__")}
            yield [cls.__qualname__ for cls in each.__mro__], _settings(attributes), list(each.__annotations__)


def _closure(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            found[name] = cell.cell_contents
    return found


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if is_setting(value)}


def is_setting(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is a number, string, date or path, or a list, tuple, dict, set or dataclass of a few of these.

    A member of an enumeration is a setting if its value is one. What is nested more than `depth` times is no setting:
    it may contain itself.
    """
    if isinstance(value, type) or not depth:
        return False
    if isinstance(value, enum.Enum):
        value = value.value
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        value = [member for item in value.items() for member in item]
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) <= _MEMBERS and all(is_setting(each, depth - 1) for each in value)
    return isinstance(value, PLAIN)


def _held(value: Any) -> Iterator[Any]:
    return (step.value for step in walk(value, limit=_OBJECTS))


def _is_own(value: Any, namespace: Mapping[str, Any]) -> bool:
    return isinstance(value, types.FunctionType) and value.__globals__ is namespace
