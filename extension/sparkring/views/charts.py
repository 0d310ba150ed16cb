"""The curves of a run as numbers, which the page draws (panel/src/charts.js)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sparkring.history import metrics
from sparkring.history.describe import dotted, number
from sparkring.history.lines import plain
from sparkring.history.metrics import Curve, Mark, Point
from sparkring.history.record import RunRecord
from sparkring.views.markup import AMBER, BLUE

MOST = 6  # the largest number of charts
COLOURS = (BLUE, AMBER)  # the colours of a chart's first and second curve: training and validation
_DIGITS = 6  # significant digits of each value; a screen cannot show more

Column = list[float | None]


@metrics.remembered("metrics", "attempts", "checkpoints", "finished_ranks")
def charts(record: RunRecord) -> dict[str, Any]:
    """Return all charts of a run, as JSON values; {} if there is nothing to draw.

    A chart's `x` lists positions on the horizontal axis, in ascending order. A curve's columns have an entry for each
    of these positions: the curve's value, or None if it has no value at this position.
    """
    table = metrics.table(record)
    found = metrics.curves(record, table)[:MOST] if table.rows else []
    if not found:
        return {}
    axis, marks = metrics.curve_axis(table), metrics.marks(record, table)
    return {
        "axis": axis,
        "legend": legend(found, marks),
        "restarts": [mark.x for mark in marks if mark.kind == "restart"],
        "checkpoints": [mark.x for mark in marks if mark.kind == "checkpoint"],
        "charts": [_chart(curves, axis) for curves in found],
    }


def _chart(curves: Sequence[Curve], axis: str) -> dict[str, Any]:
    xs = sorted({point.x for curve in curves for line in (curve.points, *curve.undone) for point in line})
    drawn = []
    for curve, colour in zip(curves, COLOURS, strict=False):
        told = {
            "name": plain(curve.name),
            "last": number(curve.last),
            "colour": colour,
            "dashed": curve.name.startswith("val_"),
            "mean": _column(xs, _means(curve.points)),
            "ranks": {rank: _column(xs, points) for rank, points in curve.ranks.items()},
            "undone": [_column(xs, _means(points)) for points in curve.undone],
        }
        if has_band(curve):
            bounds = [(point.value.low, point.value.high, point.lowest, point.highest) for point in curve.points]
            for name, values in zip(("low", "high", "lowest", "highest"), zip(*bounds, strict=True), strict=True):
                told[name] = _column(xs, zip((point.x for point in curve.points), values, strict=True))
        drawn.append(told)
    return {"words": plain(words(curves, axis)), "x": xs, "curves": drawn}


def has_band(curve: Curve) -> bool:
    """Return whether the ranks' values differ, but there are too many ranks to draw a line for each of them."""
    return not curve.ranks and any(point.value.differs for point in curve.points)


def _means(points: Sequence[Point]) -> Iterable[tuple[float, float]]:
    return ((point.x, point.value.mean) for point in points)


def _column(xs: Sequence[float], points: Iterable[tuple[float, float]]) -> Column:
    at = dict(points)
    return [float(f"{at[x]:.{_DIGITS}g}") if x in at else None for x in xs]


def words(curves: Sequence[Curve], axis: str) -> str:
    """Describe one chart, for screen readers."""
    ends = [(curve.name, number(curve.points[0].value.mean), number(curve.last)) for curve in curves]
    return "; ".join(f"{name} by {axis}: from {first} to {last}" for name, first, last in ends)


def legend(found: Sequence[Sequence[Curve]], marks: Sequence[Mark]) -> str:
    """Explain the lines and marks that have no labels."""
    curves = [curve for chart in found for curve in chart]
    kinds = {mark.kind for mark in marks}
    return dotted(
        "thick: mean; thin: each rank, in its colour" if any(curve.ranks for curve in curves) else "",
        "band: minimum to maximum" if any(map(has_band, curves)) else "",
        "dotted: discarded by a restart" if any(curve.undone for curve in curves) else "",
        "red: restart" if "restart" in kinds else "",
        "green tick: checkpoint" if "checkpoint" in kinds else "",
    )
