"""Translates the messages of members and ranks into events of the run, and says how a rank has ended."""

from __future__ import annotations

import signal
from typing import Any

from sparkring.history import events, stacks
from sparkring.history.events import CodeFrame, Event, Failure, Piece, SourceLine
from sparkring.wire import messages
from sparkring.wire.messages import Exited, GpuUsage, Output, RankFailure, Stack, TimelinePiece

Shown = Output | messages.Display | GpuUsage | Stack | TimelinePiece | messages.Told

# Messages, and the events that have the same fields in the same order.
_SAME_FIELDS: dict[type[Shown], type[Event]] = {
    messages.UserMessage: events.Message,
    messages.Metrics: events.Metrics,
    GpuUsage: events.GpuUsed,
    messages.DataOpened: events.DataOpened,
    messages.ReadProgress: events.DataRead,
    messages.CheckpointSaved: events.CheckpointSaved,
    messages.CheckpointFailed: events.CheckpointFailed,
    messages.CheckpointDamaged: events.CheckpointDamaged,
    messages.CheckpointRestored: events.CheckpointRestored,
    messages.CheckpointRemoved: events.CheckpointRemoved,
}


def as_event(time: float, rank: int, report: Shown) -> Event:
    """The event that the record gets; `time` is when the driver heard of it."""
    match report:
        case Output():
            return events.Output(time, rank, report.stream, bytes(report.data))
        case messages.Display():
            return events.Displayed(time, rank, **{**report._asdict(), "data": bytes(report.data)})
        case messages.EpochPlan():
            pieces = tuple(Piece(*piece) for piece in report.pieces)
            return events.DataPlanned(time, rank, **{**report._asdict(), "pieces": pieces})
        case TimelinePiece():
            return events.TimelinePart(time, rank, bytes(report.data), report.last, report.cut)
        case Stack():
            return events.StackTaken(time, rank, report.state, stacks.cell_line(report.text), report.text)
    make: type[Any] = _SAME_FIELDS[type(report)]
    event: Event = make(time, rank, *report)
    return event


def as_failure(report: RankFailure) -> Failure:
    """The failure that a rank has reported."""
    frames = tuple(
        CodeFrame(*frame[:-1], source=tuple(SourceLine(*line) for line in frame.source)) for frame in report.frames
    )
    return Failure(report.cause, report.summary, frames, report.traceback, report.advice, report.error)


def exit_failure(exited: Exited) -> Failure:
    """The failure of a rank whose process ended before the cell did."""
    peak = f"; its memory peaked at {exited.peak_memory_bytes / 1e6:,.0f} MB"
    if exited.signal is None:
        advice = "The process ended itself, with os._exit() or in a library that calls exit()."
        summary = f"exited with code {exited.code} before the cell ended"
        return Failure("exit", summary, advice=advice, exit_code=exited.code)
    try:
        name = signal.Signals(exited.signal).name
    except ValueError:
        name = f"signal {exited.signal}"
    if exited.out_of_memory:
        advice = "Use fewer ranks per machine, smaller batches, or a shard of the data."
        return Failure("out of memory", f"out of memory: killed by {name}{peak}", advice=advice, signal=name)
    advice = {
        "SIGSEGV": "Native code crashed; its stack is among the last lines of the rank.",
        "SIGABRT": "Native code called abort(); the last lines of the rank may say why.",
        "SIGKILL": f"Another process or the kernel killed it; dmesg shows whether memory was short{peak}.",
    }.get(name, "")
    return Failure("signal", f"killed by {name}", advice=advice, signal=name)
