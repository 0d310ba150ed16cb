"""A run as HTML in a notebook: a panel that is redrawn in place, and what stays of it for later readers.

No scripts, nothing from elsewhere, and tags that still read well where styles are stripped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sparkring.record import LogLine, RankRecord, RunRecord
from sparkring.views import attempts, checkpoints, lines, metrics, reading, summary
from sparkring.views.curves import chart
from sparkring.views.lines import Shared
from sparkring.views.markup import AMBER, BLUE, GREEN, RANK_COLOURS, STYLE, log_text, text
from sparkring.views.metrics import Spread, Table
from sparkring.views.summary import counted, duration, gpu_words, size
from sparkring.views.tables import bare_table

if TYPE_CHECKING:
    from sparkring.record import RankState

PAUSE_S = 0.2
WARM_PAUSE_S = 0.1  # most cells on a warm gang end sooner: what they print is all there is to see
PAUSE_PER_WORK = 10  # drawing may take this part of the time: the ranks may need the processor
BYTES_PER_S = 500_000  # what the browser is given to swallow
PANEL_BYTES = 190_000
RANK_BYTES = 2_000  # less of a rank's log is not worth the room
LOG_LINES = 30
QUICK_LINES, QUICK_BYTES = 200, 120_000  # of a run that is shown by its lines only
LINE_CHARACTERS = 600
ROWS_LIVE, ROWS_DONE = 5, 12
CHARTS = 6
RANKS_MEASURED = 64
GPU_ROWS = 16
TILES_WITH_NUMBERS, MOST_TILES = 32, 1024
CODE_LINES = 400
ATTEMPTS_LIVE, ATTEMPTS_DONE = 3, 12
ATTEMPTS_BYTES = 24_000  # of what the ranks printed last that ended them

Bundle = dict[str, str]
_SIGNS: dict[RankState, tuple[str, str]] = {
    "starting": ("", "…"),
    "running": ("r", "▶"),
    "finished": ("f", "✓"),
    "failed": ("x", "✗"),
    "stopped": ("s", "■"),
    "idle": ("i", "·"),
}
_CHAPTERS = {
    "ended": ("x", "✗"),
    "running": ("r", "▶"),
    "finished": ("f", "✓"),
    "failed": ("x", "✗"),
    "cut": ("s", "■"),
}
_RIGHT = ' class="sr-n" align="right"'
_STREAM_SIGNS = {"stdout": ("", "│"), "stderr": ("e", "!"), "message": ("m", "»")}


class HtmlView:
    """Draws the panel in place, a few times a second at most; how it ended always.

    Of a quick run on a warm gang only what it printed is shown, and nothing if that was nothing.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        show: Callable[[Bundle, str, bool], None] | None = None,
    ) -> None:
        self._clock = clock
        self._show = show or _display
        self._id = f"sparkring-{secrets.token_hex(8)}"
        self._due: float | None = None
        self._shown: Bundle | None = None

    def refresh(self, record: RunRecord) -> None:
        """Draw, unless that has just been done."""
        began = self._clock()
        if self._due is None:
            self._due = began + (WARM_PAUSE_S if record.warm else 0.0)
        if began < self._due:
            return
        drawn = self._draw(record, final=False)
        took = self._clock() - began
        self._due = began + max(PAUSE_S, PAUSE_PER_WORK * took, drawn / BYTES_PER_S)

    def close(self, record: RunRecord) -> None:
        """Draw what stays."""
        if self._shown is not None or record.recent_count or record.notices or not summary.quick(record):
            self._draw(record, final=True)

    def _draw(self, record: RunRecord, *, final: bool) -> int:
        found = bundle(record, now=time.time(), final=final)
        if found != self._shown:
            self._show(found, self._id, self._shown is not None)
            self._shown = found
        return len(found["text/html"])


def _display(found: Bundle, display_id: str, update: bool) -> None:
    from IPython.display import display

    display(found, raw=True, display_id=display_id, update=update)  # type: ignore[no-untyped-call]


def bundle(record: RunRecord, *, now: float, final: bool) -> Bundle:
    """The run in all the formats that a notebook keeps."""
    if final and summary.quick(record):
        return {"text/html": _quick(record), "text/plain": summary.last_lines(record) or summary.closing(record, now)}
    told = [f"sparkring: {chapter.line}" for chapter in attempts.story(record)[-ATTEMPTS_DONE:]]
    told += [f"sparkring: {line}" for line in reading.closing_words(record, now)]
    return {
        "text/html": panel(record, now=now, final=final),
        "text/plain": "\n".join([summary.short(record, now), *told]),
    }


