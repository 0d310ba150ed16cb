"""Ranks that fail: the error gives the cause, rank and line, and the other ranks are ended, on every launcher."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import psutil
import pytest
from rings import READY, ready
from texts import mentions

from sparkring.errors import MemberLost, RunFailed, RunTimeout
from sparkring.gangs.inbox import Inbox


def failed(ring, cell: str, n: int = 2, **options: Any) -> RunFailed:
    """Run a cell that must fail, and return its error."""
    with pytest.raises(RunFailed) as caught:
        ring.run(cell, n=n, **options)
    return caught.value


def on_rank_1(code: str) -> str:
    """Return a cell in which rank 1 runs `code`, which is line 4 of the cell, and rank 0 waits."""
    return f"import ctypes, os, resource, signal, sys, time\nif rank == 1:\n    {code}\nelse:\n    time.sleep(60)"


@pytest.mark.parametrize(
    ("code", "cause", "summary"),
    [
        ("os._exit(3)", "exit", "exited with code 3 before the cell ended"),
        ("os._exit(0)", "exit", "exited with code 0 before the cell ended"),
        ("sys.exit('no data')", "exit", "called sys.exit('no data')"),
        ("sys.exit(2)", "exit", "called sys.exit(2)"),
        ("ctypes.string_at(0)", "signal", "killed by SIGSEGV"),
        ("os.abort()", "signal", "killed by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal", "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "signal", "killed by SIGTERM"),
        ("resource.setrlimit(resource.RLIMIT_AS, (1 << 32,) * 2); bytearray(1 << 36)", "out of memory", "MemoryError"),
        ("raise ValueError('bad shape')", "exception", "ValueError: bad shape"),
        ("raise KeyboardInterrupt", "interrupt", "interrupted"),
    ],
)
def test_how_a_rank_can_end(ring, code, cause, summary):
    """Every way to end is reported with its cause and the right rank, and the other rank is ended."""
    error = failed(ring, on_rank_1(code))
    record = error.record
    assert record.failed_rank == 1
    assert (record.failure.cause, record.failure.summary) == (cause, summary)
    assert record.ranks[0].state == "stopped"
    assert record.outcome == "failed"
    assert str(error).startswith(f"rank 1 on {record.ranks[1].host} failed: {summary}")


@pytest.mark.parametrize("code", ["raise ValueError('bad shape')", "ctypes.string_at(0)", "sys.exit(2)"])
@pytest.mark.any_launcher
def test_the_line_of_the_cell_is_shown(ring, code):
    """The error shows the line that failed, numbered as in the notebook, even after a crash in native code."""
    text = str(failed(ring, on_rank_1(code)))
    assert "cell line 4" in text
    assert f"→ 4      {code}" in text


@pytest.mark.any_launcher
def test_last_lines_are_shown(ring):
    """The error shows the rank's last lines, and names the folder with the whole log."""
    error = failed(
        ring, "import os\nprint('reading part 7')\nif rank == 1:\n    os._exit(3)\nimport time\ntime.sleep(60)"
    )
    assert "reading part 7" in str(error)
    assert error.record.log_folder in str(error)


ODD_EXCEPTIONS = {
    "known only to the cell": ("class Odd(Exception): pass\nraise Odd('why')", "Odd: why"),
    "not picklable": (
        "import threading\nclass Odd(Exception):\n    def __init__(self): self.lock = threading.Lock()\nraise Odd()",
        "Odd",
    ),
    "its text raises": (
        "class Odd(Exception):\n    def __str__(self): raise RuntimeError\nraise Odd()",
        "Odd: (its message cannot be read: RuntimeError)",
    ),
    "asks for more than it is given": (
        "class Odd(Exception):\n    def __init__(self, a, b): super().__init__('short')\nraise Odd(1, 2)",
        "Odd: short",
    ),
}


@pytest.mark.parametrize("what", ODD_EXCEPTIONS)
@pytest.mark.any_launcher
def test_odd_exceptions(ring, what):
    """An exception is reported even if the driver does not know its class, or if it cannot be pickled or printed."""
    cell, summary = ODD_EXCEPTIONS[what]
    error = failed(ring, cell, n=1)
    assert error.record.failure.summary == summary
    assert f"cell line {len(cell.splitlines()) + 1}" in str(error)


