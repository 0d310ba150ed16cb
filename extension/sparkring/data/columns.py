"""Converts Arrow columns to NumPy arrays for models. All rows of an array have the same shape.

numbers                        [rows]               as stored; integers with nulls become float64 with NaN
booleans                       [rows]               as stored; with nulls, objects (True, False or None)
strings, binary                [rows] of object     str or bytes
dates and times                [rows] datetime64    with NaT for nulls
decimals                       [rows] of object     decimal.Decimal
lists, tensors                 [rows, …]            all rows must have the same length
Spark ML's vectors             [rows, length]       float64; sparse vectors are filled with zeros
rows, maps, and lists of them  [rows] of object     as in toPandas() if they are from a DataFrame, otherwise dicts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkring.data.spark_values import series_of
from sparkring.data.where import as_written
from sparkring.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

Array = Any  # numpy.ndarray
Raw = tuple[np.dtype[Any], tuple[int, ...]]  # the dtype and shape of the array that a row's bytes hold
Caller = Literal["shards", "tfrecords", "predict", "estimator"]
_VECTOR = {"type", "size", "indices", "values"}


@dataclass(frozen=True)
class Making:
    """How arrays are made from columns: in the same way for all batches of a data set, whatever rows they contain.

    The keys of all mappings are column names. `fill` holds the values that replace nulls. `raw` has the dtype and shape
    of the array that each row of a binary column holds. `nulls` names the columns whose arrays have another dtype
    because the columns have nulls. `spark` holds the Spark types of columns that hold rows or maps. `caller` says which
    options error messages can advise.
    """

    fill: Mapping[str, Any]
    raw: Mapping[str, Raw]
    nulls: frozenset[str] = frozenset()
    spark: Mapping[str, DataType] = field(default_factory=dict)
    caller: Caller = "shards"


def is_vector(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds Spark ML's vectors (VectorUDT)."""
    return pa.types.is_struct(kind) and {part.name for part in kind} == _VECTOR


def is_object(kind: pa.DataType) -> bool:
    """Return whether a column of this type becomes an array of Python objects.

    This is the case for rows, maps, lists of these, and columns that have only nulls.
    """
    if not pa.types.is_nested(kind):  # the usual case, checked first for speed
        return bool(pa.types.is_null(kind))
    return is_object(kind.value_type) if _is_list(kind) else not is_vector(kind)


def changes_with_nulls(kind: pa.DataType) -> bool:
    """Return whether nulls in a column of this type change the dtype of its array."""
    types = pa.types
    if types.is_dictionary(kind):
        return changes_with_nulls(kind.value_type)
    return bool(types.is_integer(kind) or types.is_boolean(kind) or types.is_time(kind))


def holds_nulls(kind: pa.DataType) -> bool:
    """Return whether the array of a column of this type can hold nulls."""
    return is_object(kind) or not (_is_list(kind) or is_vector(kind) or isinstance(kind, pa.BaseExtensionType))


def to_numpy(column: pa.Array, name: str, making: Making, dtype: Any = None, *, exact: bool = True) -> Array:
    """Return a column as an array of shape [rows, …].

    If a `dtype` is given, floating-point values and decimals are converted to it. Without a `dtype`, decimals stay
    decimals if `exact` is true; otherwise, they become float64.
    Raise DataError for nulls that the array cannot hold and `fill` does not replace, for rows of different lengths,
    and for a type that cannot become an array.
    """
    raw, spark, nulls = making.raw.get(name), making.spark.get(name), name in making.nulls
    kind = column.type
    filled = _filled(column, name, making.fill)
    if filled.null_count:
        if raw is not None or not holds_nulls(kind):
            raise has_nulls(name, filled.null_count, len(filled), value=replacement(kind), caller=making.caller)
        if changes_with_nulls(kind) and not nulls:
            # The footers did not count these nulls, so the dtype was chosen as if there were none.
            why = "but the footers of its files do not count them"
            raise has_nulls(name, filled.null_count, len(filled), why, "0", making.caller)
    if raw is not None:
        return _from_bytes(filled, name, raw)
    if is_object(kind):
        return _objects(filled, spark)
    array = _array(filled, name, making.caller, exact=exact and dtype is None)
    if nulls:  # The array is converted even if this batch has no nulls, so that all batches have the same dtype.
        array = array.astype(object if array.dtype.kind in "bO" else np.float64, copy=False)
    if dtype is not None and array.dtype.kind == "f":
        array = array.astype(dtype, copy=False)
    return array


