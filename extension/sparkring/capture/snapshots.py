"""Tells whether, and where, an object has changed in place.

A snapshot holds what an object consisted of at one moment. The object's parts have paths, such as `.layers[0].p`; the
same paths lead to the same parts of the copy that a rank has. So a change in the notebook can be repeated on the ranks.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import io
import marshal
import pickle
import sys
import time
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from sparkring.capture.picklability import by_reference
from sparkring.capture.reducers import tensorflow, torch

# How a part is reached from its owner: an attribute ("."), an item ("["), or the type of an instance ("type").
Step: TypeAlias = tuple[str, Any]
Path: TypeAlias = tuple[Step, ...]

ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented)))
_WIDE = 1_000  # the items of larger containers are not parts of their own
_MANY = 50_000  # an object has at most about this many parts
_DEEP = 100  # parts that are nested more deeply are compared as a whole
# A class is compared without these attributes: Python or a library sets them when it first uses the class.
_CACHES = frozenset(
    (
        *("__dict__", "__weakref__", "__slotnames__", "_abc_impl", "__annotate_cache__", "__annotations_cache__"),
        *("__pydantic_core_schema__", "__pydantic_validator__", "__pydantic_serializer__"),
        *("__pydantic_setattr_handlers__", "__pydantic_complete__"),
    )
)
# Objects of these packages are compared through their `__reduce_ex__`, since their attributes are partly caches.
_VALUES = frozenset(("numpy", "pandas", "polars", "pyarrow", "scipy"))
# Objects of these packages are compared by their identity. (A part of them is compared by content: see _content().)
_OPAQUE = frozenset(("tensorflow", "keras", "tf_keras", "jax", "jaxlib", "pyspark", "py4j", "sparkring", "IPython"))
_UNCOMPARED = (weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType)
_CONTAINERS = (
    *(list, tuple, dict, set, frozenset),
    *(collections.deque, collections.OrderedDict, collections.defaultdict),
)
_SEQUENCES = (list, collections.deque)
# Other classes of the standard library are compared through their `__reduce_ex__`.
_NAMESPACES = (("types", "SimpleNamespace"), ("argparse", "Namespace"))


class Change(NamedTuple):
    """A part that has changed.

    The part has been "deleted" or "added", or it is "another" object, or the same object has "changed". If the object
    is an array that has been changed "in place", its content can be copied into the ranks' array. If the other object
    is also another part of the value, `same_as` is the path of that part.
    """

    path: Path
    what: Literal["deleted", "added", "another", "changed", "in place"]
    same_as: Path | None = None


class ValueSnapshot:
    """What `value` consists of now. `seconds` is the CPU time that it took to find out.

    `is_data` says whether the value is plain data, such as a list of numbers, an array or a DataFrame, which has no
    parts. `holds_arrays` says whether the value is something else that contains arrays, as a model does.
    """

    def __init__(self, value: Any) -> None:
        began = time.thread_time()
        walk = _Walk(value)
        self.parts = walk.parts
        self.is_data = walk.is_data(value)
        self.holds_arrays = walk.holds_arrays and not self.is_data
        self._identity = _identity(value)
        self.seconds = time.thread_time() - began

    def is_of(self, value: Any) -> bool:
        """Return whether this is a snapshot of the object `value` itself."""
        return _is(self._identity, _identity(value))

    def equals(self, now: ValueSnapshot) -> bool:
        """Return whether a later snapshot is of the same object, and nothing in it has changed."""
        return now is self or (_is(self._identity, now._identity) and self.changes(now) == [])

    def changes(self, now: ValueSnapshot) -> list[Change] | None:
        """Return what differs in a later snapshot of the same object; None if the whole object counts as changed."""
        replaced: set[Path] = set()
        changes = []

        def add(change: Change) -> None:
            path, what, same_as = change
            # A tuple cannot be changed, nor can the class of an instance be replaced alone.
            while path and what != "in place" and (path[-1][0] == "type" or now.parts[path[:-1]].kind is tuple):
                path, what, same_as = path[:-1], "another", None
            if replaced.isdisjoint(_to(path)):
                changes.append(Change(path, what, same_as))
                if what != "in place":
                    replaced.add(path)

        for path, part in now.parts.items():
            before = self.parts.get(path)
            if before is None:
                if part.kind is not _Cached:  # otherwise, the value has only been computed
                    add(Change(path, "added", part.same_as))
            elif not before.equals(part) or _moved(part.kind, before.keys, part.keys):
                is_same = part.identity is not None and _is(before.identity, part.identity)
                what: Any = "another" if not is_same else "in place" if part.is_array else "changed"
                add(Change(path, what, part.same_as))
        for path in self.parts.keys() - now.parts.keys():
            if path[:-1] in now.parts:  # otherwise, something else on the way to this part has changed
                add(Change(path, "deleted"))
        if () in replaced:
            # Its items can be sent as the places where the ranks have them.
            is_container = issubclass(now.parts[()].kind, (dict, *_SEQUENCES))
            return [Change((), "another")] if is_container and not now.is_data else None
        for path, part in now.parts.items() if replaced else ():
            if part.same_as and ("type", "") not in path and not replaced.isdisjoint(_to(part.same_as)):
                add(Change(path, "another", part.same_as))
        return changes

    def places(self) -> Iterator[tuple[object, Path]]:
        """Yield the parts that have an identity and still exist, with their paths."""
        for path, part in self.parts.items():
            if isinstance(part.identity, weakref.ref) and (value := part.identity()) is not None:
                yield value, path


class _Cached(NamedTuple):
    """The value that a `functools.cached_property` has computed."""

    value: Any


class _ValuePart(NamedTuple):
    kind: type
    identity: Any = None  # a weak reference, an id, or None if the part has no identity that matters
    content: Any = None  # what else is compared
    is_array: bool = False  # whether the content of the object can be copied into the ranks' object
    same_as: Path | None = None  # where the object was first met
    keys: tuple[Any, ...] = ()  # of a dict; or the ids of the objects in a list, with None for numbers and strings

    def equals(self, other: _ValuePart) -> bool:
        return (
            self.kind is other.kind
            and _is(self.identity, other.identity)
            and self.same_as == other.same_as
            and (self.content is other.content or self.content == other.content)
        )


def _identity(value: Any) -> Any:
    try:
        return weakref.ref(value)  # the same weak reference as long as the object exists
    except TypeError:
        return id(value)


def _is(one: Any, other: Any) -> bool:
    if isinstance(one, weakref.ref):
        return one is other and one() is not None
    return one is other or (isinstance(one, int) and isinstance(other, int) and one == other)


def _to(path: Path) -> Iterator[Path]:
    """Yield the paths of a part and of everything that contains it."""
    return (path[:length] for length in range(len(path) + 1))


def _moved(kind: type, before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Return whether items of a container have moved.

    They have not if others are only added at its end. If items of a dict are removed, the others do not move.
    """
    if before == now:
        return False
    if issubclass(kind, dict):
        kept = set(now)
        left = tuple(key for key in before if key in kept)
        return left != now[: len(left)]
    positions = {key: at for at, key in enumerate(before) if key is not None}
    return len(now) < len(before) or any(positions.get(key, at) != at for at, key in enumerate(now))


# ── Parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Walk:
    """Finds the parts of `root`. Parts that have no parts themselves are compared by a digest of their content."""

    def __init__(self, root: Any) -> None:
        self.parts: dict[Path, _ValuePart] = {}
        self.holds_arrays = False
        self._layouts: dict[type, _Layout] = {}  # of the notebook's classes, which the next cell may change
        waiting: list[tuple[Path, Any]] = [((), root)]
        seen: dict[int, Path] = {}
        while waiting:
            path, value = waiting.pop()
            kind = type(value)
            if kind in ATOMS or (kind in _CONTAINERS and not value and path):
                self.parts[path] = _ValuePart(kind, None, value if kind in ATOMS else None)
            elif kind is _Cached:
                is_atom = type(value.value) in ATOMS
                self.parts[path] = _ValuePart(
                    kind, *((None, value.value) if is_atom else (_identity(value.value), None))
                )
            elif id(value) in seen:
                self.parts[path] = _ValuePart(kind, same_as=seen[id(value)])
            else:
                seen[id(value)] = path
                layout = self.layout(kind)
                inner = None
                if len(path) < _DEEP and len(self.parts) + len(waiting) < _MANY:
                    inner = self._inner(value, kind, layout)
                if inner is None or layout.is_tensor:
                    self.parts[path] = self._leaf(value, kind, layout)
                else:
                    fixed: Any = len(value) if isinstance(value, tuple) else None
                    fixed = value.default_factory if kind is collections.defaultdict else fixed
                    fixed = value.maxlen if kind is collections.deque else fixed
                    keys: tuple[Any, ...] = ()
                    if isinstance(value, dict):
                        keys = tuple(value)
                    elif isinstance(value, _SEQUENCES):
                        keys = tuple(None if type(item) in ATOMS else id(item) for item in value)
                    identity = None if kind in _CONTAINERS else _identity(value)
                    kind = tuple if isinstance(value, tuple) else kind
                    self.parts[path] = _ValuePart(kind, identity, fixed, keys=keys)
                # The first parts come first, so that objects that are added later leave them as they are.
                waiting += [((*path, step), item) for step, item in reversed(inner or ())]

    def _leaf(self, value: Any, kind: type, layout: _Layout) -> _ValuePart:
        if layout.is_tensor:
            self.holds_arrays = True
            return _ValuePart(kind, _identity(value), torch.content(value), True)
        if isinstance(value, type) and by_reference(value):
            return _ValuePart(kind, _identity(value))
        pickler = _Content(self.layout)
        content = pickler.digest(value)
        self.holds_arrays |= pickler.met_arrays
        has_identity = layout.is_array or isinstance(value, (types.FunctionType, type)) or kind is object
        return _ValuePart(kind, _identity(value) if has_identity else None, content, layout.is_array)

    def _inner(self, value: Any, kind: type, layout: _Layout) -> list[tuple[Step, Any]] | None:
        """Return the parts of an object, or None if it is compared as a whole."""
        inner: list[tuple[Step, Any]]
        if isinstance(value, type):
            if by_reference(value):
                return None
            inner = [((".", name), member) for name, member in _members(value)]
            return inner if layout.by_reference else [*inner, (("type", ""), kind)]
        if layout.is_tensor:
            return [((".", name), item) for name, item in torch.attributes(value)]
        is_container = kind in _CONTAINERS
        if not is_container and not layout.is_plain:
            return None
        if is_container and (len(value) > _WIDE or self.is_data(value)):
            return None
        inner = []
        if not is_container:
            inner = [((".", name), item) for name, item in _attributes(value, layout)]
            if layout.cached and kind.__dictoffset__:
                own = object.__getattribute__(value, "__dict__")
                inner += [((".", name), _Cached(own[name])) for name in layout.cached & own.keys()]
            if not layout.by_reference:
                inner.append((("type", ""), kind))
        if isinstance(value, dict):
            if len(value) > _WIDE or not all(type(key) in ATOMS for key in value):
                return None
            inner += [(("[", key), item) for key, item in value.items()]
        elif isinstance(value, (tuple, *_SEQUENCES)):
            if len(value) > _WIDE:
                return None
            inner += [(("[", at), item) for at, item in enumerate(value)]
        elif isinstance(value, (set, frozenset)):
            return None
        return inner

    def is_data(self, value: Any, depth: int = _DEEP) -> bool:
        """Return whether a value has no parts of its own: a number, an array, a DataFrame, or a container of these."""
        kind = type(value)
        if kind in ATOMS:
            return True
        if kind in _CONTAINERS:
            if len(value) > _WIDE or not depth:
                return True
            items: Iterable[Any] = value.values() if issubclass(kind, dict) else value
            return all(type(item) in ATOMS or self.is_data(item, depth - 1) for item in items)
        layout = self.layout(kind)
        if kind is object or layout.is_plain or layout.is_tensor or layout.is_opaque:
            return False
        return not issubclass(kind, (type, types.FunctionType))

    def layout(self, kind: type) -> _Layout:
        layout = _LIBRARY_LAYOUTS.get(kind) or self._layouts.get(kind)
        if layout is None:
            layout = _Layout(kind)
            (_LIBRARY_LAYOUTS if layout.by_reference else self._layouts)[kind] = layout
        return layout


