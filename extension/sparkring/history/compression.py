"""Compresses the large files of runs that have ended: logs, and the middle of the events.

At every moment, each line is in a complete file: a compressed file is written under another name, and the original goes
only when the compressed file is complete. So other kernels may read the run at the same time, and a kernel that is
killed loses nothing; later runs then compress the rest.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sparkring.history.rank_logs import COMPRESSED, segments_by_rank
from sparkring.history.record import LARGE_FILE_BYTES
from sparkring.history.run_store import END_BYTES, EVENTS, LOOKED_THROUGH_BYTES, MIDDLE, MIDDLE_LINE, last, saved

THREAD = "sparkring-compression"
LEVEL = 3  # of 9: higher ones take much longer, and make logs only a little smaller
PART = ".part"  # the end of the name of a file that is not complete
BLOCK_BYTES = 1024 * 1024
ABANDONED_AFTER_S = 60  # an incomplete file that has not changed for this long is no longer being written


def compress_in_background() -> threading.Thread:
    """Compress all runs that have ended, in a thread that does not keep Python from exiting."""
    thread = threading.Thread(target=_compress_all, name=THREAD, daemon=True)
    thread.start()
    return thread


def _compress_all() -> None:
    if sys.platform == "linux":  # elsewhere, the priority is that of the whole process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    for folder in saved():
        with contextlib.suppress(OSError):  # the run has been removed, or the disk is full
            if last(folder) is not None:
                compress(folder)


def compress(folder: Path) -> None:
    """Compress the large files of a run that has ended."""
    for segment in (segment for those in segments_by_rank(folder).values() for segment in those):
        path = segment.path
        if path.exists() and path.stat().st_size >= LARGE_FILE_BYTES:
            with path.open("rb") as file:
                _write_compressed(file, path.stat().st_size, path.with_name(f"{path.name}{COMPRESSED}"))
            path.unlink()
    _compress_events(folder)


def _compress_events(folder: Path) -> None:
    """Compress the events, except for the first and the last ones, which %runs reads for its list."""
    path = folder / EVENTS
    with path.open("rb") as file:
        first = beginning(file)
        file.seek(max(len(first), file.seek(0, os.SEEK_END) - END_BYTES))
        file.readline()
        end = file.tell()
        rest = file.read()
        if end - len(first) < LARGE_FILE_BYTES or MIDDLE_LINE in first:
            return
        file.seek(len(first))
        _write_compressed(file, end - len(first), folder / MIDDLE)
    with new_file(path) as file:
        file.write(first + MIDDLE_LINE + rest)


def beginning(file: IO[bytes]) -> bytes:
    """Return the first lines of the events: LOOKED_THROUGH_BYTES, or at least one line."""
    file.seek(0)
    first = file.readline()
    more = file.read(max(0, LOOKED_THROUGH_BYTES - len(first)))
    return first + more[: more.rfind(b"\n") + 1]


def _write_compressed(source: IO[bytes], size_bytes: int, path: Path) -> None:
    with new_file(path) as part, gzip.GzipFile("", "wb", LEVEL, part) as file:
        while size_bytes > 0 and (block := source.read(min(BLOCK_BYTES, size_bytes))):
            file.write(block)
            size_bytes -= len(block)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file, which gets the name `path` at the end of the block, when it is complete and on the disk.

    Raise FileExistsError if another thread or kernel is writing this file.
    """
    part = path.with_name(f"{path.name}{PART}")
    with contextlib.suppress(FileNotFoundError):
        if time.time() - part.stat().st_mtime > ABANDONED_AFTER_S:
            part.unlink()
    with part.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
