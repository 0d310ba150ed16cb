"""What was measured: numbers by step and by rank, and their curves."""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.record import RunRecord
from sparkring.views import metrics, summary
from sparkring.views.curves import chart
from sparkring.views.markup import details, text
from sparkring.views.metrics import Spread, Table
from sparkring.views.sections import Form
from sparkring.views.summary import counted

ROWS_LIVE, ROWS_SHOWN = 5, 12
CHARTS = 6
RANKS_MEASURED = 64
_RIGHT = ' class="sr-n" align="right"'


def html(record: RunRecord, now: float, form: Form) -> str:
    """The last rows, and where there is room the curves."""
    table = metrics.table(record)
    if not table.rows:
        return ""
    rows = table.rows[-ROWS_SHOWN if form != "stacked" else -ROWS_LIVE :]
    labelled = [(table.label(row), [row.values.get(name) for name in table.names]) for row in rows]
    note = f"<caption><small>the last {len(rows)} of {counted(len(table.rows), table.by)}</small></caption>"
    if form == "stacked":
        # Room for the epochs to come: what lies below stays where it is.
        expected = min(ROWS_LIVE, record.metrics[-1].epochs or 0)
        labelled += [("\xa0", [None] * len(table.names))] * (expected - len(rows))
    shown = _table(
        (table.by, *table.names), labelled, note if form != "stacked" and len(rows) < len(table.rows) else ""
    )
    return f'<div class="sr-measured"><div>{shown}</div>{_charts(record, table) if form != "stacked" else ""}</div>'


def _table(headers: Sequence[str], rows: Sequence[tuple[str, Sequence[Spread | None]]], note: str = "") -> str:
    """Numbers in aligned columns; beside the mean what the ranks' values lie between, where they differ."""
    head, body = [f"<th{_RIGHT}>{text(headers[0])}</th>"], [f"<td{_RIGHT}>{text(label)}</td>" for label, _ in rows]
    for column, name in enumerate(headers[1:]):
        values = [row[column] for _, row in rows]
        write = summary.numbers([value.mean for value in values if value is not None])
        differs = any(value is not None and value.differs for value in values)
        head.append(f"<th{_RIGHT}>{text(name)}</th>{'<th></th>' if differs else ''}")
        for at, value in enumerate(values):
            across = f"{write(value.low)}–{write(value.high)}" if value is not None and value.differs else ""
            body[at] += f"<td{_RIGHT}>{write(value.mean) if value is not None else ''}</td>"
            body[at] += f"<td><small>{across}</small></td>" if differs else ""
    shown = "".join(f"<tr>{row}</tr>" for row in body)
    return f'<table class="sr-table">{note}<thead><tr>{"".join(head)}</tr></thead><tbody>{shown}</tbody></table>'


def _charts(record: RunRecord, table: Table) -> str:
    found = metrics.curves(record, table)[:CHARTS]
    axis = metrics.curve_axis(table)
    return f'<div class="sr-charts">{"".join(chart(curves, axis) for curves in found)}</div>' if found else ""


def by_rank_html(record: RunRecord) -> str:
    """Each rank's last metrics, where they are not the same everywhere."""
    table, found = metrics.table(record), metrics.last_by_rank(record)
    if not any(value.differs for value in metrics.last(record).values()):
        return ""
    rows = [
        (str(rank), [Spread(*[values[name]] * 3) if name in values else None for name in table.names])
        for rank, values in list(found.items())[:RANKS_MEASURED]
    ]
    return details("Last metrics by rank", _table(("rank", *table.names), rows))
