"""TFRecord files of whole batches, with a schema beside them; and every rank's even share of them.

    PATH/part-00007.tfrecord        or PATH/3f0a/part-00007.tfrecord, spread over prefixes for an object store
        one tf.train.Example per batch; each column one bytes feature: the array as it lies in memory, little-endian
        and in C order (tf.io.decode_raw), or one bytes value per string
    PATH/_schema.json               columns, files, rows; written last, and without it a folder is not read

Record i lies in file i modulo the number of files, so that files differ by at most one record.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sparkring import report
from sparkring.data.materialise import materialise
from sparkring.data.progress import Progress
from sparkring.errors import DataError, OptionsError
from sparkring.place import world
from sparkring.storage import Location, locate

if TYPE_CHECKING:
    import numpy as np

SCHEMA = "_schema.json"
LAYOUT = 1
FILES = 16  # where nobody says for how many ranks: even for 1, 2, 4, 8 and 16
STRING = "string"
_WHOLE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
NUMBERS = ("bool", *_WHOLE, "float16", "float32", "float64", "complex64", "complex128")
LARGEST_RECORD = 2**31 - 2**20  # protobuf ends at 2 GiB
SHUFFLED_BYTES = 64_000_000
MOST_SHUFFLED, MOST_OPEN = 64, 16
OPEN_IN_ORDER = 256
FIRST_WORD_S, RAREST_WORD_S = 2.0, 60.0

Compression = Literal["GZIP", "ZLIB"]
Remainder = Literal["drop", "pad"]
Batch = Mapping[str, Any]
Arrays = dict[str, Any]  # column → array (rows, …)


class Column(NamedTuple):
    """A column: numpy's name of its type, or `string` (bytes of any length); `shape` is that of one row."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


class RecordFile(NamedTuple):
    """One file, by its path below the folder; only the last record of all can have fewer rows than the others."""

    name: str
    records: int
    rows: int
    size_bytes: int


