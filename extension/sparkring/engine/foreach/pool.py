"""Runs items on the slots of a pool until there are no more items."""

from __future__ import annotations

import contextlib
import pickle
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparkring.engine.foreach.item_execution import Ended
from sparkring.engine.foreach.items import ItemProblem, Items
from sparkring.engine.foreach.meanwhile import Meanwhile
from sparkring.engine.foreach.schedule import Item, ItemAttempt, Schedule
from sparkring.engine.foreach.slot import Slot, SlotSettings
from sparkring.engine.foreach.slots import LOOK_EVERY_S, ItemSlots
from sparkring.engine.run.recorder import Recorder
from sparkring.errors import LaunchError
from sparkring.gangs.execution import Request
from sparkring.history import describe, events
from sparkring.history.events import Event, Failure
from sparkring.history.item_records import ItemRecord
from sparkring.runtime.interrupts import Interrupts
from sparkring.runtime.report import short_repr

if TYPE_CHECKING:
    from sparkring.engine.foreach.kept import Kept
    from sparkring.engine.foreach.steering import Steering

_Answer = TypeVar("_Answer")

TAKE_S = 0.005  # take items for this long, then poll the slots
TELL_AFTER_S = 1.0  # if it takes longer than this to write the results at the end of a run, the user is told
STOP_GRACE_S = 0.5  # when a run ends, ranks that are running an item are interrupted, and are killed after this time


