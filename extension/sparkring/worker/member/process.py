"""Watches and ends a process and all processes that it has started.

On Linux, a member is a child subreaper: when its rank exits, the processes that the rank has started become the
member's children. The member can then find and kill them, even if they have called setsid(). On other systems, the
member kills only the rank's process group.
"""

from __future__ import annotations

import functools
import itertools
import os
import select
import signal
import sys
import time
from typing import Literal, NamedTuple

from sparkring.executor.processes import descendants, stat_of
from sparkring.runtime import limits

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_LIMIT_S = 2.0
LINUX = sys.platform.startswith("linux")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _prctl(option: int, value: int) -> None:
    if LINUX:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent exits."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` exits. The child must call this right after the fork."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already exited, so the kernel will send no signal
        os._exit(1)


def family(root: int) -> list[int]:
    """Return the descendants of `root`: like descendants(), but faster if the kernel lists the children of threads.

    Descendants that have just been forked or have just lost their parent may be missing, and zombies may be included.
    """
    pids: list[int] = []
    try:
        for parent in itertools.chain([root], pids):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    pids += map(int, file.read().split())
    except OSError:  # a process or a thread has just ended, or this kernel does not list children
        return descendants(root)
    return pids


def state(pid: int) -> str:
    """Describe the state of a process in words. For a rare state, return the kernel's letter."""
    stat = stat_of(pid)
    if not stat:
        return "gone"
    words = {"R": "running", "S": "waiting", "D": "waiting for a device", "T": "frozen (SIGSTOP)"}
    return {**words, "t": "held by a debugger", "Z": "ended"}.get(stat[0], stat[0])


def program(pid: int) -> str:
    """Return the file name of the program that a process runs; '' if it is not known."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return os.path.basename(file.read(4096).partition(b"\0")[0].decode("utf-8", "replace"))
    except OSError:
        return ""


def kill_family(rank_pid: int) -> None:
    """Kill the rank's process group, and then all descendants of this process, until none is left."""
    signal_group(rank_pid, signal.SIGKILL)
    # The children of a killed process become children of this process, so look for descendants again.
    deadline = time.monotonic() + _KILL_LIMIT_S
    while time.monotonic() < deadline:
        pids = descendants(os.getpid())
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # the process has already exited, or belongs to another user (sudo)
        time.sleep(0.002)


def reap_all() -> None:
    """Reap all children that have exited.

    Otherwise, process 1 would inherit these zombies. In many containers, process 1 is not an init system, and would
    never reap them.
    """
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # no child is left


def signal_group(pid: int, number: int) -> None:
    """Send signal `number` to the process group `pid`, if the group still exists."""
    try:
        os.killpg(pid, number)
    except OSError:
        pass  # the group has ended


class Memory(NamedTuple):
    """How many bytes of a process are in RAM: `own` memory, `shared` memory (memfd, /dev/shm), and mapped `files`.

    `peak` is the highest sum of the three so far. Some of the `own` memory may still be shared with the process that
    forked this one.
    """

    own: int = 0
    shared: int = 0
    files: int = 0
    peak: int = 0


def memory(pid: int) -> Memory:
    """Return how much memory a process holds; zeros if it has exited, or on a system without /proc."""
    counts = _numbers(f"/proc/{pid}/status")
    return Memory(*(counts.get(name, 0) * 1024 for name in ("RssAnon:", "RssShmem:", "RssFile:", "VmHWM:")))


def private_bytes(pid: int) -> int:
    """Return how much memory a process has written to and does not share with any other process."""
    return _numbers(f"/proc/{pid}/smaps_rollup").get("Private_Dirty:", 0) * 1024


def inherited_bytes() -> int:
    """Return how much of its own memory this process shares with the one that forked it, or with forked children."""
    return _numbers("/proc/self/smaps_rollup").get("Shared_Dirty:", 0) * 1024


def cpu_seconds(pid: int) -> float:
    """Return how much CPU time a process and its exited children have used."""
    stat = stat_of(pid)
    return sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK") if stat else 0.0


def read_bytes(who: Literal["self", "thread-self"] = "self") -> int:
    """Return how many bytes this process and its exited children have read; 0 on a system without /proc.

    If `who` is "thread-self", count only what this thread has read.
    """
    return _numbers(f"/proc/{who}/io").get("rchar:", 0)


def fair_share(ranks: int) -> int:
    """Return how many threads each of `ranks` ranks on this machine may use."""
    return max(1, limits.cores() // ranks)


def ended(pidfd: int) -> bool:
    """Return whether the process that `pidfd` refers to has exited."""
    return bool(select.select([pidfd], [], [], 0.0)[0])


class Resident:
    """Reads how many bytes of this process are in RAM.

    The file in /proc is kept open, because it is read for every item, and items may be short.
    """

    def __init__(self) -> None:
        self._file = -1

    def bytes(self) -> int:
        """Return the number of bytes; 0 on a system without /proc."""
        try:
            if self._file < 0:
                self._file = os.open("/proc/self/statm", os.O_RDONLY)
            return int(os.pread(self._file, 256, 0).split()[1]) * _PAGE_BYTES
        except (OSError, ValueError, IndexError):  # there is no /proc, or the user's code has closed the file
            self._file = -1
            return 0


def out_of_memory_kills() -> int:
    """Return how many processes in this process's control group the kernel has killed because memory ran out."""
    return _numbers(_kills_file()).get("oom_kill", 0)


@functools.cache  # the number is read for every item, and items may be short
def _kills_file() -> str:
    """Return the file that counts the processes in this process's control group that were killed; '' if none does."""
    names = {1: "memory.oom_control", 2: "memory.events"}
    files = (f"{folder}/{names[version]}" for version, folder in limits.control_groups("memory"))
    return next((file for file in files if "oom_kill" in _numbers(file)), "")


def available_bytes() -> int:
    """Return how much more memory processes can use; 0 on a system without /proc.

    The machine and this process's control groups have limits. The lowest limit counts.
    """
    free = _numbers("/proc/meminfo").get("MemAvailable:", 0) * 1024
    for version, folder in limits.control_groups("memory"):
        names = ("max", "current", "inactive_file") if version == 2 else ("limit", "usage", "total_inactive_file")
        limit, used = (_number(f"{folder}/memory.{name}{'' if version == 2 else '_in_bytes'}") for name in names[:2])
        if limit is not None and used is not None:
            cached = _numbers(f"{folder}/memory.stat").get(names[2], 0)  # the kernel drops this when memory runs short
            free = min(free, max(0, limit - used + cached))
    return free


def total_bytes() -> int:
    """Return how much memory the machine has, or this process's control groups allow; 0 on a system without /proc."""
    total = _numbers("/proc/meminfo").get("MemTotal:", 0) * 1024
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    allowed = (_number(f"{folder}/{names[version]}") for version, folder in limits.control_groups("memory"))
    return min([total, *(limit for limit in allowed if limit is not None)])


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):  # the file of a group without a limit says "max"
        return None


def _numbers(path: str) -> dict[str, int]:
    """Return the numbers in a kernel file with lines like `name 12` or `name: 12 kB`, by name."""
    try:
        with open(path) as file:
            words = [line.split() for line in file]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
