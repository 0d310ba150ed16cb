"""The section on the attempts of a run that was restarted or that continued from a checkpoint."""

from __future__ import annotations

from sparkring.history.describe import counted
from sparkring.history.record import RunRecord
from sparkring.views import attempts
from sparkring.views.attempt_line import picture
from sparkring.views.markup import details, note, text
from sparkring.views.sections import Form
from sparkring.views.sections.log import block, line_html

ATTEMPTS_LIVE, ATTEMPTS_SHOWN = 3, 12
ATTEMPTS_BYTES = 24_000  # the space for the last lines of all ranks whose failures ended attempts

_CHAPTERS = {
    "ended": ("x", "✗"),
    "running": ("r", "▶"),
    "finished": ("f", "✓"),
    "failed": ("x", "✗"),
    "cut": ("s", "■"),
}


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return a drawing of the last attempts, and a line for each, with the last lines of the rank that failed."""
    chapters = attempts.story(record)
    shown = chapters[-(ATTEMPTS_LIVE if form == "stacked" else ATTEMPTS_SHOWN) :]
    parts: list[str] = []
    budget = ATTEMPTS_BYTES
    for chapter in reversed(shown):
        name, sign = _CHAPTERS[chapter.state]
        fold = ""
        if chapter.last_lines:
            lasts = block([line_html(line) for line in chapter.last_lines], -1)
            fold = details(f"last lines of rank {chapter.failed_rank}", lasts) if len(lasts) <= budget else ""
            budget -= len(fold)
        parts.insert(0, f'<div><span class="{name}">{sign}</span> {text(chapter.line)}{fold}</div>')
    if len(chapters) > len(shown):
        parts.insert(0, note(f"{counted(len(chapters) - len(shown), 'earlier attempt')} not shown"))
    return f'{picture(record, now, shown)}<div class="sr-attempts">{"".join(parts)}</div>' if parts else ""
