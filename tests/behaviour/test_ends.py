"""Runs that are ended from outside: an interrupt, a killed kernel, a full disk. Fifty runs leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from texts import mentions

from sparkring.errors import RunFailed
from sparkring.executor.processes import descendants
from sparkring.gangs.members import Members

WAITING = """
{start}
for _ in range({cells}):
    try:
        run('''
            import os, subprocess, time
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            print("up", os.getpid(), child.pid, flush=True)
            time.sleep(1000)
        ''', {np})
    except KeyboardInterrupt as error:
        print("KeyboardInterrupt:", error)
        print("states:", *(rank.state for rank in view.record.ranks), flush=True)
"""
LOCAL = {"start": "", "np": -2, "cells": 1}
ON_SPARK = {"start": "session = spark('local[2]')", "np": 2, "cells": 2}


def pids_of(found, after: str = "") -> list[int]:
    """Wait for `after` in the output and for both ranks. Return the pids of the ranks and of their children."""
    pids = []
    for rank in (0, 1):
        pids += map(int, found.until_said(rf"(?s){after}.*^\[{rank}\] up (\d+) (\d+)$").groups())
    assert all(psutil.pid_exists(pid) for pid in pids)
    return pids


def started(driver) -> tuple:
    """Return a driver whose two ranks on this machine are up, and the pids of the ranks and of their children."""
    found = driver(WAITING.format(**LOCAL))
    return found, pids_of(found)


def alive(pids) -> list[int]:
    """Return the processes among `pids` that are still running."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


def test_interrupt(driver):
    """Stop raises a KeyboardInterrupt that says how many ranks were ended, and leaves no process."""
    found, pids = started(driver)
    found.process.send_signal(signal.SIGINT)
    text = found.wait()
    assert mentions(text, "KeyboardInterrupt", "interrupted", "2 ranks ended")
    assert "states: stopped stopped" in text
    assert found.process.returncode == 0, text
    assert not alive(pids)


def test_an_interrupt_does_not_wait_for_a_thread_that_hangs(driver):
    """A rank that handles Stop but then cannot end is given only as much time as an interrupt allows."""
    found = driver("""
        try:
            run('import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start(); '
                'print("up", flush=True); time.sleep(1000)', -2)
        except KeyboardInterrupt:
            print("NOTICES:", *(notice.text for notice in view.record.notices))
    """)
    for rank in (0, 1):
        found.until_said(rf"^\[{rank}\] up$")
    found.process.send_signal(signal.SIGINT)
    assert mentions(found.wait(), "not", "within 1", "ended")


def test_interrupts_that_repeat(driver):
    """Pressing Stop again and again does not change how the run ends."""
    found, pids = started(driver)
    for _ in range(5):
        found.process.send_signal(signal.SIGINT)
    text = found.wait()
    assert "KeyboardInterrupt" in text
    assert not alive(pids)


def test_an_interrupt_while_a_rank_reports(local):
    """The report is sent completely before the cell's own signal handler gets the interrupt."""
    found = local.run(
        """
        import os, signal, threading, time
        import sparkring
        told = interrupts = 0
        reports = False

        def interrupted(number, frame):
            global reports
            if reports:
                reports = False
                raise KeyboardInterrupt

        def interrupt():
            while interrupts < 300:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.0002)

        signal.signal(signal.SIGINT, interrupted)
        threading.Thread(target=interrupt, daemon=True).start()
        while interrupts < 300:
            told += 1
            try:
                reports = True
                sparkring.log(step=told, loss=1.0)
                reports = False
            except KeyboardInterrupt:
                interrupts += 1
        interrupts
        """,
        n=1,
    )
    assert found.values == [300]


def test_an_interrupt_at_any_time(driver):
    """Stop raises KeyboardInterrupt at any moment of a launch, and leaves no process, thread or descriptor."""
    text = driver("""
        import threading, psutil
        View.refresh = View.close = lambda self, record: None
        run("rank", -2)
        before = psutil.Process().num_fds()
        caught = 0
        for step in range(8):
            stop = threading.Timer(0.045 * (step + 1), os.kill, (os.getpid(), signal.SIGINT))
            stop.start()
            try:
                run("import time; time.sleep(1000)", -2)
            except KeyboardInterrupt:
                caught += 1
            stop.join()
        left = [psutil.Process().num_fds() - before, threading.active_count() - 1, len(psutil.Process().children())]
        print("CAUGHT", caught, left)
    """).wait()
    assert "CAUGHT 8 [0, 0, 0]" in text, text


