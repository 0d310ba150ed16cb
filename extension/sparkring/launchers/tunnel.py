"""The driver's end of a tunnel, for members that cannot connect to the driver: short Spark jobs carry the messages.

The first launch in a session whose members cannot connect asks for a route. For the first route, a job starts a relay
beside the executors (worker/relay.py), to which members connect instead. From then on, one thread runs jobs that wait
for what members send, and another one runs jobs that bring what the driver sends. For each connection of a member,
there is a connection from here to the gang's own listener, so gangs do not notice the tunnel. After the last route, the
relay exits; if the driver is killed, it exits after LEASE_S.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from sparkring.cluster.base import UNKNOWN_SLOTS
from sparkring.cluster.formation import COPY_SETTING, copies_tasks, dynamic_allocation, most_slots
from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.slots import Stage, running
from sparkring.errors import LaunchError, SlotsError
from sparkring.executor.orders import RelayOrder, Ticket
from sparkring.executor.tasks import task_for
from sparkring.history.describe import counted, duration
from sparkring.runtime.kernel import tell
from sparkring.wire.tunnel import ALL_ROUTES, FrameKind, TunnelEnd
from sparkring.worker.relay_task import Exchange, RelayStart, exchange, start_relay

if TYPE_CHECKING:
    from sparkring.cluster.base import Address, Cluster

LEASE_S = 30.0  # as long as a gang waits for a silent member
WAIT_S = 2.0  # a job waits so long for what members send, as long as a member is silent at most
# If only one slot is free, a job that brings something has to wait for the one that waits.
CRAMPED_WAIT_S = 0.25
_ATTEMPTS, _AGAIN_S = 3, 1.0
_GOODBYE_S = 5.0
END_THREAD = "sparkring-tunnel-end"
_CONNECT_S = 10.0
_TITLE = "tunnel for messages"

# Why members cannot connect to an address of this process, as an earlier launch has found out.
_unreached: dict[tuple[Cluster, Address], str] = {}
_explained: set[tuple[Cluster, Address]] = set()  # what the user has been told
_tunnels: dict[Cluster, _Tunnel] = {}
_changing = threading.RLock()


class _TunnelLost(Exception):
    """The relay does not answer, or Spark runs no jobs any more."""


def why_needed(cluster: Cluster) -> str:
    """Return why members cannot connect to this process, if a launch has found that out; otherwise ''."""
    return _unreached.get((cluster, cluster.address()), "") if _unreached else ""


def note_reach(cluster: Cluster, unreached: str) -> None:
    """Remember why members cannot connect to this process; '' if they can."""
    key = (cluster, cluster.address())
    if unreached:
        _unreached[key] = unreached
    else:
        _unreached.pop(key, None)


class TunnelRoute:
    """The way from the members of one gang to its listener. It must be closed when the gang has ended.

    When the tunnel has failed, `problem` says why.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._tunnel: _Tunnel | None = None
        self._number = 0
        self._closed = False
        self.relay = ("", 0)  # the host and the port of the relay, for members
        self.home = ("", 0)

    def open(self, port: int, unreached: str) -> None:
        """Open the route to the listener at `port`.

        `unreached` says why members cannot connect. Raise SlotsError if the launches leave no slot for the tunnel's
        jobs, and LaunchError if the relay cannot be started.
        """
        address = self._cluster.address()
        note_reach(self._cluster, unreached)
        self.home = (_LOCAL.get(address.bind_host, address.bind_host), port)
        with _changing:
            spare = self._spare(unreached)
            if self._closed:
                raise LaunchError("the launch was stopped.")
            tunnel = _tunnels.get(self._cluster)
            if tunnel is None or tunnel.problem:
                tunnel = _tunnels[self._cluster] = _Tunnel(self._cluster)
            tunnel.wait_s = WAIT_S if spare > 1 else CRAMPED_WAIT_S
            self._tunnel = tunnel
            self._number = tunnel.add(self)
        began = time.monotonic()
        self.relay = tunnel.host, tunnel.ask({"do": "open", "route": self._number})
        if (self._cluster, address) not in _explained:
            _explained.add((self._cluster, address))
            advice = self._cluster.reachable_by
            tell(
                f"{unreached} Therefore, messages go through Spark jobs, about {duration(time.monotonic() - began)} "
                f"each, for which one task slot is used. To avoid this, {advice[:1].lower()}{advice[1:]}"
            )

    @property
    def is_open(self) -> bool:
        return bool(self.relay[0])

    def ticket(self, ticket: Ticket) -> Ticket:
        """Return the ticket for members, with the address of the relay if the route is open."""
        return ticket._replace(host=self.relay[0], port=self.relay[1]) if self.is_open else ticket

    @property
    def problem(self) -> str:
        return "" if self._tunnel is None else self._tunnel.problem

    def close(self) -> None:
        with _changing:
            self._closed = True
            tunnel, self._tunnel = self._tunnel, None
            if tunnel is not None:
                tunnel.remove(self._number)

    def _spare(self, unreached: str) -> float:
        """Return how many slots the launches leave, or infinity if that is not known."""
        is_dynamic = dynamic_allocation(self._cluster)
        total, limit = most_slots(self._cluster) if is_dynamic else (self._cluster.total_slots(), "")
        if total >= UNKNOWN_SLOTS:
            return math.inf
        launches = [stage for stage in list(running) if stage.cluster == self._cluster and stage.title != _TITLE]
        slots_each = 2 if is_dynamic and copies_tasks(self._cluster) else 1
        spare = total - slots_each * sum(stage.size for stage in launches)
        if spare < 1:
            copied = f", and Spark may run a copy of each task, too ({COPY_SETTING} is set)" if slots_each > 1 else ""
            most = (total - 1) // slots_each
            fewer = f"Use -n {most:.0f}, or add executors or cores. " if most else ""
            raise SlotsError(
                f"{unreached} Messages can go through Spark jobs instead, which need one task slot beside the ranks', "
                f"but there are {counted(int(total), 'task slot')} in all{limit and f' ({limit})'}{copied}. {fewer}"
                f"{self._cluster.reachable_by}"
            )
        return spare


