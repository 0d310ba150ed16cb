"""Fixtures that make records by replaying events, as real runs do."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest

from sparkring.history.events import Event, RankStarted, RunStarted
from sparkring.history.record import RunRecord, replay

STARTED = 1_700_000_000.0


@pytest.fixture
def replayed() -> Callable[..., RunRecord]:
    """`replayed(*events, size=2, …)` returns the record of a run after `events`. The run's ranks are up.

    With `up=False`, the ranks have not started. Other keywords are fields of RunStarted.
    """

    def make(*events: Event, size: int = 2, up: bool = True, **fields: Any) -> RunRecord:
        begun = {
            "time": STARTED, "run_id": "2026-11-20_14-03-22_a1b2", "title": "train", "code": "%%horovod -n -2\ntrain()",
            "size": size, "where": "local", "framework": "horovod", "logs": "all",
        }  # fmt: skip
        started = RunStarted(**{**begun, **fields})
        ranks = [RankStarted(STARTED + 1, rank, f"node-{rank % 2}", 4000 + rank) for rank in range(size)] if up else []
        return replay([started, *ranks, *events], RunRecord(log_folder="/runs/a1b2"))

    return make


@pytest.fixture
def unfolded() -> Callable[[str], str]:
    """`unfolded(page)` returns a static view with its images turned back into <svg> elements and no inline styles."""

    def drawing(found: re.Match[str]) -> str:
        svg = base64.b64decode(found[2]).decode()
        return svg.replace("<svg", f'<svg aria-label="{unescape(found[1])}"', 1)

    def make(page: str) -> str:
        ours = r'<img alt="([^"]*)" width="[^"]*" height="[^"]*" src="data:image/svg\+xml;base64,([^"]*)"[^>]*>'
        return re.sub(r' style="[^"]*"', "", re.sub(ours, drawing, page))

    return make
