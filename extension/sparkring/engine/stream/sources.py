"""Where the micro-batches of a stream come from, if they do not come from Spark: an iterator, or a watched folder."""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from sparkring.data.micro_batches import Rows, rows_of
from sparkring.data.watch import Watch
from sparkring.engine.run.polling import poll_until
from sparkring.engine.stream.options import StreamOptions
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


class StreamSource(Protocol):
    """A source of micro-batches. `described` describes it in a few words.

    run() calls `train` with one micro-batch after another, in any thread, until there are no more or `stops()` becomes
    true. The state already includes the batches up to `done`: the source may leave them out, and `train` ignores them.
    `position` is the position after the batch `done`. `notice` shows a sentence to the user. check() raises an error if
    the source cannot continue from there.
    The source is told when the ranks have trained on a batch that may have to be used again, and when a batch and all
    earlier ones will not be used again: when a checkpoint includes them or, without checkpoints, at once.
    """

    described: str

    def check(self, done: int) -> None: ...
    def run(
        self,
        done: int,
        position: str,
        train: Callable[[MicroBatch], None],
        stops: Callable[[], bool],
        notice: Callable[[str], None],
    ) -> None: ...
    def batch_is_done(self, batch: MicroBatch) -> None: ...
    def forget(self, batch_id: int) -> None: ...


class IteratorSource:
    """The items of an iterable of this process.

    If the iterable has a method from_batch(number), a run that continues uses what this method returns in place of the
    iterable. The first item is then the micro-batch with this number. Otherwise, items are passed over.

    If the iterable is an iterator that the notebook holds, such as a generator, another stream may continue with it.
    Batches that this stream has not trained on to the end, or whose effect is not saved, are then used again.
    """

    def __init__(self, items: Iterable[Any], called: str, options: StreamOptions) -> None:
        self.described = called
        self._iterable = items
        self._options = options
        self._items: _Items | None = None

    def check(self, done: int) -> None:
        """Do nothing: an iterator can always be begun."""

    def batch_is_done(self, batch: MicroBatch) -> None:
        """Do nothing: if the kernel is killed, the iterator yields the batch again."""

    def forget(self, batch_id: int) -> None:
        if self._items is not None:
            self._items.forget(batch_id)

    def run(
        self,
        done: int,
        position: str,
        train: Callable[[MicroBatch], None],
        stops: Callable[[], bool],
        notice: Callable[[str], None],
    ) -> None:
        watch = self._iterable if isinstance(self._iterable, Watch) else None
        first = 0
        iterable = self._iterable
        if watch is not None:
            if done >= 0 or self._options.checkpoint_dir:  # files that are not part of the state are used again
                watch.resume(json.loads(position)["files"] if position else [])
            first = done + 1
            iterable = watch.files(available_now=self._options.available_now)
        elif done >= 0 and hasattr(iterable, "from_batch"):
            first = done + 1
            try:
                iterable = iterable.from_batch(first)
            except Exception as error:  # of any type, since the method is the user's code
                raise _raised(f"{self.described}.from_batch({first})", error) from None
        iterator = iter(iterable)
        is_held = watch is None and iterator is self._iterable
        earlier = next((other for other in _ended if other.iterator is iterator), None) if is_held else None
        self._items = items = _Items(iterator, self.described, first, earlier)
        try:
            self._run(items, watch, done, train, stops, notice)
        finally:
            if watch is not None:
                watch.stop()
            items.close()
            if is_held:
                _ended.appendleft(items)

    def _run(
        self,
        items: _Items,
        watch: Watch | None,
        done: int,
        train: Callable[[MicroBatch], None],
        stops: Callable[[], bool],
        notice: Callable[[str], None],
    ) -> None:
        passes = False
        due = time.monotonic()
        while not poll_until(stops, due, every_s=LOOK_EVERY_S):
            began = time.perf_counter()
            due = time.monotonic() + (self._options.trigger_s or 0.0)
            entry = items.next(stops)
            if entry is None:
                return
            batch_id, item = entry
            if batch_id <= done:
                if not passes:
                    which = f"batch {done:,}" if batch_id == done else f"batches {batch_id:,}–{done:,}"
                    notice(f"passes over {which} of {self.described}, which the checkpoint already includes")
                passes, due = True, 0.0
                items.forget(batch_id)
                continue
            waited_s = time.perf_counter() - began
            rows = rows_of(item, f"batch {batch_id} of {self.described}")
            where = {"batches": batch_id + 1} if watch is None else {"batches": batch_id + 1, "files": watch.given()}
            backlog = (lambda: None) if watch is None else watch.backlog_rows
            moving_s = time.perf_counter() - began - waited_s
            train(MicroBatch(batch_id, rows, json.dumps(where), waited_s, moving_s, backlog))


def _raised(called: str, error: BaseException) -> DataError:
    failure = as_failure(error)
    return DataError(f"{called} raised {failure.summary}.\n\n{failure.traceback.rstrip()}")


_END = object()


class _Items:
    """Takes items from an iterator in a thread of its own, so that a Stop does not have to wait for the next item.

    An item is taken only when it is needed. `first` is the number of the first item. If a stream that has ended took
    items from the same iterator, `earlier` is its object: the items that it has not forgotten come first, and the
    numbers continue.
    """

    def __init__(self, iterator: Iterator[Any], called: str, first: int, earlier: _Items | None) -> None:
        self.iterator = iterator
        self._called = called
        self._number = first  # of the next item
        self._earlier = earlier
        self._kept: dict[int, Any] = {}  # the items that the stream has got and not forgotten
        self._taken: collections.deque[tuple[Any, BaseException | None]] = collections.deque()  # each with its error
        self._wanted, self._there = threading.Semaphore(0), threading.Semaphore(0)
        self._closed = False
        self._thread = threading.Thread(target=self._take, name="sparkring-stream-items", daemon=True)
        self._thread.start()

    def next(self, stops: Callable[[], bool]) -> tuple[int, Any] | None:
        """Return the next item with its number, or None if there is none, or if `stops()` becomes true."""
        self._wanted.release()
        while not self._there.acquire(timeout=LOOK_EVERY_S):
            if stops():
                return None
        item, error = self._taken.popleft()
        if error is not None:
            raise _raised(self._called, error)
        if item is _END:
            return None
        number = self._number
        self._kept[number] = item
        self._number += 1
        return number, item

    def forget(self, number: int) -> None:
        """Do not keep the item with this number and the earlier ones for the next stream."""
        for kept_number in [kept_number for kept_number in self._kept if kept_number <= number]:
            del self._kept[kept_number]

    def close(self) -> None:
        """Take no more items. If the iterator is computing its next item, the thread ends after that item."""
        self._closed = True
        self._wanted.release()

    def _take(self) -> None:
        left: collections.deque[tuple[Any, BaseException | None]] = collections.deque()
        if self._earlier is not None:
            self._earlier._thread.join()  # an iterator can compute only one item at a time
            left.extend((item, None) for item in self._earlier._kept.values())
            left.extend(self._earlier._taken)
            self._number = min(self._earlier._kept, default=self._earlier._number)
            self._earlier = None
        while True:
            self._wanted.acquire()
            if self._closed:
                break
            self._taken.append(left.popleft() if left else self._taken_now())
            self._there.release()
        self._taken.extend(left)

    def _taken_now(self) -> tuple[Any, BaseException | None]:
        try:
            return next(self.iterator, _END), None
        except BaseException as error:  # of any type, since the iterator is the user's code
            return None, error


# Streams of this process that took items from an iterator that the notebook holds. Only the last few are kept.
_ended: collections.deque[_Items] = collections.deque(maxlen=20)
