"""Tables of a run's items: the items that failed, the first items, and the items with the best metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparkring.history import describe
from sparkring.history.item_records import ItemRecord
from sparkring.history.record import RunRecord
from sparkring.views.markup import details
from sparkring.views.sections import Form
from sparkring.views.tables import bare_table

RUNNING_SHOWN = 8
FAILED_SHOWN, FIRST_SHOWN = 20, 20
METRICS_SHOWN = 4
BEST_SHOWN = 3
SIGNS = {"running": "▶", "finished": "✓", "failed": "✗", "stopped": "■", "kept": "✓", "pruned": "✂"}


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return tables of some items.

    During the run, they have the items that run and the last failures. The final form has the first failures, the first
    items, and the items with the lowest and highest metrics.
    """
    items = record.items
    if items is None:
        return ""
    failed = [each for each in items.ended if each.state == "failed"]
    if form != "final":
        longest = sorted(items.running, key=lambda each: each.started)
        return _table(record, [*longest[:RUNNING_SHOWN], *failed[-3:][::-1]], now)
    known = items.known
    first = _table(record, known[:FIRST_SHOWN], now)
    many = f"The first {FIRST_SHOWN} of {describe.counted(len(known), 'item')}"
    several = f"{describe.counted(len(failed), 'item')} failed"
    parts = [
        _table(
            record, failed[:FAILED_SHOWN], now, f"{several}; the first {FAILED_SHOWN}:" if failed[FAILED_SHOWN:] else ""
        ),
        first if len(known) <= FIRST_SHOWN else details(many, first),
        *(details(f"Lowest and highest {name}", _extremes(record, name, known, now)) for name in _metrics(known)),
    ]
    return "".join(parts)


def _metrics(items: Iterable[ItemRecord]) -> list[str]:
    return list(dict.fromkeys(name for each in items for name in each.metrics))[:METRICS_SHOWN]


def _extremes(record: RunRecord, name: str, items: Sequence[ItemRecord], now: float) -> str:
    """Return tables of the items with the lowest and the highest values of a metric; '' if only a few items have it."""
    measured = sorted(
        (each for each in items if name in each.metrics and each.state != "failed"), key=lambda each: each.metrics[name]
    )
    if len(measured) <= 2 * BEST_SHOWN:
        return ""
    return "".join(
        _table(record, found, now, f"{which} {name}")
        for which, found in (("lowest", measured[:BEST_SHOWN]), ("highest", measured[: -BEST_SHOWN - 1 : -1]))
    )


def _table(record: RunRecord, items: Sequence[ItemRecord], now: float, note: str = "") -> str:
    """Return a table with a row for each of the items; '' if there are none."""
    if not items:
        return ""
    names = _metrics(items)
    writers = {name: describe.numbers([each.metrics[name] for each in items if name in each.metrics]) for name in names}
    tried = any(each.attempt > 1 for each in items)
    valued = any(each.value for each in items)
    headers = ("", "item", "state", *(["attempt"] if tried else []), "took", *names, *(["value"] if valued else []), "")
    rows = [
        (
            f"{each.item:,}",
            each.name,
            f"{SIGNS[each.state]} {each.state}",
            *([str(each.attempt)] if tried else []),
            describe.duration(each.seconds(record.ended or now)),
            *(writers[name](each.metrics[name]) if name in each.metrics else "" for name in names),
            *([describe.first_line(each.value, 60)] if valued else []),
            "" if each.failure is None else describe.first_line(each.failure.summary, 120),
        )
        for each in items
    ]
    return bare_table(headers, rows, note)
