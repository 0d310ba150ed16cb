"""The section on the state of a run: the title line, what the run waits for, the notices, and the progress."""

from __future__ import annotations

import time

from sparkring.history import describe, progress
from sparkring.history.record import RunRecord
from sparkring.views import attempts
from sparkring.views.markup import note, text
from sparkring.views.sections import Form
from sparkring.views.watching import watching


def head_html(record: RunRecord, now: float) -> str:
    """Return the title line, with the run's state, title, ranks, framework, and time so far."""
    look = look_of(record)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started)) if record.ended else as_of(now)
    facts = [*describe.facts(record), describe.took(record, now), when]
    words = text(" · ".join(facts))
    return (
        f'<div class="sr-head"><b class="sr-state{f" sr-{look}" if look else ""}">{text(state_of(record))}</b> '
        f'<span class="sr-title">{text(describe.first_line(record.title, 120))}</span> <small>{words}</small></div>'
    )


def state_of(record: RunRecord) -> str:
    """Return the state of the run in one word."""
    return record.outcome or ("running" if record.running_since else "starting")


def look_of(record: RunRecord) -> str:
    """Return the last part of the class that gives the run's state its colour: "cut" calls for attention."""
    state = state_of(record)
    if state in ("interrupted", "timed out") or (state == "finished" and describe.not_finite_words(record)):
        return "cut"
    return "" if state == "starting" else state


def as_of(now: float) -> str:
    """Return the time at which the state of a run that has not ended was drawn.

    The saved view may be all that is left of the run.
    """
    return time.strftime("as of %Y-%m-%d %H:%M:%S, not updated since", time.localtime(now))


def waiting_html(record: RunRecord) -> str:
    """Return how many ranks have connected, or what running ranks ask the user; '' if the run waits for nothing."""
    if record.outcome is not None:
        return ""
    if record.running_since:
        return "".join(note(f"rank {asked.rank} asks: {describe.question(asked)}") for asked in record.questions)
    return f"<div>{text(describe.outcome(record))}</div>" if record.stream is None and record.items is None else ""


def notices_html(record: RunRecord, form: Form) -> str:
    """Return the last notices: at most three in the form "stacked", else ten, after what needs attention most."""
    watch, notices = watching(record), attempts.notices(record, 3 if form == "stacked" else 10)
    first = [watch.text] if watch else []
    return "".join(note(f"⚑ {notice}") for notice in [*first, *(other for other in notices if other not in first)])


def progress_html(record: RunRecord, now: float) -> str:
    """Return the progress of the run in words and, during the run, also as a bar."""
    if record.items is not None:
        return _items_progress_html(record, now)
    if record.stream is not None:  # a stream has no end, so there is no bar
        return note(describe.dotted(describe.stream(record), describe.stream_idle(record, now)))
    slowest = None if record.outcome == "finished" else progress.slowest(record, record.ended or now)
    if slowest is None:
        return ""
    running = record.outcome is None
    bar = _bar(slowest.fraction if running else None)
    words = describe.progress_words(slowest, running=running, lags=running and bool(progress.lags(record)))
    return f"<div>{bar}<small>{text(words)}</small></div>"


def _items_progress_html(record: RunRecord, now: float) -> str:
    if record.outcome == "finished":
        return f"<div><small>{text(describe.items(record))}</small></div>"
    if record.items is None or record.outcome is not None:
        return ""
    words = describe.dotted(describe.items_progress(record, now), describe.items_left(record, now))
    return f"<div>{_bar(record.items.fraction)}<small>{text(words)}</small></div>"


def _bar(fraction: float | None) -> str:
    return "" if fraction is None else f'<div class="sr-bar"><div style="width:{fraction:.1%}"></div></div>'
