"""A member: the process that starts one rank, owns its output, and connects it to the driver.

    driver ◀── one authenticated connection ──▶ member ◀── socket pair ──▶ rank process
                                                  ▲──── stdout, stderr (pipes) ────┘

The member has no threads. One loop waits until a socket or a pipe can be read, and handles what has arrived. The rank's
file descriptors 1 and 2 are pipes to the member, so the member also gets what C++ code prints and what Python prints
when it crashes. Before the member reports that a request has finished or failed, or that the rank waits for input, it
sends what is left in these pipes, so the driver gets the output first. The member gives the rank the next request only
after the report. If the driver sends a request earlier, the request waits in the member.

If the connection to the driver breaks, or if the member's parent exits, the member kills the rank and everything that
the rank has started, and then exits itself. It notices that its parent has exited when its stdin is closed or when it
gets another parent. If a spare process has forked the member, its stdin is a pipe from the driver, and the member
watches the driver instead of its parent.
"""

from __future__ import annotations

import collections
import functools
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn, get_args

from sparkring.executor.orders import UNREACHED, Ticket
from sparkring.runtime.world import World
from sparkring.wire import messages
from sparkring.wire.channel import ChannelClosed, Connection, ProtocolError, dial, pair
from sparkring.worker.member import process, streams, usage
from sparkring.worker.member.gpus import Meter, resolved
from sparkring.worker.member.network import free_port, interface_of
from sparkring.worker.member.pipe import Pipe
from sparkring.worker.member.timeline import TimelineFile

STDERR_BYTES = 16 << 10  # a library that aborts the rank gives the reason in about this much of its last output
GATHER_S = 0.004  # after some output, wait this long for more output: one message for each line would be slow
PARTIAL_AFTER_S = 0.1  # an unfinished line is sent to the driver after this time
TICK_S = 0.5
BEAT_EVERY_S = 2.0
WATCH_GPUS_AFTER_S = 0.2  # opening NVML takes up to 0.1 s, in which the rank would have to wait for its request
DRAIN_LIMIT_S = 2.0
# While requests are waiting in the member, a report from the rank is held back for up to HOLD_S, and sent with
# the next report. When the number of waiting requests is a multiple of TOGETHER, the report is sent at once.
HOLD_S, TOGETHER = 0.005, 8
# The largest number of reads in a row from one pipe. Without this limit, a process that the rank has started and that
# never stops writing would keep the member reading forever.
DRAIN_READS = 16
# The largest number of messages in a row from one peer. Without this limit, a rank that never stops reporting could not
# be stopped.
MESSAGES_IN_A_ROW = 32
# The driver's messages that the member passes on to the rank without decoding them. Large ones are copied in pieces.
_PASSED_ON = get_args(messages.PassedOn)
_FROM_RANK = get_args(messages.RankReport)
_REQUEST_END = get_args(messages.RequestEnd)


class RankProcess(NamedTuple):
    """A rank that has been forked, and the member's ends of its socket and its pipes."""

    pid: int
    channel: Connection
    stdout: int
    stderr: int
    stacks: int


