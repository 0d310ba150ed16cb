"""The section on a stream: its figures, and the seconds that each of the last batches took."""

from __future__ import annotations

import functools
from typing import NamedTuple

from sparkring.history import describe
from sparkring.history.describe import PARTS, counted, duration
from sparkring.history.events import BatchEnded
from sparkring.history.record import RunRecord
from sparkring.history.stream_records import RECENT, StreamRecord
from sparkring.views.description import BarPart, Bars, Cell, Column, Figures, Moment, Table
from sparkring.views.figure import Drawing, figure, pictures, stacked_bars
from sparkring.views.markup import AMBER, BLUE, GREEN, details, note, paragraph, tint
from sparkring.views.sections import Form
from sparkring.views.tables import bare_table, described

COLOURS = dict(zip(PARTS, (BLUE, "#9262d6", GREEN, AMBER, "#c2569b", "#9aa0a6"), strict=True))
COLUMNS = (
    Column("batch", "batch", "count"),
    Column("rows", "rows", "count"),
    Column("how", "result"),
    *(Column(name, name, "duration", needs=2 if name == "other cells" else 0) for name in PARTS),
    Column("together", "together", "duration"),
    Column("saved", "saved", "check", needs=1),
    Column("backlog", "backlog", "count", needs=1),
    Column("after", "after", "whole"),
)
TITLE = "seconds per batch"
FEWEST_SLOTS = 30  # a chart has room for at least this many batches, so that the bars of a few batches are narrow
LAST_SHOWN = 12


class Tab(NamedTuple):
    """What the section shows. `bars` is None before the first batch."""

    facts: str
    figures: Figures
    bars: Bars | None


def described_tab(stream: StreamRecord, record: RunRecord, newest: int = RECENT) -> Tab:
    """Describe the section, with a bar for each of the `newest` batches."""
    running = record.outcome is None
    facts, figures = describe.stream_facts(record), tuple(describe.stream_figures(record))
    if stream.last is None:
        return Tab(facts, (*figures, ("batch", "waiting for the first" if running else "none")), None)
    moment: Figures = (("last batch", Moment(stream.last.time)),) if running else ()
    charted, shown = describe.charted(stream), stream.recent[max(0, len(stream.recent) - newest) :]
    parts = [
        BarPart(name, COLOURS[name], name in charted, share, seconds)
        for name, share, seconds in zip(PARTS, describe.shares(stream), describe.parts_s(stream), strict=True)
    ]
    table = Table(COLUMNS, [_row(batch, record.started) for batch in shown])
    legend = "red: trained again on new ranks" if any(batch.how == "replayed" for batch in stream.recent) else ""
    bars = Bars(TITLE, table, tuple(parts), FEWEST_SLOTS, ("how", "replayed"), legend)
    return Tab(facts, (*figures, *moment), bars)


def _row(batch: BatchEnded, began: float) -> tuple[Cell, ...]:
    """Return the cells of a batch, for the COLUMNS."""
    times = [float(f"{seconds:.4g}") for seconds in describe.parts_s(batch)]
    together = float(f"{sum(times):.4g}")
    ended = (batch.saved, batch.backlog_rows, round(batch.time - began, 2))
    return batch.batch_id, batch.rows, batch.how, *times, together, *ended


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return the figures of a stream and the seconds per batch.

    The form "final" also has a picture and a table of the last batches. In the live panel, the page draws the stream
    itself, from the numbers of views/live.py.
    """
    if record.stream is None or form == "tab":
        return ""
    tab = described_tab(record.stream, record)
    values = [describe.ago(now - value.time) if isinstance(value, Moment) else value for _, value in tab.figures]
    figures = note(tab.facts) + bare_table([name for name, _ in tab.figures], [values])
    if tab.bars is None:
        return figures
    split = _split(tab.bars)
    if form == "stacked":
        return figures + split
    table = tab.bars.table
    last = Table(table.columns, table.rows[-LAST_SHOWN:])
    batches = details(f"The last {counted(len(last.rows), 'batch')}", described(last))
    return f'{figures}<div class="sr-measured"><div>{split}</div>{_picture(tab.bars)}</div>{batches}'


def _split(bars: Bars) -> str:
    """Return a table with the seconds of each part: of the last batch, on average, and as a percentage of the time."""
    times = [bars.table.column(part.name) for part in bars.parts]
    rows = [
        (part.name, duration(seconds[-1]), duration(sum(seconds) / len(seconds)), part.share)
        for part, seconds in zip(bars.parts, times, strict=True)
        if part.all_s
    ]
    average = f"mean of {counted(len(bars.table.rows), 'batch')}"
    return bare_table(("time per batch", "last", average, "of the time"), rows)


def _picture(bars: Bars) -> str:
    picture, *_ = pictures([Drawing(functools.partial(stacked_bars, bars=bars))])
    parts = " ".join(
        f'<b style="{tint(part.colour)}">{part.name}</b>' for part in bars.parts if part.shown and part.all_s
    )
    left_out = "" if all(part.shown for part in bars.parts) else " (without waiting)"
    words = f"{bars.title} of the last {counted(len(bars.table.rows), 'batch')}{left_out}"
    drawn = figure(f"<figcaption>{bars.title}: {parts}{left_out}</figcaption>", picture, words)
    return f'<div class="sr-charts">{drawn}{paragraph(bars.legend)}</div>'
