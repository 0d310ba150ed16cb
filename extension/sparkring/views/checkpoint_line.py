"""Draws checkpoints as marks, in the order in which they were saved. A mark's height shows the value of a metric."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from sparkring.history.describe import ago, counted, dotted, duration, first_line, number, size
from sparkring.views.markup import AMBER, BLUE, GREEN, RED, legend, svg, text, tint

MARKS, CROWD = 80, 40  # a picture has at most MARKS marks; if it has more than CROWD, most are small
METRICS_NAMED, NAME_CHARACTERS, REASON_CHARACTERS = 4, 40, 200
TITLE_CHARACTERS = 120  # the largest number of characters in a mark's tooltip

WIDTH, _LEFT, _RIGHT, _TOP = 720, 46, 62, 34
_CURVE, _FLAT = 66, 14  # the height of the plot, with a metric and without
_PITCH = 46  # the largest distance between two marks
_CHARACTER = 6.2  # the width of a label's character, in pixels
_LINE = 13  # the distance from one line of a label to the next
_APART = 6  # the smallest distance between the lines that show where attempts begin
_REMOVED_PART = 0.35  # the largest part of the width that removed checkpoints may take

State = Literal["committed", "not finite", "partial", "damaged", "removed"]
STATES: tuple[State, ...] = ("committed", "not finite", "partial", "damaged", "removed")
SAID: dict[State, str] = {
    "committed": "committed", "not finite": "not finite", "partial": "not committed", "damaged": "damaged",
    "removed": "removed",
}  # fmt: skip


class CheckpointMark(NamedTuple):
    """One checkpoint as it is shown. `time` is in Unix seconds. Unknown values are 0 or None.

    `origin` says what saved the checkpoint, for example a run. It has one string for each of the `headers` of the
    Series. Marks with the same `stretch` were saved in the same attempt or run. `resumes` is True for the resume point.
    """

    step: int
    state: State
    time: float = 0.0
    size_bytes: int | None = None
    metrics: Mapping[str, float] = {}
    origin: tuple[str, ...] = ()
    stretch: str = ""
    reason: str = ""
    best: bool = False
    resumes: bool = False


class Series(NamedTuple):
    """The checkpoints of one directory, oldest first. `noun` is what a step is called: `step`, `epoch` or `batch`.

    `headers` are the titles of the columns that show each mark's `origin`.
    """

    folder: str
    marks: tuple[CheckpointMark, ...]
    headers: tuple[str, ...] = ()
    noun: str = "step"
    kind: str = ""  # the tool that wrote the checkpoints; '' for sparkring
    metric: str = ""  # the metric to draw; if it is '', picture() chooses one
    began: float = 0.0  # when the run began; times are shown since then or, if it is 0, as times before now


# ── Words ─────────────────────────────────────────────────────────────────────


def when(series: Series, mark: CheckpointMark, now: float) -> str:
    """Say when the checkpoint was saved: `3 min ago`, or `after 40 s`, counted from the start of the run.

    Return '' if the time is not known.
    """
    if not mark.time:
        return ""
    return f"after {duration(int(mark.time - series.began))}" if series.began else ago(now - mark.time)


def state_words(mark: CheckpointMark) -> str:
    """Describe the state of a checkpoint: `committed, best; the resume point`, `damaged: rank-0.safetensors is cut`."""
    words = SAID[mark.state] + (", best" if mark.best and mark.state == "committed" else "")
    words += "; the resume point" if mark.resumes else ""
    return f"{words}: {first_line(mark.reason, REASON_CHARACTERS)}" if mark.reason else words


def metric_names(series: Series) -> list[str]:
    """Return the names of the metrics to list: `series.metric`, if set, and then those of the newest checkpoints."""
    names: dict[str, None] = {series.metric: None} if series.metric else {}
    for mark in reversed(series.marks):
        names |= dict.fromkeys(mark.metrics)
    return [name for name in names if any(name in mark.metrics for mark in series.marks)][:METRICS_NAMED]


# ── The picture ───────────────────────────────────────────────────────────────


def picture(series: Series, now: float) -> str:
    """Draw the checkpoints from left to right, oldest first. The height of a mark shows the metric's value, if any."""
    if not series.marks:
        return ""
    metric = series.metric if any(series.metric in mark.metrics for mark in series.marks) else _metric_to_draw(series)
    bottom = _TOP + (_CURVE if metric else _FLAT)
    xs = positions(series.marks)
    measured = {at: mark.metrics.get(metric, math.nan) for at, mark in enumerate(series.marks)}
    values = {at: value for at, value in measured.items() if math.isfinite(value)}
    low, high = min(values.values(), default=0.0), max(values.values(), default=0.0)

    def y(value: float) -> float:
        return _TOP + (bottom - _TOP) * ((high - value) / (high - low) if high > low else 0.5)

    places = {at: (xs[at], y(values[at]) if at in values else bottom) for at in chosen(series.marks, MARKS)}
    lines = _labels(series, places, now)
    base = bottom + 24
    whole = base + _LINE * (max(len(line) for _, line in lines) - 1) + 4
    edges = f"M{xs[0] - 12:.1f} {bottom}H{xs[-1] + 12:.1f}"
    ground = f'<path d="{edges}" stroke="currentColor" stroke-opacity=".2"/>'
    curve = " ".join(f"{x:.1f},{y:.1f}" for at, (x, y) in places.items() if at in values)
    parts = [
        *_stretches(series, xs, bottom + 8),
        *([_tick(value, y(value)) for value in nice_ticks(low, high, 3)] if metric else [ground]),
        f'<polyline points="{curve}" fill="none" stroke="{BLUE}" stroke-opacity=".45"/>',
        *(_shape(series, series.marks[at], *place, now, crowded=len(places) > CROWD) for at, place in places.items()),
        *_callouts(series, places),
        *(_label(x, base, line) for x, line in lines),
    ]
    resumed = next((f"; the resume point is {series.noun} {mark.step:,}" for mark in series.marks if mark.resumes), "")
    summary = f"{counted(len(series.marks), 'checkpoint')} in the order in which they were saved{resumed}"
    drawn = svg(WIDTH, whole, summary, parts, 10.5)
    return f'<figure class="sr-saved">{_caption(series, metric)}{drawn}{_legend(series, len(places))}</figure>'


