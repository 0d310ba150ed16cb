"""Checkpoints: a picture of them in the order of time, a table, and which one a resume would take."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TextIO

from sparkring.checkpointing.entries import Entry
from sparkring.checkpointing.inventory import Inventory
from sparkring.record import Checkpoint, RunRecord
from sparkring.views.curves import nice_ticks
from sparkring.views.lines import plain
from sparkring.views.markup import AMBER, BLUE, GREEN, RED, STYLE, text
from sparkring.views.summary import counted, duration, first_line, number, rank_count, size
from sparkring.views.tables import bare_table, table_text

ROWS_SHOWN, ROWS_LISTED = 12, 200  # in a run's panel, and where somebody asks for them
OTHERS_LISTED = 50
SERIES_SHOWN = 3  # directories that one run saves to
MARKS, CROWD = 80, 40  # of a picture: the most, and from how many on they are smaller
METRICS_NAMED, NAME_CHARACTERS, REASON_CHARACTERS = 4, 40, 200
DAMAGED_NAMED = 3
QUIET_S, PROGRESS_EVERY_S = 2.0, 0.5  # of a check

State = Literal["committed", "partial", "damaged", "removed"]
_STATES: tuple[State, ...] = ("committed", "partial", "damaged", "removed")
_SAID: dict[State, str] = {
    "committed": "committed", "partial": "not committed", "damaged": "damaged", "removed": "removed",
}  # fmt: skip


class Mark(NamedTuple):
    """One checkpoint as it is shown; `time` is in Unix seconds, and 0 or None is what is not known.

    `origin` is who saved it, in words; marks with another `stretch` were saved in another attempt or run. `resumes`
    is the one that a resume takes.
    """

    step: int
    state: State
    time: float = 0.0
    size_bytes: int | None = None
    metrics: Mapping[str, float] = {}
    origin: tuple[str, ...] = ()
    stretch: str = ""
    reason: str = ""
    best: bool = False
    resumes: bool = False


class Series(NamedTuple):
    """The checkpoints of one directory, oldest first; `noun` is what they count, `headers` what `origin` is."""

    folder: str
    marks: tuple[Mark, ...]
    headers: tuple[str, ...] = ()
    noun: str = "step"
    kind: str = ""  # who writes there, if it is not us
    metric: str = ""  # the one to draw; '' for one that is there


# ── From a record, and from a directory ───────────────────────────────────────


def recorded(record: RunRecord) -> list[Series]:
    """The checkpoints that a run has saved or gone back to, by directory and by who wrote them."""
    by_place: dict[tuple[str, str], list[Checkpoint]] = {}
    for each in record.checkpoints:
        by_place.setdefault((each.saved.folder, each.saved.kind), []).append(each)
    return [_recorded(folder, kind, found, record) for (folder, kind), found in by_place.items()]


def _recorded(folder: str, kind: str, found: Sequence[Checkpoint], record: RunRecord) -> Series:
    newest = max((at for at, each in enumerate(found) if each.state == "committed"), default=-1)
    several = len(record.attempts) > 1
    marks = tuple(
        Mark(
            each.saved.step,
            each.state,
            each.saved.time if each.attempt else 0.0,  # else when the damage was found, by another run
            each.saved.size_bytes or None,
            each.saved.metrics,
            (str(each.saved.rank), *([str(each.attempt) if each.attempt else "earlier run"] if several else [])),
            f"attempt {each.attempt}" if several and each.attempt else "",
            each.reason,
            each.saved.best,
            at == newest and kind == "sparkring",
        )
        for at, each in enumerate(found)
    )
    writer = {"keras": "ModelCheckpoint", "tensorflow": "BackupAndRestore", "torch": "torch"}.get(kind, "")
    headers = ("rank", "attempt") if several else ("rank",)
    return Series(folder, marks, headers, "epoch" if kind == "tensorflow" else "step", writer)


def listed(found: Inventory) -> Series:
    """The checkpoints of ours that lie in a directory."""
    best, newest = found.best, found.newest
    marks = tuple(
        _listed(entry, best=entry is best, resumes=entry is newest)
        for entry in sorted(found.entries, key=lambda entry: entry.parsed.age)
    )
    return Series(found.directory, marks, ("run", "ranks"), metric=found.metric)


def _listed(entry: Entry, *, best: bool, resumes: bool) -> Mark:
    state: State = "damaged" if entry.state == "corrupt" else entry.state
    commit, stretch = entry.commit, str(entry.parsed.stamp)
    if commit is None:
        return Mark(entry.step, state, origin=("", ""), stretch=stretch, reason=entry.reason)
    ranks = f"{commit.size:,}, sharded" if commit.sharded else f"{commit.size:,}"
    return Mark(
        entry.step, state, commit.time, commit.size_bytes, commit.metrics, (commit.run_id, ranks), stretch,
        entry.reason, best, resumes,
    )  # fmt: skip


# ── Words ─────────────────────────────────────────────────────────────────────


def age(seconds: float) -> str:
    """How long ago: `12 s ago`, `3 min ago`, `5 h ago`, `12 days ago`."""
    if seconds < 60:
        return f"{max(0, int(seconds))} s ago"
    if seconds < 3600:
        return f"{int(seconds / 60)} min ago"
    if seconds < 48 * 3600:
        return f"{int(seconds / 3600)} h ago"
    return f"{int(seconds / 86400):,} days ago"


def saved_words(record: RunRecord, series: Series, now: float) -> str:
    """What was saved last, and how many there are: `saved step 120 3 s ago · 4.20 MB in 0.2 s · 12 saved, 3 kept`."""
    found = [each.saved for each in record.checkpoints if each.saved.folder == series.folder and each.attempt]
    if not found:
        return f"{_count_words(series)} · {first_line(series.folder, 200)}"
    last = max(found, key=lambda each: each.time)
    took = f"{size(last.size_bytes)} in {duration(float(last.took_s))}" if last.took_s else size(last.size_bytes)
    if last.blocked_s and last.took_s:
        took += f", of which training waited {duration(float(last.blocked_s))}"
    words = [f"saved {series.noun} {last.step:,} {age(now - last.time)}", took if last.size_bytes else ""]
    words += [f"{first_line(name, NAME_CHARACTERS)} {number(value)}" for name, value in list(last.metrics.items())[:2]]
    words += [_count_words(series), f"{series.kind} in" * bool(series.kind) + f" {first_line(series.folder, 200)}"]
    return " · ".join(word.strip() for word in words if word.strip())


def _count_words(series: Series) -> str:
    counts = {state: sum(mark.state == state for mark in series.marks) for state in _STATES}
    words = [f"{len(series.marks) - counts['partial']:,} saved", f"{counts['committed']:,} there"]
    words += [f"{counts['damaged']:,} damaged"] if counts["damaged"] else []
    return ", ".join(words)


def damage_words(series: Series) -> str:
    """Which of them are damaged, and why; '' if none is."""
    damaged = [mark for mark in series.marks if mark.state == "damaged"]
    if not damaged:
        return ""
    named = [
        f"{series.noun} {mark.step:,}" + (f" ({first_line(mark.reason, REASON_CHARACTERS)})" if mark.reason else "")
        for mark in damaged[-DAMAGED_NAMED:]
    ]
    more = f" and {len(damaged) - DAMAGED_NAMED} more" if len(damaged) > DAMAGED_NAMED else ""
    verb, them = ("is", "it") if len(damaged) == 1 else ("are", "them")
    return (
        f"{counted(len(damaged), 'checkpoint')} {verb} damaged: {'; '.join(named)}{more}. A resume passes over {them}."
    )


def folder_words(found: Inventory) -> list[str]:
    """What is there, how much it takes, and what a resume takes, a sentence each."""
    committed = [entry for entry in found.entries if entry.state == "committed"]
    known = sum(entry.commit.size_bytes for entry in found.entries if entry.commit is not None)
    counts = [counted(len(committed), "checkpoint")]
    counts += [f"{len(part):,} {said}" for said, part in _unwhole(found).items() if part]
    told = [f"{', '.join(counts)}: {size(known)}{' on disk' if committed else ''}"]
    if found.checked and committed:
        told[0] += f"; all {size(sum(e.commit.size_bytes for e in committed if e.commit))} were read and are as saved"
    told[0] += "."
    newest = found.newest
    if newest is not None and newest.commit is not None:
        commit = newest.commit
        run = f" by run {first_line(commit.run_id, 80)}" if commit.run_id else ""
        told.append(
            f"A resume takes step {newest.step:,}, saved {age(found.time - commit.time)}{run} on "
            f"{rank_count(commit.size)}."
        )
    best = found.best
    if best is not None and best.commit is not None:
        value = number(best.commit.metrics[found.metric])
        told.append(f"The best by {found.metric} ({found.mode}) is step {best.step:,}: {value}.")
    return told


def _unwhole(found: Inventory) -> dict[str, list[Entry]]:
    return {
        "damaged": [entry for entry in found.entries if entry.state == "corrupt"],
        "not committed": [entry for entry in found.entries if entry.state == "partial"],
    }


def advice(found: Inventory) -> list[str]:
    """What stands out and what to do about it, the gravest first."""
    told = []
    if found.entries and found.newest is None:
        told.append("No checkpoint here is whole: a resume begins at the beginning.")
    told += [words] if (words := damage_words(listed(found))) else []
    partial = _unwhole(found)["not committed"]
    newest = found.newest
    going_on = [entry for entry in partial if newest is None or entry.parsed.age > newest.parsed.age]
    left = [entry for entry in partial if entry not in going_on]
    if going_on:
        told.append(
            f"{_steps(going_on)} {'has' if len(going_on) == 1 else 'have'} no commit: being written now, or left by a "
            "run that ended while it saved. A resume passes over what has no commit."
        )
    if left:
        told.append(
            f"{_steps(left)} {'was' if len(left) == 1 else 'were'} begun and never committed, and newer ones are "
            "there: the next save of a training in this directory removes such folders, or you can."
        )
    if found.metric and found.best is None and newest is not None:
        there = sorted({name for entry in found.entries if entry.commit for name in entry.commit.metrics})
        have = f"there {'are' if len(there) > 1 else 'is'} {_named(there)}" if there else "none was saved with metrics"
        told.append(f"No checkpoint has a value of {first_line(found.metric, NAME_CHARACTERS)}: {have}.")
    lineages = {entry.commit.lineage for entry in found.entries if entry.state == "committed" and entry.commit}
    if len(lineages) > 1:
        told.append(
            f"{counted(len(lineages), 'training')} saved here, each from its own beginning; a directory for each "
            "keeps them apart."
        )
    return told


def _steps(entries: Sequence[Entry]) -> str:
    steps = sorted({entry.step for entry in entries})
    shown = ", ".join(f"{step:,}" for step in steps[-DAMAGED_NAMED:])
    more = f"{len(steps) - DAMAGED_NAMED} more and " if len(steps) > DAMAGED_NAMED else ""
    return f"{'Step' if len(steps) == 1 else 'Steps'} {more}{shown}"


def _named(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(first_line(name, NAME_CHARACTERS) for name in names[:most]) + more


def empty_words(found: Inventory) -> str:
    """A sentence on a directory in which nothing is; '' if there is something."""
    if found.entries or found.others:
        return ""
    where = first_line(found.directory, 300)
    if not found.exists:
        return f"{where}: there is no such folder, so nothing has been saved there."
    return f"{where}: no checkpoints are there, ours or others'."


# ── The table ─────────────────────────────────────────────────────────────────


def table_rows(series: Series, now: float, most: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers, and a row for each of the `most` newest, the newest first."""
    names = _metric_names(series)
    headers = (series.noun, "saved", "size", *(first_line(n, NAME_CHARACTERS) for n in names), *series.headers, "state")
    rows = []
    for mark in reversed(series.marks[-most:]):
        measured = [number(mark.metrics[name]) if name in mark.metrics else "" for name in names]
        saved = age(now - mark.time) if mark.time else ""
        rows.append((f"{mark.step:,}", saved, size(mark.size_bytes), *measured, *mark.origin, state_words(mark)))
    return headers, rows


