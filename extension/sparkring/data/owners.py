"""Describes the process that owns a folder, and tells later whether that process has ended."""

from __future__ import annotations

import os
import socket
from typing import Any


def me() -> dict[str, Any]:
    """Return a description of this process in JSON values, for has_ended()."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def has_ended(owner: dict[str, Any]) -> bool | None:
    """Whether the process that me() described has ended. None means unknown: the process ran on another host."""
    if owner["host"] != socket.gethostname():
        return None
    return bool(owner["started"] != _started(owner["pid"]))


def _started(pid: int) -> str:
    """Return when the process `pid` began, in clock ticks, or '' if the process has ended.

    A later process may get the same pid, but it began at another time.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "" if os.path.isdir("/proc/self") else _answers(pid)
    return "" if state in "ZX" else fields[18]


def _answers(pid: int) -> str:
    """Return 'running', or '' if the process `pid` has ended. Used on systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass  # the process runs, but belongs to another user
    return "running"
