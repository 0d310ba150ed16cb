"""The section on items: tables of failed items, first items and items with the best metrics, and the items' curves."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sparkring.history import describe
from sparkring.history.item_records import ItemRecord, Search
from sparkring.history.record import RunRecord
from sparkring.views.figure import Drawing, figure, many_curves, pictures
from sparkring.views.markup import BLUE, RED, details, paragraph, text
from sparkring.views.sections import Form
from sparkring.views.sections.search import CURVES_SHOWN, WHOLE, extent, wider
from sparkring.views.tables import bare_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUNNING_SHOWN = 8
FAILED_SHOWN, FIRST_SHOWN = 20, 20
METRICS_SHOWN = 4
BEST_SHOWN = 3
_LOOKS: dict[bool, dict[str, Any]] = {  # the looks of curves; the key says whether the item failed
    False: {"color": BLUE, "lw": 0.8, "alpha": 0.6},
    True: {"color": RED, "lw": 1.2, "alpha": 0.9},
}
SIGNS = {"running": "▶", "finished": "✓", "failed": "✗", "stopped": "■", "kept": "✓", "pruned": "✂"}


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return tables of some items. During the run, these are running items and the last failures.

    The form "final" has the first failures, the first items, and the items with the lowest and highest metrics. It also
    has pictures of the items' curves. For a search, it has the best trials instead of the pictures, because the section
    `search` has pictures.
    """
    items = record.items
    if items is None:
        return ""
    failed = [each for each in items.ended if each.state == "failed"]
    if form != "final":
        longest = sorted(items.running, key=lambda each: each.started)
        return _table(record, [*longest[:RUNNING_SHOWN], *failed[-3:][::-1]], now)
    known = items.known
    failed.sort(key=lambda each: each.item)
    first = _table(record, known[:FIRST_SHOWN], now)
    many = f"The first {FIRST_SHOWN} of {describe.counted(len(known), 'item')}"
    several = f"{describe.counted(len(failed), 'item')} failed; the first {FAILED_SHOWN}:"
    parts = [
        _pictures(known) if items.search is None else _best(record, items.search, now),
        _table(record, failed[:FAILED_SHOWN], now, several if failed[FAILED_SHOWN:] else ""),
        first if len(known) <= FIRST_SHOWN else details(many, first),
    ]
    parts += [
        details(f"Lowest and highest {name}", _extremes(record, name, known, now))
        for name in _metrics(known)
        if items.search is None or name != items.search.metric
    ]
    return "".join(parts)


def _pictures(items: Sequence[ItemRecord]) -> str:
    """Return a picture for each metric, with the items' curves; '' if no curve has more than two points."""
    curved = {name: [each for each in items if len(each.curves.get(name, ())) > 2] for name in _metrics(items)}
    found = {name: drawn[-CURVES_SHOWN:] for name, drawn in curved.items() if drawn}
    if not found:
        return ""
    made = pictures([Drawing(functools.partial(_curves, name=name, items=drawn)) for name, drawn in found.items()])
    figures = []
    for (name, drawn), picture in zip(found.items(), made, strict=True):
        caption = f"<figcaption><b>{text(name)}</b> by {drawn[-1].by}</figcaption>"
        figures.append(figure(caption, picture, f"{name} of {describe.counted(len(drawn), 'item')}"))
    any_failed = any(each.state == "failed" for drawn in found.values() for each in drawn)
    said = paragraph("blue: finished; red: failed" if any_failed else "")
    return f'<div class="sr-charts">{"".join(figures)}{said}</div>'


def _curves(axes: Axes, name: str, items: Sequence[ItemRecord]) -> None:
    order = sorted(items, key=lambda each: each.state == "failed")  # failed items are drawn on top
    many_curves(axes, [each.curves[name] for each in order], [_LOOKS[each.state == "failed"] for each in order])
    values = [value for each in items for _, value in each.curves[name]]
    axes.set_ylim(*wider((extent(values, "max")[0], extent(values, "min")[1])))


def _metrics(items: Iterable[ItemRecord]) -> list[str]:
    return list(dict.fromkeys(name for each in items for name in each.metrics))[:METRICS_SHOWN]


def _best(record: RunRecord, search: Search, now: float) -> str:
    """Return a table of the best trials of a search."""
    assert record.items is not None
    ended = _ranked([each for each in record.items.known if each.state in WHOLE], search.metric)
    shown = ended[: -BEST_SHOWN - 1 : -1] if search.mode == "max" else ended[:BEST_SHOWN]
    which = f"best {search.metric}: top {BEST_SHOWN} of {describe.counted(len(ended), 'finished trial')}"
    return _table(record, shown, now, which if ended[BEST_SHOWN:] else f"best {search.metric}")


def _extremes(record: RunRecord, name: str, items: Sequence[ItemRecord], now: float) -> str:
    """Return tables of the items with the lowest and the highest values of a metric; '' if only a few items have it."""
    measured = _ranked([each for each in items if each.state != "failed"], name)
    if len(measured) <= 2 * BEST_SHOWN:
        return ""
    return "".join(
        _table(record, found, now, f"{which} {name}")
        for which, found in (("lowest", measured[:BEST_SHOWN]), ("highest", measured[: -BEST_SHOWN - 1 : -1]))
    )


def _ranked(items: Iterable[ItemRecord], name: str) -> list[ItemRecord]:
    """Return the items that have a finite value of a metric, lowest value first."""
    measured = [each for each in items if math.isfinite(each.metrics.get(name, math.nan))]
    return sorted(measured, key=lambda each: each.metrics[name])


def _table(record: RunRecord, items: Sequence[ItemRecord], now: float, note: str = "") -> str:
    """Return a table with a row for each of the items; '' if there are no items."""
    if not items:
        return ""
    values = [describe.first_line(describe.item_value(each), 60) for each in items]
    failures = [each.failure and describe.item_error(record, each.failure) for each in items]
    columns = [
        ("", [f"{each.item:,}" for each in items]),
        ("item", [each.name for each in items]),
        ("state", [f"{SIGNS[each.state]} {each.state}" for each in items]),
        *([("attempt", [str(each.attempt) for each in items])] if any(each.attempt > 1 for each in items) else []),
        ("time", [describe.duration(each.seconds(record.ended or now)) for each in items]),
        *((name, _numbers(items, name)) for name in _metrics(items)),
        *([("value", values)] if any(values) else []),
        ("", [describe.first_line(error or "", 160) for error in failures]),
    ]
    headers, cells = zip(*columns, strict=True)
    return bare_table(headers, [*zip(*cells, strict=True)], note)


def _numbers(items: Sequence[ItemRecord], name: str) -> list[str]:
    write = describe.numbers([each.metrics[name] for each in items if name in each.metrics])
    return [write(each.metrics[name]) if name in each.metrics else "" for each in items]
