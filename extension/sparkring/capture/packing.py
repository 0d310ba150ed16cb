"""Packs a notebook's values for the ranks, and loads them there.

One pickler writes all values one after another, so an object that two names share is also shared on the rank. The
notebook's functions keep their source lines, and get the rank's own `__main__` as their globals. If a value needs a
class or a function of the notebook, this class or function is sent, too. It is defined in the rank's `__main__`, where
pickle looks for it by its name.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import importlib
import io
import itertools
import pickle
import sys
import types
import typing
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle

from sparkring.capture.calls import names_of
from sparkring.capture.changes import Changed, ValuePlace
from sparkring.capture.names import attribute_chains, global_names, names_in_commands
from sparkring.capture.picklability import (
    FOUND_BY_NAME,
    Kind,
    Namespace,
    Problem,
    Refused,
    by_reference,
    diagnose,
    ipython_names,
    kind_of,
    kind_of_type,
    name_in_main,
)
from sparkring.capture.reducers import reducers_for
from sparkring.capture.reducers.base import Reducer
from sparkring.capture.reducers.memory import ArrayMemory, MemoryBlock
from sparkring.capture.reducers.standard import attributes_of_members, is_made_by_code, make_class, set_members
from sparkring.capture.reducers.tensorflow import (
    ModelPart,
    is_model,
    part_of_model,
    parts_of_models,
    registered_names,
    set_registered,
    with_shared_layers,
)
from sparkring.capture.remote_names import RemoteNames
from sparkring.capture.snapshots import ATOMS
from sparkring.capture.source_lines import code_with_lines, keep_lines, source_text
from sparkring.capture.stand_in import StandIn
from sparkring.capture.string_names import MARKS, StringName, names_in_strings
from sparkring.capture.submodules import import_submodule, imported_submodules
from sparkring.capture.syntax import parsed
from sparkring.errors import CaptureError
from sparkring.wire.messages import Buffer

APART_BYTES = 1 << 20
_POSITIONAL = ""  # in a packed call, the name under which the number of positional arguments is packed


def rank_namespace() -> Namespace:
    """Return the globals of the notebook's functions on a rank: the dict of the rank's `__main__`."""
    return vars(sys.modules["__main__"])


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle pickler that refuses values that must not be sent, and gives functions the rank's namespace.

    A function is packed with the notebook's variables that it uses, except those for which `stays(name)` is true.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        namespace: Namespace | None,
        stays: Callable[[str], bool],
        memory: ArrayMemory,
        keras_parts: Mapping[int, ModelPart],
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._within)
        self.buffers: list[memoryview] = []
        self.last: object = None  # the object whose packing began last: when packing fails, this object is the cause
        self.met: set[str] = set()  # the notebook's names that packed values need in `__main__`
        self.carried: set[str] = set()  # the notebook's names whose values are packed with functions that use them
        self._namespace, self._stays = namespace, stays
        self._kinds: dict[type, Kind | None] = {}
        self._found_by_name: set[type] = set()
        self._files: dict[str, _CodeFile] = {}
        self._memory = memory
        self._keras_parts = keras_parts
        self._begun: set[int] = set()  # the ids of the models whose packing has begun
        self.shares = True  # whether the value that is being packed shares objects with what the ranks have
        self.shared: list[object] = []  # the objects of an earlier payload to which this one refers
        self.uses: set[str] = set()  # the names whose values on the ranks are needed to load what is packed
        self._reducers: dict[type, tuple[Reducer, ...]] = {}
        # Stand-ins for closure cells, by the id of the cell. Functions that share a cell in the notebook also share it
        # on the rank.
        self._cells: dict[int, StandIn] = {}
        if namespace is not None:
            # This tells cloudpickle which dict the functions get as their globals when they are loaded.
            self.globals_ref[id(namespace)] = StandIn(rank_namespace)

    def objects(self) -> PackedObjects:
        """Return what has been packed, for payloads that share it."""
        return PackedObjects(self.memo.copy(), self._cells, self._files, self.globals_ref)

    def _within(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer goes into the stream. Large buffers are sent separately, which avoids a copy."""
        raw = buffer.raw()
        if raw.nbytes >= APART_BYTES:
            self.buffers.append(raw)
        return raw.nbytes < APART_BYTES

    def reducer_override(self, value: Any) -> Any:
        self.last = value
        if (part := self._keras_parts.get(id(value))) and self._can_share(part.model):
            return part_of_model, tuple(part)
        # The streams of a notebook's kernel cannot be packed, so the rank uses its own.
        if value is sys.stdout or value is sys.stderr:
            return getattr, (sys, "stdout" if value is sys.stdout else "stderr")
        cls = type(value)
        if cls not in self._kinds:
            self._kinds[cls] = kind_of_type(cls)
            if self._namespace is not None and issubclass(cls, FOUND_BY_NAME):
                self._found_by_name.add(cls)
        if self._kinds[cls] and (kind := kind_of(value)):
            raise Refused(kind)
        if cls in self._found_by_name and (name := name_in_main(value, self._namespace)):
            self.met.add(name)
        if cls is types.CodeType and (file := self._files.get(value.co_filename)) and file.text:
            return code_with_lines, (file.lines, *self.dispatch_table[types.CodeType](value))
        if cls is not types.ModuleType and issubclass(cls, types.ModuleType) and by_reference(value):
            # cloudpickle does not pack modules whose type is a subclass of ModuleType.
            return importlib.import_module, (value.__name__,)
        if cls in (functools._lru_cache_wrapper, typing.NewType, typing.TypeVar) and value.__module__ == "__main__":
            # These values would be pickled as their names, which the rank's `__main__` does not have yet.
            if cls is typing.NewType:
                return typing.NewType, (value.__name__, value.__supertype__), {"__module__": "__main__"}
            if cls is typing.TypeVar:
                return *self.dispatch_table[cls](value), (None, {"__module__": "__main__"})
            return _cached, (value.__wrapped__, value.cache_parameters())
        if cls not in self._reducers:
            self._reducers[cls] = (self._memory.reduce,) if ArrayMemory.is_array(cls) else reducers_for(cls)
        for reducer in self._reducers[cls]:
            if (reduced := reducer(value)) is not None:
                if self._keras_parts and is_model(value):
                    self._begun.add(id(value))
                    return with_shared_layers(value, reduced, self._keras_parts)
                return reduced
        reduced = super().reducer_override(value)
        if isinstance(reduced, tuple):  # a function or a class that is sent by value
            if isinstance(value, types.FunctionType):
                self._complete(value, reduced[2][1])
                if value.__closure__:  # cloudpickle would give each function its own cells
                    made, (*arguments, _), *state = reduced
                    cells = tuple(
                        self._cells.setdefault(id(cell), StandIn(types.CellType)) for cell in value.__closure__
                    )
                    reduced = made, (*arguments, cells), *state
            elif isinstance(value, type) and len(reduced) == 6:
                _complete_class(value, reduced)
                if is_made_by_code(value) and isinstance(reduced[1][3], dict):  # not an enumeration
                    make, arguments, *state = reduced
                    reduced = make_class, (make, *arguments), *state
                elif attributes := attributes_of_members(value):
                    *made, set_state = reduced
                    reduced = *made, functools.partial(set_members, set_state, attributes)
            if (names := registered_names(value)) and len(reduced) == 6:
                *made, set_state = reduced
                reduced = *made, functools.partial(set_registered, set_state, names)
        return reduced

    def _can_share(self, model: object) -> bool:
        """Return whether a part of a Keras model can be packed as such: not while the model itself is being packed."""
        return id(model) not in self._begun or id(model) in self.memo.copy()

    def _complete(self, function: types.FunctionType, state: dict[str, Any]) -> None:
        """Add the names that cloudpickle overlooks to a function's state. Remove names that stay in the notebook."""
        code, carried = function.__code__, state["__globals__"]
        # cloudpickle overlooks, for example, names that are read only by a class body inside the function.
        for name in global_names(code).reads:
            if name in function.__globals__:
                carried[name] = function.__globals__[name]
        submodules = {module.__name__ for module in state["_cloudpickle_submodules"]}
        submodules |= imported_submodules(attribute_chains(code), function.__globals__.get)
        # The submodules are packed as stand-ins, because the function must load even if the rank lacks a submodule.
        state["_cloudpickle_submodules"] = [StandIn(import_submodule, name) for name in sorted(submodules)]
        if function.__globals__.get("__name__") == "__main__" and code.co_filename not in self._files:
            self._files[code.co_filename] = _CodeFile(code.co_filename)
        if self._namespace is not None and function.__globals__ is self._namespace:
            for name in [name for name in carried if self._stays(name)]:
                del carried[name]
            self.carried |= carried.keys()
            self.met |= names_in_commands(code) & self._namespace.keys()
            if code.co_filename in self._files:
                self.met |= self._files[code.co_filename].names_in_strings(code, self._namespace)