@dataclass(frozen=True)
class Schema:
    """What `_schema.json` says of a folder of TFRecord files."""

    columns: tuple[Column, ...]
    batch_size: int
    rows: int
    files: tuple[RecordFile, ...]
    compression: Compression | None = None

    @property
    def records(self) -> int:
        return sum(file.records for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Part(NamedTuple):
    """So many records of one file, after those that are skipped."""

    file: int
    skip: int
    take: int


class Share(NamedTuple):
    """What one rank reads in an epoch: parts with at least as many records as it has steps, of which it takes those.

    `split`: some of its files are read by other ranks as well.
    """

    parts: tuple[Part, ...]
    steps: int
    split: bool


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_tfrecord(
    source: Any,
    path: str | os.PathLike[str],
    *,
    batch_size: int,
    files: int | None = None,
    ranks: int | None = None,
    files_per_rank: int = 2,
    prefixes: int = 0,
    compression: Compression | None = None,
    cache: str | os.PathLike[str] | None = None,
    name: str = "",
    say: Callable[[str], None] | None = None,
) -> Schema:
    """Write rows as TFRecord files of whole batches to the folder `path`, which must be new or empty.

    source: a Spark DataFrame (materialised in `cache` first, see materialise(); this process then writes, so only it
    needs TensorFlow), a pandas one, a dict of arrays, or an iterable of such dicts, each array (rows, …).
    files: how many; else ranks × files_per_rank, else 16. prefixes: spread the paths over that many folders with
    names like hashes, since object stores bound the requests per second and prefix.

    DataError: rows that cannot be stored (nulls, ragged arrays, types), no rows, a folder that holds something. A
    write that fails or is stopped leaves nothing.
    """
    for option, value in (("batch_size", batch_size), ("files_per_rank", files_per_rank)):
        _at_least_one(option, value)
    count = files if files is not None else ranks * files_per_rank if ranks is not None else FILES
    _at_least_one("files" if files is not None else "ranks", count)
    if prefixes < 0 or compression not in (None, "GZIP", "ZLIB"):
        raise OptionsError(f"prefixes={prefixes}, compression={compression!r}: 0 or more; None, 'GZIP' or 'ZLIB'.")
    _tensorflow()
    target = locate(path)
    called = f"`{name}`" if name else "the data"
    batches = _Source(_rebatched(_chunks(source, called, cache, name, say), batch_size, called), target, say)
    made = _claim(target)
    try:
        names = _names(count, prefixes)
        schema = _write(batches, target, names, batch_size, compression, called)
    except BaseException as error:  # an interrupt as well
        _withdraw(target, made)
        if error is not batches.failed and _is_of_files(error):
            raise _unwritable(error, target) from error
        raise
    if say:
        say(f"wrote {schema.rows:,} rows in {schema.records:,} records and {count} files, "
            f"{schema.size_bytes / 1e6:,.1f} MB, to {target.written}")  # fmt: skip
    return schema


def _write(
    batches: _Source,
    target: Location,
    names: Sequence[str],
    batch_size: int,
    compression: Compression | None,
    called: str,
) -> Schema:
    tf = _tensorflow()
    columns: tuple[Column, ...] = ()
    records, rows = [0] * len(names), [0] * len(names)
    # Elsewhere than on this machine nothing can be appended: the files are made here and copied whole.
    here = target.path if target.local else tempfile.mkdtemp(prefix="sparkring-tfrecord-")
    try:
        paths = [os.path.join(here, name) for name in names]
        for folder in {os.path.dirname(path) for path in paths}:
            os.makedirs(folder, exist_ok=True)
        with contextlib.ExitStack() as stack:
            options = tf.io.TFRecordOptions(compression_type=compression or "")
            writers = [stack.enter_context(tf.io.TFRecordWriter(path, options)) for path in paths]
            for index, batch in enumerate(batches):
                columns = columns or tuple(_column(name, array) for name, array in batch.items())
                file = index % len(names)
                writers[file].write(_encoded(batch, called))
                records[file] += 1
                rows[file] += len(next(iter(batch.values())))
        if not columns:
            raise DataError(f"{called} has no rows: there is nothing to write.")
        sizes = [os.path.getsize(path) for path in paths]
        if not target.local:
            for path, name in zip(paths, names, strict=True):
                target.fs.makedirs((target / name).path.rpartition("/")[0], exist_ok=True)
                target.fs.put_file(path, (target / name).path)
        written = tuple(map(RecordFile, names, records, rows, sizes))
        schema = Schema(columns, batch_size, sum(rows), written, compression)
        text = json.dumps({"layout": LAYOUT, **asdict(schema)}, indent=1)
        target.fs.pipe_file((target / SCHEMA).path, text.encode())
        return schema
    finally:
        if not target.local:
            shutil.rmtree(here, ignore_errors=True)


class _Source:
    """The batches to write. When they take long, `say` is told how many rows they were, ever more rarely.

    `failed`: what making them raised, which is not about the files that are written.
    """

    def __init__(self, batches: Iterator[Arrays], target: Location, say: Callable[[str], None] | None) -> None:
        self._batches, self._target, self._say = batches, target, say
        self.failed: BaseException | None = None

    def __iter__(self) -> Iterator[Arrays]:
        started, pause_s, rows = time.monotonic(), FIRST_WORD_S, 0
        due = started + pause_s
        while True:
            try:
                batch = next(self._batches, None)
            except BaseException as error:
                self.failed = error
                raise
            if batch is None:
                return
            rows += len(next(iter(batch.values())))
            now = time.monotonic()
            if self._say and now >= due:
                pause_s = min(2 * pause_s, RAREST_WORD_S)
                due = now + pause_s
                self._say(f"writing {self._target.written}: {rows:,} rows in {now - started:.0f} s …")
            yield batch


def _names(count: int, prefixes: int) -> list[str]:
    names = [f"part-{index:05d}.tfrecord" for index in range(count)]
    if not prefixes:
        return names
    hashes = (hashlib.sha256(str(index).encode()).hexdigest()[:4] for index in range(16 * prefixes + 1_000))
    spread = list(dict.fromkeys(hashes))[:prefixes]
    if len(spread) < prefixes:
        raise OptionsError(f"prefixes={prefixes}: there are no more than some ten thousand.")
    return [f"{spread[index % prefixes]}/{name}" for index, name in enumerate(names)]


def _claim(target: Location) -> bool:
    """Make the folder; whether it is new. DataError if there is something in it."""
    try:
        if target.fs.exists(target.path):
            if not target.fs.isdir(target.path) or target.fs.ls(target.path, detail=False, refresh=True):
                raise DataError(
                    f"{target.written} is there and not an empty folder: remove it, or write to another path."
                )
            return False
        target.fs.makedirs(target.path, exist_ok=True)
        return True
    except OSError as error:
        raise _unwritable(error, target) from error


def _withdraw(target: Location, made: bool) -> None:
    """Remove all that was written: the folder was new or empty."""
    try:
        if made:
            target.fs.rm(target.path, recursive=True)
        else:
            for path in target.fs.ls(target.path, detail=False, refresh=True):
                target.fs.rm(path, recursive=True)
    except OSError:
        pass  # without a schema nobody takes it for whole


def _is_of_files(error: BaseException) -> bool:
    """Is it a file system's or TensorFlow's failure to write?"""
    return isinstance(error, OSError) or type(error).__module__.startswith("tensorflow.")


def _unwritable(error: BaseException, target: Location) -> DataError:
    reason = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
    return DataError(f"{target.written} cannot be written: {reason}. Free some space, or name another folder.")


def _encoded(batch: Arrays, called: str) -> bytes:
    """One batch as a serialised tf.train.Example."""
    tf = _tensorflow()
    features = {}
    size = 0
    for name, array in batch.items():
        values = [_as_bytes(value) for value in array.ravel()] if array.dtype.kind in "OUS" else [array.tobytes()]
        size += sum(map(len, values))
        features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if size > LARGEST_RECORD:
        raise DataError(
            f"{called}: a record of {size / 1e9:.1f} GB is more than the format allows. Take a smaller batch_size."
        )
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return bytes(example.SerializeToString())


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _column(name: str, array: np.ndarray[Any, Any]) -> Column:
    dtype = STRING if array.dtype.kind in "OUS" else array.dtype.name
    return Column(name, dtype, tuple(array.shape[1:]))


# ── What is written ───────────────────────────────────────────────────────────────────────────────────────────────────


def _chunks(
    source: Any, called: str, cache: str | os.PathLike[str] | None, name: str, say: Callable[[str], None] | None
) -> Iterator[Arrays]:
    """The source's rows as dicts of arrays, in chunks of any size."""
    roots = {(base.__module__.partition(".")[0], base.__name__) for base in type(source).__mro__}
    if ("pyspark", "DataFrame") in roots:
        yield from _of_parquet(materialise(source, cache=cache, name=name, say=say).location, called)
        return
    if ("pandas", "DataFrame") in roots:
        source = {str(column): source[column].to_numpy() for column in source.columns}
    for chunk in [source] if isinstance(source, Mapping) else source:
        if not isinstance(chunk, Mapping) or not chunk:
            raise DataError(
                f"{called} gives a `{type(chunk).__name__}` where a batch is to be a dict of arrays, one per column."
            )
        yield {str(column): _array(values, str(column), called) for column, values in chunk.items()}


def _of_parquet(folder: Location, called: str) -> Iterator[Arrays]:
    from pyarrow import parquet

    paths = sorted(path for path in folder.fs.ls(folder.path, detail=False) if path.endswith(".parquet"))
    for path in paths:
        with folder.fs.open(path, "rb") as file:
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=8_192):
                yield {
                    name: _of_arrow(column, name, called)
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }


