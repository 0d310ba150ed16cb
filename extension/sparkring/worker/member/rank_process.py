"""The process of a rank, as the member that forked it sees it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import NamedTuple

from sparkring.executor.orders import Ticket
from sparkring.wire import messages
from sparkring.wire.channel import Connection, pair
from sparkring.worker.member import process, streams, usage

EXIT_LIMIT_S = 2.0


class Stopping(NamedTuple):
    """The rank was told to stop. If it is still there at `kill_at`, it is killed."""

    kill_at: float


class RankExit(NamedTuple):
    """The rank has exited, with the status that wait() has returned."""

    wait_status: int
    peak_memory_bytes: int


class RankProcess:
    """A rank that has been forked, and the member's ends of its socket and its pipes.

    `state` is None while the rank runs and nobody has told it to stop.
    """

    def __init__(self, pid: int, channel: Connection, stdout: int, stderr: int, stacks: int) -> None:
        self.pid = pid
        self.channel = channel
        self.stdout, self.stderr, self.stacks = stdout, stderr, stacks
        self.usage = usage.Meter(pid)
        self.state: Stopping | RankExit | None = None

    @property
    def kill_at(self) -> float | None:
        return self.state.kill_at if isinstance(self.state, Stopping) else None

    @property
    def exit(self) -> RankExit | None:
        return self.state if isinstance(self.state, RankExit) else None

    def stop(self, with_signal: int, grace_s: float) -> None:
        """Signal the rank's process group. After `grace_s` seconds, kill_if_due() kills the remaining processes."""
        if self.exit is None:
            process.signal_group(self.pid, with_signal)
            self.state = Stopping(time.monotonic() + grace_s)

    def notice(self) -> None:
        """Tell the rank, but not what it has started, that this host is shutting down."""
        if self.exit is None:
            os.kill(self.pid, signal.SIGTERM)

    def catches_sigterm(self) -> bool:
        """Return whether SIGTERM does not end the rank at once: it saves checkpoints, or its code has a handler."""
        try:
            with open(f"/proc/{self.pid}/status") as file:
                caught = next(line for line in file if line.startswith("SigCgt:"))
        except (OSError, StopIteration):
            return False
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    def kill_if_due(self, now: float) -> None:
        if self.kill_at is not None and now >= self.kill_at:
            self.state = None  # once is enough: reap() notes the exit
            process.kill_family(self.pid)

    def reap(self) -> None:
        """Reap the children that have exited. If the rank is among them, note how it exited.

        The other children were started by the rank: they became this process's children when their own parent exited.
        """
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                unit = 1 if sys.platform == "darwin" else 1024
                self.state = RankExit(status, used.ru_maxrss * unit)

    def has_ended(self) -> bool:
        """Wait up to EXIT_LIMIT_S for the rank to exit, which it usually does right after its connection is closed.

        Return whether it has exited.
        """
        deadline = time.monotonic() + EXIT_LIMIT_S
        while self.exit is None and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.005)
        return self.exit is not None

    def take_stack(self) -> messages.Stack:
        """Ask the rank's faulthandler for the rank's stack. The text is empty if the rank does not answer in time."""
        state = process.state(self.pid)
        if state.startswith("frozen"):
            return messages.Stack(state, "")
        try:
            os.kill(self.pid, signal.SIGUSR2)  # faulthandler answers even while the rank runs native code
        except OSError:
            return messages.Stack("gone", "")
        text, quiet_since = b"", time.monotonic()
        while time.monotonic() - quiet_since < (0.03 if text else 0.3):
            try:
                more = os.read(self.stacks, 65536)
                if not more:
                    break  # the rank has just exited
                text += more
                quiet_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.005)
        return messages.Stack(state, text.decode("utf-8", "replace"))


def fork_rank(ticket: Ticket) -> RankProcess:
    """Fork the rank. In the child, this function does not return: the child runs the rank and exits."""
    out_r, out_w = os.pipe()
    err_r, err_w = os.pipe()
    stack_r, stack_w = os.pipe()
    ours, theirs = pair()
    member = os.getpid()
    # SIGUSR2 asks the rank for its stack. It would kill a rank that has not set a handler yet, so it is first ignored.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    pid = os.fork()
    if pid:
        theirs.release()
        for fd in (out_w, err_w, stack_w, *([ticket.rows] if ticket.rows >= 0 else [])):
            os.close(fd)
        os.set_blocking(stack_r, False)
        return RankProcess(pid, ours, out_r, err_r, stack_r)
    # Until the rank sets a handler, an interrupt ends it. Python's handler would print a traceback of this module.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The rank stays in the member's session, which the launcher or the Spark task kills if the member dies.
    os.setpgid(0, 0)
    process.die_with_parent(member)
    ours.release()
    for fd in (out_r, err_r, stack_r):
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    streams.connect(out_w, err_w)
    if ticket.rows >= 0:
        os.set_inheritable(ticket.rows, False)
    from sparkring.worker.rank.leaving import leave
    from sparkring.worker.rank.rank import Rank

    sys.exit(leave(Rank(theirs, stack_w, ticket.context, ticket.rows, ticket.cleanup).serve()))
