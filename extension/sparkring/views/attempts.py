"""Describes each attempt of a run in one line: from which step the attempt continued, and what ended it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sparkring.history import describe, progress
from sparkring.history.describe import continued, counted, dotted, duration, first_line, step_noun, without_traceback
from sparkring.history.lines import is_noise
from sparkring.history.record import Attempt, LogLine, RunRecord

REASON_CHARACTERS = 300

State = Literal["ended", "running", "finished", "failed", "cut"]


class Chapter(NamedTuple):
    """One attempt in words.

    `state` says whether the attempt is running, or how it ended: "ended" means that another attempt followed, or
    would have followed, and "cut" means that the run was interrupted or timed out. `last_lines` are from the rank that
    failed.
    """

    state: State
    line: str
    failed_rank: int | None = None
    last_lines: tuple[LogLine, ...] = ()


def story(record: RunRecord) -> list[Chapter]:
    """Return the attempts in order; [] if the run was never restarted and did not continue from a checkpoint."""
    attempts = record.attempts
    if len(attempts) < 2 and not any(attempt.ended or attempt.checkpoint for attempt in attempts):
        return []
    return [_chapter(record, at) for at in range(len(attempts))]


def why(attempt: Attempt) -> str:
    """Say what ended an attempt: `rank 1 on vm was killed by SIGKILL`."""
    if attempt.failed_rank is None or attempt.failure is None:
        return first_line(attempt.reason, REASON_CHARACTERS)
    where = f" on {first_line(attempt.host, 80)}" if attempt.host else ""
    summary = first_line(attempt.failure.summary, REASON_CHARACTERS)
    if attempt.failure.cause in ("signal", "lost"):
        summary = f"was {summary}"
    elif attempt.failure.cause != "exit":
        summary = f"failed: {summary}"
    return f"rank {attempt.failed_rank}{where} {summary}"


def saved_before(record: RunRecord, attempt: Attempt) -> str:
    """Say what an attempt saved last: `step 120 was saved 3 s earlier`. Return '' without a checkpoint directory."""
    if not record.checkpoint_dir:
        return ""
    saved = [checkpoint.saved for checkpoint in record.checkpoints if checkpoint.attempt == attempt.number]
    last = max((saving for saving in saved if saving.kind == "sparkring"), key=lambda saving: saving.time, default=None)
    if last is not None:
        return f"{step_noun(record)} {last.step:,} was saved {duration(max(0.0, attempt.ended - last.time))} earlier"
    return f"checkpoints() saved {'nothing new' if attempt.checkpoint else 'nothing'}"


def news(before: tuple[Attempt, ...], record: RunRecord) -> list[str]:
    """Return a line for each attempt that has started or ended since the run had the attempts `before`."""
    lines = []
    for at, attempt in enumerate(record.attempts):
        known = before[at] if at < len(before) else None
        if known is None and (at or attempt.checkpoint):
            goes_on = f"continues {continued(record, attempt.step)}" if attempt.checkpoint else "runs the cell again"
            lines.append(f"attempt {attempt.number} {goes_on} on {_ranks(record, at)}")
        if attempt.ended and (known is None or not known.ended):
            took = duration(attempt.ended - attempt.started)
            lines.append(f"attempt {attempt.number} ended after {took}: {_reason(record, attempt)}")
    return lines


def notices(record: RunRecord, most: int) -> list[str]:
    """Return the run's last notices, at most `most`, and before them what ended the attempt before the last restart."""
    restart = restarted(record)
    return [*([restart] if restart else []), *describe.notices(record, most)]


def restarted(record: RunRecord) -> str:
    """Say what ended the attempt before the last restart, and where the run continued; '' without a restart."""
    if len(record.attempts) < 2:
        return ""
    before, attempt = record.attempts[-2:]
    words = [f"attempt {before.number} ended: {why(before)}"]
    if attempt.checkpoint:
        goes_on = "continued" if attempt.restored else "continues"
        lost = progress.steps_lost(record)
        lost_words = "" if lost is None else f", {counted(lost, step_noun(record))} lost"
        words.append(f"{goes_on} {continued(record, attempt.step)}{lost_words}")
    return "; ".join(words)


def _chapter(record: RunRecord, at: int) -> Chapter:
    attempt, before = record.attempts[at], record.attempts[at - 1] if at else None
    words = [f"attempt {attempt.number}", _ranks(record, at), _went_on(record, attempt, before)]
    if attempt.ended:
        words += [duration(attempt.ended - attempt.started), f"ended: {_reason(record, attempt)}"]
        state: State = "ended"
    elif record.outcome is None or at + 1 < len(record.attempts):
        words.append("running" if record.running_since else "starting")
        state = "running"
    else:
        took = duration(max(0.0, record.ended - attempt.started))
        words.append(f"{record.outcome} after {took}")
        state = record.outcome if record.outcome in ("finished", "failed") else "cut"
    return Chapter(state, dotted(*words), attempt.failed_rank, _last_lines(attempt))


def _ranks(record: RunRecord, at: int) -> str:
    now, before = record.attempts[at].size, record.attempts[max(0, at - 1)].size
    return counted(now, "rank") + (f" instead of {before:,}" if before != now else "")


def _went_on(record: RunRecord, attempt: Attempt, before: Attempt | None) -> str:
    where = continued(record, attempt.step)
    if attempt.restored:
        paused = f" after {duration(max(0.0, attempt.restored - before.ended))}" if before and before.ended else ""
        return f"continued {where}{paused}"
    if attempt.checkpoint:
        running = record.outcome is None and not attempt.ended
        return f"continues {where}" if running else f"was to continue {where}"
    # The cell may load a checkpoint that it has saved itself, so it need not train from the beginning.
    return "ran the cell again" if before is not None else ""


def _reason(record: RunRecord, attempt: Attempt) -> str:
    kept = saved_before(record, attempt)
    return why(attempt) + (f" ({kept})" if kept else "")


def _last_lines(attempt: Attempt) -> tuple[LogLine, ...]:
    lines = attempt.last_lines
    if attempt.failure is not None:
        lines = tuple(without_traceback(lines, attempt.failure))
    return tuple(line for line in lines if line.text.strip() and not is_noise(line))
