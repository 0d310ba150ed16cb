"""Draws the attempts of a run as bars over time, with its checkpoints and the cause of each attempt's end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sparkring.history import describe
from sparkring.history.describe import counted, duration, first_line
from sparkring.history.record import RunRecord
from sparkring.views.attempts import Chapter, State, why
from sparkring.views.markup import AMBER, BLUE, GREEN, RED, note, svg, text

WIDTH, _SIDE = 720, 4
_TOP, _BAR, _TICK = 16, 14, 8  # the top of the bars, their height, and the height of a checkpoint's tick
_CAUSE, _CAUSES = 15, 4  # the distance between the rows of causes, and the most rows
_CAUSE_CHARACTERS = 64
_APART = 10  # the smallest distance between two causes in a row
_CHARACTER = 6.0  # the width of a label's character, in pixels
_NARROWEST = 2.0  # the width of the bar of an attempt that failed at once
_COLOURS: dict[State, str] = {"ended": RED, "running": BLUE, "finished": GREEN, "failed": RED, "cut": AMBER}
_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)
_LABELS = 7  # the most labels of the time axis


class _Bar(NamedTuple):
    number: int
    begin: float
    end: float
    chapter: Chapter
    cause: str


def picture(record: RunRecord, now: float, chapters: Sequence[Chapter]) -> str:
    """Draw the last attempts, which `chapters` describe, from left to right. Return '' if there are no attempts.

    During the run, the time axis grows in steps, so that the picture rarely changes.
    """
    attempts = record.attempts[-len(chapters) :] if chapters else ()
    if not attempts:
        return ""
    began, last = attempts[0].started, record.ended or now
    span = max(1.0, last - began) if record.ended else _rounded_up(last - began)
    scale = (WIDTH - 2 * _SIDE) / span

    def x(time: float) -> float:
        return _SIDE + scale * min(max(0.0, time - began), span)

    ends = [attempt.ended or record.ended or began + span for attempt in attempts]
    causes = [why(attempt) if attempt.ended else _outcome(record) for attempt in attempts]
    bars = [
        _Bar(attempt.number, x(attempt.started), max(x(end), x(attempt.started) + _NARROWEST), chapter, cause)
        for attempt, end, chapter, cause in zip(attempts, ends, chapters, causes, strict=True)
    ]
    saved = sorted(time for checkpoint in record.checkpoints if began <= (time := checkpoint.saved.time) <= last)
    below = _TOP + _BAR + _TICK
    words, rows = _causes(bars, below + 2)
    axis = below + 6 + _CAUSE * rows
    parts = [*_bars(bars), _ticks([x(time) for time in saved]), *words, *_axis(span, scale, axis)]
    took = f" in {duration(record.ended - record.started)}" if record.ended else ""
    drawn = svg(WIDTH, axis + 18, counted(len(record.attempts), "attempt") + took, parts)
    legend = note(f"green ticks: {counted(len(saved), 'checkpoint')}") if saved else ""
    return f'<figure class="sr-saved">{drawn}{legend}</figure>'


def _outcome(record: RunRecord) -> str:
    return describe.outcome(record) if record.outcome not in (None, "finished") else record.outcome or ""


def _rounded_up(seconds: float) -> float:
    """Return the next longer time that has two significant digits, such as 2.1, 21 or 210 s."""
    step = 10.0 ** math.floor(math.log10(max(1.0, seconds)) - 1)
    return step * math.ceil(max(1.0, seconds) / step + 1e-9)


def _bars(bars: Sequence[_Bar]) -> list[str]:
    """Return SVG with the bars, thin lines between them, and, if there is room, the attempts' numbers above them."""
    parts, before, free = [], float(_SIDE), 0.0
    for number, begin, end, chapter, _ in bars:
        colour, middle = _COLOURS[chapter.state], (begin + end) / 2
        shape = f'x="{begin:.1f}" y="{_TOP}" width="{end - begin:.1f}" height="{_BAR}" rx="2" fill="{colour}"'
        waited = f'<path d="M{before:.1f} {_TOP + _BAR / 2:g}H{begin:.1f}" stroke="currentColor" stroke-opacity=".4"/>'
        parts.append(f"{waited}<g><title>{text(chapter.line)}</title><rect {shape}/></g>")
        long = f"attempt {number}"
        name = long if _CHARACTER * len(long) <= end - begin else f"{number}"
        half = _CHARACTER * len(name) / 2
        if free <= middle - half:
            parts.append(f'<text x="{middle:.1f}" y="{_TOP - 4}" text-anchor="middle">{name}</text>')
            free = middle + half + 3
        before = end
    return parts


def _ticks(xs: Sequence[float]) -> str:
    places = sorted({round(x) for x in xs})
    drawn = "".join(f"M{x} {_TOP + _BAR + 2}v{_TICK - 2}" for x in places)
    return f'<path d="{drawn}" stroke="{GREEN}" stroke-width="1.6"/>' if drawn else ""


def _causes(bars: Sequence[_Bar], top: float) -> tuple[list[str], int]:
    """Write below the end of each bar what ended the attempt, in few rows. Return SVG, and the number of rows.

    The last attempt is placed first. If there is no room for a cause, only the lines below the picture show it.
    """
    placed: list[tuple[int, float, float, float]] = []  # of each text: its row, begin, end, and the end of its bar

    def fits(row: int, begin: float, end: float, line: float) -> bool:
        """Return whether a text overlaps no other text, and no line from a bar to a text crosses another text."""
        return all(
            not (row == other and begin < stop + _APART and start < end + _APART)
            and not (other < row and start - 2 < line < stop)
            and not (row < other and begin - 2 < crossing < end)
            for other, start, stop, crossing in placed
        )

    parts = []
    for number, _, line, chapter, cause in reversed(bars):
        label = first_line(f"{number}: {cause}", _CAUSE_CHARACTERS)
        wide = _CHARACTER * len(label)
        begin = min(line, WIDTH - _SIDE - wide)
        row = next((row for row in range(_CAUSES) if fits(row, begin, begin + wide, line)), None)
        if not cause or row is None:
            continue
        placed.append((row, begin, begin + wide, line))
        y = top + _CAUSE * (row + 1) - 3
        parts.append(f'<path d="M{line:.1f} {_TOP + _BAR}V{y - 10:g}" stroke="{_COLOURS[chapter.state]}"/>')
        parts.append(f'<text x="{begin:.1f}" y="{y:g}">{text(label)}</text>')
    return parts, max((row + 1 for row, *_ in placed), default=0)


def _axis(span: float, scale: float, y: float) -> list[str]:
    step = next(
        (step for step in _STEPS_S if span / step <= _LABELS), _STEPS_S[-1] * math.ceil(span / _STEPS_S[-1] / _LABELS)
    )
    parts = [f'<path d="M{_SIDE} {y:g}H{WIDTH - _SIDE}" stroke="currentColor" stroke-opacity=".25"/>']
    for at in range(int(span // step) + 1):
        x, label = _SIDE + scale * at * step, duration(at * step)
        anchor = "start" if not at else "end" if x + _CHARACTER * len(label) / 2 > WIDTH else "middle"
        parts.append(f'<path d="M{x:.1f} {y:g}v3" stroke="currentColor" stroke-opacity=".5"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 14:g}" text-anchor="{anchor}">{label}</text>')
    return parts
