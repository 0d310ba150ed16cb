"""The records of a run's independent items. Each function here returns the new records after one event."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from sparkring.history import events

ITEMS_KEPT = 20_000  # how many ended items the record keeps, so that an endless run does not fill the memory
CURVE_POINTS = 64  # how many points of a trial's curve the record keeps, at most

ItemState = Literal["running", "finished", "failed", "stopped", "kept", "pruned"]


class ItemRecord(NamedTuple):
    """One item. `started` and `ended` are the times of its last attempt, which ran on `host`, on the ranks of `slot`.

    `metrics` has the last value of each metric that the item reported. If the item is a trial of a search, `parameters`
    has the values of its parameters, and `curve` has the search's metric by step or epoch.
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
    curve: tuple[tuple[float, float], ...] = ()

    def seconds(self, now: float) -> float:
        """Return how long the last attempt took, or has taken so far."""
        return max(0.0, (self.ended or now) - self.started)


class Search(NamedTuple):
    """What the items search for; events.SearchBegan explains the fields, and events.SearchEnded the `importance`.

    `best` is the best item that has finished so far, and its value.
    """

    metric: str
    mode: Literal["min", "max"]
    parameters: tuple[events.Searched, ...] = ()
    importance: Mapping[str, float] = {}
    best: tuple[int, float] | None = None

    def better(self, value: float) -> bool:
        """Whether a value is better than that of the best item so far."""
        if self.best is None or math.isnan(value):
            return not math.isnan(value)
        return value < self.best[1] if self.mode == "min" else value > self.best[1]


class ItemsRecord(NamedTuple):
    """The items that are `running`, and the last ITEMS_KEPT items that have `ended`, in the order of their ends.

    `up` is how many of the `at_once` slots can run items now; None if slots need not wait until their ranks can start.
    `finished`, `failed`, `stopped`, `pruned` and `kept` count all items that have ended so; a pruned item that was kept
    counts as kept. `again` counts the failed attempts that were followed by another attempt. `search` is None if the
    items are not the trials of a search.
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
    search: Search | None = None

    @property
    def done(self) -> int:
        """How many items have a result or have failed."""
        return self.finished + self.failed + self.pruned + self.kept

    @property
    def ran(self) -> int:
        """How many items have run; without those whose results were kept from an earlier run."""
        return self.finished + self.failed + self.pruned

    @property
    def over(self) -> int:
        """How many items have ended, in whatever way."""
        return self.done + self.stopped

    @property
    def fraction(self) -> float | None:
        """The fraction of all items that is done; None if the number of items is not known."""
        return self.done / self.total if self.total else None

    @property
    def known(self) -> list[ItemRecord]:
        """The running and the ended items, in the order of their numbers."""
        return sorted((*self.running, *self.ended), key=lambda each: each.item)


def item_on(items: ItemsRecord, rank: int) -> int:
    """Return the number of the item that a rank runs or ran last; if it has run none, the number of the rank."""
    slot = rank // items.ranks_each
    found = (each.item for each in itertools.chain(items.running, reversed(items.ended)) if each.slot == slot)
    return next(found, rank)


def planned(items: ItemsRecord | None, event: events.ItemsPlanned) -> ItemsRecord:
    """Return the items with what the event says: how many there are, and how many can run at once."""
    found = items or ItemsRecord(event.at_once)
    return found._replace(at_once=event.at_once, ranks_each=event.ranks_each, total=event.total, up=event.up)


def started(items: ItemsRecord, event: events.ItemStarted, host: str) -> ItemsRecord:
    """Return the items after an attempt has begun on `host`."""
    new = ItemRecord(event.item, event.name, "running", event.attempt, event.slot, host, event.time)
    return items._replace(running=(*items.running, new._replace(parameters=event.parameters)))


def searching(items: ItemsRecord, event: events.SearchBegan | events.SearchEnded) -> ItemsRecord:
    """Return the items after a search has begun or ended."""
    if isinstance(event, events.SearchBegan):
        return items._replace(search=Search(event.metric, event.mode, event.parameters))
    return items._replace(search=items.search and items.search._replace(importance=event.importance))


def ended(items: ItemsRecord, event: events.ItemEnded) -> ItemsRecord:
    """Return the items after an attempt has ended."""
    found = next(each for each in items.running if each.item == event.item)
    items = items._replace(running=tuple(each for each in items.running if each is not found))
    if event.ending == "again":
        return items._replace(again=items.again + 1)
    over = found._replace(state=event.ending, ended=event.time, value=event.value, failure=event.failure)
    if event.ending == "kept":
        state: ItemState = "pruned" if event.pruned else "kept"
        over = over._replace(state=state, started=event.time - event.seconds, metrics=event.metrics)
    if items.search is not None and over.state in ("finished", "kept"):
        value = over.metrics.get(items.search.metric, math.nan)
        if items.search.better(value):
            items = items._replace(search=items.search._replace(best=(over.item, value)))
    counts = {event.ending: getattr(items, event.ending) + 1}
    return items._replace(ended=(*items.ended, over)[-ITEMS_KEPT:], **counts)


def measured(items: ItemsRecord, event: events.Metrics) -> ItemsRecord:
    """Return the items after a rank has reported metrics of the item that it runs.

    In a ring, what the first rank reports counts more than what other ranks report.
    """
    slot, place = divmod(event.rank, items.ranks_each)

    def told(each: ItemRecord) -> ItemRecord:
        metrics = {**event.values, **each.metrics} if place else {**each.metrics, **event.values}
        return each._replace(
            metrics=metrics, curve=_longer(each.curve, items.search, event) if not place else each.curve
        )

    return items._replace(running=tuple(told(each) if each.slot == slot else each for each in items.running))


_Curve = tuple[tuple[float, float], ...]


def _longer(curve: _Curve, search: Search | None, report: events.Metrics) -> _Curve:
    """Return the curve of a trial with the value of the search's metric in the report, if it has one.

    Within an epoch, a later value replaces the value before. A second attempt of a trial begins its curve anew.
    """
    value = None if search is None else report.values.get(search.metric)
    if value is None or not math.isfinite(value):
        return curve
    x = report.epoch if report.epoch is not None else report.step
    at = float(x) if x is not None else curve[-1][0] + 1 if curve else 1.0
    kept = curve if not curve or curve[-1][0] < at else tuple(point for point in curve if point[0] < at)
    if len(kept) >= CURVE_POINTS:
        kept = (*kept[:-1:2], kept[-1])  # drop every other point, but not the last
    return (*kept, (at, value))
