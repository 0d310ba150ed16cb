"""Packs a notebook's values for the ranks, loads them there, and says why one cannot travel.

One pickler writes all values one after another, so what two names share they still share on the rank. Functions of
the notebook arrive with the rank's own `__main__` as their globals, as they had the notebook's.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dis
import functools
import importlib
import inspect
import io
import itertools
import pickle
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import cloudpickle

from sparkring.errors import CaptureError

Namespace = dict[str, object]


# ── What a piece of code asks of the namespace it runs in ────────────────────────────────────────────────────────────


class GlobalNames(NamedTuple):
    """The module-level names that a code object, with all code inside it, `reads` (name → line) and `writes`."""

    reads: dict[str, int]
    writes: set[str]


def instructions(code: types.CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    """Yield the instructions of `code`, each with its source line."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        # Python 3.13 moved the line to `line_number` and made `starts_line` a bool.
        line = getattr(instruction, "line_number", instruction.starts_line) or line
        yield instruction, line


def is_class_body(code: types.CodeType) -> bool:
    """Tell a class body, which runs at once and keeps its names in a dict, from a function."""
    return not code.co_flags & inspect.CO_OPTIMIZED


def global_names(code: types.CodeType) -> GlobalNames:
    """Find the module-level names of a function's or a class body's code and of all code inside it."""
    reads: dict[str, int] = {}
    writes: set[str] = set()
    own: set[str] = set()  # of a class body: what it has bound itself so far
    for instruction, line in instructions(code):
        match instruction.opname:
            case "LOAD_GLOBAL":
                reads.setdefault(instruction.argval, line)
            case "LOAD_NAME" | "LOAD_FROM_DICT_OR_GLOBALS" if instruction.argval not in own:
                reads.setdefault(instruction.argval, line)
            case "STORE_NAME":
                own.add(instruction.argval)
            case "STORE_GLOBAL":
                writes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = global_names(constant)
            reads = {**inner.reads, **reads}
            writes |= inner.writes
    return GlobalNames(reads, writes)


# ── What must not travel ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Problem:
    """Why a value cannot travel: `what`, naming the offending object by its path, and `advice`, the next step."""

    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}; {self.advice}."


class _Kind(NamedTuple):
    noun: str
    advice: str


_DRIVER = "it lives on the driver. Finish with Spark before the cell, and give the ranks files or plain values"
_FRAME = (
    "it lives on the driver. Bring it down with `.toPandas()`, hand its rows out with `%%barrier --data`, "
    "or save it and read it with `sparkring.shards`"
)
_FILE = _Kind("an open file", "pass its path and open it in the cell")
_LOCK = "make it in the cell, or leave it out in the `__getstate__` of the object that holds it"
_ONCE = "it can only be used where it was made. Make it in the cell, or pass a list"
_OTHER = "make it in the cell, or give its class a `__reduce__` that says how to make it again"
_CUDA = _Kind("a tensor in a GPU's memory", "move it with `.cpu()`, and back with `.to(device)` in the cell")

_IPYTHON = ("IPython", "ipykernel")

# By the first part of the module's name and the class's name, so that nothing need be imported to recognise it, and
# classic and connect sessions, of Spark 3 and 4, are the same. Subclasses are found by their bases.
_KINDS: dict[tuple[str, str], _Kind] = {
    ("pyspark", "SparkSession"): _Kind("a SparkSession", _DRIVER),
    ("pyspark", "SparkContext"): _Kind("a SparkContext", _DRIVER),
    ("pyspark", "SQLContext"): _Kind("a SQLContext", _DRIVER),
    ("pyspark", "DataFrame"): _Kind("a Spark DataFrame", _FRAME),
    ("pyspark", "RDD"): _Kind("an RDD", "it lives on the driver. Bring it down with `.collect()`"),
    ("pyspark", "Broadcast"): _Kind("a Spark broadcast variable", "only Spark can read it. Pass its `.value`"),
    ("py4j", "JavaObject"): _Kind("a handle to an object in the JVM", _DRIVER),
    ("_io", "FileIO"): _FILE,
    ("_io", "TextIOWrapper"): _FILE,
    ("_io", "_BufferedIOBase"): _FILE,
    ("_socket", "socket"): _Kind("a socket", "connect in the cell"),
    ("_thread", "lock"): _Kind("a `_thread.lock`", _LOCK),
    ("_thread", "RLock"): _Kind("a `_thread.RLock`", _LOCK),
    ("threading", "Thread"): _Kind("a thread", "start it in the cell"),
    ("builtins", "generator"): _Kind("a generator", _ONCE),
    ("builtins", "coroutine"): _Kind("a coroutine", _ONCE),
    ("builtins", "async_generator"): _Kind("an async generator", _ONCE),
    ("torch", "Tensor"): _CUDA,  # if it is in a GPU's memory
    ("IPython", "InteractiveShell"): _Kind("the notebook's own shell", "call `get_ipython()` in the cell"),
}
_IN_MEMORY = {("_io", "StringIO"), ("_io", "BytesIO")}  # files that are plain data


