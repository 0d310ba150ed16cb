"""The section on ranks: a tile for each rank, and a table of the GPUs of the ranks or of a query's model processes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sparkring.history import describe, lines, metrics, progress, reading
from sparkring.history.describe import counted, gpu_words, size, usage_words
from sparkring.history.events import GpuUsed
from sparkring.history.progress import Lag, Pace
from sparkring.history.record import RankRecord, RankState, RunRecord
from sparkring.views.description import Column, fact
from sparkring.views.markup import note, text
from sparkring.views.sections import Form
from sparkring.views.tables import bare_table

GPU_ROWS = 16
TILES_WITH_NUMBERS, MOST_TILES = 32, 128

# The sign and the words of each state, in the order in which a line counts ranks. The letters are classes of style.css.
STATES = {
    "x": ("✗", "failed"),
    "y": ("✗", "failed after another rank"),
    ".": ("…", "starting"),
    "r": ("▶", "running"),
    "f": ("✓", "finished"),
    "s": ("■", "stopped"),
    "i": ("·", "not taking part"),
}
_LETTERS: dict[RankState, str] = {
    "starting": ".", "running": "r", "finished": "f", "failed": "x", "stopped": "s", "idle": "i",
}  # fmt: skip
SILENT_S = 2  # the silence of a running rank is a fact from this time on
# What the label of a rank says; fact() turns the titles into words.
FACTS = (
    Column("host", "{}"),
    Column("pid", "process {}"),
    Column("lines", "{}", "counted", noun="line"),
    Column("silence", "silent for {}", "whole"),
    Column("usage", "{}"),
    Column("gpu", "{}"),
    Column("epoch", "epoch {}", "count"),
    Column("step", "{noun} {}", "count"),
    Column("done", "{} of the run", "percent"),
    Column("rate", "{} {nouns}/s", "number"),
    Column("waits", "waits for data {} %", "count"),
    Column("behind", "{} behind", "counted", noun="step"),
    Column("at", "{}"),
    Column("failure", "{}"),
)


def letter(record: RunRecord, rank: RankRecord) -> str:
    """Return the letter of a rank's state, which is a key of STATES."""
    followed = rank.state == "failed" and record.failed_rank not in (None, rank.rank)
    return "y" if followed else _LETTERS[rank.state]


