"""The checkpoints that were saved so far, and the state of each."""

from __future__ import annotations

from sparkring.history.record import RunRecord
from sparkring.views.checkpoints import saved_html
from sparkring.views.sections import Form


def html(record: RunRecord, now: float, form: Form) -> str:
    """A picture for each directory; where there is room, a table as well."""
    return saved_html(record, record.ended or now, form != "stacked")
