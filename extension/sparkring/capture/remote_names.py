"""Which of the notebook's names have a value on the ranks of a warm gang, and which value is newer.

A cell takes a name from the notebook unless the ranks have the newer value: one that a cell bound there, or that was
sent before and has not changed in the notebook since. So a cell finds the model that an earlier cell has trained, and
`lr = 0.01` in the notebook takes effect in the next cell.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import weakref
import zlib
from collections.abc import Container, Iterable, Mapping
from typing import Any

# Values of these types may change in place, so the same object may have a new value: they are compared by content.
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None), list, tuple, dict, set, frozenset)
_PLAIN_ELSEWHERE = (("numpy", "ndarray"), ("pandas", "DataFrame"), ("pandas", "Series"), ("torch", "Tensor"))


class Held:
    """The names that the ranks have bound, each with a fingerprint of its value in the notebook at that moment."""

    def __init__(self) -> None:
        self._ranks_with: dict[str, set[int]] = {}
        self._notebook: Mapping[str, Any] = {}
        self._seen: dict[str, _Print] = {}
        self._now: dict[str, _Print] = {}  # made since the last beside(); kept, as hashing a large value takes a while
        self._asked_for: frozenset[int] = frozenset()

    @property
    def names(self) -> set[str]:
        """The names that some rank has."""
        return set(self._ranks_with)

    def beside(self, notebook: Mapping[str, Any], ranks: Iterable[int]) -> Container[str]:
        """The names whose values on `ranks` are to be used; `in` computes whether a name is one of them."""
        self._notebook, self._asked_for = notebook, frozenset(ranks)
        self._now.clear()
        return self

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not self._ranks_with.get(name, set()) >= self._asked_for:
            return False
        if name not in self._notebook:
            return True
        seen = self._seen.get(name)
        return seen is not None and seen.is_of(self._notebook[name]) and seen == self._print(name)

    def bound(self, names: Iterable[str], ranks: Iterable[int]) -> None:
        """Note that `ranks` have bound or received `names`, so the notebook's current values are not newer."""
        for name in names:
            now = self._print(name) if name in self._notebook else None
            there = self._ranks_with.setdefault(name, set())
            if self._seen.get(name) != now:
                there.clear()  # the other ranks have an older value
            there.update(ranks)
            if now is not None:
                self._seen[name] = now

    def _print(self, name: str) -> _Print:
        value = self._notebook[name]
        if name not in self._now or not self._now[name].is_of(value):
            self._now[name] = _Print(value)
        return self._now[name]


class _Print:
    """A fingerprint of a value: which object it was, and a digest of its content if that can be compared."""

    def __init__(self, value: Any) -> None:
        try:
            self._identity: Any = weakref.ref(value)
        except TypeError:
            self._identity = id(value)
        self._content = _content(value)

    def is_of(self, value: Any) -> bool:
        """Whether this is a fingerprint of the object `value` itself."""
        return (self._identity() is value) if isinstance(self._identity, weakref.ref) else self._identity == id(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Print) or self._content != other._content:
            return False
        if isinstance(self._identity, weakref.ref) and isinstance(other._identity, weakref.ref):
            mine = self._identity()
            return mine is not None and mine is other._identity()
        return bool(self._identity == other._identity)

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any) -> bytes:
    """A digest of plain data, or of the plain attributes of an object whose class the notebook defines; else b''."""
    if not _is_plain(value):
        if type(value).__module__ != "__main__" or isinstance(value, type):
            return b""
        attributes = vars(value) if type(value).__dictoffset__ else {}  # without calling a `__getattr__` of its class
        value = {name: item for name, item in attributes.items() if _is_plain(item)}
    buffers: list[pickle.PickleBuffer] = []
    try:
        found = hashlib.sha256(pickle.dumps(value, protocol=5, buffer_callback=buffers.append))
        for buffer in buffers:  # the contents of arrays; CRC-32 takes a third of SHA-256's time
            found.update(zlib.crc32(buffer.raw()).to_bytes(4, "big"))
    except Exception:  # something in it cannot be pickled: only the value's identity is compared
        return b""
    return found.digest()


def _is_plain(value: Any) -> bool:
    elsewhere = (getattr(sys.modules.get(module), name, ()) for module, name in _PLAIN_ELSEWHERE)
    return isinstance(value, (*_PLAIN, *elsewhere))
