"""The section on ranks: a tile for each rank, and a table of the GPUs of the ranks or of a query's model processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sparkring.history import describe, lines, metrics, progress, reading
from sparkring.history.describe import counted, duration, gpu_words, size, usage_words
from sparkring.history.events import GpuUsed
from sparkring.history.record import RankRecord, RankState, RunRecord
from sparkring.views.markup import text
from sparkring.views.sections import Form
from sparkring.views.tables import bare_table

GPU_ROWS = 16
TILES_WITH_NUMBERS, MOST_TILES = 32, 128

SIGNS: dict[RankState, tuple[str, str]] = {
    "starting": ("", "…"),
    "running": ("r", "▶"),
    "finished": ("f", "✓"),
    "failed": ("x", "✗"),
    "stopped": ("s", "■"),
    "idle": ("i", "·"),
}


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return a tile for each rank.

    If there are more than TILES_WITH_NUMBERS ranks, consecutive ranks in the same state share a tile, and a line above
    the tiles says how many ranks are in each state.
    """
    if not record.ranks or record.items is not None:  # the ranks of a pool are replaced during the run
        return ""
    lags = progress.lags(record) if record.outcome is None else []
    behind = f"<div><small>{text(describe.lag_words(lags, reading.causes(record, now)))}</small></div>" if lags else ""
    if record.size <= TILES_WITH_NUMBERS:
        tiles = [_tile(record, rank, now) for rank in record.ranks]
        return f'{behind}<div class="sr-ranks">{" ".join(tiles)}</div>'
    counts = " · ".join(f"{count:,} {state}" for state, count in describe.states(record).items())
    alike = [list(group) for _, group in itertools.groupby(record.ranks, lambda rank: _look(record, rank))]
    tiles = [_tile(record, ranks[0], now) if len(ranks) == 1 else _wide_tile(record, ranks) for ranks in alike]
    if len(tiles) > MOST_TILES:
        shown = sum(map(len, alike[:MOST_TILES]))
        counts += f" · showing the first {shown:,}:"
    return f'<div><small>{counts}</small></div>{behind}<div class="sr-ranks">{" ".join(tiles[:MOST_TILES])}</div>'


def _look(record: RunRecord, rank: RankRecord) -> tuple[str, str]:
    name, sign = SIGNS[rank.state]
    if rank.state == "failed" and rank.rank != record.failed_rank and record.failed_rank is not None:
        name = "y"  # this rank failed after another rank had failed
    return name, sign


def _wide_tile(record: RunRecord, ranks: Sequence[RankRecord]) -> str:
    name, sign = _look(record, ranks[0])
    span = f"{ranks[0].rank}–{ranks[-1].rank}"
    state = "not taking part" if ranks[0].state == "idle" else ranks[0].state
    shape = f' class="{name}"' if name else ""
    return f'<span{shape} title="ranks {span} {state}, {len(ranks):,} in all">{span} {sign}</span>'


def _tile(record: RunRecord, rank: RankRecord, now: float) -> str:
    name, sign = _look(record, rank)
    silent_s = now - rank.last_heard if rank.state == "running" else 0.0
    words = [f"rank {rank.rank} {'not taking part' if rank.state == 'idle' else rank.state}", rank.host]
    words += [f"process {rank.pid}", counted(rank.line_count, "line")] if rank.pid else []
    words += [f"silent for {duration(silent_s)}" if silent_s >= 2 else "", gpu_words(rank.gpus)]
    words += [usage_words(rank.used)]
    words += [f"last: {lines.plain(rank.tail[-1].text)[:80]}"] if rank.tail else []
    shape = f' class="{name}"' if name else ""
    place = " ".join(filter(None, (f"{rank.rank} {sign}", _place(record, rank))))
    return f'<span{shape} title="{text(", ".join(filter(None, words)))}">{place}</span>'


def _place(record: RunRecord, rank: RankRecord) -> str:
    """Return the last epoch and step of a rank that has not finished: `(e2 · 28)`; '' if it has reported none."""
    found = progress.places(record).get(rank.rank)
    if found is None or rank.state == "finished":
        return ""
    epoch, step = found.epoch, None if found.ends_epoch else found.step
    told = [
        f"e{epoch + 1 - metrics.first_epoch(record)}" if epoch is not None else "",
        "" if step is None else f"{step}",
    ]
    return f"({describe.dotted(*told)})" if any(told) else ""


def gpus_html(record: RunRecord) -> str:
    """Return a table of the GPUs that ranks or model processes use, as last reported, with at most GPU_ROWS rows."""
    used: list[tuple[tuple[str, ...], GpuUsed]] = [
        *(((str(rank.rank),), gpu) for rank in record.ranks for gpu in rank.gpus),
        *(((each.host, str(each.pid)), each.gpu) for each in record.model_gpus),  # the slots of a query have no GPUs
    ]
    if not used:
        return ""
    rows = []
    for user, gpu in used[:GPU_ROWS]:
        busy = "" if gpu.busy_percent is None else f"{gpu.busy_percent} %"
        power = "" if gpu.power_w is None else f"{gpu.power_w:,} W"
        heat = "" if gpu.temperature_c is None else f"{gpu.temperature_c} °C"
        rows.append((*user, gpu.address, gpu.name, size(gpu.used_bytes), size(gpu.total_bytes), busy, power, heat))
    note = f"the first {GPU_ROWS} of {counted(len(used), 'GPU')}" if len(used) > GPU_ROWS else ""
    user = ("host", "process") if record.model_gpus else ("rank",)
    return bare_table((*user, "GPU", "name", "memory", "total", "busy", "power", "temperature"), rows, note)