def _quick(record: RunRecord) -> str:
    """What the ranks of a quick run printed; how it ended, if there is nothing else to show."""
    seen = lines.visible(record.recent, record.logs)
    every = lines.folded([line for line in seen if not lines.is_noise(line)])
    found = every[-QUICK_LINES:]
    while len(said := _pre(found)) > QUICK_BYTES:
        found = found[len(found) // 2 :]
    cut = len(found) < len(every) or len(record.recent) < record.recent_count
    parts = [
        f"<div><small>earlier lines: {text(summary.log_path(record))}</small></div>" if cut else "",
        f'<div class="sr-log sr-done">{said}</div>' if said else "",
        _notices(record, final=True),
        _noise(seen),
    ]
    ended = f"<div><small>{text(summary.closing(record, record.ended))}</small></div>"
    return f'<div class="sr-run">{STYLE}{"".join(parts) or ended}</div>'


def panel(record: RunRecord, *, now: float, final: bool) -> str:
    """The run as one block of HTML, of PANEL_BYTES at most."""
    table = metrics.table(record)
    seen = lines.visible(record.recent, record.logs)
    parts = [
        _head(record, now),
        _why(record),
        _attempts(record, final),
        _ranks(record, now),
        _waiting(record),
        _notices(record, final),
        _progress(record, now),
        _reading(record, now, final),
        _measured(record, table, final),
        checkpoints.saved_html(record, record.ended or now, final),
        _gpus(record),
        _log(record, seen, final),
        _noise(seen),
    ]
    if final:
        parts += [_by_rank(record, table), _code(record)]
        parts.append(_logs_by_rank(record, PANEL_BYTES - len(STYLE) - sum(map(len, parts)) - 100))
    return f'<div class="sr-run">{STYLE}{"".join(parts)}</div>'


# ── State ─────────────────────────────────────────────────────────────────────


def _head(record: RunRecord, now: float) -> str:
    state = record.outcome or ("running" if record.running_since else "starting")
    look = {"interrupted": "cut", "timed out": "cut", "starting": ""}.get(state, state)
    hosts = len({rank.host for rank in record.taking_part if rank.host})
    facts = [
        f"{summary.ranks(record)} on {'Spark' if record.where == 'spark' else 'this machine'}"
        + (f" ({counted(hosts, 'host')})" if hosts > 1 else ""),
        record.framework,
        "warm gang" if record.warm else "",
        duration(summary.elapsed_s(record, now) if record.ended else int(summary.elapsed_s(record, now))),
    ]
    if record.ended:
        facts.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started)))
    said = text(" · ".join(fact for fact in facts if fact))
    return (
        f'<div class="sr-head"><b class="sr-state{f" sr-{look}" if look else ""}">{text(state)}</b> '
        f'<span class="sr-title">{text(summary.first_line(record.title, 120))}</span> <small>{said}</small></div>'
    )


def _why(record: RunRecord) -> str:
    """One line on a run that did not end well; the exception below it tells the rest."""
    if record.outcome in (None, "finished"):
        return ""
    line = summary.failed_line(record)
    place = f" <small>cell line {line}</small>" if line else ""
    return f'<div class="sr-why">{text(summary.outcome(record))}{place}</div>'


def _attempts(record: RunRecord, final: bool) -> str:
    """The story of the attempts, the last ones of many, each with the last lines of the rank that ended it."""
    told = attempts.story(record)
    shown = told[-(ATTEMPTS_DONE if final else ATTEMPTS_LIVE) :]
    parts: list[str] = []
    budget = ATTEMPTS_BYTES
    for chapter in reversed(shown):
        name, sign = _CHAPTERS[chapter.state]
        fold = ""
        if chapter.last_lines:
            block = _block([_line(line, "") for line in chapter.last_lines], -1)
            fold = _details(f"last lines of rank {chapter.failed_rank}", block) if len(block) <= budget else ""
            budget -= len(fold)
        parts.insert(0, f'<div><span class="{name}">{sign}</span> {text(chapter.line)}{fold}</div>')
    if len(told) > len(shown):
        parts.insert(0, f"<div><small>{counted(len(told) - len(shown), 'attempt')} before these</small></div>")
    return f'<div class="sr-attempts">{"".join(parts)}</div>' if parts else ""