class Pool:
    """Runs `items` in the order that `schedule` decides. `request_for(attempt)` makes the request for an attempt.

    `values`, `failures` and `records` map the numbers of the items that have ended so far to their values, failures and
    records. The run's record forgets items if there are many; `records` contains all, but only with what a table shows.
    `measured` lists what ranks have measured. `error` is the exception that the user's iterable raised, or None. Items
    whose results are already in `kept` do not run. A search's iterator steers the run: the pool tells the iterator what
    items report and how they end. With `stay`, no slot ends its ranks before all items have ended.
    """

    def __init__(
        self,
        items: Items,
        schedule: Schedule,
        settings: SlotSettings,
        request_for: Callable[[ItemAttempt], Request],
        recorder: Recorder,
        interrupts: Interrupts,
        kept: Kept | None = None,
        *,
        stay: bool = False,
    ) -> None:
        self.values: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self.records: dict[int, ItemRecord] = {}
        self.error: BaseException | None = None
        self.measured: list[events.ItemMeasured] = []
        self._items = items
        self._schedule = schedule
        self._size = settings.size
        self._request_for = request_for
        self._recorder = recorder
        self._interrupts = interrupts
        self._kept = kept
        self._stay = stay
        self._steering = items.steering
        self._slots = ItemSlots(schedule.limit, settings, recorder.notice)
        self._ending = False
        self._planned: events.ItemsPlanned | None = None
        self._unkept: dict[int, tuple[Item, Ended]] = {}  # items whose results will be kept once they are recorded
        self._noticed: set[str] = set()  # what has been noted about the items' values
        self._begun_until = 0  # the highest number of an item that has begun, plus 1
        # The user's iterable may wait, even for the results of items. Those of lists and of searches do not.
        waits = not items.at_hand and self._steering is None
        self._meanwhile = Meanwhile(self._go_on, LOOK_EVERY_S) if waits else None

    def run(self) -> None:
        """Run all items.

        Returns early if the run is stopped, if an item fails with --fail-fast, or if the iterable raises an error.
        Raises LaunchError if ranks cannot be started, and CheckpointError if the kept study of a search cannot be read.
        When this method returns or raises an error, no process is left running.
        """
        try:
            self._tell([])
            if self._steering is not None:
                self._tell([self._steering.begin(Path(self._recorder.record.log_folder), self._kept)])
            while not (self._schedule.over or self._interrupts.seen):
                self._begin()
                opens = self._begun and self._slots.to_open(self._wanted)
                self._listen(wait=not (opens or self._takes(self._slots.places)))
        finally:
            if self._meanwhile is not None:
                self._meanwhile.end()
            self._end()

    # ── Beginning attempts ────────────────────────────────────────────────────

    def _takes(self, places: list[int]) -> bool:
        """Whether to take an item from the iterable now."""
        return not self._slots.paused and self._schedule.wants_item(places or self._slots.first)

    @property
    def _begun(self) -> bool:
        """Whether an attempt is waiting or running, so that slots are needed."""
        return bool(self._schedule.waits or self._schedule.running)

    @property
    def _wanted(self) -> int:
        return self._schedule.limit if self._stay else self._schedule.needed(self._items.left)

    def _begin(self) -> None:
        """Take items while there is room for them, and begin waiting attempts.

        The iterable may take a long time to produce an item. So after a moment, no more items are taken until the next
        poll.
        """
        places, until = self._slots.places, time.monotonic() + TAKE_S
        while self._takes(places):
            if not self._items.at_hand:
                self._send()
            self._take()
            places = places if self._meanwhile is None else self._slots.places
            self._assign(places)
            if time.monotonic() > until or self._interrupts.seen:
                break
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        self._slots.have(self._wanted, self._schedule.limit, waits=self._begun)
        self._assign(self._slots.places)
        self._send()

    def _go_on(self) -> None:
        """Record events and begin waiting attempts while the iterable computes an item."""
        self._listen(wait=False)
        self._begin_waiting()

    def _send(self) -> None:
        """Send the attempts that slots were given in advance."""
        for slot in self._slots:
            slot.send()

    def _take(self) -> None:
        """Take the next item from the user's iterable. Unless it runs, record how it has ended."""
        with self._meanwhile or contextlib.nullcontext():
            item = self._next()
        if isinstance(item, ItemProblem):
            self._schedule.has_failed = True
            begun = events.ItemStarted(time.time(), item.number, item.name, -1)
            self._tell([begun, self._over(item.number, Ended(failure=item.failure), "failed")])
        elif item is not None and not self._was_kept(item):
            self._schedule.add(item)

    def _next(self) -> Item | ItemProblem | None:
        """Return the next item; None if there is none. The user's code may take a long time or raise an error."""
        try:
            with self._interrupts.let_through():
                item = self._items.take()
        except KeyboardInterrupt:
            self._interrupts.request()
            return None
        except Exception as error:  # of any type: the iterable is the user's code
            self.error = error.with_traceback(_without_ours(error.__traceback__))
            item = None
        self._schedule.exhausted = item is None
        return item

    def _was_kept(self, item: Item) -> bool:
        """If an earlier run kept the item's result, record it and return True: the item need not run."""
        kept = None if self._kept is None else self._kept.find(item.key)
        if kept is None:
            return False
        value, result = kept
        self.values[item.number] = value
        now = time.time()
        begun = events.ItemStarted(now, item.number, item.name, -1, parameters=item.parameters)
        over = events.ItemEnded(
            now,
            item.number,
            "kept",
            result.text,
            metrics=result.metrics,
            seconds=result.seconds,
            pruned=result.pruned,
            curves=result.curves,
            by=result.by,
        )
        self._tell([begun, over])
        ending: events.ItemEnding = "pruned" if result.pruned else "kept"
        self._ask_steering(lambda steering: steering.ended(item.number, ending, result.metrics), None)
        return True

    def _assign(self, places: list[int]) -> None:
        """Start the next attempts in the slots in `places`. Remove from `places` each slot that gets an attempt."""
        if self._slots.paused:
            return
        for attempt in self._schedule.assign(places):
            places.remove(attempt.slot)
            slot = self._slots[attempt.slot]
            if not slot.can_begin(attempt):
                slot.retire()
                self._schedule.give_back(attempt)  # the attempt waits for another slot, or for new ranks in this slot
                continue
            try:
                slot.start(attempt, self._request_for(attempt))
            except LaunchError as error:
                self._not_started(slot, error)

    def _not_started(self, slot: Slot, error: LaunchError) -> None:
        """Schedule the slot's attempt again, after a pause. Raise `error` if too many starts in a row have failed."""
        if self._ending:
            slot.retire(kill=True)
            return
        if slot.attempt is not None:
            self._schedule.give_back(slot.attempt)
        self._slots.not_started(slot, error)

    # ── Recording events ──────────────────────────────────────────────────────

    def _listen(self, *, wait: bool = True) -> None:
        """Poll the slots that have something to report, and record their events. With `wait`, first wait a moment."""
        news: list[Event] = []
        try:
            for slot in self._slots.with_news(wait=wait):
                try:
                    while self._hear(slot, news):
                        pass
                except LaunchError as error:
                    self._not_started(slot, error)
                    self._take_back(slot)
        finally:  # record them even if the run ends because ranks cannot be started: other items may have ended
            self._tell(news)

    def _hear(self, slot: Slot, collected: list[Event]) -> bool:
        """Poll a slot, and add its events to `collected`. Return whether one attempt has ended and another follows."""
        news = slot.poll()
        collected += news
        self._steer(slot, news)
        attempt, ended = slot.attempt, slot.ended()
        self._take_back(slot)
        if attempt is None or ended is None:
            return False
        self._slots.started()
        collected += self._ended(attempt, ended)
        return slot.attempt is not None

    def _take_back(self, slot: Slot) -> None:
        """Give the attempts that the slot will not run back to the schedule."""
        while slot.given_back:
            self._schedule.give_back(slot.given_back.pop())

    def _steer(self, slot: Slot, news: list[Event]) -> None:
        """Pass the reports of a slot's first rank to the steering iterator, which may end the item."""
        first = slot.number * self._size
        reports = [event for event in news if isinstance(event, events.Metrics) and event.rank == first]
        if reports and slot.attempt is not None:
            number = slot.attempt.item.number
            if self._ask_steering(lambda steering: any(steering.reported(number, report) for report in reports), False):
                slot.end_item()

    def _ask_steering(self, tell: Callable[[Steering], _Answer], otherwise: _Answer) -> _Answer:
        """Return `tell(iterator)` for the steering iterator, or `otherwise` if there is no such iterator.

        If the steering iterator raises an error, the run ends as if the iterable had raised this error.
        """
        if self._steering is None:
            return otherwise
        try:
            return tell(self._steering)
        except Exception as error:  # of any type: a search may use the user's study, sampler and pruner
            self.error = error.with_traceback(_without_ours(error.__traceback__))
            self._steering, self._schedule.exhausted = None, True
            return otherwise

    def _ended(self, attempt: ItemAttempt, ended: Ended) -> list[Event]:
        limit, number = self._schedule.limit, attempt.item.number
        if ended.pruned:
            value = self._ask_steering(lambda steering: ended.metrics[steering.metric], None)
            ended = ended._replace(value=value, text=short_repr(value), packed=(pickle.dumps(value),))
        elif ended.failure is None:
            failure = self._ask_steering(lambda steering: steering.problem(number, ended.metrics), None)
            ended = ended._replace(failure=failure)
        for notice in ended.notices:
            if notice not in self._noticed:
                self._recorder.notice(notice)
            self._noticed.add(notice)
        verdict = self._schedule.ended(attempt.slot, ended.failure)
        ending: events.ItemEnding = "pruned" if ended.pruned else verdict
        if self._schedule.limit < limit:
            noun = "item" if self._steering is None else "trial"
            fewer = describe.counted(self._schedule.limit, noun)
            self._recorder.notice(f"{noun} {number} ran out of memory: from now on, {fewer} at once")
        if verdict == "finished" and self._kept is not None:
            self._unkept[number] = attempt.item, ended
        return [self._over(number, ended, ending)]

    def _over(self, number: int, ended: Ended, ending: events.ItemEnding) -> events.ItemEnded:
        """Record the result of an attempt, and return the event that says how the attempt has ended."""
        if ending in ("finished", "pruned"):
            self.values[number] = ended.value
        elif ending == "failed":
            assert ended.failure is not None
            self.failures[number] = ended.failure
        if ending != "again":
            self._ask_steering(lambda steering: steering.ended(number, ending, ended.metrics), None)
        return events.ItemEnded(time.time(), number, ending, ended.text, ended.failure, seconds=ended.seconds)

    def _tell(self, news: list[Event]) -> None:
        """Record the events. If the number of items, or how many run at once, has changed, record that change first."""
        total, up = self._items.total, self._slots.up
        planned = events.ItemsPlanned(time.time(), self._schedule.limit, self._size, total, up)
        if self._planned is None or planned[1:] != self._planned[1:]:
            self._planned = planned
            news.insert(0, planned)
        self._recorder.add(news)
        over = 0
        for event in news:
            if isinstance(event, events.ItemStarted):
                self._begun_until = max(self._begun_until, event.item + 1)
            elif isinstance(event, events.ItemMeasured):
                self.measured.append(event)
            elif isinstance(event, events.ItemEnded):
                over += event.ending != "again"
        if over:
            self._note_ended(over)
        while self._kept is not None and self._kept.news:
            self._recorder.notice(self._kept.news.popleft())

    def _note_ended(self, count: int) -> None:
        """Note the records of the last `count` items that have ended, and keep the items' results."""
        assert self._recorder.record.items is not None
        for over in self._recorder.record.items.ended[-count:]:
            self.records[over.item] = over._replace(name="", value="", failure=None, parameters={}, curves={})
            if self._kept is not None and over.item in self._unkept:
                item, ended = self._unkept.pop(over.item)
                self._kept.keep(item, ended, over)

    # ── Ending ────────────────────────────────────────────────────────────────

    def _end(self) -> None:
        """End all ranks. Ranks that are running an item are interrupted, and killed after at most STOP_GRACE_S."""
        self._ending = True
        self._listen(wait=False)  # items may have ended while the iterable was computing: count them
        began = [slot for slot in self._slots if slot.running]
        for slot in began:
            slot.interrupt()
        deadline = time.monotonic() + STOP_GRACE_S
        while any(slot.running for slot in began) and time.monotonic() < deadline:
            self._listen()
        self._slots.end(kill=bool(began) or self._interrupts.seen)
        if self._kept is not None:
            self._finish_writing(self._kept)
        items = self._recorder.record.items
        self._tell([self._over(item.item, Ended(), "stopped") for item in (items.running if items else ())])
        self._items.forget_from(self._begun_until)
        self._ask_steering(lambda steering: steering.close(), None)
        if (
            not self._interrupts.seen
            and (summary := self._ask_steering(lambda steering: steering.summary(), None)) is not None
        ):
            self._tell([summary])

    def _finish_writing(self, kept: Kept) -> None:
        """Wait until all results have been written. An interrupt that arrives meanwhile ends the wait."""
        stopped, self._interrupts.seen = self._interrupts.seen, False
        if not kept.written(TELL_AFTER_S):
            results = describe.counted(kept.unwritten, "result")
            self._recorder.notice(f"writing {results} to {kept.location.written} (Stop ends this)", until="over")
            while not (self._interrupts.seen or kept.written(LOOK_EVERY_S)):
                pass
        kept.close()
        if stopped:
            self._interrupts.request()


def _without_ours(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback from its first frame outside this package."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith("sparkring."):
        traceback = traceback.tb_next
    return traceback
