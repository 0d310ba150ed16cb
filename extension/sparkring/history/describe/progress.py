"""Describes the progress of a run, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sparkring.history import metrics
from sparkring.history.describe.item_runs import items, items_rate
from sparkring.history.describe.run import after_restarts, elapsed_s, ranks, states
from sparkring.history.describe.streams import step_noun, stream
from sparkring.history.describe.text import (
    METRICS_NAMED,
    change,
    counted,
    dotted,
    duration,
    first_line,
    number,
    percent,
    rank_list,
    rank_numbers,
)
from sparkring.history.last_run import compared
from sparkring.history.lines import folded, is_noise, plain, visible
from sparkring.history.progress import Lag, Progress
from sparkring.history.record import RunRecord

_SHORT_LINES, _SHORT_CHARACTERS = 10, 200


def took(record: RunRecord, now: float) -> str:
    """Say how long the run took, or has taken so far: `42 s after 1 restart`.

    If the run ended before its ranks were up, say so. After a run of items, the text includes the rate at which items
    ended: `42 s · 7.1 items/s`.
    """
    if not record.ended:
        return duration(int(elapsed_s(record, now)))
    never_up = record.items is None and not record.running_since and len(record.attempts) < 2
    when = ", before the ranks were up" if never_up else ""
    return dotted(duration(elapsed_s(record, now)) + when + after_restarts(record), items_rate(record, now))


def outcome(record: RunRecord) -> str:
    """Return the run's state or outcome in one line: `2 ranks finished`, `rank 1 failed: ValueError: bad shape`."""
    if record.items is not None and record.outcome in (None, "finished"):
        return items(record)
    if record.stream is not None and record.outcome in (None, "finished"):
        return stream(record)
    if record.outcome is None:
        if record.warm and not record.running_since:  # a stream begins on ranks that are up
            return f"starting on {ranks(record)}"
        if all(rank.state == "starting" for rank in record.taking_part):
            whole = counted(record.size, "rank")
            return f"{record.joined} of {whole} {'has' if record.size == 1 else 'have'} connected"
        return ", ".join(f"{count} {state}" for state, count in states(record).items())
    if record.outcome == "finished":
        return f"{ranks(record)} finished"
    if record.failed_rank is not None and record.failure is not None:
        return f"rank {record.failed_rank} failed: {first_line(record.failure.summary)}"
    if not record.message:
        return record.outcome
    return f"{record.outcome}: {first_line(record.message)}"


def closing(record: RunRecord, now: float) -> str:
    """Say in one line how a run ended, how long it took, which step was saved last, and what the last metrics were."""
    took = duration(elapsed_s(record, now) if record.ended else int(elapsed_s(record, now))) + after_restarts(record)
    if record.stream is not None:
        running_or_well = record.outcome in (None, "finished")
        words = [outcome(record), took, "" if running_or_well else stream(record)]
    else:
        words = [f"{outcome(record)} in {took}"] if record.outcome == "finished" else [outcome(record), took]
    saved = [
        checkpoint.saved
        for checkpoint in record.checkpoints
        if checkpoint.state == "committed" and checkpoint.saved.kind == "sparkring"
    ]
    words += [f"last saved step {saved[-1].step:,}"] if saved and record.items is None and record.stream is None else []
    return plain(dotted(*words, items_rate(record, now), *metric_words(record, METRICS_NAMED)))


def metric_words(record: RunRecord, most: int) -> list[str]:
    """Return the last mean over the ranks for each of the first `most` metrics: `loss 0.031`.

    One of them, a validation metric if there is one, is compared with the last run of the same cell.
    """
    last, before = metrics.table(record).last(), compared(record)
    shown = list(last)[:most]
    known = [name for name in shown if name in before]
    one = next((name for name in known if name.startswith("val_")), known[0] if known else "")
    return [
        f"{plain(name)} {number(last[name].mean)}" + (change(last[name].mean, before[name]) if name == one else "")
        for name in shown
    ]


def notices(record: RunRecord, most: int) -> list[str]:
    """Return the texts of the last notices, at most `most`, and which metrics are not finite on which ranks."""
    last = record.notices[-most:] if most else ()
    return [*(first_line(notice.text, 600) for notice in last), *not_finite_words(record)]


