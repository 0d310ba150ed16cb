"""Shows checkpoints as a picture, as a table and in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparkring.checkpointing.entries import Entry
from sparkring.checkpointing.inventory import Inventory
from sparkring.history.describe import ago, counted, dotted, duration, first_line, named, number, size, step_noun
from sparkring.history.lines import plain
from sparkring.history.record import Checkpoint, RunRecord
from sparkring.runtime.kernel import write
from sparkring.views.checkpoint_line import (
    NAME_CHARACTERS,
    REASON_CHARACTERS,
    STATES,
    CheckpointMark,
    Series,
    State,
    metric_names,
    picture,
    state_words,
    when,
)
from sparkring.views.markup import advised, enclosed, text
from sparkring.views.progress_line import ProgressLine
from sparkring.views.tables import bare_table, show, table_text

ROWS_LISTED = 200
OTHERS_LISTED = 50
DAMAGED_NAMED = 3
METRICS_LISTED = 8

_WRITERS = {"keras": "ModelCheckpoint", "tensorflow": "BackupAndRestore", "torch": "torch"}


# ── Series from a record or a directory ───────────────────────────────────────


def recorded(record: RunRecord) -> list[Series]:
    """Return a series for each directory and writer, with the checkpoints that the run has saved or found damaged."""
    by_place: dict[tuple[str, str], list[Checkpoint]] = {}
    for checkpoint in record.checkpoints:
        by_place.setdefault((checkpoint.saved.folder, checkpoint.saved.kind), []).append(checkpoint)
    return [_recorded(folder, kind, checkpoints, record) for (folder, kind), checkpoints in by_place.items()]


def _recorded(folder: str, kind: str, checkpoints: Sequence[Checkpoint], record: RunRecord) -> Series:
    good = (at for at, one in enumerate(checkpoints) if one.state == "committed" and not one.saved.not_finite)
    newest = max(good, default=-1)

    def mark(at: int, checkpoint: Checkpoint) -> CheckpointMark:
        saved = checkpoint.saved
        state, reason = _marked(checkpoint.state, saved.not_finite, checkpoint.reason)
        attempt = f"attempt {checkpoint.attempt}" if len(record.attempts) > 1 and checkpoint.attempt else ""
        origin = f"rank {saved.rank} in {attempt}" if attempt else f"rank {saved.rank}"
        time, is_newest = saved.time, at == newest and kind == "sparkring"
        if _earlier(checkpoint):  # the time is not known: `saved.time` is the time at which this run found the damage
            origin, time = "an earlier run", 0.0
        return CheckpointMark(
            saved.step, state, time, saved.size_bytes or None, saved.metrics, (origin,), attempt, reason, saved.best,
            is_newest,
        )  # fmt: skip

    marks = tuple(mark(at, checkpoint) for at, checkpoint in enumerate(checkpoints))
    began = record.started if record.ended else 0.0
    return Series(folder, marks, ("saved by",), _noun(kind, record), _WRITERS.get(kind, ""), began=began)


def _marked(state: State, not_finite: str, reason: str) -> tuple[State, str]:
    """Return the state to show, and its reason, for a checkpoint that may have NaN or infinity."""
    return ("not finite", not_finite) if state == "committed" and not_finite else (state, reason)


def _earlier(checkpoint: Checkpoint) -> bool:
    """Return whether an earlier run saved the checkpoint. If so, this run found it damaged, without its size."""
    return not checkpoint.attempt and not checkpoint.saved.size_bytes


def listed(inventory: Inventory) -> Series:
    """Return the series of the checkpoints that sparkring wrote to a directory."""
    best, newest = inventory.best, inventory.newest
    by_age = sorted(inventory.entries, key=lambda entry: entry.parsed.age)
    marks = tuple(_listed(entry, best=entry is best, resumes=entry is newest) for entry in by_age)
    return Series(inventory.directory, marks, ("run", "ranks"), metric=inventory.metric)


def _listed(entry: Entry, *, best: bool, resumes: bool) -> CheckpointMark:
    state, reason = _marked("damaged" if entry.state == "corrupt" else entry.state, entry.not_finite, entry.reason)
    commit, stretch = entry.commit, str(entry.parsed.stamp)
    if commit is None:
        return CheckpointMark(entry.step, state, origin=("", ""), stretch=stretch, reason=entry.reason)
    ranks = f"{commit.size:,}, sharded" if commit.sharded else f"{commit.size:,}"
    return CheckpointMark(
        entry.step, state, commit.time, commit.size_bytes, commit.metrics, (commit.run_id, ranks), stretch,
        reason, best, resumes,
    )  # fmt: skip


# ── Words ─────────────────────────────────────────────────────────────────────


def saved_words(record: RunRecord, series: Series, now: float) -> str:
    """Say what was saved last, and count checkpoints: `saved step 120, 3 s ago · … · 12 saved, 3 still there · …`."""
    own = [checkpoint.saved for checkpoint in record.checkpoints if not _earlier(checkpoint)]
    here = [saving for saving in own if (saving.folder, _WRITERS.get(saving.kind, "")) == (series.folder, series.kind)]
    if not here:
        return f"{_count_words(series)} · {first_line(series.folder, 200)}"
    last = max(here, key=lambda saving: saving.time)
    took = f"{size(last.size_bytes)} in {duration(float(last.took_s))}" if last.took_s else size(last.size_bytes)
    if last.blocked_s and last.took_s:
        took += f" (training waited {duration(float(last.blocked_s))})"
    before_end = f"{duration(max(0.0, record.ended - last.time))} before the end"
    saved = f"saved {series.noun} {last.step:,}, {before_end if record.ended else ago(now - last.time)}"
    values = [f"{first_line(name, NAME_CHARACTERS)} {number(value)}" for name, value in list(last.metrics.items())[:2]]
    place = (f"{series.kind} in " if series.kind else "") + first_line(series.folder, 200)
    return dotted(saved, took if last.size_bytes else "", *values, _count_words(series), place)


def _count_words(series: Series) -> str:
    counts = {state: sum(mark.state == state for mark in series.marks) for state in STATES}
    words = [
        f"{len(series.marks) - counts['partial']:,} saved",
        f"{counts['committed'] + counts['not finite']:,} still there",
    ]
    words += [f"{counts['not finite']:,} with NaN or infinity"] if counts["not finite"] else []
    words += [f"{counts['damaged']:,} damaged"] if counts["damaged"] else []
    return ", ".join(words)


def damage_words(series: Series) -> str:
    """Say which checkpoints are damaged, and why; return '' if no checkpoint is damaged."""
    damaged = [mark for mark in series.marks if mark.state == "damaged"]
    if not damaged:
        return ""
    last = [(f"{series.noun} {mark.step:,}", first_line(mark.reason, REASON_CHARACTERS)) for mark in damaged]
    named = [f"{step} ({reason})" if reason else step for step, reason in last[-DAMAGED_NAMED:]]
    more = f" and {len(damaged) - DAMAGED_NAMED} more" if len(damaged) > DAMAGED_NAMED else ""
    verb, them = ("is", "it") if len(damaged) == 1 else ("are", "them")
    sentence = f"{counted(len(damaged), 'checkpoint')} {verb} damaged: {'; '.join(named)}{more}."
    return f"{sentence} A resumed run skips {them}."


def folder_words(inventory: Inventory) -> list[str]:
    """Return sentences about the number and size of the checkpoints, the resume point, and the best checkpoint."""
    committed, damaged, partial = (_in_state(inventory, state) for state in ("committed", "corrupt", "partial"))
    counts = [counted(len(committed), "checkpoint")]
    counts += [f"{len(part):,} {word}" for part, word in ((damaged, "damaged"), (partial, "not committed")) if part]
    whole = f"{', '.join(counts)}: {_size(inventory.entries)}{' on disk' if committed else ''}"
    checked = inventory.checked and committed
    sentences = [whole + (f"; all {_size(committed)} were read and match their digests." if checked else ".")]
    newest, best = inventory.newest, inventory.best
    if newest is not None and newest.commit is not None:
        commit = newest.commit
        run = f" by run {first_line(commit.run_id, 80)}" if commit.run_id else ""
        when_saved, where = ago(inventory.time - commit.time), counted(commit.size, "rank")
        sentences.append(f"The resume point is step {newest.step:,}, saved {when_saved}{run} on {where}.")
    if inventory.keys is not None:
        by, count = inventory.keys
        sentences.append(f"It has a state for each of {counted(count, 'key')} ({named(by, METRICS_LISTED)}).")
    if best is not None and best.commit is not None:
        value = number(best.commit.metrics[inventory.metric])
        sentences.append(f"The best by {inventory.metric} ({inventory.mode}) is step {best.step:,}: {value}.")
    return sentences


def _in_state(inventory: Inventory, state: str) -> list[Entry]:
    return [entry for entry in inventory.entries if entry.state == state]


def _size(entries: Iterable[Entry]) -> str:
    return size(sum(entry.commit.size_bytes for entry in entries if entry.commit is not None))


def advice(inventory: Inventory) -> list[str]:
    """Return sentences about problems and what to do about them, the most serious first."""
    sentences, committed = [], _in_state(inventory, "committed")
    if inventory.entries and inventory.newest is None:
        which = "has only finite weights" if committed else "is complete"
        sentences.append(f"No checkpoint here {which}, so a run starts from the beginning.")
    sentences += [words] if (words := damage_words(listed(inventory))) else []
    if odd := [entry for entry in committed if entry.not_finite]:
        sentences.append(
            f"{_steps(odd)} {'has' if len(odd) == 1 else 'have'} NaN or infinity, so no run continues from "
            f"{'it' if len(odd) == 1 else 'them'}; restore(state, {odd[0].step}) loads it all the same."
        )
    partial, newest = _in_state(inventory, "partial"), inventory.newest
    going_on = [entry for entry in partial if newest is None or entry.parsed.age > newest.parsed.age]
    left = [entry for entry in partial if entry not in going_on]
    if going_on:
        sentences.append(
            f"{_steps(going_on)} {'has' if len(going_on) == 1 else 'have'} no commit: a run is still saving, or "
            "ended while saving. A resumed run skips checkpoints without a commit."
        )
    if left:
        sentences.append(
            f"{_steps(left)} {'was' if len(left) == 1 else 'were'} never committed, and there are newer checkpoints. "
            "A later attempt removes uncommitted checkpoints after an hour, or you can remove them yourself."
        )
    if inventory.metric and inventory.best is None and newest is not None:
        there = sorted({name for entry in inventory.entries if entry.commit for name in entry.commit.metrics})
        have = f"the metrics are {named(there, METRICS_LISTED)}" if there else "none was saved with metrics"
        sentences.append(f"No checkpoint has a value of {first_line(inventory.metric, NAME_CHARACTERS)}: {have}.")
    lineages = {entry.commit.lineage for entry in inventory.entries if entry.state == "committed" and entry.commit}
    if len(lineages) > 1:
        sentences.append(
            f"{counted(len(lineages), 'training run')} have saved to this directory, and none continued another. Use "
            "a separate directory for each of them."
        )
    return sentences


def _steps(entries: Sequence[Entry]) -> str:
    steps = sorted({entry.step for entry in entries})
    shown = ", ".join(f"{step:,}" for step in steps[-DAMAGED_NAMED:])
    more = f"{len(steps) - DAMAGED_NAMED} more and " if len(steps) > DAMAGED_NAMED else ""
    return f"{'Step' if len(steps) == 1 else 'Steps'} {more}{shown}"


def empty_words(inventory: Inventory) -> str:
    """Return a sentence about an empty or missing directory; '' if there are checkpoints."""
    if inventory.entries or inventory.others:
        return ""
    return first_line(inventory.directory, 300) + (
        " has no checkpoints." if inventory.exists else ": this folder does not exist."
    )


# ── The table ─────────────────────────────────────────────────────────────────


def table_rows(series: Series, now: float, most: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headers, and a row for each of the last `most` checkpoints, newest first."""
    names = metric_names(series)
    headers = (series.noun, "saved", "size", *(first_line(n, NAME_CHARACTERS) for n in names), *series.headers, "state")
    rows = []
    for mark in reversed(series.marks[-most:]):
        measured = (number(mark.metrics[name]) if name in mark.metrics else "" for name in names)
        saved = f"{mark.step:,}", when(series, mark, now), size(mark.size_bytes)
        rows.append((*saved, *measured, *mark.origin, state_words(mark)))
    return headers, rows