def _kind_of_type(cls: type) -> _Kind | None:
    names = [(_root(str(base.__module__)), base.__qualname__) for base in cls.__mro__]
    if not _IN_MEMORY.isdisjoint(names):
        return None
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def _kind(value: object) -> _Kind | None:
    """Recognise, by its type, a value that must not be packed even where pickle would."""
    kind = _kind_of_type(type(value))
    return None if kind is _CUDA and not getattr(value, "is_cuda", False) else kind


def _root(module: str) -> str:
    return module.partition(".")[0]


def type_name(value: object) -> str:
    """Name a value's type as its users do: `numpy.ndarray`, but `list`, and `Net` for a class of the notebook."""
    cls = type(value)
    if issubclass(cls, types.ModuleType):
        return "module"  # also a lazily loaded one
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


def by_reference(value: object) -> bool:
    """Whether a value is a module, or a function or class that the rank can import by its name."""
    if issubclass(type(value), types.ModuleType):
        # By getattr, not vars: a lazily loaded module (`keras` in `from tensorflow import keras`) knows its name then.
        return sys.modules.get(getattr(value, "__name__", "")) is not None
    if not issubclass(type(value), (type, types.FunctionType, types.BuiltinFunctionType)):
        return False
    home = getattr(value, "__module__", None)
    found: object = sys.modules.get(home or "")
    for part in str(getattr(value, "__qualname__", "")).split("."):
        found = getattr(found, part, None)
    return found is value and home != "__main__"


def ipython_names(namespace: Namespace, names: Iterable[str] = ()) -> frozenset[str]:
    """Find the names that IPython itself put into the notebook over builtins (`open`, `exit`) or over `names`.

    They hold on to the notebook's shell, or need IPython where they go; the rank has its own.
    """

    def foreign(value: object) -> bool:
        if isinstance(value, types.MethodType):
            value = value.__self__
        if isinstance(value, types.FunctionType):  # not its __module__: `open` goes under the builtin's
            return _root(str(value.__globals__.get("__name__"))) in _IPYTHON
        return _root(str(type(value).__module__)) in _IPYTHON

    candidates = {*vars(builtins), "get_ipython", "display", "exit", "quit", "open", *names}
    return frozenset(name for name in candidates if name in namespace and foreign(namespace[name]))


# ── Packing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


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


class _Refused(Exception):
    """A value of a kind that must not travel was met."""

    def __init__(self, kind: _Kind) -> None:
        super().__init__(kind.noun)
        self.kind = kind


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, except that it refuses what must not travel and gives functions the rank's namespace."""

    def __init__(self, stream: io.BytesIO, namespace: Namespace | None, hidden: Collection[str]) -> None:
        super().__init__(stream, protocol=5)
        self.last: object = None  # the object whose packing was begun last: after a failure, the culprit
        self._namespace, self._hidden = namespace, hidden
        self._kinds: dict[type, _Kind | None] = {}
        if namespace is not None:
            # cloudpickle asks here for the dict that functions with these globals share once they are loaded.
            self.globals_ref[id(namespace)] = _RankNamespace()

    def reducer_override(self, value: Any) -> Any:
        self.last = value
        if value is sys.stdout or value is sys.stderr:  # the rank's own; a kernel's cannot be packed
            return getattr, (sys, "stdout" if value is sys.stdout else "stderr")
        cls = type(value)
        if cls not in self._kinds:
            self._kinds[cls] = _kind_of_type(cls)
        if self._kinds[cls] and (kind := _kind(value)):
            raise _Refused(kind)
        if cls is not types.ModuleType and issubclass(cls, types.ModuleType) and by_reference(value):
            return importlib.import_module, (value.__name__,)  # cloudpickle knows plain modules only
        if cls in (functools._lru_cache_wrapper, typing.NewType) and value.__module__ == "__main__":
            # They pack themselves as their names, which the rank's `__main__` does not have yet.
            if cls is typing.NewType:
                return typing.NewType, (value.__name__, value.__supertype__), {"__module__": "__main__"}
            return _cached, (value.__wrapped__, value.cache_parameters())
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
        return reduced


