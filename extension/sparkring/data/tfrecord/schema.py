"""Describes a folder of TFRecord files (its columns and files), and computes which records each rank reads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from sparkring.data.folders import write_json
from sparkring.errors import DataError
from sparkring.runtime.storage import Location, locate

SCHEMA = "_schema.json"
LAYOUT = 1
STRING = "string"

Compression = Literal["GZIP", "ZLIB"]
Remainder = Literal["drop", "pad"]


class RecordColumn(NamedTuple):
    """A column of a batch: its type (NumPy's name, or "string" for bytes of any length) and the shape of one row."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


class RecordFile(NamedTuple):
    """One file. `name` is its path in the folder.

    Of all records in all files, at most one is smaller than a batch. It is the last record of its file.
    """

    name: str
    records: int
    rows: int
    size_bytes: int


@dataclass(frozen=True)
class Schema:
    """The content of `_schema.json`, which describes a folder of TFRecord files."""

    columns: tuple[RecordColumn, ...]
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


class RecordPart(NamedTuple):
    """Consecutive records of one file: the `take` records that follow its first `skip` records."""

    file: int
    skip: int
    take: int


class RecordShare(NamedTuple):
    """What one rank reads in an epoch: the first `steps` records of `parts`, which may contain more.

    `split` says whether ranks read parts of files instead of whole files.
    """

    parts: tuple[RecordPart, ...]
    steps: int
    split: bool


def share_out(schema: Schema, rank: int, size: int, remainder: Remainder = "drop") -> RecordShare:
    """Return what rank `rank` of `size` reads. Ranks take the same number of steps, and no two read the same record.

    Each rank reads whole files if the ranks' numbers of records then differ by at most one. Otherwise, the records of
    all files are cut into `size` runs of consecutive records, one for each rank.
    With remainder="drop", only full records are read, and at most size - 1 of them are left out. With "pad", all
    records are read, and a rank that has one record fewer than others reads one of its own twice.
    Raises DataError if there are fewer records than ranks.
    """
    full = [file.rows // schema.batch_size if remainder == "drop" else file.records for file in schema.files]
    total = sum(full)
    if total < size:
        raise DataError(
            f"there are too few {'full ' * (remainder == 'drop')}records of {schema.batch_size:,} rows for {size} "
            f"ranks (only {total}): write the data again with a smaller batch_size, or run fewer ranks."
        )
    owned = [sum(full[index::size]) for index in range(size)]
    split = max(owned) - min(owned) > 1
    if split:
        parts = _run_of(full, rank * total // size, (rank + 1) * total // size)
    else:
        parts = [RecordPart(file, 0, full[file]) for file in range(rank, len(full), size) if full[file]]
    steps = total // size if remainder == "drop" else -(-total // size)
    if sum(part.take for part in parts) < steps:
        parts.append(parts[0]._replace(take=1))
    return RecordShare(tuple(parts), steps, split)


def _run_of(full: Sequence[int], start: int, stop: int) -> list[RecordPart]:
    """Return the parts with records `start` to `stop` (not included) of all files.

    `full` lists the number of records in each file.
    """
    parts, before = [], 0
    for file, count in enumerate(full):
        first, last = max(start - before, 0), min(stop - before, count)
        if first < last:
            parts.append(RecordPart(file, first, last - first))
        before += count
    return parts


def write_no_schema(folder: Location) -> None:
    """Mark the folder as incomplete. Otherwise, what is left of an interrupted write could be read as others' files."""
    write_json(folder / SCHEMA, LAYOUT, {"incomplete": True})


def write_schema(schema: Schema, folder: Location) -> None:
    """Write the schema to the folder of the files. Without it, the folder counts as incomplete."""
    write_json(folder / SCHEMA, LAYOUT, asdict(schema))


def has_schema(path: str | os.PathLike[str]) -> bool:
    """Return whether write_tfrecord() has written the folder `path`."""
    file = locate(path) / SCHEMA
    try:
        return bool(file.fs.exists(file.path))
    except OSError:  # such as a path below a file
        return False


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """Read the schema in the folder `path`. Raises DataError if the folder is missing, incomplete or damaged.

    The folder counts as damaged if files are missing or have changed in size; their contents are not checked.
    """
    folder = locate(path)
    file = folder / SCHEMA
    try:
        content = json.loads(file.fs.cat_file(file.path))
        if content.pop("layout") != LAYOUT:
            raise DataError(f"{folder.written} was written by another version of sparkring: write it again.")
        if content.pop("incomplete", False):
            raise DataError(
                f"{folder.written} is incomplete, because writing was interrupted: remove it, and write it again."
            )
        columns = tuple(RecordColumn(name, dtype, tuple(shape)) for name, dtype, shape in content.pop("columns"))
        schema = Schema(columns=columns, files=tuple(RecordFile(*entry) for entry in content.pop("files")), **content)
        _check_files(schema, folder)
        return schema
    except FileNotFoundError:
        if not folder.fs.exists(folder.path):
            raise DataError(f"{folder.written} does not exist.") from None
        raise DataError(
            f"{folder.written} has no {SCHEMA}: its files are not write_tfrecord()'s. Read them with tfrecords()."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file.written} is damaged ({error}): write the data again.") from None
    except OSError as error:
        raise DataError(f"{folder.written} cannot be read: {error.strerror or error}.") from error


def _check_files(schema: Schema, folder: Location) -> None:
    folder.fs.invalidate_cache(folder.path)
    infos = folder.fs.find(folder.path, detail=True)
    for file in schema.files:
        location = folder / file.name
        if location.path not in infos:
            raise DataError(f"{location.written} is missing: write the data again.")
        size = infos[location.path]["size"]
        if size != file.size_bytes:
            raise DataError(
                f"{location.written} has {size:,} bytes instead of {file.size_bytes:,}: write the data again."
            )
