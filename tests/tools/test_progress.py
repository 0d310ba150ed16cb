"""What a person reads while workers run the tests."""

from __future__ import annotations

from types import SimpleNamespace

import progress
import pytest
from progress import Progress
from texts import mentions


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_how_many_run_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is made from the last run, and scaled with how fast this one is."""
    clock, lines = Clock(), []
    monkeypatch.setattr(progress, "time", clock)
    kept = {progress.KEPT: {"a": 100.0, "b": 200.0}}
    reporter = SimpleNamespace(write_line=lambda line: lines.append(line.strip()))
    config = SimpleNamespace(
        option=SimpleNamespace(numprocesses=2),
        cache=SimpleNamespace(get=lambda key, _: kept.get(key, {}), set=kept.__setitem__),
        pluginmanager=SimpleNamespace(get_plugin=lambda _: reporter),
    )
    run = Progress(config)  # type: ignore[arg-type]
    for _ in range(2):  # each worker collects the tests
        run.pytest_xdist_node_collection_finished(["a", "b", "c"])
    (line,) = lines
    assert mentions(line, "3 tests", "2 workers", "4 min")
    run.pytest_runtest_logstart("a")
    run.pytest_runtest_logstart("b@group")
    clock.now = 120.0
    run.pytest_runtest_logreport(SimpleNamespace(nodeid="a", duration=120.0))  # type: ignore[arg-type]
    run.pytest_runtest_logfinish("a")
    # "c" is expected to take as long as the others did on average.
    assert lines[1:] == ["After 2 min: 2 tests left, about 7 min. Running: b (2 min)"]
    run.pytest_sessionfinish()
    assert kept[progress.KEPT] == {"a": 120.0, "b": 200.0}