class Member:
    """Serves one rank: passes on its messages and its output, and ends it."""

    def __init__(self, ticket: Ticket, rank: RankProcess, parent_ended: Callable[[], bool], home: Connection) -> None:
        self.parent_ended = parent_ended
        self.folder = ticket.cleanup
        self.rank_pid = rank.pid
        self.to_rank = rank.channel
        self.stack_fd = rank.stacks
        self.pipes = {pipe.fd: pipe for pipe in (Pipe("stdout", rank.stdout), Pipe("stderr", rank.stderr))}
        self.timeline: TimelineFile | None = None
        self.wait_status: int | None = None
        self.peak_memory_bytes = 0
        self.kill_at: float | None = None
        self.last_beat = time.monotonic()
        self.gpus = Meter()
        self.world = World()
        self.watch_gpus_at: float | None = None
        self.stderr_tail = b""
        self.usage = usage.Meter(rank.pid)
        self.paused_until = 0.0
        self.busy_since: float | None = None  # when the rank was given its current request; None if it has none
        self.oom_before = process.out_of_memory_kills()  # when the rank was given its last request
        self.waiting: collections.deque[bytes] = collections.deque()  # the requests that are waiting, as frames
        self.held_since: float | None = None  # when the oldest unsent report was held back
        self.home = home
        self.home.send(self.introduction(ticket))

    def introduction(self, ticket: Ticket) -> messages.Hello:
        address, packages = self.home.local_host(), None
        if sys.prefix != ticket.prefix:
            from sparkring.capture import versions  # not at the top: most members do not need it, and it takes 30 ms

            packages = versions.installed()
        return messages.Hello(
            member=ticket.member,
            pid=self.rank_pid,
            host=socket.gethostname(),
            address=address,
            interface=interface_of(address),
            port=free_port(address),
            python=sys.executable,
            # The local launcher knows the GPUs of its machine. Spark's addresses come from another program.
            gpus=resolved(ticket.gpus) if ticket.context else tuple(ticket.gpus),
            packages=packages,
        )

    def run(self) -> None:
        """Serve until the rank and everything that it started have exited."""
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_r, False)
        os.set_blocking(wake_w, False)
        # When a child exits, Python writes a byte to `wake_w`, which wakes the loop below. Python does so only for a
        # signal that has a handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self.stop(signal.SIGKILL, 0.0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        control = selectors.DefaultSelector()
        everything = selectors.DefaultSelector()
        for selector in (control, everything):
            for source, name in ((wake_r, "wake"), (0, "parent"), (self.home, "home"), (self.to_rank, "rank")):
                selector.register(source, selectors.EVENT_READ, name)
        for fd in self.pipes:
            everything.register(fd, selectors.EVENT_READ, "output")
        self.selectors = (control, everything)
        self.reap()
        while self.wait_status is None:
            now = time.monotonic()
            selector = control if self.paused_until > now else everything
            for key, _ in selector.select(self.pause(now)):
                match key.data:
                    case "wake":
                        os.read(wake_r, 512)
                        self.reap()
                    case "parent":
                        if not os.read(0, 512):
                            self.abandon()
                    case "home":
                        self.from_home()
                    case "rank":
                        self.from_rank()
                    case "output" if key.fd in self.pipes:  # otherwise, from_rank() has just read this pipe to its end
                        self.forward(self.pipes[key.fd])
            self.take_pending()
            self.tick()
        self.finish()

    def take_pending(self) -> None:
        """Handle the messages that arrived together with one that has already been handled."""
        for connection, take in ((self.home, self.from_home), (self.to_rank, self.from_rank)):
            for _ in range(MESSAGES_IN_A_ROW):
                if connection.pending:
                    take()

    def pause(self, now: float) -> float:
        """Return how many seconds to wait for something to read."""
        if self.home.pending or self.to_rank.pending:
            return 0.0
        wait = TICK_S
        if self.paused_until > now:
            wait = min(wait, self.paused_until - now)
        if any(pipe.rest for pipe in self.pipes.values()):
            wait = min(wait, PARTIAL_AFTER_S / 2)
        if self.kill_at is not None:
            wait = min(wait, max(0.0, self.kill_at - now))
        if self.held_since is not None:
            wait = min(wait, max(0.0, self.held_since + HOLD_S - now))
        return wait

    def tick(self) -> None:
        now = time.monotonic()
        if self.parent_ended():
            self.abandon()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            process.kill_family(self.rank_pid)
        for pipe in self.pipes.values():
            if pipe.rest and now - pipe.rest_since > PARTIAL_AFTER_S:
                self.send_output(pipe, pipe.take_rest())
        if self.held_since is not None and now - self.held_since >= HOLD_S:
            self.send_held()
        if self.watch_gpus_at is not None and now >= self.watch_gpus_at:
            self.watch_gpus_at = None
            self.tell_of_gpu_troubles()  # NVML reports only errors that happen after this first question
        if now - self.last_beat > BEAT_EVERY_S:
            self.last_beat = now
            self.tell(messages.Beat())
            for gpu in self.gpus.changes():
                self.tell(gpu)
            self.tell_of_gpu_troubles()
        if (used := self.usage.reading(now)) is not None:
            self.tell(used)

    # ── to and from the driver ────────────────────────────────────────────────

    def tell(self, message: messages.MemberReport) -> None:
        self.held_since = None  # the reports that were held back are sent with this message
        try:
            self.home.send(message)
        except ChannelClosed:
            self.abandon()

    def tell_of_gpu_troubles(self) -> None:
        for trouble in self.gpus.troubles():
            self.tell(trouble)

    def send_held(self) -> None:
        self.held_since = None
        try:
            self.home.send_held()
        except ChannelClosed:
            self.abandon()

    def from_home(self) -> None:
        try:
            head = self.home.receive_head()
            if head.kind is messages.Run and self.busy_since is not None:
                self.waiting.append(self.home.receive_frame(head))
            elif head.kind in _PASSED_ON:
                if head.kind is messages.Run:
                    self.rank_is_busy()
                self.reach_rank(lambda: self.home.pass_on(head, self.to_rank))
            else:
                order = self.home.receive_body(head)
                if not isinstance(order, messages.MemberOrder):
                    raise ProtocolError(f"the driver sent {head.kind.__name__}, which is not for a member")
                self.obey(order)
        except ChannelClosed:
            self.abandon()

    def obey(self, order: messages.MemberOrder) -> None:
        match order:
            case messages.Stop():
                self.stop(order.signal, order.grace_s)
            case messages.Interrupt():
                if self.waiting:
                    self.give_back()
                process.signal_group(self.rank_pid, signal.SIGINT)
            case messages.GiveBack():
                self.give_back()
            case messages.TakeStack():
                self.tell(self.take_stack())
            case messages.EnterWorld():
                self.world = order.world
                self.gpus = Meter(order.world.gpus)
                self.watch_gpus_at = time.monotonic() + WATCH_GPUS_AFTER_S
                self.reach_rank(lambda: self.to_rank.send(order))
            case messages.RecordTimeline():
                # The rank's framework writes its timeline to a file, which finish() sends to the driver at the end.
                if self.timeline is None:
                    self.timeline = TimelineFile(self.folder, wanted=order.wanted)
                variables = messages.SetEnvironment({order.variable: self.timeline.path})
                self.reach_rank(lambda: self.to_rank.send(variables))
            case _:
                messages.never(order)

    def reach_rank(self, send: Callable[[], None]) -> None:
        """Call `send`, which sends something to the rank. If the rank has exited, ignore the error.

        Raise ChannelClosed if the connection to the driver has broken.
        """
        try:
            send()
        except ChannelClosed:
            if not self.rank_has_ended():
                raise

    def from_rank(self) -> None:
        try:
            head = self.to_rank.receive_head()
            if head.kind not in _FROM_RANK:
                raise ProtocolError(f"{head.kind.__name__} is not for the driver")
        except ProtocolError as error:
            # The bytes that follow cannot be read as messages. main() catches the error, and ends the rank.
            self.tell(messages.Output("stderr", f"sparkring: this rank sent an invalid message: {error}\n".encode()))
            raise
        except ChannelClosed:
            for selector in self.selectors:
                selector.unregister(self.to_rank)
            self.reap()
            return
        if head.kind in _REQUEST_END or head.kind is messages.InputRequested:
            for pipe in list(self.pipes.values()):
                self.forward(pipe, all_of_it=True)
        if head.kind in _REQUEST_END:
            if head.kind is messages.Failed:
                if self.waiting:
                    self.give_back()
                self.tell_of_gpu_troubles()  # before the failure, because they may be its cause
            self.busy_since = None
        hold = len(self.waiting) % TOGETHER > 0
        try:
            self.to_rank.pass_on(head, self.home, hold=hold)
        except ChannelClosed:
            if not self.rank_has_ended():
                self.abandon()
        self.held_since = (self.held_since or time.monotonic()) if hold else None
        if self.waiting and self.busy_since is None:
            self.reach_rank(lambda: self.to_rank.send_frame(self.waiting.popleft()))
            self.rank_is_busy()  # after sending, so that the rank need not wait for this

    def rank_is_busy(self) -> None:
        """Note that the rank has a new request."""
        self.busy_since = time.monotonic()
        self.oom_before = process.out_of_memory_kills()

    def give_back(self) -> None:
        """Return the waiting requests to the driver."""
        self.tell(messages.GivenBack(len(self.waiting)))
        self.waiting.clear()

    # ── the rank's output ─────────────────────────────────────────────────────

    def forward(self, pipe: Pipe, *, all_of_it: bool = False) -> bool:
        """Send to the driver what the rank has written to `pipe`. Return False if the stream has ended.

        Without `all_of_it`, read once, and keep an unfinished line for later.
        """
        for _ in range(DRAIN_READS if all_of_it else 1):
            data, ended = pipe.read()
            self.send_output(pipe, data)
            if not data:
                break
        if all_of_it or ended:
            self.send_output(pipe, pipe.take_rest())
        if ended and pipe.fd in self.pipes:
            del self.pipes[pipe.fd]
            self.selectors[1].unregister(pipe.fd)
            os.close(pipe.fd)
        return not ended

    def send_output(self, pipe: Pipe, data: bytes) -> None:
        if data:
            self.paused_until = time.monotonic() + GATHER_S
            if pipe.stream == "stderr":
                self.stderr_tail = (self.stderr_tail + data)[-STDERR_BYTES:]
            self.tell(messages.Output(pipe.stream, data))

    # ── the rank's lifetime ───────────────────────────────────────────────────

    def stop(self, with_signal: int, grace_s: float) -> None:
        """Signal the rank's process group. After `grace_s` seconds, tick() kills the remaining processes."""
        if self.wait_status is None:
            process.signal_group(self.rank_pid, with_signal)
            self.kill_at = time.monotonic() + grace_s

    def reap(self) -> None:
        """Reap the children that have exited. If the rank is among them, note how it exited.

        The other children were started by the rank: they became this process's children when their own parent exited.
        """
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.rank_pid:
                self.wait_status = status
                unit = 1 if sys.platform == "darwin" else 1024
                self.peak_memory_bytes = usage.ru_maxrss * unit

    def rank_has_ended(self) -> bool:
        """Wait up to DRAIN_LIMIT_S for the rank to exit, which it usually does right after its connection is closed.

        Return whether it has exited.
        """
        deadline = time.monotonic() + DRAIN_LIMIT_S
        while self.wait_status is None and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.005)
        return self.wait_status is not None

    def abandon(self) -> NoReturn:
        """Make main() kill the rank and end this process. The driver or the parent is gone, so nothing is reported."""
        raise SystemExit(1)

    def finish(self) -> None:
        """Kill the processes that the rank has left behind, send its last output, and report how it exited."""
        process.kill_family(self.rank_pid)
        deadline = time.monotonic() + DRAIN_LIMIT_S
        for pipe in list(self.pipes.values()):
            while self.forward(pipe, all_of_it=True) and time.monotonic() < deadline:
                time.sleep(0.002)
        if self.timeline is not None:
            for piece in self.timeline.pieces():
                self.tell(piece)
            self.timeline.remove()
        code = os.waitstatus_to_exitcode(self.wait_status or 0)  # a negative number stands for a signal
        self.tell_of_gpu_troubles()
        self.tell(
            messages.Exited(
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                out_of_memory=process.out_of_memory_kills() > self.oom_before,
                peak_memory_bytes=self.peak_memory_bytes,
                gpu=self.gpu_fault() if -code == signal.SIGABRT else None,
            )
        )
        self.home.finish()

    def gpu_fault(self) -> messages.GpuFault | None:
        """Return what went wrong with a GPU, according to what a library printed when it aborted the rank."""
        from sparkring.worker.rank import gpu_faults  # not at the top, since most members do not need it

        return gpu_faults.find_in_output(self.stderr_tail.decode("utf-8", "replace"), self.world.rank, self.world.gpus)

    def take_stack(self) -> messages.Stack:
        """Ask the rank's faulthandler for the rank's stack. The text is empty if the rank does not answer in time."""
        state = process.state(self.rank_pid)
        if state.startswith("frozen"):
            return messages.Stack(state, "")
        try:
            os.kill(self.rank_pid, signal.SIGUSR2)
        except OSError:
            return messages.Stack("gone", "")
        text, quiet_since = b"", time.monotonic()
        while time.monotonic() - quiet_since < (0.03 if text else 0.3):
            try:
                more = os.read(self.stack_fd, 65536)
                if not more:
                    break  # the rank has just exited
                text += more
                quiet_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.005)
        return messages.Stack(state, text.decode("utf-8", "replace"))


