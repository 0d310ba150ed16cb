"""Computes the ranks' metrics, as a table by epoch or by step."""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from sparkring.history.events import Metrics
from sparkring.history.record import RunRecord


class Spread(NamedTuple):
    """One metric over the ranks that reported it."""

    mean: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the ranks' values differ in the digits that are shown."""
        return abs(self.high - self.low) > 1e-4 * max(abs(self.high), abs(self.low))


class Row(NamedTuple):
    """An epoch or a step of one attempt.

    `attempt` is the number of restarts before the attempt. `at` is the number of the epoch or step. `lap` is 1 at
    first, and grows each time counting starts over within the attempt, for example because fit() is called again. If
    the epoch or step was run several times, `turn` numbers these times from 1; otherwise, `turn` is 0. `by_rank` has
    the values by metric and rank. `time` is the time of the last report, and `first` is the time at which the first
    rank had made all its reports of the row.
    """

    attempt: int
    lap: int
    at: int
    by_rank: dict[str, dict[int, float]]
    turn: int = 0
    time: float = 0.0
    first: float = 0.0


class MetricsTable(NamedTuple):
    """The last value of each metric in each epoch, or in each step if no epochs were reported.

    The values of a metric end at the epoch or step that the slowest rank reporting the metric has reached. So a mean
    covers all the ranks that report the metric. What faster ranks have reported beyond that is in the rows `ahead`.
    `laps` says whether counting has started over without a restart. `reached` has, for each attempt, lap, metric and
    rank, the epoch or step of the rank's last report of the metric.
    """

    by: Literal["epoch", "step"]
    names: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    laps: bool = False
    reached: Mapping[tuple[int, int, str, int], int] = {}
    ahead: tuple[Row, ...] = ()

    def label(self, row: Row) -> str:
        """Return the name of a row: `3`, or `2nd 3` if epoch or step 3 was run more than once."""
        return f"{_ordinal(row.turn)} {row.at}" if row.turn else str(row.at)

    def newest(self, count: int) -> list[tuple[Row, dict[str, Spread]]]:
        """Return the last `count` rows, each with the Spread of every metric over the ranks."""
        first = max(0, len(self.rows) - count)
        return [(self.rows[at], spreads) for at, spreads in self._spreads(range(first, len(self.rows)))]

    def last(self) -> dict[str, Spread]:
        """Return the Spread of each metric's last values over the ranks."""
        at = {name: at for at, row in enumerate(self.rows) for name in row.by_rank}
        spreads = dict(self._spreads({*at.values()}))
        return {name: spreads[at[name]][name] for name in self.names}

    def _spreads(self, wanted: Collection[int]) -> Iterator[tuple[int, dict[str, Spread]]]:
        """Yield the number of each row that is `wanted`, and the Spread of each of the row's metrics.

        Ranks may report at different steps. For a step at which a rank has not reported, its value is interpolated.
        """
        later = self._later(wanted)
        lap = (0, 0)
        known: dict[str, dict[int, tuple[float, float]]] = {}
        for number, row in enumerate(self.rows):
            if lap != (row.attempt, row.lap):
                lap, known = (row.attempt, row.lap), {}
            for name, values in row.by_rank.items():
                known.setdefault(name, {}).update((rank, (row.at, value)) for rank, value in values.items())
            if number in wanted:
                spreads = {}
                for name in row.by_rank:
                    there = [rank for rank in known[name] if self.reached[row.attempt, row.lap, name, rank] >= row.at]
                    spreads[name] = spread(
                        between(known[name][rank], later.get((number, name, rank)), row.at) for rank in there
                    )
                yield number, spreads

    def _later(self, wanted: Collection[int]) -> dict[tuple[int, str, int], tuple[float, float]]:
        """Return the place and the value of the next report of each rank that has not reported in a `wanted` row.

        The keys are the number of the row, the metric, and the rank.
        """
        reports: dict[tuple[int, str, int], tuple[float, float]] = {}
        lap = (0, 0)
        following: dict[str, dict[int, tuple[float, float]]] = {}
        for number in range(len(self.rows) - 1, min(wanted, default=len(self.rows)) - 1, -1):
            row = self.rows[number]
            if lap != (row.attempt, row.lap):
                lap, following = (row.attempt, row.lap), {}
            for name, values in row.by_rank.items():
                after = following.setdefault(name, {})
                if number in wanted:
                    reports |= {(number, name, rank): after[rank] for rank in after.keys() - values.keys()}
                after.update((rank, (row.at, value)) for rank, value in values.items())
        return reports


