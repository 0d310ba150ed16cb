"""Where the micro-batches of a stream come from, if they do not come from Spark: an iterator, or a watched folder."""

from __future__ import annotations

import collections
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from sparkring.data.micro_batches import Rows, rows_of
from sparkring.data.watch import Watch
from sparkring.engine.polling import poll_until
from sparkring.errors import DataError
from sparkring.worker.rank.failures import as_failure

LOOK_EVERY_S = 0.05


class MicroBatch(NamedTuple):
    """A micro-batch. `position` says where the stream continues after it.

    `waiting_s` is how long there were no rows, and `moving_s` is how long it has taken so far to move the rows from the
    source.
    `backlog_rows` returns the number of rows that wait in the source, or None if it is not known. `replayed` says
    whether an earlier kernel has already trained on the batch, without saving its effect.
    """

    batch_id: int
    rows: Rows
    position: str
    waiting_s: float = 0.0
    moving_s: float = 0.0
    backlog_rows: Callable[[], int | None] = lambda: None
    replayed: bool = False


class Source(Protocol):
    """A source of micro-batches. `described` describes it in a few words.

    run() calls `train` with one micro-batch after another, in any thread, until there are no more or `stops()` becomes
    true. The state already includes the batches up to `done`: the source may leave them out, and `train` ignores them.
    `position` is the position after the batch `done`. check() raises an error if the source cannot continue from there.
    The source is told when the ranks have trained on a batch that no checkpoint has yet, and when a checkpoint has a
    batch and all earlier ones.
    """

    described: str

    def check(self, done: int) -> None: ...
    def run(self, done: int, position: str, train: Callable[[MicroBatch], None], stops: Callable[[], bool]) -> None: ...
    def batch_is_done(self, batch: MicroBatch) -> None: ...
    def batch_is_saved(self, batch_id: int) -> None: ...


class IteratorSource:
    """The items of an iterable of this process. `trigger_s` is the least time between two micro-batches."""

    def __init__(self, items: Iterable[Any], called: str, trigger_s: float | None) -> None:
        self.described = called
        self._items = items
        self._trigger_s = trigger_s or 0.0

    def check(self, done: int) -> None:
        """Do nothing: an iterator can always be begun."""

    def batch_is_done(self, batch: MicroBatch) -> None:
        """Do nothing: if the kernel is killed, the iterator yields the batch again."""

    def batch_is_saved(self, batch_id: int) -> None:
        """Do nothing: an iterator keeps no batches."""

    def run(self, done: int, position: str, train: Callable[[MicroBatch], None], stops: Callable[[], bool]) -> None:
        watch = self._items if isinstance(self._items, Watch) else None
        first = 0
        if watch is not None and done >= 0:
            watch.resume(json.loads(position)["files"] if position else [])
            first = done + 1
        iterator = iter(self._items)
        if watch is None and iterator is self._items:
            first = _taken.get(iterator)
        items = _Items(iterator, self.described)
        try:
            self._run(items, first, done, train, stops)
        finally:
            if watch is not None:
                watch.stop()
            items.close()
            if watch is None and iterator is self._items:
                _taken.add(iterator, items.count)

    def _run(
        self,
        items: _Items,
        first: int,
        done: int,
        train: Callable[[MicroBatch], None],
        stops: Callable[[], bool],
    ) -> None:
        watch = self._items if isinstance(self._items, Watch) else None
        due = time.monotonic()
        for batch_id in itertools.count(first):
            began = time.perf_counter()
            if poll_until(stops, due, every_s=LOOK_EVERY_S):
                return
            due = time.monotonic() + self._trigger_s
            item = items.next(stops)
            if item is _END:
                return
            if batch_id <= done:
                due = 0.0
                continue
            waited_s = time.perf_counter() - began
            rows = rows_of(item, f"batch {batch_id} of {self.described}")
            where = {"batches": batch_id + 1} if watch is None else {"batches": batch_id + 1, "files": watch.given()}
            backlog = (lambda: None) if watch is None else watch.backlog_rows
            moving_s = time.perf_counter() - began - waited_s
            train(MicroBatch(batch_id, rows, json.dumps(where), waited_s, moving_s, backlog))


_END = object()


class _Taken:
    """How many items streams of this process have taken from iterators that the notebook holds, such as generators.

    If another stream uses such an iterator, its next item is not the first one. Only the last few iterators are kept.
    """

    def __init__(self) -> None:
        self._counts: collections.deque[tuple[Iterator[Any], int]] = collections.deque(maxlen=20)

    def get(self, iterator: Iterator[Any]) -> int:
        return next((count for each, count in self._counts if each is iterator), 0)

    def add(self, iterator: Iterator[Any], count: int) -> None:
        self._counts.appendleft((iterator, self.get(iterator) + count))


_taken = _Taken()


class _Items:
    """Takes items from an iterator in a thread of its own, so that a Stop does not have to wait for the next item.

    An item is taken only when it is needed, so that another stream can go on with the iterator where this one ended.
    """

    def __init__(self, iterator: Iterator[Any], called: str) -> None:
        self._iterator = iterator
        self._called = called
        self._wanted = threading.Semaphore(0)
        self._there = threading.Event()
        self._item: Any = None
        self._error: BaseException | None = None
        self._closed = False
        self.count = 0  # how many items have been taken
        threading.Thread(target=self._take, name="sparkring-stream-items", daemon=True).start()

    def next(self, stops: Callable[[], bool]) -> Any:
        """Return the next item; _END if there is none, or if `stops()` becomes true."""
        self._there.clear()
        self._wanted.release()
        while not self._there.wait(LOOK_EVERY_S):
            if stops():
                return _END
        if self._error is not None:
            failure = as_failure(self._error)
            raise DataError(f"{self._called} raised {failure.summary}.\n\n{failure.traceback.rstrip()}")
        return self._item

    def close(self) -> None:
        """Take no more items. If the iterator is waiting for its next item, the thread ends after that item."""
        self._closed = True
        self._wanted.release()

    def _take(self) -> None:
        while self._item is not _END and self._error is None:
            self._wanted.acquire()
            if self._closed:
                return
            try:
                self._item = next(self._iterator, _END)
                self.count += self._item is not _END
            except BaseException as error:  # of any type, since the iterator is the user's code
                self._error = error
            self._there.set()
