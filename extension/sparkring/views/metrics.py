"""What ranks measured, as a table by epoch (or by step) and as curves, and how far they have come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sparkring.events import Metrics
from sparkring.record import RunRecord

CURVE_POINTS = 100


class Spread(NamedTuple):
    """One metric over the ranks that reported it."""

    mean: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Did ranks report values that are not the same in the digits that are shown?"""
        return abs(self.high - self.low) > 1e-4 * max(abs(self.high), abs(self.low))


@dataclass(frozen=True)
class Row:
    """An epoch or a step; `lap` counts from 1 how often the counting began anew (several fits, a restart)."""

    lap: int
    at: int
    values: dict[str, Spread]


@dataclass(frozen=True)
class Table:
    """The last value of each metric in each epoch, or step where no epochs were reported."""

    by: Literal["epoch", "step"]
    names: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()

    def label(self, row: Row) -> str:
        """What to call a row: `3`, or `2nd 3` when the counting began anew."""
        several = self.rows[-1].lap > 1
        return f"{_ordinal(row.lap)} {row.at}" if several else str(row.at)


class Point(NamedTuple):
    """A place on a curve."""

    x: float
    value: Spread


@dataclass(frozen=True)
class Curve:
    """One metric over the course of the run; `last` is its last value, which a point may blur."""

    name: str
    points: tuple[Point, ...]
    last: float


@dataclass(frozen=True)
class Progress:
    """How far a rank has come; `epoch` is the how-manieth, whatever the user's counting begins with."""

    rank: int
    epoch: int | None
    epochs: int | None
    step: int | None
    steps: int | None
    fraction: float | None
    left_s: float | None


# ── By epoch or step ──────────────────────────────────────────────────────────


@dataclass
class _Place:
    """Where the reports of one rank have come to."""

    lap: int = 1
    at: int | None = None
    ended: bool = False
    reports: int = 0


def table(record: RunRecord) -> Table:
    """All metrics by epoch; by step, or by number of report, where no epochs were reported."""
    by: Literal["epoch", "step"] = "epoch" if any(m.epoch is not None for m in record.metrics) else "step"
    names: dict[str, None] = {}
    cells: dict[tuple[int, int], dict[str, dict[int, float]]] = {}
    for key, metrics in placed(record.metrics, by):
        row = cells.setdefault(key, {})
        for name, value in metrics.values.items():
            names[name] = None
            row.setdefault(name, {})[metrics.rank] = value
    rows = tuple(
        Row(lap, at, {name: spread(found.values()) for name, found in cells[lap, at].items()})
        for lap, at in sorted(cells)
        if cells[lap, at]
    )
    return Table(by, tuple(names), rows)


def placed(reports: Sequence[Metrics], by: str) -> Iterator[tuple[tuple[int, int], Metrics]]:
    """Each report with its lap and its epoch or step; one that names none belongs where its rank is."""
    places: dict[int, _Place] = {}
    first = min((m.epoch for m in reports if m.epoch is not None), default=1)
    for metrics in reports:
        place = places.setdefault(metrics.rank, _Place())
        place.reports += 1
        step = place.reports if metrics.step is None else metrics.step
        at = metrics.epoch if by == "epoch" else step
        if at is not None:
            # After an epoch's end a user may still report on it; steps of it are those of another fit.
            again = at == place.at and place.ended and metrics.step is not None
            if place.at is not None and (at < place.at or again):
                place.lap += 1
            place.at, place.ended = at, metrics.ends_epoch
        yield (place.lap, first if place.at is None else place.at), metrics


def last_by_rank(record: RunRecord) -> dict[int, dict[str, float]]:
    """The last value of each metric on each rank that reported any."""
    found: dict[int, dict[str, float]] = {}
    for metrics in record.metrics:
        found.setdefault(metrics.rank, {}).update(metrics.values)
    return dict(sorted(found.items()))


def last(record: RunRecord) -> dict[str, Spread]:
    """The last value of each metric, over the ranks."""
    by_name: dict[str, list[float]] = {}
    for values in last_by_rank(record).values():
        for name, value in values.items():
            by_name.setdefault(name, []).append(value)
    return {name: spread(values) for name, values in by_name.items()}


def spread(values: Iterable[float]) -> Spread:
    """The mean of some values and what they lie between; not a number if one of them is not."""
    found = list(values)
    if not all(math.isfinite(value) for value in found):
        odd = next(value for value in found if not math.isfinite(value))
        return Spread(odd, odd, odd)
    return Spread(math.fsum(found) / len(found), min(found), max(found))


# ── Curves ────────────────────────────────────────────────────────────────────