class _SharingPickler(_Pickler):
    """A pickler that writes, for each object that the ranks have, where they have it. Others are faster."""

    place_of: Callable[[object], ValuePlace | int | None]

    def persistent_id(self, value: Any) -> ValuePlace | int | None:
        place = value if type(value) is ValuePlace else self.place_of(value) if self.shares else None
        if isinstance(place, ValuePlace):
            self.uses.add(place.name)
        elif place is not None:
            self.shared.append(value)
        return place

    def go_on(self, objects: PackedObjects) -> None:
        """Let what is packed from now on share the objects of an earlier payload."""
        self.place_of = objects.number_of
        self._cells, self._files = dict(objects.cells), dict(objects.files)
        self.globals_ref.update(objects.globals)


def _complete_class(cls: type, reduced: tuple[Any, ...]) -> None:
    """Add `__slots__` and the name of an outer class to the packed class `reduced`; cloudpickle drops both."""
    _, (*_, options, _, _), (attributes, _), *_ = reduced
    if "." in cls.__qualname__:
        attributes["__qualname__"] = cls.__qualname__
    slots = cls.__dict__.get("__slots__")
    # For an enumeration, `options` is not a dict. A named tuple must not be given `__slots__`.
    if isinstance(slots, (str, tuple, list)) and isinstance(options, dict) and not issubclass(cls, tuple):
        options["__slots__"] = slots


