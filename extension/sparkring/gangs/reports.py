"""Translates the messages of members and ranks into events of the run."""

from __future__ import annotations

from sparkring.history import events, stacks
from sparkring.history.events import CodeFrame, Event, Failure, Piece, SourceLine
from sparkring.wire import messages
from sparkring.wire.messages import GpuUsage, Output, RankFailure, Stack, TimelinePiece

Shown = Output | messages.Display | GpuUsage | Stack | TimelinePiece | messages.Told


def as_event(time: float, rank: int, report: Shown) -> Event:
    """The event that the record gets; `time` is when the driver heard of it."""
    match report:
        case Output():
            return events.Output(time, rank, report.stream, bytes(report.data))
        case messages.Display():
            fields = {**report._asdict(), "data": bytes(report.data)}
            return events.Displayed(time, rank, **fields)
        case messages.UserMessage():
            return events.Message(time, rank, report.text)
        case messages.Metrics():
            return events.Metrics(time, rank, *report)
        case GpuUsage():
            return events.GpuUsed(time, rank, *report)
        case messages.DataOpened():
            return events.DataOpened(time, rank, *report)
        case messages.EpochPlan():
            pieces = tuple(Piece(*piece) for piece in report.pieces)
            return events.DataPlanned(
                time, rank, report.reader, report.epoch, pieces, report.names, report.begun, report.window
            )
        case messages.ReadProgress():
            return events.DataRead(time, rank, *report)
        case messages.CheckpointSaved():
            return events.CheckpointSaved(time, rank, **{**report._asdict(), "metrics": dict(report.metrics)})
        case messages.CheckpointFailed():
            return events.CheckpointFailed(time, rank, *report)
        case messages.CheckpointDamaged():
            return events.CheckpointDamaged(time, rank, *report)
        case messages.CheckpointRestored():
            return events.CheckpointRestored(time, rank, *report)
        case messages.CheckpointRemoved():
            return events.CheckpointRemoved(time, rank, *report)
        case TimelinePiece():
            return events.TimelinePart(time, rank, bytes(report.data), report.last, report.cut)
        case Stack():
            return events.StackTaken(time, rank, report.state, stacks.cell_line(report.text), report.text)


def as_failure(report: RankFailure) -> Failure:
    """The failure that a rank has reported."""
    frames = tuple(
        CodeFrame(
            frame.filename, frame.line, frame.function, frame.in_cell, tuple(SourceLine(*line) for line in frame.source)
        )
        for frame in report.frames
    )
    return Failure(report.cause, report.summary, frames, report.traceback, report.advice, report.error)
