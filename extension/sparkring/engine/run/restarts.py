"""A run that can restart: if a rank is lost, the next attempt has new ranks, which continue from the last checkpoint.

If Spark then has fewer slots than before, the new ring is smaller, but has at least as many ranks as --min-np says.
When the slots are available again, the run restarts with more ranks after the next checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sparkring.checkpointing.entries import Last
from sparkring.engine.run.polling import poll_until
from sparkring.engine.run.spec import Outcome
from sparkring.engine.run.supervisor import LiveRun, deadline_of, run_on_fresh_ranks
from sparkring.errors import LaunchError, SlotsError
from sparkring.gangs.execution import Request
from sparkring.history import describe, events
from sparkring.history.describe import NoRestart
from sparkring.history.events import Failure
from sparkring.history.record import Attempt, Checkpoint, RunRecord
from sparkring.launchers import open_launcher
from sparkring.launchers.base import LaunchRequest
from sparkring.runtime.resume_point import Here

if TYPE_CHECKING:
    from sparkring.checkpointing.directory import CheckpointDirectory

PAUSE_S = 0.5  # the pause before a restart; if several attempts in a row have saved nothing, it doubles each time …
LONGEST_PAUSE_S = 30.0  # … but does not get longer than this
SHRINK_AFTER_S = 5.0  # wait this long before the ring gets smaller: Spark may soon replace a lost executor
SAY_AFTER_S = 1.0  # after this, report that the run is waiting for slots
WAIT_FOR_SLOTS_S = 300.0
LOOK_EVERY_S = 2.0
INTERRUPTED = Outcome("interrupted", "between two attempts")
NOT_INITIALIZED = "Horovod has not been initialized"  # if all ranks say this, the code has not called hvd.init()


class Restarts:
    """Runs a request on one gang after another, until an attempt succeeds or another attempt would be useless.

    `directory` is the directory of checkpoints; without it, each attempt starts from the beginning.
    """

    def __init__(
        self, run: LiveRun, request: Request, launch: LaunchRequest, directory: CheckpointDirectory | None
    ) -> None:
        self.run = run._replace(deadline=deadline_of(run.options), calls_off=self._can_be_larger)
        self.options, self.recorder, self.interrupts, *_ = run
        self.request = request
        self.launch = launch
        self.directory = directory
        self._size = launch.size
        self._look_at = 0.0
        self._stalls = 0  # how many attempts have ended because no rank had made a step for too long
        self._room_since = 0.0  # when room for more ranks was first seen; 0 if there is no room

    def outcome(self) -> Outcome:
        """Run the attempts. Return how the last one ended, or what ended the run between two attempts."""
        number, slots_until = 0, 0.0
        if self.directory is not None and (notice := self.directory.words(time.time())):
            self.recorder.notice(notice)
        last = self._last()
        with self.interrupts:
            while True:
                number += 1
                most = self.options.max_restarts + 1
                began = events.AttemptStarted(time.time(), number, self._size, last.name, last.step, most)
                self.recorder.add([began])
                outcome = self._attempt(number, last)
                if outcome.ending == "not started" and number > 1 and time.monotonic() <= slots_until:
                    pause_s = PAUSE_S  # nothing has run, so this does not count as a restart
                elif outcome.ending in ("failed", "called off"):
                    slots_until = time.monotonic() + WAIT_FOR_SLOTS_S
                    last = self._last()
                    no_restart = self._why_not(outcome)
                    if no_restart is not None:
                        words = filter(None, [describe.no_restart(no_restart), self._how_to_go_on(last)])
                        return replace(outcome, explanation="\n".join(words))
                    attempts = self._attempts(outcome)
                    pause_s = 0.0 if outcome.rank is None else pause_after(attempts, self.recorder.record.checkpoints)
                elif outcome.stalled and self._stalls < self.options.max_restarts:
                    self._stalls += 1
                    slots_until = time.monotonic() + WAIT_FOR_SLOTS_S
                    last, pause_s = self._last(), 0.0
                else:
                    return outcome
                self.recorder.add([events.AttemptEnded(time.time(), number, outcome.reason, outcome.rank, pause_s)])
                if self.directory is not None and (odd := self.directory.passed_over(self.recorder.record, last)):
                    self.recorder.notice(odd)
                if outcome.ending == "failed":
                    self._tell_of_a_new_beginning(last)
                if poll_until(lambda: self.interrupts.seen, time.monotonic() + pause_s):
                    return INTERRUPTED
                ends = self._wait_for_slots(slots_until)
                if ends is not None:
                    return ends

    def _attempt(self, number: int, last: Last) -> Outcome:
        record = self.recorder.record
        here = Here(run_id=record.run_id) if self.directory is None else self.directory.here(record, last)
        try:
            launch = self.launch._replace(size=self._size)
            launcher = open_launcher(launch, self.recorder.notice, patient=False)  # _wait_for_slots() has waited
        except LaunchError as error:
            return Outcome("not started", str(error), error=error)
        self._room_since = 0.0
        request = self.request._replace(restarts=number - 1, max_restarts=self.options.max_restarts).going_on(here)
        return run_on_fresh_ranks(self.run, request, launcher, self._size)

    def _last(self) -> Last:
        return Last() if self.directory is None else self.directory.last(self.recorder.record)

    def _how_to_go_on(self, last: Last) -> str:
        if self.directory is None or not last.name:
            return ""
        saved = f"Step {last.step:,} is saved in {self.directory.location.written}"
        failures = [rank.failure for rank in self.recorder.record.ranks if rank.failure is not None]
        is_earlier = self.directory.first is not None and self.directory.first.name == last.name
        if is_earlier and any(failure.error.endswith(".CheckpointError") for failure in failures):
            return f"{saved}, but it does not fit: run the cell with --fresh to start over (checkpoints are kept)."
        return f"{saved}: run the cell again to continue from it, or with --fresh to start over."

    def _tell_of_a_new_beginning(self, last: Last) -> None:
        if self.directory is not None and not last.name:
            self.recorder.notice(
                f"the cell runs again without a checkpoint: none in {self.options.checkpoint_dir} is usable"
                if self.recorder.record.checkpoints
                else f"the cell runs again, and checkpoints() has saved nothing in {self.options.checkpoint_dir} yet: "
                "without a checkpoint of its own, it trains from the beginning (checkpoints().save(step, state) on the "
                "ranks saves one)"
            )

    def _attempts(self, outcome: Outcome) -> tuple[Attempt, ...]:
        """Return all attempts of the run. The last attempt includes the failure that has just ended it.

        The record does not have this failure yet, because the AttemptEnded event is added later.
        """
        record = self.recorder.record
        failure = None if outcome.rank is None else record.ranks[outcome.rank].failure
        return (*record.attempts[:-1], record.attempts[-1]._replace(failed_rank=outcome.rank, failure=failure))

    def _why_not(self, outcome: Outcome) -> NoRestart | None:
        """Return why the run makes no further attempt after this outcome; None if it makes another attempt."""
        if outcome.rank is None:
            return None
        record, attempts = self.recorder.record, self._attempts(outcome)
        why_not = gives_up(attempts, record.checkpoints, self.options.max_restarts)
        failure = attempts[-1].failure
        if why_not is None and failure is not None:
            failures = [rank.failure for rank in record.ranks if rank.failure is not None]
            why_not = cannot_heal(failure, failures, record.size, stepped=has_stepped(record))
        return why_not

    def _wait_for_slots(self, until: float) -> Outcome | None:
        """Wait until Spark has enough slots for the next attempt, and decide how many ranks that attempt has.

        Return None if there are enough slots. If there are still too few at the time `until`, or if the user interrupts
        the run, return the run's outcome.
        """
        most, least = self.launch.size, self.options.min_np or self.launch.size
        began, there, has_said = time.monotonic(), 0, False

        def enough() -> bool:
            nonlocal there, has_said
            there, waited_s = self.launch.place.room(self.launch), time.monotonic() - began
            if there >= most or (there >= least and waited_s > SHRINK_AFTER_S):
                return True
            if waited_s > SAY_AFTER_S and not has_said:
                has_said = True
                fewer = f"; the run starts with {there} after {SHRINK_AFTER_S:.0f} s" if there >= least else ""
                self.recorder.notice(f"waiting for {most} task slots: Spark has {there} now{fewer}", until="up")
            return self.interrupts.seen

        has_room = poll_until(enough, until)
        if self.interrupts.seen:
            return INTERRUPTED
        if has_room:
            self._size = min(there, most)
            return None
        waited = describe.duration(round(time.monotonic() - began))
        error = SlotsError(
            f"{most} ranks need {most} task slots, but Spark has had {there} for {waited}. Add executors and run the "
            f"cell again, or continue with fewer ranks: --min-np {max(there, 1)}."
        )
        return Outcome("not started", str(error), error=error)

    def _can_be_larger(self) -> str:
        """Return the reason to restart with more ranks now, or '' if the attempt should go on.

        A restart needs free slots. It also waits for a checkpoint that was saved after the slots became free, so that
        little work is lost.
        """
        if self._size == self.launch.size:
            return ""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            if self.launch.place.room(self.launch) <= self._size:
                self._room_since = 0.0
            elif not self._room_since:
                self._room_since = time.time()
        saved = self.recorder.record.checkpoints
        if not self._room_since or not saved or saved[-1].saved.time < self._room_since:
            return ""
        return f"Spark has slots for more than {describe.counted(self._size, 'rank')} again"


def counted(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the failed attempts that count towards `max_restarts`.

    An attempt that found its checkpoint damaged does not count, since the next attempt takes an earlier checkpoint. If
    a later attempt still fails on the same checkpoint, that attempt counts. The cell itself must then have asked for
    the checkpoint, and may do so in every attempt.
    """
    lost, damaged = [], set()
    for attempt in attempts:
        if attempt.failure is None:
            continue
        if attempt.failure.cause == "damaged checkpoint" and attempt.checkpoint not in damaged:
            damaged.add(attempt.checkpoint)
        else:
            lost.append(attempt)
    return lost


