"""Ranks that are lost, and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring.errors import RunFailed
from sparkring.runs import load

DIES = """
import os, signal
from pathlib import Path
def attempt():
    "Which attempt this is, by what the ones before have left."
    mine = Path(folder) / f"rank-{rank}"
    before = mine.read_text() if mine.exists() else ""
    mine.write_text(before + "x")
    return len(before) + 1
"""


def test_a_rank_that_is_killed_is_started_again(ring, tmp_path):
    """All ranks are, in the same cell; the record says what ended the first attempt."""
    result = ring.run(
        DIES
        + """
number = attempt()
print("attempt", number)
if number < 3 and rank == 1:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
number
""",
        namespace={"folder": str(tmp_path)},
        max_restarts=2,
    )
    assert result.values[1] == 3
    record = result.record
    assert record.outcome == "finished"
    first, second, third = record.attempts
    assert (first.failed_rank, first.failure.summary, first.host) == (1, "killed by SIGKILL", record.ranks[1].host)
    assert first.last_lines[-1].text == "last words"
    assert first.reason == "killed by SIGKILL"
    assert second.failure is not None
    assert third.failure is None
    assert "attempt 1\nlast words\nattempt 2\nlast words\nattempt 3" in result.logs(1)
    again = load(Path(record.log_folder))
    assert again.attempts == record.attempts


def test_restarts_are_used_up(ring):
    """The error is that of the last attempt, and says how many there were."""
    with pytest.raises(RunFailed, match=r"(?s)killed by SIGKILL.*attempt 2: all restarts are used up") as caught:
        ring.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", max_restarts=1)
    assert len(caught.value.record.attempts) == 2


def test_the_same_mistake_twice_ends_the_run(local):
    """A mistake in the cell is not tried ten times."""
    with pytest.raises(RunFailed, match=r"(?s)ValueError: no.*cell line 2.*failed twice in the same way") as caught:
        local.run("raise ValueError('no')", max_restarts=9)
    assert len(caught.value.record.attempts) == 2


def test_without_restarts_nothing_is_said_of_them(local):
    """One attempt, none listed."""
    with pytest.raises(RunFailed) as caught:
        local.run("raise ValueError('no')")
    assert "attempt" not in str(caught.value)
    assert caught.value.record.attempts == ()


def test_the_time_limit_is_the_runs(local):
    """It does not begin anew with an attempt."""
    with pytest.raises(TimeoutError, match="time limit of 3"):
        local.run("import os, time\ntime.sleep(1)\nos._exit(3)", max_restarts=1000, timeout_s=3.0)


def test_stop_between_attempts(driver):
    """An interrupt in the pause ends the run."""
    script = driver("""
        from sparkring import attempts
        attempts.PAUSE_S = 600.0
        def refresh(record, shown=View.refresh):
            shown(view, record)
            if record.attempts and record.attempts[-1].ended:
                print("pausing", flush=True)
        View.refresh = lambda self, record: refresh(record)
        try:
            run("import os; os._exit(3)", -2, max_restarts=1)
        except KeyboardInterrupt as error:
            print("stopped:", error, flush=True)
    """)
    script.until_said("^pausing")
    script.process.send_signal(2)
    assert "interrupted, between two attempts" in script.wait()
