"""Reads a rank's stdout or stderr from a pipe, in whole lines.

A very long line, or a line whose end does not arrive soon, is returned in pieces.
"""

from __future__ import annotations

import fcntl
import os
import time

from sparkring.wire.messages import Stream

READ_BYTES = 1 << 20
# The size of the pipe's buffer: the largest that a process without privileges may request. With a small buffer, a rank
# that prints a lot at once would have to wait.
PIPE_BYTES = 1 << 20
PARTIAL_BYTES = 64 * 1024  # a line that grows beyond this is sent on in pieces


class Pipe:
    """The reading end of one of the rank's streams, and the line that has not ended yet."""

    def __init__(self, stream: Stream, fd: int) -> None:
        self.stream = stream
        self.fd = fd
        self.rest = b""
        self.rest_since = 0.0
        os.set_blocking(fd, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            try:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            except OSError:
                pass  # the user's pipes together have reached the system's limit; the default size is enough

    def read(self) -> tuple[bytes, bool]:
        """Return what can be read now, up to the end of the last whole line, and whether the stream has ended."""
        output, ended = self.rest, False
        while len(output) < READ_BYTES and not ended:
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                break
            output += data
            ended = not data
        # A progress bar ends its line with a carriage return: treat that as the end of a line.
        end = len(output) if ended else max(output.rfind(b"\n"), output.rfind(b"\r")) + 1
        if len(output) - end > PARTIAL_BYTES:
            end = len(output)
        if len(output) > end and not (self.rest and end == 0):
            self.rest_since = time.monotonic()
        self.rest = output[end:]
        return output[:end], ended

    def take_rest(self) -> bytes:
        """Return the part of an unfinished line that has been read, and forget it."""
        rest, self.rest = self.rest, b""
        return rest
