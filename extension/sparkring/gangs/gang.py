"""A gang: N ranks that have dialled home. Placement, turns, ends, for every launcher.

Connection threads (one per member) put frames into one bounded queue; whoever runs the gang takes them
out with poll(), as events. The bound holds ranks back when they print faster than the driver can read.
A gang runs one request after another, each of them a Turn; a cold gang is given one, a warm gang many.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, get_args

from sparkring.capture.versions import difference
from sparkring.errors import LaunchError, MemberLost
from sparkring.frameworks import FRAMEWORKS
from sparkring.frameworks.base import Framework, Seat, Start
from sparkring.gangs.execution import Request, Turn
from sparkring.gangs.exit_status import exit_failure
from sparkring.history import events, stacks
from sparkring.history.events import Event, Failure
from sparkring.launchers.base import Launcher
from sparkring.runtime.storage import root_for_ranks
from sparkring.runtime.world import World, gpu_environments, place_ranks
from sparkring.wire.channel import Buffer, ChannelClosed, Connection, Frame, Listener
from sparkring.wire.ticket import Ticket

QUEUE_FRAMES = 64
SILENT_LIMIT_S = 30.0  # a member beats every 2 s
SMALL_BYTES = 64 * 1024  # such a payload fits into what the system buffers: sending it needs no thread
DISPLAY_TYPES = get_args(events.DisplayType)
BRINGS_S = 20.0  # from one piece of a timeline to the next, or to the member's goodbye: reading it takes time, too
LOST_WAIT_S = 2.0  # Spark can say why a task has ended a moment after its member is gone
STRANGERS = 16  # connections beside the members' own that may wait for their proof
_END: tuple[int, None] = (-1, None)  # the last thing in a gang's queue
_WAKE: tuple[int, None] = (-2, None)  # nothing but a reason to look up


class Gang:
    """N ranks: `start`, then `submit` a request and `poll` until its Turn is over, as often as there is one; `close`.

    `worlds` are the places of the members, once all are up; `deaths` are the ranks whose process has ended though
    nobody asked for it.
    """

    def __init__(self, launcher: Launcher, size: int) -> None:
        self.size = size
        self.launcher = launcher
        self.worlds: list[World] = []
        self.deaths: dict[int, Failure] = {}
        self.turn: Turn | None = None
        self._secret = secrets.token_bytes(32)
        self._inbox: queue.Queue[tuple[int, Frame | None]] = queue.Queue(QUEUE_FRAMES)
        self._connections: dict[int, Connection] = {}
        self._hellos: dict[int, dict[str, Any]] = {}
        self._rank_of: dict[int, int] = {}
        self._member_of: dict[int, int] = {}
        self._seats: list[Seat] = []  # by rank
        self._frameworks: dict[str, Framework] = {}
        self._gpus: dict[tuple[int, str], events.GpuUsed] = {}  # the last of each: members tell changes only
        self._early: list[tuple[int, Frame]] = []
        self._untold: list[Event] = []  # what poll() is to return before anything else
        self._exited: set[int] = set()
        self._polled = time.monotonic()
        self._brings_until = 0.0
        self._leaving = False
        self._stopping = False
        self._senders: dict[int, threading.Thread] = {}
        self._outbox: dict[int, list[tuple[str, dict[str, Any] | None, Sequence[Buffer]]]] = {}
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
        ticket = Ticket(-1, self.launcher.host, listener.port, self._secret.hex(), [], [], sys.prefix)
        self._started = time.monotonic()
        self.launcher.start(self.size, ticket)

    def submit(self, request: Request, ranks: Sequence[int] = ()) -> Turn:
        """Have `ranks` (all if none is named) run `request` as soon as the gang is up; no other turn may be running.

        LaunchError, here or from poll(), if the ranks' Python lacks what the request needs.
        """
        self._check_packages(request)
        self.turn = Turn(request, tuple(ranks) or tuple(range(self.size)))
        if self.up:
            self._begin(self.turn)
        return self.turn

    @property
    def up(self) -> bool:
        """Whether all ranks have been given their World."""
        return bool(self.worlds)

    def place_of(self, rank: int) -> tuple[int, str, int]:
        """The rank, its node and its process."""
        member = self._member_of[rank]
        return rank, self.worlds[member].node, self._hellos[member]["pid"]

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._closed.is_set()

    @property
    def brings(self) -> bool:
        """Whether a rank's process has ended whose timeline is still on its way."""
        return time.monotonic() < self._brings_until

    @property
    def gone(self) -> bool:
        """Whether every rank's process has ended."""
        return len(self._exited) == self.size

    def poll(self, timeout_s: float) -> list[Event]:
        """What has happened: waits up to `timeout_s` for the first event, then takes what is there."""
        found, self._untold = self._untold, []
        if self.turn is not None and self.turn.decides_in_s is not None:
            timeout_s = min(timeout_s, self.turn.decides_in_s)
        try:
            found += self._take(*(self._inbox.get_nowait() if found else self._inbox.get(timeout=timeout_s)))
            for _ in range(QUEUE_FRAMES):  # and no more: ranks that print on and on must not keep us here
                found += self._take(*self._inbox.get_nowait())
        except queue.Empty:
            pass
        found += self._watch()
        return found

    def wake(self) -> None:
        """Have a poll() that waits in another thread return."""
        with contextlib.suppress(queue.Full):  # then it does not wait
            self._inbox.put_nowait(_WAKE)

    def interrupt(self) -> None:
        """Interrupt what the ranks of this turn still run, as Ctrl-C would."""
        if self.turn is not None and self.up:
            self.turn.interrupted = True
            for rank in self.turn.running:
                self._tell(self._member_of[rank], "interrupt")

    def release(self) -> None:
        """Have every rank end the collectives that it, or another one, waits in."""
        self._to_all("release")

    def leave(self) -> None:
        """Tell the ranks that nothing more will come."""
        self._leaving = True
        self._to_all("leave")

    def stop(self, number: int, grace_s: float) -> None:
        """Have every rank's process group signalled, and killed after the grace."""
        self._stopping = True
        self._to_all("stop", {"signal": int(number), "grace_s": grace_s})

    def ask_for_stacks(self) -> None:
        """Have every member say where its rank stands; the answers come as StackTaken events."""
        self._to_all("stacks")

    def close(self) -> None:
        """End what is left, wait until it has ended, and release everything; a second time there is nothing to do."""
        if self.closed:
            return
        self._stopping = True
        # Nobody polls any more, and members must not wait for a full queue.
        drain = threading.Thread(target=self._drain, name="sparkring-drain", daemon=True)
        drain.start()
        try:
            if not self.gone:
                self._to_all("stop", {"signal": int(signal.SIGKILL), "grace_s": 0.0})
            self.launcher.stop(0.5 if self._outbox else 3.0)  # a rank that takes nothing in hears nothing either
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

    def _tell(self, member: int, kind: str, fields: dict[str, Any] | None = None, parts: Sequence[Buffer] = ()) -> None:
        with self._lock:
            if member in self._outbox:  # behind what is on its way; a frozen rank may never take that in
                self._outbox[member].append((kind, fields, parts))
                return
        self._post(member, kind, fields, parts)

    def _post(self, member: int, kind: str, fields: dict[str, Any] | None, parts: Sequence[Buffer]) -> None:
        try:
            self._connections[member].send(kind, fields, parts)
        except ChannelClosed:
            pass  # its own thread tells

    def _take(self, member: int, frame: Frame | None) -> list[Event]:
        """One frame as events."""
        now = time.time()
        if frame is None:
            return self._lost(member, "its connection broke off") if member >= 0 else []
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
            case "display" if fields["mime_type"] in DISPLAY_TYPES:
                return [events.Displayed(now, rank, data=bytes(frame.parts[0]), **fields)]
            case "message":
                return [events.Message(now, rank, fields["text"])]
            case "metrics":
                return [events.Metrics(now, rank, **fields)]
            case "gpu":
                self._gpus[rank, fields["address"]] = events.GpuUsed(now, rank, **fields)
                return [self._gpus[rank, fields["address"]]]
            case "data":
                opened = fields["opened"]
                return [events.DataOpened(now, rank, **{**opened, "columns": tuple(opened["columns"])})]
            case "plan":
                return [events.DataPlanned(now, rank, **events.plan_from_json(fields))]
            case "read":
                return [events.DataRead(now, rank, **fields)]
            case "checkpoint":
                kind, told = fields["event"], fields["told"]
                return [events.CHECKPOINT_EVENTS[kind](time=now, rank=rank, **told)]
            case "timeline":
                self._brings_until = time.monotonic() + BRINGS_S
                return [events.TimelinePart(now, rank, bytes(frame.parts[0]), fields["last"], fields["cut"])]
            case "done" if self.turn is not None:
                self._heard_of(rank, fields)
                return self.turn.finished(rank, frame)
            case "failed":
                self._heard_of(rank, fields)
                return self._failed(rank, events.failure_from_json(fields["failure"]))
            case "stack":
                line = stacks.cell_line(fields["text"])
                return [events.StackTaken(now, rank, fields["state"], line, fields["text"])]
            case "exited":
                return self._died(rank, exit_failure(fields))
        return []

    def _enter_world(self) -> list[Event]:
        """All have joined: give each its rank, and the request if there is one already."""
        hellos = [self._hellos[member] for member in range(self.size)]
        by_node = self.turn is None or FRAMEWORKS[self.turn.request.framework].by_node
        self.worlds = place_ranks(_nodes(hellos), [hello["gpus"] for hello in hellos], by_node=by_node)
        gpus = gpu_environments(self.worlds) if self.launcher.pins_gpus else {}
        self._rank_of = {member: place.rank for member, place in enumerate(self.worlds)}
        self._member_of = {rank: member for member, rank in self._rank_of.items()}
        for rank in range(self.size):
            hello, connection = hellos[self._member_of[rank]], self._connections[self._member_of[rank]]
            seat = Seat(hello["host"], hello["address"], hello["interface"], connection.peer_host(), hello["port"])
            self._seats.append(seat)
        if self.turn is not None:
            self._check_packages(self.turn.request)
        for member, place in enumerate(self.worlds):
            world = {
                "world": place._asdict(),
                "address": hellos[member]["address"],
                "environment": gpus.get(place.node, {}),
            }
            self._tell(member, "world", world)
        if self.turn is not None:
            self._begin(self.turn)
        found, self._untold = self._untold, []
        for member, frame in self._early:
            found += self._take(member, frame)
        return found

    # ── turns ─────────────────────────────────────────────────────────────────

    def _begin(self, turn: Turn) -> None:
        """Send the request to the ranks that take part."""
        request, now = turn.request, time.time()
        framework = self._framework(request.framework)
        start = Start(request.checkpoints.run_id, request.restarts, request.max_restarts)
        for rank in turn.ranks:
            member = self._member_of[rank]
            environment = root_for_ranks() | framework.environment(self.worlds[member], start)
            if request.timeline and framework.timeline is not None:
                environment |= framework.timeline.beside
                self._tell(member, "timeline", {"variable": framework.timeline.variable, "wanted": rank == 0})
            environment |= dict(request.environment)
            fields = {
                "what": request.what,
                "source": request.source,
                "pull": list(request.pull) if rank == turn.ranks[0] else [],
                "autolog": request.autolog,
                "barrier": framework.in_task,
                "environment": environment,
                "notebook": request.notebook._asdict(),
                "defaults": framework.defaults(self.worlds[member]),
                "checkpoints": request.checkpoints._asdict(),
                "scripts": [script._asdict() for script in request.scripts],
            }
            parts: list[Buffer] = [request.payload, *request.buffers]
            if sum(map(len, parts)) <= SMALL_BYTES:
                self._tell(member, "run", fields, parts)
            else:
                self._send(member, fields, parts)
            self._untold.append(events.RankStarted(now, *self.place_of(rank)))
        self._untold += [replace(used, time=now) for (rank, _), used in self._gpus.items() if rank in turn.ranks]

    def _check_packages(self, request: Request) -> None:
        """LaunchError if a member runs another Python that lacks a package which the request needs."""
        for hello in self._hellos.values():
            if hello["packages"] is not None and (found := difference(request.modules, hello["packages"])):
                raise LaunchError(
                    f"the cell's values need {found.module} {found.here}, as in this notebook's Python "
                    f"({sys.executable}), but the executors' Python on {hello['host']} ({hello['python']}) has "
                    f"{found.there or 'none'}: set PYSPARK_PYTHON to a Python with the notebook's packages before the "
                    f"SparkSession is made, or install {found.module} there."
                )

    def _send(self, member: int, fields: dict[str, Any], parts: Sequence[Buffer]) -> None:
        """Send to several members at once, while they go on telling."""
        with self._lock:
            self._outbox[member] = [("run", fields, parts)]
        sender = threading.Thread(target=self._empty_outbox, args=(member,), name="sparkring-send", daemon=True)
        sender.start()
        self._senders[member] = sender

    def _empty_outbox(self, member: int) -> None:
        """In a thread of its own: send what waits for a member, until nothing does."""
        while True:
            with self._lock:
                if not self._outbox[member]:
                    del self._outbox[member]
                    return
                kind, fields, parts = self._outbox[member].pop(0)
            self._post(member, kind, fields, parts)

    def _framework(self, name: str) -> Framework:
        if name not in self._frameworks:
            framework = FRAMEWORKS[name](self.launcher.host, self.launcher.bind_host, self._seats)
            self._frameworks[name] = framework
            self._cleanup.callback(framework.close)
        return self._frameworks[name]

    def _heard_of(self, rank: int, fields: dict[str, Any]) -> None:
        """What a rank tells at the end of a request beside how it went."""
        # Where its framework may listen next time: the port of this time may not be free yet.
        self._seats[rank] = self._seats[rank]._replace(port=fields["port"])
        if self.turn is not None:
            self.turn.names.update(fields["names_bound"])
            if fields["loaded"]:
                self.turn.loaded.add(rank)

    # ── ends ──────────────────────────────────────────────────────────────────

    def _failed(self, rank: int, failure: Failure) -> list[Event]:
        if self.turn is None or (self._stopping and failure.interrupt):
            return []  # between turns, or it does as it was told
        return self.turn.failed(rank, failure)

    def _died(self, rank: int, failure: Failure) -> list[Event]:
        """A rank's process is no more."""
        if rank in self._exited:
            return []
        self._exited.add(rank)
        found: list[Event] = []
        if not (self._leaving or self._stopping):
            self.deaths[rank] = failure
            found += self._failed(rank, failure)
        return [*found, events.RankExited(time.time(), rank)]

    def _lost(self, member: int, how: str) -> list[Event]:
        """A member without a goodbye: its host, its executor or itself is gone."""
        if not self.up:
            if self._stopping:
                return []
            host = self._hellos[member]["host"]
            raise MemberLost(f"member {member} on {host} went away before all {self.size} ranks were up: {how}.")
        rank = self._rank_of[member]
        if rank in self._exited:
            return []  # it has said goodbye
        said = f"{how} (the member on {self.worlds[member].node} is gone)"
        reason = None if self._stopping else self.launcher.problem(LOST_WAIT_S)
        return self._died(rank, Failure("lost", f"lost: {said}", advice=str(reason or "")))

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
                sender = self._senders.get(member)
                if silent_s > SILENT_LIMIT_S and not (sender and sender.is_alive()):
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