@dataclass(frozen=True)
class Packed:
    """`payload` holds the values that could be packed, `sizes` their bytes by name, `problems` says why of the rest."""

    payload: bytes
    sizes: dict[str, int] = field(default_factory=dict)
    problems: dict[str, Problem] = field(default_factory=dict)


def pack(values: dict[str, Any], namespace: Namespace | None = None, hidden: Collection[str] = ()) -> Packed:
    """Pack `values` in their order, each sized by what it adds to those before it.

    Functions whose globals are `namespace` get the rank's; those of its names that are `hidden` stay behind.
    """
    kinds = {name: kind for name, value in values.items() if (kind := _kind(value))}
    problems = {name: Problem(f"`{name}` is {kind.noun}", kind.advice) for name, kind in kinds.items()}
    while True:
        stream, sizes = io.BytesIO(), dict[str, int]()
        pickler = _Pickler(stream, namespace, hidden)
        names = tuple(name for name in values if name not in problems)
        pickler.dump(names)
        for name in names:
            start = stream.tell()
            try:
                pickler.dump(values[name])
            except Exception as error:
                # The memo now points at bytes that were never written: begin again without this one.
                problems[name] = _diagnose(name, values[name], error, pickler.last)
                break
            sizes[name] = stream.tell() - start
        else:
            return Packed(stream.getvalue(), sizes, problems)


def pack_call(function: Callable[..., Any], kwargs: dict[str, Any], namespace: Namespace | None) -> bytes:
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
    return packed.payload


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: bytes, namespace: Namespace) -> None:
        super().__init__(io.BytesIO(payload))
        self._namespace = namespace

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (rank_namespace.__module__, rank_namespace.__name__):
            return lambda: self._namespace
        return super().find_class(module, name)


def _load(payload: bytes, namespace: Namespace) -> Iterator[tuple[str, Any]]:
    unpickler = _Unpickler(payload, namespace)
    own_builtins = namespace.get("__builtins__", builtins)
    try:
        for name in unpickler.load():
            try:
                value = unpickler.load()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                raise CaptureError(
                    f"`{name}` arrived, but could not be loaded on this rank. {problem}. "
                    "What it is made of must be importable here too"
                ) from error
            yield name, value
    finally:
        namespace["__builtins__"] = own_builtins  # cloudpickle leaves its own there


def unpack_names(payload: bytes, namespace: Namespace) -> None:
    """On a rank: load the values that `capture` packed into `namespace`, its `__main__.__dict__`.

    Raises CaptureError, naming the value, if one cannot be loaded here, such as when a module is missing.
    """
    for name, value in _load(payload, namespace):
        namespace[name] = value


def unpack_call(payload: bytes) -> tuple[Callable[..., Any], dict[str, Any]]:
    """On a rank: load what `pack_call` packed; errors as `unpack_names`."""
    (_, function), *kwargs = _load(payload, rank_namespace())
    return function, dict(kwargs)


# ── Diagnosis: the way from a name to the object that cannot travel ──────────────────────────────────────────────────


class Step(NamedTuple):
    """One object met on a walk: how it was reached from the object at index `parent` of the walk."""

    value: object
    parent: int
    how: Literal["root", "inside", "global", "variable", "class"]
    label: str  # inside: what follows the parent's path, as `.loader` or `[3]`; else the name


_Child = tuple[Literal["inside", "global", "variable", "class"], str, object]
_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, range, types.ModuleType, types.CodeType)
_WIDTH = 10_000  # how many items of one container are looked at


def walk(root: object, *, limit: int) -> Iterator[Step]:
    """Walk breadth-first, so by the shortest path, over at most `limit` objects; no code of theirs is run."""
    steps = [Step(root, -1, "root", "")]
    seen = {id(root)}
    at = 0
    while at < len(steps):
        yield steps[at]
        with contextlib.suppress(RuntimeError):  # another thread changed a container meanwhile: go on with the next
            for how, label, child in _children(steps[at].value):
                if len(steps) >= limit:
                    break
                if id(child) not in seen and type(child) not in _ATOMS:
                    seen.add(id(child))
                    steps.append(Step(child, at, how, label))
        at += 1


