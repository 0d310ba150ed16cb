"""The section on the failure of a run: the rank, the line of the cell, and what to do."""

from __future__ import annotations

from sparkring.history import describe
from sparkring.history.describe import Explanation
from sparkring.history.record import RunRecord
from sparkring.views.markup import note, scrolled, text
from sparkring.views.sections import Form
from sparkring.views.sections.log import LINE_CHARACTERS, block, numbered

SUMMARY_LINES = 8  # the most lines of the exception's message that are shown after its first line


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return what ended the run, with the failed line of the cell and the lines around it; '' if the run did not fail.

    If no rank failed, the section has only one line. The error below the panel also has the last lines of the rank.
    """
    if record.outcome in (None, "finished"):
        return ""
    explanation = describe.explanation(record)
    if explanation is None:
        return f'<div class="sr-why">{text(describe.outcome(record))}</div>'
    return f'<div class="sr-why">{_summary(explanation)}{_source(explanation)}{_around(explanation)}</div>'


def _summary(failure: Explanation) -> str:
    first, _, more = failure.summary.strip().partition("\n")
    place = f" <small>{text(failure.place)}</small>" if failure.place else ""
    rest = [text(line[:LINE_CHARACTERS]) for line in more.splitlines()[:SUMMARY_LINES]]
    message = scrolled(block(rest, 0), "more of the message")
    return f"<div><b>{text(describe.first_line(first, LINE_CHARACTERS))}</b>{place}</div>{message}"


def _source(failure: Explanation) -> str:
    lines = [(line.number, text(line.text[:LINE_CHARACTERS])) for line in failure.source]
    return numbered(lines, failure.line)


def _around(failure: Explanation) -> str:
    """Return the callers, the advice and the ranks that failed afterwards, each as a line."""
    advice = f"<div>{text(failure.advice)}</div>" if failure.advice else ""
    return "".join(map(note, failure.callers)) + advice + note(failure.followers)
