"""Keeps track of a gang's members: which of them have connected or exited, and the node and the rank of each."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence

from sparkring.capture.versions import difference
from sparkring.errors import LaunchError
from sparkring.frameworks.base import Endpoint
from sparkring.history.events import Failure
from sparkring.runtime.world import World, gpu_environments, place_ranks, usable_gpus
from sparkring.wire.channel import Connection
from sparkring.wire.messages import EnterWorld, Hello

# If nobody has asked for this long which members are silent, this process may have been suspended, together with the
# threads that receive messages. A silence then says nothing about the members.
ABSENT_S = 7.5


class Members:
    """The `size` members of a gang.

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
        self._lock = threading.Lock()
        self._asked_at: float | None = None  # when silences() was called last

    def admit(self, hello: Hello, connection: Connection) -> bool:
        """Return whether `connection` is the first one of a member; if so, keep it. Any thread may call this."""
        with self._lock:  # two connections with the same number may arrive at once
            if not 0 <= hello.member < self.size or hello.member in self.connections:
                return False
            self.connections[hello.member] = connection
            return True

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
            hello, peer = hellos[member], self.connections[member].peer_host()
            self.endpoints.append(Endpoint(hello.host, hello.address, hello.interface, peer, hello.port))
        seen = gpu_environments(self.worlds) if pins_gpus else [{}] * self.size
        return {
            member: EnterWorld(world, hellos[member].address, seen[member]) for member, world in enumerate(self.worlds)
        }

    def gpus_on(self, host: str) -> list[str]:
        """Return the addresses of the GPUs of the ranks on this host."""
        return [
            gpu for member, world in enumerate(self.worlds) if self.hellos[member].host == host for gpu in world.gpus
        ]

    def check_packages(self, modules: Iterable[str]) -> None:
        """Raise LaunchError if a member's own Python lacks one of `modules`, or has a different version of it."""
        for hello in self.hellos.values():
            if hello.packages is not None and (found := difference(modules, hello.packages)):
                raise LaunchError(
                    f"the cell's values need {found.module} {found.here}, as in this notebook's Python "
                    f"({sys.executable}), but the executors' Python on {hello.host} ({hello.python}) has "
                    f"{found.there or 'none'}. Before the SparkSession is made, set PYSPARK_PYTHON to a Python with "
                    f"the notebook's packages, or install {found.module} on {hello.host}."
                )

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
