"""Reducers for objects of the standard library and of ordinary Python classes."""

from __future__ import annotations

import contextlib
import copyreg
import enum
import functools
import importlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sparkring.capture.picklability import by_reference
from sparkring.capture.reducers.base import Reduced, Reducer

_HOOKS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_HEAP_TYPE = 1 << 9  # in `type.__flags__`: the type was made by a class statement
# The attributes of a class that TypedDict makes; `__bases__` and `__orig_bases__` are handled separately.
_OF_TYPED_DICT = (
    *("__module__", "__qualname__", "__doc__", "__annotations__", "__total__", "__required_keys__"),
    *("__optional_keys__", "__readonly_keys__", "__mutable_keys__", "__closed__", "__extra_items__"),
)
# The functions that `functools.singledispatch` makes are recognised by this code object, which they all share.
_DISPATCHER = functools.singledispatch(lambda _: None).__code__  # type: ignore[attr-defined]


def reducer_for(cls: type) -> Reducer | None:
    """Return the reducer for the values of a type, if it needs one."""
    if issubclass(cls, functools.cached_property):
        return _cached_property
    if cls is types.FunctionType:
        return _dispatcher
    if issubclass(cls, type) and cls.__name__ == "_TypedDictMeta":  # of typing or typing_extensions
        return _typed_dict
    if _has_unguarded_lookups(cls):
        return _by_state
    return None


def _cached_property(value: functools.cached_property[Any]) -> Reduced:
    """Pack a `cached_property` without the lock that it has before Python 3.12."""
    return type(value), (value.func,), (value.attrname, value.__doc__), None, None, _name_property


def _name_property(made: functools.cached_property[Any], state: tuple[str | None, str | None]) -> None:
    made.attrname, made.__doc__ = state


def _dispatcher(value: types.FunctionType) -> Reduced | None:
    """Pack a `functools.singledispatch` function as its implementations, without its cache of weak references.

    Return None for other functions, and for a function that the rank can import with the same implementations.
    """
    if value.__code__ is not _DISPATCHER:
        return None
    registry: dict[Any, Any] = dict(value.registry)  # type: ignore[attr-defined]
    if by_reference(value):
        # The rank imports the function, which then lacks the implementations that the notebook has added.
        added = [item for item in registry.items() if not all(map(by_reference, item))]
        if not added:
            return None
        return _imported, (value.__module__, value.__qualname__), added, None, None, _register
    return functools.singledispatch, (registry.pop(object),), registry.items(), None, None, _register


