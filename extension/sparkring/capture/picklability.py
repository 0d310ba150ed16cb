"""Decides which values can be sent to the ranks. If a value cannot, finds the object inside it that is the cause."""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import itertools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from sparkring.capture.names import global_names

Namespace = dict[str, object]


# ── What must not be sent ────────────────────────────────────────────────────────────────────────────────────────────


class Problem(NamedTuple):
    """Why a value cannot be sent. `what` names the object that is the cause; `advice` says what the user can do."""

    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}; {self.advice}."


class Kind(NamedTuple):
    """A kind of object that must not be sent: `noun` names the kind, and `advice` says what the user can do instead."""

    noun: str
    advice: str


_DRIVER = "it exists only on the driver. Use Spark before the cell, and pass files or plain values to the ranks"
_FRAME = (
    "it exists only on the driver. Collect it with `.toPandas()`, pass it to `shards(…)` in the notebook, or give each "
    "rank a partition as `rows` with `%%barrier --data NAME`"
)
_FILE = Kind("an open file", "pass its path and open it in the cell")
_LOCK = "make it in the cell, or leave it out in the `__getstate__` of the object that holds it"
_ONCE = "it can only be used in this process. Make it in the cell, or pass a list"
_OTHER = "make it in the cell, or define a `__reduce__` in its class that says how to rebuild it"
_LIBRARY = Kind(
    "a loaded C library, or a part of one", "load it in the cell, and declare the types of its functions there"
)
_CUDA = Kind("a tensor in a GPU's memory", "move it with `.cpu()`, and back with `.to(device)` in the cell")

_IPYTHON = ("IPython", "ipykernel", "dbruntime")  # dbruntime has Databricks' display()

# A key is a top-level package and the name of a class in it. So a class is recognised without an import, and one key
# covers the SparkSession of classic Spark and of Spark Connect. Subclasses are recognised, too.
_KINDS: dict[tuple[str, str], Kind] = {
    ("pyspark", "SparkSession"): Kind("a SparkSession", _DRIVER),
    ("pyspark", "SparkContext"): Kind("a SparkContext", _DRIVER),
    ("pyspark", "SQLContext"): Kind("a SQLContext", _DRIVER),
    ("pyspark", "DataFrame"): Kind("a Spark DataFrame", _FRAME),
    ("pyspark", "RDD"): Kind("an RDD", "it exists only on the driver. Collect it with `.collect()`"),
    ("pyspark", "Broadcast"): Kind("a Spark broadcast variable", "only Spark can read it. Pass its `.value`"),
    ("py4j", "JavaObject"): Kind("a reference to an object in the JVM", _DRIVER),
    ("_io", "FileIO"): _FILE,
    ("_io", "TextIOWrapper"): _FILE,
    ("_io", "_BufferedIOBase"): _FILE,
    ("_socket", "socket"): Kind("a socket", "connect in the cell"),
    ("_thread", "lock"): Kind("a `_thread.lock`", _LOCK),
    ("_thread", "RLock"): Kind("a `_thread.RLock`", _LOCK),
    ("threading", "Thread"): Kind("a thread", "start it in the cell"),
    ("builtins", "generator"): Kind("a generator", _ONCE),
    ("builtins", "coroutine"): Kind("a coroutine", _ONCE),
    ("builtins", "async_generator"): Kind("an async generator", _ONCE),
    ("sparkring", "BackgroundRun"): Kind(
        "a background run", "call its `.result()` in the notebook, and pass the values that the cell needs"
    ),
    ("sparkring", "ProgramGang"): Kind("a warm gang", "it exists only on the driver. Call its methods in the notebook"),
    ("ctypes", "CDLL"): _LIBRARY,
    ("_ctypes", "CFuncPtr"): _LIBRARY,
    ("torch", "_BaseDataLoaderIter"): Kind(
        "an iterator over a DataLoader", "call `iter()` on the DataLoader in the cell"
    ),
    ("torch", "Tensor"): _CUDA,  # kind_of() returns it only for a tensor that is in a GPU's memory
    ("IPython", "InteractiveShell"): Kind("the notebook's own shell", "call `get_ipython()` in the cell"),
}
# Pickle writes only the module and the name of values of these types, and looks the values up when it loads them.
FOUND_BY_NAME = (type, types.FunctionType, functools._lru_cache_wrapper, typing.NewType, typing.TypeVar)
_IN_MEMORY = {("_io", "StringIO"), ("_io", "BytesIO")}  # files that are plain data


