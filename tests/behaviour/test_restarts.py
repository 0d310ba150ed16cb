"""Restarts after ranks are lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from texts import mentions

import sparkring
from sparkring import checkpoints
from sparkring.errors import OptionsError, RunFailed
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
    """All ranks are restarted with the same cell; the record says what ended each attempt."""
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


@pytest.mark.any_launcher
def test_restarts_are_used_up(ring):
    """The error is the last attempt's, and says which attempt that was."""
    with pytest.raises(RunFailed, match=r"(?s)killed by SIGKILL.*attempt 2: all restarts .*used up") as caught:
        ring.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", max_restarts=1)
    assert len(caught.value.record.attempts) == 2


def test_what_cannot_heal_ends_the_run_at_once(local, tmp_path):
    """An error that the next attempt would raise again ends the run.

    Neither the error nor the log shows sparkring's own frames, which would not help the user.
    """
    why = "The run was not restarted: another attempt would raise the same CheckpointError"
    with pytest.raises(RunFailed, match=why) as caught:
        local.run(
            "checkpoints().save(1, {'file': open('/dev/null')})",
            namespace={"checkpoints": checkpoints},
            checkpoint_dir=str(tmp_path / "run"),
            max_restarts=3,
        )
    record = caught.value.record
    assert len(record.attempts) == 1
    (frame,) = record.failure.frames
    assert frame.in_cell
    log = Path(record.log_folder, f"rank-{record.failed_rank}.log").read_text()
    assert log.count('  File "') == 1


def test_stop_between_attempts(driver):
    """An interrupt in the pause between two attempts ends the run."""
    script = driver("""
        from sparkring.engine.run import restarts
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
    assert mentions(script.wait(), "interrupted", "between", "attempts")


@pytest.mark.any_launcher
@pytest.mark.forked("numpy")
def test_a_restart_passes_over_nan(ring, tmp_path):
    """The next attempt continues from the last checkpoint without NaN, and a notice names the ones passed over."""
    result = ring.run(
        """
import numpy as np
from sparkring import checkpoints
store = checkpoints()
state = {"w": np.zeros(2), "step": 0}
begun = store.restore(state)
if not begun:
    store.save(10, state)
    state["w"][:] = np.nan
    store.save(20, state)
    store.wait()
    raise RuntimeError("lost")
begun
""",
        checkpoint_dir=str(tmp_path),
        max_restarts=1,
    )
    assert set(result.values) == {10}
    assert any("step 20 (NaN in w)" in notice.text for notice in result.record.notices)


@pytest.mark.any_launcher
@pytest.mark.forked("numpy")
def test_nan_ends_the_run(ring, tmp_path):
    """With --stop-on nan, the error names rank, metric, step and the last good checkpoint, and there is no restart."""
    with pytest.raises(RunFailed, match=r"(?s)loss .*NaN .*rank 1 .*step 7\b.*[Ss]tep 5\b") as caught:
        ring.run(
            """
import math, time
import numpy as np
import sparkring
from sparkring import checkpoints
store = checkpoints()
for step in range(1, 1000):
    if step == 5:
        store.save(step, {"w": np.zeros(2)})
        store.wait()
    sparkring.log(step=step, loss=math.nan if rank == 1 and step >= 7 else 1.0)
    time.sleep(0.05)
""",
            checkpoint_dir=str(tmp_path),
            max_restarts=3,
            stop_on="nan",
        )
    record = caught.value.record
    assert len(record.attempts) == 1
    assert record.failed_rank == 1
    assert record.not_finite["loss", 1].step == 7


@pytest.mark.any_launcher
@pytest.mark.forked("numpy")
def test_nan_in_a_function_ends_the_run(ring, tmp_path):
    """run(stop_on="nan") does the same, also for the metrics that are passed to save()."""

    def train():
        import sparkring

        sparkring.checkpoints().save(3, {}, {"val_loss": float("inf")})

    directory = str(tmp_path / "dir")
    with pytest.raises(RunFailed, match=r"val_loss .*infinite .*rank 0 .*step 3\b") as caught:
        sparkring.run(train, np=-1, framework="plain", checkpoint_dir=directory, stop_on="nan")
    assert len(caught.value.record.attempts) == 1
    with pytest.raises(OptionsError, match="stop_on"):
        sparkring.run(train, np=-1, framework="plain", stop_on="inf")
