"""Checks that every test leaves nothing behind: no process, thread, listening socket, descriptor or temp folder."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import resource
import signal
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from waiting import PACE

from sparkring.engine.predictions import queries
from sparkring.engine.run import background
from sparkring.history import compression
from sparkring.launchers import tunnel

MARK = "SPARKRING_TEST"  # in the environment of every process that a test starts, and so in /proc
# What libraries leave open: matplotlib, the fonts that it has drawn with; TensorFlow, /proc/PID/cmdline, and the device
# from which it once drew a random number.
KEPT_OPEN = re.compile(r"/mpl-data/fonts/|^/proc/\d+/cmdline$|^/dev/u?random$")
SETTLE_S = PACE  # what still exists after this time counts as left behind


class Traces(NamedTuple):
    """The descendants of this process, and its threads, descriptors and folders, at one moment."""

    children: set[int]
    threads: set[int]
    descriptors: Counter[str]
    folders: set[str]

    def beside(self, other: Traces) -> Traces:
        """Return the traces that are not among the other ones."""
        return Traces(
            self.children - other.children,
            self.threads - other.threads,
            self.descriptors - other.descriptors,
            self.folders - other.folders,
        )

    def and_also(self, other: Traces) -> Traces:
        return Traces(
            self.children | other.children,
            self.threads | other.threads,
            self.descriptors + other.descriptors,
            self.folders | other.folders,
        )


def family(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the pids of the processes and of all their descendants that are alive."""
    found: set[int] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {process.pid, *(below.pid for below in process.children(recursive=True))}
    return found


class Lasting:
    """Processes and connections that outlive a test on purpose: those of Spark's JVM and of the cluster."""

    def __init__(self) -> None:
        self.processes: list[psutil.Process] = []
        # Ports between the session and the JVM. py4j has a connection for each thread; the server of accumulators has
        # a single connection.
        self.ports: set[int] = set()
        # The sockets that were connected to these ports. A socket loses its port when the JVM closes the connection.
        self.sockets: set[str] = set()

    def pids(self) -> set[int]:
        return family(self.processes)


lasting = Lasting()


@pytest.fixture(scope="session")
def lasting_processes() -> list[psutil.Process]:
    """Processes that fixtures have added. They and their descendants do not count as left behind."""
    return lasting.processes


def _has_children() -> bool:
    """Return whether this process has any child, dead or alive. This one system call is faster than a search."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _reaped() -> int:
    """Return the page faults of children that have been waited for. The number grows when a child is waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _children() -> set[int]:
    """Return the living descendants of this process that may not outlive a test, and its own zombie children."""
    lasting_pids = {process.pid for process in lasting.processes if process.is_running()}
    found: set[int] = set()
    for child in psutil.Process().children(recursive=True):  # each child comes after its parent
        with contextlib.suppress(psutil.NoSuchProcess):
            parent, is_zombie = child.ppid(), child.status() == psutil.STATUS_ZOMBIE
            if parent in lasting_pids:
                lasting_pids.add(child.pid)
            if parent == os.getpid() if is_zombie else child.pid not in lasting_pids:
                found.add(child.pid)
    return found


def traces() -> Traces:
    """Return everything that exists now and that a test could have left behind."""
    connections = psutil.Process().net_connections("inet") if lasting.ports else ()
    to_spark = {c.fd for c in connections if c.raddr and {c.raddr.port, c.laddr.port} & lasting.ports}
    descriptors: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed again
            target = os.readlink(f"/proc/self/fd/{name}")
            if int(name) in to_spark:
                lasting.sockets.add(target)
            # A socket is identified by its number, since its address changes when the other end closes it.
            if target not in lasting.sockets and not KEPT_OPEN.search(target):
                descriptors[re.sub(r"\d+", "N", target) if target.startswith("pipe:") else target] += 1
    return Traces(
        _children() if _has_children() else set(),
        {thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith("sparkring-")},
        descriptors,
        {str(path) for path in Path(tempfile.gettempdir()).glob("sparkring-*")},
    )


