"""The log files of a run: what each rank wrote to stdout and stderr, in order of arrival."""

from __future__ import annotations

import io
import os
from pathlib import Path

BLOCK_BYTES = 1024 * 1024  # how much of the end of a log is read at once


def log_name(rank: int) -> str:
    """Return the name of a rank's log file in a run's folder."""
    return f"rank-{rank}.log"


def log(path: Path, rank: int, tail: int | None = None) -> str:
    """Return what a rank wrote to stdout and stderr, in order of arrival. Invalid bytes appear as \\xNN.

    If `tail` is not None, return only the last `tail` lines.
    """
    file = path / log_name(rank)
    if not file.exists():
        return ""
    return (file.read_bytes() if tail is None else _last_lines(file, tail)).decode("utf-8", "backslashreplace")


def _last_lines(path: Path, count: int) -> bytes:
    """Return the last lines of a file, without reading the rest of it: a log may be larger than the memory."""
    blocks: list[bytes] = []
    ends = 0  # the number of newlines in `blocks`; if there are more than `count`, `blocks` has all of the last lines
    with path.open("rb") as file:
        begin = file.seek(0, os.SEEK_END)
        while begin > 0 and ends <= count:
            begin, end = max(0, begin - BLOCK_BYTES), begin
            file.seek(begin)
            blocks.append(file.read(end - begin))
            ends += blocks[-1].count(b"\n")
    lines = io.BytesIO(b"".join(blocks[::-1])).readlines()
    return b"".join(lines[max(0, len(lines) - count) :])