def writable(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays that the user's code may change. Read-only arrays, such as those in Arrow's memory, are copied."""
    return {name: np.require(array, requirements="W") for name, array in arrays.items()}


def _filled(array: pa.Array, name: str, fill: Mapping[str, Any]) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if name not in fill:
        return array
    value, kind = fill[name], array.type
    if _is_list(kind) and np.ndim(value) == 0:
        return _filled_items(array, name, fill)
    if not array.null_count:
        return array
    try:
        # With a type, pa.scalar() would cut off fractions, and refuse NumPy's times.
        cast = isinstance(value, float | np.generic)
        scalar = pa.array(np.array([value])).cast(kind)[0] if cast else pa.scalar(value, kind)
        if not scalar.is_valid:
            raise ValueError
        try:
            return pc.fill_null(array, scalar)
        except pa.ArrowNotImplementedError:  # Arrow cannot fill null lists, so they are replaced in Python
            default = scalar.as_py()
            return pa.array([default if row is None else row for row in array.to_pylist()], kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        raise DataError(
            f"fill={{'{name}': {value!r}}}: column `{name}` is {kind}, which cannot hold this value."
        ) from None


def _filled_items(array: pa.Array, name: str, fill: Mapping[str, Any]) -> pa.Array:
    """Replace nulls in the lists of a column. A single value cannot replace a whole list."""
    values = array.flatten()
    if array.null_count or (filled := _filled(values, name, fill)) is values:
        return array
    if pa.types.is_fixed_size_list(array.type):
        return pa.FixedSizeListArray.from_arrays(filled, array.type.list_size).cast(array.type)
    offsets = np.concatenate([[0], np.cumsum(np.asarray(pc.list_value_length(array)))])
    made = pa.LargeListArray if pa.types.is_large_list(array.type) else pa.ListArray
    return made.from_arrays(offsets.astype(np.int64 if made is pa.LargeListArray else np.int32), filled)


def replacement(kind: pa.DataType) -> str:
    """Return how messages show a value that can replace nulls. A number would replace only the nulls inside lists."""
    return "[…]" if _is_list(kind) or is_vector(kind) else "…"


def has_nulls(
    name: str,
    count: int,
    rows: int,
    why: str = "which an array cannot hold",
    value: str = "…",
    caller: Caller = "shards",
) -> DataError:
    """Return the error for a column with nulls that `fill` does not replace. `value` is an example of a replacement."""
    drop = f"df.dropna(subset=['{name}'])"
    advice = {
        "shards": f"replace them with fill={{'{name}': {value}}}, or leave these rows out with "
        f'where="{as_written(name)} is not None"',
        "tfrecords": f"replace them with fill={{'{name}': {value}}}",
        "predict": f"replace them with fill={{'{name}': {value}}}, leave these rows out with {drop}, or use "
        'on_error="null"',
        "estimator": f"leave these rows out with {drop}, or replace the nulls, for example with df.fillna() or Imputer",
    }[caller]
    return DataError(f"column `{name}` has nulls ({count:,} in {rows:,} rows), {why}: {advice}.")


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _array(array: pa.Array, name: str, caller: Caller = "shards", *, exact: bool) -> Array:
    kind = array.type
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        storage = _array(array.storage, name, caller, exact=exact)
        shape = getattr(kind, "shape", None)
        return storage.reshape(len(storage), *shape) if shape is not None else storage
    if types.is_dictionary(kind):
        return _array(array.dictionary_decode(), name, caller, exact=exact)
    if types.is_decimal(kind) and not exact:
        return _array(array.cast(pa.float64()), name, caller, exact=exact)
    if types.is_time(kind):
        return _array(array.cast(pa.int32() if types.is_time32(kind) else pa.int64()), name, caller, exact=exact)
    if types.is_fixed_size_list(kind):
        return _rows(array.flatten(), len(array), kind.list_size, name, caller, exact)
    if types.is_list(kind) or types.is_large_list(kind):
        length = _length(np.diff(np.asarray(array.offsets)), name, caller)
        return _rows(array.flatten(), len(array), length, name, caller, exact)
    if is_vector(kind):
        return _vectors(array, name, caller)
    return array.to_numpy(zero_copy_only=False)


def _objects(array: pa.Array, spark: DataType | None) -> Array:
    """Return rows, maps or lists of these as Python objects: those that toPandas() returns if `spark` is given."""
    if spark is not None:
        return series_of(array, spark).to_numpy(object)
    rebuild, values = _rebuilding(array.type), array.to_pylist()
    return np.fromiter(values if rebuild is None else map(rebuild, values), object, len(array))


def _rebuilding(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function that turns the maps in a value of this type into dicts, or None if there are no such maps.

    pyarrow returns a map as a list of pairs. A map whose keys are rows, maps or lists stays a list, because a dict
    cannot have such keys. The function also accepts None.
    """
    if pa.types.is_map(kind) and not pa.types.is_nested(kind.key_type):
        make = _rebuilding(kind.item_type) or (lambda item: item)
        return lambda value: value if value is None else {key: make(item) for key, item in value}
    if pa.types.is_struct(kind):
        parts = {part.name: made for part in kind if (made := _rebuilding(part.type)) is not None}
        if parts:
            return lambda value: value if value is None else value | {n: make(value[n]) for n, make in parts.items()}
    elif _is_list(kind) and (rebuild := _rebuilding(kind.value_type)) is not None:
        return lambda value: value if value is None else [rebuild(item) for item in value]
    return None


def _from_bytes(array: pa.Array, name: str, raw: Raw) -> Array:
    """Return the bytes of all rows as one array, without a Python object for each row."""
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
            f"has a row of {odd[0]:,}."
        )
    flat = np.frombuffer(values if len(array) else b"", dtype, len(array) * math.prod(shape), begin)
    return flat.reshape(len(array), *shape)