def described(record: RunRecord, lags: Sequence[Lag]) -> dict[str, Any]:
    """Return what is known about the ranks, as JSON values. Most of them are columns with a value for each rank.

    `heard` is the time of a rank's last message. `step` is the rank's step in the epoch, or None if it reports no step,
    or has ended the epoch. `done` is the completed fraction of the run, and `rate` is in steps per second; both are
    None if not known. `behind` maps the ranks that are behind the others to the number of steps.
    """
    hosts = sorted({rank.host for rank in record.ranks})
    place = {host: at for at, host in enumerate(hosts)}
    first, places, paces = metrics.first_epoch(record), progress.places(record), progress.paces(record)
    reports = [places.get(rank.rank) for rank in record.ranks]
    rates = [paces.get(rank.rank, Pace()).rate for rank in record.ranks]
    fractions = [None if record.stream else paces.get(rank.rank, Pace()).fraction for rank in record.ranks]
    failures = {rank.rank: rank.failure for rank in record.ranks if rank.failure is not None}
    return {
        "state": "".join(letter(record, rank) for rank in record.ranks),
        "hosts": hosts,
        "host": [place[rank.host] for rank in record.ranks],
        "pid": [rank.pid for rank in record.ranks],
        "heard": [round(rank.last_heard, 1) for rank in record.ranks],
        "lines": [rank.line_count for rank in record.ranks],
        "epoch": [report.epoch + 1 - first if report and report.epoch is not None else None for report in reports],
        "step": [report.step if report and not report.ends_epoch else None for report in reports],
        "done": [None if fraction is None else round(fraction, 6) for fraction in fractions],
        "rate": [None if rate is None else float(f"{rate:.2g}") for rate in rates],
        "behind": {lag.rank: lag.steps for lag in lags},
        "gpu": {rank.rank: gpu_words(rank.gpus) for rank in record.ranks if rank.gpus},
        "failure": {rank: describe.first_line(failure.summary, 200) for rank, failure in failures.items()},
    }


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return a tile for each rank.

    If there are more than TILES_WITH_NUMBERS ranks, consecutive ranks in the same state share a tile, and a line above
    the tiles says how many ranks are in each state.
    """
    if not record.ranks or record.items is not None:  # the ranks of a pool are replaced during the run
        return ""
    lags = progress.lags(record) if record.outcome is None else []
    behind = note(describe.lag_words(lags, reading.causes(record, now) if lags else {}))
    few = record.size <= TILES_WITH_NUMBERS
    alike = itertools.groupby(record.ranks, lambda rank: rank.rank if few else letter(record, rank))
    groups = [list(group) for _, group in alike]
    ranks = described(record, lags) if any(len(group) == 1 for group in groups) else {}
    waits = {rank: round(100 * (wait.waiting or 0.0)) for rank, wait in reading.waits(record, now).items()}
    tiles = [
        _tile(record, group[0], ranks, waits, now) if len(group) == 1 else _wide_tile(record, group)
        for group in groups[:MOST_TILES]
    ]
    shown = f'{behind}<div class="sr-ranks">{" ".join(tiles)}</div>'
    if few:
        return shown
    letters = Counter(letter(record, rank) for rank in record.ranks)
    counts = [f"{letters[letter]:,} {words}" for letter, (_, words) in STATES.items() if letters[letter]]
    if len(groups) > MOST_TILES:
        counts.append(f"showing the first {sum(map(len, groups[:MOST_TILES])):,}:")
    return note(" · ".join(counts)) + shown


def _wide_tile(record: RunRecord, ranks: Sequence[RankRecord]) -> str:
    span = f"{ranks[0].rank}–{ranks[-1].rank}"
    sign, state = STATES[letter(record, ranks[0])]
    return f'<span{_shape(record, ranks[0])} title="ranks {span} {state}, {len(ranks):,} in all">{span} {sign}</span>'


def _tile(record: RunRecord, rank: RankRecord, ranks: dict[str, Any], waits: Mapping[int, int], now: float) -> str:
    at = rank.rank
    silence_s = now - rank.last_heard if rank.state == "running" and now - rank.last_heard >= SILENT_S else None
    cells = {
        **{name: ranks[name][at] for name in ("epoch", "step", "done", "rate")},
        **{name: ranks[name].get(at) for name in ("behind", "gpu", "failure")},
        "host": rank.host,
        "pid": rank.pid or None,
        "lines": rank.line_count if rank.pid else None,
        "silence": silence_s,
        "usage": usage_words(rank.used if rank.state == "running" else None),
        "waits": waits.get(at),
        "at": describe.line_words(record, rank),
    }
    sign, state = STATES[ranks["state"][at]]
    words = [f"rank {at} {state}", *(fact(column, cells[column.name], describe.step_noun(record)) for column in FACTS)]
    words += [f"last: {lines.plain(rank.tail[-1].text)[:80]}"] if rank.tail else []
    place = describe.dotted(
        "" if cells["epoch"] is None else f"e{cells['epoch']}", "" if cells["step"] is None else f"{cells['step']}"
    )
    shown = f"{at} {sign}" + (f" ({place})" if place and rank.state != "finished" else "")
    return f'<span{_shape(record, rank)} title="{text(", ".join(filter(None, words)))}">{shown}</span>'


def _shape(record: RunRecord, rank: RankRecord) -> str:
    return "" if rank.state == "starting" else f' class="{letter(record, rank)}"'


def gpus_html(record: RunRecord) -> str:
    """Return a table of the GPUs that ranks or model processes use, as last reported, with at most GPU_ROWS rows."""
    used: list[tuple[tuple[str, ...], GpuUsed]] = [
        *(((str(rank.rank),), gpu) for rank in record.ranks for gpu in rank.gpus),
        *(
            ((process.host, str(process.pid)), process.gpu) for process in record.model_gpus
        ),  # the slots of a query have no GPUs
    ]
    if not used:
        return ""
    rows = []
    for user, gpu in used[:GPU_ROWS]:
        busy = "" if gpu.busy_percent is None else f"{gpu.busy_percent} %"
        power = "" if gpu.power_w is None else f"{gpu.power_w:,} W"
        heat = "" if gpu.temperature_c is None else f"{gpu.temperature_c} °C"
        rows.append((*user, gpu.address, gpu.name, size(gpu.used_bytes), size(gpu.total_bytes), busy, power, heat))
    some = f"the first {GPU_ROWS} of {counted(len(used), 'GPU')}" if len(used) > GPU_ROWS else ""
    user = ("host", "process") if record.model_gpus else ("rank",)
    return bare_table((*user, "GPU", "name", "memory", "total", "busy", "power", "temperature"), rows, some)
