"""The curves of a run as numbers, which the page draws (panel/src/charts.js)."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from sparkring.history import metrics
from sparkring.history.curves import Curve, Mark, Point, curve_axis, curves_of, marks_of, other_axes, used_curves
from sparkring.history.describe import change, dotted, number
from sparkring.history.last_run import with_last_run
from sparkring.history.lines import plain
from sparkring.history.record import RunRecord
from sparkring.views.markup import AMBER, BLUE, RANK_COLOURS

MOST = 6  # the largest number of charts
COLOURS = (BLUE, AMBER)  # the colours of a chart's first and second curve: training and validation
MEAN_COLOURS = ("#6b7280", "#8a6a4a")  # beside lines of ranks: no rank has these colours
DASHED = "dashed: validation"
_DIGITS, _TIME_DIGITS = 6, 5  # the significant digits of values and times; a screen cannot show more
_LONG = 16  # if a column of at least this length has only grown, only its new numbers are sent

Column = list["float | str | None"]


@metrics.remembered("log_folder", "started", "metrics", "attempts", "checkpoints", "finished_ranks", "outcome")
def charts(record: RunRecord) -> dict[str, Any]:
    """Return all charts of a run, as JSON values; {} if there is nothing to draw.

    `axes` holds the other quantities that the horizontal axis can show besides `axis` (other_axes). A chart's
    `x` lists positions on `axis`, in ascending order. Its `time` lists when the first rank reached each position, in
    seconds since the run began. The columns of a curve have an entry for each position: the value of the curve, or
    None, or text if the value is not finite. `odd` lists the spans of positions with such values of any rank. If a
    curve has `until`, only the faster ranks have reached the positions after `until`. Steps that a restart has undone
    have their own `x` and `time`. Charts of what ranks use of their machines are `used`.
    """
    table = metrics.table(record)
    drawn = with_last_run(record, curves_of(record, table)[:MOST]) if table.rows else []
    if not drawn:
        return {}
    axis, marks, used = curve_axis(record, table), marks_of(record, table), used_curves(record, table)
    return {
        "axis": axis,
        "axes": other_axes(record, table),
        "legend": legend([*drawn, *used], marks),
        "restarts": [mark.x for mark in marks if mark.kind == "restart"],
        "checkpoints": [mark.x for mark in marks if mark.kind == "checkpoint"],
        "charts": [chart(curves, axis, record.started) for curves in drawn]
        + [chart(curves, axis, record.started) | {"used": True} for curves in used],
    }


def chart(curves: Sequence[Curve], axis: str, began: float) -> dict[str, Any]:
    """Return one chart, with its times since `began`."""
    times = _times((point for curve in curves for point in (*curve.points, *curve.ahead)), began)
    xs = list(times)
    drawn = []
    for curve, colour in zip(curves, colours(curves), strict=False):
        lone = not curve.ranks and not has_band(curve)  # the faster ranks have neither lines of their own nor a band
        columns: dict[str, Any] = {
            "name": plain(curve.name),
            "last": number(curve.last) + change(curve.last, curve.before),
            "colour": colour,
            "dashed": curve.name.startswith("val_"),
            "mean": _column(xs, means((*curve.points, *curve.ahead) if lone else curve.points)),
            "ranks": {rank: _column(xs, points) for rank, points in curve.ranks.items()},
            "undone": [
                {
                    "x": [p.x for p in part],
                    "time": list(_times(part, began).values()),
                    "mean": _column([p.x for p in part], means(part)),
                }
                for part in curve.undone
            ],
        }
        if curve.ghost:
            columns["ghost"] = {
                "x": [point.x for point in curve.ghost],
                "time": list(_times(curve.ghost, began).values()),
                "mean": _column([point.x for point in curve.ghost], means(curve.ghost)),
            }
        if curve.ahead:
            columns["until"] = curve.points[-1].x
        if curve.best is not None:
            columns["best"] = {"x": curve.best[0], "value": _short(curve.best[1])}
        if has_band(curve):
            points = (*curve.points, *curve.ahead)
            bounds = [(point.value.low, point.value.high, point.lowest, point.highest) for point in points]
            for name, values in zip(("low", "high", "lowest", "highest"), zip(*bounds, strict=True), strict=True):
                columns[name] = _column(xs, zip((point.x for point in points), values, strict=True))
        drawn.append(columns)
    made = {"words": plain(words(curves, axis)), "x": xs, "time": list(times.values()), "curves": drawn}
    return {**made, "odd": odd} if (odd := odd_spans(curves)) else made


def colours(curves: Sequence[Curve]) -> tuple[str, ...]:
    """Return the colours of a chart's curves. If ranks have lines, too, no mean has the colour of a rank."""
    if any(curve.ranks for curve in curves):
        return MEAN_COLOURS
    return COLOURS if len(curves) <= len(COLOURS) else RANK_COLOURS


