"""`write_tfrecord(…)` writes a DataFrame, shards or arrays as TFRecord files of whole batches."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparkring.data.folders import storage_errors
from sparkring.data.materialise import materialise
from sparkring.data.shards import Shards, shards
from sparkring.data.tfrecord.batches import Batch, batches, columns_of
from sparkring.data.tfrecord.example import encoded, tensorflow
from sparkring.data.tfrecord.schema import Compression, RecordColumn, RecordFile, Schema, write_no_schema, write_schema
from sparkring.errors import DataError, OptionsError
from sparkring.runtime.storage import Location, locate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FILES = 16  # the default if `ranks` is not given: 16 files can be divided evenly among 1, 2, 4, 8 and 16 ranks
MOST_PREFIXES = 4_096
FIRST_WORD_S = 2.0  # report the progress only if writing takes longer than this

Say = Callable[[str], None]


def write_tfrecord(
    source: DataFrame | Shards | Any,
    path: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    files: int | None = None,
    ranks: int | None = None,
    files_per_rank: int = 2,
    prefixes: int = 0,
    compression: Compression | None = None,
    cache: str | os.PathLike[str] | None = None,
    name: str = "",
    say: Say | None = None,
) -> Schema:
    """Write rows as TFRecord files of whole batches to the folder `path`, which must be new or empty.

        write_tfrecord(df, "dbfs:/flights-records", batch_size=256, ranks=4)

    source: a Spark DataFrame, the result of shards(…), a pandas DataFrame, a dict of arrays [rows, …], or an iterable
        of such dicts. The rows of a Spark DataFrame are first written to `cache` by Spark, as Parquet. This
        process then reads them and writes the TFRecord files, so that Spark's executors do not need TensorFlow.
        `name` is the source's name in messages.
    batch_size: the number of rows in a record. Leave it out for the result of shards(…), which has one already.
    files: the number of files; default: ranks × files_per_rank if `ranks` is given, otherwise 16.
    prefixes: the number of folders, with names like hashes, to spread the files over; default: none. This helps
        with object stores, which limit the requests per second for each prefix.

    Raises DataError if there are rows that cannot be stored (nulls, ragged arrays, unsupported types), if there are no
    rows, or if the folder is not empty. If writing fails or is stopped, no files are left behind.
    """
    if isinstance(source, Shards):
        if batch_size not in (None, source.batch_size):
            raise OptionsError(f"batch_size={batch_size}: these shards have {source.batch_size:,}; leave it out.")
        batch_size = source.batch_size
    if batch_size is None:
        raise OptionsError("batch_size is missing: pass the number of rows per record.")
    count = files if files is not None else FILES if ranks is None else ranks * files_per_rank
    for option, value in (("batch_size", batch_size), ("files (or ranks × files_per_rank)", count)):
        if value < 1:
            raise OptionsError(f"{option}={value}: expected at least 1.")
    if not 0 <= prefixes <= MOST_PREFIXES or compression not in (None, "GZIP", "ZLIB"):
        raise OptionsError(
            f"prefixes={prefixes}, compression={compression!r}: prefixes must be from 0 to {MOST_PREFIXES:,}, and "
            "compression None, 'GZIP' or 'ZLIB'."
        )
    tensorflow()
    target = locate(path)
    called = f"`{name}`" if name else "the data"
    with _new(target):
        if hasattr(source, "sparkSession"):
            copy = materialise(source, cache=cache, name=name, say=say).location.written
            source = shards(copy, batch_size, shuffle=False, remainder="join", rank=0, size=1)
            _refuse_nulls(source, called)
        with contextlib.closing(batches(source, batch_size, called)) as stream:  # also ends the thread that reads ahead
            reported_batches = _with_progress(stream, target, say)
            columns, written = _write(reported_batches, target, _names(count, prefixes), compression, called)
        schema = Schema(columns, batch_size, sum(file.rows for file in written), written, compression)
        with _usable(target):
            write_schema(schema, target)
    if say:
        say(f"wrote {schema.rows:,} rows in {schema.records:,} records and {count} files, "
            f"{schema.size_bytes / 1e6:,.1f} MB, to {target.written}")  # fmt: skip
    return schema


def _refuse_nulls(frame: Shards, called: str) -> None:
    """Raise DataError if a column of the DataFrame has nulls. In some types, nulls would be written as NaN."""
    for name, count in frame.dataset.nulls.items():
        if count:
            raise DataError(
                f"{called}: column `{name}` has nulls ({count:,}), which a TFRecord array cannot hold: replace or drop "
                "them first, for example with the DataFrame's fillna() or dropna()."
            )


def _write(
    stream: Iterator[Batch], target: Location, names: Sequence[str], compression: Compression | None, called: str
) -> tuple[tuple[RecordColumn, ...], tuple[RecordFile, ...]]:
    """Write the batches to files, and return their columns and the files."""
    tf = tensorflow()
    columns: tuple[RecordColumn, ...] = ()
    records, rows = [0] * len(names), [0] * len(names)
    # Batches are appended one by one. Remote files do not allow this, so the files are first written to a local disk.
    here = target.path if target.local else tempfile.mkdtemp(prefix="sparkring-tfrecord-")
    paths = [os.path.join(here, name) for name in names]
    writers: list[Any] = []
    try:
        with _usable(target):
            for path in paths:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                writers.append(tf.io.TFRecordWriter(path, tf.io.TFRecordOptions(compression or "")))
        for index, batch in enumerate(stream):
            columns = columns or columns_of(batch)
            record, file = encoded(batch, called), index % len(names)
            with _usable(target):
                writers[file].write(record)
            records[file] += 1
            rows[file] += _rows(batch)
        if not columns:
            raise DataError(f"{called} has no rows to write.")
        with _usable(target):
            for writer in writers:
                writer.close()
            sizes = [os.path.getsize(path) for path in paths]
            if not target.local:
                for path, name in zip(paths, names, strict=True):
                    target.fs.makedirs((target / name).path.rpartition("/")[0], exist_ok=True)
                    target.fs.put_file(path, (target / name).path)
        return columns, tuple(map(RecordFile, names, records, rows, sizes))
    finally:
        for writer in writers:
            # If a file is still open, an error is being raised, and an error of close() must not replace it.
            with contextlib.suppress(OSError, tf.errors.OpError):
                writer.close()
        if not target.local:
            shutil.rmtree(here, ignore_errors=True)


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _names(count: int, prefixes: int) -> list[str]:
    names = [f"part-{index:05d}.tfrecord" for index in range(count)]
    if not prefixes:
        return names
    spread = list(dict.fromkeys(hashlib.sha256(b"%d" % at).hexdigest()[:4] for at in range(2 * MOST_PREFIXES)))
    return [f"{spread[index % prefixes]}/{name}" for index, name in enumerate(names)]


def _with_progress(stream: Iterable[Batch], target: Location, say: Say | None) -> Iterator[Batch]:
    """Yield the batches of `stream`, and call `say` with the number of rows at growing intervals."""
    began, due_s, rows = time.monotonic(), FIRST_WORD_S, 0
    for batch in stream:
        rows += _rows(batch)
        took_s = time.monotonic() - began
        if say and took_s >= due_s:
            due_s = 2 * took_s
            say(f"writing {target.written}: {rows:,} rows in {took_s:.0f} s …")
        yield batch


@contextlib.contextmanager
def _new(target: Location) -> Iterator[None]:
    """Make the folder, which must be new or empty. If the block fails or is stopped, remove what it has written."""
    fs, path = target.fs, target.path
    with _usable(target):
        there = fs.exists(path)
        if there and (not fs.isdir(path) or fs.ls(path, detail=False, refresh=True)):
            raise DataError(f"{target.written} exists and is not an empty folder: remove it, or write to another path.")
        fs.makedirs(path, exist_ok=True)
    try:
        with _usable(target):
            write_no_schema(target)
        yield
    except BaseException:  # an interrupt, too, must not leave files behind
        # If some files cannot be removed, they do no harm: a folder without a schema is not read.
        with contextlib.suppress(OSError):
            for made in fs.ls(path, detail=False, refresh=True) if there else [path]:
                fs.rm(made, recursive=True)
        raise


def _usable(target: Location) -> contextlib.AbstractContextManager[None]:
    return storage_errors(f"{target.written} cannot be written", " Free up some space, or use another folder.")