def _ranks(record: RunRecord, now: float) -> str:
    if not record.ranks:
        return ""
    if record.size <= TILES_WITH_NUMBERS:
        tiles = [_tile(record, rank, now, f"{rank.rank} ") for rank in record.ranks]
        return f'<div class="sr-ranks">{" ".join(tiles)}</div>'
    counts = " · ".join(f"{count:,} {state}" for state, count in summary.states(record).items())
    more = f" · the first {MOST_TILES:,} of them:" if record.size > MOST_TILES else ""
    tiles = [_tile(record, rank, now, "") for rank in record.ranks[:MOST_TILES]]
    return f'<div><small>{counts}{more}</small></div><div class="sr-ranks sr-many">{"".join(tiles)}</div>'


def _tile(record: RunRecord, rank: RankRecord, now: float, numeral: str) -> str:
    name, sign = _SIGNS[rank.state]
    if rank.state == "failed" and rank.rank != record.failed_rank and record.failed_rank is not None:
        name = "y"  # it followed
    words = [f"rank {rank.rank} {'takes no part' if rank.state == 'idle' else rank.state}"]
    if rank.host:
        words.append(rank.host)
    if numeral:
        words += [f"process {rank.pid}", counted(rank.line_count, "line")] if rank.pid else []
        if rank.state == "running" and now - rank.last_heard >= 2:
            words.append(f"silent for {duration(now - rank.last_heard)}")
        words += [gpu_words(rank.gpus)] if rank.gpus else []
        words += [f"last: {lines.plain(rank.tail[-1].text)[:80]}"] if rank.tail else []
    shape = f' class="{name}"' if name else ""
    return f'<span{shape} title="{text(", ".join(words))}">{numeral}{sign}</span>'


def _waiting(record: RunRecord) -> str:
    if record.outcome is not None or record.running_since:
        return ""
    return f"<div>{text(summary.outcome(record))}</div>"


def _notices(record: RunRecord, final: bool) -> str:
    told = record.notices[-10 if final else -3 :]
    return "".join(f"<div><small>⚑ {text(summary.first_line(notice.text, 600))}</small></div>" for notice in told)


def _progress(record: RunRecord, now: float) -> str:
    found = None if record.outcome == "finished" else metrics.progress(record, record.ended or now)
    if found is None:
        return ""
    bar = ""
    if found.fraction is not None and record.outcome is None:
        bar = f'<div class="sr-bar"><div style="width:{100 * found.fraction:.1f}%"></div></div>'
    return f"<div>{bar}<small>{text(summary.progress_words(found, running=record.outcome is None))}</small></div>"


# ── Data ──────────────────────────────────────────────────────────────────────


def _reading(record: RunRecord, now: float, final: bool) -> str:
    """What data is read, and how far each rank is in it; of many data sets the last ones."""
    found = reading.data_sets(record, now)
    parts = []
    if len(found) > reading.NAMED:
        parts.append(f"<div><small>{counted(len(found) - reading.NAMED, 'data set')} before these</small></div>")
    for each in found[-reading.NAMED :]:
        told = [line for line in reading.lines(each) if line.rows]
        table = _read_table(told) if told else ""
        said = f"<small>{'read' if final else 'reads'} {text(reading.data_words(each))}</small>"
        notes = reading.notes(each)
        wrong = f'<div><b style="color:{AMBER}">⚠ {text(notes)}</b></div>' if notes else ""
        if final and table:  # what is wrong stays in the open, the rest is for those who look for it
            parts.append(f"<div>{said}</div>{wrong}{_details('Reading by rank', table)}")
        else:  # below, so that the table stays where it is
            parts.append(f"<div>{said}</div>{table}{wrong}")
    return "".join(parts)