def _children(value: Any) -> Iterator[_Child]:
    # By type(), not isinstance(), which would ask a proxy object what it pretends to be.
    cls = type(value)
    if _kind(value):  # a culprit itself; a SparkSession leads everywhere
        return
    if issubclass(cls, types.FunctionType):
        if not by_reference(value):
            yield from _of_function(value)
    elif issubclass(cls, type):
        if not by_reference(value):
            yield from (("inside", f".{name}", member) for name, member in vars(value).items())
            yield from (("class", base.__name__, base) for base in value.__bases__)
    elif cls in (staticmethod, classmethod):
        yield "inside", "", value.__func__
    elif cls is property:
        yield from (("inside", "", part) for part in (value.fget, value.fset, value.fdel))
    elif cls is types.MethodType:
        yield "inside", ".__self__", value.__self__
        yield "inside", "", value.__func__
    elif not (issubclass(cls, types.ModuleType) and by_reference(value)):
        yield from _of_instance(value, cls)


def _of_function(function: types.FunctionType) -> Iterator[_Child]:
    for name in global_names(function.__code__).reads:
        if name in function.__globals__:
            yield "global", name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield "variable", name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield "inside", ".__defaults__", function.__defaults__
    yield "inside", ".__kwdefaults__", function.__kwdefaults__
    yield from (("inside", f".{name}", member) for name, member in vars(function).items())


def _of_instance(value: Any, cls: type) -> Iterator[_Child]:
    if issubclass(cls, dict):
        for key, item in itertools.islice(dict.items(value), _WIDTH):
            yield "inside", f"[{_short(key)}]", item
            yield "inside", f" (its key {_short(key)})", key
    for container in (list, tuple, collections.deque):
        if issubclass(cls, container):
            for at, item in enumerate(itertools.islice(container.__iter__(value), _WIDTH)):
                yield "inside", f"[{at}]", item
    for unordered in (set, frozenset):
        if issubclass(cls, unordered):
            for item in itertools.islice(unordered.__iter__(value), _WIDTH):
                yield "inside", " (one of its elements)", item
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if type(member) is types.GetSetDescriptorType and name == "__dict__":
                with contextlib.suppress(TypeError):  # a proxy that has put on another class
                    yield from (("inside", f".{key}", item) for key, item in member.__get__(value, cls).items())
            elif type(member) is types.MemberDescriptorType:  # __slots__, and the fields of types written in C
                try:
                    yield "inside", f".{name}", member.__get__(value, cls)
                except AttributeError:  # not set
                    continue
    if not by_reference(cls):
        yield "class", cls.__name__, cls


def _short(key: object) -> str:
    if type(key) not in _ATOMS:
        return f"<{type(key).__name__}>"
    return text if len(text := repr(key)) <= 40 else text[:39] + "…"


def _path(name: str, root: object, culprit: object) -> tuple[list[str], str]:
    """Find how `culprit` is reached from `root`: clauses such as "`train` uses the notebook's `state`", and a path."""
    steps: list[Step] = []
    for step in walk(root, limit=200_000):
        steps.append(step)
        if step.value is culprit:
            break
    else:
        return [], ""
    hops = []
    while step.parent >= 0:
        hops.append(step)
        step = steps[step.parent]
    clauses, path = [], name
    for hop in reversed(hops):
        match hop.how:
            case "global":
                clauses.append(f"`{path}` uses the notebook's `{hop.label}`")
            case "variable":
                clauses.append(f"`{path}` uses `{hop.label}`, a variable of the function around it")
            case "class":
                clauses.append(f"`{path}` is a `{hop.label}`")
        path = path + hop.label if hop.how == "inside" else hop.label
    return clauses, path


def _diagnose(name: str, root: object, error: Exception, culprit: object) -> Problem:
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return Problem(f"`{name}` is nested too deeply to be packed", "flatten it, or save it to a file")
    kind = error.kind if isinstance(error, _Refused) else _kind(culprit)
    if kind:
        noun, advice = kind
    else:
        reason = f"{type(error).__name__}: {error}"
        noun, advice = f"a `{type_name(culprit)}`, which cannot be packed ({reason})", _OTHER
    clauses, path = _path(name, root, culprit)
    if not path:  # made while packing, or out of the walk's reach
        return Problem(f"`{name}` holds {noun}", advice)
    if clauses and clauses[-1].endswith(f"the notebook's `{path}`"):
        return Problem(", ".join(clauses) + f", {noun}", advice)
    return Problem(", ".join([*clauses, f"`{path}` is {noun}"]), advice)
