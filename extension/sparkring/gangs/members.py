"""Keeps track of a gang's members: which of them have connected or exited, and the node and the rank of each."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sparkring.capture import packages
from sparkring.capture.packages import CodeImports
from sparkring.capture.versions import difference, installed
from sparkring.errors import LaunchError
from sparkring.frameworks.base import Endpoint
from sparkring.history.events import Failure
from sparkring.runtime.world import World, gpu_environments, place_ranks, usable_gpus
from sparkring.wire.channel import Connection
from sparkring.wire.messages import EnterWorld, Hello, LackingPackages

# If nobody has asked for this long which members are silent, this process may have been suspended, together with the
# threads that receive messages. A silence then says nothing about the members.
ABSENT_S = 7.5


class Candidate(NamedTuple):
    """A process that has connected as a member: its first message, and its connection."""

    hello: Hello
    connection: Connection


class Members:
    """The `size` members of a gang.

    Spark may start a task again while the first attempt runs, or seems to. So several processes may connect as the same
    member. The first one is the member. The others wait, and never get a rank unless the first is lost before all
    members have joined.

    `hellos` contains the first message of each member that has joined. `worlds[i]` is the World of member i, which
    contains its rank and its node. `member_of[rank]` is the member of a rank. Both are empty until all members have
    joined. `endpoints[i]` says where rank i can be reached. `exited` contains the ranks whose processes have exited.
    `deaths` contains the failures of the ranks that exited without being asked to.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.connections: dict[int, Connection] = {}
        self.hellos: dict[int, Hello] = {}
        self.worlds: list[World] = []
        self.member_of: dict[int, int] = {}
        self.endpoints: list[Endpoint] = []
        self.exited: set[int] = set()
        self.deaths: dict[int, Failure] = {}
        self._noticed: set[str] = set()
        self._lock = threading.Lock()
        self._launch = 0
        self._others: dict[int, list[Candidate]] = {}  # who waits to become a member, by the member's number
        self._attempts: dict[int, int] = {}  # which attempt of its task each member in `connections` is
        self._asked_at: float | None = None  # when silences() was called last

    def admit(self, hello: Hello, connection: Connection) -> bool:
        """Return whether `connection` is that of a member of this launch, or of another attempt that waits.

        Any thread may call this.
        """
        with self._lock:  # two connections with the same number may arrive at once
            member = hello.member
            if hello.launch != self._launch or not 0 <= member < self.size:
                return False
            if member not in self.connections:
                self.connections[member], self._attempts[member] = connection, hello.attempt
            elif hello.attempt != self._attempts[member]:
                self._others.setdefault(member, []).append(Candidate(hello, connection))
            else:
                return False
            return True

    def is_current(self, member: int, connection: Connection | None) -> bool:
        """Return whether the connection is that of the member itself, not that of an attempt that waits or is lost."""
        return self.connections.get(member) is connection

    def drop(self, member: int, connection: Connection | None) -> Hello | None:
        """Forget a connection that has ended. If another attempt takes the member's place, return its first message."""
        with self._lock:
            others = [other for other in self._others.pop(member, []) if other.connection is not connection]
            following = None
            if self.is_current(member, connection):
                del self.connections[member]
                self.hellos.pop(member, None)
                if others:
                    following = others.pop(0)
                    self.connections[member], self._attempts[member] = following.connection, following.hello.attempt
            if others:
                self._others[member] = others
        return None if following is None else following.hello

    def start_over(self) -> int:
        """Forget all members, which are then launched again. Return the number of the new launch."""
        with self._lock:
            self._launch += 1
            self.connections.clear()
            self.hellos.clear()
            self._others.clear()
            return self._launch

    @property
    def missing(self) -> list[int]:
        """The members that have not joined."""
        return [member for member in range(self.size) if member not in self.hellos]

    def place(self, *, by_node: bool, pins_gpus: bool) -> dict[int, EnterWorld]:
        """Give each member its rank. Return, for each member, the message that tells the member its rank.

        With `by_node`, the ranks on one node have consecutive numbers; otherwise, member i has rank i. With
        `pins_gpus`, a rank sees only the GPUs that belong to the ranks on its node.
        """
        hellos = [self.hellos[member] for member in range(self.size)]
        nodes = _nodes(hellos)
        gpus = usable_gpus(nodes, [hello.gpus for hello in hellos])
        self.worlds = place_ranks(nodes, gpus, by_node=by_node)
        self.member_of = {world.rank: member for member, world in enumerate(self.worlds)}
        for _, member in sorted(self.member_of.items()):
            hello = hellos[member]
            self.endpoints.append(Endpoint(hello.host, hello.address, hello.interface, hello.port))
        seen = gpu_environments(self.worlds) if pins_gpus else [{}] * self.size
        peers = tuple(f"{f'[{at.address}]' if ':' in at.address else at.address}:{at.port}" for at in hellos)
        return {
            member: EnterWorld(world, hellos[member].address, seen[member], peers)
            for member, world in enumerate(self.worlds)
        }

    def gpus_on(self, host: str) -> list[str]:
        """Return the addresses of the GPUs of the ranks on this host."""
        return [
            gpu for member, world in enumerate(self.worlds) if self.hellos[member].host == host for gpu in world.gpus
        ]

    def lacking(self, member: int, imports: CodeImports) -> LackingPackages | None:
        """Return what the member's own Python lacks that code imports; None if it lacks nothing."""
        there = self.hellos[member].packages
        return None if there is None else packages.lacking(imports, there)

    def check_packages(self, modules: Iterable[str], imports: CodeImports) -> list[str]:
        """Raise LaunchError if a member's own Python lacks one of `modules`, or has a different version of it.

        Packages that can be sent to the member are not lacking. Return notices that are new: about packages that are
        sent, and about those that code `imports` and that have another version there.
        """
        notices: dict[str, None] = {}
        for member, hello in self.hellos.items():
            if hello.packages is None:
                continue
            lacking = self.lacking(member, imports)
            sent = lacking.sent if lacking is not None else ()
            there = {**hello.packages, **{module: installed()[module] for module in sent}}
            where = f"the executors' Python on {hello.host} ({hello.python})"
            if lacks := difference(modules, there):
                requirement = packages.requirement(lacks.module)
                raise LaunchError(
                    f"the cell's values need {lacks.module} {lacks.here}, as in this notebook's Python "
                    f"({sys.executable}), but {where} has {lacks.there or 'none'}. Before the SparkSession is made, "
                    f"set PYSPARK_PYTHON to a Python with the notebook's packages, or run `{hello.python} -m pip "
                    f"install {requirement}` on {hello.host}."
                )
            for module in sent:
                notices[f"{where} lacks {packages.requirement(module)}, which is sent with the cell"] = None
            for module, ours, theirs in packages.differences(imports, there):
                notices[
                    f"{where} has {module} {theirs}, and this notebook has {ours}: for the same version, run "
                    f"`{hello.python} -m pip install {packages.requirement(module)}` there"
                ] = None
        new = [notice for notice in notices if notice not in self._noticed]
        self._noticed.update(new)
        return new

    def place_of(self, rank: int) -> tuple[int, str, int]:
        """Return the rank, its node and its process id."""
        member = self.member_of[rank]
        return rank, self.worlds[member].node, self.hellos[member].pid

    def silences(self) -> dict[int, float]:
        """Return for how many seconds each member has been silent. Time in which nobody asked does not count."""
        now, before = time.monotonic(), self._asked_at
        self._asked_at = now
        connections = dict(self.connections)
        if before is None or now - before >= ABSENT_S:
            for connection in connections.values():
                connection.heard_at = now
        return {member: now - connection.heard_at for member, connection in connections.items()}

    def exit(self, rank: int, failure: Failure | None) -> None:
        """Record that the rank's process has exited. `failure` says why; None if the process was asked to exit."""
        self.exited.add(rank)
        if failure is not None:
            self.deaths[rank] = failure


def _nodes(hellos: Sequence[Hello]) -> list[str]:
    """Return the name of each member's node: the host's name, plus the address if several hosts have that name."""
    addresses: dict[str, set[str]] = {}
    for hello in hellos:
        addresses.setdefault(hello.host, set()).add(hello.address)
    return [hello.host if len(addresses[hello.host]) == 1 else f"{hello.host}-{hello.address}" for hello in hellos]
