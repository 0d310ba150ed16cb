"""Watches one execution of a request on a gang until it ends, and returns its outcome."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from sparkring.engine.run.idle_gpus import IDLE_S, IdleGpus
from sparkring.engine.run.options import Options
from sparkring.engine.run.polling import POLL_S, poll_until
from sparkring.engine.run.questions import RankQuestions
from sparkring.engine.run.recorder import Recorder
from sparkring.engine.run.result import unpack_results
from sparkring.engine.run.spec import Outcome, Results
from sparkring.errors import LaunchError
from sparkring.frameworks import FRAMEWORKS
from sparkring.gangs.execution import Execution, Request
from sparkring.gangs.gang import Gang
from sparkring.history import describe, progress, reading
from sparkring.history.stacks import collective
from sparkring.launchers.base import Launcher
from sparkring.runtime.interrupts import Interrupts

STACKS_WAIT_S = 1.0
FAILURE_GRACE_S = 0.1
OTHERS_GRACE_S = 1.0  # after an exception, wait this long for failures of other ranks, on which a restart may depend
INTERRUPT_GRACE_S = 1.0
RETURN_GRACE_S = 4.0  # a warm gang is given up if its ranks do not respond to an interrupt within this time
# If a rank has not responded to an interrupt after this time, it may be waiting in a collective: end the collectives.
RELEASE_AFTER_S = 0.5
# After this time, interrupt again. The first interrupt may be lost if it arrives as the cell begins, or during a
# callback, where Python may ignore the exception.
REPEAT_AFTER_S = 2.0
# A rank that is importing a package stops only after the import, because a package such as torch could not be used
# after an interrupted import. The rank reports the import repeatedly, and the times above are then counted from its
# last report. The rank cannot report while native code is being loaded, which may take a long time. A warm gang waits
# at most this many seconds for imports.
IMPORTS_GRACE_S = 60.0
LEAVE_GRACE_S = 10.0
EVERYTHING_ENDS_S = 5.0  # after this time, close() ends the remaining processes by force
STALL_EVERY_S = 1.0


class LiveRun(NamedTuple):
    """A run in progress: its options, its recorder, what ends it early, and who answers what its ranks ask.

    The run ends when it is interrupted, or at the `deadline`, a time.monotonic() time. If `deadline` is None, the run's
    time limit is counted from the creation of its Supervisor. `calls_off` is called repeatedly. It returns why
    the execution is to be called off, or '' to let the execution go on.
    """

    options: Options
    recorder: Recorder
    interrupts: Interrupts
    questions: RankQuestions
    deadline: float | None = None
    calls_off: Callable[[], str] = str


def run_on_fresh_ranks(run: LiveRun, request: Request, launcher: Launcher, size: int) -> Outcome:
    """Run `request` on a new gang, and return the outcome. The caller must have entered `run.interrupts`."""
    try:
        with contextlib.closing(Gang(launcher, size)) as gang:
            execution = gang.submit(request)
            gang.start()
            return Supervisor(run, gang, execution).watch()
    except LaunchError as error:
        return Outcome("not started", str(error), error=error)


def deadline_of(options: Options) -> float:
    """Return the deadline of a run that begins now, as a time.monotonic() time; math.inf if it has no time limit."""
    return math.inf if options.timeout_s is None else time.monotonic() + options.timeout_s


class Supervisor:
    """Watches one execution until it is over.

    With `warm`, the gang stays up after the execution, unless a rank died, did not respond to an interrupt, or can no
    longer use CUDA. A cold gang is always closed.
    """

    def __init__(self, run: LiveRun, gang: Gang, execution: Execution, *, warm: bool = False) -> None:
        self.options, self.recorder, self.interrupts, self.questions, deadline, self.calls_off = run
        self.gang = gang
        self.execution = execution
        self.warm = warm
        self.deadline = deadline_of(run.options) if deadline is None else deadline
        self._began = time.time()
        self._asked_at = 0.0  # when a rank last waited for the user's input
        self._slow_at = time.monotonic() + gang.launcher.slow_after_s
        self._look_at = 0.0
        self._idle_gpus = IdleGpus()
        self._look_at_gpus = 0.0
        self._told_of_lone_ranks = (
            False,
            False,
        )  # whether the run has said it, and whether the ranks had ended by then

    def watch(self) -> Outcome:
        """Return the outcome when the execution is over. Raises LaunchError if the ranks could not be started."""
        while not self.execution.done:
            self._poll(POLL_S)
            outcome = self._ended_early()
            if outcome is not None:
                return outcome
            self._tell_of_a_slow_start()
            self._look_for_a_stall()
            self._look_for_idle_gpus()
            self._look_for_lone_ranks()
            self._answer_questions()
        self._look_for_lone_ranks()
        self._look_for_unlike_weights()
        if not self.warm:
            self._let_go(LEAVE_GRACE_S)
        return Outcome("finished", results=self._results())

    def _results(self) -> Results:
        return unpack_results(self.execution, self.recorder.record.log_folder)

    def _poll(self, timeout_s: float) -> None:
        self.recorder.add(self.gang.poll(timeout_s))

    def _poll_until(self, condition: Callable[[], object], within_s: float) -> bool:
        return poll_until(condition, time.monotonic() + within_s, self._poll)

    def _ended_early(self) -> Outcome | None:
        """End the execution if it must end now, and return its outcome. Return None if the execution goes on."""
        if self.interrupts.seen:
            running = self.execution.running if self.gang.up else []
            return Outcome("interrupted", describe.interrupted(len(running), self._end_early(), warm=self.warm))
        if self.execution.failed_rank is not None:
            return self._failed(self.execution.failed_rank)
        if time.monotonic() > self.deadline:
            return self._timed_out()
        limit_s, moved = self.options.step_timeout_s, progress.moved_at(self.recorder.record)
        if limit_s is not None and moved and time.time() - max(moved, self._began, self._asked_at) > limit_s:
            return self._timed_out(stalled=True)
        reason = self.calls_off()
        if reason:
            self._end()
            return Outcome("called off", reason)
        return None

    def _failed(self, rank: int) -> Outcome:
        # After some faults of a GPU, a process can no longer use CUDA, so a new gang must take its place.
        usable = not any(failure.gpu and failure.gpu.is_final for failure in self.execution.failures.values())
        if self.warm and usable and rank not in self.gang.deaths and self._come_back(RETURN_GRACE_S):
            left = self._kept()
        else:
            rank = self._hear_others(rank)
            left = self._end()
        failure = self.recorder.record.ranks[rank].failure
        reason = failure.summary if failure else ""
        return Outcome("failed", reason, rank, self._results(), left)

    def _hear_others(self, rank: int) -> int:
        """Wait a moment for failures of other ranks. Then return the rank whose failure counts as the cause.

        Whether to restart depends on whether all ranks failed in the same way, and on whether a rank has died. If there
        are no restarts, or if `rank` itself has died, there is no wait.
        """
        if self.options.max_restarts and self.execution.failures[rank].is_exception:
            self._poll_until(lambda: self.interrupts.seen or not self.execution.running, OTHERS_GRACE_S)
        cause = self.execution.failed_rank
        return rank if cause is None else cause

    def _end(self) -> str:
        """End the ranks and close the gang. Return a sentence that says why a warm gang is gone; '' for a cold one."""
        self.gang.stop(signal.SIGTERM, FAILURE_GRACE_S)
        self._poll_until_gone(EVERYTHING_ENDS_S)
        return self._given_up()

    def _timed_out(self, *, stalled: bool = False) -> Outcome:
        self._ask_where()
        # Describe what the ranks were doing when the time was up, before they are stopped.
        record, limit_s = self.recorder.record, self.options.timeout_s or 0.0
        limit = f"the time limit of {describe.duration(limit_s)}"
        head, reason = f"{limit} passed", f"{limit} was reached"
        if stalled:
            head = reason = f"no rank has made a step for {describe.duration(self.options.step_timeout_s or 0.0)}"
        sentences = [describe.explain_timeout(record, head)]
        notes = [reading.notes(data_set) for data_set in reading.data_sets(record, time.time())]
        sentences += [f"Reading: {note}." for note in notes if note]
        sentences += [self._end_early()]
        explanation = "\n\n".join(filter(None, sentences))
        return Outcome("timed out", reason, results=self._results(), explanation=explanation, stalled=stalled)

    def _end_early(self) -> str:
        """Interrupt the ranks. Then close the gang, unless it is warm and all ranks have responded in time.

        Return a sentence that says what is left of a warm gang; '' for a cold one.
        """
        back = self.gang.up and self._come_back(RETURN_GRACE_S if self.warm else INTERRUPT_GRACE_S)
        if self.warm and back:
            return self._kept()
        if back:
            self._let_go(INTERRUPT_GRACE_S)
        return self._given_up()

    def _come_back(self, grace_s: float) -> bool:
        """Interrupt the ranks. Return whether all of them stopped running the request in time, and none died.

        If the user interrupts once more, the wait ends after INTERRUPT_GRACE_S.
        """
        began = time.monotonic()
        self.interrupts.seen = False

        def over() -> bool:
            impatient = self.interrupts.seen and time.monotonic() - began > INTERRUPT_GRACE_S
            return impatient or bool(self.gang.deaths) or not self.execution.running

        def over_within(seconds: float) -> bool:
            """Poll until over() is true. Return False if it is not, `seconds` after the last report of an import."""
            since = began
            while not poll_until(over, since + seconds, self._poll, every_s=POLL_S / 2):
                reported = self.execution.importing.values() if self.warm else ()
                last = min(max(reported, default=began), began + IMPORTS_GRACE_S)
                if last <= since:
                    return False
                self._tell_of_imports()
                since = last
            return True

        self.gang.interrupt()
        for after_s, step in ((RELEASE_AFTER_S, self.gang.release), (REPEAT_AFTER_S, self.gang.interrupt)):
            if self.warm and after_s < grace_s and not over_within(after_s):
                step()
        over_within(grace_s)
        return not (self.execution.running or self.gang.deaths)

    def _tell_of_imports(self) -> None:
        ranks = [rank for rank in self.execution.running if rank in self.execution.importing]
        if ranks and not any(notice.until == "ended" for notice in self.recorder.record.notices):
            self.recorder.notice(describe.waiting_for_imports(ranks), until="ended")

    def _kept(self) -> str:
        return describe.gang_kept(released=self.execution.collectives_ended)

    def _given_up(self) -> str:
        """Close the gang. Return a sentence that says what this means for a warm gang; '' for a cold one."""
        stuck = self.execution.running
        if self.execution.request.timeline:
            # The members send the rest of a timeline when the ranks have exited. close() would not wait for it.
            self.gang.stop(signal.SIGKILL, 0.0)
            self._poll_until_gone(EVERYTHING_ENDS_S)
        self.gang.close()
        self._poll(0.0)
        return describe.gang_gone(list(self.gang.deaths), stuck) if self.warm else ""

    def _let_go(self, grace_s: float) -> None:
        """Ask the ranks of a cold gang to leave, and kill the ranks that have not exited after `grace_s`."""
        self.gang.leave()
        self._poll_until_gone(grace_s)
        if not self.gang.gone:
            self.recorder.notice(
                f"some ranks did not exit within {grace_s:.0f} s after the cell ended (a hanging thread or "
                "atexit function?) and were killed"
            )
        self.gang.close()

    def _poll_until_gone(self, within_s: float) -> None:
        def gone() -> bool:
            # Before the gang is up, there are no ranks to wait for, and close() ends the gang's members.
            return self.gang.gone or not self.gang.up

        self._poll_until(gone, within_s)
        self._poll_until(lambda: gone() or not self.gang.timeline_pending, math.inf)
        # When the last Exited message is read, other messages may be queued behind it: read these messages, too.
        self._poll(0.0)

    def _tell_of_a_slow_start(self) -> None:
        if not self.gang.up and time.monotonic() > self._slow_at:
            self._slow_at = math.inf
            self.recorder.notice(why_it_waits(self.gang, self.recorder.record.joined), until="up")

    def _ask_where(self) -> None:
        """Ask each rank for its stack, and wait up to STACKS_WAIT_S for the answers to be recorded."""
        asked = time.time()
        self.gang.ask_for_stacks()

        def answered() -> bool:
            running = (rank for rank in self.recorder.record.ranks if rank.state == "running")
            return all(rank.stack is not None and rank.stack.time >= asked for rank in running)

        self._poll_until(answered, STACKS_WAIT_S)

    def _answer_questions(self) -> None:
        """Pass on the answers to what the ranks ask with input(). This may wait until the user has answered."""

        def over(rank: int) -> bool:
            waits = any(asked.rank == rank for asked in self.recorder.record.questions)
            ends = self.interrupts.seen or self.execution.failed_rank is not None or time.monotonic() > self.deadline
            return ends or not waits

        record = self.recorder.record
        for rank, answer in self.questions.answers(record, self.interrupts, lambda: self._poll(POLL_S), over):
            self.gang.answer(rank, answer)
        if record.questions:
            self._asked_at = time.time()

    def _look_for_a_stall(self) -> None:
        """If the ranks have been silent for `stall_after_s` at different points of the code, report where each one is.

        A finished rank counts as being at a different point. While a rank waits for the user's input, silence is
        normal. The silence begins with the execution at the earliest: during a stream, many follow one another.
        """
        now = time.monotonic()
        if now < self._look_at or not self.gang.up:
            return
        self._look_at = now + STALL_EVERY_S
        running = self.execution.running
        heard = max((rank.last_heard for rank in self.recorder.record.ranks), default=0.0)
        heard = max(heard, self._began)
        if not running or self.recorder.record.questions or time.time() - heard < self.options.stall_after_s:
            return
        self._look_at = now + self.options.stall_after_s
        self._ask_where()
        ranks = self.recorder.record.ranks
        stacks = [stack for rank in running if (stack := ranks[rank].stack) is not None]
        # The cell's line alone is not enough: all of Keras' fit(), for example, is one line of the cell.
        places = {(stack.cell_line, collective(stack.text)) for stack in stacks}
        where = describe.explain_where(self.recorder.record)
        # A notice goes when a rank is heard, so the same one may be due again.
        standing = any(notice.text.endswith(where) for notice in self.recorder.record.notices)
        if (len(places) > 1 or len(running) < len(self.execution.ranks)) and not standing:
            silence = describe.duration(round(time.time() - heard))
            self.recorder.notice(f"the ranks have been silent for {silence}: {where}", until="heard")

    def _look_for_lone_ranks(self) -> None:
        """If every rank of the ring trains without the others, say so: once during the run, and at the end."""
        reports = self.execution.alone.values()
        makes_ring = FRAMEWORKS[self.execution.request.framework].makes_ring
        if not makes_ring or self.options.independent or len(reports) < self.gang.size:
            return
        ended = all(report.ended for report in reports)
        if self._told_of_lone_ranks != (True, ended):
            self._told_of_lone_ranks = (True, ended)
            text = describe.lone_ranks(self.gang.size, list(reports), makes_ring)
            self.recorder.notice(text, until="" if ended else "ended")

    def _look_for_unlike_weights(self) -> None:
        """If ranks have trained the same model together, but end with different weights, say so."""
        makes_ring, reports = FRAMEWORKS[self.execution.request.framework].makes_ring, self.execution.weights
        if self.options.independent or len(reports) < len(self.execution.ranks):
            return
        if text := describe.unlike_weights(reports, makes_ring):
            self.recorder.notice(text)

    def _look_for_idle_gpus(self) -> None:
        now = time.monotonic()
        if now < self._look_at_gpus:
            return
        self._look_at_gpus = now + STALL_EVERY_S
        if idle := self._idle_gpus.new(self.recorder.record, now):
            self.recorder.notice(describe.idle_gpus(idle, IDLE_S))


def why_it_waits(gang: Gang, joined: int) -> str:
    """Return a sentence that says what the start is waiting for, as far as that is known."""
    reason = gang.launcher.waits_for() if gang.launcher.one_by_one or not joined else ""
    return describe.waiting_for_ranks(joined, gang.size, reason)
