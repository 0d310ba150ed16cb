"""A Parquet data set as described by its footers: files, row groups, rows, columns.

Rows are read only to count the rows that pass a filter, and only if the footers do not contain enough information.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import functools
import hashlib
import itertools
import os
import posixpath
import re
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from sparkring.data.delta import LOG, DeltaVersion, read_table, table_of, unpacked
from sparkring.data.folders import on_credentials, storage_errors
from sparkring.data.where import Where, compile_where, nearest
from sparkring.errors import DataError, PathError
from sparkring.runtime.kernel import tell
from sparkring.runtime.storage import Location, locate, protocols

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from pyspark.sql.types import DataType

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Found = TypeVar("Found")
Wanted = TypeVar("Wanted")

AT_ONCE = 16  # the number of footers to read at the same time; it is high, because reading them is mostly waiting
TELL_AFTER_S = 2.0
LOCAL_BUFFER_BYTES, REMOTE_BUFFER_BYTES = 1 << 20, 8 << 20
LARGE_BYTES = 128_000_000  # a remote row group above this size is not fetched whole
# The number of bytes of a value, by its physical type.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_TABLES = {"Delta": rf"(^|/){LOG}/", "Hudi": r"(^|/)\.hoodie/", "Iceberg": r"(^|/)metadata/[^/]*\.metadata\.json$"}
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
# The errors that Arrow raises for files that are damaged or not Parquet, and the errors of file systems.
BROKEN = (pa.ArrowException, OSError, ValueError, EOFError)


class RowGroup(NamedTuple):
    """One row group: `rows` of its `rows_in_file` rows pass the filter.

    `size_bytes` is the compressed size of the columns that are read, and `stored_bytes` is their size in memory. For
    strings and binary values, the footer has only the encoded size, which is too small if many of them are equal.
    """

    rows: int
    size_bytes: int
    stored_bytes: int
    rows_in_file: int


class DataFile(NamedTuple):
    """One Parquet file. `version` is a digest of its footer.

    `partitions` has the columns that have one value in the whole file, and need not be stored in it, with their values.
    `deleted` says which rows were deleted from a Delta table, as delta.packed() returns it; it is empty if none were.
    """

    path: str
    size_bytes: int
    row_groups: tuple[RowGroup, ...]
    version: str
    partitions: tuple[tuple[str, Any], ...] = ()
    deleted: bytes = b""

    def remaining(self, row_group: int) -> Any:
        """Return an array of booleans that says which rows of a row group have not been deleted."""
        begin = sum(group.rows_in_file for group in self.row_groups[:row_group])
        rows = sum(group.rows_in_file for group in self.row_groups)
        return ~unpacked(self.deleted, rows)[begin : begin + self.row_groups[row_group].rows_in_file]


@dataclass(frozen=True)
class Dataset:
    """A data set as it was when it was opened.

    `version` is a digest of the footers, the partitions, the chosen columns and the filter. `schema` holds the chosen
    columns, in the order in which they were chosen. `stored_schema` holds all columns, from the files and from their
    paths. `reads` names the chosen columns and the columns that the filter reads. `where` is the filter as text.
    `nulls` holds the number of nulls in each column, as far as footers and paths show it; nulls in rows that do not
    pass the filter, or were deleted, are counted, too. If the data comes from a DataFrame, `spark` holds the Spark
    types of the columns that hold rows or maps. If it is a Delta table, `table` is its path, `table_version` the number
    of its version, and `stored_as` has the name in the files of each column that is renamed in the table.
    """

    name: str
    fs: AbstractFileSystem
    files: tuple[DataFile, ...]
    schema: pa.Schema
    stored_schema: pa.Schema
    reads: tuple[str, ...]
    version: str
    where: str = ""
    condition: pc.Expression | None = None
    nulls: Mapping[str, int] = field(default_factory=dict)
    spark: Mapping[str, DataType] = field(default_factory=dict)
    table: str = ""
    table_version: int | None = None
    stored_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def version_words(self) -> str:
        """The version as messages name it: the digest and, before it, the number of a Delta table's version."""
        return self.version if self.table_version is None else f"{self.table_version} ({self.version})"

    @property
    def is_filtered(self) -> bool:
        """Whether rows are left out that the files have: by the filter, or because they were deleted."""
        return self.condition is not None or any(file.deleted for file in self.files)

    def stored(self, name: str) -> str:
        """Return the name of a column in the files."""
        return self.stored_as.get(name, name)

    def at(self, table_version: int) -> Dataset:
        """Return another version of the same Delta table, with the same columns and filter."""
        opened = _open([locate(self.table)], self.columns, (self.condition, self.where), self.name, table_version, None)
        return replace(opened, spark=self.spark)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    @property
    def rows(self) -> int:
        """The number of rows that pass the filter."""
        return sum(group.rows for group in self._groups())

    @property
    def row_groups(self) -> int:
        """The number of row groups, including those in which no row passes the filter."""
        return len(self._groups())

    @property
    def size_bytes(self) -> int:
        """The compressed size of the columns that are read."""
        return sum(group.size_bytes for group in self._groups())

    @property
    def local(self) -> bool:
        return Location(self.fs, "", self.name).local

    def counts(self) -> list[list[int]]:
        """The number of rows that pass the filter, by file and row group."""
        return [[group.rows for group in file.row_groups] for file in self.files]

    def row_bytes(self) -> float:
        rows = sum(group.rows_in_file for group in self._groups())
        return sum(group.stored_bytes for group in self._groups()) / rows if rows else 0.0

    def _groups(self) -> list[RowGroup]:
        return [group for file in self.files for group in file.row_groups]


