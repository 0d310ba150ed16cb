"""The standard streams of a rank, which are the same objects in a spare process and in the ranks that it forks.

What a module binds to the streams when it is imported, such as a logging handler, a console or a copy of a descriptor,
then writes to the rank's pipes, as in a rank that has imported the module itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator

STDOUT, STDERR = 1, 2

_copies: dict[int, list[int]] = {STDOUT: [], STDERR: []}  # descriptors that imports have made of each stream


@functools.cache
def open_streams() -> None:
    """Open the standard streams. Output is UTF-8 and line-buffered, so little is lost if the process is killed.

    Only the first call has an effect. The forks of a spare process, in which it has been called, keep their streams.
    """
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    for number, name in ((STDOUT, "stdout"), (STDERR, "stderr")):
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def flush() -> None:
    """Write out what stdout and stderr have buffered."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the user closed or removed the stream
            stream.flush()


@contextlib.contextmanager
def discarded() -> Iterator[None]:
    """In the `with` block, discard output, and give the process an empty stdin. At the end, note copies of descriptors.

    Afterwards, the process has its own stdout and stderr again, but its stdin stays empty.
    """
    own = {number: os.dup(number) for number in _copies}
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    for end in os.pipe():  # streams remember whether they are seekable; a rank's pipes are not
        for number in _copies:
            os.dup2(end, number)
        os.close(end)
    open_streams()
    files = {}
    for number in _copies:  # files of their own, so that copies of their descriptors can be told from others
        sink = os.memfd_create("discarded")
        os.dup2(sink, number)
        os.close(sink)
        files[_file(number)] = number
    yield
    flush()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            stream = files.get(_file(int(name)))
            if stream is not None and int(name) != stream:
                _copies[stream].append(int(name))
    for number, descriptor in own.items():
        os.dup2(descriptor, number)
        os.close(descriptor)


def connect(stdout: int, stderr: int) -> None:
    """Make the standard streams of this process write to these descriptors, and close the descriptors."""
    for source, number in ((stdout, STDOUT), (stderr, STDERR)):
        os.dup2(source, number)
        for copy in _copies[number]:
            os.dup2(source, copy, inheritable=os.get_inheritable(copy))
        os.close(source)


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