def table_html(series: Series, now: float, most: int) -> str:
    """Return the table. If it does not show all checkpoints, its caption says how many it shows."""
    many = len(series.marks)
    note = f"the newest {most} of {counted(many, 'checkpoint')}" if many > most else ""
    return bare_table(*table_rows(series, now, most), note)


OTHERS_HEADERS = ("written by other tools", "kind", "saved", "size", "")


def others_rows(inventory: Inventory) -> list[tuple[str, ...]]:
    """Return a row for each checkpoint that another tool wrote; OTHERS_HEADERS has the titles of the columns."""
    others = inventory.others[:OTHERS_LISTED]
    ages = [ago(inventory.time - other.time) if other.time else "" for other in others]
    return [(one.name, one.kind, age, size(one.size_bytes), one.note) for one, age in zip(others, ages, strict=True)]


def _others_note(inventory: Inventory) -> str:
    many = len(inventory.others)
    first = f"the newest {OTHERS_LISTED} of {many:,}; " if many > OTHERS_LISTED else ""
    return f"{first}only their names are known; they may be incomplete"


# ── The output of %checkpoints ────────────────────────────────────────────────


def show_checkpoints(inventory: Inventory) -> None:
    """Show a directory of checkpoints: as HTML in a notebook, as text elsewhere. If it is empty, print a sentence."""
    if empty := empty_words(inventory):
        write(f"{empty}\n")
    else:
        show(checkpoints_text(inventory), lambda: checkpoints_html(inventory))


