"""The slots of a pool. Starts and ends gangs as items need them, and says which slots to poll.

One thread polls all slots. This thread waits on a queue. When a gang has something to poll, the gang puts the number
of its slot into the queue.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator

from sparkring.engine.foreach.slot import Slot, SlotSettings
from sparkring.errors import LaunchError, SlotsError
from sparkring.history import describe, events

LOOK_EVERY_S = 0.1  # poll all slots this often, since no message arrives when a time limit passes or a process dies
STARTS_TRIED = 3  # when this many starts in a row have failed, the run fails
START_PAUSE_S = 0.5  # the pause before the second start; twice as long before the third
SHORT_AFTER_S = 2.0  # when ranks have been queuing for this long, the user is told what they are waiting for


class ItemSlots:
    """The `count` slots of a pool. `notice(text, until)` shows `text` to the user, for as long as `until` says.

    If the ranks queue (see SlotSettings), gangs are started before they have an item: call have() to say how many slots
    are wanted. A slot is then given an item once its ranks are up. If ranks do not queue, a slot starts its gang with
    its first item.

    If a slot raises LaunchError, call not_started(). When an attempt has ended, call started().
    """

    def __init__(self, count: int, settings: SlotSettings, notice: Callable[[str, events.Until], object]) -> None:
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._slots = [Slot(number, settings, self._news.put) for number in range(count)]
        self._queues = settings.queues
        self._notice = notice
        self._look_at = 0.0
        self._failed_starts = 0
        self._start_at = 0.0
        self._start_notice = ""  # the last notice of a failed start
        # When to tell the user what ranks are waiting for; None if none are waiting, or if the user has been told.
        self._short_at: float | None = None
        self._short_told = False

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def up(self) -> int | None:
        """How many slots have ranks that are up; None if ranks never have to wait before they can start."""
        return sum(slot.up for slot in self._slots) if self._queues else None

    @property
    def paused(self) -> bool:
        """Whether starts are paused because one has just failed."""
        return time.monotonic() < self._start_at

    @property
    def places(self) -> list[int]:
        """The numbers of the slots that can currently be given attempts. Slots with the fewest attempts are first.

        If a slot can be given several attempts, its number occurs once for each of them.
        """
        loads = [(slot.load, slot.room, slot.number) for slot in self._slots]
        free = [(load + more, number) for load, room, number in loads for more in range(room)]
        return [number for _, number in sorted(free)]

    @property
    def first(self) -> list[int]:
        """The slot for the first item, if ranks queue and no slot is open: slots are opened only if there are items."""
        return [0] if self._queues and not any(slot.open for slot in self._slots) else []

    # ── Opening and ending ────────────────────────────────────────────────────

    def to_open(self, wanted: int) -> Slot | None:
        """Return a slot to open now if ranks queue and fewer than `wanted` slots are open; otherwise None."""
        if not self._queues or self.paused:
            return None
        closed = [slot for slot in self._slots if not slot.open]
        return closed[0] if closed and len(self._slots) - len(closed) < wanted else None

    def have(self, wanted: int, limit: int, *, waits: bool) -> None:
        """If ranks queue, end the ranks of slots that are not wanted. If more slots are wanted, open one of them.

        No slot is opened unless `waits` is set. At most `limit` items run at once.
        """
        if not self._queues:
            return
        self._release(wanted)
        slot = self.to_open(wanted) if waits else None
        if slot is not None:
            try:
                slot.start_gang()
            except LaunchError as error:
                self.not_started(slot, error)
        self._tell_what_ranks_wait_for(limit)

    def _release(self, wanted: int) -> None:
        """End the ranks for which there will be no item."""
        is_open = [slot for slot in self._slots if slot.open]
        spare = max(0, len(is_open) - wanted)
        idle = [slot for slot in is_open if slot.attempt is None]
        # First end ranks that have not started. Otherwise, they would take the task slots of the ranks that end.
        waiting = [slot for slot in idle if not slot.up][:spare]
        for slot in waiting or idle[: 0 if any(slot.ending for slot in self._slots) else spare]:
            slot.retire()

    def _tell_what_ranks_wait_for(self, limit: int) -> None:
        """If ranks have been waiting to start for SHORT_AFTER_S, tell the user. Until all are up, do not tell again."""
        waiting = next((slot for slot in self._slots if slot.open and not slot.up), None)
        if waiting is None:
            self._short_at, self._short_told = None, False
        elif self._short_told:
            self._short_at = None
        elif self._short_at is None:
            self._short_at = time.monotonic() + SHORT_AFTER_S
        elif time.monotonic() > self._short_at:
            self._short_told = True
            why = waiting.waits_for()
            text = f"fewer than {limit} items run at once until more ranks have started: {why}"
            self._notice(text if limit > 1 else f"no item runs until its ranks have started: {why}", "short")

    # ── Failed starts ─────────────────────────────────────────────────────────

    def not_started(self, slot: Slot, error: LaunchError) -> None:
        """Pause all starts, and end the slot's gang, so that the slot's next attempt begins on a new gang.

        Raise `error` if too many starts in a row have failed.
        """
        if not self.paused:  # further failures during the pause after a failed start do not count
            self._failed_starts += not (self._queues and isinstance(error, SlotsError))  # without slots, the run waits
            if self._failed_starts >= STARTS_TRIED:
                raise error
            notice = f"{describe.first_line(str(error))} sparkring will try again."
            if notice != self._start_notice:
                self._start_notice = notice
                self._notice(notice, "")
            self._start_at = time.monotonic() + START_PAUSE_S * max(1, self._failed_starts)
        slot.retire(kill=True)

    def started(self) -> None:
        """Forget the failed starts, because ranks have run an item."""
        self._failed_starts = 0

    # ── Polling ───────────────────────────────────────────────────────────────

    def with_news(self, *, wait: bool) -> list[Slot]:
        """Return the slots with something to poll or, every LOOK_EVERY_S, all slots. With `wait`, wait for one."""
        numbers: set[int] = set()
        with contextlib.suppress(queue.Empty):
            if wait:
                numbers.add(self._news.get(timeout=max(0.0, self._look_at - time.monotonic())))
            while True:
                numbers.add(self._news.get_nowait())
        if time.monotonic() < self._look_at:
            return [self._slots[number] for number in sorted(numbers)]
        self._look_at = time.monotonic() + LOOK_EVERY_S
        return self._slots

    # ── The end of the run ────────────────────────────────────────────────────

    def end(self, *, kill: bool) -> None:
        """End all gangs, and wait until they have ended. Without `kill`, ranks are asked to leave first."""
        if self._queues:  # first end ranks that have not started: they would take the task slots that become free
            waiting = [slot for slot in self._slots if not slot.up]
            for slot in waiting:
                slot.retire(kill=True)
            for slot in waiting:
                slot.join()
        for slot in self._slots:
            slot.retire(kill=kill)
        for slot in self._slots:
            slot.join()
