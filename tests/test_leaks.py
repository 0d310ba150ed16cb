"""Tests of the Watch that checks every test for leaks: what it notices, and when it need not search."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from leaks import MARK, Watch

DAEMON = """
import os, subprocess
null = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=null, stderr=null).pid)
"""


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Return a Watch like that of every test, which begins now."""
    monkeypatch.setenv(MARK, f"of a test of the watch in {os.getpid()}")
    found = Watch(os.environ[MARK])
    assert not found.complaints(0)
    yield found
    assert not found.complaints(1)


def test_processes_are_noticed(again: Watch) -> None:
    """The Watch notices a child that is running, and a child that has ended but was not waited for."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        (told,) = again.complaints(0)["processes"]
        assert told.startswith(f"{child.pid} ")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert "zombie" in again.complaints(0)["processes"][0]


def test_a_process_that_belongs_to_nobody_is_noticed(again: Watch) -> None:
    """The Watch notices a process in a session of its own whose parent has ended."""
    pid = int(subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, check=True).stdout)
    (told,) = again.complaints(0)["processes"]
    os.kill(pid, signal.SIGKILL)
    assert told.startswith(f"{pid} ")


def test_what_is_no_process_is_noticed(again: Watch) -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="sparkring-left")
    thread.start()
    with tempfile.TemporaryDirectory(prefix="sparkring-left-") as folder, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with (Path(folder) / "file").open("w") as file:
            found = again.complaints(0)
    go.set()
    thread.join()
    assert set(found) == {"threads", "sockets and other descriptors", "temp folders"}
    assert found["threads"] == ["sparkring-left"]
    assert found["temp folders"] == [folder]
    opened, socket_ = found["sockets and other descriptors"]
    assert opened == file.name
    assert socket_.endswith(f"LISTEN at {port}")


def test_a_test_that_starts_no_process_is_not_searched_for_any() -> None:
    """The check runs in a process of its own, because the test worker may have children, such as a Spark session."""
    script = """
        import subprocess
        from leaks import Watch
        watch = Watch("a mark")
        print(watch.started_a_process())
        subprocess.run(["true"], check=True)
        print(watch.started_a_process())
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["False", "True"]
