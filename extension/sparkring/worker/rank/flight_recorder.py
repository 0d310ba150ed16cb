"""Reads what PyTorch's flight recorder has written about the collectives of a rank that timed out.

PyTorch writes these files if TORCH_NCCL_TRACE_BUFFER_SIZE is positive (https://docs.pytorch.org/tutorials/unstable/
flight_recorder_tutorial.html). They are pickles. Since other users may be able to write to the folder, only files of
this user are read, and only plain values are unpickled.
"""

from __future__ import annotations

import os
import pickle
import stat
import time
from typing import Any, NoReturn

from sparkring.history.stacks import is_cell

MOST_BYTES = 64 << 20
RECENT_S = 600.0  # an older file is from an earlier run
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the newer name first
_ENDED = ("completed", "")


class _PlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


def summary(rank: int) -> str:
    """Return a sentence about the first collective of the rank that has not ended; '' if there is no recent file."""
    for prefix in _prefixes():
        try:
            return _sentence(_read(f"{prefix}{rank}"))
        except Exception:  # there is no such file, or it has a different format, which depends on PyTorch's version
            continue
    return ""


def _prefixes() -> list[str]:
    named = [os.environ[name] for name in _PREFIXES if os.environ.get(name)]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return named or [os.path.join(cache, "torch", "comm_lib_trace_rank_"), "/tmp/nccl_trace_rank_"]


def _read(path: str) -> Any:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        recent = time.time() - status.st_mtime < RECENT_S
        if not (stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and recent):
            raise OSError("not a recent file of this user")
        if status.st_size > MOST_BYTES:
            raise OSError("too large")
        return _PlainValues(file).load()


def _sentence(dump: Any) -> str:
    entries = dump["entries"] if isinstance(dump, dict) else dump
    pending = [entry for entry in entries if entry.get("state", "") not in _ENDED]
    if not pending:
        return ""
    first = pending[0]
    name = str(first.get("profiling_name", "a collective")).rpartition(":")[2]
    number = first.get("collective_seq_id", first.get("seq_id"))
    shape = "×".join(map(str, (first.get("input_sizes") or [[]])[0]))
    what = f"{name}" + (f" of {shape} elements" if shape else "") + (f" (number {number})" if number else "")
    state = "had started" if first["state"] == "started" else "was waiting to start"
    return f"According to PyTorch's flight recorder, {what}{_called_at(first)} {state} and did not end."


def _called_at(entry: Any) -> str:
    frames = entry.get("frames") or ()
    mine = next((frame for frame in frames if is_cell(frame["filename"])), None)
    if mine is not None:
        return f", called on line {mine['line']} of a cell,"
    outside = (frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame["filename"])
    caller = next(outside, None)
    return f", called at {os.path.basename(caller['filename'])}:{caller['line']}," if caller else ""
