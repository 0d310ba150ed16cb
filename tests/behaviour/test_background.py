"""Runs that the notebook does not wait for."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from texts import mentions

import sparkring
from sparkring.engine.run import api
from sparkring.engine.run import view as run_view
from sparkring.engine.run.options import Options
from sparkring.engine.run.spec import Cell, RunSpec
from sparkring.errors import CaptureError, CheckpointError, LaunchError, PathError, RunFailed, SlotsError, StillRunning
from sparkring.history.run_store import last, load, saved

# Runs until a file exists. The notebook's variable `go` is the file's path.
WAITS = """
import time
from pathlib import Path
print("up", flush=True)
while not Path(go).exists():
    time.sleep(0.05)
"""


@pytest.fixture
def go(tmp_path) -> Path:
    """The file that the ranks wait for."""
    return tmp_path / "go"


def up(run) -> bool:
    """Return whether every rank has printed something."""
    return all(rank.line_count for rank in run.record.ranks)


@pytest.mark.extended_on("spark", "test_a_barrier_stage_beside_the_notebooks_own_jobs")
def test_the_notebook_is_free_while_it_runs(ring, go, wait_until):
    """The run object is returned before the ranks have finished. Their values arrive later."""
    namespace = {"go": str(go)}
    run = ring.in_background(WAITS + "found = 40 + rank\nfound + 1", namespace=namespace, pull=("found",))
    wait_until(lambda: up(run), "both ranks are up")
    with pytest.raises(StillRunning, match=rf"run {run.run_id} .*not ended after 0.05 s.*2 running"):
        run.result(0.05)
    assert not run.done
    assert run.record.outcome is None
    assert "found" not in namespace
    go.touch()
    result = run.result()
    assert run.done
    assert result.values == [41, 42]
    assert namespace["found"] == 40
    assert sparkring.last_result is result
    assert run.result() is result
    assert run.record.outcome == "finished"
    assert ring.view.closed == 1
    assert load(saved()[0]).outcome == "finished"


@pytest.mark.any_launcher
def test_a_failure_is_told_and_kept(ring, capsys, wait_until):
    """The notebook prints one line about the failure; result() raises the error itself."""
    run = ring.in_background("if rank == 1:\n    raise ValueError('no')")
    told = ""

    def heard() -> str:
        nonlocal told
        told += capsys.readouterr().err
        return told

    wait_until(lambda: "\n" in heard(), "a line is told")
    assert re.fullmatch(rf"sparkring: run {run.run_id} \(test\) in the background: RunFailed: rank 1 .*\n", told)
    for _ in range(2):
        with pytest.raises(RunFailed, match="ValueError: no") as caught:
            run.result()
    assert caught.value.record.failed_rank == 1
    assert run.record.outcome == "failed"
    assert mentions(repr(run), "rank 1 failed", "ValueError", "no")


@pytest.mark.standalone("the job is cancelled on executors")
def test_stop_leaves_nothing(ring, wait_until):
    """When stop() returns, the run has ended as if it had been interrupted."""
    run = ring.in_background("import time\nprint('up', flush=True)\ntime.sleep(1000)")
    wait_until(lambda: up(run), "both ranks are up")
    run.stop()
    assert run.done
    assert (run.record.outcome, run.record.message) == ("interrupted", "2 ranks ended")
    assert [rank.state for rank in run.record.ranks] == ["stopped", "stopped"]
    with pytest.raises(KeyboardInterrupt, match="interrupted, 2 ranks ended"):
        run.result()
    run.stop()


@pytest.mark.standalone("the job is cancelled before executors have begun")
def test_stop_before_the_ranks_are_up(ring):
    run = ring.in_background("import time\ntime.sleep(1000)")
    run.stop(wait=False)
    with pytest.raises(KeyboardInterrupt):
        run.result()
    assert run.record.outcome == "interrupted"


@pytest.mark.extended_on("spark", "test_a_barrier_stage_beside_the_notebooks_own_jobs")
def test_several_at_once(ring, go, wait_until):
    """Two runs in the background and one in the foreground each have their own ranks, values and logs."""
    gates = [go.with_name(f"go-{index}") for index in range(2)]
    namespaces = [{"go": str(gate), "mine": index} for index, gate in enumerate(gates)]
    cell = WAITS + "print('this is', mine, flush=True)\nmine += 10\nmine"
    both = [ring.in_background(cell, 1, namespace=each, pull=("mine",)) for each in namespaces]
    wait_until(lambda: all(map(up, both)), "all ranks are up")
    here = ring.run("print('in front')\n'front'", 1)
    assert here.value == "front"
    assert not any(run.done for run in both)
    assert sparkring.last_result is here
    gates[1].touch()
    assert both[1].result().value == 11
    assert sparkring.last_result is both[1].result()
    assert not both[0].done
    gates[0].touch()
    assert both[0].result().value == 10
    assert [each["mine"] for each in namespaces] == [10, 11]
    assert [run.result().logs(0) for run in both] == ["up\nthis is 0\n", "up\nthis is 1\n"]
    assert len({here.record.run_id, *(run.run_id for run in both)}) == 3


@pytest.mark.slow
@pytest.mark.any_launcher
def test_two_rings_of_horovod(ring, spares):
    """Each run has its own rendezvous."""
    cell = """
        import torch
        import horovod.torch as hvd
        hvd.init()
        hvd.allreduce(torch.tensor([float(add + rank)]), op=hvd.Sum, name="total").item()
    """
    both = [ring.in_background(cell, namespace={"add": add}, framework="horovod") for add in (10, 20)]
    assert [run.result().values for run in both] == [[21.0] * 2, [41.0] * 2]


@pytest.mark.standalone("the cluster's scheduler shares out the slots")
def test_a_barrier_stage_beside_the_notebooks_own_jobs(tasks, spark, go, wait_until):
    """The barrier stage gets its rows, and Spark still has slots for the notebook's own jobs."""
    namespace = {"go": str(go), "digits": spark.range(6).repartition(2)}
    cell = WAITS + "context.barrier()\nsum(row.id for row in rows)"
    run = tasks.in_background(cell, 0, namespace=namespace, framework="barrier", data="digits")
    wait_until(lambda: up(run), "both ranks are up")
    assert spark.range(100).selectExpr("sum(id)").first()[0] == 4950
    assert not run.done
    go.touch()
    assert sum(run.result().values) == 15


