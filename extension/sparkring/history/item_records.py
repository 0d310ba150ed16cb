"""The records of a run's independent items. For each kind of event, a function returns the records after the event."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from sparkring.history import events
from sparkring.history.events import Curve, CurvesBy

ITEMS_KEPT = 20_000  # how many ended items the record keeps, so that an endless run does not fill the memory
# At most this many of an item's metrics have a curve, and a curve has at most this many points. The more items have
# ended, the fewer points are kept for the next item that ends. So each time the number of ended items grows tenfold,
# the record grows by about 2.3 × POINTS_KEPT points.
CURVES_KEPT, CURVE_POINTS = 6, 64
POINTS_KEPT, FEWEST_POINTS = 40_000, 4

ItemState = Literal["running", "finished", "failed", "stopped", "kept", "pruned"]


class ItemRecord(NamedTuple):
    """One item. `started` and `ended` are the times of its last attempt, which ran on `host`, on the ranks of `slot`.

    `metrics` holds the last value of each metric that the item reported. `curves` holds the values of the first
    CURVES_KEPT metrics; `by` says whether the horizontal axis counts steps, epochs or reports. If the item is a trial
    of a search, `parameters` holds the values of its parameters.
    """

    item: int
    name: str = ""
    state: ItemState = "running"
    attempt: int = 1
    slot: int = -1
    host: str = ""
    started: float = 0.0
    ended: float = 0.0
    metrics: Mapping[str, float] = {}
    value: str = ""
    failure: events.Failure | None = None
    parameters: Mapping[str, float | str] = {}
    curves: Mapping[str, Curve] = {}
    by: CurvesBy = "report"

    def seconds(self, now: float) -> float:
        """Return how long the last attempt took, or has taken so far."""
        return max(0.0, (self.ended or now) - self.started)


class SearchRecord(NamedTuple):
    """What the items search for; see SearchBegan and SearchEnded. `best` is the number and value of the best item.

    `importance` was estimated from `trials` finished trials.
    """

    metric: str
    mode: Literal["min", "max"]
    parameters: tuple[events.Searched, ...] = ()
    importance: Mapping[str, float] = {}
    best: tuple[int, float] | None = None
    trials: int = 0

    def better(self, value: float) -> bool:
        """Return whether `value` is better than the value of the best item so far. NaN is never better."""
        if self.best is None or math.isnan(value):
            return not math.isnan(value)
        return value < self.best[1] if self.mode == "min" else value > self.best[1]


class ItemsRecord(NamedTuple):
    """The items that are `running`, and the last ITEMS_KEPT items that have `ended`, in the order in which they ended.

    `up` says how many of the `at_once` slots can currently run items; it is None if slots never have to wait until
    their ranks can start. `finished`, `failed`, `stopped`, `pruned` and `kept` each count all items that ended in this
    way; a pruned item that was kept counts as kept. `again` counts the failed attempts that were followed by another
    attempt. `search` is None if the items are not the trials of a search. `noun` is what an item is called, and
    `waits_for` says what the items wait for.
    """

    at_once: int
    ranks_each: int = 1
    total: int | None = None
    running: tuple[ItemRecord, ...] = ()
    ended: tuple[ItemRecord, ...] = ()
    finished: int = 0
    failed: int = 0
    stopped: int = 0
    kept: int = 0
    pruned: int = 0
    again: int = 0
    up: int | None = None
    search: SearchRecord | None = None
    noun: str = "item"
    waits_for: str = ""

    @property
    def done(self) -> int:
        """How many items have a result or have failed."""
        return self.finished + self.failed + self.pruned + self.kept

    @property
    def ran(self) -> int:
        """How many items have run; items whose results were kept from an earlier run do not count."""
        return self.finished + self.failed + self.pruned

    @property
    def over(self) -> int:
        """How many items have ended in any way."""
        return self.done + self.stopped

    @property
    def fraction(self) -> float | None:
        """The fraction of the items that are done; None if the number of items is not known."""
        return self.done / self.total if self.total else None

    @property
    def most(self) -> int:
        """How many of the items that are not done can run at once."""
        return self.at_once if self.total is None else min(self.total - self.done, self.at_once)

    @property
    def short(self) -> bool:
        """Whether fewer items can run now than could run at once, because ranks are waiting to start."""
        return self.up is not None and self.up < self.most

    @property
    def known(self) -> list[ItemRecord]:
        """The running and the ended items, in the order of their numbers."""
        return sorted((*self.running, *self.ended), key=lambda item: item.item)


def item_on(items: ItemsRecord, rank: int) -> int:
    """Return the number of the item that a rank is running or ran last; if it has run none, the number of the rank."""
    slot = rank // items.ranks_each
    numbers = (record.item for record in itertools.chain(items.running, reversed(items.ended)) if record.slot == slot)
    return next(numbers, rank)


def planned(items: ItemsRecord | None, event: events.ItemsPlanned) -> ItemsRecord:
    """Return the items with the numbers of the event: how many items there are, and how many can run at once."""
    records = items or ItemsRecord(event.at_once)
    records = records._replace(noun=event.noun or records.noun, waits_for=event.waits_for)
    return records._replace(at_once=event.at_once, ranks_each=event.ranks_each, total=event.total, up=event.up)


def started(items: ItemsRecord, event: events.ItemStarted, host: str) -> ItemsRecord:
    """Return the items after an attempt has begun on `host`."""
    new = ItemRecord(event.item, event.name, "running", event.attempt, event.slot, host, event.time)
    return items._replace(running=(*items.running, new._replace(parameters=event.parameters)))


def searching(items: ItemsRecord, event: events.SearchBegan | events.SearchEnded) -> ItemsRecord:
    """Return the items after a search has begun or ended."""
    if isinstance(event, events.SearchBegan):
        return items._replace(search=SearchRecord(event.metric, event.mode, event.parameters), noun="trial")
    return items._replace(
        search=items.search and items.search._replace(importance=event.importance, trials=event.trials)
    )


def ended(items: ItemsRecord, event: events.ItemEnded) -> ItemsRecord:
    """Return the items after an attempt has ended."""
    item = next(candidate for candidate in items.running if candidate.item == event.item)
    items = items._replace(running=tuple(other for other in items.running if other is not item))
    if event.ending == "again":
        return items._replace(again=items.again + 1)
    over = item._replace(state=event.ending, ended=event.time, value=event.value, failure=event.failure)
    searched = "" if items.search is None else items.search.metric
    if over.curves:
        share = max(FEWEST_POINTS, POINTS_KEPT // ((items.over + 1) * len(over.curves)))
        curves = {name: curve if name == searched else thinned(curve, share) for name, curve in over.curves.items()}
        over = over._replace(curves=curves)
    if event.seconds:  # more exact than the driver's times: several short items may be reported to the driver at once
        over = over._replace(started=event.time - event.seconds)
    if event.ending == "kept":
        over = over._replace(metrics=event.metrics, curves=event.curves, by=event.by)
        over = over._replace(state="pruned" if event.pruned else "kept")
    value = over.metrics.get(searched, math.nan)
    if items.search is not None and over.state in ("finished", "kept") and items.search.better(value):
        items = items._replace(search=items.search._replace(best=(over.item, value)))
    counts = {event.ending: getattr(items, event.ending) + 1}
    return items._replace(ended=(*items.ended, over)[-ITEMS_KEPT:], **counts)


def measured(items: ItemsRecord, event: events.Metrics) -> ItemsRecord:
    """Return the items after a rank has reported metrics. If an item has several ranks, the first rank's values win."""
    slot, place = divmod(event.rank, items.ranks_each)

    def with_metrics(item: ItemRecord) -> ItemRecord:
        if place:
            return item._replace(metrics={**event.values, **item.metrics})
        return _longer(item._replace(metrics={**item.metrics, **event.values}), items.search, event)

    return items._replace(running=tuple(with_metrics(item) if item.slot == slot else item for item in items.running))


