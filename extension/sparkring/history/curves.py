"""Computes the curves of the ranks' metrics, and the marks on their horizontal axis, from the table of the metrics."""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from sparkring.history.events import Metrics
from sparkring.history.metrics import MetricsTable, Spread, between, differ, mean, noun, shared, spread
from sparkring.history.record import RunRecord, Sample

CURVE_POINTS = 400  # a chart in the page is about 600 pixels wide
RANK_LINES = 8  # up to this many ranks have a line each; for more ranks, a band is drawn
# If a rank's last report is beyond this fraction of a curve, the rank's last value is repeated until the curve's end.
STILL_THERE = 0.9
# What ranks use of their machines: the names of the curves, and the values of a Sample.
_USED: tuple[tuple[str, Callable[[Sample], float | None]], ...] = (
    ("CPU (%)", lambda sample: sample.cpu_percent),
    ("memory (GB)", lambda sample: sample.memory_bytes / 1e9),
    ("GPU (%)", lambda sample: sample.gpu_percent),
    ("GPU memory (GB)", lambda sample: None if sample.gpu_bytes is None else sample.gpu_bytes / 1e9),
)
# Samples of the same time are drawn as one point. Each rank reports one every 5 s, and a record keeps 60 for each rank.
USED_POINTS, USED_EVERY_S = 60, 5.0
MARKED_PLACES = 100  # the axis is divided into this many parts; marks of one kind in the same part are drawn once
# The last word of a metric's name, if it says for certain which values are better.
_LOW_IS_BETTER = {"loss", "error", "err", "mae", "mse", "rmse", "mape", "perplexity"}
_HIGH_IS_BETTER = {"accuracy", "acc", "auc"}


class Point(NamedTuple):
    """A point of a curve. `lowest` and `highest` are the ranks that reported the lowest and the highest finite value.

    `time` is the time at which the first rank had reached `x`. The mean is not finite if that of some rank is not.
    `odd` says whether any value was not finite.
    """

    x: float
    value: Spread
    lowest: int
    highest: int
    time: float = 0.0
    odd: bool = False


class Curve(NamedTuple):
    """One metric over the course of the run.

    `last` is the metric's last value in the table. It may differ from the last point, which may be the mean of several
    values. If the ranks' values differ, and the ranks are few enough to be told apart, `ranks` has pairs of x and value
    for each rank. If a restart undid epochs or steps of an attempt, `undone` has their means as a separate line.
    `ahead` has points beyond the last one, over the faster ranks that have reached them; the lines in `ranks` continue
    there, too. `best` is the position and the value of the best mean, if it is certain which values are better.
    `ghost` has the means of the last run of the same cell, and `before` its value to compare with (last_run.py).
    """

    name: str
    points: tuple[Point, ...]
    last: float
    ranks: Mapping[int, Sequence[tuple[float, float]]] = {}
    undone: tuple[tuple[Point, ...], ...] = ()
    ahead: tuple[Point, ...] = ()
    best: tuple[float, float] | None = None
    ghost: tuple[Point, ...] = ()
    before: float | None = None


class Mark(NamedTuple):
    """Something that happened at a position on the curves' horizontal axis."""

    x: float
    kind: Literal["checkpoint", "restart"]


class _Measured(NamedTuple):
    """One metric at a position on the horizontal axis, and the time at which the fastest rank reached that position."""

    x: float
    by_rank: dict[int, float]
    time: float


