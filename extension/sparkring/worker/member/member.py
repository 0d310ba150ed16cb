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
from typing import NoReturn, get_args

from sparkring.executor.orders import UNREACHED, Ticket
from sparkring.runtime.world import World
from sparkring.wire import messages
from sparkring.wire.channel import ChannelClosed, Connection, ProtocolError, dial
from sparkring.worker.member import process
from sparkring.worker.member.gpus import GpuMeter, resolved
from sparkring.worker.member.network import free_port, interface_of
from sparkring.worker.member.output import RankOutput
from sparkring.worker.member.rank_process import RankExit, RankProcess, fork_rank
from sparkring.worker.member.timeline import TimelineFile

TICK_S = 0.5  # look at least this often whether the parent has exited
BEAT_EVERY_S = 2.0  # well below the driver's SILENT_LIMIT_S: some Beats may be late on a busy machine
PARENT_GRACE_S = 60.0  # how long a rank may stay when Spark's worker has ended, to save a checkpoint
WATCH_GPUS_AFTER_S = 0.2  # opening NVML takes up to 0.1 s, in which the rank would have to wait for its request
# While requests are waiting in the member, a report from the rank is held back for up to HOLD_S, and sent with
# the next report. When the number of waiting requests is a multiple of TOGETHER, the report is sent at once.
HOLD_S, TOGETHER = 0.005, 8
# The largest number of messages in a row from one peer. Without this limit, a rank that never stops reporting could not
# be stopped.
MESSAGES_IN_A_ROW = 32
# The driver's messages that the member passes on to the rank without decoding them. Large ones are copied in pieces.
_PASSED_ON = get_args(messages.PassedOn)
_FROM_RANK = get_args(messages.RankReport)
_REQUEST_END = get_args(messages.RequestEnd)


