"""A gang: N ranks that have dialled home. Placement, requests, failures, interrupts, for every launcher.

Connection threads (one per member) put frames into one bounded queue; whoever runs the gang takes them
out with poll(), as events. The bound holds ranks back when they print faster than the driver can read.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, NamedTuple

from sparkring import events
from sparkring.channel import ChannelClosed, Connection, Frame, Listener
from sparkring.ends import echo_order, exit_failure
from sparkring.errors import LaunchError, MemberLost
from sparkring.events import Event, Failure
from sparkring.frameworks import FRAMEWORKS
from sparkring.frameworks.base import Seat
from sparkring.launchers.base import Launcher
from sparkring.place import World, place_ranks
from sparkring.worker import stacks
from sparkring.worker.ticket import Ticket

QUEUE_FRAMES = 64
SILENT_LIMIT_S = 30.0  # a member beats every 2 s
SETTLE_S = 0.15  # after an exception, wait this long for a rank that died without a word: that is the cause
INTERRUPT_GRACE_S = 1.0
FAILURE_GRACE_S = 0.1
LEAVE_GRACE_S = 10.0
LOST_WAIT_S = 2.0  # Spark can say why a task has ended a moment after its member is gone
STRANGERS = 16  # connections beside the members' own that may wait for their proof
_END: tuple[int, None] = (-1, None)  # the last thing in a gang's queue


class Request(NamedTuple):
    """What the ranks are to run: a cell's source with its packed names, or a packed call."""

    what: Literal["cell", "call"]
    payload: bytes
    source: str = ""
    pull: tuple[str, ...] = ()
    autolog: bool = True
    barrier: bool = False  # the cell is given `context` and `rows`


class Value(NamedTuple):
    """A value that came back, still packed: its parts, or why it could not be packed."""

    type_name: str
    parts: list[Any]
    error: str