def state_words(mark: Mark) -> str:
    """`committed, best; a resume takes it`, `damaged: rank-0.safetensors is cut`."""
    words = _SAID[mark.state] + (", best" if mark.best and mark.state == "committed" else "")
    words += "; a resume takes it" if mark.resumes else ""
    return f"{words}: {first_line(mark.reason, REASON_CHARACTERS)}" if mark.reason else words


def _metric_names(series: Series) -> list[str]:
    found: dict[str, None] = {series.metric: None} if series.metric else {}
    for mark in reversed(series.marks):
        found |= dict.fromkeys(mark.metrics)
    return [name for name in found if any(name in mark.metrics for mark in series.marks)][:METRICS_NAMED]


def table_html(series: Series, now: float, most: int) -> str:
    """The table; of many checkpoints it says how many it shows."""
    many = len(series.marks)
    note = f"the newest {most} of {counted(many, 'checkpoint')}" if many > most else ""
    return bare_table(*table_rows(series, now, most), note)


OTHERS_HEADERS = ("written by others", "kind", "saved", "size", "")


def others_rows(found: Inventory) -> list[tuple[str, ...]]:
    """A row of OTHERS_HEADERS for each checkpoint of somebody else's."""
    return [
        (each.name, each.kind, age(found.time - each.time) if each.time else "", size(each.size_bytes), each.note)
        for each in found.others[:OTHERS_LISTED]
    ]


