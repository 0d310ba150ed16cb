"""Ranks that are lost, and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkring import checkpoints
from sparkring.errors import RunFailed
from sparkring.history.run_store import load

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


@pytest.mark.standalone("the executor says that its worker has died")
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
    """Where the first time does not show yet that it is one, since the ranks have got as far as a step."""
    with pytest.raises(RunFailed, match=r"(?s)ValueError: no.*cell line 4.*failed twice in the same way") as caught:
        local.run("import sparkring\nsparkring.log(step=1, loss=0.5)\nraise ValueError('no')", max_restarts=9)
    assert len(caught.value.record.attempts) == 2


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        (
            "if rank == 0:\n    [].no_such_method()\nimport time\ntime.sleep(60)",
            "another attempt would raise the same AttributeError",
        ),
        ("checkpoints().save(1, {'file': open('/dev/null')})", "another attempt would raise the same CheckpointError"),
        ("raise ValueError('no')", "all ranks failed in the same way before the first step"),
    ],
)
def test_what_cannot_heal_ends_the_run_at_once(local, tmp_path, cell, why):
    """By the type of the error on one rank, or since all ranks fail alike; the error says so.

    Neither it nor the log leads into sparkring, where there is nothing for the user to find.
    """
    with pytest.raises(RunFailed, match=f"The run was not restarted: {why}") as caught:
        local.run(cell, namespace={"checkpoints": checkpoints}, checkpoint_dir=str(tmp_path / "run"), max_restarts=3)
    record = caught.value.record
    assert len(record.attempts) == 1
    (frame,) = record.failure.frames
    assert frame.in_cell
    log = Path(record.log_folder, f"rank-{record.failed_rank}.log").read_text()
    assert log.count('  File "') == 1


def test_a_mistake_that_only_echoes_a_death_is_no_reason_to_give_up(local, tmp_path):
    """A rank stumbles over what one that has died left undone: the next attempt goes well."""
    result = local.run(
        DIES
        + """
number = attempt()
gone = Path(folder) / "gone"
if number == 1 and rank == 1:
    gone.touch()
    os.kill(os.getpid(), signal.SIGSEGV)
while not gone.exists():
    pass
if number == 1:
    None + 1
number
""",
        namespace={"folder": str(tmp_path)},
        max_restarts=1,
    )
    assert result.values == [2, 2]


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
        from sparkring.engine import restarts
        restarts.PAUSE_S = 600.0
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
