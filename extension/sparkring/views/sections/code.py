"""The cell, as it was run."""

from __future__ import annotations

from sparkring.record import RunRecord
from sparkring.views import summary
from sparkring.views.markup import details, text
from sparkring.views.sections import Form
from sparkring.views.sections.log import LINE_CHARACTERS, block

CODE_LINES = 400


def html(record: RunRecord, now: float, form: Form) -> str:
    """The lines with their numbers, the one that failed marked."""
    code = record.code.rstrip().splitlines()[:CODE_LINES]
    if not code:
        return ""
    failed, width = summary.failed_line(record), len(str(len(code)))
    shown = []
    for at, line in enumerate(code, 1):
        said = text(line[:LINE_CHARACTERS])
        said = f"<mark>{said}</mark>" if at == failed else said
        shown.append(f"<span><b><small>{at:>{width}}</small></b>  {said}\n</span>")
    body = block(shown, width - 1)
    return body if form == "tab" else details("The cell", body)
