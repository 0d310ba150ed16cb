"""Cuts the rows of any source into batches of one size, as arrays that TFRecord files can hold."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from sparkring.data.shards import Shards
from sparkring.data.tfrecord.schema import STRING, RecordColumn
from sparkring.errors import DataError

WHOLE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
NUMBERS = ("bool", *WHOLE, "float16", "float32", "float64", "complex64", "complex128")

TEXT = (str, bytes, bytearray)

Array = Any  # numpy.ndarray
Batch = dict[str, Array]


def batches(source: Any, batch_size: int, called: str) -> Generator[Batch, None, None]:
    """Yield batches of `batch_size` rows; the last batch may have fewer rows.

    The arrays of the batches hold little-endian numbers or strings.

    source: Shards, a pandas DataFrame, a dict of arrays [rows, …], or an iterable of such dicts. Raises DataError
    if the arrays do not fit together or contain something that a file cannot hold. `called` is the name of the data in
    messages.
    """
    columns: dict[str, RecordColumn] = {}
    waiting: list[Batch] = []
    count = done = 0

    def joined() -> Batch:
        return {name: np.concatenate([part[name] for part in waiting]) for name in columns}

    with contextlib.closing(_chunks(source, called)) as chunks:
        for chunk in chunks:
            lengths = {name: len(array) for name, array in chunk.items()}
            if len(set(lengths.values())) > 1:
                text = ", ".join(f"`{name}` {rows:,}" for name, rows in lengths.items())
                raise DataError(f"{called}: the columns of a batch differ in length: {text}.")
            length = next(iter(lengths.values()))
            if not length:  # skipped before the types are compared, since an empty chunk's arrays may have any type
                continue
            chunk_columns = {column.name: column for column in columns_of(chunk)}
            columns = columns or chunk_columns
            odd = next((name for name in columns | chunk_columns if columns.get(name) != chunk_columns.get(name)), None)
            if odd is not None:
                was, now = _words(columns.get(odd)), _words(chunk_columns.get(odd))
                raise DataError(f"{called}: column `{odd}` is {now} from row {done + count:,} on, but {was} before.")
            waiting.append(chunk)
            count += length
            if count >= batch_size:
                whole, rest = joined(), count % batch_size
                for start in range(0, count - rest, batch_size):
                    yield {name: array[start : start + batch_size] for name, array in whole.items()}
                waiting = [{name: array[count - rest :].copy() for name, array in whole.items()}]
                done, count = done + count - rest, rest
    if count:
        yield joined()


def columns_of(batch: Batch) -> tuple[RecordColumn, ...]:
    """Return the columns of a batch: for each array, its name, its dtype and the shape of one of its rows."""
    return tuple(
        RecordColumn(name, STRING if array.dtype.kind in "OUS" else array.dtype.name, tuple(array.shape[1:]))
        for name, array in batch.items()
    )


def _words(column: RecordColumn | None) -> str:
    return f"{column.dtype} of shape {list(column.shape)}" if column else "not there"


def _chunks(source: Any, called: str) -> Generator[Batch, None, None]:
    """Yield the source's rows as dicts of arrays, in the source's own chunks."""
    with contextlib.ExitStack() as stack:
        if isinstance(source, Shards):
            source = source.as_numpy()
            # close() ends the reading thread. Otherwise, a traceback that refers to the iterator would keep the thread
            # alive.
            stack.callback(source.close)
        elif hasattr(source, "iloc"):
            source = {column: source[column] for column in source.columns}
        for chunk in [source] if isinstance(source, Mapping) else source:
            if not isinstance(chunk, Mapping) or not chunk:
                raise DataError(
                    f"{called} yields a `{type(chunk).__name__}`: a batch must be a dict with an array per column."
                )
            yield {str(name): _array(values, f"{called}: column `{name}`") for name, values in chunk.items()}


def _array(values: Any, what: str) -> Array:
    """Return a column's values as a little-endian array of numbers, or as an array of strings.

    Raise DataError for other values. `what` is the name of the column in the error's message.
    """
    if isinstance(values, np.ma.MaskedArray) and values.mask.any():
        raise DataError(f"{what} has masked values: fill them first.")
    try:
        with warnings.catch_warnings():
            # Before NumPy 1.24, ragged lists caused only a warning. The warning is hidden, because such lists are
            # refused below.
            warnings.simplefilter("ignore")
            array = np.asarray(values) if isinstance(values, np.ndarray) else _as_array(values)
        if array.dtype.kind == "O" and not _of_strings(array):
            array = _stacked(array, what)
    except ValueError:  # from NumPy, if the arrays are ragged
        raise DataError(f"{what} is ragged: pad or cut its arrays to the same length.") from None
    if array.ndim == 0 or 0 in array.shape[1:]:
        raise DataError(
            f"{what} has the shape {list(array.shape)}: expected an array of rows, each with at least one value."
        )
    if array.dtype.kind in "US" or _of_strings(array):
        return array
    if array.dtype.name not in NUMBERS:
        kind = type(array.flat[0]).__name__ if array.dtype.kind == "O" else array.dtype.name
        raise DataError(
            f"{what} is of type {kind}, which a TFRecord array cannot hold: convert it to numbers or strings. For "
            "times, use unix_micros() in Spark or astype('int64') in NumPy."
        )
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _of_strings(array: Array) -> bool:
    return array.dtype.kind == "O" and all(isinstance(value, TEXT) for value in array.flat)


def _as_array(values: Any) -> Array:
    """Return `values` as an array, with strings and pandas' NA as objects.

    np.asarray() would turn all values beside strings into text, and NA beside numbers into NaN.
    """
    if hasattr(values, "isna") and not isinstance(getattr(values, "dtype", None), np.dtype):
        return values.to_numpy(object if np.any(values.isna()) else None)
    array = np.asarray(values)
    return np.asarray(values, object) if array.dtype.kind in "US" else array


def _stacked(array: Array, what: str) -> Array:
    """Combine the values or arrays in an array of objects into one array.

    Raise DataError if one of them is null or if there are strings and other values, and ValueError if their shapes
    differ.
    """
    _refuse_nulls(array, what)
    parts = np.stack([_as_array(value) for value in array.flat])
    stacked = parts.reshape(*array.shape, *parts.shape[1:])
    if stacked.dtype.kind == "O":
        _refuse_nulls(stacked, what)
        if len({isinstance(value, TEXT) for value in stacked.flat}) > 1:
            raise DataError(f"{what} has both strings and other values: convert them to one type.")
    return stacked


def _refuse_nulls(array: Array, what: str) -> None:
    """Raise DataError if an array of objects has nulls."""
    nulls = sum(map(_is_null, array.flat))
    if nulls:
        raise DataError(f"{what} has nulls ({nulls:,} of {array.size:,} values): fill them first.")


def _is_null(value: Any) -> bool:
    """Return whether a value is None, pandas' NA, NaT or NaN. The last two do not equal themselves."""
    if value is None or type(value).__name__ == "NAType":
        return True
    return not hasattr(value, "__len__") and bool(value != value)
