"""Runs the cell of a stream on a warm gang. If the gang is lost, a new one takes its place and restores the state."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.capture.packages import CodeImports
from sparkring.checkpointing.entries import INITIAL, Last
from sparkring.checkpointing.stream_state import StreamState
from sparkring.data.keys import KeyedRows, shares_by_key
from sparkring.data.micro_batches import Rows, share_of
from sparkring.engine.run import warm_gang
from sparkring.engine.run.past_cells import PastCells
from sparkring.engine.run.questions import RankQuestions
from sparkring.engine.run.recorder import Recorder
from sparkring.engine.run.spec import Outcome, seed_of
from sparkring.engine.run.supervisor import LiveRun, Supervisor
from sparkring.engine.run.warm_gang import WarmGang
from sparkring.engine.stream.options import StreamOptions
from sparkring.errors import CheckpointError, LaunchError
from sparkring.gangs.execution import Request, cause_priority
from sparkring.history import describe, events
from sparkring.history.events import Failure
from sparkring.runtime.interrupts import Interrupts
from sparkring.runtime.resume_point import Here
from sparkring.wire import messages
from sparkring.worker.rank.batches import Begin, Begun, Save, Train, Trained

if TYPE_CHECKING:
    from sparkring.checkpointing.directory import CheckpointDirectory


HELD_AFTER_S = 2.0  # when another cell has held the ranks for this long, the user is told


class RingEnded(Exception):
    """The ranks could not train on a micro-batch. The `outcome` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class RingLost(RingEnded):
    """The ranks have been lost, and with them the state."""


class StreamWork(NamedTuple):
    """What the ranks run: the cell as a Work, the packages that its values need, the names of the values that are sent
    with it, the names that it needs from earlier cells, the notebook's names of modules with these modules' names,
    the user's own modules, and the modules that the code imports.
    """

    work: messages.Work
    modules: frozenset[str]
    sent: tuple[str, ...]
    needed: frozenset[str]
    names: Mapping[str, str]
    own_modules: messages.ModuleFiles | None = None
    code_imports: CodeImports = CodeImports()


class StreamRecorder(Recorder):
    """A recorder that shows ranks as running from the beginning of the stream to its end, not only during a batch."""

    def add(self, news: Iterable[events.Event]) -> None:
        super().add([event for event in news if self._counts(event)])

    def finish_ranks(self) -> None:
        """Record that the ranks have come to the end of the stream."""
        super().add([events.RankFinished(time.time(), rank.rank, "") for rank in self.record.ranks])

    def _counts(self, event: events.Event) -> bool:
        if isinstance(event, events.RankStarted):
            return self.record.ranks[event.rank].pid != event.pid or self.record.ranks[event.rank].state != "running"
        return not isinstance(event, events.RankFinished | events.RankStopped)


