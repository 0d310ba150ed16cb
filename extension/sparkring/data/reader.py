"""Reads a shard as Arrow record batches, one window of rows at a time. `Ahead` reads in advance, in a thread."""

from __future__ import annotations

import contextlib
import functools
import itertools
import posixpath
import queue
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from sparkring.data.dataset import BROKEN, Dataset, open_file
from sparkring.data.plan import RowRange, in_order
from sparkring.errors import DataError

Made = TypeVar("Made")

READ_BYTES, READ_ROWS = 32_000_000, 65_536  # the most bytes and the most rows to decode at a time
# A remote file of at most this size is fetched whole; at most FETCHED files are fetched or kept at a time.
WHOLE_BYTES, FETCHED = 2_000_000, 16
OPEN_FILES = 16  # the largest number of local files that are open at a time
LOOK_EVERY_S = 0.2  # how often to check whether the reading thread is alive


class Window(NamedTuple):
    """Some rows of a shard. `place` says where the last row is stored.

    All windows share one stream, so the rows of a window must be read before the next window is taken.
    """

    batches: Iterator[pa.RecordBatch]
    rows: int
    place: str


def windows(dataset: Dataset, ranges: Sequence[RowRange], rows: int) -> Iterator[Window]:
    """Read `ranges` one after another, and yield windows of `rows` rows each. The last window may have fewer rows.

    At most READ_BYTES bytes are decoded at a time, however large a row group is. If a row group cannot be read, raise
    a DataError that names the row group and its file.
    """
    ends = list(itertools.accumulate(row_range.rows for row_range in ranges))
    upcoming = [file for file, _ in itertools.groupby(row_range.file for row_range in ranges)]
    with contextlib.closing(_Files(dataset, upcoming)) as files:
        stored = _Taken(batch for pass_ranges in _passes(ranges) for batch in files.read(pass_ranges))
        for begin in range(0, ends[-1] if ends else 0, rows):
            end = min(begin + rows, ends[-1])
            yield Window(stored.take(end - begin), end - begin, _place(dataset, ranges[bisect_left(ends, end)]))


def first_rows(dataset: Dataset, columns: Sequence[str], most: int) -> pa.RecordBatch:
    """Return at most `most` rows from the beginning of the data set, with these columns."""
    first = in_order(dataset.counts())[0]
    first = first._replace(stop=min(first.stop, most))
    table = pa.Table.from_batches(next(windows(dataset, [first], first.rows)).batches)
    (batch,) = table.select(list(columns)).combine_chunks().to_batches()
    return batch


def passing_rows(dataset: Dataset, file: int) -> list[int]:
    """Read file number `file`, and return how many rows of each row group pass the filter."""
    with contextlib.closing(_Files(dataset)) as files:
        groups = range(len(dataset.files[file].row_groups))
        return [sum(map(len, files.passing(file, group))) for group in groups]