def _of_arrow(array: Any, name: str, called: str) -> np.ndarray[Any, Any]:
    """An Arrow array as numpy's, lists of one length as further dimensions. DataError if there are nulls, or others."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if array.null_count:
        raise DataError(
            f"{called}: column {name!r} has nulls ({array.null_count:,} of {len(array):,} rows looked at), which "
            "TFRecord arrays cannot hold. Fill them (df.fillna) or drop the rows."
        )
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _of_arrow(array.dictionary_decode(), name, called)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = pc.unique(pc.list_value_length(array)).to_pylist()
        if len(lengths) > 1:
            raise _ragged(called, name, f"{min(lengths)} and {max(lengths)} values")
        inner = _of_arrow(array.flatten(), name, called)
        return inner.reshape(len(array), *(lengths or [0]), *inner.shape[1:])
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind):
        return _array(array.to_numpy(zero_copy_only=False), name, called)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _array(array.to_numpy(zero_copy_only=False), name, called)
    raise _unsupported(called, name, str(kind))


def _array(values: Any, name: str, called: str) -> np.ndarray[Any, Any]:
    """A column as an array of numbers, little-endian, or of str and bytes. DataError if it is neither."""
    import numpy as np

    if isinstance(values, np.ma.MaskedArray) and values.mask.any():
        raise DataError(f"{called}: column {name!r} has masked values: fill them first.")
    try:
        array = np.asarray(values)
    except ValueError:  # numpy's for lists of different lengths
        raise _ragged(called, name, "rows of different lengths") from None
    if array.ndim == 0:
        raise DataError(f"{called}: column {name!r} is one value, and not an array of rows.")
    if array.dtype.kind == "O":
        array = _of_objects(array, name, called)
    if array.dtype.kind in "OUS":
        return array
    if array.dtype.name not in NUMBERS:
        raise _unsupported(called, name, array.dtype.name)
    if 0 in array.shape[1:]:
        raise DataError(f"{called}: column {name!r} has arrays of no values.")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _of_objects(array: np.ndarray[Any, Any], name: str, called: str) -> np.ndarray[Any, Any]:
    """Python objects: strings as they are, arrays of one shape as one."""
    import numpy as np

    if all(isinstance(value, (str, bytes, bytearray)) for value in array.flat):
        return array
    nulls = sum(value is None for value in array.flat)
    if nulls:
        raise DataError(
            f"{called}: column {name!r} has nulls ({nulls:,} of {array.size:,} values looked at). Fill them first."
        )
    inner = [np.asarray(value) for value in array.flat]
    shapes = sorted({value.shape for value in inner})
    if len(shapes) > 1:
        raise _ragged(called, name, f"shapes {shapes[0]} and {shapes[-1]}")
    stacked: np.ndarray[Any, Any] = np.stack(inner).reshape(array.shape + shapes[0])
    if stacked.dtype.kind == "O":
        raise _unsupported(called, name, type(array.flat[0]).__name__)
    return stacked


def _ragged(called: str, name: str, found: str) -> DataError:
    return DataError(f"{called}: column {name!r} is ragged ({found}): pad or cut its arrays to one length.")


def _unsupported(called: str, name: str, kind: str) -> DataError:
    advice = "select its fields as columns of their own"
    if "decimal" in kind.lower():
        advice = "cast it to double"
    elif kind.startswith(("timestamp", "date", "time")):
        advice = "make it a number, as with unix_micros() in Spark or astype('int64') in numpy"
    return DataError(f"{called}: column {name!r} is of type {kind}, which a TFRecord array cannot hold: {advice}.")


def _rebatched(chunks: Iterator[Arrays], batch_size: int, called: str) -> Iterator[Arrays]:
    """The same rows in batches of `batch_size`, the last with what is left. DataError if chunks do not fit together."""
    import numpy as np

    columns: tuple[Column, ...] = ()
    waiting: list[Arrays] = []
    count = done = 0
    for chunk in chunks:
        lengths = {name: len(array) for name, array in chunk.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{called}: columns of one batch differ in length: {_listed(lengths)}.")
        length = next(iter(lengths.values()))
        if not length:
            continue
        found = tuple(_column(name, array) for name, array in chunk.items())
        columns = columns or found
        _check_same(columns, found, done + count, called)
        waiting.append({column.name: chunk[column.name] for column in columns})
        count += length
        if count < batch_size:
            continue
        whole = {column.name: np.concatenate([part[column.name] for part in waiting]) for column in columns}
        for start in range(0, count - batch_size + 1, batch_size):
            yield {name: array[start : start + batch_size] for name, array in whole.items()}
        rest = count % batch_size
        done += count - rest
        waiting = [{name: array[count - rest :].copy() for name, array in whole.items()}] if rest else []
        count = rest
    if count:
        yield {column.name: np.concatenate([part[column.name] for part in waiting]) for column in columns}


def _check_same(columns: Sequence[Column], found: Sequence[Column], row: int, called: str) -> None:
    if {column.name for column in columns} != {column.name for column in found}:
        names = ", ".join(column.name for column in found)
        raise DataError(f"{called}: from row {row:,} on the columns are {names}, and they were others before.")
    there = {column.name: column for column in found}
    for column in columns:
        other = there[column.name]
        if column.dtype == other.dtype and column.shape != other.shape:
            raise _ragged(called, column.name, f"{column.shape}, and {other.shape} from row {row:,} on")
        if column != other:
            raise DataError(
                f"{called}: column {column.name!r} is of type {column.dtype}, and {other.dtype} from row {row:,} on: "
                "make it one type."
            )


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """What was written to the folder `path`. DataError if it is not there, or was not written to its end."""
    folder = locate(path)
    file = folder / SCHEMA
    try:
        found = json.loads(file.fs.cat_file(file.path))
        if found.pop("layout") != LAYOUT:
            raise DataError(f"{folder.written} was written by another version of sparkring: write it anew.")
        columns = tuple(Column(name, dtype, tuple(shape)) for name, dtype, shape in found.pop("columns"))
        return Schema(columns=columns, files=tuple(RecordFile(*each) for each in found.pop("files")), **found)
    except FileNotFoundError:
        if not folder.fs.exists(folder.path):
            raise DataError(f"{folder.written} does not exist.") from None
        raise DataError(
            f"{folder.written} has no {SCHEMA}: the writing was stopped, or it was not sparkring that wrote. "
            "Write it with write_tfrecord()."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file.written} is damaged ({error}): write the data anew.") from None
    except OSError as error:
        raise DataError(f"{folder.written} cannot be read: {error.strerror or error}.") from error


def share_out(schema: Schema, rank: int, size: int, remainder: Remainder = "drop") -> Share:
    """What rank `rank` of `size` reads: as many steps as every other, and no record that another reads.

    Whole files where that is even to within a record, else runs of records. drop: full records only, and at most
    size - 1 of them are left out; pad: all of them, and ranks that have one less read one of theirs twice.
    DataError if there are fewer records than ranks.
    """
    full = [file.rows // schema.batch_size if remainder == "drop" else file.records for file in schema.files]
    total = sum(full)
    if total < size:
        raise DataError(
            f"{total} {'full ' * (remainder == 'drop')}records of {schema.batch_size:,} rows are too few for {size} "
            "ranks: write them with a smaller batch_size, or run fewer ranks."
        )
    owned = [sum(full[index::size]) for index in range(size)]
    split = max(owned) - min(owned) > 1
    if split:
        parts = _run_of(full, rank * total // size, (rank + 1) * total // size)
    else:
        parts = [Part(file, 0, full[file]) for file in range(rank, len(full), size) if full[file]]
    steps = total // size if remainder == "drop" else -(-total // size)
    if sum(part.take for part in parts) < steps:
        parts.append(parts[0]._replace(take=1))
    return Share(tuple(parts), steps, split)


def _run_of(full: Sequence[int], start: int, stop: int) -> list[Part]:
    """Records `start` to `stop` of all, counted file by file."""
    parts, before = [], 0
    for file, count in enumerate(full):
        first, last = max(start - before, 0), min(stop - before, count)
        if first < last:
            parts.append(Part(file, first, last - first))
        before += count
    return parts


def tfrecords(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    remainder: Remainder = "drop",
    transform: Callable[[dict[str, Any]], Any] | None = None,
) -> Records:
    """This rank's share of the folder `path`, which write_tfrecord() has written; on the driver all of it.

    shuffle: another order of records every epoch, the same for the same seed (0 is one, too). remainder: `drop` keeps
    batches whole and ranks even by leaving out the last rows, `pad` by repeating some. transform: from a dict of
    tensors (batch, …) to what the model takes, in TensorFlow's graph. DataError says what is wrong with the files.
    """
    if remainder not in ("drop", "pad"):
        raise OptionsError(f"remainder={remainder!r}: 'drop' or 'pad'.")
    schema = read_schema(path)
    known = [column.name for column in schema.columns]
    for name in columns or ():
        _check_name(name, known, str(path))
    place = world()
    share = share_out(schema, place.rank, place.size, remainder)
    folder = locate(path)
    chosen = tuple(column for column in schema.columns if columns is None or column.name in columns)
    records = Records(folder, schema, share, chosen, shuffle, seed, remainder, transform, place.size)
    records.check_files()
    if place.rank == 0:
        _advise(records, place.size)
    return records


def _advise(records: Records, size: int) -> None:
    """Tell once what is not read, or read more than once."""
    count, where = len(records.schema.files), records.folder.written
    if records.share.split:
        report.log_to_driver(
            f"{where}: {count} files do not go evenly into {size} ranks, which read parts of files and pass over the "
            f"rest; write_tfrecord(…, ranks={size}) makes whole ones."
        )
    if records.dropped:
        report.log_to_driver(
            f"{where}: {records.dropped:,} of {records.schema.rows:,} rows are left out of each epoch, so that "
            f"{size} ranks make {records.steps:,} steps each of {records.schema.batch_size:,} rows; "
            "remainder='pad' reads them all."
        )


@dataclass(frozen=True)
class Records:
    """One rank's share of TFRecord files. Iterating gives dicts of numpy arrays, an epoch at a time.

    `steps` (also len()): batches per epoch, the same on every rank. `dropped`: rows that no rank reads in an epoch.
    """

    folder: Location
    schema: Schema
    share: Share
    columns: tuple[Column, ...]
    shuffle: bool
    seed: int
    remainder: Remainder
    transform: Callable[[dict[str, Any]], Any] | None
    size: int

    @property
    def steps(self) -> int:
        return self.share.steps

    @property
    def dropped(self) -> int:
        return max(0, self.schema.rows - self.steps * self.size * self.schema.batch_size)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        tf = _tensorflow()
        try:
            yield from self.as_tf().as_numpy_iterator()
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
            raise self._damaged() or error from None

    def as_tf(self, *names: str) -> Any:
        """A tf.data.Dataset of batches with static shapes: dicts, or with names tuples in that order, or one tensor.

        Each pass over it is an epoch, in an order of its own. It is this rank's alone: TensorFlow does not share it
        out a second time.
        """
        tf = _tensorflow()
        parts, schema = self.share.parts, self.schema
        if self.transform is None:
            for name in names:
                _check_name(name, [column.name for column in self.columns], self.folder.written)
        paths = tf.constant([self._path(part.file) for part in parts])
        skips = tf.constant([part.skip for part in parts], tf.int64)
        takes = tf.constant([part.take for part in parts], tf.int64)
        reading = _Reading(self)

        def open_part(index: Any) -> Any:
            found = tf.data.TFRecordDataset(paths[index], schema.compression or "", buffer_size=1 << 20)
            return found.skip(skips[index]).take(takes[index])

        # The order of an epoch is made anew when it begins: its number is known only then.
        begin = tf.data.Dataset.range(1).map(lambda _: tf.numpy_function(reading.begin, [], tf.int64))
        order = begin.map(lambda found: tf.ensure_shape(found, [len(parts)])).unbatch()
        at_once = min(len(parts), MOST_OPEN if self.shuffle else OPEN_IN_ORDER)
        found = order.interleave(open_part, cycle_length=at_once, num_parallel_calls=tf.data.AUTOTUNE)
        if self.shuffle:
            record_bytes = max(1, schema.size_bytes // max(1, schema.records))
            buffer = max(2, min(MOST_SHUFFLED, SHUFFLED_BYTES // record_bytes))
            found = found.shuffle(buffer, seed=self.seed, reshuffle_each_iteration=True)
        found = found.take(self.steps).map(self._parse, num_parallel_calls=tf.data.AUTOTUNE)
        if names or self.transform is not None:
            found = found.map(lambda batch: self._as_asked(batch, names), num_parallel_calls=tf.data.AUTOTUNE)
        found = found.prefetch(tf.data.AUTOTUNE)
        found = found.scan(tf.constant(0, tf.int64), reading.counted)
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return found.apply(tf.data.experimental.assert_cardinality(self.steps)).with_options(options)

    def check_files(self) -> None:
        """DataError if a file of this rank is not there, or not of the size that it was written with."""
        tf = _tensorflow()
        if not self.folder.local:
            scheme = self.folder.fs.unstrip_protocol(self.folder.path).partition("://")[0]
            if scheme not in tf.io.gfile.get_registered_schemes():
                raise DataError(
                    f"{self.folder.written}: this TensorFlow cannot read {scheme}:// (tensorflow-io can add it). "
                    "Copy the folder to a mount or the ranks' disks."
                )
        for index in sorted({part.file for part in self.share.parts}):
            file = self.schema.files[index]
            location = self.folder / file.name
            try:
                size = int(self.folder.fs.info(location.path)["size"])
            except FileNotFoundError:
                raise DataError(f"{location.written} is missing: write the data anew.") from None
            if size != file.size_bytes:
                raise DataError(
                    f"{location.written} has {size:,} bytes and was written with {file.size_bytes:,}: it is damaged. "
                    "Write the data anew."
                )

    def _path(self, index: int) -> str:
        location = self.folder / self.schema.files[index].name
        return location.path if location.local else str(location.fs.unstrip_protocol(location.path))

    def _parse(self, record: Any) -> dict[str, Any]:
        """A serialised Example as a dict of tensors (batch, …)."""
        tf = _tensorflow()
        text = tf.io.FixedLenSequenceFeature([], tf.string, allow_missing=True)
        one = tf.io.FixedLenFeature([], tf.string)
        features = {column.name: text if column.dtype == STRING else one for column in self.columns}
        found = tf.io.parse_single_example(record, features)
        return {column.name: self._decoded(found[column.name], column) for column in self.columns}

    def _decoded(self, values: Any, column: Column) -> Any:
        tf = _tensorflow()
        if column.dtype != STRING:
            # decode_raw knows no wide unsigned ones.
            kind = {"uint32": "int32", "uint64": "int64"}.get(column.dtype, column.dtype)
            values = tf.io.decode_raw(values, tf.as_dtype(kind))
            if kind != column.dtype:
                values = tf.bitcast(values, tf.as_dtype(column.dtype))
        if self.remainder == "drop":
            return tf.reshape(values, [self.schema.batch_size, *column.shape])
        values = tf.reshape(values, [-1, *column.shape])
        rows = tf.range(self.schema.batch_size) % tf.shape(values)[0]
        return tf.cond(
            tf.shape(values)[0] == self.schema.batch_size,
            lambda: tf.ensure_shape(values, [self.schema.batch_size, *column.shape]),
            lambda: tf.ensure_shape(tf.gather(values, rows), [self.schema.batch_size, *column.shape]),
        )

    def _as_asked(self, batch: dict[str, Any], names: Sequence[str]) -> Any:
        found = self.transform(batch) if self.transform is not None else batch
        if not names:
            return found
        if not isinstance(found, Mapping):
            raise OptionsError(
                f"as_tf({', '.join(map(repr, names))}): the transform gives a `{type(found).__name__}` and not a dict."
            )
        for name in names:
            _check_name(name, list(found), "the transform's result")
        return found[names[0]] if len(names) == 1 else tuple(found[name] for name in names)

    def _damaged(self) -> DataError | None:
        """Which of this rank's files cannot be read; None if it is none of them."""
        tf = _tensorflow()
        for index in sorted({part.file for part in self.share.parts}):
            count = 0
            try:
                for record in tf.data.TFRecordDataset(self._path(index), self.schema.compression or ""):
                    self._parse(record)
                    count += 1
            except tf.errors.OpError as error:
                written = (self.folder / self.schema.files[index].name).written
                reason = error.message.partition("\n")[0].rpartition("} ")[2].partition(" [Op:")[0]
                return DataError(f"{written} is damaged after record {count:,} ({reason}): write the data anew.")
        return None