def not_finite_words(record: RunRecord) -> list[str]:
    """Say which metrics are not finite: `loss is NaN on rank 3 since step 41, on ranks 0–2 since step 42`."""
    noun, shift = step_noun(record), 1 - metrics.first_epoch(record)
    sentences = []
    for name in dict.fromkeys(name for name, _ in record.not_finite):
        since = {rank: odd for (other, rank), odd in record.not_finite.items() if other == name}
        ranks_at: dict[tuple[int, int], list[int]] = {}
        for rank, odd in since.items():
            ranks_at.setdefault(
                (-1 if odd.epoch is None else odd.epoch, -1 if odd.step is None else odd.step), []
            ).append(rank)
        words = []
        for (epoch, step), some in sorted(ranks_at.items())[:2]:
            place = [f"epoch {epoch + shift:,}"] * (epoch >= 0) + [f"{noun} {step:,}"] * (step >= 0)
            words.append(f"on {rank_list(some)} since {', '.join(place)}")
        later = sum(map(len, [some for _, some in sorted(ranks_at.items())[2:]]))
        words += [f"on {counted(later, 'more rank')} since later"] if later else []
        kinds = {odd.what for odd in since.values()}
        sentences.append(f"{plain(name)} is {kinds.pop() if len(kinds) == 1 else 'not finite'} {', '.join(words)}")
    more = len(sentences) - METRICS_NAMED
    return sentences[:METRICS_NAMED] + ([f"so are {counted(more, 'more metric')}"] if more > 0 else [])


def short(record: RunRecord, now: float) -> str:
    """Describe a run in a few lines of plain text: its state, and the last lines of its ranks."""
    return f"sparkring: {closing(record, now)}\n{last_lines(record)}".rstrip("\n")


def last_lines(record: RunRecord) -> str:
    """Return the last lines of the ranks as plain text. Identical lines from several ranks appear once."""
    seen = [line for line in visible(record.recent, record.logs) if not is_noise(line)]
    last = folded(seen[-_SHORT_LINES * max(20, record.size) :])[-_SHORT_LINES:]  # each rank may have printed each line
    return "\n".join(f"[{rank_numbers(entry.ranks)}] {plain(entry.line.text)}"[:_SHORT_CHARACTERS] for entry in last)


def progress_words(progress: Progress, *, running: bool = True, lags: bool = False) -> str:
    """Describe the slowest rank's progress: `1 of 2 ranks finished · epoch 2 of 3 · step 4 of 9 · 34 % · 12 s left`.

    If `lags` is true, some rank is behind, and the text names the slowest rank.
    """
    words = (
        [f"{progress.finished:,} of {counted(progress.size, 'rank')} finished"]
        if 0 < progress.finished < progress.size
        else []
    )
    for what, at, total in (("epoch", progress.epoch, progress.epochs), ("step", progress.step, progress.steps)):
        if at is not None:
            words.append(f"{what} {at:,}" + (f" of {total:,}" if total and total >= at else ""))
    words += [] if progress.fraction is None else [percent(progress.fraction)]
    about = f"rank {progress.rank}, the slowest: " if lags else ""
    return ("" if running else "progress: ") + about + dotted(*words, left_words(progress) if running else "")


def left_words(progress: Progress) -> str:
    """Say how long the rest of the run will take: `12 s left`; return '' if this is not known."""
    return "" if progress.left_s is None else f"{duration(max(1, round(progress.left_s)))} left"


def lag_words(lags: Sequence[Lag], causes: Mapping[int, str] = MappingProxyType({})) -> str:
    """Say which ranks have fallen behind: `rank 5 is 26 steps behind, at 0.33× the median rate`; '' for none.

    If only one rank is behind and the cause is known, the cause follows.
    """
    if not lags:
        return ""
    if len(lags) == 1:
        [(rank, steps, ratio)] = lags
        rate = "" if ratio is None or f"{ratio:.2g}" == "1" else f", at {ratio:.2g}× the median rate"
        cause = f"; {causes[rank]}" if rank in causes else ""
        return f"rank {rank} is {counted(steps, 'step')} behind{rate}{cause}"
    most, least = lags[0].steps, lags[-1].steps
    span = f"{least:,} to {counted(most, 'step')}" if least < most else counted(most, "step")
    return f"{rank_list([lag.rank for lag in lags])} are {span} behind"


def starving_words(percents: Mapping[int, int]) -> str:
    """Say which ranks wait for data, from the percentages of their time: `rank 3 waits for data 76 % of the time`."""
    if len(percents) < 2:
        return "".join(f"rank {rank} waits for data {percent} % of the time" for rank, percent in percents.items())
    return f"{rank_list(percents)} wait for data much of the time"
