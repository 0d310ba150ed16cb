"""Arrow columns as NumPy arrays: what a model takes in, with the shape of a row the same for all rows.

numbers, booleans        [rows]                 as stored; decimals become float64
strings, binary          [rows] of object       str or bytes
dates and times          [rows] datetime64
lists, tensors           [rows, …]              all rows of one length
Spark ML's vectors       [rows, length]         float64, sparse ones filled up
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkring.errors import DataError

Array = Any  # numpy.ndarray
Raw = tuple[np.dtype[Any], tuple[int, ...]]  # what the bytes of a row are: dtype and shape
_VECTOR = {"type", "size", "indices", "values"}


def is_vector(kind: pa.DataType) -> bool:
    """Is it what Spark ML's VectorUDT is stored as?"""
    return pa.types.is_struct(kind) and {field.name for field in kind} == _VECTOR


def to_numpy(column: pa.Array, name: str, fill: Mapping[str, Any], dtype: Any = None, raw: Raw | None = None) -> Array:
    """A column as an array of shape [rows, …]; floating-point values as `dtype`, if one is given, and bytes as `raw`.

    DataError if there are nulls for which `fill` has no value, rows of different lengths, or a type that is no array.
    """
    filled = _filled(column, name, fill)
    found = _array(filled, name) if raw is None else _from_bytes(filled, name, raw)
    if dtype is not None and found.dtype.kind == "f":
        found = found.astype(dtype, copy=False)
    return found


def _filled(array: pa.Array, name: str, fill: Mapping[str, Any]) -> pa.Array:
    if not array.null_count:
        return array
    if name not in fill:
        raise has_nulls(name, array.null_count, len(array))
    try:
        return pc.fill_null(array, pa.scalar(fill[name], array.type))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OverflowError):
        pass
    # Arrow fills no lists: put the value where they are missing.
    try:
        return pa.array([fill[name] if value is None else value for value in array.to_pylist()], array.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError):
        raise DataError(f"fill={{'{name}': {fill[name]!r}}}: column `{name}` is {array.type}.") from None


def has_nulls(name: str, count: int, rows: int) -> DataError:
    """The message for a column that has nulls and no fill value."""
    return DataError(
        f"column `{name}` has nulls ({count:,} in {rows:,} rows), which an array cannot hold: replace them with "
        f"fill={{'{name}': 0}}, or leave these rows out with where=\"{name} is not None\"."
    )


def _array(array: pa.Array, name: str) -> Array:
    kind = array.type
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        found = _array(array.storage, name)
        shape = getattr(kind, "shape", None)
        return found.reshape(len(found), *shape) if shape is not None else found
    if types.is_dictionary(kind):
        return _array(array.dictionary_decode(), name)
    if types.is_decimal(kind):
        return _array(array.cast(pa.float64()), name)
    if types.is_time(kind):
        return _array(array.cast(pa.int32() if types.is_time32(kind) else pa.int64()), name)
    if types.is_fixed_size_list(kind):
        return _rows(array.flatten(), len(array), kind.list_size, name)
    if types.is_list(kind) or types.is_large_list(kind):
        return _rows(array.flatten(), len(array), _length(np.diff(np.asarray(array.offsets)), name), name)
    if is_vector(kind):
        return _vectors(array, name)
    if types.is_nested(kind) or types.is_null(kind):
        raise DataError(
            f"column `{name}` is {kind}, which an array cannot hold: leave it out with columns=[…], or write its parts "
            "as separate columns."
        )
    return array.to_numpy(zero_copy_only=False)


def _from_bytes(array: pa.Array, name: str, raw: Raw) -> Array:
    """The bytes of all rows as they lie in memory, with nothing made of each row by itself."""
    dtype, shape = raw
    wanted = dtype.itemsize * math.prod(shape)
    types, kind = pa.types, array.type
    if types.is_fixed_size_binary(kind):
        begin, lengths = array.offset * kind.byte_width, np.full(len(array), kind.byte_width)
        values = array.buffers()[1]
    elif types.is_binary(kind) or types.is_large_binary(kind):
        width = np.int64 if types.is_large_binary(kind) else np.int32
        offsets = np.frombuffer(array.buffers()[1], width)[array.offset : array.offset + len(array) + 1]
        begin, lengths = int(offsets[0]), np.diff(offsets)
        values = array.buffers()[2]
    else:
        raise DataError(f"raw={{'{name}': …}}: column `{name}` is {kind}, but raw is for binary columns.")
    odd = lengths[lengths != wanted]
    if len(odd):
        raise DataError(
            f"raw={{'{name}': …}}: a row of {dtype} with shape {list(shape)} is {wanted:,} bytes, but column `{name}` "
            f"has one of {odd[0]:,}."
        )
    found = np.frombuffer(values if len(array) else b"", dtype, len(array) * math.prod(shape), begin)
    return found.reshape(len(array), *shape)


def _rows(values: pa.Array, rows: int, length: int, name: str) -> Array:
    if values.null_count:
        raise DataError(f"column `{name}` has lists with nulls inside ({values.null_count:,} values): fill them first.")
    found = _array(values, name)
    return found.reshape(rows, length, *found.shape[1:])


def _length(lengths: Array, name: str) -> int:
    """The length of all rows; of no rows 0."""
    if len(lengths) and (lengths != lengths[0]).any():
        raise ragged(name, sorted(set(lengths.tolist())))
    return int(lengths[0]) if len(lengths) else 0


def ragged(name: str, lengths: list[int]) -> DataError:
    """What to say of a column whose rows have these lengths, sorted."""
    shown = f"{lengths[0]} and {lengths[-1]}" if len(lengths) < 3 else f"between {lengths[0]} and {lengths[-1]}"
    return DataError(
        f"column `{name}` has rows of different lengths ({shown}), but a batch is one array: pad or cut them first, or "
        "leave the column out with columns=[…]."
    )


def _vectors(array: pa.StructArray, name: str) -> Array:
    """Spark ML's vectors: type 1 is dense and has values only, type 0 is sparse, with a size and indices."""
    dense = np.asarray(array.field("type")) == 1
    values = array.field("values")
    if dense.all():
        return _array(values, name)
    lengths = np.diff(np.asarray(values.offsets))
    sizes = np.where(dense, lengths, np.asarray(array.field("size").fill_null(0)))
    found = np.zeros((len(array), _length(sizes, name)))
    flat = np.asarray(values.flatten())
    owner = np.repeat(np.arange(len(array)), lengths)
    begin = np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = np.arange(len(flat)) - begin  # of a dense vector's values
    sparse = ~dense[owner]
    place[sparse] = np.asarray(array.field("indices").flatten())
    found[owner, place] = flat
    return found