def kind_of_type(cls: type) -> Kind | None:
    """Return the kind of a type whose values must not be packed; None for other types."""
    names = [(_root(str(base.__module__)), base.__qualname__) for base in cls.__mro__]
    if not _IN_MEMORY.isdisjoint(names):
        return None
    return next((_KINDS[name] for name in names if name in _KINDS), None)


def kind_of(value: object) -> Kind | None:
    """Return the kind of a value that must not be packed, even if pickle could pack it; None for other values."""
    kind = kind_of_type(type(value))
    return None if kind is _CUDA and not getattr(value, "is_cuda", False) else kind


def _root(module: str) -> str:
    return module.partition(".")[0]


def type_name(value: object) -> str:
    """Return the name of a value's type as users know it, such as `numpy.ndarray`, `list` or the notebook's `Net`."""
    cls = type(value)
    if issubclass(cls, types.ModuleType):
        return "module"  # even for a lazily loaded module, whose type is a subclass of ModuleType
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


def by_reference(value: object) -> bool:
    """Return whether a value is a module, or a function or class that the rank can import by its name."""
    if issubclass(type(value), types.ModuleType):
        # For a lazily loaded module, such as the one in `from tensorflow import keras`, vars() has no `__name__`.
        return sys.modules.get(getattr(value, "__name__", "")) is not None
    if not issubclass(type(value), (type, types.FunctionType, types.BuiltinFunctionType)):
        return False
    home = getattr(value, "__module__", None)
    target: object = sys.modules.get(home or "")
    for part in str(getattr(value, "__qualname__", "")).split("."):
        target = getattr(target, part, None)
    return target is value and home != "__main__"


def name_in_main(value: object, namespace: Namespace | None) -> str | None:
    """Return the notebook's name under which pickle looks for `value`, whose type is one of FOUND_BY_NAME.

    For a value inside a class, this is the name of the outermost class. Return None if pickle would not find it.
    """
    if namespace is None or getattr(value, "__module__", None) != "__main__":
        return None
    root, *inner = str(getattr(value, "__qualname__", None) or getattr(value, "__name__", "")).split(".")
    target: object = namespace.get(root)
    for part in inner:
        target = vars(target).get(part) if isinstance(target, type) else None
        target = target.__func__ if isinstance(target, (staticmethod, classmethod)) else target
    return root if target is value else None


def ipython_names(namespace: Namespace, names: Iterable[str] = ()) -> frozenset[str]:
    """Return the names that IPython has redefined in the notebook: builtins such as `open`, and any of `names`.

    IPython's values refer to the notebook's shell, or need IPython on the rank. The rank has its own values.
    """

    def foreign(value: object) -> bool:
        if isinstance(value, types.MethodType):
            value = value.__self__
        # A function's `__module__` may mislead: IPython's `open` has the `__module__` of the builtin `open`.
        if isinstance(value, types.FunctionType):
            return _root(str(value.__globals__.get("__name__"))) in _IPYTHON
        return _root(str(type(value).__module__)) in _IPYTHON

    candidates = {*vars(builtins), "get_ipython", "display", "exit", "quit", "open", *names}
    return frozenset(name for name in candidates if name in namespace and foreign(namespace[name]))


