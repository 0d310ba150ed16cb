"""Micro-batches of a stream: their rows, how these are divided among ranks, and how a rank converts its share.

Rows in this process (arrays, Arrow tables, and small pieces that Spark's tasks have returned) are sent to the ranks.
Other rows are in Arrow files, which tasks or the driver have written, or in a Parquet file. From files, each rank reads
its own rows.
"""

from __future__ import annotations

import base64
import math
import os
import pickle
import posixpath
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from sparkring.data.columns import Making, changes_with_nulls, to_numpy, writable
from sparkring.errors import DataError
from sparkring.runtime.storage import Location, locate

EXPECTED = (
    "expected a dict of arrays with equally many rows, a pandas DataFrame, an Arrow table, or the path of a Parquet "
    "file"
)


class Rows(Protocol):
    """The rows of a micro-batch, or a part of them.

    `count` is the number of rows, and `kinds` has the type of each column, as text. slice() returns a part, which can
    be pickled. columns() returns an array of shape [rows, …] for each column, which the cell may change; the names in
    `nulls` are columns whose arrays can hold nulls, since some rows of the micro-batch have nulls. table() returns an
    Arrow table.
    """

    @property
    def count(self) -> int: ...
    @property
    def kinds(self) -> Mapping[str, str]: ...
    def with_nulls(self) -> frozenset[str]: ...
    def slice(self, first: int, count: int) -> Rows: ...
    def columns(self, nulls: frozenset[str]) -> dict[str, Any]: ...
    def table(self) -> pa.Table: ...


class ArrayRows:
    """Rows in arrays. The first axis of each array is the row."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = dict(arrays)

    @property
    def count(self) -> int:
        return len(next(iter(self._arrays.values()), ()))

    @property
    def kinds(self) -> Mapping[str, str]:
        return {name: f"{array.dtype}{list(array.shape[1:]) or ''}" for name, array in self._arrays.items()}

    def with_nulls(self) -> frozenset[str]:
        return frozenset()

    def slice(self, first: int, count: int) -> ArrayRows:
        return ArrayRows({name: array[first : first + count] for name, array in self._arrays.items()})

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Return some of the columns."""
        return {name: self._arrays[name] for name in names}

    def take(self, indices: Any) -> ArrayRows:
        return ArrayRows({name: array[indices] for name, array in self._arrays.items()})

    def columns(self, nulls: frozenset[str]) -> dict[str, Any]:
        return writable(self._arrays)

    def table(self) -> pa.Table:
        return pa.table({
            name: pa.array(array if array.ndim == 1 else list(array.reshape(len(array), math.prod(array.shape[1:]))))
            for name, array in self._arrays.items()
        })  # fmt: skip