def _where_it_leads(descriptor: str) -> str:
    """Describe a descriptor for the reader of a failed test."""
    for connection in psutil.Process().net_connections("inet"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{connection.fd}") == descriptor:
                other = f"to {connection.raddr.port}" if connection.raddr else f"at {connection.laddr.port}"
                return f"{descriptor}: {connection.status} {other}"
    return descriptor


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def runs(pid: int) -> bool:
    """Return whether the process exists, and is not a zombie."""
    try:
        return _status(psutil.Process(pid)) != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def every_pid() -> set[int]:
    """Return the pids of all processes on this machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def marked(mark: str, except_for: Collection[int] = ()) -> set[int]:
    """Return all processes on this machine that inherited `mark`, even a rank's grandchild that called setsid."""
    found = set()
    for pid in every_pid().difference(except_for, {os.getpid()}):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def told(pids: set[int] | list[int]) -> list[str]:
    """Describe processes for the reader of a failed test."""
    lines = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            status = process.status()  # a zombie has no command line, only a name
            command = process.name() if status == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
            lines.append(f"{pid} ({status}, parent {process.ppid()}): {command[:120]}")
    return lines


@dataclass
class Watch:
    """The state that the test must leave as it found it."""

    mark: str
    before: Traces = field(default_factory=traces)
    # Processes that the test starts get other pids: Linux assigns pids in turn, and a test starts too few to reuse any.
    earlier: set[int] = field(default_factory=every_pid)
    idle: int | None = field(default_factory=lambda: None if _has_children() else _reaped())

    def started_a_process(self) -> bool:
        """Return whether the test may have started a process. If not, there is no need to search all of /proc."""
        return self.idle is None or _has_children() or _reaped() != self.idle

    def except_for(self, start: Callable[[], Any]) -> Any:
        """Run `start`, whose traces may stay after the test (for example, Spark)."""
        mark = os.environ.pop(MARK, None)
        earlier = traces()
        try:
            return start()
        finally:
            self.before = self.before.and_also(traces().beside(earlier))
            if mark is not None:
                os.environ[MARK] = mark

    def complaints(self, settle_s: float) -> dict[str, list[str]]:
        """Wait up to `settle_s` for traces to go, and return what the test has left behind, by kind."""
        deadline = time.monotonic() + settle_s
        # Garbage does not count as left behind. Young objects are collected first: all of TensorFlow's take a second.
        for generation in itertools.chain([1], itertools.repeat(2)):
            left = traces().beside(self.before)
            marks = marked(self.mark, self.earlier) if self.started_a_process() else set()
            if marks:
                marks -= lasting.pids()
            if not (marks or any(left)) or time.monotonic() >= deadline:
                break
            gc.collect(generation)
            time.sleep(0.05)  # what is just being opened or closed does not count, either
        found = {
            "processes": told(left.children | marks),
            "threads": [thread.name for thread in threading.enumerate() if thread.ident in left.threads],
            "sockets and other descriptors": sorted(map(_where_it_leads, left.descriptors.elements())),
            "temp folders": sorted(left.folders),
        }
        return {kind: names for kind, names in found.items() if names}


@pytest.fixture(autouse=True)
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Fails a test that leaves a process, thread, listening socket, descriptor or temp folder behind."""
    monkeypatch.setenv("SPARKRING_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    found = Watch(os.environ[MARK])
    yield found
    background.stop_all()
    queries.close()
    for thread in threading.enumerate():
        # These end by themselves: when the logs of a large run are compressed, and when the relay has heard of the end.
        if thread.name in (compression.THREAD, tunnel.END_THREAD):
            thread.join(60 * PACE)
    complaints = found.complaints(SETTLE_S)
    for pid in marked(found.mark) if "processes" in complaints else ():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not complaints, f"left behind: {complaints}"