def _imported(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _register(dispatcher: Any, implementations: Iterable[tuple[type, Callable[..., Any]]]) -> None:
    for cls, implementation in implementations:
        dispatcher.register(cls, implementation)


def _typed_dict(value: type) -> Reduced | None:
    """Pack a class made by TypedDict. cloudpickle would pass `dict` as its base, which TypedDict refuses.

    Return None for a class that the rank can import.
    """
    if by_reference(value):
        return None
    generic = tuple(base for base in value.__bases__ if base is not dict)
    original = vars(value).get("__orig_bases__")
    state = {name: getattr(value, name) for name in _OF_TYPED_DICT if hasattr(value, name)}
    return _make_typed_dict, (type(value), value.__name__, generic, original), state, None, None, _set_attributes


def _make_typed_dict(meta: Any, name: str, generic: tuple[type, ...], original: Any) -> Any:
    return meta(name, generic, {} if original is None else {"__orig_bases__": original})


def _set_attributes(made: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(made, name, value)


# ── Classes that are made with keywords ──────────────────────────────────────────────────────────────────────────────

_MAKING = ("__call__", "__init__", "__new__", "__prepare__")  # the methods of a metaclass that get a class's keywords


def is_made_by_code(cls: type) -> bool:
    """Return whether code that is not Python's own runs when the class is made, for which keywords may be needed."""
    hooks = [base for base in cls.__mro__[1:] if "__init_subclass__" in vars(base)]
    return any(base.__module__ not in ("builtins", "typing") for base in hooks) or not by_reference(type(cls))


def make_class(make: Callable[..., type], meta: type, name: str, bases: tuple[Any, ...], *more: Any) -> type:
    """On a rank: make a class with cloudpickle's function `make`, without the code that ran when it was first made.

    What this code has done to the class is in the class's state. The keywords of the class are not known. The code of
    installed packages does run, unless it needs these keywords: it may put the class into a register of the package.
    """
    mros = [getattr(base, "__mro__", ()) for base in types.resolve_bases(bases)]
    hooks = [(base, "__init_subclass__") for mro in mros for base in mro if base is not object]
    hooks += [(base, method) for base in meta.__mro__ for method in _MAKING]
    hooks = [(cls, method) for cls, method in hooks if method in vars(cls) and cls.__flags__ & _HEAP_TYPE]
    own = [(cls, method) for cls, method in hooks if not by_reference(cls)]
    with _without(own):
        try:
            return make(meta, name, bases, *more)
        except TypeError:  # a keyword is missing
            with _without([hook for hook in hooks if hook not in own]):
                return make(meta, name, bases, *more)


def attributes_of_members(cls: type) -> dict[str, dict[str, Any]]:
    """Return the attributes that an enumeration's own code has given its members; cloudpickle drops them."""
    if not issubclass(cls, enum.Enum):
        return {}
    of_python = ("_name_", "_value_", "_sort_order_", "_inverted_", "__objclass__")
    own = {m.name: {name: v for name, v in vars(m).items() if name not in of_python} for m in cls}
    return {name: attributes for name, attributes in own.items() if attributes}


def set_members(
    set_state: Callable[[Any, Any], object], attributes: dict[str, dict[str, Any]], cls: Any, state: Any
) -> None:
    """On a rank: give an enumeration its state, and its members their `attributes`."""
    set_state(cls, state)
    for name, own in attributes.items():
        vars(cls[name]).update(own)


@contextlib.contextmanager
def _without(methods: Iterable[tuple[type, str]]) -> Iterator[None]:
    """Remove methods from their classes, and put them back on exit."""
    removed = {(cls, name): vars(cls)[name] for cls, name in methods}
    for cls, name in removed:
        type.__delattr__(cls, name)
    try:
        yield
    finally:
        for (cls, name), method in removed.items():
            type.__setattr__(cls, name, method)


def _has_unguarded_lookups(cls: type) -> bool:
    """Return whether pickle would call the `__getattr__` of the class on an object that has no attributes yet.

    Pickle looks for hooks such as `__setstate__` on an object that it has just made. If the class has none, this lookup
    calls `__getattr__`, which often fails, because it reads attributes that the object does not have yet.
    """
    own = [vars(base) for base in cls.__mro__[:-1]]
    if not any("__getattr__" in names for names in own) or any(hook in names for names in own for hook in _HOOKS):
        return False
    solid = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    return solid in (object, dict, list) and cls not in copyreg.dispatch_table


def _by_state(value: Any) -> Reduced:
    """Do what `object.__reduce_ex__` does, but never call the class's `__getattr__`, here or on the rank."""
    cls = type(value)
    slots = {}
    for name in copyreg._slotnames(cls):  # type: ignore[attr-defined]
        try:
            slots[name] = object.__getattribute__(value, name)
        except AttributeError:  # the slot has no value
            continue
    attributes = object.__getattribute__(value, "__dict__") if cls.__dictoffset__ else {}
    items = iter(list.__iter__(value)) if issubclass(cls, list) else None
    pairs = iter(dict.items(value)) if issubclass(cls, dict) else None
    return copyreg.__newobj__, (cls,), (attributes, slots), items, pairs, _set_state  # type: ignore[attr-defined]


def _set_state(made: Any, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, slots = state
    if attributes:
        object.__getattribute__(made, "__dict__").update(attributes)
    for name, item in slots.items():
        object.__setattr__(made, name, item)