def curves_of(record: RunRecord, table: MetricsTable, most: int = CURVE_POINTS) -> list[list[Curve]]:
    """Return the curves of each chart, with at most `most` points in each of the lines that make up a curve.

    A training metric and its validation metric (`loss`, `val_loss`) share a chart.
    A metric has no curve if it is finite at fewer than 3 positions, or if no rank has reported a finite value twice.
    Where a rank's values are not finite, its line and the mean have a gap, and the other ranks' lines go on.
    """
    charts: dict[str, list[Curve]] = {}
    measured, ahead, undone = _measured(record, table)
    last, chosen = table.last(), _chosen_by_checkpoints(record)
    for name in sorted(table.names, key=lambda name: name.startswith("val_")):
        mine = measured.get(name, [])
        finite = [[rank for rank, value in m.by_rank.items() if math.isfinite(value)] for m in mine]
        reports = Counter(rank for ranks in finite for rank in ranks)
        if sum(map(bool, finite)) > 2 and max(reports.values()) > 1:
            beyond = [measurement for measurement in ahead.get(name, ()) if measurement.x > mine[-1].x]
            stride = -(-(len(mine) + len(beyond)) // most)
            going = {rank for measurement in beyond for rank in measurement.by_rank}
            (points, by_rank), (faster, their) = _thinned(mine, stride, going), _thinned(beyond, stride)
            for rank, line in their.items():
                by_rank.setdefault(rank, []).extend(line)
            lost = (part.get(name, []) for part in undone.values())
            lines = tuple(_thinned(part, -(-len(part) // most))[0] for part in lost if len(part) > 1)
            mode = chosen.get(name) or mode_of(name)
            best = _best(mine, mode, going) if mode else None
            curve = Curve(name, points, last[name].mean, _rank_lines(by_rank), lines, faster, best)
            charts.setdefault(name.removeprefix("val_"), []).append(curve)
    return list(charts.values())


_Mode = Literal["min", "max"]


def better(record: RunRecord, name: str) -> _Mode | None:
    """Whether the lowest or the highest value of a metric is best; None if it is not certain."""
    return _chosen_by_checkpoints(record).get(name) or mode_of(name)


def mode_of(name: str) -> _Mode | None:
    """Whether the lowest or the highest value of a metric is best, if the metric's name makes this clear."""
    words = re.findall("[a-z]+", name.lower())
    last = words[-1] if words else ""
    return "min" if last in _LOW_IS_BETTER else "max" if last in _HIGH_IS_BETTER else None


def _chosen_by_checkpoints(record: RunRecord) -> dict[str, _Mode]:
    """Return the metric by which the best checkpoint was chosen, with its mode, if there is only one such metric."""
    best = next((checkpoint.saved for checkpoint in reversed(record.checkpoints) if checkpoint.saved.best), None)
    if best is None:
        return {}
    place, modes = (best.folder, best.kind), dict[str, _Mode]()
    others = [
        checkpoint.saved.metrics
        for checkpoint in record.checkpoints
        if (checkpoint.saved.folder, checkpoint.saved.kind) == place
    ]
    for name, value in best.metrics.items():
        values = {metrics[name] for metrics in others if name in metrics}
        if len(values) > 1 and value in (min(values), max(values)):
            modes[name] = "min" if value == min(values) else "max"
    return modes if len(modes) == 1 else {}


def _best(measured: list[_Measured], mode: _Mode, going: Container[int]) -> tuple[float, float] | None:
    """Return the position and the value of the best mean over all ranks that report the metric."""
    points, _ = _thinned(measured, 1, going)
    ranks, complete = set[int](), 0  # the means at positions before `complete` do not cover all ranks
    for at, measurement in enumerate(measured):
        if not ranks.issuperset(measurement.by_rank):
            ranks.update(measurement.by_rank)
            complete = at
    pick = min if mode == "min" else max
    finite = (point for point in points[complete:] if math.isfinite(point.value.mean))
    best = pick(finite, key=lambda point: point.value.mean, default=None)
    return None if best is None else (best.x, best.value.mean)


_ByName = dict[str, list[_Measured]]


def _measured(record: RunRecord, table: MetricsTable) -> tuple[_ByName, _ByName, dict[int, _ByName]]:
    """Return three kinds of measurements, each by metric: those that cover all ranks, later ones that only the faster
    ranks have reported so far, and, for each attempt, those that a restart has undone."""
    measured: _ByName = {}
    ahead: _ByName = {}
    undone: dict[int, _ByName] = {}
    if _by_steps(table):
        return _within_epochs(record, table)
    xs, kept = _xs(table), _kept(table)
    for row, x, keep in zip(table.rows, xs, kept, strict=True):
        where = measured if keep else undone.setdefault(row.attempt, {})
        for name, by_rank in row.by_rank.items():
            where.setdefault(name, []).append(_Measured(x, by_rank, row.first))
    newest = table.rows[-1]
    later = [row for row in table.ahead if not table.laps or row[:3] > newest[:3]]
    for number, row in enumerate(later, len(table.rows) + 1):
        for name, by_rank in row.by_rank.items():
            ahead.setdefault(name, []).append(_Measured(number if table.laps else row.at, by_rank, row.first))
    return measured, ahead, undone


def _by_steps(table: MetricsTable) -> bool:
    """Return whether to draw the curves by step, because restarts have left too few rows for curves."""
    return sum(_kept(table)) <= 2


def _xs(table: MetricsTable) -> list[int]:
    """Return the position of each row: its epoch or step, or the row's own number if counting started over."""
    return [*range(1, len(table.rows) + 1)] if table.laps else [row.at for row in table.rows]


def _kept(table: MetricsTable) -> list[bool]:
    """Return whether each row is kept. A row is undone if a later attempt began at or before its epoch or step."""
    if table.laps or not table.rows or not table.rows[-1].attempt:
        return [True] * len(table.rows)
    kept, lowest = [], math.inf
    for row, later in zip(table.rows[::-1], (None, *table.rows[:0:-1]), strict=True):
        if later is not None and later.attempt != row.attempt:
            lowest = min(lowest, later.at)  # the first epoch or step of the later attempt
        kept.append(row.at < lowest)
    return kept[::-1]


_Places = dict[str, dict[float, _Measured]]


def _within_epochs(record: RunRecord, table: MetricsTable) -> tuple[_ByName, _ByName, dict[int, _ByName]]:
    """Return the same as _measured(), but for the values that were reported for steps."""
    steps = list(_steps(record, table))
    begins: dict[int, float] = {}
    for attempt, x, *_ in steps:
        begins[attempt] = min(x, begins.get(attempt, x))
    shown: _Places = {}
    ahead: _Places = {}
    undone: dict[int, _Places] = {}
    for attempt, x, metrics, shown_values in steps:
        lost = not table.laps and any(x >= begin for later, begin in begins.items() if later > attempt)
        for name, value in metrics.values.items():
            part = undone.setdefault(attempt, {}) if lost else shown if name in shown_values else ahead
            # Reports are in the order of their times.
            at = part.setdefault(name, {}).setdefault(x, _Measured(x, {}, metrics.time))
            at.by_rank[metrics.rank] = value
    return _in_order(shown), _in_order(ahead), {attempt: _in_order(part) for attempt, part in undone.items()}


def _in_order(part: _Places) -> _ByName:
    return {name: [places[x] for x in sorted(places)] for name, places in part.items()}


def _steps(record: RunRecord, table: MetricsTable) -> Iterator[tuple[int, float, Metrics, dict[str, float]]]:
    """Yield for each report with a step: the attempt, the step, the report, and the values that the table shows.

    Step numbers continue from one epoch to the next. If it is not known how many steps an epoch has, its last report
    counts as its last step. The end of an epoch is at the epoch's last step. Without it, the curve would end before the
    metric's last value.
    """

    def place_of(attempt: int, lap: int, at: int) -> tuple[int, ...]:
        return (attempt, lap, at) if table.laps else (at,)  # if counting started over, nothing is at the same place

    rows = [row[:3] for row in (*table.rows, *table.ahead)]
    numbers = {place: number for number, place in enumerate(sorted({place_of(*row) for row in rows}))}
    if table.by == "epoch" and not table.laps:
        numbers = {place: place[0] - 1 for place in numbers}  # the run may have continued in a later epoch
    sizes = dict[int, int]()  # each rank's number of steps in an epoch
    reached = dict[tuple[int, tuple[int, ...]], int]()  # each rank's last step in each place
    steps: dict[tuple[int, ...], list[tuple[int, int, int, Metrics, dict[str, float]]]] = {}
    for (attempt, lap, at), metrics, values in shared(record, table.by):
        place, rank, step, size = place_of(attempt, lap, at), metrics.rank, metrics.step, metrics.steps or 0
        if size:
            sizes[rank] = size
        elif step is None and metrics.ends_epoch:
            size = sizes.get(rank, 0)
            step = size or reached.get((rank, place))
        if step is not None and place in numbers:
            reached[rank, place] = step
            steps.setdefault(place, []).append((attempt, step, size, metrics, values))
    last, end = -1, 0
    for place in sorted(steps):
        those = [step for _, step, _, _, _ in steps[place]]
        begin = end if min(those) <= last else 0  # if steps do not start over, they are counted over all epochs
        for attempt, step, size, metrics, values in steps[place]:
            yield attempt, step + (numbers[place] * size if size and table.by == "epoch" else begin), metrics, values
        last, end = max(those), begin + max(those) + (min(those) == 0)


def curve_axis(record: RunRecord, table: MetricsTable) -> str:
    """Return what the curves' horizontal axis counts."""
    if _by_steps(table):
        return "step"
    counted = noun(record, table)
    return f"{counted}{'es' if counted == 'batch' else 's'} in total" if table.laps else counted


def other_axes(record: RunRecord, table: MetricsTable) -> dict[str, tuple[float, float]]:
    """Return what else the horizontal axis can count: epochs instead of steps, or steps instead of epochs.

    Each name has the numbers (offset, factor) that turn a position on curve_axis() into one on this axis. An epoch must
    have the same number of steps everywhere.
    """
    sizes = {metrics.steps for metrics in record.metrics if metrics.epoch is not None and metrics.steps}
    if table.by != "epoch" or len(sizes) != 1:
        return {}
    steps = sizes.pop()
    if _by_steps(table):
        return {"epoch": (0, 1 / steps)}
    return {"step": (0, steps)}


_Lines = dict[int, list[tuple[float, float]]]


def _rank_lines(by_rank: _Lines) -> _Lines:
    """Return the ranks' lines if they can be told apart: if there are several but not too many, and they differ."""
    if not 1 < len(by_rank) <= RANK_LINES:
        return {}
    at: dict[float, list[float]] = {}
    for points in by_rank.values():
        for x, value in points:
            at.setdefault(x, []).append(value)
    return dict(sorted(by_rank.items())) if any(map(differ, at.values())) else {}


def _thinned(measured: list[_Measured], stride: int, going: Container[int] = ()) -> tuple[tuple[Point, ...], _Lines]:
    """Return a point for every `stride` neighbouring measurements, and the points of each rank's own line.

    If a rank has none of these measurements, its value is interpolated. After a rank's last measurement, the value of
    that measurement is used. Ranks in `going` have later reports, so they are included up to the last measurement.
    """
    last = {rank: at for at, measurement in enumerate(measured) for rank in measurement.by_rank}
    gaps = any(len(measurement.by_rank) < len(last) for measurement in measured)
    measurements: _Lines = {rank: [] for rank in last}
    for measurement in measured if gaps else ():
        for rank, number in measurement.by_rank.items():
            measurements[rank].append((measurement.x, number))
    seen = Counter[int]()
    points: list[Point] = []
    by_rank: _Lines = {}
    for begin in range(0, len(measured), stride):
        some = measured[begin : begin + stride]
        x, values = some[-1].x, dict[int, list[float]]()
        for measurement in some:
            for rank, number in measurement.by_rank.items():
                values.setdefault(rank, []).append(number)
        for rank in by_rank:
            there = rank in going or last[rank] >= min(begin, STILL_THERE * len(measured))
            if rank not in values and there:
                own, at = measurements[rank], seen[rank]
                values[rank] = [between(own[at - 1], own[at] if at < len(own) else None, x)]
        for measurement in some if gaps else ():
            seen.update(measurement.by_rank.keys())
        count = sum(map(len, values.values()))
        finite = {rank: [*filter(math.isfinite, numbers)] for rank, numbers in values.items()}
        means = {rank: mean(finite[rank] or numbers[:1]) for rank, numbers in values.items()}
        none = math.nan, next(iter(values))
        low, lowest = min(((min(numbers), rank) for rank, numbers in finite.items() if numbers), default=none)
        high, highest = max(((max(numbers), rank) for rank, numbers in finite.items() if numbers), default=none)
        odd = sum(map(len, finite.values())) < count
        value = Spread(spread(means.values()).mean, low, high)
        points.append(Point(x, value, lowest, highest, some[-1].time, odd))
        for rank, number in means.items():
            by_rank.setdefault(rank, []).append((x, number))
    return tuple(points), by_rank


def used_curves(record: RunRecord, table: MetricsTable) -> list[list[Curve]]:
    """Return curves of what ranks use of their machines, each in a chart of its own, on the axis of the other curves.

    They cover the time from the first to the last report of a metric.
    """
    by_time = _by_time(record, table)
    if not by_time:
        return []
    began, ended = by_time[0][0], by_time[-1][0]
    part_s = max(USED_EVERY_S, (ended - began) / USED_POINTS)
    charts = []
    for name, value_of in _USED:
        parts: dict[int, dict[int, float]] = {}  # by the number of the part, the last value of each rank
        for rank in record.ranks:
            for sample in rank.samples:
                if began <= sample.time <= ended and (value := value_of(sample)) is not None:
                    parts.setdefault(int((sample.time - began) / part_s), {})[rank.rank] = value
        measured = dict[float, _Measured]()
        for part in sorted(parts):
            time = min(began + part_s * (part + 0.5), ended)
            x = _x_at(by_time, time)
            measured[x] = _Measured(x, parts[part], time)
        if len(measured) > 2:
            points, by_rank = _thinned([measured[x] for x in sorted(measured)], 1)
            charts.append([Curve(name, points, points[-1].value.mean, _rank_lines(by_rank))])
    return charts


def marks_of(record: RunRecord, table: MetricsTable) -> list[Mark]:
    """Return marks where checkpoints were saved, and where attempts began after a restart."""
    by_time = _by_time(record, table)
    if not by_time:
        return []
    marked = []
    for checkpoint in record.checkpoints:
        if checkpoint.attempt or not record.attempts:  # otherwise, an earlier run saved the checkpoint
            exact = table.by == "step" and not (_by_steps(table) or table.laps) and checkpoint.saved.kind == "sparkring"
            marked.append(Mark(checkpoint.saved.step if exact else _x_at(by_time, checkpoint.saved.time), "checkpoint"))
    for attempt in record.attempts[1:]:
        first = bisect.bisect_left(by_time, (attempt.started, -math.inf))
        if first < len(by_time):
            marked.append(Mark(by_time[first][1], "restart"))
    low, high = min(x for _, x in by_time), max(x for _, x in by_time)
    within = [mark for mark in marked if low <= mark.x <= high]
    apart = {(round(MARKED_PLACES * (mark.x - low) / ((high - low) or 1)), mark.kind): mark for mark in within}
    return sorted(apart.values())


def _by_time(record: RunRecord, table: MetricsTable) -> list[tuple[float, float]]:
    """Return the time of each report, with the position on the horizontal axis that the run had reached by then."""
    if not _by_steps(table):
        return sorted((row.time, float(x)) for row, x in zip(table.rows, _xs(table), strict=True))
    return sorted((metrics.time, x) for _, x, metrics, values in _steps(record, table) if values)


def _x_at(by_time: list[tuple[float, float]], time: float) -> float:
    """Return the position that the run had reached at `time`, interpolated between two reports."""
    after = bisect.bisect_left(by_time, (time, -math.inf))
    if after in (0, len(by_time)):
        return by_time[min(after, len(by_time) - 1)][1]
    (began, low), (ended, high) = by_time[after - 1 : after + 1]
    return low if high < low else low + (high - low) * (time - began) / ((ended - began) or 1)