def _others_note(found: Inventory) -> str:
    many = len(found.others)
    first = f"the newest {OTHERS_LISTED} of {many:,}; " if many > OTHERS_LISTED else ""
    return f"{first}known by their names only: whether they are whole is not known"


# ── The whole, for %checkpoints ───────────────────────────────────────────────


def show_checkpoints(found: Inventory) -> None:
    """Show what lies in a directory of checkpoints: HTML in a notebook, else text; one sentence if nothing does."""
    from sparkring.views import in_notebook

    shown = checkpoints_text(found)
    if empty_words(found) or not in_notebook():
        sys.stdout.write(shown + "\n")
        return
    from IPython.display import display

    display({"text/html": checkpoints_html(found), "text/plain": shown}, raw=True)  # type: ignore[no-untyped-call]


def checkpoints_html(found: Inventory) -> str:
    """The picture, the table, what a resume takes and the advice as one block of HTML."""
    series = listed(found)
    parts = [f'<div class="sr-head"><span class="sr-title">{text(first_line(found.directory, 200))}</span></div>']
    if found.entries:
        parts += [f"<div>{text(line)}</div>" for line in folder_words(found)]
        parts += [picture(series, found.time), table_html(series, found.time, ROWS_LISTED)]
    if found.others:
        parts.append(bare_table(OTHERS_HEADERS, others_rows(found), _others_note(found)))
    told = "".join(f"<li>{text(line)}</li>" for line in advice(found))
    parts.append(f'<ul class="sr-advice">{told}</ul>' if told else "")
    return f'<div class="sr-run">{STYLE}{"".join(parts)}</div>'


