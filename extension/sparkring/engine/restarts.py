"""A run that may lose ranks: then all are started again, and go on from the last checkpoint.

It is all or nothing: one lost rank ends the attempt, and the next one has ranks of its own. Where Spark has fewer slots
than before, the ring comes back smaller, if the user allows that, and becomes larger again when a checkpoint has been
saved after the slots are back.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from sparkring.checkpointing.entries import Last
from sparkring.engine.options import Options
from sparkring.engine.recorder import Recorder
from sparkring.engine.result import RunResult
from sparkring.engine.supervisor import Drive, TurnLost, fail
from sparkring.errors import LaunchError, SlotsError
from sparkring.gangs.execution import Request
from sparkring.gangs.gang import Gang
from sparkring.history import describe, events
from sparkring.history.events import Failure
from sparkring.history.record import Attempt, Checkpoint, RunRecord
from sparkring.launchers import open_launcher, room
from sparkring.launchers.base import LaunchRequest
from sparkring.runtime.interrupts import Interrupts, interrupted
from sparkring.runtime.resume_point import Here

if TYPE_CHECKING:
    from sparkring.checkpointing.directory import Directory

PAUSE_S = 0.5  # before a restart; twice as long after each attempt that has saved nothing …
LONGEST_PAUSE_S = 30.0  # … up to this
SHRINK_AFTER_S = 5.0  # Spark may replace a lost executor in a moment
WAIT_FOR_SLOTS_S = 300.0
LOOK_EVERY_S = 2.0
TICK_S = 0.1


class Attempts:
    """Runs a request on one gang after another until it ends well, or there is no use in going on.

    `directory` is where checkpoints go; without one, each attempt begins anew.
    """

    def __init__(
        self,
        request: Request,
        wanted: LaunchRequest,
        options: Options,
        recorder: Recorder,
        interrupts: Interrupts,
        directory: Directory | None,
    ) -> None:
        self.request = request
        self.wanted = wanted
        self.options = options
        self.recorder = recorder
        self.interrupts = interrupts
        self.directory = directory
        self._size = wanted.size
        self._began = time.monotonic()
        self._look_at = 0.0
        self._room_since = 0.0  # when there was room for more ranks again; 0 if there is none

    def to_the_end(self) -> RunResult:
        """RunFailed, RunTimeout, LaunchError or KeyboardInterrupt if it does not end well."""
        number, up_to = 0, 0.0
        last = Last() if self.directory is None else self._first()
        with self.interrupts:
            while True:
                number += 1
                self.recorder.add([events.AttemptStarted(time.time(), number, self._size, last.name, last.step)])
                try:
                    return self._attempt(number, last)
                except TurnLost as lost:
                    up_to = time.monotonic() + WAIT_FOR_SLOTS_S
                    last = self._last()
                    pause_s = self._next(number, lost, last)
                except LaunchError as error:
                    if number == 1 or time.monotonic() > up_to:
                        raise
                    pause_s = PAUSE_S  # nothing has run: this is no restart that counts
                    self.recorder.add([events.AttemptEnded(time.time(), number, str(error), None, pause_s)])
                self._wait(pause_s)
                self._size = self._as_many_as_can(up_to)

    def _attempt(self, number: int, last: Last) -> RunResult:
        """One gang, from its start to its end."""
        record = self.recorder.record
        here = Here(run_id=record.run_id) if self.directory is None else self.directory.here(record, last)
        np = self._size if self.wanted.np > 0 else -self._size
        launcher = open_launcher(self.wanted._replace(np=np, size=self._size), self.recorder.notice)
        self._room_since = 0.0
        with Gang(launcher, self._size) as gang:
            turn = gang.submit(
                self.request._replace(checkpoints=here, restarts=number - 1, max_restarts=self.options.max_restarts)
            )
            gang.start()
            return Drive(
                gang,
                turn,
                self.recorder,
                self.options,
                self.interrupts,
                warm=False,
                began=self._began,
                calls_off=self._can_be_larger,
            ).to_the_end()

    # ── checkpoints ───────────────────────────────────────────────────────────

    def _first(self) -> Last:
        assert self.directory is not None
        words = self.directory.words(time.time())
        if words:
            self.recorder.notice(words)
        return self.directory.last(self.recorder.record)

    def _last(self) -> Last:
        return Last() if self.directory is None else self.directory.last(self.recorder.record)

    # ── between attempts ──────────────────────────────────────────────────────

    def _next(self, number: int, lost: TurnLost, last: Last) -> float:
        """How long to wait before the next attempt; if there is to be none, raises RunFailed."""
        record = self.recorder.record
        ended = events.AttemptEnded(time.time(), number, lost.reason, lost.rank)
        if lost.rank is None:
            self.recorder.add([ended])
            return 0.0
        failure = record.ranks[lost.rank].failure
        now = record.attempts[-1]._replace(failed_rank=lost.rank, failure=failure)
        attempts = (*record.attempts[:-1], now)
        why_not = gives_up(attempts, record.checkpoints, self.options.max_restarts)
        if why_not is None and failure is not None:
            failures = [rank.failure for rank in record.ranks if rank.failure is not None]
            why_not = cannot_heal(failure, failures, record.size, stepped=has_stepped(record))
        if why_not is not None:
            lost.left = "\n".join(filter(None, [why_not, self._how_to_go_on(last)]))
            fail(self.recorder, lost)
        pause_s = pause_after(attempts, record.checkpoints)
        self.recorder.add([events.AttemptEnded(ended.time, number, lost.reason, lost.rank, pause_s)])
        if self.directory is not None and not last.name:
            self.recorder.notice(
                f"the cell begins anew: all checkpoints in {self.options.checkpoint_dir} are damaged"
                if record.checkpoints
                else f"the cell begins anew: no checkpoint has been saved in {self.options.checkpoint_dir} yet "
                "(checkpoints().save(step, state) on the ranks saves one)"
            )
        return pause_s

    def _how_to_go_on(self, last: Last) -> str:
        if self.directory is None or not last.name:
            return ""
        return f"Step {last.step:,} is saved in {self.directory.location.written}: run the cell again to go on from it."

    def _wait(self, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        while time.monotonic() < until:
            self._stop_if_asked()
            time.sleep(min(TICK_S, pause_s))

    def _stop_if_asked(self) -> None:
        if self.interrupts.seen:
            raise interrupted("between two attempts")

    # ── how many ranks ────────────────────────────────────────────────────────

    def _as_many_as_can(self, up_to: float) -> int:
        """The ranks of the next attempt: waits for slots as long as there are too few."""
        wanted, least = self.wanted.size, self.options.least or self.wanted.size
        began, told = time.monotonic(), False
        while True:
            there = room(self.wanted)
            if there >= wanted:
                return wanted
            waited_s = time.monotonic() - began
            if there >= least and waited_s > SHRINK_AFTER_S:
                return there
            if time.monotonic() > up_to:
                raise SlotsError(
                    f"{wanted} ranks need {wanted} task slots, and Spark has had {there} for "
                    f"{describe.duration(round(waited_s))}. Add executors and run the cell again, or let it go on with "
                    f"fewer: --min-np {max(there, 1)}."
                )
            if not told and waited_s > 1.0:
                told = True
                fewer = f"; the run starts with {there} after {SHRINK_AFTER_S:.0f} s" if there >= least else ""
                waits = f"waiting for {wanted} task slots: Spark has {there} now{fewer}"
                self.recorder.notice(waits, until="up")
            self._stop_if_asked()
            time.sleep(TICK_S)

    def _can_be_larger(self) -> str:
        """Asked while a ring runs that is smaller than it should be: why to start it again now, at a checkpoint."""
        if self._size == self.wanted.size:
            return ""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            if room(self.wanted) <= self._size:
                self._room_since = 0.0
            elif not self._room_since:
                self._room_since = time.time()
        saved = self.recorder.record.checkpoints
        if not self._room_since or not saved or saved[-1].saved.time < self._room_since:
            return ""
        return f"Spark has slots for more than {describe.rank_count(self._size)} again"


def counted(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts that count as lost.

    An attempt that found its checkpoint damaged does not count, since the next one takes an earlier checkpoint. If the
    next attempt finds the same damage, it counts: the cell itself asks for the damaged checkpoint.
    """
    lost, damaged = [], set()
    for each in attempts:
        if each.failure is not None and each.failure.cause == "damaged checkpoint" and each.checkpoint not in damaged:
            damaged.add(each.checkpoint)
        elif each.failure is not None:
            lost.append(each)
    return lost