def checkpoints_html(inventory: Inventory) -> str:
    """Return the picture, the table, the resume point and the advice as one block of HTML."""
    series = listed(inventory)
    parts = [f'<div class="sr-head"><span class="sr-title">{text(first_line(inventory.directory, 200))}</span></div>']
    if inventory.entries:
        parts += [f"<div>{text(line)}</div>" for line in folder_words(inventory)]
        parts += [picture(series, inventory.time), table_html(series, inventory.time, ROWS_LISTED)]
    if inventory.others:
        parts.append(bare_table(OTHERS_HEADERS, others_rows(inventory), _others_note(inventory)))
    parts.append(advised(advice(inventory)))
    return enclosed("".join(parts))


def checkpoints_text(inventory: Inventory) -> str:
    """Return the table, the resume point and the advice as text for a terminal."""
    parts = [first_line(inventory.directory, 200)]
    if inventory.entries:
        parts.append("\n".join(map(plain, folder_words(inventory))))
        parts.append(table_text(*table_rows(listed(inventory), inventory.time, ROWS_LISTED)))
    if inventory.others:
        parts.append(f"{table_text(OTHERS_HEADERS, others_rows(inventory))}\n({_others_note(inventory)})")
    parts.append("\n".join(f"→ {plain(line)}" for line in advice(inventory)))
    return "\n\n".join(part for part in parts if part)


