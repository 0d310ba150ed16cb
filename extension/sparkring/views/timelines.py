"""Describes Horovod's timelines: how the time was spent, and which ranks the other ranks waited for."""

from __future__ import annotations

from typing import NamedTuple

from sparkring.history.describe import counted, dotted, duration, first_line, size
from sparkring.history.events import TimelineSaved
from sparkring.history.record import RunRecord
from sparkring.views.markup import AMBER, BLUE, GREEN, RED

HOW_TO_OPEN = "open it in https://ui.perfetto.dev or chrome://tracing"
WORTH_NAMING = 0.02  # what took less than this fraction of the whole time is not mentioned
_NAMED = 3

ELSEWHERE_COLOUR = "#8b939c"
# The colours of the phases of TimeSpent, in the order in which they are drawn, and those of the user's own phases.
PHASE_COLOURS = {
    "compute": BLUE,
    "data": AMBER,
    "save": "#16908f",
    "idle": "#7d8a1e",
    "start": ELSEWHERE_COLOUR,
    "other": "#5f6b76",
    "native": "#9262d6",
    "collective": "#d0528f",
}
NAMED_COLOURS = (GREEN, "#cf6a32", "#3a9fc0", RED)


class Share(NamedTuple):
    """An activity that took time: its name, its seconds, its fraction of the whole time, and the colour of its bar."""

    what: str
    seconds: float
    part: float
    colour: str


def shares(saved: TimelineSaved) -> list[Share]:
    """Divide the whole time among the activities."""
    whole = saved.wall_s or 1.0
    return [
        Share(what, seconds, seconds / whole, colour)
        for what, seconds, colour in (
            ("reducing", saved.reducing_s, BLUE),
            ("copying", saved.copying_s, GREEN),
            ("waiting for data", saved.waiting_s, "#9262d6"),
            ("waiting for ranks", saved.negotiating_s, AMBER),
            ("outside Horovod", saved.elsewhere_s, ELSEWHERE_COLOUR),
        )
    ]


def path(record: RunRecord, saved: TimelineSaved) -> str:
    """Return the path of a timeline."""
    return f"{record.log_folder}/{saved.name}" if record.log_folder else saved.name


def head_words(record: RunRecord, saved: TimelineSaved) -> str:
    """Summarize a timeline: `26 operations on 5 tensors in 0.9 s`. If there were several attempts, name the attempt."""
    done = f"{counted(saved.operations, 'operation')} on {counted(saved.tensors, 'tensor')}"
    words = f"{done} in {duration(saved.wall_s)}"
    return f"attempt {saved.attempt}: {words}" if len(record.attempts) > 1 else words


def share_words(saved: TimelineSaved) -> str:
    """Say how the time was spent: `92% waiting for ranks, 5% reducing`. The largest share comes first."""
    named = [share for share in shares(saved) if share.part >= WORTH_NAMING]
    return ", ".join(f"{share.part:.0%} {share.what}" for share in sorted(named, key=lambda share: -share.part))


def late_words(record: RunRecord, saved: TimelineSaved) -> str:
    """Name the ranks that the other ranks waited for longest: `the other ranks waited 12 s in total for rank 1 (…)`."""
    worth = [rank for rank in saved.late if rank.waited_s >= WORTH_NAMING * saved.wall_s][:_NAMED]
    if not worth:
        return "no rank made the others wait" if saved.late else ""
    parts = [
        f"{duration(rank.waited_s)} for rank {rank.rank} (was the last to be ready {counted(rank.times, 'time')})"
        for rank in worth
    ]
    parts[0] = parts[0].replace(" for", " in total for", 1)
    return f"the other {'ranks' if record.size > 2 else 'rank'} waited {', '.join(parts)}"


def trace_words(record: RunRecord) -> str:
    """Say where the trace of PyTorch's profiler is, and how to open it; '' if there is none."""
    if (trace := record.trace) is None:
        return ""
    what = f"{counted(trace.steps, 'step')} of {counted(trace.ranks, 'rank')}, by PyTorch's profiler"
    where = f"{record.log_folder}/{trace.name}" if record.log_folder else trace.name
    return f"trace of {what}: open {where} ({size(trace.size_bytes)}) in https://ui.perfetto.dev"


def closing_words(record: RunRecord) -> list[str]:
    """Return a line for each timeline, with its summary, any problem, its path, and how to open it; and the trace."""
    lines = [trace_words(record)] if record.trace else []
    for saved in record.timelines:
        words = [f"timeline: {head_words(record, saved)}", share_words(saved), late_words(record, saved)]
        lines.append(dotted(*words, first_line(saved.problem), f"{HOW_TO_OPEN}: {path(record, saved)}"))
    return lines
