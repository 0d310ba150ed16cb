"""The section on a stream: its figures, the seconds per batch as a table, and a picture of the last batches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from sparkring.history import describe
from sparkring.history.describe import PARTS, counted, duration, parts_s
from sparkring.history.record import RunRecord
from sparkring.history.stream_records import StreamRecord
from sparkring.views.figure import Drawing, figure, pictures, ticked
from sparkring.views.markup import AMBER, BLUE, GREEN, RED, details, note, paragraph, tint
from sparkring.views.sections import Form
from sparkring.views.tables import bare_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The colours of the parts. panel/src/stream.js has the same.
COLOURS = dict(zip(PARTS, (BLUE, "#9262d6", GREEN, AMBER, "#9aa0a6"), strict=True))
FEWEST_SLOTS = 30  # a picture has room for at least this many batches, so that the bars of a few batches are narrow
LAST_SHOWN = 12


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return the figures of a stream and the seconds per batch.

    The form "final" also has a picture and a table of the last batches. In the live panel, the page draws the stream
    itself, from the numbers of views/live.py.
    """
    found = record.stream
    if found is None or form == "tab":
        return ""
    figures = describe.stream_figures(record)
    facts = note(describe.stream_facts(record))
    if found.last is None:
        return facts
    shown = bare_table([name for name, _ in figures], [[value for _, value in figures]])
    split = _split(found)
    if form == "stacked":
        return f"{facts}{shown}{split}"
    return f'{facts}{shown}<div class="sr-measured"><div>{split}</div>{_picture(found)}</div>{_last(record, found)}'


def _split(found: StreamRecord) -> str:
    """Return a table with the seconds of each part: of the last batch, on average, and as a percentage of the time."""
    last = found.last
    assert last is not None
    recent = describe.mean_parts_s(found.recent)
    rows = [
        (name, *(duration(float(each)) for each in times), share)
        for name, *times, share in zip(PARTS, parts_s(last), recent, describe.shares(found), strict=True)
    ]
    average = f"mean of {counted(len(found.recent), 'batch')}"
    return bare_table(("time per batch", "last", average, "of the time"), rows)


def _picture(found: StreamRecord) -> str:
    charted = describe.charted(found)
    picture, *_ = pictures([Drawing(functools.partial(_bars, found=found, charted=charted))])
    words = " ".join(f'<b style="{tint(COLOURS[name])}">{name}</b>' for name in charted)
    left_out = "" if charted == PARTS else " (without waiting)"
    said = f"seconds per batch of the last {counted(len(found.recent), 'batch')}{left_out}"
    drawn = figure(f"<figcaption>seconds per batch: {words}{left_out}</figcaption>", picture, said)
    replayed = any(each.how == "replayed" for each in found.recent)
    legend = paragraph("red: trained again on new ranks" if replayed else "")
    return f'<div class="sr-charts">{drawn}{legend}</div>'


def _bars(axes: Axes, found: StreamRecord, charted: tuple[str, ...]) -> None:
    recent, places = found.recent, range(len(found.recent))
    bottoms = [0.0] * len(recent)
    for at, name in enumerate(PARTS):
        if name in charted:
            heights = [parts_s(each)[at] for each in recent]
            axes.bar(places, heights, width=0.8, bottom=bottoms, color=COLOURS[name], linewidth=0)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for at, each in enumerate(recent):
        if each.how == "replayed":
            axes.axvspan(at - 0.4, at + 0.4, ymax=0.03, color=RED, linewidth=0)
    axes.set_xlim(-0.8, max(len(recent), FEWEST_SLOTS) - 0.2)
    ticked(axes)
    axes.xaxis.set_major_formatter(lambda x, _: f"{recent[round(x)].batch_id}" if 0 <= round(x) < len(recent) else "")
    axes.set_xlabel("batch", labelpad=1)


def _last(record: RunRecord, found: StreamRecord) -> str:
    shown = found.recent[-LAST_SHOWN:]
    backlog = any(each.backlog_rows is not None for each in shown)
    rows = [
        (
            f"{each.batch_id:,}",
            f"{each.rows:,}",
            f"{each.how}, saved" if each.saved else each.how,
            *(duration(float(seconds)) for seconds in parts_s(each)),
            *(["" if each.backlog_rows is None else f"{each.backlog_rows:,}"] if backlog else []),
            duration(int(each.time - record.started)),
        )
        for each in shown
    ]
    headers = ("batch", "rows", "", *PARTS, *(["backlog"] if backlog else []), "after")
    return details(f"The last {counted(len(shown), 'batch')}", bare_table(headers, rows))
