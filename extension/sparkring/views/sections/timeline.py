"""The section on Horovod's timeline: how the time was spent, the ranks that others waited for, the slowest tensors."""

from __future__ import annotations

from collections.abc import Callable

from sparkring.history.describe import counted, duration, first_line, size
from sparkring.history.events import TensorTimes, TimelineSaved
from sparkring.history.record import RunRecord
from sparkring.views import timelines
from sparkring.views.markup import AMBER, details, legend, note, svg, text, warning
from sparkring.views.sections import Form
from sparkring.views.tables import bare_table

SHOWN = 3  # the most timelines that are shown
RANKS_DRAWN, TENSORS_SHOWN, NAME_CHARACTERS = 8, 10, 80
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 560, 66, 74, 19, 12


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return the last timelines, which are read when an attempt's ranks have ended, and where the trace is."""
    if form == "stacked":
        return ""
    trace = note(timelines.trace_words(record)) if record.trace else ""
    return "".join(_timeline(record, saved, form) for saved in record.timelines[-SHOWN:]) + trace


def _timeline(record: RunRecord, saved: TimelineSaved, form: Form) -> str:
    head = f"<div><b>Horovod’s timeline</b> <small>{text(timelines.head_words(record, saved))}</small></div>"
    problem = warning(first_line(saved.problem))
    late, tensors = timelines.late_words(record, saved), _tensors(saved)
    body = f"<div>{text(late)}</div>" if late else ""
    tensors = details("Slowest tensors", tensors) if form == "final" else tensors
    where = note(f"{timelines.path(record, saved)} ({size(saved.size_bytes)}): {timelines.HOW_TO_OPEN}")
    return f'<div class="sr-timeline">{head}{problem}{_whole(saved)}{body}{_late(saved)}{tensors}{where}</div>'


def _whole(saved: TimelineSaved) -> str:
    """Return a bar for the whole time, divided into activities, and a legend."""
    if not saved.wall_s:
        return ""
    x, bars, shapes = 0.0, [], []
    for share in timelines.shares(saved):
        if share.part <= 0:
            continue
        took, part, wide = duration(share.seconds), f"{share.part:.0%}", share.part * _WIDTH
        bars.append(
            f'<rect x="{x:.1f}" y="0" width="{max(0.3, wide):.1f}" height="16" fill="{share.colour}">'
            f"<title>{share.what}: {took}, {part}</title></rect>"
        )
        shapes.append((f'<rect width="9" height="9" fill="{share.colour}"/>', f" {share.what} {took} ({part})"))
        x += wide
    drawn = svg(_WIDTH, 16, f"how the time was spent: {timelines.share_words(saved)}", bars)
    return f"<figure>{drawn}{legend(shapes, '0 0 9 9')}</figure>"


def _late(saved: TimelineSaved) -> str:
    """Return a bar for each rank that the other ranks waited for. The longest wait comes first."""
    shown = [rank for rank in saved.late if rank.waited_s > 0][:RANKS_DRAWN]
    if not shown:
        return ""
    most = shown[0].waited_s
    bars = []
    for row, rank in enumerate(shown):
        long = (_WIDTH - _LEFT - _RIGHT) * rank.waited_s / most
        y = row * _ROW + _BAR / 2 + 3
        bars.append(
            f'<text x="{_LEFT - 6}" y="{y:.1f}" dy="3.5" text-anchor="end">rank {rank.rank}</text>'
            f'<rect x="{_LEFT}" y="{row * _ROW + 3}" width="{max(1.0, long):.1f}" height="{_BAR}" rx="2" '
            f'fill="{AMBER}"><title>was the last to be ready {counted(rank.times, "time")}</title></rect>'
            f'<text x="{_LEFT + long + 6:.1f}" y="{y:.1f}" dy="3.5">{duration(rank.waited_s)}</text>'
        )
    spoken = "; ".join(f"rank {rank.rank} {duration(rank.waited_s)}" for rank in shown)
    rest = len(saved.late) - len(shown)
    others = f" <small>(not shown: shorter waits for {counted(rest, 'more rank')})</small>" if rest > 0 else ""
    drawn = svg(_WIDTH, len(shown) * _ROW + 4, f"how long the other ranks waited for each rank: {spoken}", bars)
    return f"<figure><div><small>how long the other ranks waited for each rank</small>{others}</div>{drawn}</figure>"


def _tensors(saved: TimelineSaved) -> str:
    """Return a table of the slowest tensors, with the time that each tensor spent in each phase."""
    shown = saved.slowest[:TENSORS_SHOWN]
    if not shown:
        return ""
    # Leave out columns whose times are all nearly zero.
    longest = [(header, of, max(map(of, shown))) for header, of in _COLUMNS]
    columns = [(header, of) for header, of, most in longest if header == "total" or most >= 0.00005]
    times = [tuple(duration(float(of(tensor))) for _, of in columns) for tensor in shown]
    rows = [(_short(tensor.name), f"{tensor.count:,}", *took) for tensor, took in zip(shown, times, strict=True)]
    some = f"the slowest {len(shown)} of {counted(saved.tensors, 'tensor')}" if len(shown) < saved.tensors else ""
    return bare_table(("tensor", "operations", *(header for header, _ in columns)), rows, some)


_COLUMNS: tuple[tuple[str, Callable[[TensorTimes], float]], ...] = (
    ("total", lambda tensor: tensor.total_s),
    ("waiting for ranks", lambda tensor: tensor.negotiating_s),
    ("waiting for data", lambda tensor: tensor.waiting_s),
    ("copying", lambda tensor: tensor.copying_s),
    ("reducing", lambda tensor: tensor.reducing_s),
)


def _short(name: str) -> str:
    """Return a tensor's name. Long names are cut at the beginning, since the end of a name says more."""
    shown = name or "(no name)"
    return shown if len(shown) <= NAME_CHARACTERS else f"…{shown[1 - NAME_CHARACTERS :]}"
