"""Turns a run into messages for a page. They contain the changes in the run's record since the last message.

A message is a dict of JSON values with the `run` and a `kind`:

    lines     what ranks printed. `start` is the number of the first new line among all lines of the run, and `count`
              is the number of new lines. The new lines that are shown are in columns: `rank`, `stream` ("o" for
              stdout, "e" for stderr, "m" for a message), `time` (in seconds since the run began), `text`, and `html`.
              If some new lines are not shown, or are messages of several lines, `line` is another column: the index
              among the new lines. `html` maps the indices of lines with colours to HTML. `noise` holds the indices of
              TensorFlow's start-up messages. `pending` holds the lines whose end has not been printed yet, in the same
              columns
    state     the state of the run, and a column for each fact about its ranks
    sections  the HTML of the sections (views/sections) that have changed, by name
    charts    the curves as numbers (views/charts). If a curve has only grown, its new points are sent (charts.since)
    displays  what ranks have displayed: `order` lists [key, ranks or items, seconds since the run began] in order of
              time. `html` holds the HTML of the displays that have not been sent before, by key
    usage     the resources that each rank uses, and the percentage of the time that it waits for data. For each rank
              with new samples, `samples` has a row for each Sample, with the time in seconds since the run began
    search    the metric, the parameters and their importance, and the best parameters as Python code, if the items are
              the trials of a search
    stream    the section `stream` as its module describes it. A number in `figures` is the time of a Moment. A row of
              `parts` says whether the chart shows the part at first, its share of the time, and its seconds in all.
              `rows` has a row for each new batch. `end` counts all batches; the page keeps the last `kept` of them
    items     a row for each item that has changed since the last message of this kind. It has the cells of the
              COLUMNS of the section `items`, and then the ITEM_DETAILS

Strings are plain text (history/lines.plain). In the HTML, text from users and ranks is escaped. Therefore, a page can
show what ranks print, even if it contains HTML.
"""

from __future__ import annotations

import json
import time as clock
from collections.abc import Callable, Sequence
from typing import Any

from sparkring.history import describe, item_records, lines, progress, reading, stream_records
from sparkring.history.events import Displayed
from sparkring.history.item_records import ItemRecord
from sparkring.history.record import LogLine, RankRecord, RunRecord, Sample
from sparkring.history.stream_records import StreamRecord
from sparkring.views import attempts, displays
from sparkring.views.charts import charts, since
from sparkring.views.description import Moment
from sparkring.views.markup import log_text
from sparkring.views.sections import Form, checkpoints, code, failure, items, ranks, restarts, shards, stream, timeline
from sparkring.views.sections import metrics as measured
from sparkring.views.sections.state import look_of, state_of
from sparkring.views.watching import watching

Message = dict[str, Any]

# Users watch the steps in the state. Sections and charts take longer to make here and to draw in the page.
STATE_PAUSE_S, SECTIONS_PAUSE_S = 0.25, 1.0
PAUSE_PER_WORK = 25  # drawing takes at most 1/25 of the time, because the ranks may need the processor
NOTICES = 5
HINT_AFTER = 3  # reports of each rank: from then on, a page says how the end of the run becomes known
ITEM_DETAILS = ("began", "advice", "by", "curves")
# If there are more ranks, the page shows no lanes, and needs no samples.
MOST_LANES = 32
RUNNING_POINTS = 4_000  # the most points of running items' curves in a message; ended items' curves are sent whole
_LINE_BYTES = 20  # for a line's rank, stream, time and quotes
_INDEX_BYTES = 5  # of an entry of the column `line`
_STREAMS = {"stdout": "o", "stderr": "e", "message": "m"}
_NO_USAGE: Message = {"kind": "usage", "used": [], "waiting": [], "starves": [], "starving": "", "lines": {}}

Section = Callable[[RunRecord, float, Form], str]


def _metrics(record: RunRecord, now: float, form: Form) -> str:
    """Return the metrics. For a run of items, whose ranks have no tiles, these are those of items, and the GPUs."""
    more = items.metrics_html(record, now) + ranks.gpus_html(record) if record.items is not None else ""
    return measured.html(record, now, form) + more


