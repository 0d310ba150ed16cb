"""Watches and ends a process and all processes that it has started, by means of the operating system.

On Linux a member becomes a child subreaper: when its rank ends, the processes that the rank started become the
member's children, so the member can find and kill them, even those that have called setsid(). On other systems, the
member kills only the rank's process group.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_LIMIT_S = 2.0
LINUX = sys.platform.startswith("linux")


def _prctl(option: int, value: int) -> None:
    if LINUX:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends. The child must call this right after the fork."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended, so the kernel will send no signal
        os._exit(1)


def descendants(root: int) -> list[int]:
    """Return the ids of the live descendants of process `root`, as found in /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            stat = _stat(int(name))
            if stat:
                children.setdefault(int(stat[1]), []).append(int(name))
                # A zombie is not returned, but its children are looked up: a process becomes a zombie when its main
                # thread ends, and keeps its children as long as another of its threads runs.
                if stat[0] in "ZX":
                    ended.add(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return [pid for pid in found if pid not in ended]


def state(pid: int) -> str:
    """Return the state of a process in words, or the kernel's letter for a state that has no words here."""
    stat = _stat(pid)
    if not stat:
        return "gone"
    words = {"R": "running", "S": "waiting", "D": "waiting for a device", "T": "frozen (SIGSTOP)"}
    return words.get(stat[0], {"t": "held by a debugger", "Z": "ended"}.get(stat[0], stat[0]))


def kill_family(rank_pid: int) -> None:
    """Kill the rank's process group and all descendants of this process. Repeat this until no descendant is left."""
    signal_group(rank_pid, signal.SIGKILL)
    # The children of a killed process become children of this process, so look for descendants again.
    deadline = time.monotonic() + _KILL_LIMIT_S
    while time.monotonic() < deadline:
        found = descendants(os.getpid())
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # the process has ended by itself, or belongs to another user (sudo)
        time.sleep(0.002)


def reap_all() -> None:
    """Reap all children that have ended.

    Otherwise process 1 would inherit them. In many containers it is not an init, and would leave them as zombies.
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


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fair_share(ranks: int) -> int:
    """Return how many threads each of `ranks` ranks on this machine may use."""
    return max(1, cores() // ranks)


def available_bytes() -> int:
    """Return how much memory new processes may use before this machine or container has none left; 0 if unknown."""
    try:
        with open("/proc/meminfo") as file:
            found = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
    group = "/sys/fs/cgroup/memory"
    try:
        with open(f"{group}.max") as limit, open(f"{group}.current") as used, open(f"{group}.stat") as stat:
            cached = next(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
            return min(found, int(limit.read()) - int(used.read()) + cached)
    except (OSError, ValueError, StopIteration):
        return found  # there is no limit


def ended(pidfd: int) -> bool:
    """Whether the process with this file descriptor has ended."""
    return bool(select.select([pidfd], [], [], 0.0)[0])


def resident_bytes() -> int:
    """Return how many bytes of this process are in RAM; 0 on a system without /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def out_of_memory_kills() -> int:
    """Return how many processes the kernel has killed in this process's control group because memory ran out.

    Return 0 if the kernel does not tell.
    """
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return 0
    paths = ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]
    for _, controllers, path in groups:
        if not controllers:
            paths.insert(0, f"/sys/fs/cgroup{path}/memory.events")
        elif "memory" in controllers.split(","):
            paths.insert(0, f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    for path in paths:
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except OSError:
            continue
    return 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the process's state on.

    The command's name comes before them, in parentheses. It may contain spaces and parentheses itself.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