def test_ranks_have_what_was_there_when_it_started(local):
    """The ranks get the values from before the start, even if the notebook changes its variables right afterwards."""
    namespace = {"x": np.ones(200_000), "y": [1]}
    run = local.in_background("x.sum(), y", 1, namespace=namespace)
    namespace["x"][:] = 7
    namespace["y"].append(2)
    assert run.result().value == (200_000.0, [1])


def test_lost_ranks_come_back(ring, tmp_path):
    """Lost ranks are restarted as in the foreground, with the arrays as they were when the run started."""
    namespace = {"first": str(tmp_path / "first"), "x": np.ones(200_000)}
    run = ring.in_background(
        """
        import os, signal
        from pathlib import Path
        if rank == 0 and not Path(first).exists():
            Path(first).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        x.sum()
        """,
        namespace=namespace,
        max_restarts=1,
    )
    namespace["x"][:] = 7
    assert run.result().values == [200_000.0, 200_000.0]
    assert [attempt.failed_rank for attempt in run.record.attempts] == [0, None]


def test_a_stop_between_two_attempts(local, monkeypatch, wait_until):
    monkeypatch.setattr("sparkring.engine.run.restarts.PAUSE_S", 1000.0)
    monkeypatch.setattr("sparkring.engine.run.restarts.LONGEST_PAUSE_S", 1000.0)
    run = local.in_background("import os\nos._exit(3)", max_restarts=1)
    wait_until(lambda: run.record.attempts and run.record.attempts[-1].ended, "the first attempt has ended")
    run.stop()
    assert (run.record.outcome, run.record.message) == ("interrupted", "between two attempts")


def test_two_runs_do_not_save_in_one_directory(local, go, tmp_path):
    """A second run in the same directory is refused, however the path is written.

    After the first run has ended, the next run continues from the first run's checkpoint.
    """
    cell = WAITS + "from sparkring import checkpoints\nstore = checkpoints()\nstate = {'step': 0}\n"
    cell += "begun = store.restore(state)\nstate['step'] = begun + 1\nstore.save(begun + 1, state)\nbegun"
    namespace, folder = {"go": str(go)}, tmp_path / "saved"
    run = local.in_background(cell, 1, namespace=namespace, checkpoint_dir=str(folder))
    for start in (local.run, local.in_background):
        with pytest.raises(CheckpointError, match=rf"use .*run {run.run_id}"):
            start(cell, 1, namespace=namespace, checkpoint_dir=f"file:{folder}/")
    go.touch()
    assert run.result().value == 0
    assert local.run(cell, 1, namespace=namespace, checkpoint_dir=str(folder)).value == 1


def test_what_is_wrong_beforehand_is_told_at_once(local):
    """The error is raised before a run is started."""
    with pytest.raises(CaptureError, match="reads `nobody`"):
        local.in_background("nobody")
    with pytest.raises(PathError, match="dbfs:/folder"):
        local.in_background("rank", checkpoint_dir="dbfs://folder")
    assert saved() == []


@pytest.mark.standalone("the slots are counted on the cluster")
def test_slots_that_are_not_there_are_told_at_once(tasks):
    with pytest.raises(SlotsError, match="needs 99 task slots"):
        tasks.in_background("rank", 99)
    assert saved() == []


def test_ranks_that_cannot_be_started(local, monkeypatch):
    """A failure to start the ranks ends the run."""
    monkeypatch.setattr("sparkring.launchers.local.sys.executable", "/no/such/python")
    run = local.in_background("rank")
    with pytest.raises(LaunchError, match="could not be started"):
        run.result()
    assert run.record.outcome == "failed"


