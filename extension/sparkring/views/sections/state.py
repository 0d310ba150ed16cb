"""The state of a run: its title line, why it failed, what it waits for, its notices, and its progress."""

from __future__ import annotations

import time

from sparkring.history import describe, metrics
from sparkring.history.record import RunRecord
from sparkring.views.markup import note, text
from sparkring.views.sections import Form


def head_html(record: RunRecord, now: float) -> str:
    """Return the title line: the run's state, title, ranks and framework, and how long the run has taken so far."""
    state = record.outcome or ("running" if record.running_since else "starting")
    look = {"interrupted": "cut", "timed out": "cut", "starting": ""}.get(state, state)
    facts = [*describe.facts(record), describe.took(record, now)]
    if record.ended:
        facts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started)))
    else:
        facts.append(time.strftime("as of %Y-%m-%d %H:%M:%S", time.localtime(now)))
    said = text(" · ".join(facts))
    return (
        f'<div class="sr-head"><b class="sr-state{f" sr-{look}" if look else ""}">{text(state)}</b> '
        f'<span class="sr-title">{text(describe.first_line(record.title, 120))}</span> <small>{said}</small></div>'
    )


def why_html(record: RunRecord) -> str:
    """Return one line on why a run did not succeed. The exception, which is shown below, has the details."""
    if record.outcome in (None, "finished"):
        return ""
    line = describe.failed_line(record)
    place = f" <small>cell line {line}</small>" if line else ""
    return f'<div class="sr-why">{text(describe.outcome(record))}{place}</div>'


def waiting_html(record: RunRecord) -> str:
    """Return how many ranks have connected; '' once all ranks have, or when the run is over."""
    if record.outcome is not None or record.running_since:
        return ""
    return f"<div>{text(describe.outcome(record))}</div>"


def notices_html(record: RunRecord, form: Form) -> str:
    """Return the last notices: three of them in the short form "stacked", ten in the others."""
    told = record.notices[-3 if form == "stacked" else -10 :]
    return "".join(note(f"⚑ {describe.first_line(notice.text, 600)}") for notice in told)


def progress_html(record: RunRecord, now: float) -> str:
    """Return how far the run is, or how far it got if it did not finish: in words and, while it runs, as a bar."""
    if record.items is not None:
        return _items_progress_html(record, now)
    found = None if record.outcome == "finished" else metrics.progress(record, record.ended or now)
    if found is None:
        return ""
    bar = ""
    if found.fraction is not None and record.outcome is None:
        bar = _bar(found.fraction)
    return f"<div>{bar}<small>{text(describe.progress_words(found, running=record.outcome is None))}</small></div>"


def _items_progress_html(record: RunRecord, now: float) -> str:
    if record.outcome == "finished":
        return f"<div><small>{text(describe.items(record))}</small></div>"
    if record.items is None or record.outcome is not None:
        return ""
    fraction = record.items.fraction
    words = describe.dotted(describe.items_progress(record, now), describe.items_left(record, now))
    return f"<div>{'' if fraction is None else _bar(fraction)}<small>{text(words)}</small></div>"


def _bar(fraction: float) -> str:
    return f'<div class="sr-bar"><div style="width:{100 * fraction:.1f}%"></div></div>'
