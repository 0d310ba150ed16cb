"""Tests of the sentence about memory that grows until the machine has none left."""

from __future__ import annotations

from typing import Any

import pytest

from sparkring.history.events import Metrics, RankFinished, RankUsed
from sparkring.history.memory import growth
from sparkring.views.watching import watching

GB = 10**9


def used(sizes_gb: list[float], rank: int = 0, every_s: float = 5.0, total_gb: int = 16) -> list[RankUsed]:
    """Return a report every few seconds, with these sizes."""
    return [
        RankUsed(100, round(size * GB), 8, total_gb * GB, 1000.0 + every_s * at, rank)
        for at, size in enumerate(sizes_gb)
    ]


def test_memory_that_grows_steadily(replayed: Any) -> None:
    record = replayed(*used([1 + 0.1 * at for at in range(30)], rank=1), *used([2.0] * 30))
    found = growth(record)
    assert found is not None
    assert (found.ranks, found.total_bytes) == ((1,), 16 * GB)
    assert found.bytes_per_s == pytest.approx(0.02 * GB, rel=0.01)
    assert found.full_in_s == pytest.approx((16 - 3.9) / 0.02, rel=0.01), "the other rank is on another host"
    assert watching(record) is not None
    assert watching(replayed(*used([1 + 0.1 * at for at in range(30)]), RankFinished(2000.0, 0, ""))) is None


def test_all_ranks_of_a_machine_count(replayed: Any) -> None:
    reports = [used([1 + 0.1 * at for at in range(30)], rank) for rank in (0, 2)]  # both are on node-0
    found = growth(replayed(*reports[0], *reports[1], size=3))
    assert found is not None
    assert (found.host, found.ranks) == ("node-0", (0, 2))
    assert found.full_in_s == pytest.approx((16 - 7.8) / 0.04, rel=0.01)


@pytest.mark.parametrize(
    "sizes_gb",
    [
        [1 + 0.1 * at for at in range(8)],  # too short
        [min(5.0, 0.5 * at) for at in range(40)],  # data was loaded
        [3 + 0.3 * (at % 2) for at in range(40)],
        [5 + (at % 10) * 0.5 for at in range(60)],  # each epoch frees what it has allocated
        [1 + 0.001 * at for at in range(60)],  # full in hours
        [8 - 0.1 * at for at in range(40)],
    ],
)
def test_nothing_is_said(replayed: Any, sizes_gb: list[float]) -> None:
    assert growth(replayed(*used(sizes_gb))) is None


def test_what_comes_first(replayed: Any) -> None:
    reports = used([1 + 0.1 * at for at in range(30)])
    both = replayed(*reports, Metrics({"loss": float("nan")}, step=3, time=1200.0))
    assert watching(both) != watching(replayed(*reports)), "NaN matters more"
