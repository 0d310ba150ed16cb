"""Describes the contents of a batch, and makes batches from stored rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sparkring.data.bad_rows import BadRows, instead
from sparkring.data.columns import Caller, Making, Raw, ragged, to_numpy, writable
from sparkring.data.tensors import other_than_text
from sparkring.errors import DataError

Array = Any  # numpy.ndarray
Batch = dict[str, Array]
Transform = Callable[[Batch], Mapping[str, Any]]
Columns = Sequence[str] | Mapping[str, str | Sequence[str]]
Group = str | tuple[str, ...]  # one column as it is, or columns side by side in one array [rows, columns]


class Spec(NamedTuple):
    """A column of a batch: the shape of one row, and the NumPy dtype (object for str, bytes and other objects)."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass
class BatchLayout:
    """The columns of a batch, and how each is made: from one stored column, or from several side by side.

    learn() finds `spec` from the first rows; all other rows must match it. If the transform returns arrays of objects
    other than str and bytes, `objects` maps the name of each such array to the type of one of its objects. `data` is
    the name of the data set in messages. `sample` is a row that can become arrays.
    """

    data: str
    groups: Mapping[str, Group]
    making: Making
    dtype: np.dtype[Any] | None
    transform: Transform | None
    spec: dict[str, Spec] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    sample: pa.RecordBatch | None = field(default=None, compare=False)

    def learn(self, rows: pa.RecordBatch, bad: BadRows | None = None) -> None:
        """Set `spec` and `objects` from some rows. `bad` says what to do if only some of them are bad.

        Raise DataError if the columns of these rows cannot become arrays, or if the transform does not return a dict of
        arrays that all have as many rows as `rows`.
        """
        try:
            self._learn(rows)
        except Exception as error:  # the user's transform can raise any exception
            if bad is None or (isinstance(error, DataError) and not bad.skips):
                raise
            noted = bad._replace(skips=True, left_out=[])
            good = noted.good(len(rows), lambda row: self._learn(rows.slice(row, 1)), error)
            if not good:  # the transform fails everywhere, perhaps only in this process
                raise
            if not bad.skips:
                raise bad.error(noted.left_out[0]) from error
            self._learn(rows.slice(good[0], 1))

    def _learn(self, rows: pa.RecordBatch) -> None:
        batch = self._columns(rows)
        self.sample = rows.slice(0, 1)
        if self.transform is not None:
            batch = self._transformed(batch)
            for name, array in batch.items():
                if array.ndim == 0 or len(array) != len(rows):
                    raise _miscounted(name, array, len(rows), "")
                if array.dtype.kind == "O" and (kind := other_than_text(array)):
                    self.objects[name] = kind
        if not batch:
            raise DataError("transform returned no columns.")
        self.spec = {name: Spec(array.shape[1:], array.dtype) for name, array in batch.items()}

    def arrays(
        self,
        batches: Iterable[pa.RecordBatch],
        length: int,
        order: Array | None,
        rows: int,
        where: str,
        bad: BadRows | None = None,
    ) -> tuple[Batch, int]:
        """Put the `length` rows of `batches` in `order` (None: as stored), and return the first `rows` as arrays.

        Also return the size of all rows in Arrow's memory, in bytes. The arrays are not yet transformed. `bad` says
        what to do with rows that cannot become arrays.

        Each batch is copied while it is still in the processor's cache, before the next one is decoded. The next batch
        can then reuse its memory.
        """
        place = None
        if order is not None:
            place = np.empty(length, np.int64)
            place[order] = np.arange(length)
        arrays: Batch = {}
        begin = size_bytes = 0
        for batch in batches:
            end = begin + len(batch)
            size_bytes += batch.nbytes
            for name, part in self._columns_of_good(batch, begin, bad).items():
                if len(batch) == length and place is None:
                    arrays[name] = part
                    continue
                if name not in arrays:
                    arrays[name] = _empty((length, *part.shape[1:]), part.dtype)
                elif part.shape[1:] != arrays[name].shape[1:]:
                    lengths = sorted({part.shape[1], arrays[name].shape[1]})
                    raise ragged(name, lengths, self.making.caller)
                arrays[name][slice(begin, end) if place is None else place[begin:end]] = part
            begin = end
        arrays = {name: array[:rows] for name, array in arrays.items()}
        if self.transform is None:
            self._check(arrays, rows, where)
        return arrays, size_bytes

    def transformed(self, batch: Batch, rows: int, where: str) -> Batch:
        """Return the transformed batch. Raise DataError if its columns, shapes or dtypes are not those of `spec`."""
        transformed = self._transformed(batch)
        self._check(transformed, rows, where)
        return transformed

    def transformed_rows(
        self, batch: Batch, rows: int, where: str, bad: BadRows, spare: Batch | None
    ) -> tuple[Batch, Batch | None]:
        """Return the transformed batch, and a row that the transform accepts, for batches that have none.

        `bad` says what to do with rows for which the transform raises an error; `spare` is such a row, if known.
        """
        try:
            return self.transformed(batch, rows, where), spare or _rows_of(batch, slice(0, 1))
        except Exception as error:  # the user's transform can raise any exception
            if isinstance(error, DataError) and not bad.skips:
                raise
            one = lambda row: self.transformed(_rows_of(batch, slice(row, row + 1)), 1, where)  # noqa: E731
            good = bad.good(rows, one, error)
            if good:
                batch = _rows_of(batch, instead(good, rows))
            elif spare is not None:
                batch = {name: np.repeat(array, rows, axis=0) for name, array in spare.items()}
            else:
                raise
        return self.transformed(batch, rows, where), _rows_of(batch, slice(0, 1))

    def _columns_of_good(self, batch: pa.RecordBatch, begin: int, bad: BadRows | None) -> Batch:
        """Return the arrays of a batch, in which other rows take the places of bad ones. `begin` is its first row."""
        try:
            return self._columns(batch)
        except Exception as error:  # the transform and the values' own code may raise anything
            if bad is None:
                raise
            good = bad.good(len(batch), lambda row: self._columns(batch.slice(row, 1)), error, begin)
            if good:
                return self._columns(batch.take(pa.array(instead(good, len(batch)))))
            if self.sample is None:
                raise
            return self._columns(self.sample.take(pa.array(np.zeros(len(batch), np.int64))))

    def _columns(self, batch: pa.RecordBatch) -> Batch:
        arrays = {}
        for name, group in self.groups.items():
            exact = isinstance(group, str)  # side by side, decimals become floats
            members = members_of(group)
            parts = [to_numpy(batch.column(member), member, self.making, self.dtype, exact=exact) for member in members]
            arrays[name] = parts[0] if exact else _side_by_side(parts, members, name, self.dtype)
        return arrays

    def _transformed(self, batch: Batch) -> Batch:
        assert self.transform is not None
        result = self.transform(writable(batch))
        if not isinstance(result, Mapping):
            raise DataError(f"transform returned a {type(result).__name__}: it must return a dict of arrays [rows, …].")
        arrays = {str(name): np.asarray(array) for name, array in result.items()}
        # NumPy's own types of text depend on the longest value, so they can differ from batch to batch.
        return {name: array.astype(object) if array.dtype.kind in "US" else array for name, array in arrays.items()}

    def _check(self, batch: Batch, rows: int, where: str) -> None:
        who = "column" if self.transform is None else "the transform's"
        if batch.keys() != self.spec.keys():
            odd = sorted(batch.keys() ^ self.spec.keys())[0]
            first, later = ("a", "no") if odd in self.spec else ("no", "a")
            raise DataError(
                f"the transform returned {first} column `{odd}` for the first rows, but {later} column `{odd}` in "
                f"{where}: every batch must have the same columns."
            )
        for name, array in batch.items():
            spec = self.spec[name]
            if array.ndim == 0 or len(array) != rows:
                raise _miscounted(name, array, rows, where)
            if array.shape[1:] != spec.shape or array.dtype != spec.dtype:
                raise DataError(
                    f"{who} `{name}` is {_words(array.shape[1:], array.dtype)} in {where}, but {_words(*spec)} in the "
                    f"first rows of {self.data}: every row must have the same shape and type."
                )


