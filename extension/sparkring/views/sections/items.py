"""The section on items: tables of failed items, first items and items with the best metrics, and the items' curves."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkring.history import describe
from sparkring.history.item_records import ItemRecord, SearchRecord
from sparkring.history.lines import plain
from sparkring.history.record import RunRecord
from sparkring.views.description import Cell, Column, Table
from sparkring.views.figure import Drawing, figure, many_curves, pictures
from sparkring.views.markup import BLUE, RED, details, paragraph, text
from sparkring.views.sections import Form
from sparkring.views.sections.search import CURVES_SHOWN, WHOLE, curves_extent, wider
from sparkring.views.tables import METRICS_SHOWN, described

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUNNING_SHOWN = 8
FAILED_SHOWN, FIRST_SHOWN = 20, 20
BEST_SHOWN = 3
_LOOKS: dict[bool, dict[str, Any]] = {  # the looks of curves; the key says whether the item failed
    False: {"color": BLUE, "lw": 0.8, "alpha": 0.6},
    True: {"color": RED, "lw": 1.2, "alpha": 0.9},
}
SIGNS = {"running": "▶", "finished": "✓", "failed": "✗", "stopped": "■", "kept": "✓", "pruned": "✂"}
COLUMNS = (
    Column("item", "#", "count", width=56),
    Column("name", "item", width=140, share=1.5),
    Column("parameters", "", "values"),
    Column("state", "state", "state", width=84, signs=SIGNS),
    Column("attempt", "attempt", "count", needs=1, width=56),
    Column("place", "host", needs=2, width=100),
    Column("took", "time", "duration", width=72),
    Column("metrics", "", "numbers"),
    Column("value", "value", needs=1, share=1, most=60),
    Column("error", "error", needs=1, width=180, share=2, most=160),
)


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return tables of some items. During the run, these are running items and the last failures.

    The form "final" has the first failures, the first items, and the items with the lowest and highest metrics. It also
    has pictures of the items' curves. For a search, it has the best trials instead of the pictures, because the section
    `search` has pictures.
    """
    items = record.items
    if items is None:
        return ""
    failed = [item for item in items.ended if item.state == "failed"]
    if form != "final":
        longest = sorted(items.running, key=lambda item: item.started)
        return described(table(record, [*longest[:RUNNING_SHOWN], *failed[-3:][::-1]], now))
    known = items.known
    failed.sort(key=lambda item: item.item)
    first = described(table(record, known[:FIRST_SHOWN], now))
    many = f"The first {FIRST_SHOWN} of {describe.counted(len(known), items.noun)}"
    several = f"{describe.counted(len(failed), items.noun)} failed; the first {FAILED_SHOWN}:"
    parts = [
        _pictures(known) if items.search is None else _best(record, items.search, now),
        described(table(record, failed[:FAILED_SHOWN], now), several if failed[FAILED_SHOWN:] else ""),
        first if len(known) <= FIRST_SHOWN else details(many, first),
    ]
    parts += [
        details(f"Lowest and highest {name}", _extremes(record, name, known, now))
        for name in _metrics(known)
        if items.search is None or name != items.search.metric
    ]
    return "".join(parts)


def metrics_html(record: RunRecord, now: float) -> str:
    """Return a table of the items with the lowest and the highest values of each metric, for the tab of the metrics."""
    known = [] if record.items is None else record.items.known
    return "".join(_extremes(record, name, known, now, few=True) for name in _metrics(known))


def _pictures(items: Sequence[ItemRecord]) -> str:
    """Return a picture for each metric, with the items' curves; '' if no curve has more than two points."""
    curved = {name: [item for item in items if len(item.curves.get(name, ())) > 2] for name in _metrics(items)}
    charted = {name: drawn[-CURVES_SHOWN:] for name, drawn in curved.items() if drawn}
    if not charted:
        return ""
    made = pictures([Drawing(functools.partial(_curves, name=name, items=drawn)) for name, drawn in charted.items()])
    figures = []
    for (name, drawn), picture in zip(charted.items(), made, strict=True):
        caption = f"<figcaption><b>{text(name)}</b> by {drawn[-1].by}</figcaption>"
        figures.append(figure(caption, picture, f"{name} of {describe.counted(len(drawn), 'item')}"))
    any_failed = any(item.state == "failed" for drawn in charted.values() for item in drawn)
    outside = {item.item for name, drawn in charted.items() for item in _outside(name, drawn)}
    cut = f"{describe.counted(len(outside), 'curve')} partly outside the charts: far from the others" if outside else ""
    legend = paragraph(describe.dotted("blue: finished · red: failed" if any_failed else "", cut))
    return f'<div class="sr-charts">{"".join(figures)}{legend}</div>'