def _rows(values: pa.Array, rows: int, length: int, name: str, caller: Caller, exact: bool) -> Array:
    if values.null_count and (changes_with_nulls(values.type) or not holds_nulls(values.type)):
        raise DataError(
            f"column `{name}` has lists that contain nulls ({values.null_count:,} values), which an array cannot hold: "
            + (
                "replace them in Spark."
                if caller == "estimator" or _is_list(values.type)
                else f"replace them with fill={{'{name}': 0}}."
            )
        )
    flat = _array(values, name, caller, exact=exact)
    return flat.reshape(rows, length, *flat.shape[1:])


def _length(lengths: Array, name: str, caller: Caller) -> int:
    if len(lengths) and (lengths != lengths[0]).any():
        raise ragged(name, sorted(set(lengths.tolist())), caller)
    return int(lengths[0]) if len(lengths) else 0


def ragged(name: str, lengths: list[int], caller: Caller = "shards") -> DataError:
    """Return the error for a column whose rows have different lengths. `lengths` is sorted."""
    shown = f"{lengths[0]} and {lengths[-1]}" if len(lengths) < 3 else f"between {lengths[0]} and {lengths[-1]}"
    return DataError(
        f"column `{name}` has rows of different lengths ({shown}), but a batch is one array: pad or cut them first"
        + {
            "shards": ", or leave the column out with columns=[…].",
            "tfrecords": f", as with schema={{'{name}': ('float32', ({lengths[-1]},))}} and fill={{'{name}': 0}}.",
        }.get(caller, ".")
    )


def _vectors(array: pa.StructArray, name: str, caller: Caller) -> Array:
    """Return Spark ML's vectors as one array. Vectors of type 1 are dense, and vectors of type 0 are sparse."""
    dense = np.asarray(array.field("type")) == 1
    values = array.field("values")
    if dense.all():
        return _array(values, name, caller, exact=True)
    lengths = np.diff(np.asarray(values.offsets))
    sizes = np.where(dense, lengths, np.asarray(array.field("size").fill_null(0)))
    matrix = np.zeros((len(array), _length(sizes, name, caller)))
    flat = np.asarray(values.flatten())
    owner = np.repeat(np.arange(len(array)), lengths)
    begin = np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = np.arange(len(flat)) - begin  # right for dense vectors; sparse ones get their own indices below
    sparse = ~dense[owner]
    place[sparse] = np.asarray(array.field("indices").flatten())
    matrix[owner, place] = flat
    return matrix