def open_dataset(
    source: Source,
    columns: Sequence[str] | None = None,
    where: Where = None,
    *,
    name: str = "",
    version: int | None = None,
    timestamp: str | datetime.datetime | None = None,
) -> Dataset:
    """Read the footers of a Parquet file, a folder (with or without Hive partitions), a glob, or a list of these.

    The folder of a Delta table has the files of its newest version, of version number `version`, or of the newest
    version at the time `timestamp`.
    If there is a filter, the rows that pass it are counted, if necessary by reading the filter's columns. `name` is the
    name of the data set in messages; by default, it is made from the paths.
    Raise DataError if there is no file or no row, if a file is damaged or not Parquet, if the columns of the files
    differ, or if a column does not exist.
    """
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not sources:
        raise DataError("the list of paths is empty.")
    places = [locate(path) for path in sources]
    if not name:
        more = f", … ({len(sources)})" if len(sources) > 3 else ""
        name = ", ".join(os.fspath(path) for path in sources[:3]) + more
    with _reaching(places[0]):
        return _open(places, columns, where, name, version, timestamp)


@contextlib.contextmanager
def _reaching(place: Location) -> Iterator[None]:
    """Turn the errors of remote storage into DataErrors. Each fsspec backend raises its own."""
    if place.local:
        yield
        return
    with storage_errors(f"{place.written} cannot be read", on_credentials(place)):
        yield


