"""The records of a run's independent items. Each function here returns the new records after one event."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal, NamedTuple

from sparkring.history import events

ITEMS_KEPT = 20_000  # how many ended items the record keeps, so that an endless run does not fill the memory

ItemState = Literal["running", "finished", "failed", "stopped", "kept"]


class ItemRecord(NamedTuple):
    """One item. `started` and `ended` are the times of its last attempt, which ran on `host`, on the ranks of `slot`.

    `metrics` has the last value of each metric that the item reported.
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

    def seconds(self, now: float) -> float:
        """Return how long the last attempt took, or has taken so far."""
        return max(0.0, (self.ended or now) - self.started)


class ItemsRecord(NamedTuple):
    """The items that are `running`, and the last ITEMS_KEPT items that have `ended`, in the order of their ends.

    `up` is how many of the `at_once` slots can run items now; None if slots need not wait until their ranks can start.
    `finished`, `failed`, `stopped` and `kept` count all items that have ended so. `again` counts the failed attempts
    that were followed by another attempt.
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
    again: int = 0
    up: int | None = None

    @property
    def done(self) -> int:
        """How many items have a result or have failed."""
        return self.finished + self.failed + self.kept

    @property
    def ran(self) -> int:
        """How many items have run to their end; without those whose results were kept from an earlier run."""
        return self.finished + self.failed

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
    return items._replace(running=(*items.running, new))


def ended(items: ItemsRecord, event: events.ItemEnded) -> ItemsRecord:
    """Return the items after an attempt has ended."""
    found = next(each for each in items.running if each.item == event.item)
    items = items._replace(running=tuple(each for each in items.running if each is not found))
    if event.ending == "again":
        return items._replace(again=items.again + 1)
    over = found._replace(state=event.ending, ended=event.time, value=event.value, failure=event.failure)
    if event.ending == "kept":
        over = over._replace(started=event.time - event.seconds, metrics=event.metrics)
    counts = {event.ending: getattr(items, event.ending) + 1}
    return items._replace(ended=(*items.ended, over)[-ITEMS_KEPT:], **counts)


def measured(items: ItemsRecord, event: events.Metrics) -> ItemsRecord:
    """Return the items after a rank has reported metrics of the item that it runs."""
    slot = event.rank // items.ranks_each
    return items._replace(
        running=tuple(
            each._replace(metrics={**each.metrics, **event.values}) if each.slot == slot else each
            for each in items.running
        )
    )