def odd_spans(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """Return the first and the last position of each stretch of a chart where some rank's values are not finite."""
    points = sorted({(point.x, point.odd) for curve in curves for point in (*curve.points, *curve.ahead)})
    # If two curves share a position, an odd value counts. It comes last, so it replaces the other.
    stretches = itertools.groupby(dict(points).items(), operator.itemgetter(1))
    xs = [[x for x, _ in stretch] for is_odd, stretch in stretches if is_odd]
    return [(stretch[0], stretch[-1]) for stretch in xs]


def since(old: Any, new: Any) -> Any:
    """Return `new` without the values that `old` also has.

    A long list that begins with the n entries of the old list becomes {"from": n, "then": [...]}. "then" lists the
    other entries. src/series.js joins the two parts again.
    """
    if isinstance(new, dict):
        return {key: since(old.get(key) if isinstance(old, dict) else None, value) for key, value in new.items()}
    if not isinstance(new, list) or not isinstance(old, list):
        return new
    if any(isinstance(entry, (dict, list)) for entry in new[:1]):
        return [since(was, entry) for was, entry in itertools.zip_longest(old[: len(new)], new)]
    same = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, old, new)))
    return {"from": same, "then": new[same:]} if same >= _LONG else new


def has_band(curve: Curve) -> bool:
    """Return whether the ranks' values differ, but there are too many ranks to draw a line for each of them."""
    return not curve.ranks and (any(point.value.differs for point in curve.points) or lacks_means(curve))


def lacks_means(curve: Curve) -> bool:
    """Return whether there are positions without a finite mean at which some rank's value is finite.

    There, the edges of a band are drawn, because the other ranks' values may all be the same.
    """
    return any(math.isfinite(point.value.low) and not math.isfinite(point.value.mean) for point in curve.points)


def means(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return pairs of a position and a mean."""
    return [(point.x, point.value.mean) for point in points]


def _column(xs: Sequence[float], points: Iterable[tuple[float, float]]) -> Column:
    at = dict(points)
    return [(_short(at[x]) if math.isfinite(at[x]) else number(at[x])) if x in at else None for x in xs]


def _times(points: Iterable[Point], began: float) -> dict[float, float]:
    """Return the time when any rank first reached each position, in seconds since the run began. Positions ascend.

    A rank that has reported a later position has also reached the earlier ones, even if only slower ranks report those.
    """
    times = dict(sorted(((point.x, point.time) for point in points), reverse=True))
    time = math.inf
    for x in times:
        time = times[x] = min(time, times[x])
    return {x: _short(time - began, _TIME_DIGITS) for x, time in reversed(times.items())}


def _short(value: float, digits: int = _DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def words(curves: Sequence[Curve], axis: str) -> str:
    """Describe one chart, for screen readers."""
    descriptions = []
    for curve in curves:
        ends = f"from {number(curve.points[0].value.mean)} to {number(curve.last)}"
        best = f", {best_words(curve, axis)}" if curve.best else ""
        descriptions.append(f"{curve.name} by {axis}: {ends}{best}")
    return "; ".join(descriptions)


def best_words(curve: Curve, axis: str) -> str:
    """Describe the best value: `best 0.122 at step 61`; '' if it is not known. src/series.js uses the same words."""
    if curve.best is None:
        return ""
    x, value = number(curve.best[0]), number(curve.best[1])
    return f"best {value} at {f'{axis} {x}' if axis in ('step', 'epoch', 'batch') else f'{x} {axis}'}"


def legend(shown: Sequence[Sequence[Curve]], marks: Sequence[Mark]) -> str:
    """Explain the lines and marks that have no labels."""
    curves = [curve for chart in shown for curve in chart]
    kinds = {mark.kind for mark in marks}
    return dotted(
        "thick: mean · thin: each rank, in its colour" if any(curve.ranks for curve in curves) else "",
        DASHED if any(curve.name.startswith("val_") for curve in curves) else "",
        "band: minimum to maximum" if any(map(has_band, curves)) else "",
        "faint: steps that only some ranks have reported" if any(curve.ahead for curve in curves) else "",
        "pale line: the last run of this cell" if any(curve.ghost for curve in curves) else "",
        "dotted: discarded by a restart" if any(curve.undone for curve in curves) else "",
        "dashed red: restart" if "restart" in kinds else "",
        "red bar at the top: NaN or infinite" if any(map(odd_spans, shown)) else "",
        "ring: best value" if any(curve.best for curve in curves) else "",
        "green tick: checkpoint" if "checkpoint" in kinds else "",
    )
