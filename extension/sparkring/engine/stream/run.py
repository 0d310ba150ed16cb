"""Prepares and carries out one run that trains on a stream, from its spec to its result."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import time
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.capture import notebook_state
from sparkring.capture.names import names_read
from sparkring.capture.versions import modules_of
from sparkring.checkpointing.compatibility import unnoticed
from sparkring.checkpointing.owners import owned
from sparkring.data.micro_batches import parts_of
from sparkring.engine.run.background import BackgroundRun
from sparkring.engine.run.polling import poll_until
from sparkring.engine.run.prepare import (
    Uses,
    capture_cell,
    check_directory,
    code_notices,
    own_modules_for,
    run_started,
    used_by,
    uses_of,
    validate,
)
from sparkring.engine.run.restarts import LONGEST_PAUSE_S, PAUSE_S
from sparkring.engine.run.runner import close, error_of
from sparkring.engine.run.spec import Cell, Outcome, RunSpec
from sparkring.engine.run.view import view_of
from sparkring.engine.run.warm_gang import WarmGang
from sparkring.engine.stream.options import StreamOptions
from sparkring.engine.stream.ring import Ring, RingEnded, RingLost, StreamEnding, StreamRecorder, StreamWork
from sparkring.engine.stream.sources import IteratorSource, MicroBatch, StreamSource
from sparkring.errors import DataError, OptionsError, SparkringError
from sparkring.history import describe, events
from sparkring.history.record import RunRecord
from sparkring.history.view import Controls, View
from sparkring.runtime.interrupts import Interrupts
from sparkring.runtime.storage import root_for_ranks
from sparkring.wire import messages
from sparkring.worker.rank.batches import BOUND, Begun

if TYPE_CHECKING:
    from sparkring.checkpointing.directory import CheckpointDirectory


class StreamSpec(NamedTuple):
    """A cell to run for each micro-batch of `stream`, on the ranks of `gang`.

    `stream` is an iterable or a streaming DataFrame, and `called` is what the user wrote for it. `title` and `code`
    have the same meanings as in RunSpec.
    """

    cell: Cell
    stream: Any
    called: str
    gang: WarmGang
    options: StreamOptions
    title: str
    code: str


class PreparedStream(NamedTuple):
    """A validated run that has not started."""

    spec: StreamSpec
    work: StreamWork
    source: StreamSource
    started: events.RunStarted
    notices: tuple[str, ...]
    directory: CheckpointDirectory | None


@dataclass(eq=False, repr=False)
class StreamResult:
    """The result of a run on a stream that has ended.

    `batches` and `rows` are how many micro-batches and rows the ranks have trained on. `saved` is the last micro-batch
    whose effect is in a checkpoint; None without checkpoints. `record` is the RunRecord.
    """

    record: RunRecord
    batches: int
    rows: int
    saved: int | None

    def __repr__(self) -> str:
        rows = describe.counted(self.rows, "row")
        return f"StreamResult({describe.counted(self.batches, 'batch')}, {rows}, saved={self.saved})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def start_stream(spec: StreamSpec) -> BackgroundRun[StreamResult]:
    """Start training on a stream in a thread. Errors that can be found before the first batch are raised at once."""
    prepared, interrupts = prepare(spec), Interrupts()
    run = StreamRun(prepared, view_of(spec.options, Controls(interrupts.request)), interrupts)
    directory = prepared.directory
    return BackgroundRun(
        run.to_the_end, run.recorder, run.interrupts, None if directory is None else directory.location
    )


def prepare(spec: StreamSpec) -> PreparedStream:
    """Look up, check and pack what the stream needs.

    Raises CaptureError if something that the cell reads is missing or cannot be sent, DataError if the stream is of a
    kind that cannot be used, CheckpointError if the run cannot continue from its checkpoint, and OptionsError if the
    gang already has a stream.
    """
    options, gang, cell = spec.options, spec.gang, spec.cell
    if gang.stream:
        raise OptionsError(
            f"the {gang.describe()} is already training on a stream: stop that stream with `%runs --stop "
            f"{gang.stream}`, or wait for its end."
        )
    run_spec = RunSpec(cell, options.of_run, gang.wanted.framework, spec.title, spec.code, gang, bound=BOUND)
    captured = capture_cell(run_spec, cell)
    values = [(name.name, cell.namespace.get(name.name)) for name in captured.names]
    validate(values, cell.source, gang.gang.size)
    work = messages.Work(
        messages.StreamCode(cell.source, tuple(cell.scripts)),
        options.autolog,
        {**root_for_ranks(), **dict(gang.wanted.env), **dict(options.env)},
        notebook_state.gather(),
        tuple(map(bytes, (captured.payload, *captured.buffers))),  # copies, which the notebook cannot change
    )
    read = names_read(cell.source)
    needed = {*read.required, *read.optional}.difference(captured.sent, BOUND)
    needed |= captured.uses
    needed.update(name for name in gang.held.names if name in options.state)
    modules = modules_of(cell.namespace[name] for name in captured.sent)
    directory, uses = None, Uses()
    if options.checkpoint_dir:
        check_directory(options.checkpoint_dir)
        from sparkring.checkpointing.directory import open_directory

        size = None if options.by else gang.gang.size  # the states of keys can be divided among any number of ranks
        # What the cell binds is part of the state, which the ranks restore.
        state = {*captured.binds, *options.state}
        used = used_by(cell, captured, gang)
        uses = uses_of({name: value for name, value in used.items() if name not in state}, cell.namespace)
        directory = open_directory(
            options.checkpoint_dir, size, spec.code, {}, uses.parts, fresh=options.fresh, resume=options.resume
        )
    source = _source(spec, directory)
    source.check(_saved(directory))
    own = own_modules_for(gang.wanted.place, cell, modules)
    started = run_started(
        options, spec.title, spec.code, gang.gang.size, gang.wanted.framework, (*captured.table, *own.table)
    )._replace(warm=True)
    notices = [describe.large_value(name.name, name.size_bytes or 0) for name in captured.large]
    notices += [unnoticed(uses.incomparable)] if uses.incomparable else []
    names = _module_names(cell.namespace)
    return PreparedStream(
        spec,
        StreamWork(work, modules, tuple(captured.sent), frozenset(needed), names, own.files, own.imports),
        source,
        started,
        (*notices, *gang.held.notices, *code_notices(cell, captured.sent, work.parts), *own.notices),
        directory,
    )


def _module_names(namespace: Mapping[str, Any]) -> dict[str, str]:
    return {name: value.__name__ for name, value in namespace.items() if isinstance(value, types.ModuleType)}


def _source(spec: StreamSpec, directory: CheckpointDirectory | None) -> StreamSource:
    stream = spec.stream
    roots = {(base.__module__.partition(".")[0], base.__name__) for base in type(stream).__mro__}
    if ("pyspark", "DataFrame") in roots:
        from sparkring.engine.stream.spark_source import SparkSource  # imports pyarrow and pyspark

        return SparkSource(stream, spec.called, spec.options, directory)
    if isinstance(stream, dict | str | bytes | os.PathLike) or not isinstance(stream, Iterable):
        raise DataError(
            f"%%stream: `{spec.called}` is a `{type(stream).__name__}`: use a streaming DataFrame, an iterable of "
            "batches, or sparkring.watch('folder/*.parquet')."
        )
    return IteratorSource(stream, spec.called, spec.options)


def _saved(directory: CheckpointDirectory | None) -> int:
    """Return the number of the last micro-batch whose effect is in the checkpoint to continue from; -1 if none is."""
    return -1 if directory is None or directory.first is None else directory.first.step


class StreamRun:
    """A prepared run that is recorded and shown. to_the_end() carries it out, and `interrupts` can end it."""

    def __init__(self, prepared: PreparedStream, view: View, interrupts: Interrupts) -> None:
        self.prepared = prepared
        self.interrupts = interrupts
        self.recorder = StreamRecorder(view, prepared.started, prepared.notices)
        self._options = prepared.spec.options
        self._ending = StreamEnding(interrupts, self.recorder)
        self._ring = Ring(
            prepared.spec.gang, prepared.work, self._options, self.recorder, prepared.directory, self._ending
        )
        self._done = self._saved = _saved(prepared.directory)
        self._unsaved: list[MicroBatch] = []  # the micro-batches that would have to be used again
        self._kinds: dict[str, str] = {}
        self._replaced = 0  # how often ranks have been replaced since the last checkpoint

    def to_the_end(self) -> StreamResult:
        """Train until the stream ends or the user ends it. Return the result.

        Raises RunFailed, LaunchError, DataError, CheckpointError or KeyboardInterrupt if the run does not end well.
        """
        prepared, recorder = self.prepared, self.recorder
        ends, owning = self._end_at_exit, contextlib.ExitStack()
        atexit.register(ends)
        try:
            try:
                if prepared.directory is not None and (words := prepared.directory.words(time.time())):
                    recorder.notice(words)
                if prepared.directory is not None:
                    owning.enter_context(owned(prepared.directory.location, recorder.record.run_id))
                begun: Begun = self._surviving(lambda: self._ring.begin(prepared.source.described))
                if begun.restored < self._done:  # newer checkpoints are damaged
                    prepared.source.check(begun.restored)
                self._done = self._saved = begun.restored
                prepared.source.run(self._done, begun.position, self._train, self._ending, recorder.notice)
                self._save_the_rest()
            finally:  # before the view shows the end, since the user may then run the cell again
                self._ring.leave()
                owning.close()
        except RingEnded as error:
            record = close(recorder, error.outcome)
            raise error_of(self._explained(error.outcome), record) from None
        except BaseException as error:  # complete the record and the view, then raise the error again
            stopped = isinstance(error, KeyboardInterrupt)
            message = str(error) if isinstance(error, SparkringError) else f"{type(error).__name__}: {error}"
            recorder.close("interrupted" if stopped else "failed", "" if stopped else message)
            raise
        finally:
            atexit.unregister(ends)
        stream = recorder.record.stream
        assert stream is not None
        recorder.finish_ranks()
        how = "stopped" if self._ending.asked else ""
        record = recorder.close("finished", describe.dotted(describe.stream_total(recorder.record), how))
        return StreamResult(record, stream.batches, stream.rows, stream.saved)

    def _explained(self, outcome: Outcome) -> Outcome:
        """Return the outcome with a sentence that says how the stream can be continued."""
        if not self._options.checkpoint_dir:
            more = "The weights are lost. With --checkpoint-dir, new ranks would continue from the last checkpoint."
            more = more if self.prepared.spec.gang.ended else ""
        elif self._saved < 0 and not self._ring.state:
            more = f"No checkpoint has been saved in {self._options.checkpoint_dir} yet."
        else:
            which = f"after batch {self._saved}" if self._saved >= 0 else "before the first batch"
            more = f"The state {which} is saved in {self._options.checkpoint_dir}"
            # If the run did not even begin, the same cell would fail again.
            more += ": run the cell again to continue from there." if self._ring.state else "."
        return replace(outcome, explanation="\n\n".join(filter(None, [outcome.explanation, more])))

    def _end_at_exit(self) -> None:
        """End the stream when the process exits, before the gang is ended."""
        self.interrupts.request()

    def _save_the_rest(self) -> None:
        """Save the state at the end of the stream, if micro-batches have been trained since the last checkpoint."""
        if self._unsaved:
            last = self._unsaved[-1]
            self._surviving(lambda: self._ring.save(last.batch_id, last.position), last)
            self._saved = last.batch_id
            self.prepared.source.forget(last.batch_id)

    # ── one micro-batch ───────────────────────────────────────────────────────

    def _train(self, batch: MicroBatch) -> None:
        """Train on a micro-batch, and save the state if it is time. The source calls this for each micro-batch."""
        if batch.batch_id <= self._done:
            self._ended(batch, "passed over")
            return
        rows = batch.rows.count
        if rows:
            self._check_columns(batch)
            self._check_keys(batch)
        save = bool(self._options.checkpoint_dir) and len(self._unsaved) + 1 >= self._options.save_every
        if not rows:
            self._ended(batch, "empty")
            self.prepared.source.batch_is_done(batch)
            self._done = batch.batch_id
            return
        self._unsaved.append(batch)
        self._surviving(lambda: self._carry_out(batch, save=save, replays=batch.replayed), batch)
        self._done = batch.batch_id
        if save:
            self._saved, self._replaced = batch.batch_id, 0
            self._unsaved.clear()
            self.prepared.source.forget(batch.batch_id)
        elif self._options.checkpoint_dir:
            self.prepared.source.batch_is_done(batch)
        else:
            self._unsaved.clear()
            self.prepared.source.forget(batch.batch_id)

    def _carry_out(self, batch: MicroBatch, *, save: bool, replays: bool = False) -> None:
        parts = list(parts_of(batch.rows, self._options.max_rows))
        sums = [0.0, 0.0, 0.0]
        moving_s, held_s = batch.moving_s, self._ring.others_s
        for number, rows in enumerate(parts):
            saves = save and number == len(parts) - 1
            times, sending_s = self._ring.train(batch.batch_id, number, rows, batch.position, save=saves)
            sums = [total + seconds for total, seconds in zip(sums, times, strict=True)]
            moving_s += sending_s
        others_s = self._ring.others_s - held_s
        how: events.BatchEnding = "replayed" if replays else "trained"
        self._ended(batch._replace(moving_s=moving_s), how, sums, saved=save, others_s=others_s)

    def _ended(
        self,
        batch: MicroBatch,
        how: events.BatchEnding,
        times: Iterable[float] = (0.0, 0.0, 0.0),
        *,
        saved: bool = False,
        others_s: float = 0.0,
    ) -> None:
        reading_s, training_s, saving_s = times
        backlog = batch.backlog_rows() if how != "passed over" else None
        self.recorder.add([
            events.BatchEnded(
                time.time(),
                batch.batch_id,
                batch.rows.count,
                how,
                batch.waiting_s,
                batch.moving_s,
                reading_s,
                training_s,
                saving_s,
                saved,
                backlog,
                others_s,
            )
        ])  # fmt: skip

    def _check_columns(self, batch: MicroBatch) -> None:
        """Raise DataError if a column of the earlier micro-batches is missing or has another type."""
        kinds = dict(batch.rows.kinds)
        for name, kind in self._kinds.items():
            if kinds.get(name) != kind:
                now = f"is now {kinds[name]}" if name in kinds else "is missing"
                raise DataError(
                    f"batch {batch.batch_id} of {self.prepared.source.described}: the column `{name}`, which was "
                    f"{kind}, {now}. Run the cell again to continue with the new columns."
                )
        self._kinds = self._kinds or kinds

    def _check_keys(self, batch: MicroBatch) -> None:
        missing = [name for name in self._options.by if name not in batch.rows.kinds]
        if missing:
            called, there = self.prepared.source.described, ", ".join(batch.rows.kinds)
            raise DataError(f"--by {missing[0]}: batch {batch.batch_id} of {called} has no such column, only {there}.")
        for name in self._options.by:
            # A pandas categorical is a dictionary in Arrow: its values are the keys.
            kind = re.sub(r"^dictionary<values=([^,]+),.*", r"\1", batch.rows.kinds[name])
            if re.search(r"\w<|\[\d", kind):  # a row has several values, as in list<item: int64> and float32[3]
                raise DataError(f"--by {name}: the type of this column is {kind}, but a key must be a single value.")
            if re.search("date|time|duration|interval|decimal", kind):
                raise DataError(
                    f"--by {name}: the type of this column is {kind}, but a key must be text, bytes, a number or a "
                    "boolean: convert the column to strings or integers."
                )

    # ── lost ranks ────────────────────────────────────────────────────────────

    def _surviving(self, work: Callable[[], Any], batch: MicroBatch | None = None) -> Any:
        """Do some work on the ring, such as training on `batch`.

        If ranks are lost, replace them, train again on what was not saved, and try again. If ranks are lost too often,
        or if there is no directory of checkpoints, raise the error of the lost rank.
        """
        lost: RingLost | None = None
        while True:
            try:
                if lost is not None:
                    begun = self._recover(lost)
                    if batch is None:
                        return begun
                    if begun.restored == batch.batch_id:  # the checkpoint was complete before the ranks were lost
                        if batch.batch_id > self._done:
                            self._ended(batch, "trained", saved=True)
                        return None
                return work()
            except RingLost as error:
                lost = error

    def _recover(self, lost: RingLost) -> Begun:
        self._replaced += 1
        if self._replaced > self._options.max_restarts:  # 0 without a directory of checkpoints
            raise RingEnded(lost.outcome)
        pause_s = min(PAUSE_S * 2.0 ** (self._replaced - 1), LONGEST_PAUSE_S)
        poll_until(self._ending, time.monotonic() + pause_s)
        begun = self._ring.replace(lost, self.prepared.source.described)
        if begun.restored < self._saved:  # newer checkpoints are damaged, and the batches that follow are not kept
            raise RingEnded(lost.outcome)
        for batch in self._unsaved:
            if begun.restored < batch.batch_id <= self._done:
                self._carry_out(batch, save=False, replays=True)
        return begun
