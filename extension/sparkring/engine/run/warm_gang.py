"""Warm gangs, which stay up between cells. There is at most one gang on this machine, and at most one on Spark.

While no cell is running on a gang, a thread listens to its ranks. The thread ends the gang if a rank has died, or if no
cell has run for too long. The thread also warns the user if a Spark job is waiting for the slots that the gang holds.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from sparkring.capture.remote_names import RemoteNames
from sparkring.engine.doctor import preflight
from sparkring.engine.run.environments import environment_notices, packed_environment
from sparkring.engine.run.options import GangOptions
from sparkring.engine.run.past_cells import PastCells
from sparkring.engine.run.polling import poll_until
from sparkring.engine.run.recorder import Recorder
from sparkring.engine.run.supervisor import STACKS_WAIT_S, why_it_waits
from sparkring.errors import LaunchError, OptionsError
from sparkring.gangs.gang import Gang
from sparkring.history import describe, events
from sparkring.history.events import Event
from sparkring.history.record import RunRecord, replay
from sparkring.launchers import open_launcher, place_of
from sparkring.launchers.base import LaunchRequest, Place
from sparkring.runtime.fair_lock import FairLock
from sparkring.runtime.interrupts import Interrupts, held_back, interrupted

LISTEN_S = 1.0
LEAVE_S = 2.0
WARN_EVERY_S = 2.0
SETTLE_S = 0.5  # after a death, wait this long for other deaths with the same cause
STOPPED = "it was stopped"
KEPT_BYTES = 500_000  # for each rank, this much of its output between cells is kept for the next cell
EVENT_BYTES = 100  # each event counts for this many of the KEPT_BYTES, in addition to its text

Tell = Callable[[str], None]


class WarmGang:
    """A gang that stays up. `held` knows which of the notebook's names have values on the gang's ranks.

    `ended` says why the gang has ended; it is '' while the gang is up. `stream` is the id of the run whose stream
    trains on the gang; '' if there is none. Between two micro-batches of a stream, other cells can use the gang. `past`
    holds the cells that could be run again on a gang that takes the place of this one.
    """

    def __init__(self, wanted: GangOptions, gang: Gang, tell: Tell) -> None:
        self.wanted = wanted
        self.gang = gang
        self.held = RemoteNames()
        self.ended = ""
        self.started = self.used = time.time()
        self.cells = 0
        self.stream = ""
        self.past = PastCells()
        self.news: list[str] = []  # notices for the next cell
        self._tell = tell
        self._kept = _Kept()
        self._mine = FairLock()  # held by the thread that polls the gang
        self._users = 0  # threads that have reserved the gang, or are waiting for it
        self._counting = threading.Lock()
        self._resting = threading.Event()
        self._resting.set()
        self._listener = threading.Thread(target=self._listen, name="sparkring-warm", daemon=True)
        self._listener.start()

    @property
    def where(self) -> str:
        return self.wanted.place.name

    @property
    def lost(self) -> bool:
        """Whether the gang has ended although nobody stopped it."""
        return bool(self.ended) and self.ended != STOPPED

    @property
    def busy(self) -> bool:
        """Whether a cell is running on the gang that other cells do not wait for."""
        return not self._resting.is_set() and not self.stream

    def describe(self) -> str:
        """Describe the gang, as in `warm gang of 4 ranks on this machine`."""
        return f"warm gang of {describe.counted(self.gang.size, 'rank')} on {self.wanted.place.title}"

    @contextlib.contextmanager
    def take(self, recorder: Recorder | None = None, given_up: Callable[[], object] = lambda: False) -> Iterator[Gang]:
        """Reserve the gang for a cell, and yield it. `recorder` gets what the ranks have sent since the last cell.

        If a stream is training on the gang, wait until its current micro-batch is done. Raises KeyboardInterrupt if
        `given_up()` becomes true meanwhile, and LaunchError if the gang has ended.
        """
        with self._reserved(given_up):
            before = self.gang.execution
            try:
                if self.ended:
                    raise LaunchError(
                        f"the {self.describe()} has ended: {self.ended}. Run the cell again, or start a new one."
                    )
                if recorder is not None:
                    for text in self.news:
                        recorder.notice(text)
                    recorder.add(self._kept.taken())
                    self.news.clear()
                    self.cells += 1
                yield self.gang
            finally:
                self.used = time.time()
                execution = self.gang.execution
                if execution is not None and execution is not before and execution.done:
                    self.past.add(execution)
                stuck = execution.running if execution is not None else []
                if self.gang.closed:
                    silent = f"{describe.rank_list(stuck)} did not respond after the last cell" if stuck else ""
                    self.ended = self.ended or describe.deaths(self.gang.deaths) or silent or "it was closed"
                elif stuck:
                    self._end("its last cell did not end properly")
                elif execution is not None and execution is not before:
                    self.held.update(execution.bound, execution.gone)
                    self.held.kept(execution.request.sent, execution.loaded, sent=True)

    @contextlib.contextmanager
    def _reserved(self, given_up: Callable[[], object]) -> Iterator[None]:
        with self._counting:
            self._users += 1
            self._resting.clear()
        self.gang.wake()
        try:
            if not self._mine.acquire(given_up):
                raise interrupted("while the cell was waiting for the stream's current micro-batch")
            try:
                yield
            finally:
                self._mine.release()
        finally:
            with self._counting:
                self._users -= 1
                if not self._users:
                    self._resting.set()

    def stacks(self) -> RunRecord:
        """Return the current stack of every rank, as a record that belongs to no run."""
        with held_back(), self.take() as gang:
            asked = time.time()
            started = events.RunStarted(asked, "", "", "", gang.size, self.where, self.wanted.framework, "all")
            record = replay([started, *(events.RankStarted(asked, *gang.place_of(rank)) for rank in range(gang.size))])
            gang.ask_for_stacks()

            def listen(timeout_s: float) -> None:
                nonlocal record
                heard = gang.poll(timeout_s)
                self._keep(heard)
                record = replay(heard, record)

            deadline = time.monotonic() + STACKS_WAIT_S
            poll_until(lambda: all(rank.stack is not None for rank in record.ranks), deadline, listen)
        return record

    def stop(self) -> None:
        """End the ranks, and return when no process of the gang is left."""
        with contextlib.suppress(LaunchError), self.take() as gang:  # take() raises LaunchError if the gang has ended
            gang.leave()
            poll_until(lambda: gang.gone, time.monotonic() + LEAVE_S, gang.poll)
            self._end(STOPPED)
        self._listener.join()

    @property
    def is_reserved(self) -> bool:
        """Whether a cell holds the gang or is waiting for it."""
        return bool(self._users)

    def _free(self) -> bool:
        return self._resting.is_set() and not self.ended

    def _end(self, why: str) -> None:
        self.ended = why
        self.gang.close()

    def _listen(self) -> None:
        """Receive, in a thread, what the ranks send between cells."""
        warn_at = time.monotonic() + WARN_EVERY_S
        while not self.ended:
            self._resting.wait()
            with self._mine:
                if not self._free():
                    continue
                self._poll(LISTEN_S)
                if self.gang.deaths:
                    poll_until(lambda: self.gang.gone, time.monotonic() + SETTLE_S, self._poll)
                    problem = self.gang.launcher.problem()
                    self._lost(describe.deaths(self.gang.deaths) + (f" ({problem})" if problem else ""))
                elif not self.stream and time.time() - self.used > self.wanted.idle_s:
                    self._lost(f"no cell ran on it for {describe.duration(round(self.wanted.idle_s))}")
            if time.monotonic() > warn_at and self._free():
                warn_at = time.monotonic() + WARN_EVERY_S
                warning = self.gang.launcher.warning()
                if warning:
                    self._tell(warning)

    def _poll(self, timeout_s: float) -> None:
        self._keep(self.gang.poll(timeout_s))

    def _lost(self, why: str) -> None:
        self._end(why)
        if not self.stream:  # otherwise, the stream starts new ranks, and its record says so
            self._tell(f"the {self.describe()} has ended, and the variables of its cells are lost: {why}")

    def _keep(self, new_events: list[Event]) -> None:
        self._kept.add(new_events)
        text = "the ranks printed more between cells than can be kept: the beginning is lost"
        if self._kept.lossy and text not in self.news:
            self.news.append(text)


class _Kept:
    """Keeps the last KEPT_BYTES of what each rank sends between cells. `lossy` says whether something was left out."""

    def __init__(self) -> None:
        self.lossy = False
        self._by_rank: dict[int, deque[Event]] = {}
        self._bytes: Counter[int] = Counter()

    def add(self, new_events: list[Event]) -> None:
        for event in new_events:
            if isinstance(event, events.Output | events.UserMessage | events.Metrics):
                if isinstance(event, events.Output) and len(event.data) > KEPT_BYTES:
                    event = event._replace(data=event.data[-KEPT_BYTES:])
                    self.lossy = True
                kept = self._by_rank.setdefault(event.rank, deque())
                kept.append(event)
                self._bytes[event.rank] += _bytes(event)
                while self._bytes[event.rank] > KEPT_BYTES and len(kept) > 1:
                    self._bytes[event.rank] -= _bytes(kept.popleft())
                    self.lossy = True

    def taken(self) -> list[Event]:
        """Remove all events, and return them in the order of their times."""
        in_order = sorted((event for kept in self._by_rank.values() for event in kept), key=lambda event: event.time)
        self.lossy = False
        self._by_rank.clear()
        self._bytes.clear()
        return in_order


def _bytes(event: Event) -> int:
    return EVENT_BYTES + len(getattr(event, "data", getattr(event, "text", "")))


_gangs: list[WarmGang] = []  # in the order in which they were started
# A forked process forgets the gangs. Otherwise, it would call stop() when it exits, and end its parent's gangs.
os.register_at_fork(after_in_child=_gangs.clear)


def start(wanted: GangOptions, say: Tell, tell: Tell) -> WarmGang:
    """Start a warm gang and wait until its ranks are up.

    `say` reports what happens during the start, and `tell` what happens later, between cells.

    Raises LaunchError if the gang cannot be started, and OptionsError if this machine, or Spark, already has a gang.
    """
    there = _at(wanted.place)
    if there is not None and not there.ended:
        raise OptionsError(f"a {there.describe()} is already up: %gang stop ends it.")
    size = abs(wanted.np)
    title = f"warm gang of {size}"
    pack = packed_environment(wanted.place, say) if wanted.env_pack else None
    for notice in environment_notices(pack):
        say(notice)
    request = LaunchRequest(wanted.place, size, dict(wanted.env), title, wanted.gpus, persistent=True)
    request = request._replace(environment_pack=pack)
    launcher = open_launcher(request, say)
    for notice in preflight.notices([request], wanted.framework):
        say(notice)
    gang = Gang(launcher, size)
    with Interrupts() as interrupts:
        try:
            gang.start()
            _wait_until_up(gang, interrupts, say)
        except BaseException:  # caught only so that no part of the gang is left behind
            gang.close()
            raise
        if there is not None:
            _gangs.remove(there)
        if not _gangs:
            atexit.register(stop)
        _gangs.append(WarmGang(wanted, gang, tell))
    if interrupts.seen:
        raise interrupted("after the gang was started")
    return _gangs[-1]


def _wait_until_up(gang: Gang, interrupts: Interrupts, say: Tell) -> None:
    joined, slow_at = 0, time.monotonic() + gang.launcher.slow_after_s

    def listen(timeout_s: float) -> None:
        nonlocal joined, slow_at
        for event in gang.poll(timeout_s):
            joined += isinstance(event, events.MemberJoined) - isinstance(event, events.MemberLeft)
            if isinstance(event, events.Notice):
                say(event.text)
        if time.monotonic() > slow_at and not gang.up:
            slow_at = math.inf
            say(why_it_waits(gang, joined))

    poll_until(lambda: gang.up or interrupts.seen, math.inf, listen)
    if interrupts.seen:
        raise interrupted("before the ranks were up")


def latest() -> WarmGang | None:
    """Return the gang that was started last; None if there is no gang."""
    return _gangs[-1] if _gangs else None


def find(np: int, say: Tell, place: Place | None = None) -> WarmGang | None:
    """Return the warm gang that has this `np`; None if there is no such gang, or if the gang is busy.

    `place` is where its ranks run, by default where `np` says. If the gang has been lost, start a new gang in its place
    and return the new gang.
    """
    gang = _at(place or place_of(np))
    if gang is None or gang.wanted.np != np or gang.busy:
        return None
    if gang.ended:
        number = _gangs.index(gang)
        try:
            fresh = start(gang.wanted, say, gang._tell)
        except LaunchError as error:
            raise LaunchError(f"{error} (%gang stop removes the {gang.describe()}, which has ended.)") from error
        _gangs.remove(fresh)
        _gangs.insert(number, fresh)  # the order does not change, because latest() depends on it
        why = f"the previous one has ended, and the variables of its cells are lost: {gang.ended}"
        fresh.news.append(f"a new gang: {why}")
        return fresh
    return gang


def every() -> list[WarmGang]:
    """Return all warm gangs, including those that have been lost."""
    return list(_gangs)


def stop(place: str = "") -> list[WarmGang]:
    """Stop the gangs at the place with this name ('' means all places), and return the gangs that were stopped.

    If the user interrupts stop(), KeyboardInterrupt is raised only after the gangs have ended.
    """
    gangs = [gang for gang in _gangs if place in ("", gang.where)]
    _stop(gangs)
    return gangs


def stop_gang(gang: WarmGang) -> None:
    """Stop this gang. If it has been stopped, do nothing. Interrupts have the same effect as in stop()."""
    _stop([gang] if gang in _gangs else [])


def _stop(gangs: list[WarmGang]) -> None:
    with Interrupts() as interrupts:
        for gang in gangs:
            gang.stop()
            _gangs.remove(gang)
        if not _gangs:
            atexit.unregister(stop)
    if interrupts.seen:
        raise interrupted("after the gang was stopped")


def _at(place: Place) -> WarmGang | None:
    return next((gang for gang in _gangs if gang.wanted.place is place), None)
