"""Reads rows of Parquet files in the model process.

If the columns that the model uses are stored in Parquet files, Spark need not decode them and send them to Python.
Instead, Spark sends only one integer for each row, which stands for the row's file and the row's number in this file.
The DataFrame may have a filter, and may have computed columns that the model does not use.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.errors import DataError
from sparkring.runtime.storage import locate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_MOST_FILES = 10_000  # the names of all files are sent to each machine
_ROW_BITS = 31  # the bits of an integer that hold the number of the row; the other bits stand for the file
_READ_BYTES = 8 << 20  # about how many bytes are decoded at once


class Files(NamedTuple):
    """The files of a DataFrame: `paths` maps the checksum of each file's name in Spark to the file's path.

    `types` are the Arrow types of the columns that the model uses. `exact` says whether names of columns are
    case-sensitive. `filtered` says whether the DataFrame may lack some rows of the files.
    """

    paths: Mapping[int, str]
    types: pa.Schema
    exact: bool
    filtered: bool

    def first_rows(self, most: int) -> pa.RecordBatch | None:
        """Return the first rows of the first file that has any, or None if the first eight files have no rows."""
        for path in list(dict.fromkeys(self.paths.values()))[:8]:
            file = _OpenFile(path, self)
            if rows := min(most, file.rows):
                return _one_batch(file.take(np.arange(rows)))
        return None


class FileRows:
    """Reads the rows that integers stand for. Each thread has its own open file."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._local = threading.local()

    def read(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows whose numbers are in the only column of `rows`."""
        numbers = rows.column(0).to_numpy()
        files, at = numbers >> _ROW_BITS, numbers & ((1 << _ROW_BITS) - 1)
        cuts = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(numbers)]
        parts = [
            self._file(int(files[begin])).take(at[begin:end]) for begin, end in itertools.pairwise(cuts) if begin < end
        ]
        return _one_batch(parts[0] if len(parts) == 1 else pa.concat_tables(parts))

    def _file(self, checksum: int) -> _OpenFile:
        open_file: _OpenFile | None = getattr(self._local, "file", None)
        path = self._files.paths.get(checksum)
        if path is None:
            raise DataError(
                "the DataFrame has a file that it did not have when predict() was called: call predict() again."
            )
        if open_file is None or open_file.path != path:
            self._local.file = open_file = _OpenFile(path, self._files)
        return open_file


class _OpenFile:
    """A Parquet file that is read from beginning to end, in steps. Going back is possible, but slow."""

    def __init__(self, path: str, files: Files) -> None:
        self.path = path
        self._types = files.types
        with self._reading():
            self._file = pq.ParquetFile(locate(path).path)
        self.rows: int = self._file.metadata.num_rows
        if self.rows >> _ROW_BITS:
            raise DataError(
                f"{path} has {self.rows:,} rows, but a file may have at most {(1 << _ROW_BITS) - 1:,}: split it "
                "into smaller files."
            )
        stored = self._file.schema_arrow
        self._names = {field.name: name for field in files.types if (name := _stored_name(field.name, stored, files))}
        _check_types(files.types, stored, self._names, path)
        groups = [self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups)]
        self._begins = np.concatenate([[0], np.cumsum(groups, dtype=np.int64)])
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._table, self._begin, self._end = files.types.empty_table(), 0, 0

    def take(self, rows: Any) -> pa.Table:
        """Return the rows with these numbers."""
        if (np.diff(rows) < 0).any():
            order = np.argsort(rows, kind="stable")
            back = np.empty(len(rows), np.int64)
            back[order] = np.arange(len(rows))
            return self.take(rows[order]).take(pa.array(back))
        parts, done = [], 0
        while done < len(rows):
            self._go_to(int(rows[done]))
            until = int(np.searchsorted(rows, self._end))
            some = rows[done:until] - self._begin
            together = some[-1] - some[0] + 1 == len(some) and (np.diff(some) == 1).all()
            parts.append(self._table.slice(some[0], len(some)) if together else self._table.take(pa.array(some)))
            done = until
        return parts[0] if len(parts) == 1 else pa.concat_tables(parts)

    def _go_to(self, row: int) -> None:
        """Decode the part of the file that contains the row."""
        group = int(np.searchsorted(self._begins, row, "right")) - 1
        if not self._begin <= row < self._end:
            group_begin = int(self._begins[group])
            if row < self._begin or self._end <= group_begin:  # before the last decoded part, or in a later row group
                self._batches, self._end = self._decoded(group), group_begin
        while row >= self._end:
            with self._reading():
                batch = next(self._batches, None)
            if batch is None:
                raise DataError(
                    f"{self.path} has fewer rows than Spark found in it. Perhaps the file was replaced: call predict() "
                    "again."
                )
            self._begin, self._end = self._end, self._end + len(batch)
            with self._reading():
                self._table = self._as_in_spark(batch)

    def _decoded(self, group: int) -> Iterator[pa.RecordBatch]:
        if group >= self._file.num_row_groups:
            return iter(())
        footer = self._file.metadata.row_group(group)
        tops = set(self._names.values())
        chunks = (footer.column(number) for number in range(footer.num_columns))
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in tops)
        rows = max(1, min(1 << 16, _READ_BYTES * footer.num_rows // max(size, 1)))
        batches: Iterator[pa.RecordBatch] = self._file.iter_batches(
            rows, row_groups=[group], columns=sorted(tops), use_threads=False
        )
        return batches

    def _as_in_spark(self, batch: pa.RecordBatch) -> pa.Table:
        columns = [
            _converted(batch.column(self._names[field.name]), field.type)
            if field.name in self._names
            else pa.nulls(len(batch), field.type)  # Spark, too, reads nulls if a file lacks a column
            for field in self._types
        ]
        return pa.Table.from_arrays(columns, schema=self._types)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path} cannot be read: {error}") from error


def files_of(data: DataFrame, names: Sequence[str], types: pa.Schema) -> Files | None:
    """Return the files that store these columns with these Arrow types, or None if Spark has to compute the columns."""
    try:
        return _files_of(data, names, types)
    except Exception:  # Spark's internal classes may differ in this version, or a file may be unreadable
        return None


def row_numbers() -> Column:
    """Return the column with the integers that stand for the rows."""
    from pyspark.sql import functions

    file = functions.crc32(functions.col("_metadata.file_path").cast("binary"))
    return functions.shiftleft(file, _ROW_BITS).bitwiseOR(functions.col("_metadata.row_index"))


def _files_of(data: DataFrame, names: Sequence[str], types: pa.Schema) -> Files | None:
    if data.isStreaming or not all(_is_sure(field.type) for field in types):
        return None
    from sparkring.cluster.session import cluster_of

    conf = data.sparkSession.conf
    if conf.get("spark.sql.parquet.fieldId.read.enabled", "false") == "true":
        return None
    stored = cluster_of(data.sparkSession).parquet_files(data, list(names))
    if stored is None or not 0 < len(stored.paths) <= _MOST_FILES:
        return None
    if not all(path.startswith(("file:", "dbfs:")) for path in stored.paths):
        return None
    paths: dict[int, str] = {}
    for path in stored.paths:
        plain = unquote(path)
        for written in {path, plain, path.replace(":///", ":/"), plain.replace(":///", ":/")}:
            if paths.setdefault(zlib.crc32(written.encode()), plain) != plain:
                return None
    data.select(row_numbers())  # this raises an error if Spark does not number the rows of this DataFrame
    exact = conf.get("spark.sql.caseSensitive", "false") == "true"
    files = Files(paths, types, exact, stored.filtered)
    _OpenFile(next(iter(paths.values())), files)  # this raises an error if this process cannot read the file
    return files


def _is_sure(kind: pa.DataType) -> bool:
    """Return whether it is certain that pyarrow and Spark read the same values of this type."""
    types = pa.types
    if types.is_list(kind):
        return _is_sure(kind.value_type)
    if types.is_floating(kind):
        return not types.is_float16(kind)
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_string(kind) or types.is_binary(kind))


def _stored_name(name: str, stored: pa.Schema, files: Files) -> str:
    """Return the name that a column has in a file, or "" if the file does not have the column."""
    matches = [
        candidate
        for candidate in stored.names
        if candidate == name or (not files.exact and candidate.lower() == name.lower())
    ]
    if len(matches) > 1:
        raise DataError(
            f"a file has several columns `{name}` that differ only in upper and lower case: set "
            "spark.sql.caseSensitive to true, or rename the columns."
        )
    return matches[0] if matches else ""


def _check_types(types: pa.Schema, stored: pa.Schema, names: Mapping[str, str], path: str) -> None:
    for name, stored_name in names.items():
        actual, expected = stored.field(stored_name).type, types.field(name).type
        if not _fits(actual, expected):
            raise DataError(
                f"column `{name}` of {path} has the type {actual}, but in the DataFrame it has the type {expected}."
            )


def _fits(actual: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether values of the type `actual`, as stored in a file, can be read as the type `expected`."""
    types = pa.types
    if types.is_dictionary(actual):
        return _fits(actual.value_type, expected)
    if types.is_list(expected):
        return bool(
            (types.is_list(actual) or types.is_large_list(actual)) and _fits(actual.value_type, expected.value_type)
        )
    if types.is_integer(expected):
        return bool(types.is_integer(actual))
    if types.is_floating(expected):
        return bool(types.is_floating(actual) and actual.bit_width <= expected.bit_width)
    if types.is_boolean(expected):
        return bool(actual == expected)
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_one(actual) for is_one in texts)


def _converted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column as tasks would send it: in its Spark type."""
    return column if column.type == kind else column.cast(kind)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches()
    return batch