class _Taken:
    """A sequence of batches from which any number of rows can be taken at a time."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def take(self, rows: int) -> Iterator[pa.RecordBatch]:
        while rows:
            batch, self._rest = self._rest or next(self._batches), None
            if len(batch) > rows:
                batch, self._rest = batch.slice(0, rows), batch.slice(rows)
            rows -= len(batch)
            yield batch


def _passes(ranges: Sequence[RowRange]) -> Iterator[list[RowRange]]:
    """Divide `ranges` into lists that can be read in one pass: ranges of one row group, in the order of its rows."""
    pass_ranges: list[RowRange] = []
    for row_range in ranges:
        if pass_ranges and (row_range[:2] != pass_ranges[-1][:2] or row_range.start < pass_ranges[-1].stop):
            yield pass_ranges
            pass_ranges = []
        pass_ranges.append(row_range)
    if pass_ranges:
        yield pass_ranges


def _place(dataset: Dataset, row_range: RowRange) -> str:
    file = dataset.files[row_range.file]
    return f"{posixpath.basename(file.path)}, row group {row_range.row_group + 1} of {len(file.row_groups)}"


class _Files:
    """Reads ranges of rows. A file stays open after a range, because a later range may be in the same file.

    A small remote file is fetched whole, with one request, and several of the `upcoming` files are fetched at a time.
    """

    def __init__(self, dataset: Dataset, upcoming: Iterable[int] = ()) -> None:
        self._dataset = dataset
        self._upcoming = iter(() if dataset.local else filter(self._is_small, upcoming))
        self._fetched: dict[int, Future[bytes]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._open: dict[int, Any] = {}  # in the order in which they were opened
        # Only one remote file is open at a time, because an open remote file keeps read-ahead data in memory.
        self._most = OPEN_FILES if dataset.local else 1

    def close(self) -> None:
        while self._open:
            self._close_first()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _close_first(self) -> None:
        self._open.pop(next(iter(self._open))).close(force=True)

    def _file(self, number: int) -> Any:
        if number not in self._open:
            if len(self._open) == self._most:
                self._close_first()
            whole = not self._dataset.local and self._is_small(number)
            content = functools.partial(self._content, number) if whole else None
            self._open[number] = open_file(self._dataset, number, content)
        return self._open[number]

    def _is_small(self, number: int) -> bool:
        return self._dataset.files[number].size_bytes <= WHOLE_BYTES

    def _content(self, number: int) -> bytes:
        """Return the content of a file, and go on fetching files that come after it."""
        self._pool = self._pool or ThreadPoolExecutor(FETCHED, thread_name_prefix="sparkring-files")
        first = self._fetched.pop(number, None) or self._pool.submit(self._fetch, number)
        for later in itertools.islice(self._upcoming, FETCHED - len(self._fetched)):
            if later != number and later not in self._fetched:
                self._fetched[later] = self._pool.submit(self._fetch, later)
        return first.result()

    def _fetch(self, number: int) -> bytes:
        file = self._dataset.files[number]
        # Without an end, s3fs would ask for the size.
        content: bytes = self._dataset.fs.cat_file(file.path, start=0, end=file.size_bytes)
        return content

    def read(self, wanted: Sequence[RowRange]) -> Iterator[pa.RecordBatch]:
        """Yield the chosen columns of some ranges, in batches. The ranges are read in one pass over their row group."""
        first, at = wanted[0], 0
        starts, stops = [row_range.start for row_range in wanted], [row_range.stop for row_range in wanted]
        file = self._dataset.files[first.file]
        group = file.row_groups[first.row_group]
        try:
            for batch in self.passing(first.file, first.row_group):
                inside = wanted[bisect_right(stops, at) : bisect_left(starts, at + len(batch))]
                parts = [(max(row_range.start - at, 0), min(row_range.stop - at, len(batch))) for row_range in inside]
                at += len(batch)
                if len(parts) == 1:
                    begin, end = parts[0]
                    yield batch.slice(begin, end - begin)
                elif parts:
                    # There can be thousands of short ranges, and a batch for each of them would take long to convert.
                    yield batch.take(pa.array(np.concatenate([np.arange(*part) for part in parts])))
                if at >= stops[-1]:
                    return
        except DataError:
            raise
        except BROKEN as error:
            reason = " ".join(str(error).split()).rstrip(".")
            where = f"{file.path}, row group {first.row_group} (counted from 0)"
            raise DataError(f"{where} cannot be read: {reason}.") from error
        raise DataError(
            f"{file.path}, row group {first.row_group} (counted from 0) now has {at:,} rows that pass the filter, "
            f"instead of {group.rows:,} when {self._dataset.name} was opened: open it again."
        )

    def passing(self, number: int, row_group: int) -> Iterator[pa.RecordBatch]:
        """Yield the chosen columns of a row group of file `number`, in batches, without the rows that are dropped."""
        dataset, file = self._dataset, self._file(number)
        known_file = dataset.files[number]
        group = known_file.row_groups[row_group]
        row_bytes = max(1.0, group.stored_bytes / max(1, group.rows_in_file))
        rows = int(max(1, min(READ_ROWS, READ_BYTES / row_bytes)))
        there = file.schema_arrow.names
        keys, types = dict(known_file.partitions), dataset.stored_schema
        stored = [name for name in dataset.reads if dataset.stored(name) in there]
        # If all columns come from the file's path, the file's first column is read to find the number of rows.
        columns = list(map(dataset.stored, stored)) or there[:1]
        # The names and types of a table can differ from those in its files.
        differs = dataset.table_version is not None and any(
            dataset.stored(name) != name or file.schema_arrow.field(name).type != types.field(name).type
            for name in stored
        )
        kept, at = known_file.remaining(row_group) if known_file.deleted else None, 0
        # With threads, Arrow decodes each column in its own thread. For a single column, a thread would only cost time.
        threads = len(columns) > 1 and pa.cpu_count() > 1
        for batch in file.iter_batches(rows, row_groups=[row_group], columns=columns, use_threads=threads):
            if kept is not None:
                kept_here, at = kept[at : at + len(batch)], at + len(batch)
                batch = batch.filter(pa.array(kept_here))
            if keys or differs:
                known = {name: batch.column(dataset.stored(name)) for name in stored}
                if differs:
                    known = {name: column.cast(types.field(name).type) for name, column in known.items()}
                for name in dataset.reads:
                    if name not in known:
                        known[name] = pa.repeat(pa.scalar(keys[name], types.field(name).type), len(batch))
                batch = pa.RecordBatch.from_pydict(known)
            if dataset.condition is not None:
                table = pa.Table.from_batches([batch]).filter(dataset.condition)
                yield from table.select(list(dataset.columns)).combine_chunks().to_batches()
            elif batch.schema.names != list(dataset.columns):
                yield from pa.Table.from_batches([batch]).select(list(dataset.columns)).to_batches()
            else:
                yield batch


class Ahead(Generic[Made]):
    """Runs the generator `make()` in a thread, which produces up to `depth` items before they are asked for.

    Iterating starts the thread, and yields each item with the seconds that the caller has waited for it. An exception
    in the thread is raised by the iteration. If the thread has died without an exception, the iteration raises
    DataError. close() ends the thread.
    """

    def __init__(self, make: Callable[[], Generator[Made, None, None]], depth: int) -> None:
        self._items: queue.Queue[tuple[Made | None, BaseException | None]] = queue.Queue(max(1, depth))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(make,), name="sparkring-reader", daemon=True)

    def __iter__(self) -> Iterator[tuple[Made, float]]:
        self._thread.start()
        try:
            while True:
                began = time.monotonic()
                item, error = self._next()
                if error is not None:
                    raise error
                if item is None:
                    return
                yield item, time.monotonic() - began
        finally:
            self.close()

    def close(self) -> None:
        """End the thread, and wait until it has ended."""
        self._stop.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._items.get_nowait()  # makes room in the queue, for which the thread may be waiting
            self._thread.join(0.01)

    def _next(self) -> tuple[Made | None, BaseException | None]:
        while True:
            # The thread is checked before the queue. In the opposite order, the thread could put its last item into the
            # queue and end between the two checks, and the item would be missed.
            alive = self._thread.is_alive()
            try:
                return self._items.get(timeout=LOOK_EVERY_S) if alive else self._items.get_nowait()
            except queue.Empty:
                if not alive:
                    gone = "the thread that reads this rank's shard has ended without an error; run the cell again."
                    return None, DataError(gone)

    def _read(self, make: Callable[[], Generator[Made, None, None]]) -> None:
        try:
            with contextlib.closing(make()) as made:
                for item in made:
                    if not self._put(item, None):
                        return
            self._put(None, None)
        except BaseException as error:  # errors of every kind are passed on, and raised where the items are used
            if isinstance(error, SystemExit | KeyboardInterrupt):
                error = DataError(f"the thread that reads this rank's shard was ended by {type(error).__name__}.")
            self._put(None, error)

    def _put(self, item: Made | None, error: BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._items.put((item, error), timeout=LOOK_EVERY_S)
                return True
            except queue.Full:
                continue
        return False
