"""Watches a reader while it reads: reports its progress, and notices when its workers have died.

The module replaces attributes of the reader that are not part of Petastorm's API, so Petastorm 0.12 is pinned.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.data.petastorm.plan import ReaderPlan
from sparkring.data.petastorm.source import first_line
from sparkring.data.progress import ReadProgress, Route
from sparkring.errors import DataError
from sparkring.wire.messages import Piece

if TYPE_CHECKING:
    from petastorm.reader import Reader

# How long the reader continues after a worker has died, because results from other workers may still arrive.
_DEAD_AND_SILENT_S = 0.3  # if no result is arriving
_DEAD_S = 1.5  # if results are still arriving
_ROWS_AT_ONCE = 32  # counting each row separately would add a fifth to Petastorm's time


def watch(reader: Reader, plan: ReaderPlan, first: Callable[[], None] | None = None) -> None:
    """Count the results that `reader` takes from its queue, and look for dead workers whenever it has to wait.

    `first` is called when there is a first result.
    """
    source, options = plan.source, plan.options
    progress = ReadProgress(
        name=source.name,
        kind="petastorm",
        columns=tuple(plan.columns),
        where=where(options),
        version=source.version,
        files=len(source.groups_in),
        row_groups=len(source.rows),
        rows=sum(source.rows),
        size_bytes=sum(source.sizes_bytes),
        batch_size=plan.batch_size or 0,
    )
    reader._results_queue_reader = CountedResults(reader._results_queue_reader, RowTally(progress, plan), first)
    pool = reader._workers_pool
    if hasattr(pool, "_results_receiver_poller"):
        pool._results_receiver_poller = _Poller(pool._results_receiver_poller, Deaths(source.name, pool))
    elif hasattr(pool, "_stop_event"):
        _guard(pool._results_queue, Deaths(source.name, pool))


class CountedResults:
    """The reader's queue of results. It counts what is read; after a failure, every read raises a DataError."""

    def __init__(self, real: Any, tally: RowTally, first: Callable[[], None] | None = None) -> None:
        self._real = real
        self._tally = tally
        self._first = first
        self._failed: Exception | None = None

    @property
    def batched_output(self) -> bool:
        return bool(self._real.batched_output)

    def read_next(self, pool: Any, schema: Any, ngram: Any) -> Any:
        if self._failed is not None:  # Petastorm would wait for workers that have ended
            raise DataError(f"the reader has already failed: {first_line(self._failed)}") from self._failed
        began = time.monotonic()
        try:
            item = self._real.read_next(pool, schema, ngram)
        except StopIteration:
            self._tally.end()
            raise
        except Exception as error:  # from the user's transform, or from the files
            self._failed = error
            raise
        if self._first is not None:
            self._first()
            self._first = None
        self._tally.add(item, time.monotonic() - began)
        return item


