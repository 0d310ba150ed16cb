"""Rings under Spark's dynamic allocation: ordinary tasks on executors that come and go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from typing import Any

import psutil
import pytest
from waiting import until

SETTINGS = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.executorIdleTimeout": "3s",
    "spark.executor.cores": "2",
    "spark.executor.memory": "600m",
    # Spark starts a copy of a task that has run for a second, on another host.
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.task.duration.threshold": "1s",
}
HELPERS = """
import json, threading
from sparkring.errors import SparkringError

answers = {}
def attempt(function):
    try:
        answers[function.__name__] = function()
    except (SparkringError, KeyboardInterrupt) as error:
        answers[function.__name__] = f"{type(error).__name__}: {error}"

def ring(source, np, framework="plain", namespace=None, gang=None, **options):
    global view
    view = View()
    code = chr(10) + textwrap.dedent(source).strip()
    spec = RunSpec(Cell(code, namespace or {}), Options(np=np, **options), framework, "test", code, gang)
    return run_spec(spec, view).values
"""
RINGS = '''
@attempt
def from_no_executor():
    """The test kills a member while the others wait, and then starts the second worker."""
    return ring("""
        import torch, torch.distributed as dist
        from pyspark import TaskContext
        dist.init_process_group("gloo")
        total = torch.ones(1) * (rank + 1)
        dist.all_reduce(total)
        float(total), TaskContext.get().attemptNumber()
    """, 3, "torch")

@attempt
def copies_of_the_tasks():
    """The ranks go on when Spark is running more tasks than there are ranks."""
    tracker = session.sparkContext.statusTracker()
    def run():
        while sum(tracker.getStageInfo(number).numActiveTasks for number in tracker.getActiveStageIds()) < 4:
            time.sleep(0.05)
        open("copies", "w").close()
    threading.Thread(target=run, daemon=True).start()
    return ring("""
        import os, time
        while not os.path.exists(path):
            time.sleep(0.05)
        context.barrier()
        time.sleep(1.0)  # copies that failed would end the stage by now
        ids = context.allGather(str(context.partitionId()))
        rank, context.attemptNumber(), ids, len(context.getTaskInfos()), type(context).__mro__[1].__name__
    """, 2, "barrier", {"path": os.path.abspath("copies")})

@attempt
def rows_of_a_frame():
    frame = session.range(0, 8, 1, 2)
    return ring("[row.id for row in rows], context.allGather(str(rank))", 0, "barrier", {"df": frame}, data="df")

@attempt
def a_killed_rank():
    return ring("""
        import os
        if rank == 1 and not os.path.exists(path):
            open(path, "w").close()
            os.kill(os.getpid(), 9)
        rank
    """, 2, namespace={"path": os.path.abspath("killed")}, max_restarts=1), view.record.attempts[0].failed_rank

@attempt
def an_error():
    return ring("x = 1\\nif rank == 1:\\n    1 / 0", 2)

@attempt
def a_stop():
    return ring("import os, signal, time\\nif rank:\\n    os.kill(driver, signal.SIGINT)\\ntime.sleep(1000)", 2,
                namespace={"driver": os.getpid()})

@attempt
def too_many_ranks():
    return ring("rank", 5)

@attempt
def a_warm_gang():
    """Its executors stay, although no cell runs."""
    from sparkring.engine.run import warm_gang
    from sparkring.engine.run.options import GangOptions
    warm_gang.start(GangOptions(1, "barrier", 600.0, ()), print, print)
    ring("kept = 7", 1, "barrier", gang=warm_gang.find(1, print))
    time.sleep(4)  # longer than an executor may be idle
    values = ring("kept, context.allGather('x')", 1, "barrier", gang=warm_gang.find(1, print))
    warm_gang.stop()
    return values
'''


def answers(text: str) -> dict[str, Any]:
    assert "ANSWERS" in text, text
    found: dict[str, Any] = json.loads(text.rpartition("ANSWERS ")[2].splitlines()[0])
    return found


def members(workers: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the ids of the members that tasks on these workers have started. Their ranks are not among them."""
    parents = {}
    for worker in workers:
        for process in psutil.Process(worker.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                if process.cmdline()[-1:] == ["sparkring.worker.member.member"]:
                    parents[process.pid] = process.ppid()
    return [pid for pid, parent in parents.items() if parent not in parents]


@pytest.mark.slow
def test_rings_under_dynamic_allocation(driver, lonely_master):
    """Members come one by one. One that is lost before all are up is replaced; copies of tasks never become members."""
    lonely_master.add()
    script = driver(
        HELPERS
        + f"session = spark({lonely_master.url!r}, **{SETTINGS})\n"
        + "class View(View):\n    def refresh(self, record):\n        super().refresh(record)\n"
        + "        print('JOINED', record.joined, flush=True)\n"
        + RINGS
        + "session.stop()\nprint('ANSWERS', json.dumps(answers))\n"
    )
    script.until_said("JOINED 2")
    until(lambda: len(members(lonely_master.workers)) == 2, "two members run")
    os.kill(members(lonely_master.workers)[0], signal.SIGKILL)
    script.until_said("(?s)JOINED 2.*JOINED 1.*JOINED 2")
    lonely_master.add("127.0.0.2")
    found = answers(script.wait())
    totals, attempts = zip(*found["from_no_executor"], strict=True)
    assert totals == (6.0,) * 3
    assert sorted(attempts) == [0, 0, 1]
    bases = [[0, 0, ["0", "1"], 2, "BarrierTaskContext"], [1, 0, ["0", "1"], 2, "BarrierTaskContext"]]
    assert found["copies_of_the_tasks"] == bases
    assert found["rows_of_a_frame"] == [[[0, 1, 2, 3], ["0", "1"]], [[4, 5, 6, 7], ["0", "1"]]]
    assert found["a_killed_rank"] == [[0, 1], 1]
    assert "cell line 4" in found["an_error"]
    assert found["a_stop"].startswith("KeyboardInterrupt")
    assert "spark.dynamicAllocation.maxExecutors=2" in found["too_many_ranks"]
    assert found["a_warm_gang"] == [[7, ["x"]]]