def _rows_of(batch: Batch, rows: Any) -> Batch:
    return {name: array[rows] for name, array in batch.items()}


def members_of(group: Group) -> tuple[str, ...]:
    """Return the columns from which an array is made."""
    return (group,) if isinstance(group, str) else group


def groups_of(columns: Columns | None, option: str = "columns") -> dict[str, Group] | None:
    """Return the columns of each array of a batch, or None if `columns` is None. `option` is the argument's name."""
    if columns is None:
        return None
    if isinstance(columns, str):
        raise DataError(f"{option}={columns!r} is a string: write {option}=[{columns!r}].")
    try:
        named = columns if isinstance(columns, Mapping) else {name: name for name in columns}
        groups = {name: group if isinstance(group, str) else tuple(group) for name, group in named.items()}
        members = [member for group in groups.values() for member in members_of(group)]
        # The order of a set differs from process to process.
        unordered = any(isinstance(part, set | frozenset) for part in (columns, *named.values()))
        wrong = unordered or not all(isinstance(name, str) for name in (*groups, *members))
    except TypeError:
        wrong = True
    if wrong:
        raise DataError(
            f"{option}={columns!r}: expected a list of names of columns, as in {option}=['x', 'y'], or a dict of "
            f"arrays, as in {option}={{'x': ['a', 'b'], 'y': 'c'}}."
        )
    empty = next((name for name, group in groups.items() if group == ()), None)
    if empty is not None:
        raise DataError(f"{option}: `{empty}` has no columns.")
    return groups


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array to be filled.

    Arrow allocates the memory, because Arrow reuses freed memory, and aligns it so that TensorFlow need not copy it.
    """
    if dtype.hasobject:
        return np.empty(shape, dtype)
    size_bytes = math.prod(shape) * dtype.itemsize
    return np.frombuffer(pa.allocate_buffer(size_bytes), dtype).reshape(shape)


def _miscounted(name: str, array: Array, rows: int, where: str) -> DataError:
    got = f"{len(array):,} rows" if array.ndim else "a single value"
    return DataError(
        f"transform returned {got} of `{name}` for {rows:,} rows{f' of {where}' if where else ''}: it must return "
        "the same number. Filter rows with where=…."
    )


def _words(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    return f"{dtype} of shape {list(shape)}" if shape else str(dtype)


def _side_by_side(parts: Sequence[Array], members: Sequence[str], name: str, dtype: np.dtype[Any] | None) -> Array:
    """Return columns as one array [rows, columns], which is of type `dtype` if any of them are floats.

    A single column can have any type. Several columns must be numbers.
    """
    if len(parts) == 1:
        return parts[0][:, None] if parts[0].ndim == 1 else parts[0]
    for part, member in zip(parts, members, strict=True):
        if part.ndim > 2 or part.dtype.kind not in "biuf":
            raise DataError(
                f"the array `{name}` combines several columns, but `{member}` is "
                f"{_words(part.shape[1:], part.dtype)}: only columns of numbers can be combined."
            )
    parts = [part[:, None] if part.ndim == 1 else part for part in parts]
    shape = len(parts[0]), sum(part.shape[1] for part in parts)
    common = np.result_type(*(part.dtype for part in parts))
    if dtype is not None and common.kind == "f":
        common = dtype  # large integers beside float32 would otherwise make the array float64
    # Without `out`, NumPy could return an array in column-major order.
    return np.concatenate(parts, axis=1, out=np.empty(shape, common), casting="same_kind")


def dtype_of(dtype: Any) -> np.dtype[Any] | None:
    """Return the user's option `dtype` as a NumPy dtype, or None if it is not given.

    Raise DataError if NumPy does not know it.
    """
    try:
        return None if dtype is None else np.dtype(dtype)
    except TypeError:
        raise DataError(f"dtype={dtype!r} is not a NumPy dtype: write, for example, dtype='float32'.") from None


def making_of(
    fill: Mapping[str, Any] | None,
    raw: Mapping[str, Any] | None,
    names: Sequence[str],
    called: str,
    caller: Caller = "shards",
) -> Making:
    """Return the Making for the user's options `fill` and `raw`.

    Raise DataError if one of them is invalid or names a column that is not in `names`. In messages, the columns in
    `names` are called `called`. `caller` is as for Making.
    """
    for option, named in (("fill", fill or {}), ("raw", raw or {})):
        for name in named:
            if name not in names:
                raise DataError(f"{option} names `{name}`, which is not among the {called}.")
    raws = {name: _raw(name, value) for name, value in (raw or {}).items()}
    return Making(dict(fill or {}), raws, caller=caller)


def _raw(name: str, value: Any) -> Raw:
    try:
        dtype, shape = value
        raw = np.dtype(dtype), tuple(operator.index(length) for length in shape)
    except (TypeError, ValueError):
        raw = np.dtype(object), ()
    if raw[0].hasobject or min(raw[1], default=1) < 1:
        raise DataError(f"raw={{'{name}': {value!r}}}: expected a dtype and a shape, as in ('float32', (16, 3)).")
    return raw
