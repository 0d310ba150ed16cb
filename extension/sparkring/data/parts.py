"""Turns the parts of a Spark DataFrame into items: its partitions, or the groups of groupBy().

Spark writes the rows to the cache, as for shards(). An item only refers to its rows in the cache. It becomes a
pandas.DataFrame when it is unpickled on a rank, so no rows go through the driver.

    partitions      each partition has its own file, or several files if Spark limits their size; an empty partition may
                    have none
    groups          Spark sorts the rows by their keys, so that the rows of a group are neighbours in a file. The folder
                    _groups has the index: the key, file, first row, last row and number of rows of each group.
"""

from __future__ import annotations

import itertools
import os
import posixpath
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.cluster.base import pandas_unused
from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.session import cluster_of
from sparkring.data.frames import cluster_behind, numbered, serialized_schema, version_of
from sparkring.data.materialise import BESIDE, Copy, Form, in_form
from sparkring.data.spark_frames import Values, representable
from sparkring.errors import DataError
from sparkring.runtime.kernel import tell
from sparkring.runtime.packages import require
from sparkring.runtime.storage import Location

if TYPE_CHECKING:
    import pandas
    from pyspark.sql import Column, DataFrame, GroupedData
    from pyspark.sql.types import DataType, StructField, StructType

_GROUPS = "_groups"
_ROW, _FILE, _FIRST, _LAST, _ROWS = "row", "file", "first", "last", "rows"
# To read a group of groupBy(), whole row groups are decoded. Decoding a row group of this size takes about 10 ms.
_GROUP_BYTES = 4_000_000
_IN_PARTITION = (1 << 33) - 1  # the bits of monotonically_increasing_id() that count the rows of a partition


class FileSlice(NamedTuple):
    """`rows` consecutive rows of a file. `first` is the number of the first row, counted from 0 in the file."""

    file: str
    first: int
    rows: int


class Stored(NamedTuple):
    """The folder with the rows of a DataFrame, and their Arrow schema, which says how to convert them for pandas."""

    folder: Location
    schema: bytes


class Part:
    """`rows` rows of a DataFrame. Unpickling a Part returns these rows as a pandas.DataFrame, and so does to_pandas().

    `content` identifies the rows: it is the same for identical rows in every kernel.
    """

    def __init__(self, stored: Stored, pieces: Sequence[FileSlice], content: tuple[Any, ...]) -> None:
        self.rows = sum(piece.rows for piece in pieces)
        self._stored = stored
        self._pieces = tuple(pieces)
        self._content = content

    def to_pandas(self) -> pandas.DataFrame:
        """Read the rows, and return them as DataFrame.toPandas() would."""
        return _read(self._stored, self._pieces)

    def __sparkring_content__(self) -> tuple[Any, ...]:
        return self._content

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self._stored, self._pieces)

    def __repr__(self) -> str:
        return f"{self.rows:,} row{'' if self.rows == 1 else 's'}"


class Partitions(list[Part]):
    """The partitions of a DataFrame, in their order."""

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # unpickled items are DataFrames, for which __repr__ would fail

    def __repr__(self) -> str:
        return f"<{len(self):,} partitions with {sum(part.rows for part in self):,} rows>"


def partitions(df: DataFrame, *, cache: str | os.PathLike[str] | None = None) -> Partitions:
    """Return the partitions of a Spark DataFrame, as items for %%foreach or foreach().

        %%foreach frame in sparkring.partitions(df.repartition(100)) -n 4
        frame["price"].mean()

    In an item, each partition is a pandas.DataFrame, with the values that df.toPandas() returns. Empty partitions are
    items, too. The DataFrame is written once to the folder `cache`, as by shards(), and the items read their rows from
    there: the rows do not go through the driver. In the notebook, a partition is only a reference. Its `rows` is the
    number of rows, and its `to_pandas()` reads the rows.

    Raises DataError if `df` is not a Spark DataFrame, is a stream or cannot be computed, or if the cache cannot be
    used.
    """
    _check(df)
    schema = _schema(df)
    form = Form("partitions", lambda frame: version_of(frame, by_partition=True), numbered, _count, may_be_empty=True)
    copy = in_form(df, form, cache=cache, say=tell)
    pieces: dict[int, list[FileSlice]] = {}
    for name, rows in copy.files:
        match = re.match(r"part-(\d+)", name)
        if match and rows:
            pieces.setdefault(int(match[1]), []).append(FileSlice(name, 0, rows))
    number = max([copy.facts["partitions"], *(partition + 1 for partition in pieces)])
    stored = Stored(copy.location, schema)
    return Partitions([
        Part(stored, pieces.get(partition, ()), (copy.version, "partition", partition, number))
        for partition in range(number)
    ])  # fmt: skip


