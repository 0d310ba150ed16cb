"""Finds the row groups and the schema of a data set in the same way as Petastorm's readers will.

Errors about the row groups and the schema are raised as a DataError.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from sparkring.data.dataset import is_table
from sparkring.data.delta import table_of
from sparkring.errors import DataError, PathError
from sparkring.runtime.storage import locate
from sparkring.runtime.world import world


class ReaderSource(NamedTuple):
    """A data set as Petastorm sees it: row groups in Petastorm's order, with their numbers of rows and bytes."""

    name: str
    fs: Any
    pieces: list[Any]  # one per row group: path, row_group, partition_keys
    rows: list[int]
    sizes_bytes: list[int]
    groups_in: dict[str, int]  # the number of row groups of each file, by its path
    schema: Any
    has_unischema: bool
    partitions: Any

    @property
    def version(self) -> str:
        """A digest of what the footers say about the row groups: their paths, numbers, rows and bytes."""
        groups = zip(self.pieces, self.rows, self.sizes_bytes, strict=True)
        summary = [(piece.path, piece.row_group, rows, size_bytes) for piece, rows, size_bytes in groups]
        return hashlib.blake2b(repr(summary).encode(), digest_size=8).hexdigest()

    def place(self, index: int) -> str:
        """Return the name of row group `index` for messages: the file, and the row group's number in it (from 1)."""
        piece = self.pieces[index]
        of = self.groups_in[piece.path]
        return f"{os.path.basename(piece.path)}, row group {piece.row_group + 1} of {of}"


def open_source(options: dict[str, Any], name: str = "") -> ReaderSource:
    """Read the footers of the files that `options` name, through the file system that Petastorm will use.

    `options` are those of bound(). `name` is the data's name in messages; the default is its URL. Raise DataError if
    the data cannot be read or has no rows.
    """
    from petastorm.errors import NoDataAvailableError
    from petastorm.etl import dataset_metadata
    from petastorm.fs_utils import get_filesystem_and_path_or_paths
    from pyarrow import parquet

    url = next(iter(options.values()))
    if not url:
        raise DataError("the list of paths is empty.")
    name = name or (url if isinstance(url, str) else f"{url[0]} and {len(url) - 1} more" if len(url) > 1 else url[0])
    name = name.removeprefix("file://")
    for part in [url] if isinstance(url, str) else url:
        with contextlib.suppress(PathError):  # a file system that only Petastorm knows
            place = locate(part)
            if table := table_of(place.fs, place.path):
                raise is_table(name, *table)
    with in_words(name, also=(OSError, ValueError, RuntimeError, NoDataAvailableError)):
        fs, paths = get_filesystem_and_path_or_paths(
            url, options["hdfs_driver"], storage_options=options["storage_options"], filesystem=options["filesystem"]
        )
        for path in [paths] if isinstance(paths, str) else paths:
            if not fs.exists(path):
                raise DataError(f"{name}: nothing exists at {path}{_as_seen_here()}.")
        dataset = parquet.ParquetDataset(
            paths, filesystem=fs, validate_schema=False, metadata_nthreads=10, filters=options["filters"]
        )
        if not dataset.pieces:
            chosen = f" that pass filters={options['filters']!r}" if options["filters"] else ""
            raise DataError(f"{name} has no Parquet files{chosen}.")
        footers = _footers(fs, [piece.path for piece in dataset.pieces])
        if dataset.metadata or dataset.common_metadata:
            pieces = dataset_metadata.load_row_groups(dataset)
        else:
            pieces = [
                parquet.ParquetDatasetPiece(piece.path, row_group=index, partition_keys=piece.partition_keys)
                for piece in dataset.pieces
                for index in range(footers[piece.path].num_row_groups)
            ]
        try:
            schema, has_unischema = dataset_metadata.get_schema(dataset), True
        except dataset_metadata.PetastormMetadataError:
            schema, has_unischema = dataset_metadata.infer_or_load_unischema(dataset), False
        groups = [footers[piece.path].row_group(piece.row_group) for piece in pieces]
        source = ReaderSource(
            name, fs, pieces, [group.num_rows for group in groups], [group.total_byte_size for group in groups],
            {path: footer.num_row_groups for path, footer in footers.items()}, schema, has_unischema,
            dataset.partitions,
        )  # fmt: skip
    if not any(source.rows):
        raise DataError(f"{name} has no rows: {len(footers)} files, all empty.")
    return source


def _footers(fs: Any, paths: list[str]) -> dict[str, Any]:
    """Return the footers of files, by their paths. Raise a DataError that names a file whose footer is unreadable."""
    from pyarrow import parquet

    def read(path: str) -> Any:
        try:
            with fs.open(path, "rb") as file:
                return parquet.read_metadata(file)
        except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise DataError(f"{path} cannot be read as Parquet: {first_line(error)}") from error

    with concurrent.futures.ThreadPoolExecutor(min(16, len(paths))) as pool:
        return dict(zip(paths, pool.map(read, paths), strict=True))


@contextlib.contextmanager
def in_words(name: str, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn Petastorm's errors about the data, and errors of the types `also`, into a DataError."""
    from petastorm.errors import NoDataAvailableError
    from petastorm.etl.dataset_metadata import PetastormMetadataError

    try:
        yield
    except (DataError, PathError):
        raise
    except PetastormMetadataError as error:
        raise DataError(f"{name}: its _common_metadata does not list the row groups ({first_line(error)}). "
                        "Rewrite it with Petastorm's petastorm-generate-metadata.py.") from error  # fmt: skip
    except (NoDataAvailableError, *also) as error:
        raise DataError(f"{name}: {first_line(error)}") from error


def _as_seen_here() -> str:
    """Return the end of the message for a missing path. With several ranks, it names the node that lacks the path."""
    here = world()
    if here.size == 1:
        return ""
    return f" on {here.node}, where rank {here.rank} runs; all ranks must be able to reach the data"


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