def _open(
    places: Sequence[Location],
    columns: Sequence[str] | None,
    where: Where | tuple[pc.Expression | None, str],
    name: str,
    version: int | None,
    timestamp: str | datetime.datetime | None,
) -> Dataset:
    """Carry out open_dataset(). If `where` is a tuple, it is the result of compile_where()."""
    fs, table = places[0].fs, None
    if any(place.fs != fs for place in places):
        raise DataError(f"{name}: these paths are on different file systems; use one file system per data set.")
    if len(places) == 1 and fs.exists(f"{places[0].path}/{LOG}"):
        table = read_table(places[0], version, timestamp)
        parquet_files = [_File(file.path, posixpath.basename(file.path), file.size_bytes) for file in table.files]
        deleted = [file.deleted for file in table.files]
    elif version is not None or timestamp is not None:
        option = "version" if version is not None else "timestamp"
        raise DataError(f"{name} is not a Delta table: leave out {option}=, which chooses a version of such a table.")
    else:
        known_table = functools.cache(functools.partial(table_of, fs))
        parquet_files = [file for place in places for file in _files(place, known_table)]
        deleted = [b""] * len(parquet_files)
    if not parquet_files:
        raise DataError(f"{name}: {'it has no rows' if table else 'there is no Parquet file in this folder'}.")
    read = functools.partial(_footer, fs, lost=f"version {table.version:,} of {name}" if table else "")
    footers = _at_once(read, parquet_files, f"reading the footers of {name}")
    if table:
        whole = table.schema
        partitioned = [
            _constants(table, file.partitions, footer) for file, footer in zip(table.files, footers, strict=True)
        ]
    else:
        partitioned, kinds = _partitions([file.below for file in parquet_files])
        schemas = [
            _with_partitions(footer.schema, keys, kinds) for footer, keys in zip(footers, partitioned, strict=True)
        ]
        whole = schemas[0]
    named = [column for column in whole.names if not re.fullmatch(r"__index_level_\d+__", column)]  # pandas' index
    chosen = list(dict.fromkeys(columns)) if columns is not None else named
    for column in chosen:
        if column not in whole.names:
            raise DataError(f"{name} has no column `{column}`: {nearest(column, whole.names)}")
        if whole.names.count(column) > 1:
            raise DataError(
                f"{name} has several columns called `{column}`: rename all but one, or choose others with columns=[…]."
            )
    if not chosen:
        raise DataError(f"{name}: {'it has no columns' if columns is None else 'columns=[] selects no columns'}.")
    condition, words = where if isinstance(where, tuple) else compile_where(where, whole)
    filtered = _named_in(condition, whole) if condition is not None else set()
    reads = tuple(column for column in whole.names if column in {*chosen, *filtered})
    if table:
        _check_castable(table, footers, parquet_files, reads)
    else:
        _check_equal(schemas, [file.below for file in parquet_files], reads)
    stored_as = table.stored_as if table else {}
    stored = {stored_as.get(column, column) for column in reads}
    files = tuple(
        _without_deleted(
            DataFile(file.path, file.size_bytes, _row_groups(footer.metadata, stored), footer.version, keys, gone)
        )
        for file, footer, keys, gone in zip(parquet_files, footers, partitioned, deleted, strict=True)
    )
    schema = pa.schema([whole.field(column) for column in chosen])
    digest = hashlib.sha256(repr((chosen, words)).encode())
    for file in files:
        digest.update(f"{file.version}{file.partitions}".encode() + file.deleted)
    columns_of = {stored_as.get(column, column): column for column in chosen}
    nulls: Counter[str] = Counter()
    for footer in footers:
        counts = null_counts(footer.metadata, set(columns_of))
        nulls.update({columns_of[column]: count for column, count in counts.items()})
    for file in files:
        empty = [key for key, value in file.partitions if value is None and key in chosen]
        nulls.update(dict.fromkeys(empty, sum(group.rows_in_file for group in file.row_groups)))
    dataset = Dataset(name, fs, files, schema, whole, reads, digest.hexdigest()[:16], words, condition, nulls)
    if table:
        path = places[0].anchored().written
        dataset = replace(dataset, table=path, table_version=table.version, stored_as=stored_as)
    if condition is not None:
        dataset = _counted(dataset, filtered)
    if not dataset.rows:
        stored_rows = any(group.rows_in_file for file in files for group in file.row_groups)
        why = f"no row passes the filter `{words}`" if words and stored_rows else "it has no rows"
        raise DataError(f"{name}: {why}.")
    return dataset


def having_nulls(dataset: Dataset, columns: Iterable[str]) -> frozenset[str]:
    """Return those `columns` that have nulls in rows that pass the filter and were not deleted.

    If rows are left out, the values of these columns may have to be read.
    """
    names = {name for name in columns if dataset.nulls.get(name)}
    if not dataset.is_filtered or not names:
        return frozenset(names)
    filtered = set() if dataset.condition is None else _named_in(dataset.condition, dataset.stored_schema)
    passing = pc.scalar(True) if dataset.condition is None else dataset.condition
    datasets = {name: replace(dataset, condition=passing & pc.field(name).is_null()) for name in names}
    return frozenset(name for name, rest in datasets.items() if _counted(rest, {*filtered, name}).rows)


def arrow_file_system(fs: AbstractFileSystem) -> Any:
    """Return `fs` as a file system for Arrow. For local files, return Arrow's own, which is the fastest."""
    import pyarrow.fs

    if Location(fs, "", "").local:
        return pyarrow.fs.LocalFileSystem()
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs))


def open_file(dataset: Dataset, file: int, content: Callable[[], bytes] | None = None) -> pq.ParquetFile:
    """Open file number `file`, or what `content` returns, the content of this file. The caller must close it.

    Raise DataError if the file cannot be read, or if it has been removed or rewritten since the data set was opened.
    """
    known = dataset.files[file]
    with _reaching(Location(dataset.fs, known.path, known.path)):
        return _open_file(dataset, known, content)