class Gang:
    """N ranks. `start`, then `submit` and `poll` until `over`, then `close` (or use it as a context)."""

    def __init__(self, launcher: Launcher, size: int, framework: str) -> None:
        self.size = size
        self.launcher = launcher
        self.worlds: list[World] = []
        self.values: list[dict[str, Value]] = [{} for _ in range(size)]  # by rank; "" is the last expression
        self.missing: list[str] = []  # names to pull that rank 0 does not have
        self.failures: dict[int, Failure] = {}
        self._framework_name = framework
        self._secret = secrets.token_bytes(32)
        self._inbox: queue.Queue[tuple[int, Frame | None]] = queue.Queue(QUEUE_FRAMES)
        self._connections: dict[int, Connection] = {}
        self._hellos: dict[int, dict[str, Any]] = {}
        self._rank_of: dict[int, int] = {}
        self._early: list[tuple[int, Frame]] = []
        self._finished: set[int] = set()
        self._exited: set[int] = set()
        self._polled = time.monotonic()
        self._decide_at: float | None = None
        self._stopping = False
        self._senders: dict[int, threading.Thread] = {}
        self._cleanup = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    # ── life ──────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Open the door and have the members started; returns at once. LaunchError if that fails."""
        try:
            listener = Listener(
                self.launcher.bind_host,
                self.launcher.port,
                self._secret,
                self._welcome,
                most=self.size + STRANGERS,
            )
        except OSError as error:
            place = f"{self.launcher.bind_host}:{self.launcher.port}"
            raise LaunchError(
                f"the driver cannot listen on {place}: {error.strerror or error}. "
                + (
                    "Set spark.sparkring.driver.port to a free port, or leave it out for any free one."
                    if self.launcher.port
                    else "Set spark.driver.host (or spark.driver.bindAddress) to an address of this machine."
                )
            ) from error
        self._cleanup.callback(listener.close)
        self._cleanup.callback(self._closed.set)
        ticket = Ticket(-1, self.launcher.host, listener.port, self._secret.hex(), [], [])
        self._started = time.monotonic()
        self.launcher.start(self.size, ticket)

    def submit(self, request: Request) -> None:
        """Have every rank run `request`, as soon as all are up."""
        fields = {
            "what": request.what,
            "source": request.source,
            "pull": list(request.pull),
            "autolog": request.autolog,
            "barrier": request.barrier,
        }
        self._request = (fields, [request.payload])

    @property
    def up(self) -> bool:
        """Whether all ranks have been given their World."""
        return bool(self.worlds)

    @property
    def done(self) -> bool:
        """Whether every rank has run the request to its end."""
        return len(self._finished) == self.size

    @property
    def failed_rank(self) -> int | None:
        """The rank whose failure ends the gang, once that can be told."""
        if not self.failures or (self._decide_at is not None and time.monotonic() < self._decide_at):
            return None
        # The first to fail, unless it only echoes another: dicts keep the order of arrival.
        return min(self.failures, key=lambda rank: echo_order(self.failures[rank]))

    @property
    def gone(self) -> bool:
        """Whether every rank's process has ended."""
        return len(self._exited) == self.size

    def poll(self, timeout_s: float) -> list[Event]:
        """What has happened: waits up to `timeout_s` for the first event, then takes what is there."""
        found: list[Event] = []
        if self._decide_at is not None:
            timeout_s = min(timeout_s, max(0.01, self._decide_at - time.monotonic()))
        try:
            item = self._inbox.get(timeout=timeout_s)
            for _ in range(QUEUE_FRAMES):
                found += self._take(*item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            pass
        found += self._watch()
        return found

    def leave(self) -> None:
        """Tell the ranks that nothing more will come."""
        self._to_all("leave")

    def stop(self, number: int, grace_s: float) -> None:
        """Have every rank's process group signalled, and killed after the grace."""
        self._stopping = True
        self._to_all("stop", {"signal": int(number), "grace_s": grace_s})

    def ask_for_stacks(self) -> None:
        """Have every member say where its rank stands; the answers come as StackTaken events."""
        self._to_all("stacks")

    def close(self) -> None:
        """End what is left, wait until it has ended, and release everything."""
        self._stopping = True
        # Nobody polls any more, and members must not wait for a full queue.
        drain = threading.Thread(target=self._drain, name="sparkring-drain", daemon=True)
        drain.start()
        try:
            if not self.gone:
                self._to_all("stop", {"signal": int(signal.SIGKILL), "grace_s": 0.0})
            self.launcher.stop(3.0)
        finally:
            self._cleanup.close()
            self._inbox.put(_END)
            drain.join()
            for sender in self._senders.values():
                sender.join()

    def __enter__(self) -> Gang:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── members ───────────────────────────────────────────────────────────────

    def _welcome(self, connection: Connection) -> None:
        """In a connection's own thread: read until it ends."""
        member = -1
        try:
            hello = connection.receive()
            member = int(hello.fields["member"])
            with self._lock:
                if hello.kind != "hello" or not 0 <= member < self.size or member in self._connections:
                    return
                self._connections[member] = connection
            self._put(member, hello)
            while True:
                self._put(member, connection.receive())
        except ChannelClosed:
            if member in self._connections:
                self._put(member, None)

    def _put(self, member: int, frame: Frame | None) -> None:
        while not self._closed.is_set():
            try:
                self._inbox.put((member, frame), timeout=0.5)
                return
            except queue.Full:
                continue  # ranks print faster than we read: hold them back

    def _drain(self) -> None:
        while (item := self._inbox.get()) is not _END:
            self._take(*item)

    def _to_all(self, kind: str, fields: dict[str, Any] | None = None) -> None:
        for member in list(self._connections):
            self._tell(member, kind, fields)

    def _tell(self, member: int, kind: str, fields: dict[str, Any] | None = None) -> None:
        try:
            self._connections[member].send(kind, fields)
        except ChannelClosed:
            pass  # its own thread tells

    def _take(self, member: int, frame: Frame | None) -> list[Event]:
        """One frame as events."""
        now = time.time()
        if frame is None:
            return self._lost(member, "its connection broke off")
        if frame.kind == "hello":
            self._hellos[member] = frame.fields
            joined: list[Event] = [events.MemberJoined(now, member, frame.fields["host"])]
            if self._stopping:  # it comes too late for what the others were told
                self._tell(member, "stop", {"signal": int(signal.SIGKILL), "grace_s": 0.0})
            elif len(self._hellos) == self.size:
                joined += self._enter_world()
            return joined
        if not self.up:
            self._early.append((member, frame))  # a rank that speaks before it has a number: told then
            return []
        rank = self._rank_of[member]
        fields = frame.fields
        match frame.kind:
            case "output":
                return [events.Output(now, rank, fields["stream"], bytes(frame.parts[0]))]
            case "message":
                return [events.Message(now, rank, fields["text"])]
            case "metrics":
                return [events.Metrics(now, rank, **fields)]
            case "done":
                parts = list(frame.parts)
                for item in fields["names"]:
                    taken, parts = parts[: item["parts"]], parts[item["parts"] :]
                    self.values[rank][item["name"]] = Value(item["type"], taken, item["error"])
                self.missing += fields["missing"]
                self._finished.add(rank)
                return [events.RankFinished(now, rank, fields["repr"])]
            case "failed":
                return self._failed(rank, events.failure_from_json(fields["failure"]))
            case "stack":
                line = stacks.cell_line(fields["text"])
                return [events.StackTaken(now, rank, fields["state"], line, fields["text"])]
            case "exited":
                return self._process_ended(rank, fields)
        return []

    def _enter_world(self) -> list[Event]:
        """All have joined: give each its rank, its environment and the request."""
        hellos = [self._hellos[member] for member in range(self.size)]
        by_node = FRAMEWORKS[self._framework_name].by_node
        self.worlds = place_ranks(_nodes(hellos), by_node=by_node)
        self._rank_of = {member: place.rank for member, place in enumerate(self.worlds)}
        seats = [
            Seat(
                hello["host"],
                hello["address"],
                hello["interface"],
                self._connections[member].peer_host(),
                hello["port"],
            )
            for member, hello in enumerate(hellos)
        ]
        by_rank = [seats[member] for member in sorted(self._rank_of, key=self._rank_of.__getitem__)]
        framework = FRAMEWORKS[self._framework_name](self.launcher.host, self.launcher.bind_host, by_rank)
        self._cleanup.callback(framework.close)
        fields, parts = self._request
        found: list[Event] = []
        now = time.time()
        for member, place in enumerate(self.worlds):
            world = {
                "world": place._asdict(),
                "environment": framework.environment(place, seats[member]),
                "path": [entry for entry in sys.path if entry],
                "folder": os.getcwd(),
            }
            sender = threading.Thread(
                target=_send_start,
                args=(self._connections[member], world, fields, parts),
                name="sparkring-send",
                daemon=True,
            )
            sender.start()  # in parallel: the payload may be large
            self._senders[member] = sender
            found.append(events.RankStarted(now, place.rank, place.node, hellos[member]["pid"]))
        for member, frame in self._early:
            found += self._take(member, frame)
        return found

    # ── ends ──────────────────────────────────────────────────────────────────

    def _failed(self, rank: int, failure: Failure) -> list[Event]:
        if rank in self.failures or rank in self._finished:
            return []
        if self._stopping and failure.interrupt:
            return []  # it does as it was told
        self.failures[rank] = failure
        if echo_order(failure) == 0:
            self._decide_at = None
        elif len(self.failures) == 1:
            self._decide_at = time.monotonic() + SETTLE_S
        return [events.RankFailed(time.time(), rank, failure)]

    def _process_ended(self, rank: int, fields: dict[str, Any]) -> list[Event]:
        found: list[Event] = []
        if rank not in self._exited:
            self._exited.add(rank)
            if not self._stopping and rank not in self._finished:
                found += self._failed(rank, exit_failure(fields))
            found.append(events.RankExited(time.time(), rank))
        return found

    def _lost(self, member: int, how: str) -> list[Event]:
        """A member without a goodbye: its host, its executor or itself is gone."""
        if not self.up:
            if self._stopping:
                return []
            host = self._hellos[member]["host"]
            raise MemberLost(f"member {member} on {host} went away before all {self.size} ranks were up: {how}.")
        rank = self._rank_of[member]
        if rank in self._exited:
            return []
        self._exited.add(rank)
        found: list[Event] = []
        if not self._stopping and rank not in self._finished:
            reason = self.launcher.problem(LOST_WAIT_S)
            said = f"{how} (the member on {self.worlds[member].node} is gone)"
            advice = str(reason) if reason else ""
            found += self._failed(rank, Failure("lost", f"lost: {said}", advice=advice))
        found.append(events.RankExited(time.time(), rank))
        return found

    def _watch(self) -> list[Event]:
        """What no frame tells: a launch that fails, members that fall silent."""
        now = time.monotonic()
        slept, self._polled = now - self._polled, now
        found: list[Event] = []
        if self._stopping:
            return found
        if not self.up:
            problem = self.launcher.problem()
            if problem is not None:
                raise problem
            if now - self._started > self.launcher.give_up_after_s:
                missing = [member for member in range(self.size) if member not in self._hellos]
                raise MemberLost(
                    f"{len(missing)} of {self.size} ranks did not start within "
                    f"{self.launcher.give_up_after_s:.0f} s (first missing: member {missing[0]}). Members dial the "
                    f"driver at {self.launcher.host}: can that address be reached from where they run?"
                )
        elif slept < SILENT_LIMIT_S / 4:  # else it is we who were away
            for member, connection in self._connections.items():
                silent_s = now - connection.heard_at
                # While it passes a large payload on to its rank, a member has no time to beat.
                if silent_s > SILENT_LIMIT_S and not self._senders[member].is_alive():
                    found += self._lost(member, f"nothing heard of it for {silent_s:.0f} s")
        else:
            for connection in self._connections.values():
                connection.heard_at = now
        return found


def _nodes(hellos: list[dict[str, Any]]) -> list[str]:
    """What tells the members' nodes apart: their hosts' names, with the address where two hosts share a name."""
    addresses: dict[str, set[str]] = {}
    for hello in hellos:
        addresses.setdefault(hello["host"], set()).add(hello["address"])
    return [
        hello["host"] if len(addresses[hello["host"]]) == 1 else f"{hello['host']}-{hello['address']}"
        for hello in hellos
    ]


def _send_start(connection: Connection, world: dict[str, Any], fields: dict[str, Any], parts: Iterable[bytes]) -> None:
    try:
        connection.send("world", world)
        connection.send("run", fields, list(parts))
    except ChannelClosed:
        pass  # the connection's own thread tells
