"""Tests of --profile torch: the ranks' traces come home, in one file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sparkring.history import step_traces
from sparkring.history.events import Notice, TracePart, TraceSaved

TRAINING = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9 if rank < 2 else 2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def trace(base_ns: int, *events: dict[str, Any]) -> bytes:
    return gzip.compress(json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": events}).encode())


def events_in(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_all_ranks_are_in_one_file_on_one_clock(tmp_path: Path) -> None:
    traces = step_traces.StepTraces(tmp_path)
    named = {"ph": "M", "name": "process_name", "pid": 77, "ts": 1.0, "args": {"name": "python"}}
    whole = trace(5_000, named, {"ph": "X", "name": "step", "pid": 77, "ts": 1.0, "dur": 2.0})
    for number, half in enumerate((whole[:20], whole[20:])):
        traces.take(TracePart(half, number, bool(number), 5, rank=1))
    about = {"ph": "X", "name": "the profiler itself", "pid": "Spans", "ts": 1.0}
    traces.take(TracePart(trace(2_000, {"ph": "X", "name": "step", "pid": 77, "ts": 1.0}, about), 0, True, 4, rank=0))
    traces.take(TracePart(b"cut", 0, False, rank=2))  # this rank was killed
    traces.take(TracePart(b"", 0, True, problem="too few steps", rank=3))
    notice, saved = traces.end(9.0)
    assert isinstance(notice, Notice)
    assert "rank 3" in notice.text
    assert isinstance(saved, TraceSaved)
    assert (saved.ranks, saved.steps, saved.size_bytes) == (2, 5, (tmp_path / saved.name).stat().st_size)
    assert [path.name for path in tmp_path.iterdir()] == [saved.name], "what is only one rank's is removed"
    first, name, second = events_in(tmp_path / saved.name)
    assert (first["ts"], second["ts"]) == (1.0, 4.0)
    assert first["pid"] != second["pid"], "processes on two machines may have the same number"
    assert name["args"]["name"] == "rank 1: python"
    assert traces.end(10.0) == []


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    traces = step_traces.StepTraces(tmp_path)
    traces.take(TracePart(b"this is not a trace", 0, True, 5))
    [report] = traces.end(9.0)
    assert isinstance(report, Notice)


def test_no_rank_has_made_enough_steps(tmp_path: Path) -> None:
    traces = step_traces.StepTraces(tmp_path)
    for rank in range(2):
        traces.take(TracePart(b"", 0, True, problem="too few steps", rank=rank))
    [notice] = traces.end(9.0)
    assert isinstance(notice, Notice)
    assert "ranks 0, 1" in notice.text


@pytest.mark.ring
@pytest.mark.forked("torch", "torch.profiler")
def test_a_ring_is_traced(local: Any) -> None:
    """Ranks 0 and 1 make enough steps; rank 2 does not."""
    pytest.importorskip("torch")
    result = local.run(TRAINING, 3, trace="torch")
    saved = result.record.trace
    assert (saved.ranks, saved.steps) == (2, 5)
    events = events_in(Path(result.record.log_folder) / saved.name)
    steps = [event["pid"] for event in events if event.get("name", "").startswith("Optimizer.step")]
    assert len(steps) >= 2 * 5
    assert len({*steps}) == 2
    [notice] = result.record.notices
    assert "rank 2" in notice.text
