"""Sends what a rank writes to its stdout and stderr to the driver."""

from __future__ import annotations

import math
import os
import selectors
import time
from collections.abc import Callable

from sparkring.wire import messages
from sparkring.worker.member.pipe import Pipe

STDERR_BYTES = 16 << 10  # a library that aborts the rank gives the reason in about this much of its last output
GATHER_S = 0.004  # after some output, wait this long for more output: one message for each line would be slow
PARTIAL_AFTER_S = 0.1  # an unfinished line is sent to the driver after this time
DRAIN_LIMIT_S = 2.0
# The largest number of reads in a row from one pipe. Without this limit, a process that the rank has started and that
# never stops writing would keep the member reading forever.
DRAIN_READS = 16


class RankOutput:
    """The pipes that are still open, and the last output of stderr. `selector` watches the pipes."""

    def __init__(self, stdout: int, stderr: int, send: Callable[[messages.Output], None]) -> None:
        self.pipes = {pipe.fd: pipe for pipe in (Pipe("stdout", stdout), Pipe("stderr", stderr))}
        self.selector = selectors.DefaultSelector()
        for fd in self.pipes:
            self.selector.register(fd, selectors.EVENT_READ, "output")
        self._send = send
        self._tail = b""
        self._paused_until: float | None = None

    @property
    def last_errors(self) -> str:
        """The end of what the rank has written to stderr."""
        return self._tail.decode("utf-8", "replace")

    def is_paused(self, now: float) -> bool:
        """Return whether to wait for more output before reading again."""
        return self._paused_until is not None and now < self._paused_until

    def due_in(self, now: float) -> float:
        """Return in how many seconds there may be something to do, even if the rank writes nothing."""
        end_of_pause = self._paused_until - now if self._paused_until is not None else 0.0
        wait = end_of_pause if end_of_pause > 0.0 else math.inf
        return min(wait, PARTIAL_AFTER_S / 2) if any(pipe.rest for pipe in self.pipes.values()) else wait

    def send_partial_lines(self, now: float) -> None:
        for pipe in self.pipes.values():
            if pipe.rest and now - pipe.rest_since > PARTIAL_AFTER_S:
                self.send(pipe, pipe.take_rest())

    def drain(self) -> None:
        """Send everything that can be read now."""
        for pipe in list(self.pipes.values()):
            self.forward(pipe, all_of_it=True)

    def finish(self) -> None:
        """Send everything up to the end of the streams, but stop after DRAIN_LIMIT_S."""
        deadline = time.monotonic() + DRAIN_LIMIT_S
        for pipe in list(self.pipes.values()):
            while self.forward(pipe, all_of_it=True) and time.monotonic() < deadline:
                time.sleep(0.002)

    def forward(self, pipe: Pipe, *, all_of_it: bool = False) -> bool:
        """Send to the driver what the rank has written to `pipe`. Return False if the stream has ended.

        Without `all_of_it`, read once, and keep an unfinished line for later.
        """
        for _ in range(DRAIN_READS if all_of_it else 1):
            data, ended = pipe.read()
            self.send(pipe, data)
            if not data:
                break
        if all_of_it or ended:
            self.send(pipe, pipe.take_rest())
        if ended and pipe.fd in self.pipes:
            del self.pipes[pipe.fd]
            self.selector.unregister(pipe.fd)
            os.close(pipe.fd)
        return not ended

    def send(self, pipe: Pipe, data: bytes) -> None:
        if data:
            self._paused_until = time.monotonic() + GATHER_S
            if pipe.stream == "stderr":
                self._tail = (self._tail + data)[-STDERR_BYTES:]
            self._send(messages.Output(pipe.stream, data))
