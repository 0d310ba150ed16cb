"""A run as messages to a page: the changes in its record since the last message.

A message is a dict of JSON values with the `run` and a `kind`:

    lines     what ranks printed. `start` is the number of the first new line among all lines of the run, and `count`
              is the number of new lines. The new lines that are shown are given as columns: `rank`, `stream` ("o" for
              stdout, "e" for stderr, "m" for a message), `time` (in seconds since the run began), `text`, and `html`,
              which has entries only for lines with colours, by index. `noise` has the indices of TensorFlow's start-up
              messages. `pending` has the lines whose end has not been printed yet, as such columns
    state     the state of the run, and a column for each fact about its ranks
    sections  the HTML of those sections (views/sections) that have changed, by name
    charts    the curves as numbers (views/charts). If a curve has changed, all curves are sent
    search    what the items search for, if they are the trials of a search
    items     a row for each item that has changed since the last message of this kind. Its columns are the FIELDS of
              panel/src/items.js

Texts are plain (history/lines.plain), and the HTML escapes what users wrote. So a page need not trust what ranks print.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Callable, Sequence
from typing import Any

from sparkring.history import describe, item_records, lines, progress
from sparkring.history.item_records import ItemRecord
from sparkring.history.progress import Lag, Pace
from sparkring.history.record import LogLine, RankRecord, RunRecord
from sparkring.views.charts import charts
from sparkring.views.markup import log_text
from sparkring.views.sections import Form, checkpoints, code, failure, restarts, shards, timeline
from sparkring.views.sections import metrics as measured

Message = dict[str, Any]

STATE_PAUSE_S, SECTIONS_PAUSE_S = 0.25, 1.0
PAUSE_PER_WORK = 25  # drawing takes at most 1/25 of the time, since the ranks may need the processor
NOTICES = 5
RUNNING_POINTS = 4_000  # limits the points of running items' curves in a message; ended items' curves are sent in full
_STATES = {"starting": ".", "running": "r", "finished": "f", "failed": "x", "stopped": "s", "idle": "i"}
_FOLLOWED = "y"  # the state of a rank that failed after another rank had failed
_STREAMS = {"stdout": "o", "stderr": "e", "message": "m"}

Section = Callable[[RunRecord, float, Form], str]
# Why the run failed, and then the tabs, in their order. panel/src/panel.js uses the same names.
SECTIONS: dict[str, Section] = {
    "failure": failure.html,
    "metrics": measured.html,
    "shards": shards.html,
    "checkpoints": checkpoints.html,
    "restarts": restarts.html,
    "timeline": timeline.html,
    "code": code.html,
}


class Feed:
    """Remembers what a page already knows about one run, so that each change is sent only once."""

    def __init__(self) -> None:
        self._lines = 0
        self._pending: list[LogLine] = []
        self._state: Message = {}
        self._state_due = 0.0
        self._sections: dict[str, str] = {}
        self._charts: Message = {}
        self._search: Message = {}
        self._items_ended = 0
        self._items_running: tuple[ItemRecord, ...] = ()
        self._sections_due = 0.0

    def news(self, record: RunRecord, now: float) -> list[Message]:
        """Return messages with everything that the page does not know yet.

        During the run, there is a pause before the state and the sections are sent again.
        """
        ended = record.outcome is not None
        found = self._new_lines(record)
        if drawn := ended or now >= self._sections_due:
            found += self._new_sections(record, now) + self._new_items(record)
        if drawn or now >= self._state_due:
            began = clock.monotonic()
            state = state_message(record, now)
            self._state_due = now + max(STATE_PAUSE_S, PAUSE_PER_WORK * (clock.monotonic() - began))
            if not drawn and self._state:
                state["last"] = self._state["last"]  # this must match the table and the curves that were last sent
            if state != self._state:
                self._state = state
                found.append({**state, "now": now})
        return [{"run": record.run_id, **message} for message in found]

    def _new_lines(self, record: RunRecord) -> list[Message]:
        pending = lines.pending(record) if record.outcome is None else []
        count = min(record.recent_count - self._lines, len(record.recent))
        if not count and pending == self._pending:
            return []
        self._lines, self._pending = record.recent_count, pending
        shown = lines.visible(record.recent[len(record.recent) - count :], record.logs)
        message = {
            "kind": "lines",
            "start": record.recent_count - count,
            "count": count,
            **_columns(shown, record.started),
            "noise": [at for at, line in enumerate(shown) if lines.is_noise(line)],
            "pending": _columns(pending, record.started),
        }
        return [message]

    def _new_sections(self, record: RunRecord, now: float) -> list[Message]:
        began = clock.monotonic()
        drawn = {name: section(record, now, "tab") for name, section in SECTIONS.items()}
        curves = charts(record)
        self._sections_due = now + max(SECTIONS_PAUSE_S, PAUSE_PER_WORK * (clock.monotonic() - began))
        changed = {name: html for name, html in drawn.items() if html != self._sections.get(name, "")}
        found: list[Message] = [{"kind": "sections", "html": changed}] if changed else []
        found += [{"kind": "charts", "charts": [], **curves}] if curves != self._charts else []
        self._sections, self._charts = drawn, curves
        return found

    def _new_items(self, record: RunRecord) -> list[Message]:
        if record.items is None:
            return []
        search = search_message(record)
        found = [search] if search != self._search else []
        new = record.items.over - self._items_ended
        ended = record.items.ended[-new:] if new else ()
        running = [each for each in record.items.running if each not in self._items_running]
        self._search, self._items_ended, self._items_running = search, record.items.over, record.items.running
        most = max(item_records.FEWEST_POINTS, RUNNING_POINTS // max(1, sum(len(each.curves) for each in running)))
        rows = [_item(record, each) for each in ended] + [_item(record, each, most) for each in running]
        return [*found, {"kind": "items", "rows": rows}] if rows else found


def whole(record: RunRecord, now: float) -> list[Message]:
    """Return messages with everything in the record, for a new page."""
    return Feed().news(record, now)


# ── Lines ─────────────────────────────────────────────────────────────────────


def _columns(found: Sequence[LogLine], began: float) -> Message:
    return {
        "rank": [line.rank for line in found],
        "stream": "".join(_STREAMS[line.stream] for line in found),
        "time": [round(line.time - began, 2) for line in found],
        "text": [lines.plain(line.text) for line in found],
        "html": {at: log_text(line.text) for at, line in enumerate(found) if "\x1b" in line.text},
    }


# ── Items ─────────────────────────────────────────────────────────────────────


def _item(record: RunRecord, found: ItemRecord, most: int = item_records.CURVE_POINTS) -> list[Any]:
    """Return the row of an item, with the FIELDS of panel/src/items.js and at most `most` points of each curve.

    Times are in seconds since the run began. A curve of a single value is sent only for a search's metric.
    """
    assert record.items is not None
    took = round(found.ended - found.started, 3) if found.ended else None
    failure = found.failure
    searched = "" if record.items.search is None else record.items.search.metric
    return [
        found.item,
        lines.plain(found.name),
        found.state,
        found.attempt,
        round(found.started - record.started, 2),
        took,
        lines.plain(describe.item_value(found)),
        "" if failure is None else describe.first_line(failure.summary),
        "" if failure is None else describe.item_failure(record, failure),
        lines.plain(found.host),
        {lines.plain(name): value for name, value in found.metrics.items() if math.isfinite(value)},
        {name: lines.plain(value) if isinstance(value, str) else value for name, value in found.parameters.items()},
        found.by,
        {
            lines.plain(name): [(at, float(f"{value:.6g}")) for at, value in item_records.thinned(curve, most)]
            for name, curve in found.curves.items()
            if curve[1:] or name == searched
        },
    ]


def search_message(record: RunRecord) -> Message:
    """Return what the items search for, and how much each parameter matters; {} if the run has no search."""
    search = None if record.items is None else record.items.search
    if search is None:
        return {}
    return {
        "kind": "search",
        "metric": lines.plain(search.metric),
        "mode": search.mode,
        "parameters": [
            each._asdict() | {"choices": [lines.plain(choice) for choice in each.choices]} for each in search.parameters
        ],
        "importance": dict(search.importance),
    }


# ── State ─────────────────────────────────────────────────────────────────────


def state_message(record: RunRecord, now: float) -> Message:
    """Return the state of the run, in a form that does not change merely because time passes."""
    slowest = None if record.outcome == "finished" else progress.slowest(record, record.ended or now)
    running = record.outcome is None
    fraction = slowest.fraction if slowest else None
    words = describe.progress_words(slowest._replace(left_s=None), running=running) if slowest else ""
    left = describe.left_words(slowest) if slowest and running else ""
    if record.items is not None:
        fraction, words = record.items.fraction, describe.items_progress(record, now) if running else ""
        left = describe.items_left(record, now) if running else ""
        if record.outcome == "finished":
            words = describe.items(record)
    lags = progress.lags(record) if running else []
    return {
        "kind": "state",
        "state": record.outcome or ("running" if record.running_since else "starting"),
        "title": describe.first_line(record.title, 120),
        "facts": describe.facts(record),
        "magic": record.code.split(maxsplit=1)[0] if record.code.startswith("%%") else "",
        "started": record.started,
        "ended": record.ended,
        "took": describe.took(record, now) if record.ended else "",
        "error": "" if record.failed_rank is None else describe.explain_failure(record),
        "failed_rank": record.failed_rank,
        "waiting": "" if record.running_since or not running else describe.outcome(record),
        "fraction": fraction,
        "progress": words,
        "left": left,
        "last": describe.metric_words(record, 4),
        "notices": [describe.first_line(notice.text, 600) for notice in record.notices[-NOTICES:]],
        "lag": describe.lag_words(lags),
        "reports": len(record.metrics),
        "pooled": record.items is not None,
        "ranks": _ranks(record, lags),
    }


def _ranks(record: RunRecord, lags: Sequence[Lag]) -> Message:
    """Return facts about the ranks. Most of them are columns with a value for each rank.

    `heard` is the time of a rank's last message. `step` is the rank's step in the epoch, or None if it reports no step.
    `done` is the completed fraction of the run, and `rate` is in steps per second; they are None if not known. `behind`
    has the steps by which ranks are behind the others.
    """
    hosts = sorted({rank.host for rank in record.ranks})
    place = {host: at for at, host in enumerate(hosts)}
    told = [rank.metrics for rank in record.ranks]
    first, paces = progress.first_epoch(record), progress.paces(record)
    pace = [paces.get(rank.rank, Pace()) for rank in record.ranks]
    return {
        "state": "".join(_state(record, rank) for rank in record.ranks),
        "hosts": hosts,
        "host": [place[rank.host] for rank in record.ranks],
        "pid": [rank.pid for rank in record.ranks],
        "heard": [round(rank.last_heard, 1) for rank in record.ranks],
        "lines": [rank.line_count for rank in record.ranks],
        "epoch": [each.epoch + 1 - first if each and each.epoch is not None else None for each in told],
        "step": [each.step if each else None for each in told],
        "done": [None if each.fraction is None else round(each.fraction, 4) for each in pace],
        "rate": [None if each.rate is None else float(f"{each.rate:.2g}") for each in pace],
        "behind": {lag.rank: lag.steps for lag in lags},
        "gpu": {rank.rank: describe.gpu_words(rank.gpus) for rank in record.ranks if rank.gpus},
        "failure": {
            rank.rank: describe.first_line(rank.failure.summary, 200)
            for rank in record.ranks
            if rank.failure is not None
        },
    }


def _state(record: RunRecord, rank: RankRecord) -> str:
    if rank.state == "failed" and record.failed_rank not in (None, rank.rank):
        return _FOLLOWED
    return _STATES[rank.state]
