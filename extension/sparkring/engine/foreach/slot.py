"""One slot of the pool: a gang that runs one item after another, until it is replaced.

While items are short, the gang is given the next items in advance, and these items wait in the gang's member.
Otherwise, a rank would spend most of its time waiting for the next item.

Each item is in exactly one of these states:

    waiting    in the schedule
    sent       in `ahead` of one slot's gang. The rank has not begun it: the member gives a rank the next item only
               after it has passed on the report of the one before
    running    the `attempt` of one slot. Its time, and so --timeout-each, begins when the report of the one before has
               arrived
    over       recorded as ended. The pool has its value or its failure

An item becomes `sent` or `running` when start() is called, and `running` when the item before it in the slot is over.
Only items that are `sent` go back to `waiting` without counting as an attempt: if the member gives them back
(GivenBack), if the gang dies, or if it is replaced. A member gives them back before it reports a failure, when it
passes on an interrupt, and when the slot asks for them because an item takes a long time. It has then dropped them, so
they can no longer begin there.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from sparkring.engine.foreach.item_execution import Ended, ItemExecution
from sparkring.engine.foreach.schedule import ItemAttempt
from sparkring.engine.run.polling import poll_until
from sparkring.gangs.execution import Execution, Request
from sparkring.gangs.gang import Gang
from sparkring.history import events
from sparkring.history.events import Event
from sparkring.launchers.base import Launcher
from sparkring.wire.messages import Kept

GROWTH_BYTES = 512 * 1024**2  # a gang is replaced if its memory has grown by more than this since its first item
LEAVE_S = 2.0  # ranks that are asked to leave have this long before they are killed
# While items are short, a slot has as many items as it runs in AHEAD_S. This number is at most AHEAD_MOST, and at most
# half the number of short items that the slot has just run in a row.
AHEAD_S, AHEAD_MOST = 0.02, 64
WAIT_S = 0.05  # if an item takes longer than this, the slot asks for the items behind it, to run them elsewhere
AHEAD_BYTES = 64 * 1024  # items with larger values are not given in advance: they would fill the memory
RETIRING = 4  # how many gangs of a slot may be ending at the same time, so that old processes do not pile up


class SlotSettings(NamedTuple):
    """How the slots of a pool run their items.

    `launch(number)` makes a launcher for a gang of `size` ranks in the slot with this number. A gang runs at most
    `fresh_after` items, and an item may take at most `timeout_each_s`; None means no limit. A gang whose memory grows
    by more than `growth_bytes` is replaced. With `queues`, ranks may have to wait a long time before they can start, so
    a gang is given an item only when its ranks are up. With `ahead`, a gang that runs short items is given the next
    items before the current one has ended. What items return but cannot be rebuilt here is saved in `folder`.
    """

    launch: Callable[[int], Launcher]
    size: int = 1
    fresh_after: int | None = None
    timeout_each_s: float | None = None
    growth_bytes: int = GROWTH_BYTES
    queues: bool = False
    ahead: bool = False
    folder: str = ""


class SlotGang:
    """A gang of a slot, the items that it has been given in advance, and what it has shown while running items."""

    def __init__(self, gang: Gang, settings: SlotSettings) -> None:
        self.gang = gang
        self.ahead: collections.deque[ItemExecution] = collections.deque()  # the attempts after the running one
        self.depth = 1  # how many attempts the gang may have
        self._settings = settings
        self._items = 0  # how many items the gang has run
        self._short_ones = 0  # how many items in a row were short
        self._first_bytes: int | None = None  # how much memory the gang held after its first item, if it has told
        self._failed_item: int | None = None  # the last item, if it failed; retrying it here needs a new gang

    @property
    def is_new(self) -> bool:
        """Whether the gang has run no item yet."""
        return not self._items

    def can_run(self, attempt: ItemAttempt) -> bool:
        """Return whether the ranks can run this attempt: none has died, and the item has not just failed on them."""
        return attempt.item.number != self._failed_item and not self.gang.deaths

    def submit_ahead(self, current: ItemExecution, request: Request) -> None:
        """Give the gang the item of `current` in advance."""
        current.execution = self.gang.submit_ahead(request)
        self.ahead.append(current)
        if _is_large(current.attempt):
            self.depth = 1

    def given_back(self) -> list[ItemAttempt]:
        """Remove the attempts that the member has given back from `ahead`, and return them."""
        attempts: list[ItemAttempt] = []
        while self.ahead and (execution := self.ahead[0].execution) is not None and execution.given_back:
            attempts.append(self.ahead.popleft().attempt)
            self.depth = 1
        return attempts

    def has_run(self, attempt: ItemAttempt, execution: Execution, *, failed: bool) -> bool:
        """Count an item that the gang has run. Return whether the gang is used up, so that it should be replaced.

        It is used up when it has run as many items as it may, or when its memory has grown too much.
        """
        self._items += 1
        self._failed_item = attempt.item.number if failed else None
        held_bytes = sum(execution.memory_bytes.values())
        if self._first_bytes is None:
            self._first_bytes = held_bytes or None
        most = self._settings.fresh_after
        has_grown = held_bytes > (self._first_bytes or 0) + self._settings.growth_bytes
        is_used_up = has_grown or (most is not None and self._items >= most)
        self.depth = 1 if failed or is_used_up else self._next_depth(attempt, execution.seconds)
        return is_used_up

    def _next_depth(self, attempt: ItemAttempt, seconds: float) -> int:
        """Return how many attempts the gang may have after `attempt`, which took `seconds`."""
        fit = int(AHEAD_S / seconds) if self._settings.ahead and seconds and not _is_large(attempt) else 1
        self._short_ones = self._short_ones + 1 if fit > 1 else 0
        left = AHEAD_MOST if self._settings.fresh_after is None else self._settings.fresh_after - self._items
        return max(1, min(self._short_ones // 2, fit, left, AHEAD_MOST))


class Slot:
    """Slot `number` of a pool. For each attempt, call start(), and then poll() until ended() says how it has ended.

    While the slot has `room`, start() accepts further attempts. `attempt` is the running attempt. When ended() has
    said how this attempt ended, call poll() again. The slot will not run the attempts in `given_back`: remove them from
    this list.

    A slot is closed (no gang), starting (a gang that is not `up`), idle (`up` without an attempt), or runs an item: see
    the states of ItemExecution. Gangs that are no longer used end on their own, while the slot may have a new one.

    If the ranks queue (see SlotSettings), call start_gang() first, and start() when the slot is `free`. retire() ends
    the gang of the slot. Call retire() at the end, and whenever start_gang(), start() or poll() raises LaunchError.
    `on_arrival(number)` is called when there is something to poll; the call may come from any thread.
    """

    def __init__(self, number: int, settings: SlotSettings, on_arrival: Callable[[int], object]) -> None:
        self.number = number
        self.given_back: list[ItemAttempt] = []
        self._settings = settings
        self._on_arrival = on_arrival
        self._gang: SlotGang | None = None
        self._current: ItemExecution | None = None
        self._run_ends = False  # whether items were interrupted because the run ends
        self._retiring: list[threading.Thread] = []

    @property
    def attempt(self) -> ItemAttempt | None:
        return None if self._current is None else self._current.attempt

    @property
    def open(self) -> bool:
        """Whether the slot has a gang, even if the gang's ranks have not started yet."""
        return self._gang is not None

    @property
    def up(self) -> bool:
        """Whether the slot has a gang whose ranks are up."""
        return self._gang is not None and self._gang.gang.up

    @property
    def free(self) -> bool:
        """Whether the slot can be given an attempt."""
        return self._current is None and (self.up or not self._settings.queues)

    @property
    def running(self) -> bool:
        """Whether a rank is still running the item."""
        return self.up and self._current is not None and self._current.is_running

    @property
    def load(self) -> int:
        """How many attempts the slot has."""
        return (self._current is not None) + (0 if self._gang is None else len(self._gang.ahead))

    @property
    def room(self) -> int:
        """How many more attempts the slot can be given now."""
        if self._current is None:
            return int(self.free)
        return 0 if self._gang is None or self._gang.gang.deaths else max(0, self._gang.depth - self.load)

    def waits_for(self) -> str:
        """Return why the ranks may still be waiting to start; '' if that is not known."""
        return "" if self._gang is None else self._gang.gang.launcher.waits_for()

    def can_begin(self, attempt: ItemAttempt) -> bool:
        """Return whether the attempt can begin in this slot now. If not, it has to wait until other ranks are up."""
        return not self._settings.queues or self._gang is None or self._gang.can_run(attempt)

    # ── Beginning attempts ────────────────────────────────────────────────────

    def start_gang(self) -> None:
        """Start a gang. If that fails, this call or poll() raises LaunchError."""
        self._new_gang().gang.start()

    def _new_gang(self) -> SlotGang:
        launcher = self._settings.launch(self.number)
        gang = Gang(launcher, self._settings.size, lambda: self._on_arrival(self.number))
        self._gang = SlotGang(gang, self._settings)
        return self._gang

    def start(self, attempt: ItemAttempt, request: Request) -> None:
        """Begin an attempt, on a new gang if the slot has none that can run it. Raises the errors of start_gang().

        If another attempt is running, the new one follows it, but only after a call of send().
        """
        current = ItemExecution(attempt, self._settings.timeout_each_s)
        if self._current is not None and self._gang is not None:
            self._gang.submit_ahead(current, request)
            return
        if self._gang is not None and not self._gang.can_run(attempt):
            self.retire()
        self._current = current
        is_new = self._gang is None
        gang = (self._gang or self._new_gang()).gang
        current.execution = gang.submit(request)
        if is_new:
            gang.start()
        self._on_arrival(self.number)  # submit() has made events, which the next poll() returns

    def send(self) -> None:
        """Send what start() has given the gang in advance. Call this after one or several calls of start()."""
        if self._gang is not None:
            self._gang.gang.send_ahead()

    # ── Watching the running attempt ──────────────────────────────────────────

    def poll(self) -> list[Event]:
        """Return what has happened since the last call, as events of the run."""
        if self._gang is None:
            return []
        gang, current = self._gang.gang, self._current
        news: list[Event] = []
        for event in gang.poll(0.0):
            if current is not None:
                current.hear(event)
            match event:
                case events.RankStarted():
                    if self._gang.is_new:  # a gang's rank is recorded once, with the gang's first item
                        news.append(self._renumbered(event))
                    if event.rank == self._settings.size - 1:
                        news.append(self._begun())
                case events.Displayed() if current is not None:
                    news.append(self._renumbered(event._replace(item=current.attempt.item.number)))
                case _ if isinstance(event, Kept):
                    news.append(self._renumbered(event))
        self.given_back += self._gang.given_back()
        if current is None and gang.deaths:
            self.retire(kill=True)  # the gang died while waiting for an item
        elif current is not None:
            if self._gang.ahead and not gang.taking_back and current.has_taken(WAIT_S):
                gang.take_back()
            current.watch(gang)
        return news

    def ended(self) -> Ended | None:
        """Return how the attempt has ended; None while it runs. Retire the gang if it cannot run another item."""
        current = self._current
        end = None if current is None else current.ended(self._settings.folder, run_ends=self._run_ends)
        if current is None or current.execution is None or self._gang is None or end is None:
            return None
        outcome, usable = end
        if not usable or self._gang.gang.deaths or current.execution.running:
            self.retire(kill=True)
            return outcome
        is_used_up = self._gang.has_run(current.attempt, current.execution, failed=outcome.failure is not None)
        self._current = self._gang.ahead.popleft() if self._gang.ahead else None
        if is_used_up and self._current is None:
            self.retire()
        return outcome

    def interrupt(self) -> None:
        """Interrupt the item, as Ctrl-C would, because the run ends. If this stops the item, ended() returns None."""
        self._run_ends = True
        if self._gang is not None:
            self._gang.gang.interrupt()

    def end_item(self) -> None:
        """Have the item end at once, because other trials are better. Unless it has just ended, it counts as pruned."""
        if self._gang is not None and self._current is not None:
            self._current.prune(self._gang.gang)

    def _begun(self) -> events.ItemStarted:
        """Record that all ranks have been sent the item. Return the event that says this."""
        assert self._current is not None
        self._current.begin()
        item, number, *_ = self._current.attempt
        return events.ItemStarted(time.time(), item.number, item.name, self.number, number, item.parameters)

    def _renumbered(self, event: Kept | events.RankStarted) -> Event:
        """Return the event with the number that its rank has among the ranks of all slots."""
        return event._replace(rank=self.number * self._settings.size + event.rank)

    # ── Ending gangs ──────────────────────────────────────────────────────────

    def retire(self, *, kill: bool = False) -> None:
        """End the gang in a thread of its own, so that the pool need not wait. The next attempt starts a new gang."""
        ending, self._gang, self._current = self._gang, None, None
        if ending is None:
            return
        self.given_back += [sent.attempt for sent in ending.ahead]
        self._retiring = [other for other in self._retiring if other.is_alive()]
        while len(self._retiring) >= RETIRING:
            self._retiring.pop(0).join()
        thread = threading.Thread(target=_end, args=(ending.gang, kill), name="sparkring-retire", daemon=True)
        self._retiring.append(thread)
        thread.start()

    @property
    def ending(self) -> bool:
        """Whether a retired gang is still ending."""
        return any(thread.is_alive() for thread in self._retiring)

    def join(self) -> None:
        """Wait until all retired gangs have ended."""
        for thread in self._retiring:
            thread.join()


def _is_large(attempt: ItemAttempt) -> bool:
    return sum(map(len, attempt.item.parts)) > AHEAD_BYTES


def _end(gang: Gang, kill: bool) -> None:
    """End a gang that is no longer used. Unless `kill` is set, ask its ranks to leave first. Runs in a thread."""
    with contextlib.closing(gang):
        if not kill and gang.up:
            gang.leave()
            poll_until(lambda: gang.gone, time.monotonic() + LEAVE_S, gang.poll)