class ArrowRows:
    """Rows in an Arrow table."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    @property
    def count(self) -> int:
        return int(self._table.num_rows)

    @property
    def kinds(self) -> Mapping[str, str]:
        return _kinds(self._table.schema)

    def with_nulls(self) -> frozenset[str]:
        return frozenset(
            field.name
            for field, column in zip(self._table.schema, self._table.columns, strict=True)
            if column.null_count and changes_with_nulls(field.type)
        )

    def slice(self, first: int, count: int) -> ArrowRows:
        return ArrowRows(self._table.slice(first, count))

    def values(self, names: Iterable[str]) -> dict[str, pa.Array]:
        """Return some of the columns as they are, without a conversion that could change values such as integers.

        A column of a dictionary type, such as a pandas categorical, becomes a column of the values.
        """
        columns = {name: _whole(self._table.column(name)) for name in names}
        return {name: column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
                for name, column in columns.items()}  # fmt: skip

    def take(self, indices: Any) -> ArrowRows:
        return ArrowRows(self._table.take(pa.array(indices)))

    def columns(self, nulls: frozenset[str]) -> dict[str, Any]:
        return _arrays(self._table, nulls)

    def table(self) -> pa.Table:
        return self._table

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_ipc, (pickle.PickleBuffer(as_ipc(self._table)),)


class StoredPiece(NamedTuple):
    """All rows of an Arrow file that a task or the driver has written, or the bytes of such a file."""

    file: Location | bytes
    rows: int


class StoredRows:
    """`count` consecutive rows of the given pieces, beginning with row `first`."""

    def __init__(
        self,
        schema: bytes,
        pieces: Sequence[StoredPiece],
        nulls: frozenset[str],
        first: int = 0,
        count: int | None = None,
    ) -> None:
        self._schema = schema
        self._pieces = tuple(pieces)
        self._nulls = nulls
        self._first = first
        self._count = sum(piece.rows for piece in pieces) if count is None else count

    @property
    def count(self) -> int:
        return self._count

    @property
    def kinds(self) -> Mapping[str, str]:
        return _kinds(pa.ipc.read_schema(pa.py_buffer(self._schema)))

    def with_nulls(self) -> frozenset[str]:
        return self._nulls

    def slice(self, first: int, count: int) -> StoredRows:
        """Return a part of the rows. Pieces in memory are cut, so that a rank is not sent the rows of others."""
        first += self._first
        pieces: list[StoredPiece] = []
        before = skipped = 0
        for piece in self._pieces:
            begin, end = max(first - before, 0), min(first + count - before, piece.rows)
            before += piece.rows
            if begin >= end:
                continue
            if isinstance(piece.file, bytes) and end - begin < piece.rows:
                piece = StoredPiece(as_ipc(_read_piece(piece).slice(begin, end - begin)).to_pybytes(), end - begin)
            elif not pieces:
                skipped = begin
            pieces.append(piece)
        return StoredRows(self._schema, pieces, self._nulls, skipped, count)

    def columns(self, nulls: frozenset[str]) -> dict[str, Any]:
        return _arrays(self.table(), nulls)

    def described(self) -> dict[str, Any]:
        """Return what from_described() needs, as plain values. All pieces must be files."""
        names = [file.path.rpartition("/")[2] for file in self.files()]
        pieces = list(zip(names, (piece.rows for piece in self._pieces), strict=True))
        return {"schema": base64.b64encode(self._schema).decode(), "pieces": pieces, "nulls": sorted(self._nulls)}

    @staticmethod
    def from_described(description: Mapping[str, Any], folder: Location) -> StoredRows:
        """Return the rows that described() has described; their files are in `folder`."""
        pieces = [StoredPiece(folder / name, rows) for name, rows in description["pieces"]]
        return StoredRows(base64.b64decode(description["schema"]), pieces, frozenset(description["nulls"]))

    def files(self) -> list[Location]:
        """Return the files that hold these rows."""
        return [piece.file for piece in self._pieces if not isinstance(piece.file, bytes)]

    def table(self) -> pa.Table:
        schema = pa.ipc.read_schema(pa.py_buffer(self._schema))
        tables = [_read_piece(piece).cast(schema) for piece in self._pieces]
        return pa.concat_tables([schema.empty_table(), *tables]).slice(self._first, self._count)


class ParquetRows:
    """`count` rows of a Parquet file, from row `first` on. Only the row groups that contain them are read."""

    def __init__(self, file: Location, kinds: Mapping[str, str], nulls: frozenset[str], first: int, count: int) -> None:
        self._file, self._kinds, self._nulls, self._first, self._count = file, kinds, nulls, first, count

    @property
    def count(self) -> int:
        return self._count

    @property
    def kinds(self) -> Mapping[str, str]:
        return self._kinds

    def with_nulls(self) -> frozenset[str]:
        return self._nulls

    def slice(self, first: int, count: int) -> ParquetRows:
        return ParquetRows(self._file, self._kinds, self._nulls, self._first + first, count)

    def columns(self, nulls: frozenset[str]) -> dict[str, Any]:
        return _arrays(self.table(), nulls)

    def table(self) -> pa.Table:
        import pyarrow.parquet as pq

        try:
            with self._file.fs.open(self._file.path, "rb") as opened:
                parquet = pq.ParquetFile(opened)
                sizes = (parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups))
                ends = list(accumulate(sizes))
                begin, end = bisect_right(ends, self._first), bisect_right(ends, self._first + self._count - 1) + 1
                rows = parquet.read_row_groups(range(begin, end))
        except FileNotFoundError:
            raise DataError(f"{self._file.written} was removed before it was read.") from None
        return rows.slice(self._first - (ends[begin - 1] if begin else 0), self._count)


def rows_of(item: Any, called: str) -> Rows:
    """Return the rows of what an iterator has yielded. `called` names the item in errors.

    Raises DataError if the item is of none of the kinds in EXPECTED, or if its columns have different numbers of rows.
    """
    if isinstance(item, str | os.PathLike):
        return _parquet(locate(item), called)
    if isinstance(item, pa.RecordBatch):
        item = pa.Table.from_batches([item])
    if isinstance(item, pa.Table):
        return ArrowRows(item)
    if type(item).__module__.partition(".")[0] == "pandas" and hasattr(item, "columns"):
        try:
            return ArrowRows(pa.Table.from_pandas(item, preserve_index=False))
        except (pa.ArrowException, TypeError) as error:
            raise DataError(f"{called}: Arrow cannot represent a column of the DataFrame: {error}") from error
    if isinstance(item, Mapping) and item:
        return ArrayRows(_checked(item, called))
    raise DataError(f"{called} is a `{type(item).__name__}`: {EXPECTED}.")


def _checked(item: Mapping[Any, Any], called: str) -> dict[str, Any]:
    """Return the values of a dict as arrays with equally many rows."""
    arrays: dict[str, Any] = {}
    for name, value in item.items():
        value = value.detach().cpu() if hasattr(value, "detach") else value
        array = np.asarray(value)
        if not array.ndim:
            raise DataError(f"{called}: `{name}` is a single value: {EXPECTED}.")
        # NumPy's own types of text and bytes depend on the longest string.
        arrays[str(name)] = array.astype(object) if array.dtype.kind in "US" else array
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"`{name}` has {rows:,}" for name, rows in lengths.items())
        raise DataError(f"{called}: the columns have different numbers of rows: {listed}.")
    return arrays


def _parquet(file: Location, called: str) -> ParquetRows:
    import pyarrow.parquet as pq

    from sparkring.data.dataset import is_table
    from sparkring.data.delta import table_of

    if table := table_of(file.fs, posixpath.dirname(file.path)):
        raise is_table(f"{called}: {file.written}", *table)
    try:
        with file.fs.open(file.path, "rb") as opened:
            parquet = pq.ParquetFile(opened)
            metadata, schema = parquet.metadata, parquet.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{called}: {file.written} cannot be read as a Parquet file: {error}") from error
    names = {field.name for field in schema if changes_with_nulls(field.type)}
    nulls = names & set(_with_nulls(metadata))
    return ParquetRows(file, _kinds(schema), frozenset(nulls), 0, metadata.num_rows)


def _with_nulls(metadata: Any) -> Iterator[str]:
    """Yield the paths of a Parquet file's columns that may have nulls: the file has a count above 0, or no count."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):  # each field of a struct is a column of its own
            statistics = column.statistics
            if statistics is None or not statistics.has_null_count or statistics.null_count:
                yield column.path_in_schema


