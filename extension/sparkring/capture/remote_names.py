"""Records which names have a value on the ranks of a warm gang, and tells whether the notebook's value is newer.

A cell uses the ranks' value of a name if an earlier cell assigned this value on the ranks, or if the value was sent to
the ranks earlier. But if the notebook's value has changed since then, the notebook's value is sent. So a cell can use
the model that an earlier cell has trained, and `lr = 0.01` in the notebook takes effect in the next cell.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import weakref
import zlib
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

# Values of these types may change in place, so the same object may have a new value: they are compared by content.
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None), list, tuple, dict, set, frozenset)
_PLAIN_ELSEWHERE = (("numpy", "ndarray"), ("pandas", "DataFrame"), ("pandas", "Series"), ("torch", "Tensor"))


class RemoteNames:
    """The names that ranks have bound or received, each with a fingerprint of the notebook's value at that moment."""

    def __init__(self) -> None:
        self._ranks_with: dict[str, set[int]] = {}  # for each name, the ranks that have the newest value
        self._on_rank: dict[int, set[str]] = {}  # the names that each rank has
        self._notebook: Mapping[str, Any] = {}
        self._seen: dict[str, _Fingerprint] = {}
        # The fingerprints made since the last call of beside(). Making them again would take a while for large values.
        self._now: dict[str, _Fingerprint] = {}
        self._asked_for: frozenset[int] = frozenset()

    @property
    def names(self) -> set[str]:
        """Return the names that have a value on at least one rank."""
        return set().union(*self._on_rank.values())

    def beside(self, notebook: Mapping[str, Any], ranks: Iterable[int]) -> Container[str]:
        """Return a container of the names whose values on `ranks` should be used instead of the notebook's."""
        self._notebook, self._asked_for = notebook, frozenset(ranks)
        self._now.clear()
        return self

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not self._ranks_with.get(name, set()) >= self._asked_for:
            return False
        if name not in self._notebook:
            return True
        seen = self._seen.get(name)
        return seen is not None and seen.is_of(self._notebook[name]) and seen == self._fingerprint(name)

    def update(self, bound: Mapping[int, Collection[str]], gone: Mapping[int, Collection[str]]) -> None:
        """Record the names that are new on each rank, and those that are no longer there."""
        for rank, names in gone.items():
            for name in names:
                self._on_rank.get(rank, set()).discard(name)
                self._ranks_with.get(name, set()).discard(rank)
        for rank, names in bound.items():
            self._on_rank.setdefault(rank, set()).update(names)
        for name in set().union(*bound.values()):
            self.kept([name], [rank for rank, names in bound.items() if name in names])

    def kept(self, names: Iterable[str], ranks: Iterable[int]) -> None:
        """Record that `ranks` may have bound or received `names`. A rank that lacks a name has neither bound
        nor received it.

        After this call, the notebook's current values do not count as newer.
        """
        ranks = list(ranks)
        for name in names:
            having = [rank for rank in ranks if name in self._on_rank.get(rank, ())]
            if not having:
                continue
            now = self._fingerprint(name) if name in self._notebook else None
            there = self._ranks_with.setdefault(name, set())
            if self._seen.get(name) != now:
                there.clear()  # the other ranks have an older value
            there.update(having)
            if now is not None:
                self._seen[name] = now

    def _fingerprint(self, name: str) -> _Fingerprint:
        value = self._notebook[name]
        if name not in self._now or not self._now[name].is_of(value):
            self._now[name] = _Fingerprint(value)
        return self._now[name]


class _Fingerprint:
    """A fingerprint of a value: which object it was, and a digest of its content, if the content can be compared."""

    def __init__(self, value: Any) -> None:
        try:
            self._identity: Any = weakref.ref(value)
        except TypeError:
            self._identity = id(value)
        self._content = _content(value)

    def is_of(self, value: Any) -> bool:
        """Return whether this is a fingerprint of the object `value` itself."""
        return self._identity() is value if isinstance(self._identity, weakref.ref) else self._identity == id(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Fingerprint) or self._content != other._content:
            return False
        if isinstance(self._identity, weakref.ref) and isinstance(other._identity, weakref.ref):
            mine = self._identity()
            return mine is not None and mine is other._identity()
        return bool(self._identity == other._identity)

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any) -> bytes:
    """Return a digest of a plain value, or of the plain attributes of an object whose class the notebook defines.

    Returns b'' for other values, and for values that cannot be pickled.
    """
    if not _is_plain(value):
        if type(value).__module__ != "__main__" or isinstance(value, type):
            return b""
        # For an object without a `__dict__`, vars() would call the `__getattr__` of its class.
        attributes = vars(value) if type(value).__dictoffset__ else {}
        value = {name: item for name, item in attributes.items() if _is_plain(item)}
    buffers: list[pickle.PickleBuffer] = []
    try:
        found = hashlib.sha256(pickle.dumps(value, protocol=5, buffer_callback=buffers.append))
        for buffer in buffers:  # the contents of arrays; CRC-32 takes a third of SHA-256's time
            found.update(zlib.crc32(buffer.raw()).to_bytes(4, "big"))
    except Exception:  # part of the value cannot be pickled, so only the value's identity is compared
        return b""
    return found.digest()


def _is_plain(value: Any) -> bool:
    elsewhere = (getattr(sys.modules.get(module), name, ()) for module, name in _PLAIN_ELSEWHERE)
    return isinstance(value, (*_PLAIN, *elsewhere))