def test_a_function_in_the_background():
    """sparkring.run() takes `background` as a keyword."""
    run = sparkring.run(lambda add: add + 1, np=-1, framework="plain", background=True, add=41)
    assert isinstance(run, sparkring.BackgroundRun)
    assert run.result().value == 42


@pytest.mark.parametrize("options", [{}, {"max_restarts": 1}], ids=["once", "again"])
@pytest.mark.extended_on("spark", "test_stop_leaves_nothing")
def test_stop_from_another_thread(ring, monkeypatch, options):
    """The `stop` control that a view is given ends a run as an interrupt does, even while the notebook is waiting."""
    before, stops = signal.getsignal(signal.SIGINT), []

    def open_view(*, quiet, controls, background):
        stops.append(controls.stop)
        return ring.view

    monkeypatch.setattr(run_view, "open_view", open_view)

    def press(record):
        if record.recent_count and stops:
            threading.Thread(target=stops.pop()).start()

    ring.view.on_refresh = press
    cell = "import time\nprint('up', flush=True)\ntime.sleep(1000)"
    np = ring.np(2)
    with pytest.raises(KeyboardInterrupt, match="interrupted, 2 ranks ended"):
        api.run_spec(RunSpec(Cell(cell, {}), Options(np=np, **options), "plain", "test", cell))
    assert ring.view.record.outcome == "interrupted"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.extended_on("spark", "test_interrupt_keeps_the_gang")
def test_stop_from_another_thread_keeps_a_warm_gang(shared_gang, monkeypatch):
    stops = []
    monkeypatch.setattr(
        run_view, "open_view", lambda *, quiet, controls, background: stops.append(controls.stop) or view
    )
    view = type(shared_gang.view)()
    view.on_refresh = lambda record: record.recent_count and stops and stops.pop()()
    cell = "import time\nprint('up', flush=True)\ntime.sleep(1000)"
    gang = shared_gang.gang
    with pytest.raises(KeyboardInterrupt, match="gang stays up"):
        api.run_spec(RunSpec(Cell(cell, {}), Options(np=gang.wanted.np), "plain", "test", cell, gang))
    assert shared_gang.values("rank") == [0, 1, 2]


# ── The end of the process ────────────────────────────────────────────────────────────────────────────────────────────

STARTED = """
{start}
def begin(source):
    options = Options(np={np}, background=True)
    return start_spec(RunSpec(Cell(chr(10) + source, {{}}), options, "plain", "test", source), view)
run = begin('import os, time; print("up", os.getpid(), flush=True); time.sleep(1000)')
"""
WHERE = [{"start": "", "np": -2}, {"start": "session = spark('local[2]')", "np": 2}]
ENDS = [
    pytest.param(WHERE[0], id="local"),
    pytest.param(WHERE[1], id="spark", marks=pytest.mark.extended("launcher", "test_interrupt_and_kill_on_spark")),
]


@pytest.mark.parametrize("where", ENDS)
def test_the_end_of_the_process_ends_it(driver, where):
    """The run ends silently, and its record says that it was interrupted."""
    script = STARTED.format(**where) + "while len(view.record.recent) < 2: time.sleep(0.02)\n"
    found = driver(script)
    text = found.wait()
    assert found.process.returncode == 0, text
    assert last(saved()[0]).outcome == "interrupted"


@pytest.mark.parametrize("where", ENDS)
def test_a_killed_process_takes_it_along(driver, where, wait_until):
    found = driver(STARTED.format(**where) + "run.result()\n")
    for rank in (0, 1):
        found.until_said(rf"^\[{rank}\] up \d+$")
    found.process.kill()
    found.wait()
    wait_until(lambda: not found.family(), "members, and Spark, have ended")


def test_an_interrupt_leaves_it_alone(driver):
    """Ctrl-C interrupts only what the main thread is doing, even if it is waiting for the run's result."""
    found = driver(
        STARTED.format(**WHERE[0])
        + """
front = Cell(chr(10) + 'import time; print("in front", flush=True); time.sleep(1000)', {})
front = RunSpec(front, Options(np=-1), "plain", "front", "")
for what in (lambda: time.sleep(1000), run.result, lambda: run_spec(front, View())):
    try:
        print("waiting", flush=True)
        what()
    except KeyboardInterrupt as error:
        print("KeyboardInterrupt:", error, flush=True)
print("still", run.record.outcome, [rank.state for rank in run.record.ranks], flush=True)
run.stop()
"""
    )
    for rank in (0, 1):
        found.until_said(rf"^\[{rank}\] up \d+$")
    for number in range(3):
        found.until_said(rf"(?s)(waiting.*){{{number + 1}}}")
        if number == 2:
            found.until_said(r"^\[0\] in front$")
        found.process.send_signal(signal.SIGINT)
        found.until_said(rf"(?s)(KeyboardInterrupt: .*){{{number + 1}}}")
    text = found.wait()
    assert mentions(text, "KeyboardInterrupt", "interrupted", "`%runs --stop")
    assert mentions(text, "KeyboardInterrupt", "interrupted", "1 rank ended")
    assert "still None ['running', 'running']" in text