# ── Division among ranks ──────────────────────────────────────────────────────────────────────────────────────────────


def parts_of(rows: Rows, most: int | None) -> Iterator[Rows]:
    """Yield the rows in parts of at most `most` rows, all of about the same size."""
    number = 1 if not most else -(-rows.count // most)
    for first, count in (_span(rows.count, number, part) for part in range(number)):
        yield rows.slice(first, count) if number > 1 else rows


def share_of(rows: Rows, size: int, rank: int) -> Rows:
    """Return the consecutive rows that a rank gets. The numbers of rows of two ranks differ by at most 1.

    If there are fewer rows than ranks, each rank gets one row, and some rows are given to several ranks.
    """
    if rows.count < size:
        return rows.slice(rank % rows.count, 1)
    first, count = _span(rows.count, size, rank)
    return rows.slice(first, count)


def _span(rows: int, parts: int, part: int) -> tuple[int, int]:
    first = rows * part // parts
    return first, rows * (part + 1) // parts - first


# ── Arrow ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _kinds(schema: pa.Schema) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def _arrays(table: pa.Table, nulls: frozenset[str]) -> dict[str, Any]:
    making = Making({}, {}, nulls)
    columns = zip(table.schema.names, table.columns, strict=True)
    return writable({name: to_numpy(_whole(column), name, making) for name, column in columns})


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array. For extension types, combine_chunks() returns a chunked array with one chunk."""
    combined = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def as_ipc(table: pa.Table) -> pa.Buffer:
    """Return the rows of a table in Arrow's stream format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _from_ipc(buffer: Any) -> ArrowRows:
    return ArrowRows(pa.ipc.open_stream(pa.py_buffer(buffer)).read_all())


def _read_piece(piece: StoredPiece) -> pa.Table:
    if isinstance(piece.file, bytes):
        return pa.ipc.open_stream(pa.py_buffer(piece.file)).read_all()
    try:
        if piece.file.local:
            with pa.memory_map(piece.file.path) as mapped:
                return pa.ipc.open_stream(mapped).read_all()
        with piece.file.fs.open(piece.file.path, "rb") as opened:
            return pa.ipc.open_stream(opened).read_all()
    except FileNotFoundError:
        raise DataError(f"{piece.file.written} was removed before the ranks had read it.") from None
