"""Tests of the spare processes of executors: which tasks they serve, and that forked ranks are like new processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from leaks import runs
from pyspark import SparkFiles
from spares import check_streams
from waiting import until

from sparkring.errors import LaunchError, RunFailed
from sparkring.launchers import executor_spares, spare
from sparkring.launchers.base import Code

AHEAD = "from sparkring.worker.rank import preloads; "
PANDAS = f"import pandas\n{AHEAD}preloads.ahead"
FORKED, NEW = ("pandas",), ()


@pytest.fixture
def spares(tasks, monkeypatch) -> Iterator[Callable[[], set[int]]]:
    """Spare processes are on. The value is a function that returns the ids of those that are running."""
    monkeypatch.setenv("SPARKRING_SPARE", "1")
    monkeypatch.setattr(executor_spares, "spares", executor_spares.ExecutorSpares())
    monkeypatch.setattr("sparkring.launchers.spark.executor_spares", executor_spares.spares)

    def running() -> set[int]:
        found = {each.pid: each for each in psutil.process_iter(["cmdline", "ppid"])}
        alike = {pid for pid, each in found.items() if "executor_spare" in str(each.info["cmdline"])}
        return {pid for pid in alike if found[pid].info["ppid"] not in alike}  # without forked members and ranks

    earlier = running()
    yield lambda: running() - earlier
    monkeypatch.setenv("SPARKRING_SPARE", "0")
    assert tasks.run(PANDAS, 1).value == NEW
    until(lambda: not running() - earlier, "no spare process is left when they are turned off")


def test_forked_ranks_are_like_new_processes(tasks, spares, monkeypatch):
    source = f"""
        import pandas, numpy, os, random, signal, sys, threading
        {AHEAD}
        environment = vars(os)["env" + "iron"]  # this name in a cell would mean new processes
        own = sorted(name for name in environment if name != "SPARKRING_TEST"), os.getcwd(), len(sys.path)
        own += threading.active_count(), signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGALRM)
        own += len(os.listdir("/proc/self/fd")), os.getsid(0) == os.getppid()
        preloads.ahead, own, random.random(), numpy.random.rand()
    """
    first = tasks.run(source, 2).values
    (pid,) = spares()
    again = tasks.run(source, 2).values
    assert spares() == {pid}, "it stays for the next launch, and each executor has one"
    monkeypatch.setattr(executor_spares, "wanted_by", lambda code: ())
    new = tasks.run(source, 2).values
    assert [value[0] for value in (*first, *again, *new)] == [FORKED] * 4 + [NEW] * 2
    assert len({str(value[1]) for value in (*first, *again, *new)}) == 1
    assert all(len(set(drawn)) == 4 for drawn in zip(*(value[2:] for value in (*first, *again)), strict=True))


def test_what_imports_bind_to_the_streams(tasks, spares, tmp_path, monkeypatch):
    check_streams(tasks, tmp_path, monkeypatch)


def test_the_ends_of_forked_ranks(tasks, spares):
    """Signals are reported as for new processes. The end of a spare process harms no rank."""
    with pytest.raises(RunFailed) as caught:
        tasks.run(f"import pandas, signal\n{AHEAD}signal.raise_signal(signal.SIGSEGV) if rank else preloads.ahead", 2)
    assert (caught.value.record.failed_rank, caught.value.record.failure.signal) == (1, "SIGSEGV")
    (pid,) = spares()
    kills = f"import pandas, time, signal\n{AHEAD}vars(__import__('os'))['kill']({pid}, 9) if rank else time.sleep(0.2)"
    assert tasks.run(f"{kills}\npreloads.ahead", 2).values == [FORKED] * 2
    until(lambda: not runs(pid), "the spare process has ended")
    assert tasks.run(PANDAS, 2).values == [FORKED] * 2
    assert len(spares() - {pid}) == 1


def test_forked_members_that_cannot_reach_the_driver(tasks, spares, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("sparkring.launchers.spark.driver_address", lambda context: ("127.0.0.2", "127.0.0.1", 0))
        with pytest.raises(LaunchError, match=r"cannot connect to the driver at 127\.0\.0\.2:\d+: Connection refused"):
            tasks.run(PANDAS, 2)
    assert len(spares()) == 1
    assert tasks.run(PANDAS, 2).values == [FORKED] * 2


def test_other_settings_and_code(tasks, spares, tmp_path, monkeypatch):
    """A launch with another environment gets another spare process. Code that may change it gets new processes."""
    assert tasks.run(PANDAS, 2).values == [FORKED] * 2
    before = spares()
    assert (
        tasks.run(f"{PANDAS}, vars(__import__('os'))['getenv']('HUE')", 2, env=(("HUE", "red"),)).values
        == [(FORKED, "red")] * 2
    )
    until(lambda: not before & spares(), "the first spare process has ended")
    assert len(spares()) == 1
    assert tasks.run(f"import os\nos.environ['HUE'] = '1'\n{PANDAS}", 1).value == NEW
    packages = tmp_path / "site-packages"
    packages.mkdir()
    starts = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (packages / "starts_a_thread.py").write_text(starts)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(spare, "FRAMEWORKS", spare.FRAMEWORKS | {"starts_a_thread"})
    env = (("PYTHONPATH", os.pathsep.join((str(packages), *sys.path))),)
    source = f"import starts_a_thread\n{AHEAD}preloads.ahead"
    assert tasks.run(source, 2, env=env).values == [NEW] * 2, "a fork would lack the thread"
    (refused,) = Path(SparkFiles.getRootDirectory()).glob(".sparkring-*/refused")
    written = refused.stat().st_mtime_ns
    assert tasks.run(source, 2, env=env).values == [NEW] * 2
    assert refused.stat().st_mtime_ns == written, "it is not tried again"
    assert not spares()
    refused.unlink()


def test_a_killed_task(tasks, spares):
    """Forked members watch the processes of their tasks, and not the spare process."""
    run = tasks.in_background(f"import pandas, time\n{AHEAD}print('up', preloads.ahead)\ntime.sleep(600)", 2)
    try:
        until(lambda: len([line for line in run.record.recent if "('pandas',)" in line.text]) == 2, "both ranks run")
        members = [psutil.Process(rank.pid).ppid() for rank in run.record.ranks]
        for pid in spares():
            os.kill(pid, signal.SIGKILL)
        assert all(map(runs, members))
        stdin = os.readlink(f"/proc/{members[0]}/fd/0")
        (task,) = (pid for pid in psutil.pids() if pid not in members and stdin in _descriptors(pid))
        os.kill(task, signal.SIGKILL)
        until(lambda: not any(map(runs, members)), "no member is left")
        with pytest.raises(RunFailed):
            run.result()
    finally:
        run.stop()


def _descriptors(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # the process has just exited, or belongs to another user
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def test_no_spare_process_for_other_folders(tasks, spares):
    """A folder that others can enter is not used."""
    folder = Path(SparkFiles.getRootDirectory(), f".sparkring-{executor_spares.spares._key}")
    folder.mkdir(mode=0o755)
    try:
        assert tasks.run(PANDAS, 1).value == NEW
    finally:
        folder.rmdir()


def test_orders(monkeypatch):
    monkeypatch.setenv("SPARKRING_SPARE", "1")
    new = executor_spares.ExecutorSpares()
    code = Code([], {"B": "2"}, ["pandas"], {"A": None})
    assert new.order(None, {}) is None, "a warm gang"
    found = new.order(code, {"C": "3"})
    assert found is not None
    assert (found.modules, found.environments) == (("pandas",), [{"C": "3"}, {"A": None}, {"B": "2"}])
    new.note_changes(True)
    assert new.order(code, {}) is None
    monkeypatch.setenv("SPARKRING_SPARE", "0")
    off = new.order(code, {})
    assert off is not None
    assert (off.key, off.modules) == (found.key, ()), "spare processes are told to exit, once"
    assert new.order(code, {}) is None
    assert tempfile.gettempdir() not in off.key