def checkpoints_text(found: Inventory) -> str:
    """The same for a terminal."""
    if empty := empty_words(found):
        return empty
    parts = [first_line(found.directory, 200)]
    if found.entries:
        parts.append("\n".join(map(plain, folder_words(found))))
        parts.append(table_text(*table_rows(listed(found), found.time, ROWS_LISTED)))
    if found.others:
        parts.append(f"{table_text(OTHERS_HEADERS, others_rows(found))}\n({_others_note(found)})")
    parts.append("\n".join(f"→ {plain(line)}" for line in advice(found)))
    return "\n\n".join(part for part in parts if part)


class CheckProgress:
    """How far a check of many bytes is, in a line that is rewritten and goes away; of a quick one nothing is said."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._due = clock() + QUIET_S
        self._width = 0

    def __enter__(self) -> CheckProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._write("")

    def tell(self, done: int, of: int, done_bytes: int, of_bytes: int) -> None:
        """Say that so many checkpoints, and so many bytes, have been read of all."""
        if self._clock() >= self._due:
            self._due = self._clock() + PROGRESS_EVERY_S
            self._write(f"checked {done:,} of {counted(of, 'checkpoint')}, {size(done_bytes)} of {size(of_bytes)}")

    def _write(self, said: str) -> None:
        self._stream.write(f"\r{said.ljust(self._width)}" + "\r" * (not said))
        self._stream.flush()
        self._width = len(said)


# ── The picture ───────────────────────────────────────────────────────────────

WIDTH, _LEFT, _RIGHT, _TOP = 720, 46, 62, 34
_CURVE, _FLAT = 66, 14  # how tall what the marks stand on is, with a metric and without
_PITCH = 46  # at most, between two marks
_CHARACTER = 6.2  # of a label, in pixels
_APART = 6  # at least, between two attempts
_REMOVED_PART = 0.35  # of the width, at most, for checkpoints that are no more


def picture(series: Series, now: float) -> str:
    """The checkpoints in the order in which they were saved, oldest left; with a metric, as high as its value."""
    if not series.marks:
        return ""
    metric = series.metric if any(series.metric in mark.metrics for mark in series.marks) else _metric_to_draw(series)
    tall = _CURVE if metric else _FLAT
    shown = chosen(series.marks, MARKS)
    xs = positions(series.marks)
    values = [mark.metrics[metric] for mark in series.marks if math.isfinite(mark.metrics.get(metric, math.nan))]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)

    def y(mark: Mark) -> float:
        value = mark.metrics.get(metric, math.nan)
        if not math.isfinite(value):
            return _TOP + tall
        return _TOP + tall * (high - value) / (high - low) if high > low else _TOP + tall / 2

    places = {at: (xs[at], y(series.marks[at])) for at in shown}
    lines = _labels(series, places, now)
    base = _TOP + tall + 24
    whole = base + 13 + 4
    parts = [
        *_stretches(series, xs, _TOP + tall + 8),
        *(_axis(low, high, tall) if metric else _ground(xs, tall)),
        _curve([places[at] for at in shown if math.isfinite(series.marks[at].metrics.get(metric, math.nan))]),
        *(_shape(series, series.marks[at], *places[at], now, 0.75 if len(shown) > CROWD else 1) for at in shown),
        *_callouts(series, places),
        *(_label(x, base, line) for x, line in lines),
    ]
    svg = (
        f'<svg width="{WIDTH}" height="{whole}" viewBox="0 0 {WIDTH} {whole}" role="img" '
        f'aria-label="{text(_spoken(series))}" font-size="10.5" fill="currentColor">{"".join(parts)}</svg>'
    )
    return f'<figure class="sr-saved">{_caption(series, metric)}{svg}{_legend(series, len(shown))}</figure>'


def chosen(marks: Sequence[Mark], most: int) -> list[int]:
    """Which of many marks are drawn: the best and what a resume takes always, the rest evenly, what matters denser."""
    if len(marks) <= most:
        return list(range(len(marks)))
    found = {at for at, mark in enumerate(marks) if mark.best or mark.resumes} | {0, len(marks) - 1}
    groups = [
        [at for at, mark in enumerate(marks) if mark.state in states and at not in found]
        for states in (("damaged", "partial"), ("committed",), ("removed",))
    ]
    for at, group in enumerate(groups, 1):
        room = most - len(found)
        share = room * 2 // 3 if any(groups[at:]) else room
        found |= set(
            group
            if len(group) <= share
            else (group[(2 * part + 1) * len(group) // (2 * share)] for part in range(share))
        )
    return sorted(found)


def positions(marks: Sequence[Mark]) -> list[float]:
    """Where each mark stands, in pixels from the left; those of removed ones closer together where there are many."""
    gone = sum(mark.state == "removed" for mark in marks)
    left = len(marks) - gone
    narrow = min(0.5, _REMOVED_PART / (1 - _REMOVED_PART) * left / gone) if gone and left else 1.0
    widths = [narrow if mark.state == "removed" else 1.0 for mark in marks]
    # From the middle of one to the middle of the next.
    ways = [0.0]
    for one, other in itertools.pairwise(widths):
        ways.append(ways[-1] + (one + other) / 2)
    begin = _LEFT + 14
    scale = min(_PITCH, (WIDTH - _RIGHT - begin) / (ways[-1] or 1))
    return [round(begin + scale * way, 1) for way in ways]


def _metric_to_draw(series: Series) -> str:
    """The metric by which the best is the best, else the first that the newest checkpoint came with."""
    names = _metric_names(series)
    best = next((mark for mark in series.marks if mark.best), None)
    for name in names:
        values = [mark.metrics[name] for mark in series.marks if name in mark.metrics]
        if best is not None and len(values) > 1 and best.metrics.get(name) in (min(values), max(values)):
            return name
    return names[0] if names else ""


def _axis(low: float, high: float, tall: int) -> list[str]:
    parts = []
    for tick in nice_ticks(low, high, 3):
        y = _TOP + (tall * (high - tick) / (high - low) if high > low else tall / 2)
        if _TOP - 1 <= y <= _TOP + tall + 1:
            parts.append(
                f'<path d="M{_LEFT} {y:.1f}H{WIDTH - 8}" stroke="currentColor" stroke-opacity=".12"/>'
                f'<text x="{_LEFT - 6}" y="{y:.1f}" dy="3.5" text-anchor="end">{number(tick)}</text>'
            )
    return parts


def _ground(xs: Sequence[float], tall: int) -> list[str]:
    return [f'<path d="M{xs[0] - 12:.1f} {_TOP + tall}H{xs[-1] + 12:.1f}" stroke="currentColor" stroke-opacity=".2"/>']


def _curve(points: Sequence[tuple[float, float]]) -> str:
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-opacity=".45"/>'
    return drawn if len(points) > 1 else ""


def _stretches(series: Series, xs: Sequence[float], bottom: int) -> list[str]:
    """A line where another attempt or run begins, and its name where there is room."""
    begins = [at for at in range(len(xs)) if not at or series.marks[at].stretch != series.marks[at - 1].stretch]
    if len(begins) < 2:
        return []
    edges = [(xs[at] + xs[at - 1]) / 2 if at else _LEFT for at in begins] + [float(WIDTH)]
    drawn, free = "", 0.0
    for edge in edges[1:-1]:
        if edge >= free:  # of many attempts in a row, as many as can be told apart
            drawn, free = f"{drawn}M{edge:.1f} 3V{bottom}", edge + _APART
    parts = [f'<path d="{drawn}" stroke="currentColor" stroke-opacity=".35" stroke-dasharray="2 3"/>']
    free = 0.0
    for at, edge, end in zip(begins, edges, edges[1:], strict=False):
        name = _stretch_name(series, at)
        wide = _CHARACTER * len(name) + 8
        if name and edge + wide <= end and edge >= free:
            parts.append(f'<text x="{edge + 4:.1f}" y="10">{text(name)}</text>')
            free = edge + wide
    return parts


def _stretch_name(series: Series, at: int) -> str:
    """An attempt's words; a run is known by its end, which %logs takes, too."""
    mark = series.marks[at]
    if not mark.stretch.isdecimal():
        return mark.stretch
    run = next((each.origin[0] for each in series.marks[at:] if each.stretch == mark.stretch and each.origin[0]), "")
    before = next((each.origin[0] for each in reversed(series.marks[:at]) if each.origin[0]), "")
    if run and run == before:
        return "next attempt"
    return f"run …{first_line(run[-6:], 6)}" if run else ""


