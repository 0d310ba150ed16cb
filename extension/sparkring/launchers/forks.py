"""Has a spare process fork a member, and watches the member."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time

UNKNOWN = 0  # stands for the exit code of a member if its spare process was killed and cannot report the code


class ForkedMember:
    """A member that a spare process has forked, with the part of Popen's interface that a launcher needs.

    `pid` is its process id, and `stdin` is the writing end of its stdin. `ended` is a descriptor that becomes readable
    when the member has exited; `status` is a pipe on which the spare process reports the member's exit code.
    """

    def __init__(self, pid: int, stdin: int, ended: int, status: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", 0)
        self.returncode: int | None = None
        self._ended = ended
        self._status = status

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code; if a signal ended the member, its number with a minus sign.

        Raise TimeoutExpired after `timeout_s` seconds.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self.returncode is None:
            self._await(self._status, deadline)
            code = os.read(self._status, 16)
            if not code:  # the spare process was killed, and the member may still be running
                self._await(self._ended, deadline)
            os.close(self._status)
            os.close(self._ended)
            self.returncode = int(code) if code else UNKNOWN
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ended, number)  # another process may have got the member's pid by now

    def _await(self, fd: int, deadline: float | None) -> None:
        events = select.poll()
        events.register(fd, select.POLLIN)
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not events.poll(None if left_s is None else left_s * 1000):
            raise subprocess.TimeoutExpired("a forked member", left_s or 0.0)


def fork(channel: socket.socket, line: bytes) -> ForkedMember:
    """Send a spare process a line and the descriptors that a member needs, and return the member.

    Raise an OSError if the spare process does not answer. If it has forked a member nevertheless, the member exits.
    """
    stdin, stdin_w = os.pipe()
    status_r, status = os.pipe()
    # A descriptor, not a path: the folder may have been moved, and its parents need not be readable.
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        socket.send_fds(channel, [line], [stdin, status, folder])
        pid, fds, _, _ = socket.recv_fds(channel, 64, 1, socket.MSG_CMSG_CLOEXEC)
        if not pid or not fds:
            raise ConnectionResetError("the spare process has exited, or does not serve this launch")
        return ForkedMember(int(pid), stdin_w, fds[0], status_r)
    except BaseException:  # raised again. Closing its stdin ends a member that was forked nevertheless
        os.close(stdin_w)
        os.close(status_r)
        raise
    finally:
        for descriptor in (stdin, status, folder):
            os.close(descriptor)
