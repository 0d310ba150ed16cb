"""Preemption: ranks that get SIGTERM save a checkpoint first, and the run continues from it on new ranks."""

from __future__ import annotations

import psutil
import pytest
from texts import mentions

from sparkring.errors import RunFailed

STEPS = """
import os, signal, threading, time
from pathlib import Path
import numpy as np
from sparkring import checkpoints
store = checkpoints(sharded=sharded)
state = {"w": np.zeros(2), "step": 0}
begun = store.restore(state)
reached = begun
for step in range(begun + 1, 41):
    state["step"] = step
    time.sleep(0.01)
    if rank == 1 and step == 18 and not begun:
        # HERE
    store.save(step, state, every=10)
begun
"""


def run(ring, tmp_path, term="os.kill(os.getpid(), signal.SIGTERM)", *, cell=STEPS, sharded=False, **options):
    options = {"checkpoint_dir": str(tmp_path / "run"), "max_restarts": 1, **options}
    return ring.run(cell.replace("# HERE", term), namespace={"sharded": sharded}, **options)


def going(record):
    return [notice.text for notice in record.notices if "SIGTERM" in notice.text]


@pytest.mark.any_launcher
@pytest.mark.forked("numpy")
def test_no_step_is_lost(ring, tmp_path):
    """save() is due at step 20 only, but the ranks save before rank 1 ends, also if rank 0 is ahead.

    With sharded=True, every rank has a part of the checkpoint, although the ranks have passed other steps. The code may
    use signal.set_wakeup_fd() for itself.
    """
    result = run(ring, tmp_path, "signal.set_wakeup_fd(-1); os.kill(os.getpid(), signal.SIGTERM)", sharded=True)
    assert set(result.values) == {result.values[0]}
    assert 18 <= result.values[0] <= 40
    first, _ = result.record.attempts
    assert (first.failed_rank, first.failure.signal) == (1, "SIGTERM")
    (notice,) = going(result.record)
    assert mentions(notice, "rank 1", first.host)


@pytest.mark.any_launcher
@pytest.mark.forked("numpy")
def test_the_member_gets_it(ring, tmp_path):
    """SIGTERM to the member, which a host that shuts down sends to all processes, is a notice as well."""
    result = run(ring, tmp_path, "os.kill(os.getppid(), signal.SIGTERM)")
    assert 18 <= result.values[0] <= 40
    assert len(going(result.record)) == 1


@pytest.mark.any_launcher
@pytest.mark.forked("numpy")
def test_a_callback(ring, tmp_path):
    """on_notice() calls a function on all ranks, so that a loop can save between its usual saves."""
    cell = STEPS.replace('"step": 0}\n', '"step": 0}\nnotice = threading.Event()\nstore.on_notice(notice.set)\n')
    cell = cell.replace(
        "store.save(step, state, every=10)", "if notice.is_set() or step == 40: store.save(step, state)"
    )
    cell = cell.replace("# HERE", "# HERE\n        notice.wait(60)")
    cell = cell.replace("time.sleep(0.01)", "time.sleep(0.01 if begun or rank else 0.1)")  # rank 0 is told in time
    assert 1 <= run(ring, tmp_path, cell=cell).values[0] < 40


@pytest.mark.any_launcher
@pytest.mark.forked("numpy")
def test_the_grace_ends(ring, tmp_path):
    """A rank that reaches no save point in time ends all the same, and the run goes back to the last checkpoint."""
    cell = STEPS.replace("if rank == 1 and step == 18", "if step == 18")
    result = run(
        ring, tmp_path, "rank and signal.raise_signal(signal.SIGTERM); time.sleep(600)", cell=cell, grace_s=0.5
    )
    assert result.values == [10, 10]
    assert result.record.attempts[0].failure.signal == "SIGTERM"


@pytest.mark.any_launcher
@pytest.mark.forked("numpy")
def test_nothing_else_changes(ring, tmp_path):
    """The code's own handler stays in force, children end by SIGTERM, and without checkpoints, so does the rank."""
    cell = """
import multiprocessing, os, signal, sys, time
import numpy as np
from sparkring import checkpoints
checkpoints().save(1, {"w": np.zeros(2)})
codes = set()
for _ in range(30):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    codes.add(child.exitcode)
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
os.kill(os.getpid(), signal.SIGTERM)
codes, got
"""
    result = run(ring, tmp_path, cell=cell)
    assert result.values == [({-15}, [15])] * 2
    assert (len(result.record.attempts), going(result.record)) == (1, [])
    with pytest.raises(RunFailed, match="killed by SIGTERM") as caught:
        ring.run("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    assert going(caught.value.record) == []


@pytest.mark.any_launcher
@pytest.mark.forked("numpy")
def test_our_own_stop_is_no_notice(ring, tmp_path):
    """When another rank fails, the others are ended at once, although they save checkpoints."""
    cell = STEPS.replace("# HERE", "raise ValueError('no')").replace("range(begun + 1, 41)", "range(1, 10**9)")
    with pytest.raises(RunFailed, match="ValueError: no") as caught:
        run(ring, tmp_path, cell=cell, max_restarts=0, grace_s=600.0)
    assert going(caught.value.record) == []
    assert not any(psutil.pid_exists(rank.pid) for rank in caught.value.record.ranks)


@pytest.mark.standalone("executors are ended")
def test_an_executor_gets_it(tasks, tmp_path):
    """If Spark's executor is ended, its rank saves first, although the executor ends at once."""
    term = 'os.kill(next(one.pid for one in psutil.Process().parents() if "java" in one.name()), signal.SIGTERM)'
    cell = STEPS.replace("import os", "import os, psutil").replace("time.sleep(0.01)", "time.sleep(0.1)")
    result = run(tasks, tmp_path, term, cell=cell)
    assert 18 <= result.values[0] < 40
    assert len(going(result.record)) >= 1