_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # how this process reaches a listener on all interfaces


class _Tunnel:
    """The relay of a session, and the jobs that exchange frames with it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stage = Stage(cluster, _TITLE, 1, persistent=False)
        self._token = secrets.token_bytes(32)
        self._end = TunnelEnd(self._connect)
        self._routes: dict[int, TunnelRoute] = {}
        self._numbers = itertools.count(1)
        self._asked: dict[int, None] = {}  # the exchanges in progress, oldest first
        self._next_exchange = itertools.count(1)
        self._next_sequence = 1
        self._early: dict[int, bytes] = {}  # what came before something that was sent earlier
        self._changing = threading.Lock()
        self._handling = threading.Lock()
        self._closing = False
        self.wait_s = WAIT_S
        self.problem = ""
        order = RelayStart(
            cluster.archive(with_nvml=False),
            cluster.setting("spark.driver.host", "127.0.0.1").strip("[]"),
            RelayOrder(self._token.hex(), LEASE_S),
        )
        self.host, self._port = cluster.collect(1, task_for(start_relay, order))[0]
        running.add(self._stage)
        self._threads = [
            cluster.thread(target, name)
            for target, name in ((self._poll, "sparkring-tunnel-in"), (self._send, "sparkring-tunnel-out"))
        ]
        for thread in self._threads:
            thread.start()

    def add(self, route: TunnelRoute) -> int:
        """Return the number of a new route."""
        number = next(self._numbers)
        self._routes[number] = route
        return number

    def remove(self, number: int) -> None:
        """Close a route. After the last one, end the tunnel."""
        del self._routes[number]
        is_last = not self._routes
        self._end.post(FrameKind.END_ROUTE, ALL_ROUTES if is_last else number)
        if is_last:
            self._closing = True
            self._end.release()
            if _tunnels.get(self._cluster) is self:  # if this tunnel has failed, there may be another one
                del _tunnels[self._cluster]
            # Unlike the tunnel's own threads, this one keeps the interpreter from exiting before the relay has heard.
            with contextlib.suppress(RuntimeError):  # the interpreter is exiting
                threading.Thread(target=self._join, name=END_THREAD).start()

    def ask(self, request: dict[str, Any]) -> int:
        """Have the relay do something, and return its port. Raise LaunchError if it cannot."""
        try:
            return self._exchange(request)
        except _TunnelLost as error:
            raise LaunchError(f"messages cannot go through Spark jobs: {error}.") from error

    # ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _exchange(self, request: dict[str, Any], frames: bytes = b"", wait_s: float = 0.0) -> int:
        """Run a job that brings frames to the relay, and handle those that it returns. Return the relay's port."""
        with self._changing:
            number = next(self._next_exchange)
            self._asked[number] = None
            received = next(iter(self._asked))
        order = Exchange(self.host, self._port, self._token, number, received, wait_s, request, frames)
        try:
            values = self._collect(order)
        finally:
            with self._changing:
                del self._asked[number]
        answer = json.loads(values[0])
        if "error" in answer:
            raise _TunnelLost(answer["error"])
        if answer["sequence"]:
            with self._handling:
                self._early[answer["sequence"]] = b"".join(values[1:])
                while (came := self._early.pop(self._next_sequence, None)) is not None:
                    self._next_sequence += 1
                    self._end.handle(came)
        return int(answer["port"])

    def _collect(self, order: Exchange) -> list[bytes]:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._cluster.collect(1, task_for(exchange, order))
            except Exception as error:  # Spark, py4j and grpc raise various errors
                if attempt == _ATTEMPTS or self._closing:
                    raise _TunnelLost(f"a Spark job failed: {root_cause(str(error))}") from error
                time.sleep(_AGAIN_S)
        raise AssertionError

    def _poll(self) -> None:
        """Run jobs that wait for what members send, until the tunnel ends."""
        self._cluster.begin_group(self._stage.group, self._stage.title)
        try:
            while not self._closing and not self.problem:
                self._exchange({}, wait_s=self.wait_s)
        except _TunnelLost as error:
            self._lose(str(error))

    def _send(self) -> None:
        """Run jobs that bring what the driver sends, until the tunnel ends."""
        self._cluster.begin_group(self._stage.group, self._stage.title)
        try:
            while not self.problem and (frames := self._end.take(None)[1]):
                self._exchange({}, frames)
        except _TunnelLost as error:
            self._lose(str(error))
        self._threads[0].join()
        running.discard(self._stage)

    def _lose(self, why: str) -> None:
        """End the tunnel because it has failed: the gangs lose their members."""
        if not self._closing:
            self.problem = f"messages no longer go through Spark jobs: {why}"
        self._end.release()
        self._end.end()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(_GOODBYE_S)

    def _connect(self, route: int) -> socket.socket:
        if route not in self._routes:
            raise ConnectionRefusedError
        return socket.create_connection(self._routes[route].home, _CONNECT_S)
