"""Rings under Spark's dynamic allocation: ordinary tasks on executors that come and go, and may not reach us."""

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

from sparkring.cluster.formation import COPY_SETTING

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
        import os, socket, time
        from pyspark import TaskContext
        meeting = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])  # importing torch would take much longer
        if rank == 0:
            with socket.create_server(meeting) as server:
                others = [server.accept()[0] for _ in range(size - 1)]
            total = 1 + sum(other.recv(1)[0] for other in others)
            for other in others:
                other.send(bytes([total]))
        else:
            while True:
                try:
                    zero = socket.create_connection(meeting)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            zero.send(bytes([rank + 1]))
            total = zero.recv(1)[0]
        total, TaskContext.get().attemptNumber()
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
def a_ring_that_cannot_reach_us():
    from sparkring.cluster.base import Address
    from sparkring.cluster.classic import Classic
    address, Classic.address = Classic.address, lambda self: Address("127.0.0.2", "127.0.0.1", 0)
    try:
        values = ring("rank, context.allGather(str(rank))", 1, "barrier")
        try:
            ring("rank", 2, "barrier")
        except SparkringError as error:
            return values, str(error)
    finally:
        Classic.address = address

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
    assert totals == (6,) * 3
    assert sorted(attempts) == [0, 0, 1]
    bases = [[0, 0, ["0", "1"], 2, "BarrierTaskContext"], [1, 0, ["0", "1"], 2, "BarrierTaskContext"]]
    assert found["copies_of_the_tasks"] == bases
    assert found["rows_of_a_frame"] == [[[0, 1, 2, 3], ["0", "1"]], [[4, 5, 6, 7], ["0", "1"]]]
    assert found["a_killed_rank"] == [[0, 1], 1]
    assert "cell line 4" in found["an_error"]
    assert found["a_stop"].startswith("KeyboardInterrupt")
    assert "spark.dynamicAllocation.maxExecutors=2" in found["too_many_ranks"]
    values, without_room = found["a_ring_that_cannot_reach_us"]
    assert values == [[0, ["0"]]]
    assert all(text in without_room for text in ("maxExecutors=2", COPY_SETTING, "Use -n 1")), without_room
    assert found["a_warm_gang"] == [[7, ["x"]]]


ONLY_SOME = "127.0.0.3"  # the executors on SHUT_OFF cannot connect to this address of the driver
SHUT_OFF = "127.0.0.2"
REFUSES = f"""
import errno, os, socket

connect = socket.create_connection
def create_connection(address, *arguments, **options):
    if address[0] in ({ONLY_SOME!r}, {ONLY_SOME.encode()!r}):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return connect(address, *arguments, **options)
socket.create_connection = create_connection
"""
REACHED = """
hosts = "import os\\nrank, context.allGather(str(rank)), 'SHUT_OFF' in os.environ"

@attempt
def a_ring():
    return ring(hosts, 3, "barrier")

@attempt
def a_second_ring():
    return ring(hosts, 2, "barrier")

@attempt
def items():
    import sparkring
    return list(sparkring.foreach(lambda item: item * 2, list(range(8)), np=3).values)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "dynamic", [False, pytest.param(True, marks=pytest.mark.extended("launcher", "tasks of a barrier stage"))]
)
def test_executors_that_cannot_all_connect(driver, workers_of_its_own, bare_python, tmp_path, dynamic):
    """If one executor cannot connect to the notebook, the messages of all ranks go through Spark jobs."""
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut" / "sitecustomize.py").write_text(REFUSES)
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nif grep -qa {SHUT_OFF} /proc/$PPID/cmdline; then\n"
        f'    export SHUT_OFF=1 PYTHONPATH={tmp_path / "shut"}:$PYTHONPATH\nfi\nexec {bare_python} "$@"\n'
    )
    python.chmod(0o755)
    settings = {
        "spark.sparkring.driver.host": ONLY_SOME,
        "spark.driver.bindAddress": "0.0.0.0",
        "spark.executor.memory": "600m",
        "spark.executor.cores": "2",
        "spark.cores.max": "4",
    }
    if dynamic:
        settings |= {
            "spark.dynamicAllocation.enabled": "true",
            "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        }
    with workers_of_its_own(count=1) as cluster:
        cluster.add(SHUT_OFF)
        script = driver(
            HELPERS
            + f"os.environ['PYSPARK_PYTHON'] = {str(python)!r}\n"
            + f"session = spark({cluster.url!r}, **{settings})\n"
            + ("" if dynamic else WAIT)
            + REACHED
            + "session.stop()\nprint('ANSWERS', json.dumps(answers))\n"
        )
        text = script.wait()
    found = answers(text)
    assert text.count("messages go through") == 1, text
    values = found["a_ring"]
    assert [value[:2] for value in values] == [[rank, list("012")] for rank in range(3)]
    assert {value[2] for value in values} == {False, True}
    assert [value[:2] for value in found["a_second_ring"]] == [[rank, list("01")] for rank in range(2)]
    assert found["items"] == [item * 2 for item in range(8)]


WAIT = """
while session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 3:
    time.sleep(0.05)
"""
