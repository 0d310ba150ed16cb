"""The pool: runs items on its slots until there are no more.

One thread polls all slots. It waits at one queue for all of them: when there is something to poll, the slot's gang puts
the number of the slot into this queue.
"""

from __future__ import annotations

import pickle
import queue
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparkring.engine.foreach.items import Items, Problem
from sparkring.engine.foreach.schedule import Attempt, Item, Schedule
from sparkring.engine.foreach.slot import Ended, Slot, SlotSettings
from sparkring.engine.recorder import Recorder
from sparkring.errors import LaunchError, SlotsError
from sparkring.gangs.execution import Request
from sparkring.history import describe, events
from sparkring.history.events import Event, Failure
from sparkring.runtime.interrupts import Interrupts
from sparkring.runtime.report import short_repr

if TYPE_CHECKING:
    from sparkring.engine.foreach.kept import Kept
    from sparkring.engine.foreach.steering import Steering

_Answer = TypeVar("_Answer")

LOOK_EVERY_S = 0.1  # poll all slots this often, since no message comes when a time limit passes or a process dies
STARTS_TRIED = 3  # after so many starts in a row that failed, the run fails
START_PAUSE_S = 0.5  # before the second start; twice as long before the third
SHORT_AFTER_S = 2.0  # when ranks that queue have waited for so long, the user is told what they wait for
STOP_GRACE_S = 0.5  # between the interrupt and the kill of ranks that run an item when the run ends


@dataclass
class Results:
    """The values of the items that finished and the failures of those that failed, by number."""

    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)