def chosen(marks: Sequence[CheckpointMark], most: int) -> list[int]:
    """Choose at most `most` marks: the best, the resume point, the first, the last, and some marks of each state.

    The chosen marks of a state are evenly spread.
    """
    if len(marks) <= most:
        return list(range(len(marks)))
    kept = {at for at, mark in enumerate(marks) if mark.best or mark.resumes} | {0, len(marks) - 1}
    groups = [
        [at for at, mark in enumerate(marks) if mark.state in states and at not in kept]
        for states in (("damaged", "partial", "not finite"), ("committed",), ("removed",))
    ]
    for at, group in enumerate(groups, 1):
        room = most - len(kept)
        share = room * 2 // 3 if any(groups[at:]) else room
        spread = (group[(2 * part + 1) * len(group) // (2 * share)] for part in range(share))
        kept |= set(group if len(group) <= share else spread)
    return sorted(kept)


def positions(marks: Sequence[CheckpointMark]) -> list[float]:
    """Return each mark's distance from the left edge, in pixels. Removed checkpoints are drawn closer together."""
    gone = sum(mark.state == "removed" for mark in marks)
    left = len(marks) - gone
    narrow = min(0.5, _REMOVED_PART / (1 - _REMOVED_PART) * left / gone) if gone and left else 1.0
    widths = [narrow if mark.state == "removed" else 1.0 for mark in marks]
    # The distance from the middle of the first mark to the middle of each mark.
    ways = [0.0]
    for one, other in itertools.pairwise(widths):
        ways.append(ways[-1] + (one + other) / 2)
    begin = _LEFT + 14
    scale = min(_PITCH, (WIDTH - _RIGHT - begin) / (ways[-1] or 1))
    return [round(begin + scale * way, 1) for way in ways]


def _metric_to_draw(series: Series) -> str:
    """Return the metric that seems to determine the best checkpoint; otherwise, return the first metric, or ''."""
    names = metric_names(series)
    best = next((mark for mark in series.marks if mark.best), None)
    for name in names:
        values = [mark.metrics[name] for mark in series.marks if name in mark.metrics]
        if best is not None and len(values) > 1 and best.metrics.get(name) in (min(values), max(values)):
            return name
    return names[0] if names else ""


def _tick(value: float, y: float) -> str:
    return (
        f'<path d="M{_LEFT} {y:.1f}H{WIDTH - 8}" stroke="currentColor" stroke-opacity=".12"/>'
        f'<text x="{_LEFT - 6}" y="{y:.1f}" dy="3.5" text-anchor="end">{number(value)}</text>'
    )


def _stretches(series: Series, xs: Sequence[float], bottom: int) -> list[str]:
    """Return SVG with a line before each attempt or run except the first, and with the names that fit."""
    begins = [at for at in range(len(xs)) if not at or series.marks[at].stretch != series.marks[at - 1].stretch]
    if len(begins) < 2:
        return []
    edges = [(xs[at] + xs[at - 1]) / 2 if at else _LEFT for at in begins] + [float(WIDTH)]
    drawn, free = "", 0.0
    for edge in edges[1:-1]:
        if edge >= free:  # if lines are close together, draw only some of them, so that they can be told apart
            drawn, free = f"{drawn}M{edge:.1f} 3V{bottom}", edge + _APART
    parts = [f'<path d="{drawn}" stroke="currentColor" stroke-opacity=".35" stroke-dasharray="2 3"/>']
    free = 0.0
    for at, edge, end in zip(begins, edges, edges[1:], strict=False):
        name = _stretch_name(series, at)
        wide = _CHARACTER * len(name) + 8
        if name and edge + wide <= end and edge >= free:
            parts.append(f'<text x="{edge + 4:.1f}" y="10">{text(name)}</text>')
            free = edge + wide
    return parts


def _stretch_name(series: Series, at: int) -> str:
    """Return the name of the attempt that begins at mark `at`, or `run …` with the end of the run's id."""
    mark = series.marks[at]
    if not mark.stretch.isdecimal():
        return mark.stretch
    same = (other for other in series.marks[at:] if other.stretch == mark.stretch)
    run = next((other.origin[0] for other in same if other.origin[0]), "")
    before = next((other.origin[0] for other in reversed(series.marks[:at]) if other.origin[0]), "")
    if run and run == before:
        return "next attempt"
    return f"run …{first_line(run[-6:], 6)}" if run else ""  # %logs finds a run by the end of its id


# ── Marks ─────────────────────────────────────────────────────────────────────

_STAR = "".join(
    f"{'L' if point else 'M'}{radius * math.sin(math.pi * point / 5):.1f} {-radius * math.cos(math.pi * point / 5):.1f}"
    for point in range(10)
    for radius in (3.0 if point % 2 else 7.0,)
) + "z"  # fmt: skip


def _circle(radius: float) -> str:
    return f"M{-radius:g} 0a{radius:g} {radius:g} 0 1 0 {2 * radius:g} 0a{radius:g} {radius:g} 0 1 0 {-2 * radius:g} 0z"


_RING = f'<path d="{_circle(9)}" fill="none" stroke="{BLUE}" stroke-width="1.6"/>'
_SHAPES: dict[str, str] = {
    "best": f'<path d="{_STAR}" fill="{GREEN}"/>',
    "committed": f'<path d="{_circle(4)}" fill="{BLUE}"/>',
    "not finite": f'<path d="M0 -5L5 4H-5z" fill="none" stroke="{RED}" stroke-width="1.8"/>',
    "partial": f'<path d="{_circle(4)}" fill="none" stroke="{AMBER}" stroke-width="1.6" stroke-dasharray="2.4 1.8"/>',
    "damaged": f'<path d="M-4 -4L4 4M4 -4L-4 4" stroke="{RED}" stroke-width="2.4"/>',
    "removed": '<path d="M0 -4V4" stroke="currentColor" stroke-opacity=".45" stroke-width="1.4"/>',
}


def _shape(series: Series, mark: CheckpointMark, x: float, y: float, now: float, *, crowded: bool) -> str:
    saved = f"saved {time}" if (time := when(series, mark, now)) else ""
    words = [f"{series.noun} {mark.step:,}", saved, state_words(mark), size(mark.size_bytes)]
    words += [f"{first_line(name, NAME_CHARACTERS)} {number(value)}" for name, value in list(mark.metrics.items())[:2]]
    title = first_line(dotted(*words), TITLE_CHARACTERS)
    small = crowded and not (mark.best or mark.resumes)
    placed = f"translate({x:.1f} {y:.1f})" + (" scale(0.75)" if small else "")
    drawn = _SHAPES["best" if mark.best and mark.state == "committed" else mark.state] + _RING * mark.resumes
    return f'<g transform="{placed}"><title>{text(title)}</title>{drawn}</g>'


def _callouts(series: Series, places: Mapping[int, tuple[float, float]]) -> list[str]:
    """Return SVG with the words `best` and `resume` above the marks, or side by side if the marks are close."""
    callouts = []
    for at, place in places.items():
        mark = series.marks[at]
        words = ["best"] * (mark.best and mark.state == "committed") + ["resume"] * mark.resumes
        callouts += [(place, ", ".join(words))] if words else []
    near = len(callouts) == 2 and abs(callouts[0][0][0] - callouts[1][0][0]) < 8 * _CHARACTER
    parts = []
    for which, ((x, y), label) in enumerate(callouts):
        anchor, shift = (("end", 4), ("start", -4))[which] if near else ("middle", 0)
        if y - 10 > 25:
            parts.append(f'<path d="M{x:.1f} 26V{y - 10:.1f}" stroke="currentColor" stroke-opacity=".3"/>')
        parts.append(f'<text x="{x + shift:.1f}" y="22" text-anchor="{anchor}" font-weight="bold">{label}</text>')
    return parts


def _labels(series: Series, places: Mapping[int, tuple[float, float]], now: float) -> list[tuple[float, list[str]]]:
    """Return the labels below the marks, each with its horizontal position.

    The lines of a label are the checkpoint's step, when it was saved, and, if the sizes of the checkpoints differ, its
    size. If there is no room for all labels, only the most important marks are labelled.
    """

    def weight(at: int) -> tuple[bool, ...]:
        mark = series.marks[at]
        return (not mark.resumes, not mark.best, at != max(places), at != min(places), mark.state == "removed")

    sizes = [mark.size_bytes for mark in series.marks if mark.size_bytes]
    differ = bool(sizes) and max(sizes) > 1.1 * min(sizes)
    taken: list[tuple[float, float]] = []
    labels = []
    for at in sorted(places, key=lambda at: (weight(at), at)):
        mark, x = series.marks[at], places[at][0]
        line = [f"{mark.step:,}", when(series, mark, now).removeprefix("after ").removesuffix(" ago")]
        line += [size(mark.size_bytes)] if differ else []
        half = _CHARACTER * max(map(len, line)) / 2 + 5
        if all(x + half <= begin or x - half >= end for begin, end in taken):
            taken.append((x - half, x + half))
            labels.append((x, line))
    return sorted(labels)


def _label(x: float, y: int, line: Sequence[str]) -> str:
    looks = ['font-weight="bold"'] + ['fill-opacity=".75"'] * len(line)
    return "".join(
        f'<text x="{x:.1f}" y="{y + _LINE * at}" text-anchor="middle" {looks[at]}>{text(words)}</text>'
        for at, words in enumerate(line)
        if words
    )


def _caption(series: Series, metric: str) -> str:
    if not metric:
        return ""
    newest = next((mark.metrics[metric] for mark in reversed(series.marks) if metric in mark.metrics), None)
    value = f" {number(newest)}" if newest is not None else ""
    name = text(first_line(metric, NAME_CHARACTERS))
    return f'<figcaption><b style="{tint(BLUE)}">{name}</b>{value}</figcaption>'


def _legend(series: Series, drawn: int) -> str:
    """Return a legend with the meaning of each shape and the number of checkpoints in each state."""
    shapes = []
    if any(mark.best and mark.state == "committed" for mark in series.marks):
        shapes.append((_SHAPES["best"], "best"))
    for state in STATES:
        count = sum(mark.state == state for mark in series.marks)
        shapes += [(_SHAPES[state], f"{count:,} {SAID[state]}")] if count else []
    if any(mark.resumes for mark in series.marks):
        shapes.append((_SHAPES["committed"] + _RING, "resume point"))
    many = len(series.marks)
    return legend(shapes, "-11 -10 22 20", f"<span>{drawn} of {many:,} are shown</span>" if drawn < many else "")


def nice_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return the multiples of a round step (1, 2 or 5 times a power of ten) from `low` to `high`; at least one."""
    span = high - low
    if span <= abs(high) * 1e-9 or not math.isfinite(span):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most)
    return [tick * step for tick in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)] or [low]
