"""Drives one turn of a gang to its end, in whichever way it ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from sparkring.engine.options import Options
from sparkring.engine.recorder import Recorder
from sparkring.engine.result import RunResult, bring_back
from sparkring.errors import RunFailed, RunTimeout
from sparkring.gangs.execution import Execution
from sparkring.gangs.gang import Gang
from sparkring.history import describe, reading
from sparkring.history.stacks import collective
from sparkring.runtime.interrupts import Interrupts, interrupted

POLL_S = 0.1
STACKS_WAIT_S = 1.0
FAILURE_GRACE_S = 0.1
OTHERS_GRACE_S = 1.0  # the wait for other ranks' failures after an exception, which decide on a restart
INTERRUPT_GRACE_S = 1.0
RETURN_GRACE_S = 4.0  # what a warm gang's ranks get to come back from an interrupt, before the gang is given up
RELEASE_AFTER_S = 0.5  # a rank that has not come back by then may be waiting in a collective
REPEAT_AFTER_S = 2.0  # or it has lost its interrupt, to a callback or to the first moment of its cell
LEAVE_GRACE_S = 10.0
EVERYTHING_ENDS_S = 5.0  # beyond this, close() ends the rest by force
STALL_EVERY_S = 1.0


class TurnLost(Exception):
    """A turn has ended before its time: `rank` failed, or, if that is None, it was called off for `reason`.

    `left` says what is left of a warm gang; `values` are those of the ranks that had finished.
    """

    def __init__(self, rank: int | None, reason: str, left: str, values: dict[int, Any]) -> None:
        super().__init__(reason)
        self.rank = rank
        self.reason = reason
        self.left = left
        self.values = values


def fail(recorder: Recorder, lost: TurnLost) -> NoReturn:
    """End the run with the turn that was lost, and raise RunFailed."""
    done = recorder.close("failed", lost.reason, lost.rank)
    raise RunFailed(
        "\n\n".join(filter(None, [describe.explain_failure(done), lost.left])), record=done, values=lost.values
    )


class Drive:
    """Watches one turn until it is over.

    `warm` says that the gang outlives its turns. It does unless a rank died, or did not come back when the turn was
    to end: then the gang is closed, as a cold one is at any end. `began` is what the time limit counts from.
    `calls_off` is asked now and then whether the turn is to be called off, and says why.
    """

    def __init__(
        self,
        gang: Gang,
        turn: Execution,
        recorder: Recorder,
        options: Options,
        interrupts: Interrupts,
        *,
        warm: bool,
        began: float | None = None,
        calls_off: Callable[[], str] = str,
    ) -> None:
        self.gang = gang
        self.turn = turn
        self.recorder = recorder
        self.options = options
        self.interrupts = interrupts
        self.warm = warm
        self.began = time.monotonic() if began is None else began
        self.calls_off = calls_off
        self._released = False
        self._look_at = 0.0
        self._told = ""

    def to_the_end(self) -> RunResult:
        """TurnLost, RunTimeout, LaunchError or KeyboardInterrupt if it does not end well."""
        began, slow_told = time.monotonic(), False
        while not self.turn.done:
            self.recorder.add(self.gang.poll(POLL_S))
            now = time.monotonic()
            if self.interrupts.seen:
                self._interrupted()
            if self.turn.failed_rank is not None:
                self._failed(self.turn.failed_rank)
            if self.options.timeout_s is not None and now - self.began > self.options.timeout_s:
                self._timed_out(self.options.timeout_s)
            if not self.gang.up and not slow_told and now - began > self.gang.launcher.slow_after_s:
                slow_told = True
                self.recorder.notice(what_it_waits_for(self.gang, self.recorder.record.joined), until="up")
            self._look_for_a_stall()
            reason = self.calls_off()
            if reason:
                raise TurnLost(None, reason, self._ended(), {})
        return self._finished()

    # ── ends ──────────────────────────────────────────────────────────────────

    def _finished(self) -> RunResult:
        if not self.warm:
            self._let_go(LEAVE_GRACE_S)
        values, pulled, problems = bring_back(self.turn)
        done = self.recorder.close("failed" if problems else "finished", "; ".join(problems))
        return RunResult(values, pulled, done, tuple(problems))

    def _failed(self, rank: int) -> NoReturn:
        if self.warm and rank not in self.gang.deaths and self._come_back(RETURN_GRACE_S):
            left = self._kept()
        else:
            rank = self._hear_others(rank)
            left = self._ended()
        values, _, _ = bring_back(self.turn)
        failure = self.recorder.record.ranks[rank].failure
        raise TurnLost(rank, failure.summary if failure else "", left, values)

    def _hear_others(self, rank: int) -> int:
        """Wait for a moment for failures of other ranks; returns the rank whose failure is the cause.

        These failures decide on a restart: whether all ranks failed in the same way, and whether one has died.
        """
        failure = self.turn.failures[rank]
        if self.options.max_restarts and failure.is_exception:
            until = time.monotonic() + OTHERS_GRACE_S
            while self.turn.running and not self.interrupts.seen and time.monotonic() < until:
                self.recorder.add(self.gang.poll(POLL_S))
        found = self.turn.failed_rank
        return rank if found is None else found

    def _ended(self) -> str:
        """End the ranks, and the gang."""
        self.gang.stop(signal.SIGTERM, FAILURE_GRACE_S)
        self._until_gone(EVERYTHING_ENDS_S)
        return self._given_up()

    def _interrupted(self) -> NoReturn:
        running = self.turn.running if self.gang.up else []
        left = self._end_early()
        verb = "stopped" if self.warm else "ended"
        message = f"{describe.rank_count(len(running))} {verb}" if running else "before the ranks were up"
        self.recorder.close("interrupted", f"{message}. {left}" if left else message)
        raise interrupted(self.recorder.record.message)

    def _timed_out(self, timeout_s: float) -> NoReturn:
        self._ask_where()
        # What they were doing when the time was up, before they are stopped.
        message = describe.explain_timeout(self.recorder.record, timeout_s)
        told = [reading.notes(found) for found in reading.data_sets(self.recorder.record, time.time())]
        message = "\n\n".join([message, *(f"Reading: {note}." for note in told if note)])
        left = self._end_early()
        values, _, _ = bring_back(self.turn)
        done = self.recorder.close("timed out", f"the limit of {describe.duration(timeout_s)} passed")
        raise RunTimeout(message + (left and f"\n\n{left}"), record=done, values=values)

    def _end_early(self) -> str:
        """Interrupt the ranks; the gang ends unless it is warm and they come back. Says what is left of a warm one."""
        back = self.gang.up and self._come_back(RETURN_GRACE_S if self.warm else INTERRUPT_GRACE_S)
        if self.warm and back:
            return self._kept()
        if back:
            self._let_go(INTERRUPT_GRACE_S)
        return self._given_up()

    def _come_back(self, grace_s: float) -> bool:
        """Interrupt what the ranks do; False if some did not come back in time, or died."""
        began, repeated = time.monotonic(), False
        self.interrupts.seen = False
        self.gang.interrupt()
        while self.turn.running and not self.gang.deaths:
            self.recorder.add(self.gang.poll(POLL_S / 2))
            waited_s = time.monotonic() - began
            if waited_s > grace_s or (self.interrupts.seen and waited_s > INTERRUPT_GRACE_S):
                break
            if self.warm and not self._released and waited_s > RELEASE_AFTER_S:
                self._released = True
                self.gang.release()
            if self.warm and not repeated and waited_s > REPEAT_AFTER_S:
                repeated = True
                self.gang.interrupt()
        return not (self.turn.running or self.gang.deaths)

    def _kept(self) -> str:
        kept = "The gang goes on: its ranks keep what the cells have bound."
        if self._released:
            kept += " To free them, their collectives were ended: call hvd.init() or init_process_group() again."
        return kept

    def _given_up(self) -> str:
        """Close the gang; says what that means if it was a warm one."""
        stuck = self.turn.running
        if self.turn.request.timeline:  # what close() makes haste with is not kept
            self.gang.stop(signal.SIGKILL, 0.0)
            self._until_gone(EVERYTHING_ENDS_S)
        self.gang.close()
        self.recorder.add(self.gang.poll(0.0))
        if not self.warm:
            return ""
        if self.gang.deaths:
            why = f"{describe.rank_list(self.gang.deaths)} died"
        else:
            why = f"{describe.rank_list(stuck)} did not come back" if stuck else "it could not go on"
        return (
            f"The gang is gone, and with it what the cells had bound on its ranks ({why}). "
            "The next cell starts a fresh one."
        )

    def _let_go(self, grace_s: float) -> None:
        """Let the ranks of a cold gang end by themselves, and kill those that have not by then."""
        self.gang.leave()
        self._until_gone(grace_s)
        if not self.gang.gone:
            self.recorder.notice(
                f"some ranks did not end within {grace_s:.0f} s after the cell (a thread or an atexit "
                "function that hangs?) and were killed"
            )
        self.gang.close()

    def _until_gone(self, most_s: float) -> None:
        deadline = time.monotonic() + most_s
        # Members that have not become ranks yet are close()'s affair.
        while self.gang.up and not self.gang.gone and (time.monotonic() < deadline or self.gang.timeline_pending):
            self.recorder.add(self.gang.poll(POLL_S))
        # Frames that were already in the queue behind the last goodbye.
        self.recorder.add(self.gang.poll(0.0))

    # ── where the ranks are ───────────────────────────────────────────────────

    def _ask_where(self) -> None:
        """Have the record say where each rank stands."""
        asked = time.time()
        self.gang.ask_for_stacks()
        until = time.monotonic() + STACKS_WAIT_S
        while time.monotonic() < until and any(
            rank.state == "running" and (rank.stack is None or rank.stack.time < asked)
            for rank in self.recorder.record.ranks
        ):
            self.recorder.add(self.gang.poll(POLL_S))

    def _look_for_a_stall(self) -> None:
        """Tell where the ranks are when those that still run have long been silent, and others are elsewhere."""
        now = time.monotonic()
        if now < self._look_at or not self.gang.up:
            return
        self._look_at = now + STALL_EVERY_S
        running = self.turn.running
        heard = max((rank.last_heard for rank in self.recorder.record.ranks), default=0.0)
        if not running or time.time() - heard < self.options.stall_s:
            return
        self._look_at = now + self.options.stall_s
        self._ask_where()
        ranks = self.recorder.record.ranks
        stacks = [stack for rank in running if (stack := ranks[rank].stack) is not None]
        # All of Keras' fit is one line of the cell.
        places = {(stack.cell_line, collective(stack.text)) for stack in stacks}
        where = describe.explain_where(self.recorder.record)
        if (len(places) > 1 or len(running) < len(self.turn.ranks)) and where != self._told:
            self._told = where
            silence = describe.duration(round(time.time() - heard))
            self.recorder.notice(f"nothing heard for {silence}: {where}", until="heard")


def what_it_waits_for(gang: Gang, joined: int) -> str:
    """Why a start takes long, as far as that can be told."""
    reason = gang.launcher.waits_for() if not joined else ""
    return f"waiting for ranks to start: {joined} of {gang.size} have dialled home" + (reason and f" ({reason})")