def curves(record: RunRecord, found: Table) -> list[list[Curve]]:
    """The curves, those of training and validation (`loss`, `val_loss`) together; none of two points only."""
    charts: dict[str, list[Curve]] = {}
    points = _points(record, found)
    for name in sorted(found.names, key=lambda name: name.startswith("val_")):
        mine = [point for point in points.get(name, ()) if math.isfinite(point.value.mean)]
        if len(mine) > 2:
            curve = Curve(name, tuple(_thinned(mine)), mine[-1].value.mean)
            charts.setdefault(name.removeprefix("val_"), []).append(curve)
    return list(charts.values())


def _points(record: RunRecord, found: Table) -> dict[str, list[Point]]:
    points: dict[str, list[Point]] = {}
    if len(found.rows) > 2:
        several = found.rows[-1].lap > 1
        for number, row in enumerate(found.rows, 1):
            for name, value in row.values.items():
                points.setdefault(name, []).append(Point(number if several else row.at, value))
        return points
    # Few epochs: within them, as one rank saw it. What is measured once per epoch has no curve then.
    rank = min((metrics.rank for metrics in record.metrics), default=0)
    before = {(row.lap, row.at): number for number, row in enumerate(found.rows)}
    for place, metrics in placed(record.metrics, found.by):
        if metrics.rank == rank and metrics.step is not None and place in before:
            x = before[place] * (metrics.steps or 0) + metrics.step
            for name, number_ in metrics.values.items():
                points.setdefault(name, []).append(Point(x, Spread(number_, number_, number_)))
    return points


def curve_axis(found: Table) -> str:
    """What the curves' horizontal axis counts."""
    if len(found.rows) <= 2:
        return "step"
    return found.by if found.rows[-1].lap == 1 else f"{found.by}s in all"


def _thinned(points: list[Point]) -> Iterator[Point]:
    """At most CURVE_POINTS points, each standing for as many neighbours, whose spread it keeps."""
    stride = -(-len(points) // CURVE_POINTS)
    for begin in range(0, len(points), stride):
        some = points[begin : begin + stride]
        mean = math.fsum(point.value.mean for point in some) / len(some)
        low, high = min(point.value.low for point in some), max(point.value.high for point in some)
        yield Point(some[-1].x, Spread(mean, low, high))


# ── Progress ──────────────────────────────────────────────────────────────────


@dataclass
class _Course:
    """The reports of one rank that can be compared: newest first, back to where it began anew."""

    newest: Metrics
    newest_done: float | None
    oldest: Metrics = field(init=False)
    oldest_done: float | None = None

    def __post_init__(self) -> None:
        self.oldest, self.oldest_done = self.newest, self.newest_done


def progress(record: RunRecord, now: float) -> Progress | None:
    """How far the lowest rank that counts epochs or steps has come; None if no rank does."""
    counting = [m for m in record.metrics if m.epoch is not None or m.step is not None]
    if not counting:
        return None
    rank = min(metrics.rank for metrics in counting)
    first = 0 if any(metrics.epoch == 0 for metrics in counting) else 1
    course: _Course | None = None
    for metrics in reversed(counting):
        if metrics.rank != rank:
            continue
        done = _done(metrics, first)
        if course is None:
            course = _Course(metrics, done)
        elif done is None or course.oldest_done is None or done > course.oldest_done:
            break
        else:
            course.oldest, course.oldest_done = metrics, done
    assert course is not None
    at, fraction = course.newest, course.newest_done
    epoch = None if at.epoch is None else at.epoch + 1 - first
    return Progress(
        rank, epoch, at.epochs, None if at.ends_epoch else at.step, at.steps, fraction, _left_s(course, now)
    )


def _done(metrics: Metrics, first: int) -> float | None:
    """The share of the whole that is done, where the totals are known."""
    within = 0.0
    if metrics.ends_epoch:
        within = 1.0
    elif metrics.step and metrics.steps:
        within = min(1.0, metrics.step / metrics.steps)
    if metrics.epoch is not None and metrics.epochs:
        return min(1.0, max(0.0, (metrics.epoch - first + within) / metrics.epochs))
    if metrics.epoch is None and metrics.steps and metrics.step is not None:
        return within
    return None


def _left_s(course: _Course, now: float) -> float | None:
    if course.newest_done is None or course.oldest_done is None or course.newest_done >= 1:
        return None
    took, made = course.newest.time - course.oldest.time, course.newest_done - course.oldest_done
    if took < 1 or made <= 0:
        return None  # too early to tell
    return max(0.0, took / made * (1 - course.newest_done) - (now - course.newest.time))


def _ordinal(count: int) -> str:
    suffix = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{suffix}"