@pytest.mark.any_launcher
def test_a_chain_of_exceptions(ring):
    """The traceback and the rank's log show the exception's cause, and neither shows frames of sparkring."""
    error = failed(
        ring, "try:\n    {}['key']\nexcept KeyError as missing:\n    raise ValueError('no key') from missing"
    )
    traceback = error.record.failure.traceback
    assert "KeyError: 'key'" in traceback
    assert "direct cause" in traceback
    assert "sparkring/worker" not in traceback
    assert "ValueError: no key" in (ring.view.record.ranks[0].tail or ring.view.record.ranks[1].tail)[-1].text


@pytest.mark.standalone("the notebook's source is not on the executors")
def test_an_error_in_a_function_of_the_notebook(ring, notebook_cell):
    """The error and the traceback show the failing line of the other cell, and the line that called the function."""
    name = "<ipython-input-7-0123456789ab>"
    namespace = notebook_cell("def train(x):\n    y = x - 1\n    return 1 / y  # slope\n", name)
    error = failed(ring, "a = 1\ntrain(a)", n=1, namespace=namespace)
    assert mentions(str(error), "line 3", "notebook cell", "in train")
    assert "→ 3      return 1 / y  # slope" in str(error)
    assert mentions(str(error), "called from", "cell line 3", "train(a)")
    assert f'File "{name}", line 3, in train\n    return 1 / y  # slope\n' in error.record.failure.traceback


@pytest.mark.any_launcher
def test_values_of_ranks_that_had_finished(ring):
    """The error has the values of the ranks that had already finished."""
    error = failed(ring, "import time\nif rank == 1:\n    time.sleep(1)\n    raise ValueError\nrank + 5")
    assert error.values == {0: 5}


@pytest.mark.slow
@pytest.mark.any_launcher
def test_ranks_that_echo_a_killed_one_are_folded(ring, spares):
    """If a rank is killed during an allreduce, the error names that rank, not the ranks that lost their peer."""
    error = failed(
        ring,
        """
        import os, signal, torch
        import horovod.torch as hvd
        hvd.init()
        for step in range(1000):
            if rank == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(torch.ones(10), name="x")
        """,
        n=3,
        framework="horovod",
    )
    assert error.record.failed_rank == 1
    assert error.record.failure.summary == "killed by SIGKILL"
    assert str(error).startswith("rank 1 on ")


@pytest.mark.slow
@pytest.mark.standalone("the executor says that its worker has died")
@pytest.mark.extended_on("spark", "test_a_lost_member_is_told, and restarts, kill a rank of the cluster")
def test_any_rank_killed_at_any_time(ring):
    """The error names the rank that was killed, whichever it is and whenever it is killed."""
    chance = random.Random(7)
    for _ in range(6 if ring.where == "local" else 5):
        victim, delay_s = chance.randrange(3), chance.uniform(0, 0.3)
        at: list[float] = []
        killed: list[int] = []

        def kill(record, victim=victim, delay_s=delay_s, at=at, killed=killed):
            if not at and all(rank.state == "running" for rank in record.ranks):
                at.append(time.monotonic() + delay_s)
            if at and not killed and time.monotonic() >= at[0]:
                killed.append(record.ranks[victim].pid)
                psutil.Process(killed[0]).kill()

        ring.view.on_refresh = kill
        error = failed(ring, "import time\nfor _ in range(1000):\n    print(rank)\n    time.sleep(0.1)", n=3)
        assert (error.record.failed_rank, error.record.failure.summary) == (victim, "killed by SIGKILL")


@pytest.mark.standalone("the executor says that its worker has died")
def test_a_lost_member_is_told(ring):
    """When a member (not its rank) is killed, its rank and what the rank has started end, and the rank is lost."""

    killed: list[psutil.Process] = []

    def kill(record):
        if not killed and ready(2)(record):
            killed.append(psutil.Process(record.ranks[1].pid).parent())
            killed[0].kill()

    ring.view.on_refresh = kill
    error = failed(ring, "import subprocess, time\nsubprocess.Popen(['sleep', '1000'])\nprint('ready')\ntime.sleep(60)")
    assert error.record.failed_rank == 1
    assert error.record.failure.cause == "lost"


