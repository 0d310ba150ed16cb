"""A tile for each rank, and a table of the GPUs they use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkring.record import RankRecord, RunRecord
from sparkring.views import lines, summary
from sparkring.views.markup import text
from sparkring.views.sections import Form
from sparkring.views.summary import counted, duration, gpu_words, size
from sparkring.views.tables import bare_table

if TYPE_CHECKING:
    from sparkring.record import RankState

GPU_ROWS = 16
TILES_WITH_NUMBERS, MOST_TILES = 32, 1024

SIGNS: dict[RankState, tuple[str, str]] = {
    "starting": ("", "…"),
    "running": ("r", "▶"),
    "finished": ("f", "✓"),
    "failed": ("x", "✗"),
    "stopped": ("s", "■"),
    "idle": ("i", "·"),
}


def html(record: RunRecord, now: float, form: Form) -> str:
    """The tiles; of many ranks without their numbers, and with counts."""
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
    name, sign = SIGNS[rank.state]
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


def gpus_html(record: RunRecord) -> str:
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
