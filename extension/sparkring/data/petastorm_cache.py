"""The cache folders of converters: whose they are, and what killed kernels have left of them.

Petastorm removes a converter's folder when the process that made it ends by itself. So that the next one can remove
what a killed process has left, each folder says whose it is, in a file that Spark and Petastorm pass over.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from typing import Any

from sparkring.storage import Location, locate

OWNER = "_sparkring_owner.json"
_NAME = re.compile(r"\d{14}-appid-.+")  # as Petastorm calls them


def claim(cache_dir_url: str) -> None:
    """Say in the folder that this process has made it. Where that cannot be written, it is not said."""
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}
    with contextlib.suppress(Exception):  # each of fsspec's packages has its own errors
        folder = locate(cache_dir_url)
        folder.fs.pipe_file((folder / OWNER).path, json.dumps(owner).encode())


def remove_abandoned(parent_url: str) -> list[str]:
    """Remove the folders in there whose owner ran on this host and has ended. Returns their paths."""
    gone = []
    with contextlib.suppress(Exception):  # nothing depends on it; as above
        parent = locate(parent_url)
        for path in parent.fs.ls(parent.path, detail=False):
            folder = parent / os.path.basename(path.rstrip("/"))
            if _NAME.fullmatch(os.path.basename(folder.path)) and _abandoned(folder):
                folder.fs.rm(folder.path, recursive=True)
                gone.append(folder.path)
    return gone


def _abandoned(folder: Location) -> bool:
    owner = _owner(folder)
    return bool(owner) and owner["host"] == socket.gethostname() and owner["started"] != _started(owner["pid"])


def _owner(folder: Location) -> dict[str, Any]:
    try:
        return dict(json.loads(folder.fs.cat_file((folder / OWNER).path)))
    except (OSError, ValueError):  # Petastorm's own, or half-written: not ours to remove
        return {}


def _started(pid: int) -> str:
    """When a process began, as the kernel counts, so that a number that is used again is told apart; '' if it ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "" if os.path.isdir("/proc/self") else _answers(pid)
    return "" if state in "ZX" else fields[18]


def _answers(pid: int) -> str:
    """The same where there is no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass  # it is somebody else's
    return "running"