class Refused(Exception):
    """Raised for a value of a kind that must not be sent."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind.noun)
        self.kind = kind


# ── Diagnosis: the path from a name to the object that cannot be sent ────────────────────────────────────────────────


class Step(NamedTuple):
    """One object of a walk, and how it was reached from its parent: `parent` is the index of the parent in the walk."""

    value: object
    parent: int
    how: Literal["root", "inside", "global", "variable", "class"]
    # If `how` is "inside", the text that follows the parent's path, such as `.loader` or `[3]`; otherwise, a name.
    label: str


_Child = tuple[Literal["inside", "global", "variable", "class"], str, object]
_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, range, types.ModuleType, types.CodeType)
_WIDTH = 10_000  # at most this many items of a container are examined


def walk(root: object, *, limit: int, enters: Callable[[object], bool] = lambda value: True) -> Iterator[Step]:
    """Yield `root` and the objects that it holds, directly or indirectly, without running their code.

    The walk ends after at most `limit` objects. It is breadth-first, so each object is reached by a shortest path. An
    object for which `enters` is false is yielded, but not searched.
    """
    steps = [Step(root, -1, "root", "")]
    seen = {id(root)}
    for at, step in enumerate(steps):  # the list grows during the loop
        yield step
        if not enters(step.value):
            continue
        with contextlib.suppress(RuntimeError):  # another thread changed the container: go on with the next object
            for how, label, child in _children(step.value):
                if len(steps) >= limit:
                    break
                if id(child) not in seen and type(child) not in _ATOMS:
                    seen.add(id(child))
                    steps.append(Step(child, at, how, label))


def _children(value: Any) -> Iterator[_Child]:
    # type() returns the real class of a proxy object; isinstance() would use the class that the proxy poses as.
    cls = type(value)
    if kind_of(value):  # the value itself is the cause, and it may hold very many objects, as a SparkSession does
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
        except ValueError:  # the variable has no value yet
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
    importable = by_reference(cls)
    for name, member in (_state_of_library_class if importable else _state)(cls):
        if name == "__dict__":
            # A proxy of wrapt poses as another class. It raises TypeError before wrapt 2, and AttributeError from
            # wrapt 2 on.
            with contextlib.suppress(TypeError, AttributeError):
                yield from (("inside", f".{key}", item) for key, item in member.__get__(value, cls).items())
        else:
            try:
                yield "inside", f".{name}", member.__get__(value, cls)
            except AttributeError:  # the attribute has no value
                continue
    if not importable:
        yield "class", cls.__name__, cls


def _state(cls: type) -> tuple[tuple[str, Any], ...]:
    """Return the descriptors of a class that give an instance's state: `__dict__`, `__slots__`, fields written in C."""
    return tuple(
        (name, member)
        for base in cls.__mro__
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
        or (type(member) is types.GetSetDescriptorType and name == "__dict__")
    )


# Classes of libraries have many members, and a model has many instances of them. The notebook's classes are not kept,
# since they may hold the user's data.
_state_of_library_class = functools.lru_cache(maxsize=None)(_state)


def _short(key: object) -> str:
    if type(key) not in _ATOMS:
        return f"<{type(key).__name__}>"
    return text if len(text := repr(key)) <= 40 else text[:39] + "…"


def _path(name: str, root: object, culprit: object) -> tuple[list[str], str]:
    """Find how `culprit` is reached from `root`, the value of `name`.

    Returns clauses, such as "`train` uses the notebook's `state`", and the path to the culprit from the last object
    that the clauses mention, such as `state.lock`. The path is empty if the culprit is not found.
    """
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
                clauses.append(f"`{path}` uses `{hop.label}`, a variable of the enclosing function")
            case "class":
                clauses.append(f"`{path}` is a `{hop.label}`")
        path = path + hop.label if hop.how == "inside" else hop.label
    return clauses, path


def diagnose(name: str, root: object, error: Exception, culprit: object) -> Problem:
    """Return why `root`, the value of `name`, could not be packed; `culprit` is the object whose packing began last."""
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return Problem(f"`{name}` is nested too deeply to be packed", "flatten it, or save it to a file")
    kind = error.kind if isinstance(error, Refused) else kind_of(culprit)
    if kind:
        noun, advice = kind
    else:
        reason = f"{type(error).__name__}: {error}"
        noun, advice = f"a `{type_name(culprit)}`, which cannot be packed ({reason})", _OTHER
    clauses, path = _path(name, root, culprit)
    if not path:  # the culprit was made while packing, or the walk did not reach it
        return Problem(f"`{name}` holds {noun}", advice)
    if clauses and clauses[-1].endswith(f"the notebook's `{path}`"):
        return Problem(", and ".join(clauses) + f", {noun}", advice)
    return Problem(", and ".join([*clauses, f"`{path}` is {noun}"]), advice)
