"""The section on time: how the ranks spend it, and Horovod's timeline, if one was recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from sparkring.history import describe
from sparkring.history.describe import counted, duration, first_line, size
from sparkring.history.events import TensorTimes, TimelineSaved
from sparkring.history.record import PhaseTimes, RunRecord
from sparkring.views import timelines
from sparkring.views.markup import AMBER, details, legend, note, svg, text, warning
from sparkring.views.sections import Form
from sparkring.views.tables import bare_table

SHOWN = 3  # the most timelines that are shown
LANES, COLUMNS = 32, 480  # how many ranks have a lane, and how many columns all lanes have together
RANKS_DRAWN, TENSORS_SHOWN, NAME_CHARACTERS = 8, 10, 80
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 560, 66, 74, 19, 12


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return how the ranks spend their time, and the last timelines, which are read when an attempt's ranks end."""
    if form == "stacked":
        return ""
    trace = note(timelines.trace_words(record)) if record.trace else ""
    of_horovod = "".join(_timeline(record, saved, form) for saved in record.timelines[-SHOWN:])
    return _spent(record, form) + of_horovod + trace


def _spent(record: RunRecord, form: Form) -> str:
    """Draw for each rank how it has spent its time: as a lane over time, and as a bar of the shares."""
    known = {rank.rank: rank.spent for rank in record.taking_part if rank.spent is not None}
    if not known:
        return ""
    shares = describe.phase_shares(known.values())
    of_rank = {rank: describe.phase_shares([spent]) for rank, spent in known.items()}
    # Of many ranks, those are shown that wait least for the others.
    waits = {rank: sum(own.get(name, 0.0) for name in describe.WAITS) for rank, own in of_rank.items()}
    shown = sorted(sorted(waits, key=lambda rank: waits[rank])[:LANES])
    own_names = [name for name in shares if name not in timelines.PHASE_COLOURS]
    named = zip(own_names, itertools.cycle(timelines.NAMED_COLOURS), strict=False)
    colours = {**dict(named), **timelines.PHASE_COLOURS}
    ends = [at.ended for rank in shown for at in record.ranks[rank].lane]
    begin, end = record.running_since, max(ends, default=0.0)
    left, lanes, bars = 46, 300, 190
    parts = [
        f'<text x="{left}" y="10">over {duration(end - begin)}</text><text x="{left + lanes + 12}" y="10">in all</text>'
    ]
    for row, rank in enumerate(shown):
        y = 16 + row * _ROW
        parts.append(f'<text x="{left - 6}" y="{y + 9:.1f}" text-anchor="end">rank {rank}</text>')
        columns = _columns(record.ranks[rank].lane, max(8, COLUMNS // len(shown)), begin)
        boxes: dict[str, list[str]] = {}
        for since, until, phases in columns:
            x, wide = (left + lanes * (time - begin) / max(0.001, end - begin) for time in (since, until))
            top, whole_s = float(y), sum(phases.values()) or 1.0
            for name in colours:
                if high := _BAR * phases.get(name, 0.0) / whole_s:
                    boxes.setdefault(name, []).append(f"M{x:.1f} {top:.1f}H{wide:.1f}V{top + high:.1f}H{x:.1f}Z")
                    top += high
        parts += [f'<path d="{"".join(paths)}" fill="{colours[name]}"/>' for name, paths in boxes.items()]
        x = float(left + lanes + 12)
        for name in colours:
            if (wide := bars * of_rank[rank].get(name, 0.0)) >= 0.5:
                title = f"rank {rank}: {of_rank[rank][name]:.0%} {describe.phase_words(name)}"
                shape = f'x="{x:.1f}" y="{y}" width="{wide - 0.5:.1f}" height="{_BAR}" fill="{colours[name]}"'
                parts.append(f"<g><title>{text(title)}</title><rect {shape}/></g>")
                x += wide
    spoken = "; ".join(f"rank {rank}: {describe.share_words([known[rank]])}" for rank in shown[:RANKS_DRAWN])
    drawn = svg(_WIDTH, 18 + len(shown) * _ROW, f"how the ranks spend their time: {spoken}", parts)
    shapes = [
        (
            f'<rect width="9" height="9" fill="{colours[name]}"/>',
            f" {text(describe.phase_words(name))} {100 * shares[name]:.0f} %",
        )
        for name in colours
        if shares.get(name, 0.0) >= 0.005
    ]
    judged = describe.verdict(record)
    words = describe.verdict_words(record) if form == "tab" or (judged and judged.kind == "balanced") else ""
    rest = len(known) - len(shown)
    more = f"the {len(shown)} of {len(known):,} ranks that wait least for the others" if rest else ""
    figure = f"<figure>{drawn}{legend(shapes, '0 0 9 9')}</figure>"
    return f'<div class="sr-timeline"><div><b>Where the time goes</b></div>{note(words)}{figure}{note(more)}</div>'


def _columns(lane: Sequence[PhaseTimes], most: int, begin: float) -> list[tuple[float, float, dict[str, float]]]:
    """Divide a lane into at most `most` columns: their begin and end, and the seconds of each phase."""
    columns = []
    step = -(-len(lane) // most)
    for at in range(0, len(lane), max(1, step)):
        phases: dict[str, float] = {}
        for part in lane[at : at + step]:
            for name, seconds in part.phases.items():
                phases[name] = phases.get(name, 0.0) + seconds
        until = lane[min(at + step, len(lane)) - 1].ended
        columns.append((max(begin, until - sum(phases.values())), until, phases))
    return columns


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
