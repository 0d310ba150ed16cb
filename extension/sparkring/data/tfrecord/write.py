"""`write_tfrecord(…)`: a DataFrame, shards or arrays as TFRecord files of whole batches."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparkring.data.materialise import materialise
from sparkring.data.shards import Shards, shards
from sparkring.data.tfrecord.batches import Batch, batches, columns_of
from sparkring.data.tfrecord.example import encoded, tensorflow
from sparkring.data.tfrecord.schema import Column, Compression, RecordFile, Schema, write_schema
from sparkring.errors import DataError, OptionsError
from sparkring.runtime.storage import Location, locate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FILES = 16  # if the number of ranks is not given: can be divided evenly among 1, 2, 4, 8 and 16 ranks
MOST_PREFIXES = 4_096
FIRST_WORD_S = 2.0

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

    source: a Spark DataFrame (written to `cache` first; this process then writes the files, so only it needs
        TensorFlow), shards(…) with its options, a pandas DataFrame, a dict of arrays [rows, …], or an iterable
        of such dicts. `name` is the source's name in messages.
    batch_size: the number of rows in a record. Leave it out for shards(…), which have their own.
    files: the number of files; default: ranks × files_per_rank, or 16.
    prefixes: spread the files over this many folders with names like hashes, since object stores limit the requests
        per second for each prefix.

    DataError: rows that cannot be stored (nulls, ragged arrays, unsupported types), no rows, or a folder that is not
    empty. A write that fails or is stopped leaves no files.
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
        with contextlib.closing(batches(source, batch_size, called)) as found:  # also ends the thread that reads ahead
            told = _told(found, target, say)
            columns, written = _write(told, target, _names(count, prefixes), compression, called)
        schema = Schema(columns, batch_size, sum(file.rows for file in written), written, compression)
        with _usable(target):
            write_schema(schema, target)
    if say:
        say(f"wrote {schema.rows:,} rows in {schema.records:,} records and {count} files, "
            f"{schema.size_bytes / 1e6:,.1f} MB, to {target.written}")  # fmt: skip
    return schema


def _refuse_nulls(frame: Shards, called: str) -> None:
    """Raise DataError if a column of the DataFrame has nulls, since some would be written as NaN, without an error."""
    for name, count in frame.dataset.nulls.items():
        if count:
            raise DataError(
                f"{called}: column `{name}` has nulls ({count:,}), which a TFRecord array cannot hold: replace or drop "
                "them first, for example with the DataFrame's fillna() or dropna()."
            )


def _write(
    found: Iterator[Batch], target: Location, names: Sequence[str], compression: Compression | None, called: str
) -> tuple[tuple[Column, ...], tuple[RecordFile, ...]]:
    """Write the batches to files, and return their columns and the files."""
    tf = tensorflow()
    columns: tuple[Column, ...] = ()
    records, rows = [0] * len(names), [0] * len(names)
    # Remote files cannot be appended to, so files are written on this machine first, and then copied whole.
    here = target.path if target.local else tempfile.mkdtemp(prefix="sparkring-tfrecord-")
    paths = [os.path.join(here, name) for name in names]
    writers: list[Any] = []
    try:
        with _usable(target):
            for path in paths:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                writers.append(tf.io.TFRecordWriter(path, tf.io.TFRecordOptions(compression or "")))
        for index, batch in enumerate(found):
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
            with contextlib.suppress(OSError, tf.errors.OpError):  # an earlier error is being raised
                writer.close()
        if not target.local:
            shutil.rmtree(here, ignore_errors=True)


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _names(count: int, prefixes: int) -> list[str]:
    names = [f"part-{index:05d}.tfrecord" for index in range(count)]
    if not prefixes:
        return names
    hashes = (hashlib.sha256(str(index).encode()).hexdigest()[:4] for index in range(2 * MOST_PREFIXES))
    spread = list(dict.fromkeys(hashes))
    return [f"{spread[index % prefixes]}/{name}" for index, name in enumerate(names)]


def _told(found: Iterable[Batch], target: Location, say: Say | None) -> Iterator[Batch]:
    """Yield the batches of `found`. If this takes long, `say` reports the number of rows, at growing intervals."""
    began, due_s, rows = time.monotonic(), FIRST_WORD_S, 0
    for batch in found:
        rows += _rows(batch)
        took_s = time.monotonic() - began
        if say and took_s >= due_s:
            due_s = 2 * took_s
            say(f"writing {target.written}: {rows:,} rows in {took_s:.0f} s …")
        yield batch


@contextlib.contextmanager
def _new(target: Location) -> Iterator[None]:
    """Make the folder, which must be new or empty. If the block fails or is stopped, what it wrote is removed."""
    fs, path = target.fs, target.path
    with _usable(target):
        there = fs.exists(path)
        if there and (not fs.isdir(path) or fs.ls(path, detail=False, refresh=True)):
            raise DataError(f"{target.written} exists and is not an empty folder: remove it, or write to another path.")
        fs.makedirs(path, exist_ok=True)
    try:
        yield
    except BaseException:  # an interrupt as well
        with contextlib.suppress(OSError):  # files that remain do no harm: without a schema, they are not read
            for made in fs.ls(path, detail=False, refresh=True) if there else [path]:
                fs.rm(made, recursive=True)
        raise


@contextlib.contextmanager
def _usable(target: Location) -> Iterator[None]:
    """Turn an error of the file system, or of TensorFlow, into a DataError."""
    try:
        yield
    except (OSError, tensorflow().errors.OpError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "message", None) or error
        raise DataError(
            f"{target.written} cannot be written: {reason}. Free up some space, or use another folder."
        ) from error