@pytest.mark.standalone("the Python that does not start is the executors'")
def test_a_rank_that_cannot_start(ring):
    """If Python does not start, the error comes at once, with the exit code and advice on what to check."""
    with pytest.raises(MemberLost, match=r"ended with code 1|exited with code 1") as caught:
        ring.run("rank", env=(("PYTHONHOME", "/nowhere"),))
    assert f"Does `{sys.executable}` start" in str(caught.value) or ring.where == "standalone"


def test_a_rank_that_garbles_its_channel(local):
    """If a rank sends anything but messages, its member ends the rank, and the run fails instead of waiting."""
    with pytest.raises(RunFailed, match=r"lost on .*: .*connection .*process broke") as caught:
        local.run("""
            import time
            from sparkring.runtime import report
            if rank == 1:
                report._tell.__self__.home._sock.sendall(b"not a frame, but long enough to be one" * 9)
            time.sleep(1000)
        """)
    assert caught.value.record.failed_rank == 1
    assert "an invalid message" in caught.value.record.ranks[1].tail[-1].text


@pytest.mark.standalone("the job is cancelled on executors")
def test_timeout(ring, limit):
    """RunTimeout is also a TimeoutError, and says which line of the cell each rank had reached."""
    cell = f"import threading, time; {READY}\nif rank == 0:\n    time.sleep(600)\nelse:\n    time.sleep(601)"
    with pytest.raises(TimeoutError) as caught:
        ring.run(cell, timeout_s=limit(ring, ready(2)))
    assert isinstance(caught.value, RunTimeout)
    assert caught.value.record.outcome == "timed out"
    text = str(caught.value)
    assert mentions(text, "rank 0 waits", "line 4", "`time.sleep(600)`")
    assert mentions(text, "rank 1 waits", "line 6", "`time.sleep(601)`")


def test_a_frozen_rank_is_named_at_the_timeout(ring, limit):
    """A rank that was stopped by SIGSTOP is reported as frozen, and is still ended."""

    def frozen(record):
        pid = record.ranks[1].pid
        return pid and psutil.Process(pid).status() == psutil.STATUS_STOPPED

    with pytest.raises(RunTimeout, match="rank 1 is frozen"):
        ring.run(on_rank_1("os.kill(os.getpid(), signal.SIGSTOP)"), timeout_s=limit(ring, frozen))


@pytest.mark.standalone("it is ended by its executor's side")
def test_a_rank_that_takes_no_signals_is_ended(ring, limit):
    """Ranks that ignore SIGINT and SIGTERM are killed after the grace period."""
    cell = """
        import signal, time
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("ready")
        while True:
            time.sleep(1)
    """
    with pytest.raises(RunTimeout):
        ring.run(cell, timeout_s=limit(ring, ready(2)))


def test_a_timeout_before_the_ranks_are_up(ring, monkeypatch):
    """The message says how many ranks had connected, and nothing waits for ranks that never started."""
    monkeypatch.setattr(Inbox, "_read", lambda inbox, connection: inbox._closed.wait())  # no message is read
    with pytest.raises(RunTimeout, match=r"before .*ranks .*up: 0 of 2 ranks have connected"):
        ring.run("import time\ntime.sleep(60)", timeout_s=0.001)


def test_a_timeout_at_any_time(local):
    """At a timeout, the driver asks ranks for their current line. This does no harm, however early the timeout is."""
    for step in range(6):
        with pytest.raises(RunTimeout):
            local.run("import time\ntime.sleep(60)", timeout_s=0.05 * (step + 1))


@pytest.mark.standalone("executors and their workers are used again")
def test_the_next_run_is_not_harmed(ring):
    """After a failure, ranks start as if nothing had happened."""
    failed(ring, on_rank_1("os.kill(os.getpid(), signal.SIGKILL)"))
    assert ring.run("rank").values == [0, 1]


@pytest.mark.parametrize(
    ("module", "advice"),
    [("horovod.torch", "sparkring-build-horovod --install"), ("tensorflow", "pip install tensorflow")],
)
@pytest.mark.standalone("the framework is looked for in the executors' Python")
def test_a_framework_that_ranks_lack(ring, module, advice):
    """The error says which package is missing from which Python, and how to install it."""
    with pytest.raises(RunFailed, match=advice) as caught:
        ring.run(f"import sys\nsys.modules[{module.partition('.')[0]!r}] = None\nimport {module}")
    assert caught.value.record.failure.summary.startswith("ModuleNotFoundError")
