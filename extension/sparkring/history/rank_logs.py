"""The log files of a run: what each rank wrote to stdout and stderr, in order of arrival.

A log is a sequence of segments. `rank-0.log` is the first one. `rank-0.5000000-81234.log` begins 5,000,000 bytes and
81,234 lines after the beginning of the log. If the logs of a run become too large, segments in the middle are removed;
the names of the others then say how much is missing. When a run has ended, a segment may be compressed (`.gz`).
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from sparkring.history.describe.text import counted, size

BLOCK_BYTES = 1024 * 1024  # how much of the end of a log is read at once
COMPRESSED = ".gz"
_NAME = re.compile(r"(?P<file>rank-(?P<rank>\d+)(\.(?P<start>\d+)-(?P<line>\d+))?\.log)(\.gz)?")


class Segment(NamedTuple):
    """A part of a log. `start` and `line` count the bytes and the lines of the log before this part."""

    start: int
    line: int
    path: Path  # the path before it is compressed


def log_name(rank: int) -> str:
    """Return the name of the first segment of a rank's log in a run's folder."""
    return f"rank-{rank}.log"


# ── Writing ───────────────────────────────────────────────────────────────────


class RankLog:
    """Writes the log of one rank, with the end of each piece of output in the same segment as its beginning."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._size = self._lines = 0
        self._is_whole = True  # whether the last line has ended
        self.segments = [Segment(0, 0, folder / log_name(rank))]
        self.file: IO[bytes] = self.segments[0].path.open("ab")

    def write(self, data: bytes, segment_bytes: float) -> int:
        """Write a piece of output, and return where in the log it begins.

        A segment that has `segment_bytes` is complete at the end of its line, or if it becomes twice as large.
        """
        filled = self._size - self.segments[-1].start
        if filled >= segment_bytes and (self._is_whole or filled >= 2 * segment_bytes):
            path = self._folder / f"rank-{self._rank}.{self._size}-{self._lines}.log"
            self.file.close()
            self.file = path.open("ab")
            self.segments.append(Segment(self._size, self._lines, path))
        start = self._size
        self.file.write(data)
        self._size += len(data)
        self._lines += data.count(b"\n")
        self._is_whole = data.endswith(b"\n")
        return start


class Removed(NamedTuple):
    """A segment that is to be removed."""

    path: Path
    size_bytes: int
    lines: int


def take_removable(logs: Sequence[RankLog], least_bytes: float) -> list[Removed]:
    """Take segments from the middle of logs, of the longest log first, until they have `least_bytes` or none is left.

    The first and the last segment of each log stay, and so does what is newer than a segment that stays.
    """
    removed: list[Removed] = []
    while logs and sum(segment.size_bytes for segment in removed) < least_bytes:
        segments = max(logs, key=lambda log: len(log.segments)).segments
        if len(segments) <= 2:
            break
        oldest, after = segments.pop(1), segments[1]
        removed.append(Removed(oldest.path, after.start - oldest.start, after.line - oldest.line))
    return removed


# ── Reading ───────────────────────────────────────────────────────────────────


def segments_by_rank(folder: Path) -> dict[int, list[Segment]]:
    """Return the segments of all logs in a run's folder, in their order."""
    segments: dict[int, set[Segment]] = {}
    for name in os.listdir(folder):
        if parts := _NAME.fullmatch(name):
            rank, start, line, file = (
                int(parts["rank"]),
                int(parts["start"] or 0),
                int(parts["line"] or 0),
                parts["file"],
            )
            segments.setdefault(rank, set()).add(Segment(start, line, folder / file))
    return {rank: sorted(those) for rank, those in segments.items()}


def open_segment(path: Path) -> IO[bytes] | gzip.GzipFile:
    """Open a segment that may be compressed. If it has just been removed, it counts as empty."""
    with contextlib.suppress(FileNotFoundError):
        return path.open("rb")
    with contextlib.suppress(FileNotFoundError):
        return gzip.open(f"{path}{COMPRESSED}", "rb")
    return io.BytesIO()