# The reason why the run failed, and then the tabs in their order. panel/src/panel.js uses the same names.
SECTIONS: dict[str, Section] = {
    "failure": failure.html,
    "metrics": _metrics,
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
        self._usage = _NO_USAGE
        self._samples: dict[int, tuple[Sample, ...]] = {}
        self._sections: dict[str, str] = {}
        self._charts: Message = {}
        self._displays: tuple[Displayed, ...] = ()
        self._displays_sent: set[str] = set()
        self._search: Message = {}
        self._stream: Message = {}
        self._items_ended = 0
        self._items_running: tuple[ItemRecord, ...] = ()
        self._sections_due = 0.0

    def news(self, record: RunRecord, now: float) -> list[Message]:
        """Return messages with everything that the page does not know yet.

        During the run, the state and the sections are sent only after a pause.
        """
        ended = record.outcome is not None
        messages = self._new_lines(record)
        if drawn := ended or now >= self._sections_due:
            messages += self._new_sections(record, now) + self._new_displays(record)
            messages += self._new_items(record) + self._new_batches(record) + self._new_usage(record, now)
        if drawn or now >= self._state_due:
            began = clock.monotonic()
            state = state_message(record, now)
            self._state_due = now + max(STATE_PAUSE_S, PAUSE_PER_WORK * (clock.monotonic() - began))
            if not drawn and self._state:
                # The values must match the tables and curves that were last sent.
                state |= {name: self._state[name] for name in ("last", *(("progress",) if self._search else ()))}
            if state != self._state:
                self._state = state
                messages.append({**state, "now": now})
        return [{"run": record.run_id, **message} for message in messages]

    def _new_lines(self, record: RunRecord) -> list[Message]:
        # Lines are sent in the order in which they arrived, and neither held back nor folded. A page that asks for the
        # run gets its last lines again, and knows by their numbers which of them it has; all pages get these numbers.
        pending = lines.pending(record) if record.outcome is None else []
        count = min(record.recent_count - self._lines, len(record.recent))
        if not count and pending == self._pending:
            return []
        self._lines, self._pending = record.recent_count, pending
        new = list(record.recent[len(record.recent) - count :])
        shown = lines.visible(new, record.logs)
        message: Message = {
            "kind": "lines",
            "start": record.recent_count - count,
            "count": count,
            **_columns(shown, record.started),
            "noise": [at for at, line in enumerate(shown) if lines.is_noise(line)],
            "pending": _columns(pending, record.started),
        }
        if shown != new:
            message["line"] = [at for at, line in enumerate(new) for _ in lines.visible([line], record.logs)]
        return [message]

    def _new_sections(self, record: RunRecord, now: float) -> list[Message]:
        began = clock.monotonic()
        drawn = {name: section(record, now, "tab") for name, section in SECTIONS.items()}
        curves = charts(record)
        self._sections_due = now + max(SECTIONS_PAUSE_S, PAUSE_PER_WORK * (clock.monotonic() - began))
        changed = {name: html for name, html in drawn.items() if html != self._sections.get(name, "")}
        messages: list[Message] = [{"kind": "sections", "html": changed}] if changed else []
        messages += [{"kind": "charts", "charts": [], **since(self._charts, curves)}] if curves != self._charts else []
        self._sections, self._charts = drawn, curves
        return messages

    def _new_displays(self, record: RunRecord) -> list[Message]:
        if record.displays is self._displays:
            return []
        self._displays = record.displays
        order, html = [], {}
        for entry in sorted(displays.shown(record), key=lambda entry: entry.display.time):
            display = entry.display
            # This identifies a display and its content: if a display is replaced, its time changes.
            key = f"{display.attempt}-{display.rank}-{display.number}-{display.time}"
            ranks_or_item = entry.ranks if display.item is None else [display.item]
            order.append((key, ranks_or_item, round(display.time - record.started, 1)))
            if key not in self._displays_sent:
                html[key] = displays.body_html(display)
        self._displays_sent = {key for key, *_ in order}
        return [{"kind": "displays", "order": order, "html": html}]

    def _new_usage(self, record: RunRecord, now: float) -> list[Message]:
        usage = usage_message(record, now)
        lanes = record.ranks if record.size <= MOST_LANES and record.items is None else ()
        new = {rank.rank: rank.samples for rank in lanes if rank.samples != self._samples.get(rank.rank, ())}
        if usage == self._usage and not new:
            return []
        self._usage, self._samples = usage, {**self._samples, **new}
        rows = {rank: [_row(sample, record.started) for sample in samples] for rank, samples in new.items()}
        return [{**usage, "samples": rows}]

    def _new_batches(self, record: RunRecord) -> list[Message]:
        if record.stream is None:
            return []
        message = stream_message(record.stream, record, self._stream.get("end", 0))
        if message == {**self._stream, "rows": []}:
            return []
        self._stream = message
        return [message]

    def _new_items(self, record: RunRecord) -> list[Message]:
        if record.items is None:
            return []
        search = search_message(record)
        messages = [search] if search != self._search else []
        new = record.items.over - self._items_ended
        ended = record.items.ended[-new:] if new else ()
        running = [item for item in record.items.running if item not in self._items_running]
        self._search, self._items_ended, self._items_running = search, record.items.over, record.items.running
        most = max(item_records.FEWEST_POINTS, RUNNING_POINTS // max(1, sum(len(item.curves) for item in running)))
        rows = [_item(record, item) for item in ended] + [_item(record, item, most) for item in running]
        return [*messages, {"kind": "items", "rows": rows}] if rows else messages


def whole(record: RunRecord, now: float) -> list[Message]:
    """Return messages with everything in the record, for a new page."""
    return Feed().news(record, now)


def size_bytes(message: Message) -> int:
    """Return the approximate size of a message as JSON. For lines, it is estimated, because there are many of them."""
    if message["kind"] == "lines":
        texts, indices = message["text"], message.get("line", [])
        return sum(map(len, texts)) + _LINE_BYTES * len(texts) + _INDEX_BYTES * len(indices)
    return len(json.dumps(message))


# ── Lines ─────────────────────────────────────────────────────────────────────


def _columns(shown: Sequence[LogLine], began: float) -> Message:
    return {
        "rank": [line.rank for line in shown],
        "stream": "".join(_STREAMS[line.stream] for line in shown),
        "time": [round(line.time - began, 2) for line in shown],
        "text": [lines.plain(line.text) for line in shown],
        "html": {at: log_text(line.text) for at, line in enumerate(shown) if "\x1b" in line.text},
    }


# ── Items ─────────────────────────────────────────────────────────────────────


def _item(record: RunRecord, item: ItemRecord, most: int = item_records.CURVE_POINTS) -> tuple[Any, ...]:
    """Return the row of an item: its cells, and its ITEM_DETAILS. Each curve has at most `most` points.

    Times are in seconds since the run began. A curve of a single value is sent only for a search's metric.
    """
    assert record.items is not None
    searched = "" if record.items.search is None else record.items.search.metric
    return (
        *items.row(record, item, round(item.ended - item.started, 3) if item.ended else None),
        round(item.started - record.started, 2),
        describe.plain_lines(item.failure.advice or "") if item.failure else "",
        item.by,
        {
            lines.plain(name): [(at, float(f"{value:.6g}")) for at, value in item_records.thinned(curve, most)]
            for name, curve in item.curves.items()
            if curve[1:] or name == searched
        },
    )


def search_message(record: RunRecord) -> Message:
    """Return the metric and the parameters of a search, and their importance. Return {} if the run has no search."""
    search = None if record.items is None else record.items.search
    if search is None:
        return {}
    return {
        "kind": "search",
        "metric": lines.plain(search.metric),
        "mode": search.mode,
        "parameters": [
            axis._asdict() | {"choices": [lines.plain(choice) for choice in axis.choices]} for axis in search.parameters
        ],
        "importance": describe.importances(search),
        "basis": describe.importance_basis(search),
        "best": describe.best_parameters(record),
    }


# ── Streams ───────────────────────────────────────────────────────────────────


def stream_message(streamed: StreamRecord, record: RunRecord, known: int) -> Message:
    """Return the figures of a stream, and the rows of its batches except the first `known` ones."""
    end = streamed.batches + streamed.replayed + streamed.passed_over + streamed.empty
    tab = stream.described_tab(streamed, record, end - known)
    bars = tab.bars
    return {
        "kind": "stream",
        "facts": lines.plain(tab.facts),
        "figures": [(name, value.time if isinstance(value, Moment) else value) for name, value in tab.figures],
        "parts": [(part.shown, part.share, round(part.all_s, 3)) for part in bars.parts] if bars else [],
        "legend": bars.legend if bars else "",
        "end": end,
        "kept": stream_records.RECENT,
        "rows": bars.table.rows if bars else [],
    }


# ── State ─────────────────────────────────────────────────────────────────────


def state_message(record: RunRecord, now: float) -> Message:
    """Return the state of the run. The message does not change merely because time passes."""
    slowest = None if record.outcome == "finished" else progress.slowest(record, record.ended or now)
    running = record.outcome is None
    lags = progress.lags(record) if running else []
    fraction = slowest.fraction if slowest else None
    waits = running and not (record.running_since or record.stream or record.items)
    words = ""
    if slowest:
        words = describe.progress_words(slowest._replace(left_s=None), running=running, lags=bool(lags))
    left = describe.left_words(slowest) if slowest and running else ""
    if running and fraction is None and len(record.metrics) >= HINT_AFTER * record.size:
        left = "log() shows how much is left if it gets steps= or epochs="
    if record.items is not None:
        fraction, words, left = record.items.fraction, "", ""
        if running:
            words = describe.dotted(describe.items_progress(record, now), describe.gpu_words(record.gpus))
            left = describe.items_left(record, now)
        elif record.outcome == "finished":
            words = describe.items(record)
    if record.stream is not None:  # a stream has no end, so no fraction of it is complete
        fraction, left = None, ""
        words = describe.dotted(describe.stream(record), describe.gpu_words(record.gpus) if running else "")
    return {
        "kind": "state",
        "state": state_of(record),
        "look": look_of(record),
        "title": describe.first_line(record.title, 120),
        "facts": describe.facts(record),
        "magic": record.code.split(maxsplit=1)[0] if record.code.startswith("%%") else "",
        "started": record.started,
        "ended": record.ended,
        "took": describe.took(record, now) if record.ended else "",
        "error": "" if record.failed_rank is None else describe.explain_failure(record),
        "failed_rank": record.failed_rank,
        "waiting": describe.outcome(record) if waits else "",
        "fraction": fraction,
        "progress": words,
        "left": left,
        "last": describe.metric_words(record, 4),
        "notices": attempts.notices(record, NOTICES),
        "watch": watching(record),
        "notify": record.notify,
        "asks": [
            {name: getattr(asked, name) for name in ("rank", "number", "time", "hidden")}
            | {"prompt": describe.question(asked)}
            for asked in record.questions
        ],
        "lag": describe.lag_words(lags, reading.causes(record, now) if lags else {}),
        "reports": len(record.metrics),
        "noun": describe.step_noun(record),
        "streamed": record.stream is not None,
        "pooled": "" if record.items is None else record.items.noun,
        "ranks": ranks.described(record, lags),
    }


def usage_message(record: RunRecord, now: float) -> Message:
    """Return the resources that each rank uses, and the percentage of the time that it waits for data.

    `used` and `waiting` are columns, or empty if nothing is known. Ranks that have ended use nothing. `starves` holds
    the running ranks that wait too long, and `starving` says so. `lines` has, for each running rank, the line of the
    cell in words, and its calls.
    """
    if record.items is not None:  # the ranks of a pool have no tiles
        return _NO_USAGE
    waits = reading.waits(record, now)
    percent = {rank: round(100 * (wait.waiting or 0.0)) for rank, wait in waits.items()}
    running = {rank.rank for rank in record.ranks if rank.state == "running"}
    used = [_used(rank) if rank.rank in running else None for rank in record.ranks]
    starves = [rank for rank, wait in waits.items() if wait.mark == "starves" and rank in running]
    return {
        "kind": "usage",
        "used": used if any(used) else [],
        "waiting": [percent.get(rank.rank) for rank in record.ranks] if waits else [],
        "starves": starves,
        "starving": describe.starving_words({rank: percent[rank] for rank in starves}),
        "lines": {
            rank.rank: (describe.line_words(record, rank), [lines.plain(call) for call in rank.at.calls])
            for rank in record.ranks
            if rank.at is not None and rank.state == "running"
        },
    }


def _used(rank: RankRecord) -> list[Any] | None:
    """Return the resources that a rank uses: the FIELDS of panel/src/usage.js."""
    if rank.used is None:
        return None
    totals = [gpu.total_bytes for gpu in rank.gpus if gpu.total_bytes is not None]
    last = rank.samples[-1]
    gpus = [len(rank.gpus), last.gpu_percent, last.gpu_bytes, sum(totals)]
    return [rank.used.cpu_percent, rank.used.memory_bytes, rank.used.cores, rank.used.total_bytes, *gpus]


def _row(sample: Sample, began: float) -> list[Any]:
    """Return a Sample as a row of panel/src/usage.js."""
    time_s = round(sample.time - began, 1)
    return [time_s, sample.cpu_percent, sample.memory_bytes, sample.gpu_percent, sample.gpu_bytes]
