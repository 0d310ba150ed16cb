"""The owner of a folder: which process, on which host, and whether it still runs."""

from __future__ import annotations

import os
import socket
from typing import Any


def me() -> dict[str, Any]:
    """This process, as JSON values."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def has_ended(owner: dict[str, Any]) -> bool | None:
    """Whether the process that me() described has ended; None (unknown) if it ran on another host."""
    if owner["host"] != socket.gethostname():
        return None
    return bool(owner["started"] != _started(owner["pid"]))


def _started(pid: int) -> str:
    """When a process began, in clock ticks, to tell it from another with the same pid. '' if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "" if os.path.isdir("/proc/self") else _answers(pid)
    return "" if state in "ZX" else fields[18]


def _answers(pid: int) -> str:
    """'running', or '' if the process has ended; for systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass  # it belongs to another user
    return "running"