# ── By epoch or step ──────────────────────────────────────────────────────────


@dataclass
class _Place:
    """The epoch or step `at` that a rank has reported last, and whether it has reported the end of this epoch."""

    attempt: int = 0
    lap: int = 1
    at: int | None = None
    ended: bool = False
    reports: int = 0


_Key = tuple[int, int, int]  # attempt, lap, epoch or step
_Made = TypeVar("_Made")


def remembered(*fields: str) -> Callable[[Callable[[RunRecord], _Made]], Callable[[RunRecord], _Made]]:
    """Return a decorator that caches a function's last result until one of these `fields` of the record changes."""

    def remember(make: Callable[[RunRecord], _Made]) -> Callable[[RunRecord], _Made]:
        last: list[tuple[list[Any], _Made]] = []

        @functools.wraps(make)
        def find(record: RunRecord) -> _Made:
            values = [getattr(record, name) for name in fields]
            for known, made in last:  # read `last` only once, because another thread may change it
                if known == values:  # quick if the fields are still the same objects
                    return made
            made = make(record)
            last[:] = [(values, made)]
            return made

        return find

    return remember


@remembered("metrics", "attempts", "finished_ranks")
def table(record: RunRecord) -> MetricsTable:
    """Return all metrics by epoch, or by step if no epochs were reported.

    In a table by step, a report without a step belongs to the step that its rank has reached. If a rank reports no
    steps, or few, its reports are numbered: the first report of the rank is step 1, and so on.
    """
    by: Literal["epoch", "step"] = "epoch" if any(m.epoch is not None for m in record.metrics) else "step"
    names: dict[str, None] = {}
    cells: dict[_Key, dict[str, dict[int, float]]] = {}
    beyond: dict[_Key, dict[str, dict[int, float]]] = {}
    times: dict[_Key, dict[int, float]] = {}
    reached: dict[tuple[int, int, str, int], int] = {}
    for key, metrics, values in shared(record, by):
        for name in metrics.values:
            reached[key[0], key[1], name, metrics.rank] = key[2]
        row = cells.setdefault(key, {})
        times.setdefault(key, {})[metrics.rank] = metrics.time
        for name, value in values.items():
            names[name] = None
            row.setdefault(name, {})[metrics.rank] = value
        for name in metrics.values.keys() - values.keys() if values is not metrics.values else ():
            beyond.setdefault(key, {}).setdefault(name, {})[metrics.rank] = metrics.values[name]
    keys = sorted(key for key, row in cells.items() if row)
    made, so_far = Counter(at for _, _, at in keys), Counter[int]()
    rows = []
    for key in keys:
        attempt, lap, at = key
        so_far[at] += 1
        turn = so_far[at] if made[at] > 1 else 0
        rows.append(Row(attempt, lap, at, cells[key], turn, max(times[key].values()), min(times[key].values())))
    ahead = (Row(*key, beyond[key], first=min(times[key].values())) for key in sorted(beyond))
    return MetricsTable(by, tuple(names), tuple(rows), any(row.lap > 1 for row in rows), reached, tuple(ahead))


def shared(record: RunRecord, by: str) -> Iterator[tuple[_Key, Metrics, dict[str, float]]]:
    """Yield each report's place (attempt, lap, and epoch or step), the report, and those of its values that are shown.

    In the current attempt, a value is shown only when all ranks have reported the metric up to the value's place. There
    is no need to wait for ranks that have finished or have never reported the metric.
    """
    restarts = restarts_of(record)
    shift = 1 - first_epoch(record) if by == "epoch" else 0  # epochs are shown from 1 on, as in the progress of ranks
    finished = frozenset(record.finished_ranks)
    reports: list[tuple[_Key, float, Metrics]] = []
    within: dict[int, tuple[_Key, float]] = {}
    reached: dict[str, dict[int, tuple[_Key, float]]] = {}
    for (attempt, lap, at), metrics in placed(record.metrics, restarts, by):
        key = attempt, lap, at + shift
        before, step = within.get(metrics.rank, (key, 0.0))
        if metrics.ends_epoch:
            step = math.inf
        elif by == "epoch" and metrics.step is not None:
            step = metrics.step
        elif before != key:
            step = 0.0
        within[metrics.rank] = key, step
        reports.append((key, step, metrics))
        if key[0] == len(restarts) and metrics.rank not in finished:  # the current attempt
            for name in metrics.values:
                reached.setdefault(name, {})[metrics.rank] = key, step
    until = {name: min(ranks.values()) for name, ranks in reached.items()}
    for key, step, metrics in reports:
        ahead = [n for n in metrics.values if n in until and (key, step) > until[n]] if key[0] == len(restarts) else []
        yield key, metrics, {n: v for n, v in metrics.values.items() if n not in ahead} if ahead else metrics.values


