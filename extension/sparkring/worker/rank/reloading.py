"""Runs a changed module again, so that objects which the rank already has get the new code, as `%autoreload` does."""

from __future__ import annotations

import abc
import contextlib
import linecache
import types
from typing import Any

_OWN_TO_A_CLASS = frozenset({"__dict__", "__weakref__", "_abc_impl"})


def reload(module: types.ModuleType) -> None:
    """Run the module's file again in its namespace.

    Functions and classes stay the same objects where that is possible, so `from module import name` and instances that
    exist use the new code. If the file raises an error, the module stays as it was.
    """
    spec = module.__spec__
    assert spec is not None
    assert spec.origin is not None
    namespace = vars(module)
    before = dict(namespace)
    # The file is compiled here, because a .pyc file may be of the old source: see SentModules.
    with open(spec.origin, "rb") as file:
        code = compile(file.read(), spec.origin, "exec", dont_inherit=True)
    linecache.checkcache(spec.origin)
    try:
        exec(code, namespace)
    except BaseException:
        namespace.clear()
        namespace.update(before)
        raise
    update = _Update(module.__name__)
    for name, new in list(namespace.items()):
        old = before.get(name)
        if old is not new and update.given(old, new):
            namespace[name] = old


class _Update:
    """Gives the functions and classes that a module had the code of those that it has now."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._met: dict[tuple[int, int], bool] = {}  # the pairs that given() has met: the result

    def given(self, old: Any, new: Any) -> bool:
        """Give `old` the code of `new`, if both are functions or classes of the module; return whether that is so."""
        pair = id(old), id(new)
        if pair not in self._met:
            self._met[pair] = True  # a function may refer to the class that it belongs to
            self._met[pair] = self._given(old, new)
        return self._met[pair]

    def _given(self, old: Any, new: Any) -> bool:
        if not getattr(old, "__module__", None) == getattr(new, "__module__", None) == self._module:
            return False
        if isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType):
            return self._function(old, new)
        return isinstance(old, type) and isinstance(new, type) and self._class(old, new)

    def _function(self, old: types.FunctionType, new: types.FunctionType) -> bool:
        try:
            old.__code__ = new.__code__
        except ValueError:  # the number of variables from the enclosing function differs
            return False
        pairs = zip(old.__closure__ or (), new.__closure__ or (), strict=True)
        for name, (ours, theirs) in zip(new.__code__.co_freevars, pairs, strict=True):
            # A decorator's wrapper has the function in such a variable. `__class__`, for super(), stays the old class.
            with contextlib.suppress(ValueError):  # the variable has no value yet
                if name != "__class__" and not self.given(ours.cell_contents, theirs.cell_contents):
                    ours.cell_contents = theirs.cell_contents
        old.__defaults__, old.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
        old.__doc__, old.__annotations__ = new.__doc__, new.__annotations__
        wrapped = old.__dict__.get("__wrapped__")
        old.__dict__.clear()
        old.__dict__.update(new.__dict__)
        if wrapped is not None and self.given(wrapped, new.__dict__.get("__wrapped__")):
            old.__dict__["__wrapped__"] = wrapped
        return True

    def _class(self, old: type, new: type) -> bool:
        if type(old) not in (type, abc.ABCMeta) or type(new) is not type(old) or _shape(old) != _shape(new):
            return False
        for name in vars(old).keys() - vars(new).keys() - _OWN_TO_A_CLASS:
            delattr(old, name)
        for name, value in list(vars(new).items()):
            if name in _OWN_TO_A_CLASS or isinstance(value, types.MemberDescriptorType):
                continue
            if not self.given(vars(old).get(name), value):
                with contextlib.suppress(AttributeError):  # an attribute that cannot be set, such as __mro__
                    setattr(old, name, value)
            for function in _functions_of(vars(old).get(name)):
                cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                for variable, cell in cells:
                    if variable == "__class__":
                        cell.cell_contents = old
        return True


def _shape(kind: type) -> tuple[Any, ...]:
    """Return what must be equal so that instances of one class can become instances of the other."""
    bases = [(base.__module__, base.__qualname__) for base in kind.__bases__]
    return bases, vars(kind).get("__slots__"), kind.__basicsize__


def _functions_of(value: Any) -> list[types.FunctionType]:
    inside = [value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel"))]
    return [function for function in inside if isinstance(function, types.FunctionType)]