def _longer(item: ItemRecord, search: SearchRecord | None, report: events.Metrics) -> ItemRecord:
    """Return the item with the values of the report added to its curves. Values that are not finite are left out.

    The metric of a search always has a curve.
    """
    by, x = _place(report)
    curves = dict(item.curves)
    for name, value in report.values.items():
        is_wanted = name in curves or len(curves) < CURVES_KEPT or (search is not None and name == search.metric)
        if is_wanted and math.isfinite(value):
            curves[name] = _with_point(curves.get(name, ()), x, value)
    return item._replace(curves=curves, by=by or item.by)


def _place(report: events.Metrics) -> tuple[Literal["", "step", "epoch"], float | None]:
    """Return what the horizontal axis of the curves counts, and the report's position on this axis; or '' and None."""
    if report.step is not None and (report.epoch is None or report.epochs == 1):
        return "step", report.step
    return ("", None) if report.epoch is None else ("epoch", report.epoch)


def _with_point(curve: Curve, x: float | None, value: float) -> Curve:
    """Return the curve with a value added at `x`, or at the next whole number if `x` is None.

    Points at or after `x` are dropped, so a later value for the same epoch replaces the earlier one. Beyond
    CURVE_POINTS points, every other point is dropped.
    """
    at = float(x) if x is not None else curve[-1][0] + 1 if curve else 1.0
    kept = curve if not curve or curve[-1][0] < at else tuple(point for point in curve if point[0] < at)
    if len(kept) >= CURVE_POINTS:
        kept = (*kept[:-1:2], kept[-1])  # drop every other point, but not the last
    return (*kept, (at, value))


def thinned(curve: Curve, most: int) -> Curve:
    """Return at most `most` points of a curve, evenly distributed and including its first and last point."""
    if len(curve) <= most:
        return curve
    return tuple(curve[round(at * (len(curve) - 1) / (most - 1))] for at in range(most))