# ── Marks ─────────────────────────────────────────────────────────────────────

_STAR = "".join(
    f"{'L' if point else 'M'}{radius * math.sin(math.pi * point / 5):.1f} {-radius * math.cos(math.pi * point / 5):.1f}"
    for point in range(10)
    for radius in (3.0 if point % 2 else 7.0,)
) + "z"  # fmt: skip


def _circle(radius: float) -> str:
    return f"M{-radius:g} 0a{radius:g} {radius:g} 0 1 0 {2 * radius:g} 0a{radius:g} {radius:g} 0 1 0 {-2 * radius:g} 0z"


_RING = f'<path d="{_circle(9)}" fill="none" stroke="{BLUE}" stroke-width="1.6"/>'
_SHAPES: dict[str, str] = {
    "best": f'<path d="{_STAR}" fill="{GREEN}"/>',
    "committed": f'<path d="{_circle(4)}" fill="{BLUE}"/>',
    "partial": f'<path d="{_circle(4)}" fill="none" stroke="{AMBER}" stroke-width="1.6" stroke-dasharray="2.4 1.8"/>',
    "damaged": f'<path d="M-4 -4L4 4M4 -4L-4 4" stroke="{RED}" stroke-width="2.4"/>',
    "removed": '<path d="M0 -4V4" stroke="currentColor" stroke-opacity=".45" stroke-width="1.4"/>',
}