def gives_up(attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint], max_restarts: int) -> NoRestart | None:
    """Return why the run gives up, now that the last of `attempts` has failed; None if it makes another attempt."""
    now, lost = attempts[-1], counted(attempts)
    if now not in lost:
        return None
    if len(lost) > max_restarts:
        return NoRestart("used up" if max_restarts else "not asked for", len(attempts), max_restarts)
    moved = any(checkpoint.attempt >= len(attempts) - 1 for checkpoint in checkpoints)
    failures = [attempt.failure for attempt in lost[-2:] if attempt.failure is not None]
    if not moved and len(failures) == 2 and all(failure.is_exception for failure in failures) and _same(*failures):
        return NoRestart("twice the same", len(attempts), max_restarts)
    return None


def cannot_heal(failure: Failure, failures: Collection[Failure], size: int, *, stepped: bool) -> NoRestart | None:
    """Return why another attempt with `size` ranks would fail in the same way; None if it may succeed.

    `failures` are the failures of all ranks, and `stepped` says whether a rank has reached a step. An attempt may
    succeed if a process died without an exception, or if the checkpoint was damaged. An attempt may also succeed if
    `failure` happened in a collective, because another rank's death may have caused this failure.
    """
    follows = failure.cause == "echo" and NOT_INITIALIZED not in failure.summary
    if follows or failure.cause == "damaged checkpoint" or not all(other.error for other in failures):
        return None
    if failure.cause == "code":
        return NoRestart("code", error=failure.error)
    if not stepped and len(failures) == size and all(_same(other, failure) for other in failures):
        return NoRestart("before the first step", size=size)
    return None


def has_stepped(record: RunRecord) -> bool:
    """Whether a rank of the last attempt has reported a metric, read data or saved a checkpoint."""
    if any(checkpoint.attempt == len(record.attempts) for checkpoint in record.checkpoints):
        return True
    return any(rank.metrics or any(reading.now for reading in rank.readings) for rank in record.ranks)


def _same(one: Failure, other: Failure) -> bool:
    """Whether both failures have the same cause, the same class of exception and the same innermost frame."""
    return (one.cause, one.error, one.frames[-1:]) == (other.cause, other.error, other.frames[-1:])


def pause_after(attempts: Sequence[Attempt], checkpoints: Sequence[Checkpoint]) -> float:
    """Return how long to wait after the last attempt: longer if several attempts in a row have saved no checkpoint."""
    fruitful = {checkpoint.attempt for checkpoint in checkpoints}
    in_vain = 0
    for attempt in reversed(counted(attempts)):
        if attempt.number in fruitful:
            break
        in_vain += 1
    return min(PAUSE_S * 2.0 ** max(0, in_vain - 1), LONGEST_PAUSE_S)