def test_a_killed_driver_takes_everything_with_it(driver, wait_until):
    """After kill -9, no rank and no grandchild survives, not even one that called setsid."""
    for _ in range(2):
        found, pids = started(driver)
        found.process.kill()
        found.wait()
        wait_until(lambda pids=pids: not alive(pids), f"ranks and what they started have ended: {pids}")
        wait_until(lambda found=found: not found.family(), "members have ended")


def test_interrupt_and_kill_on_spark(driver, wait_until):
    """Stop ends Spark's tasks, and the session can run the next cell. After kill -9 of the driver, nothing is left."""
    found = driver(WAITING.format(**ON_SPARK))
    pids = pids_of(found)
    found.process.send_signal(signal.SIGINT)
    found.until_said("^states: stopped stopped$")
    assert mentions(found.text, "KeyboardInterrupt", "interrupted", "2 ranks ended")
    assert not alive(pids)
    pids = pids_of(found, "^states: stopped stopped$")
    found.process.kill()
    found.wait()
    wait_until(lambda: not alive(pids), f"ranks and what they started have ended: {pids}")
    wait_until(lambda: not found.family(), "members, and Spark, have ended")


def test_descendants_of_a_process_whose_main_thread_has_ended(watch, wait_until):
    """The process looks like a zombie but still has children. They are found, so that they can be killed."""
    script = """
import ctypes, subprocess, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
ctypes.CDLL("libc.so.6").pthread_exit(None)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        wait_until(lambda: psutil.Process(parent.pid).status() == psutil.STATUS_ZOMBIE, "the main thread has ended")
        assert child.pid in descendants(os.getpid())
    finally:
        child.kill()
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_a_full_disk_does_not_end_the_run(driver):
    """When the logs can no longer be written, a notice says so, and the run still returns its value."""
    text = driver("""
        import resource, signal
        View.refresh = View.close = lambda self, record: None  # the size limit would also apply to what the view prints
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        result = run("for i in range(20_000): print('a line of some length', i)\\nrank", -2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        print("VALUES", result.values, [rank.line_count for rank in result.record.ranks])
        print("NOTICE", [notice.text for notice in result.record.notices])
    """).wait()
    assert "VALUES [0, 1] [20000, 20000]" in text
    assert mentions(text, "NOTICE [", "logs end here", "File too large"), text[-500:]


@pytest.mark.slow
@pytest.mark.extended("repetition", "test_hundreds_of_cells_leave_nothing")
def test_fifty_launches_leave_nothing(driver):
    """Descriptors, threads, processes and temporary folders are as before; memory has grown by less than 10 MB."""
    text = driver("""
        import gc, json, tempfile, threading, psutil
        from pathlib import Path

        def state():
            gc.collect()
            me = psutil.Process()
            return [me.num_fds(), threading.active_count(), len(me.children(recursive=True)),
                    len(list(Path(tempfile.gettempdir()).glob("sparkring-*"))), me.memory_info().rss]

        for _ in range(3):
            run("rank", -2)
        before = state()
        for _ in range(50):
            assert run("rank", -2).values == [0, 1]
        print("STATES", json.dumps([before, state()]))
    """).wait()
    assert "STATES" in text, text
    before, after = json.loads(text.rpartition("STATES")[2])
    assert after[:4] == before[:4]
    assert after[4] - before[4] < 10e6, f"{(after[4] - before[4]) / 1e6:.1f} MB"


def test_a_member_that_falls_silent(local, monkeypatch):
    """A member that sends nothing but stays connected, because it is frozen or its host is gone, counts as lost.

    What its rank has started is ended, too.
    """
    silences = Members.silences

    def as_an_hour_later(members):
        """Make the frozen member's silence seem an hour longer."""
        found = silences(members)
        for member in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank = psutil.Process(members.hellos[member].pid)
                if psutil.Process(rank.ppid()).status() == psutil.STATUS_STOPPED:
                    found[member] += 3600.0
        return found

    monkeypatch.setattr(Members, "silences", as_an_hour_later)
    with pytest.raises(RunFailed, match=r"lost on .*: no message .*process") as caught:
        local.run("""
            import os, signal, subprocess, time
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            if rank == 1:
                os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(1000)
        """)
    assert caught.value.record.failed_rank == 1
    assert caught.value.record.failure.cause == "lost"