def _drawn(mark: Mark) -> str:
    kind = "best" if mark.best and mark.state == "committed" else mark.state
    return _SHAPES[kind] + (_RING if mark.resumes else "")


def _shape(series: Series, mark: Mark, x: float, y: float, now: float, scale: float) -> str:
    words = [f"{series.noun} {mark.step:,}", state_words(mark), size(mark.size_bytes)]
    words.insert(1, f"saved {age(now - mark.time)}" if mark.time else "")
    words += [f"{first_line(name, NAME_CHARACTERS)} {number(value)}" for name, value in list(mark.metrics.items())[:2]]
    told = " · ".join(word for word in words if word)
    placed = f"translate({x:.1f} {y:.1f})" + (f" scale({scale})" if scale != 1 else "")
    return f'<g transform="{placed}"><title>{text(told)}</title>{_drawn(mark)}</g>'


def _callouts(series: Series, places: Mapping[int, tuple[float, float]]) -> list[str]:
    """`best` and `resume`, each above its mark; side by side where the marks are neighbours."""
    named: dict[int, list[str]] = {at: [] for at in places}
    for at in places:
        mark = series.marks[at]
        named[at] += ["best"] * (mark.best and mark.state == "committed") + ["resume"] * mark.resumes
    told = [(places[at], ", ".join(words)) for at, words in named.items() if words]
    near = len(told) == 2 and abs(told[0][0][0] - told[1][0][0]) < 8 * _CHARACTER
    parts = []
    for which, ((x, y), words) in enumerate(told):
        anchor = ("end", "start")[which] if near else "middle"
        shift = (4 if which == 0 else -4) if near else 0
        if y - 10 > 25:
            parts.append(f'<path d="M{x:.1f} 26V{y - 10:.1f}" stroke="currentColor" stroke-opacity=".3"/>')
        parts.append(f'<text x="{x + shift:.1f}" y="22" text-anchor="{anchor}" font-weight="bold">{words}</text>')
    return parts


