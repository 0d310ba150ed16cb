"""The section on checkpoints: those that have been saved so far, with their states."""

from __future__ import annotations

from sparkring.history.describe import counted
from sparkring.history.record import RunRecord
from sparkring.views.checkpoint_line import picture
from sparkring.views.checkpoints import damage_words, recorded, saved_words, table_html
from sparkring.views.markup import details, note, warning
from sparkring.views.sections import Form

ROWS_SHOWN = 12
SERIES_SHOWN = 3  # how many of a run's checkpoint series are shown
PANEL_BYTES = 60_000


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return the checkpoints in the last SERIES_SHOWN directories to which the run has saved.

    If the picture and the table of a directory would not fit into PANEL_BYTES, only a line of text is shown.
    """
    now = record.ended or now
    parts: list[str] = []
    last_first = sorted(recorded(record), key=lambda series: -max(mark.time for mark in series.marks))
    for series in last_first[:SERIES_SHOWN]:
        line = note(saved_words(record, series, now))
        whole = line + picture(series, now) + warning(damage_words(series))
        if form != "stacked":
            whole += details(counted(len(series.marks), "checkpoint"), table_html(series, now, ROWS_SHOWN))
        parts.insert(0, line if sum(map(len, parts)) + len(whole) > PANEL_BYTES else whole)
    return "".join(parts)