class Pool:
    """Runs `items` in the order that `schedule` decides. `request_for(attempt)` makes the request for an attempt.

    `results` holds the results of the items that have ended so far, and `measured` is what ranks have measured. `error`
    is the exception that the user's iterable raised, or None. Items whose results are in `kept`, from an earlier run,
    do not run. If the items' iterator steers the run, as that of a search does, it is told what items report and how
    they end.
    """

    def __init__(
        self,
        items: Items,
        schedule: Schedule,
        settings: SlotSettings,
        request_for: Callable[[Attempt], Request],
        recorder: Recorder,
        interrupts: Interrupts,
        kept: Kept | None = None,
    ) -> None:
        self.results = Results()
        self.error: BaseException | None = None
        self.measured: list[events.ItemMeasured] = []
        self._items = items
        self._schedule = schedule
        self._size = settings.size
        self._queues = settings.queues
        self._request_for = request_for
        self._recorder = recorder
        self._interrupts = interrupts
        self._kept = kept
        self._steering = items.steering
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._slots = [Slot(number, settings, self._news.put) for number in range(schedule.limit)]
        self._look_at = 0.0
        self._failed_starts = 0
        self._start_at = 0.0
        self._start_told = ""  # the last notice of a failed start
        self._short_at: float | None = None  # when to tell what ranks wait for; None if none wait, or it has been told
        self._short_told = False
        self._ending = False
        self._planned: events.ItemsPlanned | None = None

    def run(self) -> None:
        """Run all items. Return early if the run is stopped, if an item fails with --fail-fast, or the iterable raises.

        Raises LaunchError if ranks cannot be started, and CheckpointError if the kept study of a search cannot be read.
        When this method returns or raises, no process is left.
        """
        try:
            self._tell([])
            if self._steering is not None:
                self._tell([self._steering.begin(Path(self._recorder.record.log_folder), self._kept)])
            while not (self._schedule.over or self._interrupts.seen):
                self._begin()
                self._listen(wait=not (self._takes or self._to_open()))
        finally:
            self._end()

    # ── what begins ───────────────────────────────────────────────────────────

    @property
    def _takes(self) -> bool:
        """Whether an item is to be taken from the iterable now."""
        if not self._schedule.wants_item or time.monotonic() < self._start_at:
            return False
        if not self._queues:
            return True
        # Only the first item is taken before ranks are up: slots are opened when it is known that there is an item.
        return any(slot.free for slot in self._slots) or not any(slot.open for slot in self._slots)

    def _begin(self) -> None:
        """Take one item if there is room for it, and begin the attempts that wait.

        Only one item is taken, since the iterable may take long for each: the news of the slots is heard in between.
        """
        if self._takes:
            self._take()
        if self._queues:
            self._release()
            self._open()
            self._tell_what_ranks_wait_for()
        self._assign()

    def _take(self) -> None:
        """Take the next item from the user's iterable, which may take long or raise an error."""
        try:
            with self._interrupts.let_through():
                found = self._items.take()
        except KeyboardInterrupt:
            self._interrupts.request()
            return
        except Exception as error:  # of any type: the iterable is the user's code
            self.error = error.with_traceback(_without_ours(error.__traceback__))
            self._schedule.exhausted = True
            return
        if found is None:
            self._schedule.exhausted = True
        elif isinstance(found, Problem):
            self._schedule.failed()
            begun = events.ItemStarted(time.time(), found.number, found.name, -1)
            self._tell([begun, self._over(found.number, Ended(failure=found.failure), "failed")])
        elif not self._was_kept(found):
            self._schedule.add(found)

    def _was_kept(self, item: Item) -> bool:
        """Whether an earlier run has kept the result of the item. If so, record it: the item need not run."""
        found = None if self._kept is None else self._kept.find(item.key)
        if found is None:
            return False
        value, result = found
        self.results.values[item.number] = value
        now = time.time()
        begun = events.ItemStarted(now, item.number, item.name, -1, parameters=item.parameters)
        over = events.ItemEnded(
            now, item.number, "kept", result.text, None, result.metrics, result.seconds, result.pruned
        )
        self._tell([begun, over])
        ending: events.ItemEnding = "pruned" if result.pruned else "kept"
        self._told(lambda steering: steering.ended(item.number, ending, result.metrics), None)
        return True

    def _to_open(self) -> Slot | None:
        """Return a slot to open now, if ranks queue and the items need more slots than are open."""
        begun = self._schedule.waits or self._schedule.running
        if not (self._queues and begun) or time.monotonic() < self._start_at:
            return None
        closed = [slot for slot in self._slots if not slot.open]
        is_short = len(self._slots) - len(closed) < self._schedule.needed(self._items.left)
        return closed[0] if closed and is_short else None

    def _open(self) -> None:
        """Open one slot if more are needed. It is given an item only when its ranks are up."""
        slot = self._to_open()
        if slot is not None:
            try:
                slot.start_gang()
            except LaunchError as error:
                self._not_started(slot, error)

    def _release(self) -> None:
        """End the ranks for which there will be no item.

        Those that wait for a place to run are ended first. Otherwise, they would get the places of the others.
        """
        is_open = [slot for slot in self._slots if slot.open]
        spare = max(0, len(is_open) - self._schedule.needed(self._items.left))
        idle = [slot for slot in is_open if slot.attempt is None]
        waiting = [slot for slot in idle if not slot.up][:spare]
        for slot in waiting or idle[: 0 if any(slot.ending for slot in self._slots) else spare]:
            slot.retire()

    def _tell_what_ranks_wait_for(self) -> None:
        """If items wait because ranks have waited for a place to run for SHORT_AFTER_S, say so once."""
        up = sum(slot.up for slot in self._slots)
        waiting = next((slot for slot in self._slots if slot.open and not slot.up), None)
        if waiting is None or self._short_told:
            self._short_at = None
        elif self._short_at is None:
            self._short_at = time.monotonic() + SHORT_AFTER_S
        elif time.monotonic() > self._short_at:
            self._short_told = True
            limit, why = self._schedule.limit, waiting.waits_for()
            self._recorder.notice(f"{up} of {limit} at once for now, and more when task slots are free: {why}")

    def _assign(self) -> None:
        if time.monotonic() < self._start_at:
            return
        for attempt in self._schedule.assign(slot.number for slot in self._slots if slot.free):
            slot = self._slots[attempt.slot]
            if self._queues and not slot.can_run(attempt):
                slot.retire()
                self._schedule.give_back(slot.number)  # until the ranks of another slot, or new ones of this, are up
                continue
            try:
                slot.start(attempt, self._request_for(attempt))
            except LaunchError as error:
                self._not_started(slot, error)

    def _not_started(self, slot: Slot, error: LaunchError) -> None:
        """Have the slot's attempt begin again after a pause; raise `error` if too many starts in a row have failed."""
        if self._ending:
            slot.retire(kill=True)
            return
        if time.monotonic() >= self._start_at:  # starts that fail within the pause after another one fail with it
            self._failed_starts += not (self._queues and isinstance(error, SlotsError))  # slots are waited for
            if self._failed_starts >= STARTS_TRIED:
                raise error
            told = f"{describe.first_line(str(error))} The start is tried again."
            if told != self._start_told:
                self._start_told = told
                self._recorder.notice(told)
            self._start_at = time.monotonic() + START_PAUSE_S * max(1, self._failed_starts)
        if slot.attempt is not None:
            self._schedule.give_back(slot.number)
        slot.retire(kill=True)

    # ── what has happened ─────────────────────────────────────────────────────

    def _listen(self, *, wait: bool = True) -> None:
        """Poll the slots with news, and record what has happened. With `wait`, wait up to LOOK_EVERY_S for news."""
        found: list[Event] = []
        for slot in self._with_news(wait=wait):
            try:
                news = slot.poll()
            except LaunchError as error:
                self._not_started(slot, error)
                continue
            found += news
            self._steer(slot, news)
            attempt, ended = slot.attempt, slot.ended()
            if attempt is not None and ended is not None:
                self._failed_starts = 0
                found += self._ended(attempt, ended)
        self._tell(found)

    def _steer(self, slot: Slot, news: list[Event]) -> None:
        """Tell the steering iterator what the first rank of a slot has reported. If the item is to end, end it."""
        first = slot.number * self._size
        reports = [event for event in news if isinstance(event, events.Metrics) and event.rank == first]
        if reports and slot.attempt is not None:
            number = slot.attempt.item.number
            if self._told(lambda steering: any(steering.reported(number, each) for each in reports), False):
                slot.end_item()

    def _told(self, tell: Callable[[Steering], _Answer], otherwise: _Answer) -> _Answer:
        """Return what the steering iterator answers when it is told something; `otherwise` if there is none.

        If it raises an error, the run ends as if the iterable had raised it.
        """
        if self._steering is None:
            return otherwise
        try:
            return tell(self._steering)
        except Exception as error:  # of any type: a search may use the user's study, sampler and pruner
            self.error = error.with_traceback(_without_ours(error.__traceback__))
            self._steering, self._schedule.exhausted = None, True
            return otherwise

    def _with_news(self, *, wait: bool) -> list[Slot]:
        """Return the slots that have something to poll; every LOOK_EVERY_S, return all slots."""
        numbers: set[int] = set()
        try:
            if wait:
                numbers.add(self._news.get(timeout=max(0.0, self._look_at - time.monotonic())))
            while True:
                numbers.add(self._news.get_nowait())
        except queue.Empty:
            pass
        if time.monotonic() < self._look_at:
            return [self._slots[number] for number in sorted(numbers)]
        self._look_at = time.monotonic() + LOOK_EVERY_S
        return self._slots

    def _ended(self, attempt: Attempt, ended: Ended) -> list[Event]:
        limit, number = self._schedule.limit, attempt.item.number
        if ended.pruned:
            value = self._told(lambda steering: ended.metrics[steering.metric], None)
            ended = ended._replace(value=value, text=short_repr(value), packed=(pickle.dumps(value),))
        elif ended.failure is None:
            failure = self._told(lambda steering: steering.problem(number, ended.metrics), None)
            ended = ended._replace(failure=failure)
        verdict = self._schedule.ended(attempt.slot, ended.failure)
        ending: events.ItemEnding = "pruned" if ended.pruned else verdict
        if self._schedule.limit < limit:
            self._recorder.notice(
                f"item {number} ran out of memory: from now on, "
                f"{describe.counted(self._schedule.limit, 'item')} at once"
            )
        if verdict == "finished" and self._kept is not None:
            self._kept.keep(attempt.item, ended)
        return [self._over(number, ended, ending)]

    def _over(self, number: int, ended: Ended, ending: events.ItemEnding) -> events.ItemEnded:
        """Put the result of an attempt into `results`, and return the event that says how the attempt has ended."""
        if ending in ("finished", "pruned"):
            self.results.values[number] = ended.value
        elif ending == "failed":
            assert ended.failure is not None
            self.results.failures[number] = ended.failure
        if ending != "again":
            self._told(lambda steering: steering.ended(number, ending, ended.metrics), None)
        return events.ItemEnded(time.time(), number, ending, ended.text, ended.failure)

    def _tell(self, found: list[Event]) -> None:
        """Record the events, and before them the numbers of items in all and at once, if one of these has changed."""
        up = sum(slot.up for slot in self._slots) if self._queues else None
        planned = events.ItemsPlanned(time.time(), self._schedule.limit, self._size, self._items.total, up)
        if self._planned is None or planned[1:] != self._planned[1:]:
            self._planned = planned
            found.insert(0, planned)
        self._recorder.add(found)
        self.measured += [event for event in found if isinstance(event, events.ItemMeasured)]
        while self._kept is not None and self._kept.news:
            self._recorder.notice(self._kept.news.popleft())

    # ── the end ───────────────────────────────────────────────────────────────

    def _end(self) -> None:
        """End all ranks. Ranks that run an item are interrupted first, and killed after at most STOP_GRACE_S."""
        self._ending = True
        self._listen(wait=False)  # items may have ended while the iterable computed: count them
        began = [slot for slot in self._slots if slot.running]
        for slot in began:
            slot.interrupt()
        deadline = time.monotonic() + STOP_GRACE_S
        while any(slot.running for slot in began) and time.monotonic() < deadline:
            self._listen()
        if self._queues:  # first those that wait for a place to run: otherwise, they would get the places of the others
            waiting = [slot for slot in self._slots if not slot.up]
            for slot in waiting:
                slot.retire(kill=True)
            for slot in waiting:
                slot.join()
        for slot in self._slots:
            slot.retire(kill=bool(began) or self._interrupts.seen)
        for slot in self._slots:
            slot.join()
        if self._kept is not None:
            self._kept.close()
        running = self._recorder.record.items.running if self._recorder.record.items else ()
        self._tell([self._over(item.item, Ended(), "stopped") for item in running])
        self._told(lambda steering: steering.close(), None)
        summary = None if self._interrupts.seen else self._told(lambda steering: steering.summary(), None)
        self._tell([] if summary is None else [summary])


def _without_ours(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return the rest of a traceback, from its first frame that is not in this package."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith("sparkring."):
        traceback = traceback.tb_next
    return traceback
