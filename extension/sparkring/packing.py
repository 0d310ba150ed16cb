"""Packs a notebook's values for the ranks, and loads them there.

One pickler writes all values one after another, so what two names share they still share on the rank. Functions of
the notebook arrive with the rank's own `__main__` as their globals, as they had the notebook's.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import io
import pickle
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from sparkring.channel import Buffer
from sparkring.errors import CaptureError
from sparkring.names import global_names
from sparkring.reducers import reducers_for
from sparkring.reducers.base import Reducer
from sparkring.reducers.memory import Block, Memory
from sparkring.travel import (
    Kind,
    Namespace,
    Problem,
    Refused,
    by_reference,
    diagnose,
    ipython_names,
    kind_of,
    kind_of_type,
)

APART_BYTES = 1 << 20


def rank_namespace() -> Namespace:
    """Return the dict that the notebook's functions have as globals on a rank: its `__main__`'s."""
    return vars(sys.modules["__main__"])


class _RankNamespace:
    """Stands for the notebook's namespace in a pickle."""

    def __reduce__(self) -> tuple[Callable[[], Namespace], tuple[()]]:
        return rank_namespace, ()


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


class _Cell:
    """Stands for the cell of a closure in a pickle, empty: so the functions that share it share it on the rank."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return types.CellType, ()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, except that it refuses what must not travel and gives functions the rank's namespace."""

    def __init__(
        self, stream: io.BytesIO, namespace: Namespace | None, hidden: Collection[str], memory: Memory
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._within)
        self.buffers: list[memoryview] = []
        self.last: object = None  # the object whose packing was begun last: after a failure, the culprit
        self._namespace, self._hidden = namespace, hidden
        self._kinds: dict[type, Kind | None] = {}
        self._memory = memory
        self._reducers: dict[type, tuple[Reducer, ...]] = {}
        self._cells: dict[int, _Cell] = {}  # by the id of the cell that each stands for
        if namespace is not None:
            # cloudpickle asks here for the dict that functions with these globals share once they are loaded.
            self.globals_ref[id(namespace)] = _RankNamespace()

    def _within(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer goes into the stream; large ones travel beside it, so that they are not copied first."""
        raw = buffer.raw()
        if raw.nbytes >= APART_BYTES:
            self.buffers.append(raw)
        return raw.nbytes < APART_BYTES

    def reducer_override(self, value: Any) -> Any:
        self.last = value
        if value is sys.stdout or value is sys.stderr:  # the rank's own; a kernel's cannot be packed
            return getattr, (sys, "stdout" if value is sys.stdout else "stderr")
        cls = type(value)
        if cls not in self._kinds:
            self._kinds[cls] = kind_of_type(cls)
        if self._kinds[cls] and (kind := kind_of(value)):
            raise Refused(kind)
        if cls is not types.ModuleType and issubclass(cls, types.ModuleType) and by_reference(value):
            return importlib.import_module, (value.__name__,)  # cloudpickle knows plain modules only
        if cls in (functools._lru_cache_wrapper, typing.NewType) and value.__module__ == "__main__":
            # They pack themselves as their names, which the rank's `__main__` does not have yet.
            if cls is typing.NewType:
                return typing.NewType, (value.__name__, value.__supertype__), {"__module__": "__main__"}
            return _cached, (value.__wrapped__, value.cache_parameters())
        if cls not in self._reducers:
            self._reducers[cls] = (self._memory.reduce,) if Memory.is_array(cls) else reducers_for(cls)
        for reducer in self._reducers[cls]:
            if (reduced := reducer(value)) is not None:
                return reduced
        reduced = super().reducer_override(value)
        if isinstance(value, types.FunctionType) and isinstance(reduced, tuple):
            carried = reduced[2][1]["__globals__"]
            # cloudpickle overlooks what the body of a class reads inside a function.
            for name in global_names(value.__code__).reads:
                if name in value.__globals__:
                    carried[name] = value.__globals__[name]
            if value.__globals__ is self._namespace:
                for name in self._hidden:
                    carried.pop(name, None)
            if value.__closure__:  # cloudpickle gives each function cells of its own, and fills them afterwards
                made, (*arguments, _), *state = reduced
                cells = tuple(self._cells.setdefault(id(cell), _Cell()) for cell in value.__closure__)
                reduced = made, (*arguments, cells), *state
        return reduced


@dataclass(frozen=True)
class Packed:
    """`payload` holds the values that could be packed, `sizes` their bytes by name, `problems` says why of the rest.

    `buffers` belong to the payload: the large ones among them, as they lie in memory.
    """

    payload: bytes
    sizes: dict[str, int] = field(default_factory=dict)
    problems: dict[str, Problem] = field(default_factory=dict)
    buffers: tuple[memoryview, ...] = ()


def pack(values: dict[str, Any], namespace: Namespace | None = None, hidden: Collection[str] = ()) -> Packed:
    """Pack `values` in their order, each sized by what it adds to those before it.

    Functions whose globals are `namespace` get the rank's; those of its names that are `hidden` stay behind.
    """
    kinds = {name: kind for name, value in values.items() if (kind := kind_of(value))}
    problems = {name: Problem(f"`{name}` is {kind.noun}", kind.advice) for name, kind in kinds.items()}
    blocks: tuple[Block, ...] = ()
    while True:
        stream, sizes = io.BytesIO(), dict[str, int]()
        memory = Memory(blocks)
        pickler = _Pickler(stream, namespace, hidden, memory)
        names = tuple(name for name in values if name not in problems)
        pickler.dump(names)
        for name in names:
            start, before = stream.tell(), len(pickler.buffers)
            try:
                pickler.dump(values[name])
            except Exception as error:  # whatever the user's own __reduce__ raises
                # The memo now points at bytes that were never written: begin again without this one.
                problems[name] = diagnose(name, values[name], error, pickler.last)
                break
            sizes[name] = stream.tell() - start + sum(buffer.nbytes for buffer in pickler.buffers[before:])
        else:
            if not blocks and (blocks := memory.shared()):
                continue  # pack the arrays as views of these; once, for a value may be packed as new arrays each time
            return Packed(stream.getvalue(), sizes, problems, tuple(pickler.buffers))


def pack_call(function: Callable[..., Any], kwargs: dict[str, Any], namespace: Namespace | None) -> Packed:
    """Pack a function and its arguments; with a notebook's `namespace`, its functions share the rank's `__main__`.

    Raises CaptureError if one of them cannot travel.
    """
    name = getattr(function, "__name__", None) or type(function).__name__
    hidden = ipython_names(namespace) if namespace is not None else frozenset()
    while name in kwargs:
        name += "()"  # a function may have an argument of its own name
    packed = pack({name: function, **kwargs}, namespace, hidden)
    if packed.problems:
        raise CaptureError("Cannot be sent to the ranks: " + "\n".join(map(str, packed.problems.values())))
    return packed


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: Buffer, namespace: Namespace, buffers: Iterable[Buffer]) -> None:
        super().__init__(io.BytesIO(payload), buffers=buffers)
        self._namespace = namespace

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (rank_namespace.__module__, rank_namespace.__name__):
            return lambda: self._namespace
        return super().find_class(module, name)


def _load(payload: Buffer, namespace: Namespace, buffers: Iterable[Buffer]) -> Iterator[tuple[str, Any]]:
    unpickler = _Unpickler(payload, namespace, buffers)
    own_builtins = namespace.get("__builtins__", builtins)
    try:
        for name in unpickler.load():
            try:
                value = unpickler.load()
            except Exception as error:  # whatever the value's class raises when it is rebuilt
                problem = f"{type(error).__name__}: {error}"
                raise CaptureError(
                    f"`{name}` arrived, but could not be loaded on this rank. {problem}. "
                    "What it is made of must be importable here too"
                ) from error
            yield name, value
    finally:
        namespace["__builtins__"] = own_builtins  # cloudpickle leaves its own there


def unpack_names(payload: Buffer, namespace: Namespace, buffers: Iterable[Buffer] = ()) -> None:
    """On a rank: load the values that `capture` packed into `namespace`, its `__main__.__dict__`.

    Raises CaptureError, naming the value, if one cannot be loaded here, such as when a module is missing.
    """
    for name, value in _load(payload, namespace, buffers):
        namespace[name] = value


def unpack_call(payload: Buffer, buffers: Iterable[Buffer] = ()) -> tuple[Callable[..., Any], dict[str, Any]]:
    """On a rank: load what `pack_call` packed; errors as `unpack_names`."""
    (_, function), *kwargs = _load(payload, rank_namespace(), buffers)
    return function, dict(kwargs)