class Ring:
    """The ranks on which a stream trains.

    begin() restores the state, and train() trains on a micro-batch; both raise RingLost if ranks have been lost, and
    RingEnded if the cell fails or the user ends the batch. After RingLost, replace() starts new ranks and restores the
    last checkpoint. `ending` tells whether the user has asked to end the stream; a second request also ends the current
    batch.
    """

    def __init__(
        self,
        gang: WarmGang,
        work: StreamWork,
        options: StreamOptions,
        recorder: StreamRecorder,
        directory: CheckpointDirectory | None,
        ending: StreamEnding,
    ) -> None:
        self._gang = gang
        self._work = work
        self._options = options
        self._recorder = recorder
        self._directory = directory
        self._ending = ending
        self._here = Here(run_id=recorder.record.run_id)
        gang.stream = recorder.record.run_id  # at once, so that the gang is not given to another stream
        self._past: PastCells = gang.past
        self._attempt = 0
        self._sharded = options.sharded or bool(options.by)  # each key belongs to one rank
        self.state: tuple[str, ...] = ()
        self.others_s = 0.0  # how long other cells have held the ranks while this ring wanted them

    def begin(self, described: str) -> Begun:
        """Begin on the ranks that are up: choose the state, and restore the last checkpoint that is not damaged.

        If there is no checkpoint, save the initial state. If the cell then fails before the next checkpoint, a later
        run can begin with it, in place of weights that some of the batches have changed. Raises CheckpointError if all
        checkpoints are damaged.
        """
        if self._directory is None:
            return self._begin(described, Last())
        last = self._directory.last(self._recorder.record)
        while True:
            record = self._recorder.record
            self._here = self._directory.here(record, last)
            self._attempt += 1
            started = events.AttemptStarted(time.time(), self._attempt, record.size, last.name, last.step)
            self._recorder.add([started])
            try:
                return self._begin(described, last)
            except RingEnded as error:
                damaged = [
                    checkpoint.saved.name
                    for checkpoint in self._recorder.record.checkpoints
                    if checkpoint.state == "damaged"
                ]
                if isinstance(error, RingLost) or last.name not in damaged:
                    raise
                outcome = error.outcome
            self._recorder.add([events.AttemptEnded(time.time(), self._attempt, outcome.reason, outcome.rank)])
            last = self._directory.last(self._recorder.record)
            if not last.name:
                raise CheckpointError(
                    f"all checkpoints in {self._options.checkpoint_dir} are damaged: restore their files, or rerun "
                    "the cells that define the state and then run the stream's cell with --fresh."
                )

    def _begin(self, described: str, last: Last) -> Begun:
        options = self._options
        state = StreamState(
            options.state,
            options.keep,
            sharded=self._sharded,
            saves=self._directory is not None,
            by=options.by,
        )
        answers = self._execute(_packed(Begin(state, options.arrow, keyed=bool(options.by))), {}, 0)
        begun: Begun = answers[0]
        unlike = [rank for rank, answer in answers.items() if answer.state != begun.state]
        if unlike:
            raise CheckpointError(
                f"the state of rank 0 is {', '.join(begun.state)}, but that of rank {unlike[0]} is "
                f"{', '.join(answers[unlike[0]].state)}: name the variables to save, as in --state model,optimizer."
            )
        if self._directory is not None and not last.name:
            self.save(INITIAL, "")
        self.state = begun.state
        saved = begun.restored if begun.restored >= 0 else None
        self._recorder.add([events.StreamBegan(time.time(), described, begun.state, saved, options.save_every)])
        return begun

    def train(self, batch_id: int, part: int, rows: Rows, position: str, *, save: bool) -> tuple[Trained, float]:
        """Train on a part of a micro-batch. Return the longest times of the ranks, and the time for sending, in s.

        If each rank saves a state of its own, they save when all of them have trained. Rank 0 waits for the files of
        the others, so otherwise it would have to wait, and would be shown as saving, while a slower rank is training.
        """
        began, held_s = time.perf_counter(), self.others_s
        size, nulls = self._gang.gang.size, rows.with_nulls()
        by = self._options.by
        shares: Sequence[Rows | KeyedRows] = (
            shares_by_key(rows, by, size) if by else [share_of(rows, size, rank) for rank in range(size)]
        )
        at_once = save and not self._sharded
        parts = {rank: _packed(Train(batch_id, share, nulls, position, at_once)) for rank, share in enumerate(shares)}
        longest = _longest(self._execute((), parts, seed_of(seed_of(self._options.seed, batch_id), part)))
        sending_s = max(0.0, time.perf_counter() - began - (self.others_s - held_s) - sum(longest))
        if save and self._sharded:
            longest = longest._replace(saving_s=self.save(batch_id, position))
        return longest, sending_s

    def save(self, batch_id: int, position: str) -> float:
        """Save the state after the micro-batch `batch_id`. Return the longest time that a rank took, in seconds."""
        return _longest(self._execute(_packed(Save(batch_id, position)), {}, 0)).saving_s

    def replace(self, lost: RingLost, described: str) -> Begun:
        """Start a new gang in place of the one that was lost, run the cells that the stream needs, and begin again.

        Raises RingLost if the new ranks are lost, too.
        """
        recorder = self._recorder
        recorder.add([events.AttemptEnded(time.time(), self._attempt, lost.outcome.reason, lost.outcome.rank)])
        missing = [cell for cell in self._past.that_define(self._work.needed, self._work.names) if cell.request is None]
        if missing:
            raise RingEnded(
                replace(
                    lost.outcome,
                    explanation="The stream cannot continue by itself, because the values that were sent with the cell "
                    f"`{missing[0].title}` were too large to keep: run that cell and the stream's cell again.",
                )
            )
        try:
            gang = warm_gang.find(self._gang.wanted.np, recorder.notice, self._gang.wanted.place)
        except LaunchError as error:
            raise RingLost(Outcome("not started", str(error), error=error)) from error
        if gang is None:
            raise RingEnded(lost.outcome)  # another thread has already started a gang, and uses it
        self._gang.stream = ""
        self._gang = gang
        self._gang.stream = recorder.record.run_id
        self._gang.news.clear()  # the record already says why there are new ranks
        for cell in self._past.that_define(self._work.needed, self._work.names):
            assert cell.request is not None
            recorder.notice(f"running a cell again on the new ranks: {describe.first_line(cell.title)}", until="ended")
            request = cell.request.going_on(Here(run_id=recorder.record.run_id))
            self._outcome(request, cell.ranks)
        if gang.past is not self._past:
            gang.past = self._past  # for the next replacement; it already has the cells that ran just now
        return self.begin(described)

    def leave(self) -> None:
        """Let go of the gang, which stays up."""
        self._gang.stream = ""

    def _execute(self, parts: messages.Buffers, of_ranks: Mapping[int, messages.Buffers], seed: int) -> dict[int, Any]:
        """Run an order on all ranks, and return their answers."""
        work = self._work
        parts = parts or next(iter(of_ranks.values()))
        run = messages.Run(messages.NextBatch(seed), checkpoints=self._here, parts=parts)
        framework = self._gang.wanted.framework
        request = Request(run, framework, work.modules, work.sent, work=work.work, parts=of_ranks)
        return self._outcome(
            request._replace(own_modules=work.own_modules, code_imports=work.code_imports)
        ).results.values

    def _outcome(self, request: Request, ranks: tuple[int, ...] = ()) -> Outcome:
        ending = self._ending
        live = LiveRun(self._options.of_run, self._recorder, ending.of_batch, RankQuestions(nobody=True))
        live = live._replace(calls_off=ending.look)
        began, is_reserved = time.perf_counter(), self._gang.is_reserved
        is_noted = False

        def given_up() -> bool:
            nonlocal is_noted
            if not is_noted and time.perf_counter() > began + HELD_AFTER_S:
                is_noted = True
                self._recorder.notice("another cell uses the ranks: the stream goes on when that cell ends", "heard")
            return ending.of_batch.seen

        try:
            with self._gang.take(self._recorder, given_up) as gang:
                self.others_s += time.perf_counter() - began if is_reserved else 0.0
                outcome = Supervisor(live, gang, gang.submit(request, ranks), warm=True).watch()
        except LaunchError as error:
            if self._gang.lost and self._gang.gang.deaths:
                raise RingLost(self._deaths(self._gang.gang.deaths)) from error
            stopped = self._gang.ended and not self._gang.lost  # by the user
            kind = RingEnded if stopped else RingLost
            raise kind(Outcome("not started", self._gang.ended or str(error), error=error)) from error
        if outcome.ending == "finished":
            return outcome
        raise RingLost(outcome) if self._gang.ended and outcome.ending == "failed" else RingEnded(outcome)

    def _deaths(self, deaths: Mapping[int, Failure]) -> Outcome:
        """Record that ranks have died between two micro-batches, as if they had died during one."""
        self._recorder.add([events.RankFailed(time.time(), rank, failure) for rank, failure in deaths.items()])
        rank = min(deaths, key=lambda rank: cause_priority(deaths[rank]))
        return Outcome("failed", deaths[rank].summary, rank)


class StreamEnding:
    """Whether the user wants to end the stream.

    The first request ends the stream after the current micro-batch, and the second one ends the micro-batch, too.
    """

    def __init__(self, asked: Interrupts, recorder: Recorder) -> None:
        self.of_batch = Interrupts()
        self.asked = False
        self._requests = asked
        self._recorder = recorder

    def look(self) -> str:
        """Look for a new request. Return '', which means that the batch goes on."""
        if self._requests.seen:
            self._requests.seen = False
            if self.asked:
                self.of_batch.request()
            else:
                self._recorder.notice(
                    "the stream will end after the current batch; press Stop again to end the batch, too", "ended"
                )
            self.asked = True
        return ""

    def __call__(self) -> bool:
        self.look()
        return self.asked


def _longest(answers: Mapping[int, Trained]) -> Trained:
    return Trained(*(max(times) for times in zip(*answers.values(), strict=True)))


def _packed(order: Begin | Train | Save) -> messages.Buffers:
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(order, protocol=5, buffer_callback=buffers.append)
    return (payload, *(buffer.raw() for buffer in buffers))
