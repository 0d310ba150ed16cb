"""Tests what is read off a cell's loops about its progress."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from sparkring.history.events import AtLine, Metrics
from sparkring.history.progress import moved_at, slowest
from sparkring.history.stacks import CELL_NAME
from sparkring.runtime import loops
from sparkring.worker.rank.cell import compile_cell

LOADER = """
from torch.utils.data import DataLoader, IterableDataset
class Endless(IterableDataset):
    def __iter__(self): return iter([1, 2, 3])
    def __len__(self): return 2
"""


def completed(source: str) -> list[tuple[int, int] | None]:
    """Run a cell, and return what is known at each call of log()."""
    reports: list[tuple[int, int] | None] = []

    def log(**_: Any) -> None:
        reports.append(loops.completed(sys._getframe(1)))

    compile_cell(source, CELL_NAME).run({"log": log})
    return reports


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("for epoch in range(3): log()", [(0, 3), (1, 3), (2, 3)]),
        ("n = 5\nfor epoch in range(3, n):\n    log()", [(0, 2), (1, 2)]),
        ("def step(): log()\nif True:\n    for epoch in range(2): step()", [(0, 2), (1, 2)]),
        ("for e in range(2):\n    for i in range(2): log()", [(1, 4), (2, 4), (3, 4), (4, 4)]),
        ("for e in range(2):\n    for x in 'ab': pass\n    for i in range(9): pass\n    log()", [(0, 2), (1, 2)]),
        ("for e in range(2):\n    for x in 'ab': log()", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("for x in 'abc': pass\nfor e in range(2): log()", [(0, 2), (1, 2)]),
    ],
)
def test_loops_over_a_range(source: str, wanted: list[tuple[int, int]]) -> None:
    assert completed(source) == wanted


@pytest.mark.parametrize(
    "source",
    [
        "for x in 'ab': log()",
        "log()",
        "i = 0\nwhile i < 2:\n    i += 1\n    for e in range(1): log()",
        "for e in range(2):\n    e = 7\n    log()",
        "n = 2\nfor e in range(n):\n    n += 1\n    log()",
        "for e in range(2): log()\nfor e in range(3): log()",
        "def step(): log()\nfor e in range(2): step()\nfor e in range(3): log()",
        "def train():\n    for e in range(2): log()\ntrain()\ntrain()",
        "range = reversed\nfor e in range([0, 1]): log()",
    ],
)
def test_nothing_is_said_without_certainty(source: str) -> None:
    reports = completed(source)
    assert reports
    assert set(reports) == {None}


@pytest.mark.parametrize(
    "loop",
    [
        "from tqdm import tqdm\nfor e in tqdm(range(2), disable=True):",
        "import tqdm.auto\nfor e in tqdm.auto.trange(2, disable=True):",
    ],
)
def test_tqdm(loop: str) -> None:
    pytest.importorskip("tqdm")
    assert completed(f"{loop} log()") == [(0, 2), (1, 2)]


def test_a_loader() -> None:
    pytest.importorskip("torch")
    loop, known = "for i, x in enumerate(loader): log()", LOADER + "loader = DataLoader([1, 2, 3], batch_size=2)\n"
    assert completed(known + loop) == [(0, 2), (1, 2)]
    assert completed(f"{known}for e in range(2):\n    {loop}")[-1] == (4, 4)
    estimated = LOADER + "loader = DataLoader(Endless(), batch_size=None)\n"
    assert set(completed(estimated + loop)) == {None}


def test_the_slowest_rank_s_progress(replayed: Any) -> None:
    reports = [Metrics({"loss": 0.5}, iterations=(at, 8), time=at, rank=0) for at in range(1, 7)]
    progress = slowest(replayed(*reports, Metrics({"loss": 0.5}, iterations=(2, 8), time=7.0, rank=1)), 8.0)
    assert progress is not None
    assert (progress.rank, progress.fraction) == (1, 0.25)
    assert (progress.epoch, progress.step, progress.steps) == (None, None, None)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("for e in range(2): look()", [(0, 2), (1, 2)]),
        ("for e in range(2):\n    for i in range(2): look()", [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ("def step(): look()\nfor e in range(2): step()", [(0, 2), (1, 2)]),
        ("for e in range(2): look()\nfor e in range(3): pass", [None, None]),
        ("for e in range(2): look()\nlook()", [(0, 2), (1, 2), None]),
        ("for e in range(2):\n    look()\n    log()", [None, None]),
    ],
)
def test_a_loop_of_a_cell_that_does_not_call_log(source: str, wanted: list[tuple[int, int] | None]) -> None:
    seen: list[tuple[int, int] | None] = []
    names = {"look": lambda: seen.append(loops.under_way(sys._getframe(1))), "log": lambda: None}
    compile_cell(source, CELL_NAME).run(names)
    assert seen == wanted


def test_the_progress_of_a_loop(replayed: Any) -> None:
    reports = [AtLine(2, (), (at, 8), time=float(at + 1), rank=0) for at in range(5)]
    reports.append(AtLine(2, (), (2, 8), time=5.0, rank=1))
    progress = slowest(replayed(*reports), 5.0)
    assert progress is not None
    assert (progress.rank, progress.fraction, progress.left_s) == (1, 0.25, None), "one look at rank 1 gives no rate"
    reports.append(AtLine(2, (), (3, 8), time=9.0, rank=1))
    progress = slowest(replayed(*reports), 9.0)
    assert progress is not None
    assert (progress.rank, progress.fraction, progress.left_s) == (1, 0.375, pytest.approx(20))
    assert slowest(replayed(*reports, Metrics({"loss": 0.5}, time=10.0, rank=0)), 10.0) is None


def test_when_a_rank_last_moved(replayed: Any) -> None:
    assert moved_at(replayed()) == 0
    assert moved_at(replayed(Metrics({"loss": 1.0}, time=5.0))) == 0, "it has no step"
    assert moved_at(replayed(Metrics({"loss": 1.0}, step=1, time=5.0), Metrics({}, step=1, time=6.0, rank=1))) == 6
    looks = [AtLine(3, (), (1, 9), time=7.0), AtLine(4, (), (1, 9), time=8.0)]
    assert moved_at(replayed(*looks)) == 7, "the loop is in the same iteration"