class CheckProgress(ProgressLine):
    """Shows the progress of a check of checkpoints."""

    def tell(self, done: int, of: int, done_bytes: int, of_bytes: int) -> None:
        """Show that `done` of `of` checkpoints and `done_bytes` of `of_bytes` bytes have been checked."""
        self.say(f"checked {done:,} of {counted(of, 'checkpoint')}, {size(done_bytes)} of {size(of_bytes)}")


# ── What a terminal shows for a run ──────────────────────────────────────────


def progress_words(record: RunRecord) -> str:
    """Say what was saved last: `saved step 120`; '' if nothing has been saved."""
    own = [checkpoint.saved for checkpoint in record.checkpoints if not _earlier(checkpoint)]
    return f"saved {_noun(own[-1].kind, record)} {own[-1].step:,}" if own else ""


def news(before: Iterable[Checkpoint], record: RunRecord) -> list[str]:
    """Return a line for each checkpoint that was found damaged since the run had the checkpoints `before`."""
    known = {checkpoint.place for checkpoint in before if checkpoint.state == "damaged"}
    return [
        f"the checkpoint of {_noun(checkpoint.saved.kind, record)} {checkpoint.saved.step:,} in "
        f"{first_line(checkpoint.saved.folder, 200)} is damaged and was skipped"
        + (f": {first_line(checkpoint.reason, REASON_CHARACTERS)}" if checkpoint.reason else "")
        for checkpoint in record.checkpoints
        if checkpoint.state == "damaged" and checkpoint.place not in known
    ]


def _noun(kind: str, record: RunRecord) -> str:
    return "epoch" if kind == "tensorflow" else step_noun(record)
