"""Handles the folders that sparkring writes: lists them, accesses their JSON files, and identifies their writers."""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from sparkring.errors import DataError
from sparkring.runtime.storage import Location, protocols


def entries(folder: Location) -> dict[str, dict[str, Any]]:
    """Return the file system's current information about each file and folder in a folder, by name.

    Raise FileNotFoundError if the folder does not exist.
    """
    folder.fs.invalidate_cache()
    return {posixpath.basename(entry["name"].rstrip("/")): entry for entry in folder.entries()}


def read_json(file: Location, layout: int) -> dict[str, Any]:
    """Return the content of a JSON file, or {} if the file is missing, incomplete, or has another layout."""
    try:
        content = json.loads(file.fs.cat_file(file.path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return content if isinstance(content, dict) and content.get("layout") == layout else {}


def write_json(file: Location, layout: int, content: Mapping[str, Any]) -> None:
    """Write a JSON file for read_json()."""
    file.fs.pipe_file(file.path, json.dumps({"layout": layout, **content}, indent=1).encode())


@contextlib.contextmanager
def storage_errors(failed: str, advice: str = "") -> Iterator[None]:
    """Turn a storage error into a DataError whose message has `failed`, the reason and `advice`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # each fsspec backend raises its own errors
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(f"{failed}: {reason}.{advice}") from error


# What to set for each kind of storage, by fsspec's name for it.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}


def on_credentials(place: Location) -> str:
    """Return the end of an error about remote data that cannot be read: how to give fsspec its credentials."""
    named = next((_CREDENTIALS[name] for name in protocols(place.fs) if name in _CREDENTIALS), "")
    if not named:
        return ""
    return (
        f" If credentials are missing, set {named} in the environments of the notebook and the ranks, because those of "
        "Spark are not used, or let Spark read the data, and pass the DataFrame."
    )


def this_process() -> dict[str, Any]:
    """Return a description of this process for has_ended(). It can be written as JSON."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def has_ended(owner: dict[str, Any]) -> bool | None:
    """Return whether the process that this_process() described has ended, or None if it ran on another host."""
    if owner["host"] != socket.gethostname():
        return None
    return bool(owner["started"] != _started(owner["pid"]))


def _started(pid: int) -> str:
    """Return when the process `pid` began, in clock ticks, or '' if the process has ended.

    A later process may have the same pid, but it has a different start time.
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
        pass  # the process is running, but belongs to another user
    return "running"
