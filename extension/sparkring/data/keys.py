"""Divides the rows of a micro-batch by key. A key is a value of a column, or a tuple of the values of several columns.

Each key belongs to one rank, which has the state of this key.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sparkring.data.micro_batches import ArrayRows, ArrowRows, Rows


class OfKey(NamedTuple):
    """The rows of a key, as a dict of arrays or an Arrow table. The `digest` of a key is the same in every process."""

    key: Any
    digest: int
    batch: Any


class KeyedRows:
    """Those of `rows` whose keys, the values of the columns in `by`, belong to `rank`."""

    def __init__(self, rows: Rows, by: Sequence[str], size: int, rank: int) -> None:
        self._rows = rows
        self._by = tuple(by)
        self._size = size
        self._rank = rank

    def of_keys(self, nulls: frozenset[str], *, arrow: bool) -> Iterator[OfKey]:
        """Yield the rows of one key after another, in the order of the keys' digests."""
        columns = self._rows.columns(nulls)
        keys, codes = _keys({name: columns[name] for name in self._by})
        mine = [(_digest(key), repr(key), code) for code, key in enumerate(keys)]
        mine = sorted(each for each in mine if owner_of(keys[each[2]], self._size) == self._rank)
        order = np.argsort(codes, kind="stable")  # the rows of a key stay in their order
        ends = np.cumsum(np.bincount(codes, minlength=len(keys)))
        begins = ends - np.bincount(codes, minlength=len(keys))
        chosen = [order[begins[code] : ends[code]] for _, _, code in mine]
        indices = np.concatenate(chosen) if chosen else order[:0]
        sorted_rows: Any = self._rows.table().take(pa.array(indices)) if arrow else _take(columns, indices)
        first = 0
        for (digest, _, code), each in zip(mine, chosen, strict=True):
            span = slice(first, first + len(each))
            first += len(each)
            batch = sorted_rows[span] if arrow else {name: array[span] for name, array in sorted_rows.items()}
            yield OfKey(keys[code], digest, batch)


def shares_by_key(rows: Rows, by: Sequence[str], size: int) -> list[KeyedRows]:
    """Return the rows of each rank. Rows in this process are divided here; ranks read files as a whole."""
    if not isinstance(rows, ArrayRows | ArrowRows):
        return [KeyedRows(rows, by, size, rank) for rank in range(size)]
    keys, codes = _keys(rows.select(by).columns(rows.with_nulls()))
    owners = np.array([owner_of(key, size) for key in keys], np.int64)[codes]
    return [KeyedRows(rows.take(np.flatnonzero(owners == rank)), by, size, rank) for rank in range(size)]


def owner_of(key: Any, size: int) -> int:
    """Return the rank, of `size` ranks, to which a key belongs."""
    return _digest(key) % size


def as_key(value: Any) -> Any:
    """Return a key such that two keys with NaN are equal, and a list, as which a tuple may have been saved, a tuple."""
    if isinstance(value, list | tuple):
        return tuple(map(as_key, value))
    return math.nan if isinstance(value, float) and math.isnan(value) else value


def _keys(columns: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the different keys, and the number of the key of each row in this list."""
    codes: Any = None
    for array in columns.values():
        more = _codes(array)
        codes = more if codes is None else codes * (int(more.max(initial=0)) + 1) + more
        _, codes = np.unique(codes, return_inverse=True)
    _, first = np.unique(codes, return_index=True)
    values = [array[first].tolist() for array in columns.values()]
    return [as_key(key) for key in (values[0] if len(values) == 1 else zip(*values, strict=True))], codes


def _codes(array: Any) -> Any:
    """Return a number for each value of a column: the same number for equal values."""
    try:
        return pa.array(array).dictionary_encode("encode").indices.to_numpy().astype(np.int64)
    except (pa.ArrowException, NotImplementedError):  # not a type of Arrow
        numbers: dict[Any, int] = {}
        return np.array([numbers.setdefault(as_key(value), len(numbers)) for value in array.tolist()], np.int64)


def _digest(key: Any) -> int:
    return zlib.crc32(repr(key).encode())


def _take(columns: Mapping[str, Any], indices: Any) -> dict[str, Any]:
    return {name: array[indices] for name, array in columns.items()}