def _open_file(dataset: Dataset, known: DataFile, content: Callable[[], bytes] | None) -> pq.ParquetFile:
    try:
        # By default, Arrow reads whole columns of a row group before it decodes them. With a buffer, Arrow reads and
        # decodes one piece after another, which is faster for local files. In remote storage, each piece is a request,
        # so a buffer is used only for large row groups, whose columns would otherwise need too much memory.
        if content is not None:
            parquet_file = pq.ParquetFile(pa.BufferReader(content()))
        elif dataset.local:
            # With pre_buffer=True, the default in pyarrow 26, Arrow would read whole columns in spite of the buffer.
            parquet_file = pq.ParquetFile(known.path, buffer_size=LOCAL_BUFFER_BYTES, pre_buffer=False)
        else:
            large = max(group.size_bytes for group in known.row_groups) > LARGE_BYTES
            parquet_file = pq.ParquetFile(
                _opened(dataset.fs, known.path, known.size_bytes),
                metadata=_remote_footer(dataset.fs, known.path, known.size_bytes, known.version),
                buffer_size=REMOTE_BUFFER_BYTES if large else 0,
                pre_buffer=not large,
            )
    except FileNotFoundError:
        raise DataError(f"{known.path} has been removed since {_called(dataset)} was opened.") from None
    except BROKEN as error:
        with contextlib.suppress(OSError):
            dataset.fs.invalidate_cache(known.path)
            if dataset.fs.size(known.path) != known.size_bytes:
                raise _rewritten(dataset, known.path) from None
        raise _broken(known.path, error) from error
    rows = [parquet_file.metadata.row_group(group).num_rows for group in range(parquet_file.metadata.num_row_groups)]
    if rows != [group.rows_in_file for group in known.row_groups]:
        parquet_file.close(force=True)
        raise _rewritten(dataset, known.path)
    return parquet_file


def _rewritten(dataset: Dataset, path: str) -> DataError:
    return DataError(f"{path} has been rewritten since {_called(dataset)} was opened: open it again.")


def _called(dataset: Dataset) -> str:
    return dataset.name if dataset.table_version is None else f"version {dataset.table_version:,} of {dataset.name}"


@functools.lru_cache(maxsize=10_000)
def _remote_footer(fs: AbstractFileSystem, path: str, size_bytes: int, version: str) -> pq.FileMetaData:
    """Return a remote file's footer. It is cached, because requests cost time and money.

    `version` is used only as a key of the cache: if a file has been rewritten, its footer is read again.
    """
    with _opened(fs, path, size_bytes) as opened:
        return pq.read_metadata(opened)


def _opened(fs: AbstractFileSystem, path: str, size_bytes: int) -> Any:
    """Open a remote file. If its size is known, s3fs need not ask for it."""
    return fs.open(path, "rb", **({"size": size_bytes} if "s3" in protocols(fs) else {}))


# ── Files ─────────────────────────────────────────────────────────────────────


class _File(NamedTuple):
    path: str
    below: str  # the path relative to the folder that the user gave, such as day=3/part-0.parquet
    size_bytes: int


class _Footer(NamedTuple):
    metadata: pq.FileMetaData
    schema: pa.Schema
    version: str


def _files(place: Location, known_table: Callable[[str], tuple[str, str] | None]) -> list[_File]:
    """Return the files at a path, sorted by name. In folders, hidden files and subfolders are left out.

    `known_table` is table_of() for the file system. Files of tables are refused: some may have been removed from them.
    """
    fs, path = place.fs, place.path

    def check(folder: str) -> None:
        if table := known_table(folder):
            raise is_table(place.written, *table)

    try:
        if any(sign in path for sign in "*?[") and not fs.exists(path):
            infos = {match: fs.info(match) for match in fs.glob(path)}
            base = posixpath.dirname(path[: min(path.find(sign) for sign in "*?[" if sign in path)])
            check(base)
            for folder in [match for match, info in infos.items() if info["type"] == "directory"]:
                infos |= fs.find(folder, detail=True)
            infos = {file: info for file, info in infos.items() if info["type"] != "directory"}
            if not infos:
                raise DataError(f"{place.written}: no file matches this pattern.")
        elif fs.isfile(path):
            info = fs.info(path)
            check(posixpath.dirname(path))
            return [_File(path, posixpath.basename(path), int(info["size"] or 0))]
        elif fs.exists(path):
            check(path)
            infos, base = fs.find(path, detail=True), path
        else:
            raise DataError(f"{place.written} does not exist{_similar(place)}")
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{place.written} cannot be read: {reason}.{on_credentials(place)}") from error
    files = []
    for file, info in sorted(infos.items()):
        below = str(file)[len(base) :].lstrip("/")
        if kind := next((kind for kind, pattern in _TABLES.items() if re.search(pattern, below)), None):
            raise is_table(place.written, kind, posixpath.dirname(posixpath.dirname(str(file))))
        if not any(map(_hidden, below.split("/"))):
            files.append(_File(str(file), below, int(info["size"] or 0)))
    return files