class _Layout:
    """How the instances of a class keep their state. `is_plain` says whether Python can see all of it."""

    def __init__(self, kind: type) -> None:
        slots = [
            (name, member)
            for base in kind.__mro__
            if "__slots__" in vars(base)
            for name, member in vars(base).items()
            if type(member) is types.MemberDescriptorType
        ]
        self.slots = slots
        self.cached = {
            name
            for base in kind.__mro__
            for name, member in vars(base).items()
            if isinstance(member, functools.cached_property)
        }
        self.left_out = self.cached | torch.transient(kind)
        self.is_tensor = issubclass(kind, torch.tensor_types())
        self.is_array = issubclass(kind, getattr(sys.modules.get("numpy"), "ndarray", ()))
        self.is_opaque = any(_package(base) in _OPAQUE for base in kind.__mro__)
        self.by_reference = by_reference(kind)
        solid = next((base for base in (dict, list, tuple, set, frozenset) if issubclass(kind, base)), object)
        # As `object.__reduce_ex__` does, compare the size of an instance with the size of the state that Python knows.
        words = len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
        package = _package(kind)
        self.is_plain = (
            kind is not solid
            and kind.__itemsize__ == solid.__itemsize__
            and kind.__basicsize__ <= solid.__basicsize__ + words * object.__basicsize__ // 2
            and package not in _VALUES
            and not self.is_opaque
            and not self.is_tensor
            and not issubclass(kind, (BaseException, *_UNCOMPARED))
            and (
                package not in sys.stdlib_module_names
                or package == "__main__"
                or (kind.__module__, kind.__name__) in _NAMESPACES
            )
        )