def _fork_rank(ticket: Ticket) -> RankProcess:
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


def main(ticket: Ticket, driver: int | None = None) -> None:
    """Run a member, and then exit this process.

    The member stops early if its parent exits or, if a spare process has forked it, if the process `driver` exits.
    """
    parent = os.getppid()
    process.adopt_orphans()
    rank = _fork_rank(ticket)  # first, so that the rank imports its modules while this process connects
    code = UNREACHED
    member = None
    try:
        home = dial(ticket.host, ticket.port, bytes.fromhex(ticket.secret))
        code = 1
        if driver is None:
            parent_ended = lambda: os.getppid() != parent  # noqa: E731
        else:
            parent_ended = functools.partial(process.ended, os.pidfd_open(driver))
        member = Member(ticket, rank, parent_ended, home)
        member.run()
        code = 0
    except SystemExit:
        pass  # see Member.abandon()
    except (ChannelClosed, OSError) as error:
        print(f"sparkring: member {ticket.member}: {error}", file=sys.stderr, flush=True)
    finally:
        process.kill_family(rank.pid)
        process.reap_all()
        if member is not None and member.timeline is not None:
            member.timeline.remove()
        if ticket.cleanup:
            import shutil

            shutil.rmtree(ticket.cleanup, ignore_errors=True)
    os._exit(code)  # skip Python's own shutdown: nothing needs it, and the driver would have to wait for it
