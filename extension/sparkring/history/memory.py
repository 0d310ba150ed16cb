"""Says whether the memory of ranks grows so steadily that their machine's memory will soon be full."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from sparkring.history.record import RunRecord, Sample

SOON_S = 1_800.0  # memory that lasts longer than this is no reason to worry yet
FEWEST, SHORTEST_S = 6, 40.0  # how many samples over how much time show a growth
STEADY = 0.9  # how well a line must describe the samples: their correlation with time
LEAST_SHARE = 0.02  # the growth must be at least this share of the machine's memory


class Growth(NamedTuple):
    """The ranks on `host` whose memory grows, by how much together, and when the host's memory will be full."""

    host: str
    ranks: tuple[int, ...]
    bytes_per_s: float
    total_bytes: int
    full_in_s: float


def growth(record: RunRecord) -> Growth | None:
    """Return the growth that will fill a machine first, if that is soon. Memory of other programs is not known."""
    used_bytes, totals, slopes = defaultdict[str, int](int), dict[str, int](), defaultdict[str, dict[int, float]](dict)
    for rank in record.ranks:
        if rank.state == "running" and rank.used is not None and rank.used.total_bytes:
            used_bytes[rank.host] += rank.used.memory_bytes
            totals[rank.host] = rank.used.total_bytes
            slope = _slope(rank.samples, rank.used.total_bytes)
            if slope:
                slopes[rank.host][rank.rank] = slope
    growths = []
    for host, by_rank in slopes.items():
        bytes_per_s = sum(by_rank.values())
        full_in_s = max(0, totals[host] - used_bytes[host]) / bytes_per_s
        growths.append(Growth(host, tuple(by_rank), bytes_per_s, totals[host], full_in_s))
    first = min(growths, key=lambda growth: growth.full_in_s, default=None)
    return first if first is not None and first.full_in_s <= SOON_S else None


def _slope(samples: Sequence[Sample], total_bytes: int) -> float:
    """Return by how many bytes a second the memory has grown in the later half of the time; 0 if not steadily.

    The earlier half is left out, because most runs load their data and modules there.
    """
    if not samples:
        return 0.0
    middle = (samples[0].time + samples[-1].time) / 2
    times = [sample.time for sample in samples if sample.time >= middle]
    values = [float(sample.memory_bytes) for sample in samples if sample.time >= middle]
    if len(times) < FEWEST or times[-1] - times[0] < SHORTEST_S or values[-1] - values[0] < LEAST_SHARE * total_bytes:
        return 0.0
    is_steady = len({*times}) > 1 and statistics.correlation(times, values) >= STEADY
    return max(0.0, statistics.linear_regression(times, values).slope) if is_steady else 0.0
