"""Small line charts as inline SVG: no scripts, no ids, legible without a style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparkring.history.describe import number
from sparkring.history.metrics import Curve, Mark
from sparkring.views.markup import AMBER, BLUE, GREEN, RED, text, tint

WIDTH, HEIGHT = 250, 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 8, 6, 18
COLOURS = (BLUE, AMBER)  # of training and validation


def chart(curves: Sequence[Curve], axis: str, marks: Sequence[Mark] = ()) -> str:
    """One chart of curves that belong together: the mean, and thin lines of few ranks, or a band of many.

    `marks`: restarts are lines, checkpoints ticks. What a restart went back behind is dotted.
    """
    points = [point for curve in curves for line in (curve.points, *curve.undone) for point in line]
    values = [bound for point in points for bound in (point.value.low, point.value.high)]
    xs = [point.x for point in points] + [mark.x for mark in marks]
    ticks = nice_ticks(min(values), max(values))
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    left, right = min(xs), max(xs)

    def x(at: float) -> str:
        return f"{_LEFT + (WIDTH - _LEFT - _RIGHT) * (at - left) / ((right - left) or 1):.1f}"

    def y(value: float) -> str:
        return f"{_TOP + (HEIGHT - _TOP - _BOTTOM) * (high - value) / ((high - low) or 1):.1f}"

    parts = []
    for tick in ticks:
        parts.append(
            f'<path d="M{_LEFT} {y(tick)}H{WIDTH - _RIGHT}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{_LEFT - 5}" y="{y(tick)}" dy="3.5" text-anchor="end">{number(tick)}</text>'
        )
    base = HEIGHT - 4
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{_LEFT}" y="{base}">{number(left)}</text>'
        f'<text x="{middle}" y="{base}" text-anchor="middle">{text(axis)}</text>'
        f'<text x="{WIDTH - _RIGHT}" y="{base}" text-anchor="end">{number(right)}</text>'
    )
    ticks_at = "".join(f"M{x(mark.x)} {HEIGHT - _BOTTOM}v-5" for mark in marks if mark.kind == "checkpoint")
    lines_at = "".join(f"M{x(mark.x)} {_TOP}V{HEIGHT - _BOTTOM}" for mark in marks if mark.kind == "restart")
    if ticks_at:
        parts.append(f'<path d="{ticks_at}" stroke="{GREEN}" stroke-width="1.2"><title>checkpoints</title></path>')
    if lines_at:
        parts.append(f'<path d="{lines_at}" stroke="{RED}" stroke-dasharray="2 2"><title>restarts</title></path>')
    for curve, colour in zip(curves, COLOURS, strict=False):
        dashes = ' stroke-dasharray="4 3"' if curve.name.startswith("val_") else ""
        for rank in curve.ranks:
            line = " ".join(f"{x(at)},{y(value)}" for at, value in rank.points)
            said = text(f"rank {rank.rank}: {curve.name} {number(rank.points[-1][1])}")
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-opacity=".65" stroke-width=".9"'
                f"{dashes}><title>{said}</title></polyline>"
            )
        for undone in curve.undone:
            line = " ".join(f"{x(point.x)},{y(point.value.mean)}" for point in undone)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-dasharray="1 2"/>')
        line = " ".join(f"{x(point.x)},{y(point.value.mean)}" for point in curve.points)
        if not curve.ranks and any(point.value.differs for point in curve.points):
            above = [f"{x(point.x)},{y(point.value.high)}" for point in curve.points]
            below = [f"{x(point.x)},{y(point.value.low)}" for point in reversed(curve.points)]
            parts.append(f'<polygon points="{" ".join(above + below)}" fill="{colour}" fill-opacity=".18"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
    return (
        f"<figure>{_caption(curves)}"
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{text(words(curves, axis))}" font-size="10" fill="currentColor">{"".join(parts)}</svg></figure>'
    )


def _caption(curves: Sequence[Curve]) -> str:
    named = [
        f'<b style="{tint(colour)}">{text(curve.name)}</b> {number(curve.last)}'
        for curve, colour in zip(curves, COLOURS, strict=False)
    ]
    return f"<figcaption>{' &nbsp; '.join(named)}</figcaption>"


def words(curves: Sequence[Curve], axis: str) -> str:
    """What one chart shows, for those who do not see it."""
    return "; ".join(
        f"{curve.name} by {axis}: from {number(curve.points[0].value.mean)} to {number(curve.last)}" for curve in curves
    )


def nice_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that lie between `low` and `high`; at least one."""
    span = high - low
    if span <= abs(high) * 1e-9 or not math.isfinite(span):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most)
    return [tick * step for tick in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)] or [low]