class LogReader:
    """Reads pieces of the logs of one run; the pieces of a rank in their order. To be closed."""

    def __init__(self, folder: Path) -> None:
        self._segments = segments_by_rank(folder)
        self._open: dict[int, tuple[Segment, IO[bytes] | gzip.GzipFile]] = {}

    def read(self, rank: int, start: int, size_bytes: int) -> bytes:
        """Return `size_bytes` of a log. Return less if that part of the log has been removed or was not written."""
        those = self._segments.get(rank, [])
        segment = next((candidate for candidate in reversed(those) if candidate.start <= start), None)
        if segment is None:
            return b""
        if rank not in self._open or self._open[rank][0] != segment:
            self._close(rank)
            self._open[rank] = segment, open_segment(segment.path)
        file = self._open[rank][1]
        file.seek(start - segment.start)
        return file.read(size_bytes)

    def close(self) -> None:
        for rank in list(self._open):
            self._close(rank)

    def _close(self, rank: int) -> None:
        if rank in self._open:
            self._open.pop(rank)[1].close()


def log(folder: Path, rank: int, tail: int | None = None) -> str:
    """Return what a rank wrote to stdout and stderr, in order of arrival. Invalid bytes appear as \\xNN.

    Where a part of a large log has been removed, a line says how much is missing. If `tail` is not None, return only
    the last `tail` lines.
    """
    segments = segments_by_rank(folder).get(rank, [])
    data = b"".join(_whole(segments)) if tail is None else _last_lines(segments, tail)
    return data.decode("utf-8", "backslashreplace")


def left_out(size_bytes: int, lines: int | None = None) -> bytes:
    """Return the line that stands for a part of a log that has been removed."""
    words = size(size_bytes) if lines is None else f"{size(size_bytes)} ({counted(lines, 'line')})"
    return f"… {words} left out …\n".encode()


def _whole(segments: Iterable[Segment]) -> Iterator[bytes]:
    end, lines, data = 0, 0, b""
    for segment in segments:
        yield _gap(segment.start - end, segment.line - lines, data)
        with open_segment(segment.path) as file:
            data = file.read()
        yield data
        end, lines = segment.start + len(data), segment.line + data.count(b"\n")


def _gap(size_bytes: int, lines: int, before: bytes) -> bytes:
    """Return a line about what is missing after `before`, or nothing if nothing is missing."""
    if size_bytes <= 0:
        return b""
    return (b"\n" if before and not before.endswith(b"\n") else b"") + left_out(size_bytes, lines)


def _last_lines(segments: Sequence[Segment], count: int) -> bytes:
    """Return the last lines of a log, without reading the rest of it: a log may be larger than the memory."""
    blocks: list[bytes] = []
    ends = 0  # the number of newlines in `blocks`; if there are more than `count`, `blocks` has all of the last lines
    for at in reversed(range(len(segments))):
        for block in _blocks_from_end(segments[at].path, count):
            blocks.append(block)
            ends += block.count(b"\n")
            if ends > count:
                break
        if ends > count:
            break
        if at > 0:
            blocks.append(_gap_before(segments, at))
            ends += blocks[-1].count(b"\n")
    lines = io.BytesIO(b"".join(blocks[::-1])).readlines()
    return b"".join(lines[max(0, len(lines) - count) :])


def _blocks_from_end(path: Path, count: int) -> Iterator[bytes]:
    """Yield blocks of a segment, from its end to its beginning; of a compressed one, only more than `count` lines."""
    with open_segment(path) as file:
        if isinstance(file, gzip.GzipFile):
            yield b"".join(collections.deque(file, maxlen=count + 2))
            return
        begin = file.seek(0, os.SEEK_END)
        while begin > 0:
            begin, end = max(0, begin - BLOCK_BYTES), begin
            file.seek(begin)
            yield file.read(end - begin)


def _gap_before(segments: Sequence[Segment], at: int) -> bytes:
    """Return a line about what is missing between the segment `at` and the segment before it, or nothing."""
    before, length, lines, block = segments[at - 1], 0, 0, b""
    with open_segment(before.path) as file:
        for block in iter(lambda: file.read(BLOCK_BYTES), b""):
            length += len(block)
            lines += block.count(b"\n")
    return _gap(segments[at].start - before.start - length, segments[at].line - before.line - lines, block)