def gives_up(attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint], max_restarts: int) -> str | None:
    """Why there is no further attempt after the last of `attempts`, which has failed; None if there is one.

    '' if the user has asked for none.
    """
    now, lost = attempts[-1], counted(attempts)
    if now not in lost:
        return None
    if len(lost) > max_restarts:
        used_up = f"This was attempt {len(attempts)}: all restarts are used up (--max-restarts {max_restarts})."
        return used_up if max_restarts else ""
    before = lost[-2] if len(lost) > 1 else None
    moved = any(each.attempt >= len(attempts) - 1 for each in checkpoints)
    if before is not None and not moved and _same(before, now):
        return "It failed twice in the same way, and saved no checkpoint in between: another restart would not help."
    return None


def cannot_heal(failure: Failure, failures: Collection[Failure], size: int, *, stepped: bool) -> str | None:
    """Why another attempt of `size` ranks would fail in the same way, judged by the exceptions' types, or None.

    `failures` are those of all ranks; `stepped` says whether a rank has reached a step. The answer is None if a process
    died without an exception or a collective broke: the failure may then follow from the end of another rank.
    """
    if failure.cause in ("echo", "damaged checkpoint") or not all(each.error for each in failures):
        return None
    if failure.cause == "code":
        return f"The run was not restarted: another attempt would raise the same {failure.error.rpartition('.')[2]}."
    alike = [each for each in failures if (each.error, each.frames[-1:]) == (failure.error, failure.frames[-1:])]
    if not stepped and len(alike) == size:
        who = "all ranks failed in the same way" if size > 1 else "the rank failed"
        return f"The run was not restarted: {who} before the first step."
    return None


def has_stepped(record: RunRecord) -> bool:
    """Whether a rank of the last attempt has reported a metric, read data or saved a checkpoint."""
    if any(each.attempt == len(record.attempts) for each in record.checkpoints):
        return True
    return any(rank.metrics or any(each.now for each in rank.readings) for rank in record.ranks)


def _same(one: Attempt, other: Attempt) -> bool:
    """Did both end by the same exception at the same place, which is not another rank's echo?"""
    first, second = one.failure, other.failure
    assert first is not None
    assert second is not None
    if not (first.is_exception and second.is_exception):
        return False
    return (first.summary, first.frames[-1:]) == (second.summary, second.frames[-1:])


def pause_after(attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint]) -> float:
    """How long to wait after the last of `attempts`: the longer, the more of them in a row have saved nothing."""
    fruitful = {each.attempt for each in checkpoints}
    in_vain = 0
    for attempt in reversed(counted(attempts)):
        if attempt.number in fruitful:
            break
        in_vain += 1
    return min(PAUSE_S * 2.0 ** max(0, in_vain - 1), LONGEST_PAUSE_S)
