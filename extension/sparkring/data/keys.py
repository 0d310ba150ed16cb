"""Divides the rows of a micro-batch by key. A key is a value of a column, or a tuple of the values of several columns.

Each key belongs to one rank, which has the state of this key.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sparkring.data.micro_batches import ArrayRows, ArrowRows, ParquetRows, Rows, StoredRows
from sparkring.errors import DataError

# What a key, or a part of it, can be. A checkpoint can hold all of these.
_TYPES = (type(None), bool, int, float, str, bytes)


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
        rows = _in_memory(self._rows)
        keys, codes = _keys(rows.values(self._by))
        mine = [(_digest(key), repr(key), code) for code, key in enumerate(keys)]
        mine = sorted(entry for entry in mine if owner_of(keys[entry[2]], self._size) == self._rank)
        order = np.argsort(codes, kind="stable")  # the rows of a key stay in their order
        ends = np.cumsum(np.bincount(codes, minlength=len(keys)))
        begins = ends - np.bincount(codes, minlength=len(keys))
        chosen = [order[begins[code] : ends[code]] for _, _, code in mine]
        indices = np.concatenate(chosen) if chosen else order[:0]
        taken = rows.take(indices)
        sorted_rows: Any = taken.table() if arrow else taken.columns(nulls)
        first = 0
        for (digest, _, code), row_numbers in zip(mine, chosen, strict=True):
            span = slice(first, first + len(row_numbers))
            first += len(row_numbers)
            batch = sorted_rows[span] if arrow else {name: array[span] for name, array in sorted_rows.items()}
            yield OfKey(keys[code], digest, batch)


def shares_by_key(rows: Rows, by: Sequence[str], size: int) -> list[KeyedRows]:
    """Return the rows of each rank. Rows in this process are divided here; ranks read files as a whole.

    Raises DataError if rows in this process have a value that cannot be a key.
    """
    if isinstance(rows, ParquetRows) or (isinstance(rows, StoredRows) and rows.files()):
        return [KeyedRows(rows, by, size, rank) for rank in range(size)]
    here = _in_memory(rows)
    keys, codes = _keys(here.values(by))
    owners = np.array([owner_of(key, size) for key in keys], np.int64)[codes]
    return [KeyedRows(here.take(np.flatnonzero(owners == rank)), by, size, rank) for rank in range(size)]


def owner_of(key: Any, size: int) -> int:
    """Return the rank, of `size` ranks, to which a key belongs."""
    return _digest(key) % size


def as_key(value: Any) -> Any:
    """Return a key in the form that digests, dicts and checkpoints use.

    NaN is always the same object, so that it equals itself, -0.0 is 0.0, and a list, as which a tuple may have been
    saved, is a tuple.
    """
    if isinstance(value, list | tuple):
        return tuple(map(as_key, value))
    if isinstance(value, float):
        return math.nan if math.isnan(value) else value + 0.0
    return value


def _in_memory(rows: Rows) -> ArrayRows | ArrowRows:
    """Return the rows as arrays or an Arrow table, so that files are read only once."""
    return rows if isinstance(rows, ArrayRows | ArrowRows) else ArrowRows(rows.table())


def _keys(columns: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the different keys, and the number of the key of each row in this list."""
    codes: Any = 0
    for name, column in columns.items():
        more = _codes(column, name)
        codes = codes * (int(more.max(initial=0)) + 1) + more
        _, first, codes = np.unique(codes, return_index=True, return_inverse=True)
    values = [[_value(value, name) for value in column.take(first).tolist()] for name, column in columns.items()]
    keys = values[0] if len(values) == 1 else list(zip(*values, strict=True))
    numbers: dict[Any, int] = {}
    merged = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    return list(numbers), merged[codes]


def _codes(column: Any, name: str) -> Any:
    """Return a number for each value of a column. Different values have different numbers.

    Equal values have the same number, except that Arrow tells 0.0 from -0.0, and one NaN from another.
    """
    with contextlib.suppress(pa.ArrowException, OverflowError, UnicodeError):  # Arrow cannot represent all values
        array = column if isinstance(column, pa.Array) else pa.array(column)
        # If Python objects are of several types, Arrow may convert them, which may make two different values equal.
        if isinstance(column, pa.Array) or column.dtype != object or pa.types.is_string(array.type):
            return array.dictionary_encode("encode").indices.to_numpy().astype(np.int64)
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(_value(value, name), len(numbers)) for value in column.tolist()], np.int64)


def _value(value: Any, name: str) -> Any:
    """Return a value of the column `name` as a key. Raise DataError if it cannot be one."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) not in _TYPES:
        raise DataError(
            f"--by {name}: a value of this column is a `{type(value).__name__}`, but a key must be text, bytes, a "
            "number, a boolean or None: convert the column to strings or integers."
        )
    return as_key(value)


def _digest(key: Any) -> int:
    return zlib.crc32(repr(key).encode())
