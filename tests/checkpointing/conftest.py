"""Fixtures for the tests of checkpoints: runs with a --checkpoint-dir, ranks, and messages to the driver."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_launcher import received

from sparkring.checkpointing import background
from sparkring.runtime import report, resume_point, world
from sparkring.wire import messages

sys.path.append(str(Path(__file__).parent))  # so that tests can import faulty.py


class Told(list[messages.Message]):
    """A list of messages, as the driver receives them."""

    def of(self, kind: type[messages.Message]) -> list[Any]:
        return [message for message in self if type(message) is kind]


@pytest.fixture
def told(monkeypatch):
    """The messages about checkpoints that this process sends, as if it were a rank."""
    found = Told()
    monkeypatch.setattr(report, "_tell", lambda message: found.append(received(message)))
    return found


@pytest.fixture
def seat(monkeypatch):
    """`seat(rank, size)` makes this process act as that rank from now on."""
    from sparkring.checkpointing import store

    counters: dict[int, dict] = {}

    def sit(rank, size):
        monkeypatch.setattr(world, "_current", world.World(rank=rank, size=size))
        monkeypatch.setattr(store, "_steps", counters.setdefault(rank, {}))

    return sit


@pytest.fixture
def run(monkeypatch):
    """`run(directory, stamp=…, resume=…, …)` puts this process into a run with --checkpoint-dir from now on.

    The run's driver knows the checkpoints that are in the directory at that time.
    """

    def enter(directory, stamp=2_000_000_000_000, **found):
        there = [path.name for path in Path(directory).glob("*.*")]
        found = {"lineage": "a lineage", "code": "%%horovod\n…", "run_id": "a run", "there": there, **found}
        monkeypatch.setattr(resume_point, "_current", resume_point.Here(str(directory), stamp, **found))

    return enter


@pytest.fixture(autouse=True)
def nothing_on_its_way():
    """Fail a test that leaves an unfinished save, which would otherwise make the next test fail."""
    yield
    left = list(background._unfinished)
    for save in left:
        with save._ended:
            pass
    background._unfinished.clear()
    assert not left, "the test left a save unfinished, or its error unraised"


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """320 rows in row groups of 50; x counts the rows."""
    folder = tmp_path_factory.mktemp("numbered")
    x = np.arange(320)
    pq.write_table(pa.table({"x": x.astype("f4"), "y": (x % 7).astype("f4")}), folder / "a.parquet", row_group_size=50)
    return folder