class RowTally:
    """Counts the rows that a reader returns in each epoch, and reports the counts.

    Petastorm's epochs overlap: its workers begin an epoch while row groups of the previous epoch are still to arrive.
    So this class ends an epoch after as many rows as the shard has. If this number is unknown, all rows count as one
    epoch.
    """

    def __init__(self, progress: ReadProgress, plan: ReaderPlan) -> None:
        self._progress, self._plan = progress, plan
        self._batched, self._batch_size = plan.batched, plan.batch_size
        groups = plan.groups
        rows = sum(plan.source.rows[index] for index in groups)
        self._rows: float = rows if plan.counted and rows else math.inf
        steps = math.ceil(rows / plan.batch_size) if plan.batch_size else len(groups) if plan.batched else None
        self._planned = (rows, steps) if plan.counted else (None, None)
        # If the row groups are read in order, the n-th result is the n-th row group, so its place is known.
        in_order = plan.batched and plan.in_order
        self._places = itertools.cycle([plan.source.place(index) for index in groups] if in_order else [""])
        self._pending, self._waited_s = 0, 0.0  # _pending: rows that add() has received but not yet counted
        self._epoch, self._done = 0, 0
        self._begin()

    def _begin(self) -> None:
        self._epoch, self._done = self._epoch + 1, 0
        rows, steps = self._planned
        self._progress.begin(self._epoch, rows, steps, _route(self._plan))

    def add(self, item: Any, waited_s: float) -> None:
        """Count one result (a row or a batch). `waited_s` is how long the caller has waited for this result."""
        # Only waits of the main thread are counted: waits of TensorFlow's threads do not delay the computation.
        self._waited_s += waited_s if threading.current_thread() is threading.main_thread() else 0.0
        if self._batched:
            size_bytes = sum(int(getattr(column, "nbytes", 0)) for column in item)
            self._count(len(item[0]) if len(item) else 0, size_bytes, next(self._places))
            return
        self._pending += 1
        if self._pending >= min(_ROWS_AT_ONCE, self._rows - self._done):
            self._count(self._pending, 0, "")
            self._pending = 0

    def _count(self, rows: int, size_bytes: int, place: str) -> None:
        while rows:
            if self._done == self._rows:
                self._begin()
            taken = int(min(rows, self._rows - self._done))
            before, self._done = self._done, self._done + taken
            ended = self._done == self._rows
            if self._batch_size:
                steps = self._done // self._batch_size - before // self._batch_size
                steps += ended and self._done % self._batch_size > 0
            else:
                steps = int(self._batched)
            self._progress.batch(taken, size_bytes * taken // rows, self._waited_s, place, steps=steps)
            if ended:
                self._progress.end()
            size_bytes -= size_bytes * taken // rows
            rows, self._waited_s = rows - taken, 0.0

    def end(self) -> None:
        """Count the pending rows, and report the end of the epoch, because no more results will come."""
        self._count(self._pending, 0, "")
        self._pending = 0
        if 0 < self._done < self._rows:
            if self._batch_size and self._done % self._batch_size:
                self._progress.batch(0, 0)  # one more step: the last, smaller batch, whose rows are counted already
            self._progress.end()


def _route(plan: ReaderPlan) -> Route | None:
    """Return the shard's row groups for the report, or None if a filter chooses which of them are read."""
    if plan.options["predicate"] is not None or plan.options["rowgroup_selector"] is not None:
        return None
    source, files = plan.source, {path: number for number, path in enumerate(plan.source.groups_in)}
    pieces = [Piece(files[source.pieces[at].path], source.pieces[at].row_group, source.rows[at]) for at in plan.groups]
    # If the order is not known, the route is one window: a route says nothing about the order within a window.
    window = 0 if plan.in_order else max(1, sum(piece.rows for piece in pieces))
    return Route(pieces, list(files).__getitem__, window=window)


class Deaths:
    """Raises an error if workers have ended without an exception, that is, by sys.exit() in a transform or by a signal.

    Petastorm does not notice this, and waits for their results forever.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self._name = name
        self._pool = pool
        self._since = 0.0

    def look(self, *, silent: bool) -> None:
        """Raise DataError if a worker has been dead for a while, or sooner if no result is arriving (`silent`)."""
        dead = [self._ended(worker) for worker in self._pool._workers]
        reasons = [reason for reason in dead if reason]
        if not reasons:
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > (_DEAD_AND_SILENT_S if silent else _DEAD_S):
            raise DataError(f"{self._name}: {len(reasons)} of the {len(dead)} workers of Petastorm's reader ended "
                            f"without a result ({reasons[0]}).")  # fmt: skip

    @staticmethod
    def _ended(worker: Any) -> str:
        if not hasattr(worker, "poll"):
            return (
                "" if worker.is_alive() else "a thread; this can be caused by sys.exit() in a transform, or by stop()"
            )
        code = worker.poll()
        if code is None:
            return ""
        return f"a process, killed by signal {-code}" if code < 0 else f"a process, with exit code {code}"


class _Poller(NamedTuple):
    """A process pool's poller that also looks for dead workers while the reader waits."""

    real: Any
    deaths: Deaths

    def poll(self, timeout_ms: float) -> Any:
        events = self.real.poll(timeout_ms)
        self.deaths.look(silent=not events)
        return events


def _guard(results: queue.Queue[Any], deaths: Deaths) -> None:
    """Make the queue of a thread pool look for dead workers while the reader waits."""
    real = results.get

    def get(block: bool = True, timeout: float | None = None) -> Any:
        try:
            result = real(block, timeout)
        except queue.Empty:
            deaths.look(silent=True)
            raise
        if not isinstance(result, Exception):
            deaths.look(silent=False)
        return result

    results.get = get  # type: ignore[method-assign]


def where(options: dict[str, Any]) -> str:
    """Return a string that shows the filters among a reader's options, or '' if there are none."""
    filters = [repr(options["filters"])] if options["filters"] else []
    chosen = (options["predicate"], options["rowgroup_selector"])
    return " and ".join(filters + [type(selector).__name__ for selector in chosen if selector is not None])