def _read_table(told: Sequence[reading.Line]) -> str:
    head = f'<th{_RIGHT}>rank</th><th{_RIGHT}>epoch</th><th align="left">read</th>'
    head += "".join(f"<th{_RIGHT}>{name}</th>" for name in ("rows", "rows/s", "per s", "waits for data"))
    where = any(line.place for line in told)
    head += f'<th align="left">{"at" if where else ""}</th>'
    body = "".join(map(_read_row, told))
    return f'<table class="sr-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _read_row(line: reading.Line) -> str:
    bar = ""
    if line.fraction is not None:
        part = f"{100 * line.fraction:.0f}%"
        colour = {"starves": AMBER, "early": GREEN, "": BLUE}[line.mark]
        bar = f'<div class="sr-bar sr-read" title="{part}"><div style="width:{part};background:{colour}"></div></div>'
    numbers = (line.rows, line.rows_per_s, line.bytes_per_s, line.waiting)
    sign = f'<b style="color:{AMBER}" title="{text(line.notes)}">⚠</b> ' if line.notes else ""
    return (
        f"<tr><td{_RIGHT}>{reading.label(line)}</td><td{_RIGHT}>{line.epoch}</td><td>{bar}</td>"
        + "".join(f"<td{_RIGHT}>{text(value)}</td>" for value in numbers)
        + f"<td>{sign}{text(line.place)}</td></tr>"
    )


# ── Metrics ───────────────────────────────────────────────────────────────────


def _measured(record: RunRecord, table: Table, final: bool) -> str:
    if not table.rows:
        return ""
    rows = table.rows[-ROWS_DONE if final else -ROWS_LIVE :]
    labelled = [(table.label(row), [row.values.get(name) for name in table.names]) for row in rows]
    note = f"<caption><small>the last {len(rows)} of {counted(len(table.rows), table.by)}</small></caption>"
    if not final:
        # Room for the epochs to come: what lies below stays where it is.
        expected = min(ROWS_LIVE, record.metrics[-1].epochs or 0)
        labelled += [("\xa0", [None] * len(table.names))] * (expected - len(rows))
    shown = _table((table.by, *table.names), labelled, note if final and len(rows) < len(table.rows) else "")
    return f'<div class="sr-measured"><div>{shown}</div>{_charts(record, table) if final else ""}</div>'


def _table(headers: Sequence[str], rows: Sequence[tuple[str, Sequence[Spread | None]]], note: str = "") -> str:
    """Numbers in aligned columns; beside the mean what the ranks' values lie between, where they differ."""
    head, body = [f"<th{_RIGHT}>{text(headers[0])}</th>"], [f"<td{_RIGHT}>{text(label)}</td>" for label, _ in rows]
    for column, name in enumerate(headers[1:]):
        values = [row[column] for _, row in rows]
        write = summary.numbers([value.mean for value in values if value is not None])
        differs = any(value is not None and value.differs for value in values)
        head.append(f"<th{_RIGHT}>{text(name)}</th>{'<th></th>' if differs else ''}")
        for at, value in enumerate(values):
            across = f"{write(value.low)}–{write(value.high)}" if value is not None and value.differs else ""
            body[at] += f"<td{_RIGHT}>{write(value.mean) if value is not None else ''}</td>"
            body[at] += f"<td><small>{across}</small></td>" if differs else ""
    shown = "".join(f"<tr>{row}</tr>" for row in body)
    return f'<table class="sr-table">{note}<thead><tr>{"".join(head)}</tr></thead><tbody>{shown}</tbody></table>'


def _charts(record: RunRecord, table: Table) -> str:
    found = metrics.curves(record, table)[:CHARTS]
    axis = metrics.curve_axis(table)
    return f'<div class="sr-charts">{"".join(chart(curves, axis) for curves in found)}</div>' if found else ""


def _by_rank(record: RunRecord, table: Table) -> str:
    """Each rank's last metrics, where they are not the same everywhere."""
    found = metrics.last_by_rank(record)
    if not any(value.differs for value in metrics.last(record).values()):
        return ""
    rows = [
        (str(rank), [Spread(*[values[name]] * 3) if name in values else None for name in table.names])
        for rank, values in list(found.items())[:RANKS_MEASURED]
    ]
    return _details("Last metrics by rank", _table(("rank", *table.names), rows))


def _gpus(record: RunRecord) -> str:
    """The GPUs of the first ranks, as they were last heard of."""
    used = [gpu for rank in record.ranks for gpu in rank.gpus]
    if not used:
        return ""
    rows = [
        (
            str(gpu.rank),
            gpu.address,
            gpu.name,
            size(gpu.used_bytes),
            size(gpu.total_bytes),
            "" if gpu.busy_percent is None else f"{gpu.busy_percent} %",
        )
        for gpu in used[:GPU_ROWS]
    ]
    note = f"the first {GPU_ROWS} of {counted(len(used), 'GPU')}" if len(used) > GPU_ROWS else ""
    return bare_table(("rank", "GPU", "name", "memory", "of", "busy"), rows, note)