def items_of(source: Any) -> Any:
    """Return the groups as items if `source` is the result of df.groupBy(…); otherwise, return `source` itself.

    Raise DataError for a DataFrame, which has no items.
    """
    roots = {(base.__module__.partition(".")[0], base.__name__) for base in type(source).__mro__}
    if ("pyspark", "DataFrame") in roots:
        raise DataError(
            "a Spark DataFrame has no items: use df.groupBy('store') for a (key, pandas DataFrame) pair per group, or "
            "sparkring.partitions(df) for a pandas DataFrame per partition."
        )
    if ("pyspark", "GroupedData") in roots:
        return _groups(source)
    return source


def _groups(grouped: GroupedData) -> list[tuple[Any, Part]]:
    """Return pairs of a key and a Part, sorted by their keys. Null keys come last."""
    frame: DataFrame = getattr(grouped, "_df")  # noqa: B009 - pyspark does not declare this attribute
    _check(frame)
    try:
        grouping = cluster_of(frame.sparkSession).grouping(grouped, frame)
        keyed = _with_expressions(frame, grouping.keys)
    except DataError:
        raise
    except Exception as error:  # pyspark and py4j have several classes for this error
        raise DataError(f"groupBy(): {root_cause(str(error)).partition(';')[0]}") from error
    if grouping.kind != "groupby":
        raise DataError(f"the groups of {grouping.kind}() are not items: use df.groupBy('store').")
    schema = _schema(frame)
    numbers = _key_columns(grouping.keys, keyed)
    keys = [f"c{number}" for number in numbers]
    form = Form(
        f"groups {' '.join(keys)}",
        version_of,
        lambda df: _sorted(numbered(df), keys),
        lambda written, copy: _write_index(written, copy, keys),
        may_be_empty=True,
        row_group_bytes=_GROUP_BYTES,
    )
    copy = in_form(keyed, form, say=tell)
    parts = _indexed(copy, Stored(copy.location, schema), keys, [keyed.schema.fields[number] for number in numbers])
    return [(key[0] if len(key) == 1 else key, part) for key, part in parts.items()]


# ── What can be used ──────────────────────────────────────────────────────────────────────────────────────────────────


def _check(frame: Any) -> None:
    cluster_behind(frame)
    from pyspark.sql.pandas import types

    if not hasattr(types, "_create_converter_to_pandas"):
        raise DataError(
            "parts of a DataFrame can be items only with Spark 3.5 or newer: with an older version, read the rows in "
            "the cell."
        )
    if frame.isStreaming:
        raise DataError("the DataFrame is a stream, which has no end: write it to a table, and read the table.")


def _schema(frame: DataFrame) -> bytes:
    """Return the Arrow schema of numbered(frame), with the names of the DataFrame's own columns."""
    from pyspark.sql.types import StructField, StructType

    stored: StructType = numbered(frame).schema
    named = [
        StructField(field.name, kind.dataType, field.nullable)
        for field, kind in zip(frame.schema.fields, stored.fields, strict=True)
    ]
    return serialized_schema(StructType(named), frame.sparkSession)


def _with_expressions(frame: DataFrame, keys: Sequence[int | Column]) -> DataFrame:
    """Return the rows with the expressions among the keys in additional columns, which the items do not get."""
    expressions = [key for key in keys if not isinstance(key, int)]
    keyed = frame.select("*", *expressions) if expressions else frame
    keyed.schema  # noqa: B018 - this raises Spark's error
    return keyed


def _key_columns(keys: Sequence[int | Column], keyed: DataFrame) -> list[int]:
    """Return the numbers of the columns of _with_expressions() that have the keys."""
    from pyspark.sql.types import ArrayType, MapType, StructType, UserDefinedType

    if not keys:
        raise DataError("groupBy() without columns makes one group of all rows: name columns, as in groupBy('store').")
    numbers: list[int] = []
    added = len(keyed.columns) - sum(not isinstance(key, int) for key in keys)
    for key in keys:
        if not isinstance(key, int):
            key, added = added, added + 1
        numbers.append(key)
        field = keyed.schema.fields[key]
        if isinstance(field.dataType, (ArrayType, MapType, StructType, UserDefinedType)):
            raise DataError(
                f"groupBy() groups by `{field.name}`, which is {field.dataType.simpleString()}: a key must be "
                "a number, a string, a date or a similar value."
            )
    return numbers


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _count(written: DataFrame, copy: Location) -> dict[str, Any]:
    """Return the number of partitions, which the files do not show if the last partitions are empty."""
    return {"partitions": cluster_of(written.sparkSession).partitions(written)}


