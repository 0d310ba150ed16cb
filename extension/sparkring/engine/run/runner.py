"""Executes a prepared run: on new ranks, on a warm gang, or with restarts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from sparkring.engine.run.prepare import PreparedRun
from sparkring.engine.run.questions import RankQuestions
from sparkring.engine.run.recorder import Recorder
from sparkring.engine.run.restarts import Restarts
from sparkring.engine.run.result import RunResult
from sparkring.engine.run.spec import Outcome
from sparkring.engine.run.supervisor import LiveRun, Supervisor, run_on_fresh_ranks
from sparkring.engine.run.view import explains_failures
from sparkring.errors import LaunchError, RunFailed, RunTimeout, SparkringError
from sparkring.history import describe
from sparkring.history.record import RunRecord
from sparkring.history.view import View
from sparkring.launchers import open_launcher
from sparkring.runtime.interrupts import Interrupts, interrupted
from sparkring.runtime.resume_point import Here


class Runner:
    """A prepared run that is recorded and shown. to_the_end() carries it out, and `interrupts` can stop it."""

    def __init__(self, prepared: PreparedRun, view: View, interrupts: Interrupts, questions: RankQuestions) -> None:
        self.prepared = prepared
        self.recorder = Recorder(view, prepared.started, prepared.notices)
        self.interrupts = interrupts
        self.questions = questions
        self._brief = explains_failures(view) and not prepared.options.background

    def to_the_end(self) -> RunResult:
        """Carry out the run and return its result. The result's `problems` say which values could not be returned.

        Raises RunFailed, RunTimeout, LaunchError or KeyboardInterrupt if the run does not finish.
        """
        recorder = self.recorder
        try:
            with self._directory_owned():
                outcome = self._outcome()
            for notice in outcome.results.notices:
                recorder.notice(notice)
            with self.interrupts:
                record = close(recorder, outcome)
        except BaseException as error:  # complete the record and the view, then raise the error again
            if recorder.record.outcome is None:
                message = str(error) if isinstance(error, SparkringError) else f"{type(error).__name__}: {error}"
                stopped = isinstance(error, KeyboardInterrupt)
                recorder.close("interrupted" if stopped else "failed", "" if stopped else message)
            raise
        if outcome.ending != "finished":
            raise error_of(outcome, record, brief=self._brief)
        values, pulled, lost, _ = outcome.results
        result = RunResult(values, pulled, record, tuple(map(str, lost)))
        self.prepared.on_result(result)
        return result

    def _directory_owned(self) -> AbstractContextManager[None]:
        directory = self.prepared.directory
        if directory is None:
            return nullcontext()
        from sparkring.checkpointing.owners import owned

        return owned(directory.location, self.recorder.record.run_id)

    def _outcome(self) -> Outcome:
        prepared = self.prepared
        live = LiveRun(prepared.options, self.recorder, self.interrupts, self.questions)
        if prepared.gang is None and prepared.options.survives:
            return Restarts(live, prepared.request, prepared.launch, prepared.directory).outcome()
        request = prepared.request.going_on(Here(run_id=self.recorder.record.run_id))
        if prepared.gang is None:
            launcher = open_launcher(prepared.launch, self.recorder.notice)
            with self.interrupts:
                return run_on_fresh_ranks(live, request, launcher, prepared.launch.size)
        try:
            with self.interrupts, prepared.gang.take(self.recorder, lambda: self.interrupts.seen) as gang:
                return Supervisor(live, gang, gang.submit(request, prepared.ranks), warm=True).watch()
        except LaunchError as error:
            return Outcome("not started", str(error), error=error)


def close(recorder: Recorder, outcome: Outcome) -> RunRecord:
    """Record how a run has ended."""
    lost = outcome.results.lost
    if outcome.ending == "finished":
        return recorder.close("failed" if lost else "finished", "; ".join(map(str, lost)))
    ending = outcome.ending if outcome.ending in ("interrupted", "timed out") else "failed"
    return recorder.close(ending, outcome.reason, outcome.rank)


def error_of(outcome: Outcome, record: RunRecord, *, brief: bool = False) -> BaseException:
    """Return the error that a run raises after an outcome other than "finished".

    With `brief`, IPython does not repeat what the panel above the error shows.
    """
    if outcome.error is not None:
        return outcome.error
    if outcome.ending == "interrupted":
        return interrupted(outcome.reason)
    values = outcome.results.values
    if outcome.ending == "timed out":
        return RunTimeout(outcome.explanation, record=record, values=values)
    whole, shown = (
        "\n\n".join(filter(None, [describe.explain_failure(record, brief=is_brief), outcome.explanation]))
        for is_brief in (False, brief)
    )
    return RunFailed(whole, record=record, values=values, brief=shown)
