"""Opens TFRecord files of any origin as a data set for shards(): one row, or one batch of rows, for each record."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkring.data.dataset import (
    DataFile,
    Dataset,
    RowGroup,
    Source,
    at_once,
    files_at,
    partitions_in,
    with_partitions,
)
from sparkring.data.tfrecord.features import (
    Entries,
    FeatureColumn,
    Unfit,
    columns_of_records,
    entries_of,
    kind_of,
    names_of,
    rows_of_records,
    value_type,
    values_of,
)
from sparkring.data.tfrecord.framing import HEAD, RecordIndex, buffers, byte_words, index_of, is_record_file
from sparkring.data.tfrecord.schema import STRING, has_schema, read_schema
from sparkring.data.where import nearest
from sparkring.errors import DataError
from sparkring.runtime.storage import Location, locate

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from sparkring.data.tfrecord.schema import Schema

PROBED_RECORDS = 1_000  # the number of records from which the schema is found
PARSED_RECORDS, PARSED_BYTES = 4_096, 1 << 21  # the most that is parsed at a time
Features = Mapping[str, Any]
_DTYPES = {"bytes": "bytes", "float": "float32", "int64": "int64"}  # by how values are stored


@dataclass(frozen=True)
class RecordFormat:
    """How the records of a data set are read: the columns, and where the records of each file are.

    A feature that is not in `known` is an error, unless `known` is None. If `batched` is true, each record holds
    several rows.
    """

    columns: tuple[FeatureColumn, ...]
    indexes: tuple[RecordIndex, ...]
    known: frozenset[str] | None
    batched: bool

    def open(self, dataset: Dataset, file: int) -> OpenedRecords:
        """Open file number `file` of the data set."""
        return OpenedRecords(dataset, self, file)


class OpenedRecords:
    """A file of records, with those methods of pyarrow's ParquetFile that are needed to read a data set."""

    def __init__(self, dataset: Dataset, form: RecordFormat, file: int) -> None:
        self._dataset, self._form, self._file = dataset, form, file
        self.schema_arrow = pa.schema([(column.name, column.type) for column in form.columns])

    def close(self, force: bool = False) -> None:
        """Do nothing: no file stays open."""

    def iter_batches(
        self, rows: int, *, row_groups: Sequence[int], columns: Sequence[str], use_threads: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Yield some columns of row groups, in batches of at most `rows` records."""
        form, index = self._form, self._form.indexes[self._file]
        wanted = [column for column in form.columns if column.name in columns]
        path = self._dataset.files[self._file].path
        for number in row_groups:
            group = index.groups[number]
            for buffer, frames, offset in buffers(self._dataset.fs, path, index, group, local=self._dataset.local):
                # The arrays of one step should fit into the processor's cache.
                mean_bytes = frames.end // len(frames.starts)
                records = max(1, min(rows, PARSED_RECORDS, PARSED_BYTES // mean_bytes))
                for at in range(0, len(frames.starts), records):
                    starts, lengths = frames.starts[at : at + records], frames.lengths[at : at + records]
                    begin, end = int(starts[0]), int(starts[-1] + lengths[-1])
                    try:
                        yield columns_of_records(
                            buffer[begin:end], starts - begin, lengths, wanted, known=form.known, batched=form.batched
                        )
                    except Unfit as error:
                        raise _unfit(path, error, offset + int(starts[error.record]) - HEAD, index) from None


def open_records(
    source: Source,
    names: Sequence[str] | None,
    schema: Features | None,
    fill: Mapping[str, Any],
    *,
    batched: bool = False,
    columns: tuple[FeatureColumn, ...] | None = None,
) -> Dataset:
    """Return TFRecord files as a data set. The number of records is taken from the framing of the files.

    names: the features to read; default: all, or those in `schema`.
    schema: the type and the shape of features, as for tfrecords().
    fill: its keys name the features that may be missing.
    columns: the columns, if they are known without looking at the records.

    Raise DataError if there is no file or no record, if a file is damaged, or if a feature does not exist.
    """
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not sources:
        raise DataError("tfrecords(): the list of paths is empty. Name at least one file or folder.")
    places = [locate(path) for path in sources]
    fs, local = places[0].fs, places[0].local
    name = ", ".join(os.fspath(path) for path in sources[:3]) + (f", … ({len(sources)})" if len(sources) > 3 else "")
    if any(place.fs != fs for place in places):
        raise DataError(f"{name}: these paths are on different file systems; use one file system per data set.")
    listed = [file for place in places for file in files_at(place)]
    if not listed:
        raise DataError(f"{name}: tfrecords() has found no file there. Check the path.")
    doing = f"counting the records of {name}"
    indexes = at_once(lambda file: index_of(fs, file.path, file.size_bytes, local=local), listed, doing)
    whole = next((number for number, index in enumerate(indexes) if index.groups), None)
    if whole is None:
        raise DataError(f"{name}: tfrecords() has found no record there. Check the path, or write the files again.")
    partitioned, kinds = partitions_in([file.below for file in listed])
    keys = {key for part in partitioned for key, _ in part}
    if any({key for key, _ in part} != keys for part in partitioned):  # folders that happen to have such names
        partitioned, keys = [()] * len(listed), set()
    features = None if names is None else [feature for feature in names if feature not in keys]
    known: frozenset[str] | None = None
    missing: dict[str, int] = {}
    if columns is None:
        probe = _Probe(fs, listed[whole].path, indexes[whole], local=local)
        columns, missing = probe.columns(name, features, schema, fill, batched=batched)
        known = frozenset(probe.names) if features is None and schema is None else None
    form = RecordFormat(columns, tuple(indexes), known, batched)
    groups = [
        tuple(
            RowGroup(group.records, group.end - group.begin, group.end - group.begin, group.records)
            for group in index.groups
        )
        for index in indexes
    ]
    if batched:
        pairs = [(file.path, index) for file, index in zip(listed, indexes, strict=True)]
        groups = at_once(lambda pair: _rows_of_groups(fs, *pair, columns[0], local=local), pairs, doing)
    stored = pa.schema([(column.name, column.type) for column in columns])
    for part in partitioned:
        stored = with_partitions(stored, part, kinds)
    chosen = list(dict.fromkeys(names)) if names is not None else stored.names
    files = tuple(
        DataFile(file.path, file.size_bytes, group, _version(file.size_bytes, index), part)
        for file, index, group, part in zip(listed, indexes, groups, partitioned, strict=True)
    )
    digest = hashlib.sha256(repr((chosen, columns, [file.version for file in files])).encode())
    return Dataset(
        name,
        fs,
        files,
        pa.schema([stored.field(column) for column in chosen]),
        stored,
        tuple(column for column in stored.names if column in chosen),
        digest.hexdigest()[:16],
        nulls={column: count for column, count in missing.items() if column in chosen},
        form=form,
    )


def of_schema(schema: Schema, folder: Location, names: Sequence[str] | None) -> Dataset:
    """Return a folder that write_tfrecord() has written as a data set, which is read without TensorFlow."""
    columns = tuple(
        FeatureColumn(
            column.name, "bytes", "bytes" if column.dtype == STRING else _known(column.dtype, column.name), column.shape
        )
        for column in schema.columns
        if names is None or column.name in names
    )
    paths = [(folder / file.name).written for file in schema.files]
    dataset = open_records(paths, names, None, {}, batched=True, columns=columns)
    return replace(dataset, name=folder.written)


def records_at(source: Source, names: Sequence[str] | None) -> Dataset | None:
    """Return the TFRecord files at a path as a data set, or None if the first file there is not one."""
    if isinstance(source, str | os.PathLike) and has_schema(source):
        return of_schema(read_schema(source), locate(source), names)
    for path in [source] if isinstance(source, str | os.PathLike) else source:
        place = locate(path)
        for file in files_at(place):
            if file.size_bytes:
                return open_records(source, names, None, {}) if is_record_file(place.fs, file.path) else None
    return None


class _Probe:
    """The first records of a file, from which the columns are found."""

    def __init__(self, fs: AbstractFileSystem, path: str, index: RecordIndex, *, local: bool) -> None:
        buffer, frames, offset = next(buffers(fs, path, index, index.groups[0], local=local))
        starts, lengths = frames.starts[:PROBED_RECORDS], frames.lengths[:PROBED_RECORDS]
        self._data, self._path, self._index = buffer[: int(starts[-1] + lengths[-1])], path, index
        self._offsets, self._records = offset + starts - HEAD, len(starts)
        try:
            self._entries: Entries = entries_of(self._data, starts, starts + lengths)
        except Unfit as error:
            raise _unfit(path, error, int(self._offsets[error.record]), index) from None
        self._at: dict[str, Any] = {}
        self._in_steps: dict[str, bool] = {}
        for (name, in_steps), at in names_of(self._data, self._entries).items():
            self._at[name], self._in_steps[name] = at, in_steps
        self.names = sorted(self._at)

    def columns(
        self, data: str, names: Sequence[str] | None, schema: Features | None, fill: Mapping[str, Any], *, batched: bool
    ) -> tuple[tuple[FeatureColumn, ...], dict[str, int]]:
        """Return the columns, and how many of the records lack each of them. `data` is the name of the data set."""
        wanted = list(dict.fromkeys(names if names is not None else schema if schema is not None else self.names))
        columns, missing = [], {}
        for name in wanted:
            if name not in self._at:
                raise DataError(
                    f"the first {self._records:,} records of {data} have no feature `{name}`: "
                    + nearest(name, self.names)
                )
            try:
                column = self._column(name, (schema or {}).get(name), batched=batched)
            except Unfit as error:
                raise _unfit(self._path, error, int(self._offsets[error.record]), self._index) from None
            if column is None:
                continue
            lacking = self._records - len(np.unique(self._entries.record[self._at[name]]))
            if lacking and not batched:
                missing[name] = lacking
            columns.append(column._replace(nulls=(bool(lacking) or name in fill) and not batched))
        if not columns:
            raise DataError(
                f"{data}: {'the first records have no features' if names is None else 'no features are named'}."
            )
        return tuple(columns), missing

    def _column(self, name: str, wanted: Any, *, batched: bool) -> FeatureColumn | None:
        """Return the column of a feature, as the first records and the user's schema have it."""
        at, in_steps = self._at[name], self._in_steps[name]
        kind = kind_of(self._data, self._entries, at)
        if not kind:
            if wanted is None:
                return None
            kind = "bytes"
        (counts, flat), _ = values_of(self._data, self._entries, at, name, kind)
        dtype, shape = _wanted(name, wanted, kind) if wanted is not None else (_DTYPES[kind], None)
        array = kind == "bytes" and dtype not in ("bytes", "string")  # the memory of an array
        if array:
            counts = (flat[1] - flat[0]) // np.dtype(dtype).itemsize
        least, most = (int(counts.min()), int(counts.max())) if len(counts) else (1, 1)
        if shape is None and batched:
            if kind == "bytes" and wanted is None:
                raise DataError(
                    f"the feature `{name}` holds bytes: for a batch in each Example, give the type and the shape of a "
                    f"row, as in schema={{'{name}': ('float32', (16,))}}, or ('bytes', ()) for one value per row."
                )
            shape = ()
        elif shape is None and in_steps:  # `counts` are the values of each step
            shape = (-1,) if most <= 1 else (-1, most)
        elif shape is None:
            shape = () if most <= 1 else (most,) if least == most else (-1,)
        return FeatureColumn(name, kind, dtype, shape, in_steps)


def _wanted(name: str, wanted: Any, kind: str) -> tuple[str, tuple[int, ...] | None]:
    """Return the dtype and the shape that the user's schema gives for a feature."""
    dtype, shape = wanted if isinstance(wanted, tuple | list) and len(wanted) == 2 else (wanted, None)
    try:
        text = dtype if dtype in ("bytes", "string") else {str: "string", bytes: "bytes"}.get(dtype)
        named = text or np.dtype(dtype).name
        value_type(named)
        sizes = None if shape is None else tuple(int(length) for length in shape)
        if (sizes is not None and not all(length > 0 for length in sizes[1:])) or (
            sizes and sizes[0] < 1 and sizes[0] != -1
        ):
            raise ValueError
    except (TypeError, ValueError):
        raise DataError(
            f"schema={{'{name}': {wanted!r}}}: expected a dtype, 'bytes' or 'string', or such a type and the shape of "
            "a row, as in ('float32', (16, 3)). A first dimension of -1 has any length."
        ) from None
    if text and kind != "bytes":
        held = "floats" if kind == "float" else "integers"
        raise DataError(
            f"schema={{'{name}': {wanted!r}}}: the feature holds {held}. Give a numeric dtype, such as 'float32'."
        )
    return named, sizes


def _known(dtype: str, name: str) -> str:
    try:
        value_type(dtype)
    except TypeError:
        raise DataError(f"column `{name}` is {dtype}, which only TensorFlow can read. Install TensorFlow.") from None
    return dtype


def _rows_of_groups(
    fs: AbstractFileSystem, path: str, index: RecordIndex, column: FeatureColumn, *, local: bool
) -> tuple[RowGroup, ...]:
    """Return the row groups of a file whose records hold batches. For this, the records have to be parsed."""
    groups = []
    for group in index.groups:
        rows = 0
        for buffer, frames, offset in buffers(fs, path, index, group, local=local):
            try:
                rows += int(rows_of_records(buffer, frames.starts, frames.lengths, column).sum())
            except Unfit as error:
                raise _unfit(path, error, offset + int(frames.starts[error.record]) - HEAD, index) from None
        size_bytes = group.end - group.begin
        groups.append(RowGroup(rows, size_bytes, size_bytes, rows))
    return tuple(groups)


def _version(size_bytes: int, index: RecordIndex) -> str:
    return hashlib.sha256(repr((size_bytes, index)).encode()).hexdigest()[:16]


def _unfit(path: str, error: Unfit, at: int, index: RecordIndex) -> DataError:
    return DataError(f"{path}: the record at {byte_words(at, index.compression)} {error}.")