def _outside(name: str, items: Sequence[ItemRecord]) -> list[ItemRecord]:
    """Return the items whose curves are not entirely in the chart of a metric."""
    low, high = curves_extent([[value for _, value in item.curves[name]] for item in items])
    return [item for item in items if any(not low <= value <= high for _, value in item.curves[name])]


def _curves(axes: Axes, name: str, items: Sequence[ItemRecord]) -> None:
    order = sorted(items, key=lambda item: item.state == "failed")  # failed items are drawn on top
    many_curves(axes, [item.curves[name] for item in order], [_LOOKS[item.state == "failed"] for item in order])
    axes.set_ylim(*wider(curves_extent([[value for _, value in item.curves[name]] for item in items])))


def _metrics(items: Iterable[ItemRecord]) -> list[str]:
    return list(dict.fromkeys(name for item in items for name in item.metrics))[:METRICS_SHOWN]


def _best(record: RunRecord, search: SearchRecord, now: float) -> str:
    """Return a table of the best trials of a search."""
    assert record.items is not None
    ended = _ranked([item for item in record.items.known if item.state in WHOLE], search.metric)
    shown = ended[: -BEST_SHOWN - 1 : -1] if search.mode == "max" else ended[:BEST_SHOWN]
    which = f"best {search.metric}: top {BEST_SHOWN} of {describe.counted(len(ended), 'finished trial')}"
    return described(table(record, shown, now), which if ended[BEST_SHOWN:] else f"best {search.metric}")


def _extremes(record: RunRecord, name: str, items: Sequence[ItemRecord], now: float, *, few: bool = False) -> str:
    """Return tables of the items with the lowest and the highest values of a metric.

    If only a few items have it, return '', or, with `few`, a table of them all.
    """
    measured = _ranked([item for item in items if item.state != "failed"], name)
    if len(measured) <= 2 * BEST_SHOWN:
        return described(table(record, measured, now), f"by {name}") if few and measured else ""
    return "".join(
        described(table(record, some, now), f"{which} {name}")
        for which, some in (("lowest", measured[:BEST_SHOWN]), ("highest", measured[: -BEST_SHOWN - 1 : -1]))
    )


def _ranked(items: Iterable[ItemRecord], name: str) -> list[ItemRecord]:
    """Return the items that have a finite value of a metric, lowest value first."""
    measured = [item for item in items if math.isfinite(item.metrics.get(name, math.nan))]
    return sorted(measured, key=lambda item: item.metrics[name])


def table(record: RunRecord, items: Sequence[ItemRecord], now: float) -> Table:
    """Describe some items as a table. The parameters of a trial have columns of their own, so its name is left out."""
    rows = [row(record, item, item.seconds(record.ended or now)) for item in items]
    noun = "item" if record.items is None else record.items.noun
    shown = [
        (at, replace(column, title=noun) if column.name == "name" else column)
        for at, column in enumerate(COLUMNS)
        if noun != "trial" or column.name != "name"
    ]
    return Table(tuple(column for _, column in shown), [tuple(cells[at] for at, _ in shown) for cells in rows])


def row(record: RunRecord, item: ItemRecord, took_s: float | None) -> tuple[Cell, ...]:
    """Return the cells of an item, for the COLUMNS. `took_s` is None if the page computes it, while the item runs."""
    return (
        item.item,
        plain(item.name),
        {name: plain(value) if isinstance(value, str) else value for name, value in item.parameters.items()},
        item.state,
        item.attempt if item.attempt > 1 else None,
        plain(item.host),  # an item whose result was kept has none
        took_s,
        {plain(name): value if math.isfinite(value) else f"{value}" for name, value in item.metrics.items()},
        plain(describe.item_value(item)),
        "" if item.failure is None else describe.item_error(record, item.failure),
    )
