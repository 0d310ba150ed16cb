"""Finds and ends the processes that a process has started."""

from __future__ import annotations

import os
import signal


def descendants(root: int) -> list[int]:
    """Return the ids of the live descendants of process `root`; an empty list on a system without /proc."""
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    for pid in _all():
        if stat := stat_of(pid):
            children.setdefault(int(stat[1]), []).append(pid)
            # A zombie is not returned, but its children are: a process becomes a zombie when its main thread ends, and
            # keeps its children as long as another of its threads is running.
            if stat[0] in "ZX":
                ended.add(pid)
    family, queue = list[int](), [root]
    while queue:
        below = children.get(queue.pop(), [])
        family += below
        queue += below
    return [pid for pid in family if pid not in ended]


def kill_orphans(member: int) -> None:
    """Kill what a killed or unresponsive member has left: its descendants and the processes of its session.

    If the member has exited, only processes that have called setsid() are not found.
    """
    session = [pid for pid in _all() if (stat := stat_of(pid)) and int(stat[3]) == member != pid]
    for pid in [*descendants(member), *session]:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass  # the process has already exited, or belongs to another user (sudo)


def _all() -> list[int]:
    """Return the ids of all processes; an empty list on a system without /proc."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the process's state on.

    The command's name comes before them, in parentheses. This name may itself contain spaces and parentheses.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