# ── Lines ─────────────────────────────────────────────────────────────────────


def _log(record: RunRecord, seen: Sequence[LogLine], final: bool) -> str:
    """The last lines; while it runs, those too that have not ended yet."""
    last = [line for line in seen[-LOG_LINES * 20 :] if not lines.is_noise(line)]
    found = lines.folded(last)[-LOG_LINES:] + lines.folded([] if final else lines.pending(record))
    if not found:
        return ""
    return f'<div class="sr-log{" sr-done" if final else ""}">{_pre(found)}</div>'


def _noise(seen: Sequence[LogLine]) -> str:
    noise = [line for line in seen if lines.is_noise(line)]
    return _details(f"TensorFlow's start-up ({counted(len(noise), 'line')})", _pre(lines.folded(noise[-100:])))


def _pre(found: Sequence[Shared]) -> str:
    tags = [summary.rank_numbers(line.ranks) for line in found]
    width = min(12, max(map(len, tags), default=0))
    return _block([_line(shared.line, tag.rjust(width)) for shared, tag in zip(found, tags, strict=True)], width)


def _block(shown: Sequence[str], width: int) -> str:
    """Lines below each other; what does not fit on one goes on behind the tags, `width` characters in."""
    return f'<pre style="--sr-tag:{width + 3}ch">{"".join(shown)}</pre>' if shown else ""


def _line(line: LogLine, tag: str) -> str:
    name, sign = _STREAM_SIGNS[line.stream]
    colour = RANK_COLOURS[line.rank % len(RANK_COLOURS)]
    said = line.text if len(line.text) <= LINE_CHARACTERS else line.text[:LINE_CHARACTERS] + " …"
    shape = f' class="{name}" title="{line.stream}"' if name else ""
    tagged = f'<b style="color:{colour}">{tag}</b> ' if tag else ""
    return f"<span>{tagged}<b{shape}>{sign}</b> {log_text(said)}\n</span>"


def _logs_by_rank(record: RunRecord, budget: int) -> str:
    """The last lines of each rank, as many as fit, those of the rank that failed before others."""
    if record.logs == "all" and record.recent_count <= LOG_LINES and not any(map(lines.is_noise, record.recent)):
        return ""  # the log above has them all
    talkative = [rank for rank in record.ranks if rank.tail]
    talkative.sort(key=lambda rank: (rank.rank != record.failed_rank, rank.rank))
    left_out: list[int] = []
    parts = []
    for count, rank in enumerate(talkative):
        fair = max(RANK_BYTES, budget // (len(talkative) - count) - LINE_CHARACTERS)
        part = _log_of(rank, fair) if budget > RANK_BYTES + LINE_CHARACTERS else ""
        if not part or len(part) > budget:
            left_out.append(rank.rank)
            continue
        budget -= len(part)
        parts.append((rank.rank, part))
    if not parts:
        return ""
    path = summary.log_path(record)
    notes = [f"no room here for {summary.rank_list(left_out)}"] if left_out else []
    notes += [f"whole: {path}"] if path else []
    note = f"<small>{text('; '.join(notes))}</small>" if notes else ""
    return _details("Logs by rank", note + "".join(part for _, part in sorted(parts)))


def _log_of(rank: RankRecord, budget: int) -> str:
    shown: list[str] = []
    for line in reversed(lines.in_lines(rank.tail)):
        shown.append(_line(line, ""))
        budget -= len(shown[-1])
        if budget < 0:
            break
    whole = counted(rank.line_count, "line")
    note = f"the last of {whole}" if len(shown) < rank.line_count else whole
    return _details(f"rank {rank.rank}: {note}", _block(shown[::-1], -1))


def _code(record: RunRecord) -> str:
    code = record.code.rstrip().splitlines()[:CODE_LINES]
    if not code:
        return ""
    failed, width = summary.failed_line(record), len(str(len(code)))
    shown = []
    for at, line in enumerate(code, 1):
        said = text(line[:LINE_CHARACTERS])
        said = f"<mark>{said}</mark>" if at == failed else said
        shown.append(f"<span><b><small>{at:>{width}}</small></b>  {said}\n</span>")
    return _details("The cell", _block(shown, width - 1))


def _details(title: str, body: str) -> str:
    return f"<details><summary>{text(title)}</summary>{body}</details>" if body else ""