class _CodeFile:
    """A cell or a script in which functions of the notebook are defined."""

    def __init__(self, filename: str) -> None:
        self.text = source_text(filename)
        # All functions of the file refer to this stand-in, so pickle writes the lines only once.
        self.lines = StandIn(keep_lines, filename, self.text)
        self._names: list[StringName] | None = None

    def names_in_strings(self, code: types.CodeType, namespace: Namespace) -> set[str]:
        """Return the notebook's names in the strings that `code` evaluates or fills in as templates."""
        if self._names is None:
            self._names = []
            if MARKS.search(self.text):
                with contextlib.suppress(SyntaxError):  # the file may have changed since its code was compiled
                    self._names = names_in_strings(parsed(self.text), namespace)
        within = range(code.co_firstlineno, _last_line(code) + 1)
        return {mention.name for mention in self._names if mention.line in within and mention.name in namespace}


def _last_line(code: types.CodeType) -> int:
    inner = (_last_line(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return max(code.co_firstlineno, *(line for _, _, line in code.co_lines() if line), *inner)


class Along(NamedTuple):
    """A value of the notebook that is sent because the value named `via` needs it in `__main__`."""

    via: str
    size_bytes: int | None
    # Why the value cannot be sent; None if it can. A problem does not stop the run, since the value may not be needed.
    problem: Problem | None


@dataclass(frozen=True)
class Packed:
    """Packed values.

    payload: the pickled values.
    sizes: the size of each packed value in bytes, by name.
    problems: why a value cannot be sent, by name.
    buffers: the memory of large values, which `payload` does not contain.
    along: the notebook's classes and functions that were packed because the values need them, by name.
    carried: the notebook's names whose values were packed with functions that use them.
    changed: the size of what is sent for each value that the ranks have and that the notebook has changed in place.
    uses: the names whose values the ranks must already have, because the packed values share objects with these values.
    objects: the packed objects, for payloads that share them.
    shared: the objects of an earlier payload that the values share.
    """

    payload: bytes
    sizes: dict[str, int] = field(default_factory=dict)
    problems: dict[str, Problem] = field(default_factory=dict)
    buffers: tuple[memoryview, ...] = ()
    along: dict[str, Along] = field(default_factory=dict)
    carried: frozenset[str] = frozenset()
    changed: dict[str, int] = field(default_factory=dict)
    uses: frozenset[str] = frozenset()
    objects: PackedObjects | None = None
    shared: Sequence[object] = ()


class PackedObjects(NamedTuple):
    """The objects of packed values. Values that are packed later can refer to them, so that they share these objects.

    numbers: for the id of each object, its number in the payload, and the object, which keeps the id valid.
    """

    numbers: Mapping[int, tuple[int, object]]
    cells: Mapping[int, StandIn]
    files: Mapping[str, _CodeFile]
    globals: Mapping[int, StandIn]

    def number_of(self, value: object) -> int | None:
        """Return the number of a packed object; None for another object, and for strings and the like."""
        number, _ = self.numbers.get(id(value), (None, None))
        return None if type(value) in ATOMS else number

    def only(self, wanted: Callable[[object], bool]) -> PackedObjects:
        """Return these objects without those for which `wanted` is false."""
        return self._replace(numbers={key: entry for key, entry in self.numbers.items() if wanted(entry[1])})


def pack(
    values: dict[str, Any],
    namespace: Namespace | None = None,
    stays: Callable[[str], bool] = lambda name: False,
    *,
    bound: Collection[str] = (),
    submodules: Iterable[str] = (),
    held: RemoteNames | None = None,
    by_value: Collection[str] = (),
    after: PackedObjects | None = None,
    numbered: bool = False,
) -> Packed:
    """Pack `values` in their order, and then the classes and functions of `namespace` that these values need.

    An object that several values share counts only towards the size of the first of these values.

    namespace: the notebook's namespace. Functions that have it as their globals get the rank's namespace instead.
    stays: returns True for a name in `namespace` whose value is not sent, even if functions use the name.
    bound: names that are not sent along for values that need them, because the rank's `__main__` has them anyway.
    submodules: the names of modules that are imported on the rank.
    held: what the ranks have. The values share objects with it, and what the notebook has changed in it is packed, too.
    by_value: the names whose values do not share objects with what the ranks have.
    after: the objects of a payload that ranks load before this one. The values share these objects.
    numbered: whether later payloads are to share the objects of this one.
    """
    kinds = {name: kind for name, value in values.items() if (kind := kind_of(value))}
    problems = {name: Problem(f"`{name}` is {kind.noun}", kind.advice) for name, kind in kinds.items()}
    along: dict[str, Along] = {}
    whole: dict[str, Any] = {}  # values that ranks have, but whose changes in place cannot be sent
    blocks: tuple[MemoryBlock, ...] = ()
    while True:
        keras_parts = parts_of_models(value for name, value in values.items() if name not in problems)
        stream, sizes = io.BytesIO(), dict[str, int]()
        memory = ArrayMemory(blocks)
        pickler = _Pickler(stream, namespace, stays, memory, keras_parts)
        if held is not None:
            pickler = _SharingPickler(stream, namespace, stays, memory, keras_parts)
            pickler.place_of = functools.partial(held.place_of, without=values)
        elif after is not None:
            pickler = _SharingPickler(stream, namespace, stays, memory, keras_parts)
            pickler.go_on(after)
        changed: dict[str, int] = {}
        queue = collections.deque((name, value, "") for name, value in values.items() if name not in problems)
        along = {name: dependency for name, dependency in along.items() if dependency.problem}
        known = {*bound, *along}
        count = len(queue)
        queue.extend((name, value, "") for name, value in whole.items() if name not in problems)
        pickler.dump((count, [StandIn(import_submodule, name) for name in sorted(submodules)]))
        while queue := queue or _changes(held, {*changed, *problems}):
            name, value, via = queue.popleft()
            pickler.shares = name not in by_value
            start, before = stream.tell(), len(pickler.buffers)
            try:
                pickler.dump(name)
                pickler.dump(value)
            except Exception as error:  # a class's own `__reduce__` may raise anything
                # The pickler's memo now refers to bytes that were never written: begin again without this value.
                if isinstance(value, Changed) and held is not None and namespace is not None:
                    # For example, the class's `__getstate__` leaves out what has changed.
                    whole[name] = namespace[name]
                    held.send_whole(name)
                    break
                problem = diagnose(name, value, error, pickler.last)
                if via:
                    along[name] = Along(via, None, problem)
                else:
                    problems[name] = problem
                break
            size_bytes = stream.tell() - start + sum(buffer.nbytes for buffer in pickler.buffers[before:])
            if isinstance(value, Changed) or name in whole:
                changed[name] = size_bytes
            elif via:
                along[name] = Along(via, size_bytes, None)
            else:
                sizes[name] = size_bytes
            for met in sorted(pickler.met - known):
                known.add(met)
                if namespace is not None and not stays(met):
                    queue.append((met, namespace[met], name))
        else:
            if not blocks and (blocks := memory.shared()):
                # Pack again, with arrays that share memory as views of blocks. Do so only once: packing may itself make
                # new arrays that share memory, and so the search for blocks might never end.
                continue
            buffers, carried = tuple(pickler.buffers), frozenset(pickler.carried)
            return Packed(stream.getvalue(), sizes, problems, buffers, along, carried, changed, frozenset(pickler.uses),
                          pickler.objects() if numbered else None, pickler.shared)  # fmt: skip


def _changes(held: RemoteNames | None, without: Container[str]) -> collections.deque[tuple[str, Any, str]]:
    changes = {} if held is None else held.changes()
    return collections.deque((name, change, "") for name, change in changes.items() if name not in without)


def pack_call(
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    namespace: Namespace | None,
    args: Sequence[Any] = (),
    held: RemoteNames | None = None,
    *,
    numbered: bool = False,
) -> Packed:
    """Pack a function and its arguments. Functions that have `namespace` as their globals get the rank's `__main__`.

    `held` has the names whose values on the ranks should be used instead of those in `namespace`.

    The result's `sizes` contain the function first, then `args` under the names of their parameters, then `kwargs`.
    Raises CaptureError if the function or an argument cannot be sent.
    """
    name = getattr(function, "__name__", None) or type(function).__name__
    hidden = ipython_names(namespace) if namespace is not None else frozenset()
    arguments = {**dict(zip(names_of(function, args), args, strict=True)), **kwargs}
    while name in arguments:
        name += "()"  # an argument may have the function's name
    values = {name: function, **arguments, _POSITIONAL: len(args)}
    packed = pack(
        values,
        namespace,
        lambda global_name: global_name in hidden or (held is not None and global_name in held),
        held=held,
        by_value=arguments,
        numbered=numbered,
    )
    packed.sizes.pop(_POSITIONAL, None)
    if packed.problems:
        raise CaptureError("Cannot be sent to the ranks: " + "\n".join(map(str, packed.problems.values())))
    return packed


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, payload: Buffer, namespace: Namespace, buffers: Iterable[Buffer], first: LoadedObjects | None
    ) -> None:
        super().__init__(io.BytesIO(payload), buffers=buffers)
        self._namespace = namespace
        self._first = first

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (rank_namespace.__module__, rank_namespace.__name__):
            return lambda: self._namespace
        return super().find_class(module, name)

    def persistent_load(self, place: ValuePlace | int) -> Any:
        if isinstance(place, ValuePlace):
            return place.part(self._namespace)
        assert self._first is not None
        return self._first.numbered(place)


class LoadedObjects:
    """On a rank: the objects of a payload, to which payloads that are loaded later may refer."""

    def __init__(self) -> None:
        self._unpickler: _Unpickler | None = None
        self._objects: dict[int, Any] | None = None

    def add(self, unpickler: _Unpickler) -> None:
        self._unpickler = self._unpickler or unpickler

    def numbered(self, number: int) -> Any:
        if self._objects is None:
            assert self._unpickler is not None
            self._objects = self._unpickler.memo.copy()
        return self._objects[number]


def _load(
    payload: Buffer, namespace: Namespace, buffers: Iterable[Buffer], first: LoadedObjects | None
) -> Iterator[tuple[str, Any]]:
    """Yield each name and value that was passed to pack(). Add the other packed objects to `namespace`.

    If `first` is empty, it gets the objects. Otherwise, the payload may refer to the objects of `first`.
    """
    unpickler = _Unpickler(payload, namespace, buffers, first)
    if first is not None:
        first.add(unpickler)
    own_builtins = namespace.get("__builtins__", builtins)
    try:
        count, _ = unpickler.load()
        for at in itertools.count():
            try:
                name = unpickler.load()
            except EOFError:
                break
            try:
                value = unpickler.load()
            except Exception as error:  # the value's class may raise anything when the value is rebuilt
                if isinstance(error, CaptureError):
                    raise CaptureError(f"`{name}` arrived, but could not be loaded on this rank: {error}") from error
                problem = f"{type(error).__name__}: {error}"
                raise CaptureError(
                    f"`{name}` arrived, but could not be loaded on this rank. {problem}. The modules that the "
                    "value needs must also be importable on the ranks"
                ) from error
            if at < count:
                yield name, value
            else:
                namespace[name] = value
    finally:
        namespace["__builtins__"] = own_builtins  # cloudpickle replaces this entry when it loads a function


def unpack_names(
    payload: Buffer, namespace: Namespace, buffers: Iterable[Buffer] = (), first: LoadedObjects | None = None
) -> None:
    """On a rank: load the values from pack() into `namespace`, the dict of the rank's `__main__`.

    Raises CaptureError with the name of a value that cannot be loaded, for example because a module is missing.
    """
    namespace.update(_load(payload, namespace, buffers, first))


def unpack_values(payload: Buffer, buffers: Iterable[Buffer] = (), first: LoadedObjects | None = None) -> list[Any]:
    """On a rank: load packed values without binding them to names. Raises the same errors as unpack_names()."""
    return [value for _, value in _load(payload, rank_namespace(), buffers, first)]


def unpack_call(
    payload: Buffer, buffers: Iterable[Buffer] = (), first: LoadedObjects | None = None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """On a rank: load a call that pack_call() has packed. Raises the same errors as unpack_names().

    Returns the function with its positional arguments bound, and the keyword arguments.
    """
    (_, function), *arguments, (_, positional) = _load(payload, rank_namespace(), buffers, first)
    args = [value for _, value in arguments[:positional]]
    return functools.partial(function, *args) if args else function, dict(arguments[positional:])
