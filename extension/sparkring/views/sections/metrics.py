"""The section on metrics: numbers by step and by rank, and curves."""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.history import describe, metrics
from sparkring.history.curves import curve_axis, curves_of, marks_of, used_curves
from sparkring.history.describe import counted
from sparkring.history.last_run import with_last_run
from sparkring.history.metrics import MetricsTable, Spread
from sparkring.history.record import METRICS_KEPT, RunRecord
from sparkring.views import charts
from sparkring.views.figure import POINTS, figures
from sparkring.views.markup import details, paragraph, text
from sparkring.views.sections import Form

ROWS_LIVE, ROWS_SHOWN = 5, 12
RANKS_MEASURED = 64
_RIGHT = ' class="sr-n" align="right"'


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return the last rows of the table of metrics.

    The form "tab" also has the last values of each rank, and the form "final" also has the curves. In the live panel,
    the page draws the curves itself, from the numbers of views/charts.py.
    """
    return _tab(record) if form == "tab" else _html(record, form)


@metrics.remembered("metrics", "attempts", "checkpoints", "finished_ranks")
def _tab(record: RunRecord) -> str:
    return _html(record, "tab")


def _html(record: RunRecord, form: Form) -> str:
    table = metrics.table(record)
    if not table.rows:
        return ""
    rows = table.newest(ROWS_SHOWN if form != "stacked" else ROWS_LIVE)
    labelled = [(table.label(row), [spreads.get(name) for name in table.names]) for row, spreads in rows]
    noun, note = metrics.noun(record, table), ""
    if len(rows) < len(table.rows):
        note = f"the last {counted(len(rows), noun)}"
        if len(record.metrics) <= METRICS_KEPT // 2:  # otherwise, some of the reports may have been dropped
            note = f"the last {len(rows)} of {counted(len(table.rows), noun)}"
    if form == "stacked":
        # Empty rows keep space for later epochs, so that the content below does not move.
        expected = min(ROWS_LIVE, record.metrics[-1].epochs or 0)
        labelled += [("\xa0", [None] * len(table.names))] * (expected - len(rows))
    shown = _table((noun, *table.names), labelled, "" if form == "stacked" else note)
    pictures = _pictures(record, table) if form == "final" else ""
    by_rank = f'<div class="sr-by-rank">{_by_rank(record, table)}</div>' if form == "tab" else ""
    numbers = f'<div role="group" tabindex="0" aria-label="metrics">{shown}{by_rank}</div>'
    return f'<div class="sr-measured">{numbers}{pictures}</div>'


def _table(headers: Sequence[str], rows: Sequence[tuple[str, Sequence[Spread | None]]], note: str = "") -> str:
    """Return a table of means. If the ranks' values of a metric differ, a column beside the mean shows the range."""
    head, body = [f"<th{_RIGHT}>{text(headers[0])}</th>"], [f"<td{_RIGHT}>{text(label)}</td>" for label, _ in rows]
    for column, name in enumerate(headers[1:]):
        values = [row[column] for _, row in rows]
        write = describe.numbers([value.mean for value in values if value is not None])
        differs = any(value is not None and value.differs for value in values)
        head.append(f"<th{_RIGHT}>{text(name)}</th>" + '<th align="left">min–max</th>' * differs)
        for at, value in enumerate(values):
            across = f"{write(value.low)}–{write(value.high)}" if value is not None and value.differs else ""
            body[at] += f"<td{_RIGHT}>{write(value.mean) if value is not None else ''}</td>"
            body[at] += f"<td><small>{across}</small></td>" if differs else ""
    shown = "".join(f"<tr>{row}</tr>" for row in body)
    caption = f"<caption><small>{text(note)}</small></caption>" if note else ""
    return f'<table class="sr-table">{caption}<thead><tr>{"".join(head)}</tr></thead><tbody>{shown}</tbody></table>'


def _pictures(record: RunRecord, table: MetricsTable) -> str:
    drawn = with_last_run(record, curves_of(record, table, POINTS)[: charts.MOST])
    if not drawn:
        return ""
    axis, marks = curve_axis(record, table), marks_of(record, table)
    legend = charts.legend(drawn, marks)
    used = figures(used_curves(record, table), axis, marks)
    more = details("CPU, memory and GPUs", f'<div class="sr-charts">{used}</div>') if used else ""
    return f'<div class="sr-charts">{figures(drawn, axis, marks)}{paragraph(legend)}</div>{more}'


def by_rank_html(record: RunRecord) -> str:
    """Return the last metrics of each rank, or '' if they are the same on all ranks."""
    return details("Last metrics by rank", _by_rank(record, metrics.table(record)))


def _by_rank(record: RunRecord, table: MetricsTable) -> str:
    last = metrics.last_by_rank(record)
    by_name = ([values[name] for values in last.values() if name in values] for name in table.names)
    if not any(map(metrics.differ, by_name)):
        return ""
    rows = [
        (str(rank), [Spread(*[values[name]] * 3) if name in values else None for name in table.names])
        for rank, values in list(last.items())[:RANKS_MEASURED]
    ]
    many = len(last) > RANKS_MEASURED
    note = f"the first {RANKS_MEASURED} of {counted(len(last), 'rank')}" if many else ""
    return _table(("rank", *table.names), rows, note)