def _labels(
    series: Series, places: Mapping[int, tuple[float, float]], now: float
) -> list[tuple[float, tuple[str, str]]]:
    """Step and age below as many marks as there is room for, those first that matter most."""

    def weight(at: int) -> tuple[bool, ...]:
        mark = series.marks[at]
        return (not mark.resumes, not mark.best, at != max(places), at != min(places), mark.state == "removed")

    taken: list[tuple[float, float]] = []
    found = []
    for at in sorted(places, key=lambda at: (weight(at), at)):
        mark, x = series.marks[at], places[at][0]
        line = (f"{mark.step:,}", age(now - mark.time).removesuffix(" ago") if mark.time else "")
        half = _CHARACTER * max(map(len, line)) / 2 + 5
        if all(x + half <= begin or x - half >= end for begin, end in taken):
            taken.append((x - half, x + half))
            found.append((x, line))
    return sorted(found)


def _label(x: float, y: int, line: tuple[str, str]) -> str:
    step, old = line
    below = f'<text x="{x:.1f}" y="{y + 13}" text-anchor="middle" fill-opacity=".75">{text(old)}</text>' if old else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle" font-weight="bold">{text(step)}</text>{below}'


def _caption(series: Series, metric: str) -> str:
    if not metric:
        return ""
    newest = next((mark.metrics[metric] for mark in reversed(series.marks) if metric in mark.metrics), None)
    value = f" {number(newest)}" if newest is not None else ""
    name = text(first_line(metric, NAME_CHARACTERS))
    return f'<figcaption><b style="color:{BLUE}">{name}</b>{value}</figcaption>'