_LIBRARY_LAYOUTS: dict[type, _Layout] = {}


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _attributes(value: Any, layout: _Layout) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind.__dictoffset__:
        for name, item in object.__getattribute__(value, "__dict__").items():
            if name not in layout.left_out:
                yield name, item
    for name, member in layout.slots:
        try:
            yield name, member.__get__(value, kind)
        except AttributeError:  # the attribute has no value
            continue


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    yield from ((name, getattr(cls, name)) for name in ("__bases__", "__name__", "__qualname__"))
    for name, member in vars(cls).items():
        if name not in _CACHES and not isinstance(member, _DESCRIPTORS):
            yield name, member


# ── Content ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class _ContentMark:
    """Stands for an object whose content is written in its place."""


class _Content(pickle.Pickler):
    """Writes the content of an object, to be compared with its content at another time. It is never loaded."""

    def __init__(self, layout: Callable[[type], _Layout]) -> None:
        self._stream = io.BytesIO()
        self._buffers: list[pickle.PickleBuffer] = []
        self._layout = layout
        self.met_arrays = False
        super().__init__(self._stream, protocol=5, buffer_callback=self._buffers.append)

    def digest(self, value: Any) -> Any:
        """Return a digest of an object's content, or of its identity if its content cannot be written."""
        try:
            self.dump(value)
            sums = [zlib.crc32(buffer.raw()) for buffer in self._buffers]
        except Exception:  # the code of the value's class may raise anything
            return "identity", id(value)
        written = self._stream.getbuffer()
        return len(written), hash(bytes(written)), tuple(sums)

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if value is _ContentMark:
            return NotImplemented
        if isinstance(value, types.ModuleType):
            return _as(value.__name__ if by_reference(value) else _of_module(value))
        if isinstance(value, _UNCOMPARED):
            return _as(kind.__name__)
        if kind is types.CodeType:
            # Version 2 has no references between objects, which would depend on how often an object is referred to.
            return _as(marshal.dumps(value, 2))
        if kind is types.FunctionType or isinstance(value, type):
            if by_reference(value):
                return _as(f"{value.__module__}.{value.__qualname__}")
            return _as(_of_function(value) if kind is types.FunctionType else dict(_members(value)))
        if kind is types.CellType:
            try:
                return _as(value.cell_contents)
            except ValueError:  # the variable has no value yet
                return _as(None)
        if kind is types.MethodType:
            return _as((value.__self__, value.__func__))
        if kind in (staticmethod, classmethod):
            return _as(value.__func__)
        if kind is property:
            return _as((value.fget, value.fset, value.fdel))
        if isinstance(value, functools.cached_property):
            return _as(value.func)
        if kind is functools._lru_cache_wrapper:
            return _as((value.__wrapped__, value.cache_parameters()))
        if kind is types.MappingProxyType:
            return _as(dict(value))
        layout = self._layout(kind)
        if layout.is_tensor:
            self.met_arrays = True
            return _as((torch.content(value), torch.attributes(value)))
        if kind.__module__ == "numpy":
            self.met_arrays |= layout.is_array
            return NotImplemented
        if layout.is_plain:
            items = list(value.items()) if isinstance(value, dict) else None
            if isinstance(value, (list, tuple, set, frozenset)):
                items = list(value)
            return _as((id(value), kind, dict(_attributes(value, layout)), items))
        if layout.is_opaque:
            content = tensorflow.content(value)
            self.met_arrays |= content is not None
            return _as((id(value), content))
        return _as((kind, _reduced(value, kind)))


def _as(content: Any) -> Any:
    # The content is passed as the state, which is written after pickle has noted the object: it may contain itself.
    return _ContentMark, (), content


def _reduced(value: Any, kind: type) -> Any:
    """Return how the object itself says that it is rebuilt, or its identity if it cannot say so."""
    try:
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(5) if reduce is None else reduce(value)
    except Exception:  # the code of the value's class may raise anything
        return id(value)
    if not isinstance(reduced, tuple):
        return reduced
    made, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    return made, arguments, state, items and list(items), pairs and list(pairs)


def _of_module(module: types.ModuleType) -> dict[str, Any]:
    return {name: member for name, member in vars(module).items() if not name.startswith("__")}


def _of_function(function: types.FunctionType) -> Any:
    """Return what a function of the notebook consists of. Names that it reads in the notebook are compared apart."""
    used = {}
    if function.__globals__.get("__name__") != "__main__":
        names = function.__code__.co_names
        used = {name: function.__globals__[name] for name in names if name in function.__globals__}
    return (
        *(function.__code__, function.__defaults__, function.__kwdefaults__, function.__closure__),
        *(function.__name__, function.__qualname__, function.__doc__),
        # From Python 3.14, annotations are not evaluated before they are asked for.
        *(getattr(function, "__annotate__", None) or function.__annotations__, vars(function), used),
    )