def _sorted(frame: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Return the same rows, with the rows of each group next to each other, and the rows' numbers in a new column."""
    from pyspark.sql import functions

    columns = [functions.col(key) for key in keys]
    together = frame.repartition(*columns).sortWithinPartitions(*columns)
    return together.withColumn(_ROW, functions.monotonically_increasing_id())


def _write_index(written: DataFrame, copy: Location, keys: Sequence[str]) -> dict[str, Any]:
    """Let Spark write the index of the groups, and return the names of its files as the fact BESIDE."""
    from pyspark.sql import functions

    columns: list[Column] = [functions.col(key) for key in keys]
    schema = written.select(*columns, _ROW).schema
    stored = written.sparkSession.read.schema(schema).parquet(copy.for_spark())
    row = functions.col(_ROW).bitwiseAND(functions.lit(_IN_PARTITION))
    index = stored.groupBy(*columns, functions.input_file_name().alias(_FILE)).agg(
        functions.min(row).alias(_FIRST), functions.max(row).alias(_LAST), functions.count(row).alias(_ROWS)
    )
    order = [functions.col(name).asc_nulls_last() for name in (*keys, _FILE)]
    folder = copy / _GROUPS
    index.repartition(1).sortWithinPartitions(*order).write.mode("append").parquet(folder.for_spark())
    names = sorted(posixpath.basename(path) for path in folder.fs.ls(folder.path, detail=False))
    return {BESIDE: [f"{_GROUPS}/{name}" for name in names if name.endswith(".parquet")]}


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _indexed(
    copy: Copy, stored: Stored, keys: Sequence[str], fields: Sequence[StructField]
) -> dict[tuple[Any, ...], Part]:
    """Read the index, and return the Part of each key."""
    (name,) = copy.facts[BESIDE]
    with copy.location.fs.open((copy.location / name).path, "rb") as opened:
        index = pq.read_table(opened)
    values, names = [], tuple(field.name for field in fields)
    for stored_name, field in zip(keys, fields, strict=True):
        with representable(field.name):
            values.append(_keys(index.column(stored_name), field.dataType))
    begins: dict[str, int] = {}  # for each file, the number of its first row in the partition
    where = [posixpath.basename(path) for path in index.column(_FILE).to_pylist()]
    firsts, lasts, counts = (index.column(name).to_pylist() for name in (_FIRST, _LAST, _ROWS))
    for file, first in zip(where, firsts, strict=True):
        begins[file] = min(first, begins.get(file, first))
    pieces: dict[tuple[Any, ...], list[FileSlice]] = {}
    for key, file, first, last, rows in zip(zip(*values, strict=True), where, firsts, lasts, counts, strict=True):
        if last - first + 1 != rows:
            raise DataError(f"Spark did not put the rows of the group {key} together: group by other columns.")
        pieces.setdefault(key, []).append(FileSlice(file, first - begins[file], rows))
    return {key: Part(stored, key_pieces, (copy.version, "group", names, key)) for key, key_pieces in pieces.items()}


def _keys(column: pa.ChunkedArray, kind: DataType) -> list[Any]:
    """Return the values of a column of keys as Python objects: times as pandas.Timestamp, intervals as Timedelta."""
    from pyspark.sql.types import DayTimeIntervalType

    make: Callable[[Any], Any] | None = None
    is_interval = isinstance(kind, DayTimeIntervalType)  # stored as a number of microseconds
    if is_interval or pa.types.is_timestamp(column.type):
        pandas = require("pandas", "a group whose key is a time", DataError)
        make = pandas.Timedelta if is_interval else pandas.Timestamp
    if is_interval:
        column = column.cast(pa.duration("us"))
    values: list[Any] = column.to_pylist()
    return values if make is None else [None if value is None else make(value) for value in values]


def _read(stored: Stored, pieces: Sequence[FileSlice]) -> Any:
    """Return rows as a pandas.DataFrame. A Part is pickled as a call of this function."""
    described = pa.ipc.read_schema(pa.py_buffer(stored.schema))
    names = [f"c{number}" for number in range(len(described))]
    plain = pa.schema([field.with_name(name) for field, name in zip(described, names, strict=True)])
    tables = [_rows(stored.folder / piece.file, piece, names) for piece in pieces]
    table = pa.concat_tables(tables) if tables else plain.empty_table()
    columns = [
        column.cast(field.type) if _has_intervals(field.type) else column
        for column, field in zip(table.columns, plain, strict=True)
    ]
    with pandas_unused():
        return Values(described).to_pandas(pa.table(columns, names) if columns else table)


def _has_intervals(kind: pa.DataType) -> bool:
    """Return whether a type has day-time intervals, which Spark stores as numbers of microseconds."""
    return bool(pa.types.is_duration(kind)) or any(_has_intervals(kind.field(at).type) for at in range(kind.num_fields))


def _rows(file: Location, piece: FileSlice, names: Sequence[str]) -> pa.Table:
    """Return the rows of a piece of a file. Only the row groups that contain these rows are read."""
    try:
        with file.fs.open(file.path, "rb") as opened:
            parquet = pq.ParquetFile(opened)
            sizes = (parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups))
            ends = list(itertools.accumulate(sizes))
            first, last = bisect_right(ends, piece.first), bisect_left(ends, piece.first + piece.rows)
            rows = parquet.read_row_groups(range(first, last + 1), columns=list(names))
            return rows.slice(piece.first - (ends[first - 1] if first else 0), piece.rows)
    except FileNotFoundError:
        raise DataError(f"{file.written} has been removed since the run began: run the cell again.") from None