class RankRequests:
    """The request that the rank runs, and those that wait behind it.

    `oom_kills` is how many processes had been killed for lack of memory when the rank was given its last request.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.waiting: collections.deque[bytes] = collections.deque()  # as frames
        self.oom_kills = process.out_of_memory_kills()

    def begin(self) -> None:
        """Note that the rank has a new request."""
        self.is_running = True
        self.oom_kills = process.out_of_memory_kills()


class Member:
    """Serves one rank: passes on its messages and its output, and ends it."""

    def __init__(self, ticket: Ticket, rank: RankProcess, parent_ended: Callable[[], bool], home: Connection) -> None:
        self.parent_ended = parent_ended
        self.folder, self.on_spark = ticket.cleanup, bool(ticket.context)
        self.rank = rank
        self.requests = RankRequests()
        self.output = RankOutput(rank.stdout, rank.stderr, self.tell)
        self.control = selectors.DefaultSelector()  # watches all but the rank's output
        self.timeline: TimelineFile | None = None
        self.last_beat = time.monotonic()
        self.leaves_at: float | None = None  # when to end, after Spark's worker has ended
        self.world = World()
        self.gpus = GpuMeter()
        self.watch_gpus_at: float | None = None
        self.home = home
        self.home.send(self.introduction(ticket))

    def introduction(self, ticket: Ticket) -> messages.Hello:
        address, packages = self.home.local_host(), None
        if sys.prefix != ticket.prefix:
            from sparkring.capture import versions  # not at the top: most members do not need it, and it takes 30 ms

            packages = versions.installed()
        return messages.Hello(
            member=ticket.member,
            pid=self.rank.pid,
            host=socket.gethostname(),
            address=address,
            interface=interface_of(address),
            port=free_port(address),
            python=sys.executable,
            # The local launcher knows the GPUs of its machine. Spark's addresses come from another program.
            gpus=resolved(ticket.gpus) if ticket.context else tuple(ticket.gpus),
            packages=packages,
            launch=ticket.launch,
            attempt=ticket.attempt,
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
        signal.signal(signal.SIGUSR1, lambda *_: self.rank.stop(signal.SIGKILL, 0.0))  # the launcher sends it
        signal.signal(signal.SIGTERM, lambda *_: self.rank.notice())
        # What ends the driver's terminal or session must not end the member before its rank.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for selector in (self.control, self.output.selector):
            for source, name in ((wake_r, "wake"), (0, "parent"), (self.home, "home"), (self.rank.channel, "rank")):
                selector.register(source, selectors.EVENT_READ, name)
        self.rank.reap()
        while (rank_exit := self.rank.exit) is None:
            now = time.monotonic()
            selector = self.control if self.output.is_paused(now) else self.output.selector
            for key, _ in selector.select(self.pause(now)):
                match key.data:
                    case "wake":
                        os.read(wake_r, 512)
                        self.rank.reap()
                    case "parent":
                        if not os.read(0, 512):
                            self.parent_gone()
                    case "home":
                        self.from_home()
                    case "rank":
                        self.from_rank()
                    case "output" if key.fd in self.output.pipes:  # otherwise, from_rank() has just read it to its end
                        self.output.forward(self.output.pipes[key.fd])
            self.take_pending()
            self.tick()
        self.finish(rank_exit)

    def take_pending(self) -> None:
        """Handle the messages that arrived together with one that has already been handled."""
        for connection, take in ((self.home, self.from_home), (self.rank.channel, self.from_rank)):
            for _ in range(MESSAGES_IN_A_ROW):
                if connection.pending:
                    take()

    def pause(self, now: float) -> float:
        """Return how many seconds to wait for something to read."""
        if self.home.pending or self.rank.channel.pending:
            return 0.0
        wait = min(TICK_S, self.output.due_in(now))
        if self.rank.kill_at is not None:
            wait = min(wait, max(0.0, self.rank.kill_at - now))
        if self.home.held_since is not None:
            wait = min(wait, max(0.0, self.home.held_since + HOLD_S - now))
        return wait

    def tick(self) -> None:
        now = time.monotonic()
        if self.leaves_at is None and self.parent_ended():
            self.parent_gone()
        if self.leaves_at is not None and now >= self.leaves_at:
            self.abandon()
        self.rank.kill_if_due(now)
        self.output.send_partial_lines(now)
        if self.home.held_since is not None and now - self.home.held_since >= HOLD_S:
            self.reach_home(self.home.send_held)
        if self.watch_gpus_at is not None and now >= self.watch_gpus_at:
            self.watch_gpus_at = None
            self.tell_of_gpu_troubles()  # NVML reports only errors that happen after this first question
        if now - self.last_beat > BEAT_EVERY_S:
            self.last_beat = now
            self.tell(messages.Beat())
            for gpu in self.gpus.changes():
                self.tell(gpu)
            self.tell_of_gpu_troubles()
        if (used := self.rank.usage.reading(now)) is not None:
            self.tell(used)

    # ── to and from the driver ────────────────────────────────────────────────

    def tell(self, message: messages.MemberReport) -> None:
        self.reach_home(lambda: self.home.send(message))

    def reach_home(self, send: Callable[[], None]) -> None:
        """Call `send`, which sends something to the driver. If the driver is gone, end this process."""
        try:
            send()
        except ChannelClosed:
            self.abandon()

    def tell_of_gpu_troubles(self) -> None:
        for trouble in self.gpus.troubles():
            self.tell(trouble)

    def from_home(self) -> None:
        try:
            head = self.home.receive_head()
            if head.kind is messages.Run and self.requests.is_running:
                self.requests.waiting.append(self.home.receive_frame(head))
            elif head.kind in _PASSED_ON:
                if head.kind is messages.Run:
                    self.requests.begin()
                self.reach_rank(lambda: self.home.pass_on(head, self.rank.channel))
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
                self.rank.stop(order.signal, order.grace_s)
            case messages.Interrupt():
                if self.requests.waiting:
                    self.give_back()
                process.signal_group(self.rank.pid, signal.SIGINT)
            case messages.GiveBack():
                self.give_back()
            case messages.TakeStack():
                self.tell(self.rank.take_stack())
            case messages.EnterWorld():
                self.world = order.world
                self.gpus = GpuMeter(order.world.gpus)
                self.watch_gpus_at = time.monotonic() + WATCH_GPUS_AFTER_S
                self.reach_rank(lambda: self.rank.channel.send(order))
            case messages.RecordTimeline():
                # The rank's framework writes its timeline to a file, which finish() sends to the driver at the end.
                if self.timeline is None:
                    self.timeline = TimelineFile(self.folder, wanted=order.wanted)
                variables = messages.SetEnvironment({order.variable: self.timeline.path})
                self.reach_rank(lambda: self.rank.channel.send(variables))
            case _:
                messages.never(order)

    def reach_rank(self, send: Callable[[], None]) -> None:
        """Call `send`, which sends something to the rank. If the rank has exited, ignore the error.

        Raise ChannelClosed if the connection to the driver has broken.
        """
        try:
            send()
        except ChannelClosed:
            if not self.rank.has_ended():
                raise

    def from_rank(self) -> None:
        try:
            head = self.rank.channel.receive_head()
            if head.kind not in _FROM_RANK:
                raise ProtocolError(f"{head.kind.__name__} is not for the driver")
        except ProtocolError as error:
            # The bytes that follow cannot be read as messages. main() catches the error, and ends the rank.
            self.tell(messages.Output("stderr", f"sparkring: this rank sent an invalid message: {error}\n".encode()))
            raise
        except ChannelClosed:
            for selector in (self.control, self.output.selector):
                selector.unregister(self.rank.channel)
            self.rank.reap()
            return
        if head.kind in _REQUEST_END or head.kind is messages.InputRequested:
            self.output.drain()
        if head.kind in _REQUEST_END:
            if head.kind is messages.Failed:
                if self.requests.waiting:
                    self.give_back()
                self.tell_of_gpu_troubles()  # before the failure, because they may be its cause
            self.requests.is_running = False
        hold = len(self.requests.waiting) % TOGETHER > 0
        try:
            self.rank.channel.pass_on(head, self.home, hold=hold)
        except ChannelClosed:
            if not self.rank.has_ended():
                self.abandon()
        if self.requests.waiting and not self.requests.is_running:
            self.reach_rank(lambda: self.rank.channel.send_frame(self.requests.waiting.popleft()))
            self.requests.begin()  # after sending, so that the rank need not wait for this

    def give_back(self) -> None:
        """Return the waiting requests to the driver."""
        self.tell(messages.GivenBack(len(self.requests.waiting)))
        self.requests.waiting.clear()

    # ── the end ──────────────────────────────────────────────────────────────────

    def parent_gone(self) -> None:
        """End, now that the parent has ended. If this is Spark's worker, let a rank that saves checkpoints save first.

        Spark ends its workers when an executor is ended. The driver may be as well as before.
        """
        if not self.on_spark or not self.rank.catches_sigterm():
            self.abandon()
        self.leaves_at = time.monotonic() + PARENT_GRACE_S
        for selector in (self.control, self.output.selector):
            selector.unregister(0)
        self.rank.notice()

    def abandon(self) -> NoReturn:
        """Make main() kill the rank and end this process. The driver or the parent is gone, so nothing is reported."""
        raise SystemExit(1)

    def finish(self, rank_exit: RankExit) -> None:
        """Kill the processes that the rank has left behind, send its last output, and report how it exited."""
        process.kill_family(self.rank.pid)  # first: a process that is left could keep the pipes open
        self.output.finish()  # before Exited, which is the last message about this rank
        if self.timeline is not None:
            for piece in self.timeline.pieces():
                self.tell(piece)
            self.timeline.remove()
        code = os.waitstatus_to_exitcode(rank_exit.wait_status)  # a negative number stands for a signal
        self.tell_of_gpu_troubles()
        self.tell(
            messages.Exited(
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                out_of_memory=process.out_of_memory_kills() > self.requests.oom_kills,
                peak_memory_bytes=rank_exit.peak_memory_bytes,
                gpu=self.gpu_fault() if -code == signal.SIGABRT else None,
            )
        )
        self.home.finish()

    def gpu_fault(self) -> messages.GpuFault | None:
        """Return what went wrong with a GPU, according to what a library printed when it aborted the rank."""
        from sparkring.worker.rank import gpu_faults  # not at the top, since most members do not need it

        return gpu_faults.find_in_output(self.output.last_errors, self.world.rank, self.world.gpus)


def main(ticket: Ticket, driver: int | None = None) -> None:
    """Run a member, and then exit this process.

    The member stops early if its parent exits or, if a spare process has forked it, if the process `driver` exits.
    """
    parent = os.getppid()
    process.adopt_orphans()
    rank = fork_rank(ticket)  # first, so that the rank imports its modules while this process connects
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