def _legend(series: Series, drawn: int) -> str:
    """What the shapes mean, of those that are there, and how many there are of each."""
    told = []
    if any(mark.best and mark.state == "committed" for mark in series.marks):
        told.append((_SHAPES["best"], "best"))
    for state in _STATES:
        count = sum(mark.state == state for mark in series.marks)
        told += [(_SHAPES[state], f"{count:,} {_SAID[state]}")] if count else []
    if any(mark.resumes for mark in series.marks):
        told.append((_SHAPES["committed"] + _RING, "a resume takes it"))
    keys = "".join(
        f'<span><svg width="22" height="20" viewBox="-11 -10 22 20" fill="currentColor">{shape}</svg>{said}</span> '
        for shape, said in told
    )
    many = len(series.marks)
    note = f"<span>{drawn} of {many:,} are drawn</span>" if drawn < many else ""
    return f'<div class="sr-legend">{keys}{note}</div>'


def _spoken(series: Series) -> str:
    resumed = next((f"; a resume takes step {mark.step:,}" for mark in series.marks if mark.resumes), "")
    return f"{counted(len(series.marks), 'checkpoint')} in the order in which they were saved{resumed}"


# ── In a run's panel ──────────────────────────────────────────────────────────


def saved_html(record: RunRecord, series: Series, now: float, final: bool) -> str:
    """A line on what was saved, the picture, and of a run that is over the table, folded."""
    damage = damage_words(series)
    wrong = f'<div><b style="color:{AMBER}">⚠ {text(damage)}</b></div>' if damage else ""
    table = ""
    if final:
        title = counted(len(series.marks), "checkpoint").capitalize()
        shown = table_html(series, now, ROWS_SHOWN)
        table = f"<details><summary>{title}</summary>{shown}</details>"
    return f"<div><small>{text(saved_words(record, series, now))}</small></div>{picture(series, now)}{wrong}{table}"


def shown_series(record: RunRecord) -> list[Series]:
    """Those of recorded() that a panel has room for, the ones that were saved to last."""

    def last(series: Series) -> float:
        return max(mark.time for mark in series.marks)

    return sorted(recorded(record), key=last)[-SERIES_SHOWN:]


def progress_words(record: RunRecord) -> str:
    """`saved step 120`; '' before anything was."""
    found = [each.saved for each in record.checkpoints if each.attempt]
    return f"saved {_noun(found[-1].kind)} {found[-1].step:,}" if found else ""


def news(before: Iterable[Checkpoint], record: RunRecord) -> list[str]:
    """A line for each checkpoint that has been found damaged since they were `before`."""
    known = {(each.saved.folder, each.saved.name) for each in before if each.state == "damaged"}
    return [
        f"the checkpoint of step {each.saved.step:,} in {first_line(each.saved.folder, 200)} is damaged and passed over"
        + (f": {first_line(each.reason, REASON_CHARACTERS)}" if each.reason else "")
        for each in record.checkpoints
        if each.state == "damaged" and (each.saved.folder, each.saved.name) not in known
    ]


def _noun(kind: str) -> str:
    return "epoch" if kind == "tensorflow" else "step"
