"""One slot of the pool: a gang that runs one item after another, until it is replaced.

While items are short, the gang is given the next items in advance, and these items wait in the gang's member.
Otherwise, a rank would spend most of its time waiting for the next item.

Each item is in exactly one of these states:

    waiting    in the schedule
    sent       in `_ahead` of one slot. The rank has not begun it: the member gives a rank the next item only after it
               has passed on the report of the one before
    running    the `attempt` of one slot. Its time, and so --timeout-each, begins when the report of the one before has
               arrived
    over       recorded as ended. The pool has its value or its failure

An item becomes `sent` or `running` when start() is called, and `running` when the item before it in the slot is over.
Only items that are `sent` go back to `waiting` without counting as an attempt: if the member gives them back
(GivenBack), if the gang dies, or if it is replaced. A member gives them back before it reports a failure, when it
passes on an interrupt, and when the slot asks for them because an item takes a long time. It has then dropped them, so
they can no longer begin there. The member must not decide by itself that an item takes a long time: while the driver
waits for the user's iterable, and the iterable waits for these items, no other slot would run them.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle

from sparkring.engine.foreach.schedule import ItemAttempt
from sparkring.engine.run.polling import poll_until
from sparkring.engine.run.result import unpack_results
from sparkring.gangs.execution import Execution, Request
from sparkring.gangs.gang import Gang
from sparkring.history import describe, events
from sparkring.history.events import Event, Failure
from sparkring.launchers.base import Launcher
from sparkring.wire.messages import Buffers, Kept

GROWTH_BYTES = 512 * 1024**2  # a gang is replaced if its memory has grown by more than this since its first item
TIMEOUT_GRACE_S = 1.0  # after interrupting an item that took too long, wait this long before killing its ranks
# To end an item, the pool interrupts its ranks. If some ranks are still running the item RELEASE_AFTER_S later, the
# collectives are ended. After END_GRACE_S, the ranks are killed.
RELEASE_AFTER_S, END_GRACE_S = 0.2, 3.0
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


class Ended(NamedTuple):
    """How an attempt has ended: with a value, or with a failure.

    `text` is a short repr of the value, and `packed` is the value as the rank sent it. `metrics` contains the last
    value of each metric that the item reported. `pruned` says whether end_item() ended the attempt. `notices` say what
    is different about the value here.
    """

    value: Any = None
    text: str = ""
    failure: Failure | None = None
    packed: Buffers = ()
    metrics: Mapping[str, float] = {}
    seconds: float = 0.0
    pruned: bool = False
    notices: Sequence[str] = ()


class Slot:
    """Slot `number` of a pool. For each attempt, call start(), and then poll() until ended() says how it has ended.

    While the slot has `room`, start() accepts further attempts. `attempt` is the running attempt. When ended() has
    said how this attempt ended, call poll() again. The slot will not run the attempts in `given_back`: remove them from
    this list.

    If the ranks queue (see SlotSettings), call start_gang() first, and start() when the slot is `free`. retire() ends
    the gang of the slot. Call retire() at the end, and whenever start_gang(), start() or poll() raises LaunchError.
    `on_arrival(number)` is called when there is something to poll; the call may come from any thread.
    """

    def __init__(self, number: int, settings: SlotSettings, on_arrival: Callable[[int], object]) -> None:
        self.number = number
        self.attempt: ItemAttempt | None = None
        self._settings = settings
        self._on_arrival = on_arrival
        self._gang: Gang | None = None
        self._execution: Execution | None = None
        self._ahead: collections.deque[tuple[ItemAttempt, Execution]] = collections.deque()  # the next attempts
        self._depth = 1  # how many attempts the slot may have
        self._short_ones = 0  # how many items in a row were short
        self.given_back: list[ItemAttempt] = []
        self._items = 0  # how many items the gang has run
        self._first_bytes = 0  # how much memory the gang held after its first item
        self._failed_item: int | None = None  # the last item, if it failed; retrying it in this slot needs a new gang
        self._began = 0.0  # 0 until the ranks are up and have been sent the item
        self._kill_at = 0.0  # 0 until the item has taken too long
        self._end_at = 0.0  # when end_item() was called for the item; 0 if it was not called
        self._released = False  # whether collectives have been ended, so that the item can end
        self._run_ends = False  # whether the item was interrupted because the run ends
        self._text = ""
        self._metrics: dict[str, float] = {}
        self._line = 0  # the cell's line that was running when the item's time was up
        self._retiring: list[threading.Thread] = []

    @property
    def open(self) -> bool:
        """Whether the slot has a gang, even if the gang's ranks have not started yet."""
        return self._gang is not None

    @property
    def up(self) -> bool:
        """Whether the slot has a gang whose ranks are up."""
        return self._gang is not None and self._gang.up

    @property
    def free(self) -> bool:
        """Whether the slot can be given an attempt."""
        return self.attempt is None and (self.up or not self._settings.queues)

    @property
    def load(self) -> int:
        """How many attempts the slot has."""
        return (self.attempt is not None) + len(self._ahead)

    @property
    def room(self) -> int:
        """How many more attempts the slot can be given now."""
        if self.attempt is None:
            return int(self.free)
        return 0 if self._gang is None or self._gang.deaths else max(0, self._depth - self.load)

    @property
    def taking_back(self) -> bool:
        """Whether the slot has asked its member for items, and the member has not answered yet."""
        return self._gang is not None and self._gang.taking_back

    def waits_for(self) -> str:
        """Return why the ranks may still be waiting to start; '' if that is not known."""
        return "" if self._gang is None else self._gang.launcher.waits_for()

    def can_begin(self, attempt: ItemAttempt) -> bool:
        """Return whether the attempt can begin in this slot now. If not, it has to wait until other ranks are up."""
        return self._can_run(attempt) or not self._settings.queues

    def _can_run(self, attempt: ItemAttempt) -> bool:
        """Return whether the ranks can run this attempt: none has died, and the item has not just failed on them."""
        return attempt.item.number != self._failed_item and not (self._gang is not None and self._gang.deaths)

    def start_gang(self, request: Request | None = None) -> None:
        """Start a gang, with a first request if there is one. If that fails, this call or poll() raises LaunchError."""
        launcher = self._settings.launch(self.number)
        self._gang = Gang(launcher, self._settings.size, lambda: self._on_arrival(self.number))
        self._items = self._first_bytes = 0
        self._depth, self._short_ones = 1, 0
        self._failed_item = None
        if request is not None:
            self._execution = self._gang.submit(request)
        self._gang.start()

    def start(self, attempt: ItemAttempt, request: Request) -> None:
        """Begin an attempt, on a new gang if the slot has none that can run it. Raises the errors of start_gang().

        If another attempt is running, the new one follows it, but only after a call of send().
        """
        if self.attempt is not None and self._gang is not None:
            self._ahead.append((attempt, self._gang.submit_ahead(request)))
            if _is_large(attempt):
                self._depth = 1
            return
        if not self._can_run(attempt):
            self.retire()
        self._begin(attempt, None)
        if self._gang is None:
            self.start_gang(request)
        else:
            self._execution = self._gang.submit(request)
        self._on_arrival(self.number)  # submit() has made events, which the next poll() returns

    def send(self) -> None:
        """Send what start() has given the gang in advance. Call this after one or several calls of start()."""
        if self._gang is not None:
            self._gang.send_ahead()

    def _begin(self, attempt: ItemAttempt | None, execution: Execution | None) -> None:
        self.attempt, self._execution = attempt, execution
        self._began = self._kill_at = self._end_at = 0.0
        self._released = False
        self._text, self._line, self._metrics = "", 0, {}

    def poll(self) -> list[Event]:
        """Return what has happened since the last call, as events of the run."""
        news: list[Event] = []
        for event in self._gang.poll(0.0) if self._gang is not None else ():
            match event:
                case events.RankStarted():
                    if not self._items:  # a gang's rank is recorded once, with the gang's first item
                        news.append(self._renumbered(event))
                    if event.rank == self._settings.size - 1:
                        news.append(self._begun())
                case events.RankFinished(rank=0):
                    self._text = event.value
                case events.StackTaken(rank=0):
                    self._line = event.cell_line
                case events.Displayed() if self.attempt is not None:
                    news.append(self._renumbered(event._replace(item=self.attempt.item.number)))
                case _ if isinstance(event, Kept):
                    if isinstance(event, events.Metrics):
                        # In a ring, reports of the first rank take precedence over those of other ranks.
                        old, new = self._metrics, event.values
                        self._metrics = {**new, **old} if event.rank else {**old, **new}
                    news.append(self._renumbered(event))
        while self._ahead and self._ahead[0][1].given_back:
            self.given_back.append(self._ahead.popleft()[0])
            self._depth = 1
        self._ask_for_ahead()
        if self.attempt is None and self._gang is not None and self._gang.deaths:
            self.retire(kill=True)  # the gang died while waiting for an item
        self._watch_the_time()
        self._watch_the_end()
        return news

    def ended(self) -> Ended | None:
        """Return how the attempt has ended; None while it runs. Retire the gang if it cannot run another item."""
        gang, execution = self._gang, self._execution
        if gang is None or execution is None or self.attempt is None:
            return None
        if execution.done:
            outcome = self._finished(execution)
            keep = not gang.deaths
        elif execution.failures and not (self._kill_at or self._released):
            if execution.failed_rank is None:
                return None  # a report that explains the failure may still arrive
            failure = execution.failures[execution.failed_rank]
            outcome = Ended(failure=failure, seconds=execution.seconds)
            usable = (
                failure.is_exception and failure.cause != "out of memory" and not (failure.gpu and failure.gpu.is_final)
            )
            keep = usable and not (gang.deaths or execution.running)
        elif self._end_at and (not execution.running or time.monotonic() > self._end_at + END_GRACE_S):
            outcome = Ended(metrics=self._metrics, seconds=execution.seconds, pruned=True)
            keep = not (gang.deaths or execution.running)
        elif self._kill_at and (not execution.running or time.monotonic() > self._kill_at):
            outcome, keep = Ended(failure=self._too_late()), False
        elif execution.stopped and not (execution.running or self._run_ends):
            outcome, keep = Ended(failure=_INTERRUPTED, seconds=execution.seconds), False
        else:
            return None
        self._items += 1
        self._failed_item = self.attempt.item.number if outcome.failure is not None else None
        if not keep:
            self.retire(kill=True)
            return outcome
        is_used_up = self._is_used_up(execution)
        ended_well = outcome.failure is None and not is_used_up
        self._depth = self._next_depth(self.attempt, execution.seconds) if ended_well else 1
        self._begin(*(self._ahead.popleft() if self._ahead else (None, None)))
        if is_used_up and not self.load:
            self.retire()
        return outcome

    def _next_depth(self, attempt: ItemAttempt, seconds: float) -> int:
        """Return how many attempts the slot may have after `attempt`, which took `seconds`."""
        fit = int(AHEAD_S / seconds) if self._settings.ahead and seconds and not _is_large(attempt) else 1
        self._short_ones = self._short_ones + 1 if fit > 1 else 0
        left = AHEAD_MOST if self._settings.fresh_after is None else self._settings.fresh_after - self._items
        return max(1, min(self._short_ones // 2, fit, left, AHEAD_MOST))

    def interrupt(self) -> None:
        """Interrupt the item, as Ctrl-C would, because the run ends. If this stops the item, ended() returns None."""
        self._run_ends = True
        if self._gang is not None:
            self._gang.interrupt()

    def end_item(self) -> None:
        """Have the item end at once, because other trials are better. Unless it has just ended, it counts as pruned."""
        if self._gang is not None and self.running and not self._end_at:
            self._end_at = time.monotonic()
            self._gang.end_item()

    @property
    def running(self) -> bool:
        """Whether a rank is still running the item."""
        is_up = self._gang is not None and self._gang.up
        return is_up and self._execution is not None and bool(self._execution.running)

    def retire(self, *, kill: bool = False) -> None:
        """End the gang in a thread of its own, so that the pool need not wait. The next attempt starts a new gang."""
        self.attempt = self._execution = None
        self.given_back += [attempt for attempt, _ in self._ahead]
        self._ahead.clear()
        gang, self._gang = self._gang, None
        if gang is None:
            return
        self._retiring = [other for other in self._retiring if other.is_alive()]
        while len(self._retiring) >= RETIRING:
            self._retiring.pop(0).join()
        thread = threading.Thread(target=_end, args=(gang, kill), name="sparkring-retire", daemon=True)
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

    def _begun(self) -> events.ItemStarted:
        """Record that all ranks have been sent the item, so that its time begins. Return the event that says this."""
        assert self.attempt is not None
        self._began = time.monotonic()
        item, number, *_ = self.attempt
        return events.ItemStarted(time.time(), item.number, item.name, self.number, number, item.parameters)

    def _renumbered(self, event: Kept | events.RankStarted) -> Event:
        """Return the event with the number that its rank has among the ranks of all slots."""
        return event._replace(rank=self.number * self._settings.size + event.rank)

    def _watch_the_time(self) -> None:
        limit_s = self._settings.timeout_each_s
        if self._gang is None or limit_s is None or not self._began or self._kill_at or not self.running:
            return
        if time.monotonic() > self._began + limit_s:
            self._kill_at = time.monotonic() + TIMEOUT_GRACE_S
            self._gang.ask_for_stacks()
            self._gang.interrupt()

    def _ask_for_ahead(self) -> None:
        """If the current item takes a long time, ask the member to give back the items that wait behind it."""
        if not self._ahead or self.taking_back or self._gang is None:
            return
        if self._began and time.monotonic() > self._began + WAIT_S:
            self._gang.take_back()

    def _watch_the_end(self) -> None:
        """If ranks are still running an item after end_item(), end the collectives: ranks may be waiting in one."""
        if not self._end_at or self._released or self._settings.size == 1 or not self.running:
            return
        if time.monotonic() > self._end_at + RELEASE_AFTER_S and self._gang is not None:
            self._released = True
            self._gang.release()

    def _too_late(self) -> Failure:
        limit = describe.duration(self._settings.timeout_each_s or 0.0)
        where = f" (it was at cell line {self._line})" if self._line else ""
        return Failure("timed out", f"did not end within {limit}{where}")

    def _finished(self, execution: Execution) -> Ended:
        first = execution.ranks[0]
        assert self.attempt is not None
        item = f"-item-{self.attempt.item.number}"
        values, _, lost, notices = unpack_results(execution, self._settings.folder, (first,), item)
        if lost:
            advice = f"{lost[0].kept}. {_RETURN}"
            return Ended(failure=Failure("code", lost[0].problem.replace(" of rank 0", ""), advice=advice))
        sent, value = execution.values[first][""], values.get(first)
        # The parts of a value with sharded tensors are not enough to rebuild it.
        packed = (cloudpickle.dumps(value),) if sent.packed.shards else sent.parts
        seconds = execution.seconds or time.monotonic() - self._began
        return Ended(value, self._text, None, packed, self._metrics, seconds, notices=notices)

    def _is_used_up(self, execution: Execution) -> bool:
        """Whether to replace the gang: it has run as many items as it may, or its memory has grown too much."""
        held_bytes = sum(execution.memory_bytes.values())
        self._first_bytes = self._first_bytes or held_bytes
        fresh_after = self._settings.fresh_after
        too_many = fresh_after is not None and self._items >= fresh_after
        return too_many or held_bytes > self._first_bytes + self._settings.growth_bytes


# The failure of an item that got an interrupt meant for the item before it. After this cause, an item is tried again.
_INTERRUPTED = Failure("lost", "interrupted together with the item before it, which took too long")
_RETURN = "Return plain values or arrays, or save the object in the item and return its path."


def _is_large(attempt: ItemAttempt) -> bool:
    return sum(map(len, attempt.item.parts)) > AHEAD_BYTES


def _end(gang: Gang, kill: bool) -> None:
    """End a gang that is no longer used. Unless `kill` is set, ask its ranks to leave first. Runs in a thread."""
    with contextlib.closing(gang):
        if not kill and gang.up:
            gang.leave()
            poll_until(lambda: gang.gone, time.monotonic() + LEAVE_S, gang.poll)