def restarts_of(record: RunRecord) -> list[float]:
    """Return the start time of every attempt except the first."""
    return [attempt.started for attempt in record.attempts[1:]]


def placed(reports: Sequence[Metrics], restarts: Sequence[float], by: str) -> Iterator[tuple[_Key, Metrics]]:
    """Yield each report with its place: the attempt, the lap, and the epoch or step, as `by` says.

    If `by` is "epoch", a report without an epoch gets the epoch that its rank has reached. The same applies to steps,
    if most of the rank's reports have a step.
    """
    places = defaultdict[int, _Place](_Place)
    numbers = (m.epoch if by == "epoch" else m.step for m in reports)
    first = min((number for number in numbers if number is not None), default=1)
    without = Counter(m.rank for m in reports if m.step is None)
    counting = {rank for rank, many in Counter(m.rank for m in reports).items() if many >= 2 * without[rank]}
    for metrics in reports:
        place = places[metrics.rank]
        attempt = bisect.bisect_right(restarts, metrics.time)
        if attempt != place.attempt:  # a restart makes all ranks start over together
            place.attempt, place.lap, place.at, place.ended = attempt, 1, None, False
        place.reports += 1
        step = place.reports if metrics.step is None and metrics.rank not in counting else metrics.step
        at = metrics.epoch if by == "epoch" else step
        if at is not None:
            # Users may report values for an epoch even after its end. But if such a report has a step, another fit()
            # is running the epoch again.
            again = at == place.at and place.ended and metrics.step is not None
            if place.at is not None and (at < place.at or again):
                place.lap += 1
            place.at, place.ended = at, metrics.ends_epoch
        yield (attempt, place.lap, first if place.at is None else place.at), metrics


def first_epoch(record: RunRecord) -> int:
    """Return the number from which the user counts epochs: 0 or 1."""
    return 0 if any(metrics.epoch == 0 for metrics in record.metrics) else 1


def last_by_rank(record: RunRecord) -> dict[int, dict[str, float]]:
    """Return the last value of each metric on each rank, for the ranks that reported metrics."""
    values: dict[int, dict[str, float]] = {}
    for metrics in record.metrics:
        values.setdefault(metrics.rank, {}).update(metrics.values)
    return dict(sorted(values.items()))


def means(record: RunRecord) -> dict[str, float]:
    """Return the mean of each metric's last values over the ranks. A search has its best trial's value only."""
    search = None if record.items is None else record.items.search
    if search is not None:
        return {} if search.best is None else {search.metric: search.best[1]}
    return {name: spread.mean for name, spread in table(record).last().items()} if record.items is None else {}


def spread(values: Iterable[float]) -> Spread:
    """Return the mean, minimum and maximum of `values`. If a value is not finite, return it for all three."""
    numbers = list(values)
    if len(numbers) == 1:
        return Spread(numbers[0], numbers[0], numbers[0])
    if not math.isfinite(sum(numbers)):
        odd = next((value for value in numbers if not math.isfinite(value)), None)
        if odd is not None:
            return Spread(odd, odd, odd)
    return Spread(mean(numbers), min(numbers), max(numbers))


def differ(values: Iterable[float]) -> bool:
    """Return whether the ranks' values of a metric differ. They also differ if only some of them are finite."""
    known = list(values)
    return spread(known).differs or len({math.isfinite(value) for value in known}) > 1


def between(before: tuple[float, float], after: tuple[float, float] | None, x: float) -> float:
    """Return the value at `x`, interpolated between two points. If there is no point after it, return the value before.

    A point is a pair of a position and a value.
    """
    if after is None or after[0] <= before[0]:
        return before[1]
    share = (x - before[0]) / (after[0] - before[0])
    return before[1] * (1 - share) + after[1] * share


def mean(values: Sequence[float]) -> float:
    """Return the mean of finite values, even if their sum is too large for a float."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def noun(record: RunRecord, metrics_table: MetricsTable) -> str:
    """Return what the table counts: epochs, steps or, if the run trains on a stream, batches.

    On a stream, a report without a step has the number of its batch as the step.
    """
    return "batch" if metrics_table.by == "step" and record.stream is not None else metrics_table.by


def _ordinal(count: int) -> str:
    suffix = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{suffix}"