def is_table(written: str, kind: str, folder: str) -> DataError:
    """Return the error for a path, as `written`, that is a table, contains one, or is a part of one."""
    if kind == "Delta":
        return DataError(
            f"{written} has files of the Delta table {folder}, which may hold rows that the table no longer has: "
            "give only the path of the table, and choose rows with where=…."
        )
    return DataError(
        f"{written} has files of the {kind} table {folder}, which may hold rows that the table no longer has: "
        "read it with Spark, and pass the DataFrame."
    )


def _hidden(name: str) -> bool:
    """Return whether a file or folder of this name is not data, by Spark's rule: `_x=1` is a folder of partitions."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def similar_path(place: Location) -> str:
    """Return the path of a file or folder whose name is similar to that of a missing one beside it, or ''."""
    listed = place.fs.ls(posixpath.dirname(place.path), detail=False)
    beside = [posixpath.basename(str(path).rstrip("/")) for path in listed]
    close = difflib.get_close_matches(posixpath.basename(place.path), beside, 1)
    return f"{posixpath.dirname(place.written.rstrip('/')) or '.'}/{close[0]}" if close else ""


def _similar(place: Location) -> str:
    """Return the end of the error message about a missing path.

    It suggests a similar path if there is one, or says that the folder of the missing path does not exist, either.
    """
    with contextlib.suppress(OSError, PathError):
        close = similar_path(place)
        return f"; did you mean {close}?" if close else "."
    return f", and neither does the folder {posixpath.dirname(place.written.rstrip('/'))}."


def _footer(fs: AbstractFileSystem, file: _File, lost: str = "") -> _Footer:
    """Read the footer of a file. `lost` says what is incomplete if a table's file is missing."""
    try:
        with fs.open(file.path, "rb") as opened:
            parquet = pq.ParquetFile(opened)
        sink = pa.BufferOutputStream()
        parquet.metadata.write_metadata_file(sink)
    except FileNotFoundError as error:
        if not lost:
            raise _broken(file.path, error) from error
        raise DataError(
            f"{lost} can no longer be read: its file {file.path} has been removed, as VACUUM does with files that "
            "newer versions do not need. Choose a newer version."
        ) from None
    except BROKEN as error:
        raise _broken(file.path, error) from error
    return _Footer(
        parquet.metadata, parquet.schema_arrow.remove_metadata(), hashlib.sha256(sink.getvalue()).hexdigest()[:16]
    )


def _broken(path: str, error: BaseException) -> DataError:
    reason = " ".join(str(error).split())
    if "magic bytes" in reason or "smaller than the minimum" in reason or "size is 0 bytes" in reason:
        reason = "it is not a Parquet file, or it is incomplete"
    return DataError(f"{path} cannot be read: {reason.rstrip('.')}.")


# ── Columns ───────────────────────────────────────────────────────────────────


def _partitions(below: Sequence[str]) -> tuple[list[tuple[tuple[str, Any], ...]], dict[str, pa.DataType]]:
    """Return the partitions (folders named key=value) in each path, and the type of each key.

    The type is int64 if all values of the key are integers, otherwise string.
    """
    partitions = [
        [tuple(map(urllib.parse.unquote, part.partition("=")[::2])) for part in path.split("/")[:-1] if "=" in part]
        for path in below
    ]
    values: dict[str, set[str]] = {}
    for keys in partitions:
        for key, value in keys:
            values.setdefault(key, set()).add(value)
    kinds = {
        key: pa.int64() if all(map(_is_whole, seen - {_HIVE_NULL})) else pa.string() for key, seen in values.items()
    }

    def typed(key: str, value: str) -> Any:
        return None if value == _HIVE_NULL else int(value) if pa.types.is_integer(kinds[key]) else value

    return [tuple((key, typed(key, value)) for key, value in keys) for keys in partitions], kinds


