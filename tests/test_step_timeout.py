"""Tests of --step-timeout, which ends ranks that make no step any more."""

from __future__ import annotations

import builtins
import time
from typing import Any

import pytest
from waiting import PACE

from sparkring.errors import RunTimeout

LIMIT_S = 1.0 * PACE
HANGS = """
    import os, sparkring, time
    sparkring.log(step=1, loss=0.5)
    first = not os.path.exists(flag)
    time.sleep(0.3)
    if rank == 0:
        open(flag, "w").close()
    while first and rank == 1:
        time.sleep(0.1)
    "done"
"""


@pytest.mark.ring
def test_a_run_that_makes_no_step(local: Any, tmp_path: Any) -> None:
    with pytest.raises(RunTimeout) as caught:
        local.run(HANGS, namespace={"flag": str(tmp_path / "flag")}, step_timeout_s=LIMIT_S)
    assert caught.value.record.outcome == "timed out"
    assert "rank 1" in str(caught.value), "the error says where it was"


@pytest.mark.ring
def test_the_time_in_which_a_rank_asks_the_user_does_not_count(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers_late(prompt: str) -> str:
        time.sleep(1.5 * LIMIT_S)
        return "7"

    monkeypatch.setattr(builtins, "input", answers_late)
    cell = "import sparkring; sparkring.log(step=1, loss=0.5); answer = input('x? '); answer"
    assert local.run(cell, n=1, step_timeout_s=LIMIT_S).value == "7"


@pytest.mark.ring
def test_the_run_restarts(local: Any, tmp_path: Any) -> None:
    flag = {"flag": str(tmp_path / "flag")}
    result = local.run(HANGS, namespace=flag, step_timeout_s=LIMIT_S, max_restarts=1)
    assert result.values == ["done", "done"]
    first, second = result.record.attempts
    assert first.reason
    assert not second.ended