class _Reading:
    """What the pipeline tells of itself: that an epoch begins, and now and then how far it is."""

    def __init__(self, records: Records) -> None:
        schema = records.schema
        self._records = records
        self._epoch = self._told = 0
        # From C++ into Python costs about as much as a small batch does.
        self._every = max(1, min(64, records.steps // 100))
        self._bytes = schema.size_bytes // max(1, schema.records)
        self._progress = Progress(
            name=records.folder.written,
            kind="tfrecord",
            columns=[column.name for column in records.columns],
            version=hashlib.sha256(repr(schema).encode()).hexdigest()[:16],
            files=len(schema.files),
            rows=schema.rows,
            size_bytes=schema.size_bytes,
            batch_size=schema.batch_size,
        )

    def begin(self) -> np.ndarray[Any, Any]:
        """The order in which the parts are opened in the epoch that begins."""
        import numpy as np

        records = self._records
        self._epoch, self._told = self._epoch + 1, 0
        self._progress.begin(self._epoch, records.steps * records.schema.batch_size, records.steps)
        order = list(range(len(records.share.parts)))
        if records.shuffle:
            random.Random(f"{records.seed} {self._epoch}").shuffle(order)
        return np.array(order, np.int64)

    def counted(self, before: Any, batch: Any) -> tuple[Any, Any]:
        """How many batches it is now, and the batch itself; every so often Python is told."""
        tf = _tensorflow()
        steps = before + 1
        due = tf.logical_or(tf.equal(steps % self._every, 0), tf.equal(steps, self._records.steps))
        return tf.cond(due, lambda: tf.numpy_function(self._tell, [steps], tf.int64), lambda: steps), batch

    def _tell(self, steps: np.int64) -> np.int64:
        for _ in range(int(steps) - self._told):
            self._progress.batch(self._records.schema.batch_size, self._bytes)
        self._told = int(steps)
        if self._told == self._records.steps:
            self._progress.end()
        return steps


def _check_name(name: str, known: Sequence[str], where: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        meant = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(known)}."
        raise DataError(f"{where} has no column {name!r}.{meant}")


def _listed(lengths: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {length:,}" for name, length in lengths.items())


def _at_least_one(option: str, value: int) -> None:
    if value < 1:
        raise OptionsError(f"{option}={value}: at least 1.")


def _tensorflow() -> Any:
    """TensorFlow, imported when it is first needed."""
    try:
        import tensorflow
    except ImportError as error:
        raise DataError(
            f"TFRecord needs TensorFlow, and {error}: `pip install 'sparkring[tensorflow]'` where it runs."
        ) from error
    return tensorflow