def _is_whole(value: str) -> bool:
    return value.removeprefix("-").isdecimal() and str(int(value)) == value and abs(int(value)) < 2**63


def _with_partitions(schema: pa.Schema, keys: Sequence[tuple[str, Any]], kinds: dict[str, pa.DataType]) -> pa.Schema:
    for key, _ in keys:
        if key not in schema.names:
            schema = schema.append(pa.field(key, kinds[key]))
    return schema


def _check_equal(schemas: Sequence[pa.Schema], names: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise DataError unless all files have the `wanted` columns, with the same types."""
    first = schemas[0]
    for schema, name in zip(schemas[1:], names[1:], strict=True):
        if schema is first or schema.equals(first):
            continue
        for column in wanted:
            if column not in schema.names:
                raise DataError(
                    f"the files differ: {names[0]} has a column `{column}`, but {name} does not. Rewrite them with one "
                    "schema, or use columns=[…] to select columns that all files have."
                )
            here, there = first.field(column).type, schema.field(column).type
            if here != there:
                raise DataError(
                    f"the files differ: column `{column}` is {here} in {names[0]} and {there} in {name}. Rewrite them "
                    "with one type, or leave the column out with columns=[…]."
                )


def _constants(
    table: DeltaVersion, partitions: Sequence[tuple[str, Any]], footer: _Footer
) -> tuple[tuple[str, Any], ...]:
    """Return the columns of a table that have one value in a file: partition columns, and those that it lacks."""
    values, stored = dict(partitions), set(footer.schema.names)
    lacking = [name for name in table.schema.names if table.stored_as.get(name, name) not in stored]
    return (*values.items(), *((name, None) for name in lacking if name not in values))


def _check_castable(
    table: DeltaVersion, footers: Sequence[_Footer], files: Sequence[_File], wanted: Sequence[str]
) -> None:
    """Raise DataError unless the values of the `wanted` columns can become those of the table's types."""
    checked = set()
    for footer, file in zip(footers, files, strict=True):
        for column in wanted:
            stored = table.stored_as.get(column, column)
            if stored not in footer.schema.names:
                continue
            here, there = footer.schema.field(stored).type, table.schema.field(column).type
            if here == there or (column, here) in checked:
                continue
            checked.add((column, here))
            try:
                pa.array([], here).cast(there)
            except (pa.ArrowException, TypeError) as error:
                raise DataError(
                    f"column `{column}` is {there} in the table, but {here} in {file.path}: read the table with Spark, "
                    "and pass the DataFrame, or leave the column out with columns=[…]."
                ) from error


def _without_deleted(file: DataFile) -> DataFile:
    """Return a file whose row groups do not count the rows that were deleted."""
    if not file.deleted:
        return file
    rows = [int(file.remaining(number).sum()) for number in range(len(file.row_groups))]
    groups = tuple(group._replace(rows=count) for group, count in zip(file.row_groups, rows, strict=True))
    return file._replace(row_groups=groups)


def _row_groups(metadata: pq.FileMetaData, columns: set[str]) -> tuple[RowGroup, ...]:
    schema = metadata.schema
    leaves = [at for at in range(metadata.num_columns) if _is_within(schema.column(at).path, columns)]
    # `length` is 0 except for fixed-length byte arrays.
    widths = [_WIDTHS.get(schema.column(at).physical_type, schema.column(at).length) for at in leaves]
    groups = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = [group.column(at) for at in leaves]
        size = sum(part.total_compressed_size for part in parts)
        # The uncompressed size is that of encoded values, which can be much smaller than the values in memory.
        stored = sum(
            max(part.total_uncompressed_size, part.num_values * width)
            for part, width in zip(parts, widths, strict=True)
        )
        groups.append(RowGroup(group.num_rows, size, stored, group.num_rows))
    return tuple(groups)


def _is_within(path: str, columns: Set[str]) -> bool:
    """Return whether the path of a leaf begins with the name of one of the columns. Names may have dots, too."""
    return any(name in columns for name in itertools.accumulate(path.split("."), "{}.{}".format))


def null_counts(metadata: pq.FileMetaData, columns: set[str] | None = None) -> Counter[str]:
    """Return the number of nulls that a footer lists for each column, by the column's path.

    If `columns` is given, only these columns are counted, and nested columns among them are left out.
    """
    paths = [metadata.schema.column(at).path for at in range(metadata.num_columns)]
    leaves = {path: at for at, path in enumerate(paths) if columns is None or path in columns}
    counts: Counter[str] = Counter()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for name, at in leaves.items():
            statistics = group.column(at).statistics
            if statistics is not None and statistics.has_null_count:
                counts[name] += statistics.null_count
    return counts


# ── The filter ────────────────────────────────────────────────────────────────


def _named_in(condition: pc.Expression, schema: pa.Schema) -> set[str]:
    """Return the names of the columns that a filter reads.

    Arrow does not list them. So the filter is applied to empty tables that each lack one column. If the filter fails on
    a table, it reads the column that the table lacks.
    """
    try:
        schema.empty_table().filter(condition)
    except (pa.ArrowException, KeyError) as error:
        raise DataError(f"the filter {condition} cannot be evaluated: {' '.join(str(error).split())}.") from None
    names = set()
    for name in schema.names:
        rest = pa.schema([field for field in schema if field.name != name]).empty_table()
        try:
            rest.filter(condition)
        except (pa.ArrowInvalid, KeyError):
            names.add(name)
        except pa.ArrowException as error:
            raise DataError(f"the filter {condition} cannot be evaluated: {error}.") from None
    return names


def _counted(dataset: Dataset, filtered: Set[str]) -> Dataset:
    """Return the data set with the number of rows in each row group that pass the filter.

    `filtered` names the columns that the filter reads. If none of them holds floats, Arrow computes these numbers from
    the statistics in the footers if possible. Otherwise, the rows are read.
    """
    from sparkring.data.reader import passing_rows

    schema, fs, form = dataset.stored_schema, arrow_file_system(dataset.fs), ds.ParquetFileFormat()
    narrow = replace(dataset, schema=pa.schema([column for column in schema if column.name in filtered]))
    narrow = replace(narrow, reads=narrow.columns)
    # The statistics in footers leave out NaN, so Arrow would count rows with NaN as rows that pass `x > 3`.
    floats = any(map(_has_floats, narrow.schema.types))

    def from_footers(file: DataFile) -> list[int]:
        known = pc.scalar(True)
        for key, value in file.partitions:
            typed = pc.scalar(pa.scalar(value, schema.field(key).type))
            known = known & (pc.field(key).is_null() if value is None else pc.field(key) == typed)
        fragment = form.make_fragment(file.path, fs, partition_expression=known)
        kept = {
            part.row_groups[0].id: part.scanner(schema=schema, filter=dataset.condition).count_rows()
            for part in fragment.split_by_row_group(filter=dataset.condition, schema=schema)
        }
        return [kept.get(at, 0) for at in range(len(file.row_groups))]

    def count(number: int) -> DataFile:
        file = dataset.files[number]
        try:
            decoded = floats or file.deleted or dataset.stored_as
            rows = passing_rows(narrow, number) if decoded else from_footers(file)
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise DataError(f"the filter `{dataset.where}` cannot be evaluated: {error}.") from None
        except BROKEN as error:
            raise _broken(file.path, error) from error
        groups = tuple(group._replace(rows=passing) for group, passing in zip(file.row_groups, rows, strict=True))
        return file._replace(row_groups=groups)

    doing = f"counting the rows of {dataset.name} that pass `{dataset.where}`"
    return replace(dataset, files=tuple(_at_once(count, range(len(dataset.files)), doing)))


def _has_floats(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _has_floats(kind.value_type)
    return pa.types.is_floating(kind) or any(_has_floats(kind.field(at).type) for at in range(kind.num_fields))


def _at_once(work: Callable[[Wanted], Found], items: Sequence[Wanted], doing: str) -> list[Found]:
    """Call `work` for all items, several at a time, and return the results in order.

    If the calls take a while, the number of finished items is reported from time to time. After an error, no further
    call is started.
    """
    results = []
    due = time.monotonic() + TELL_AFTER_S
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sparkring-footers")
    try:
        for result in pool.map(work, items):
            results.append(result)
            if time.monotonic() >= due:
                due = time.monotonic() + TELL_AFTER_S
                tell(f"{doing}: {len(results):,} of {len(items):,} files")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return results
