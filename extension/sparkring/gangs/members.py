"""The members of a gang: which have connected, on which node, with which rank, and which have ended."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence

from sparkring.capture.versions import difference
from sparkring.errors import LaunchError
from sparkring.frameworks.base import Endpoint
from sparkring.history.events import Failure
from sparkring.runtime.world import World, gpu_environments, place_ranks
from sparkring.wire.channel import Connection
from sparkring.wire.messages import EnterWorld, Hello, RankNews


class Members:
    """The `size` members of a gang.

    `worlds` are the places of the members, by member, once all have joined; `endpoints` are where ranks can be reached,
    by rank. `deaths` are the ranks whose process ended without having been asked to, and why.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.connections: dict[int, Connection] = {}
        self.worlds: list[World] = []
        self.endpoints: list[Endpoint] = []
        self.deaths: dict[int, Failure] = {}
        self._hellos: dict[int, Hello] = {}
        self._member_of: dict[int, int] = {}  # by rank
        self._exited: set[int] = set()  # ranks
        self._lock = threading.Lock()

    def admit(self, hello: Hello, connection: Connection) -> bool:
        """Accept the first connection of a member; returns whether this is one. Any thread may call this."""
        with self._lock:
            if not 0 <= hello.member < self.size or hello.member in self.connections:
                return False
            self.connections[hello.member] = connection
            return True

    def join(self, hello: Hello) -> None:
        self._hellos[hello.member] = hello

    @property
    def complete(self) -> bool:
        return len(self._hellos) == self.size

    @property
    def missing(self) -> list[int]:
        return [member for member in range(self.size) if member not in self._hellos]

    def place(self, *, by_node: bool, pins_gpus: bool) -> dict[int, EnterWorld]:
        """Give each member its rank: with `by_node`, a node's ranks are neighbours; else member i has rank i.

        Returns the message for each member. With `pins_gpus`, ranks see only the GPUs of their node's ranks.
        """
        hellos = [self._hellos[member] for member in range(self.size)]
        self.worlds = place_ranks(_nodes(hellos), [hello.gpus for hello in hellos], by_node=by_node)
        self._member_of = {world.rank: member for member, world in enumerate(self.worlds)}
        for rank in range(self.size):
            member = self._member_of[rank]
            hello, peer = hellos[member], self.connections[member].peer_host()
            self.endpoints.append(Endpoint(hello.host, hello.address, hello.interface, peer, hello.port))
        gpus = gpu_environments(self.worlds) if pins_gpus else {}
        return {
            member: EnterWorld(world, hellos[member].address, gpus.get(world.node, {}))
            for member, world in enumerate(self.worlds)
        }

    def check_packages(self, modules: Iterable[str]) -> None:
        """LaunchError if a member runs another Python that lacks one of the packages."""
        for hello in self._hellos.values():
            if hello.packages is not None and (found := difference(modules, hello.packages)):
                raise LaunchError(
                    f"the cell's values need {found.module} {found.here}, as in this notebook's Python "
                    f"({sys.executable}), but the executors' Python on {hello.host} ({hello.python}) has "
                    f"{found.there or 'none'}: set PYSPARK_PYTHON to a Python with the notebook's packages before the "
                    f"SparkSession is made, or install {found.module} there."
                )

    @property
    def up(self) -> bool:
        return bool(self.worlds)

    def rank_of(self, member: int) -> int:
        return self.worlds[member].rank

    def member_of(self, rank: int) -> int:
        return self._member_of[rank]

    def host_of(self, member: int) -> str:
        return self._hellos[member].host

    def world_of(self, rank: int) -> World:
        return self.worlds[self._member_of[rank]]

    def pid_of(self, rank: int) -> int:
        return self._hellos[self._member_of[rank]].pid

    def heard(self, rank: int, news: RankNews) -> None:
        """Note the port on which the rank's framework may listen next: the present one may not be free by then."""
        self.endpoints[rank] = self.endpoints[rank]._replace(port=news.port)

    def silences(self) -> dict[int, float]:
        """For how many seconds nothing has been heard from each member."""
        now = time.monotonic()
        return {member: now - connection.heard_at for member, connection in list(self.connections.items())}

    def forgive_silence(self) -> None:
        """Count silences from now on, since it was the driver that did not listen."""
        for connection in list(self.connections.values()):
            connection.heard_at = time.monotonic()

    @property
    def gone(self) -> bool:
        return len(self._exited) == self.size

    def has_exited(self, rank: int) -> bool:
        return rank in self._exited

    def exit(self, rank: int, failure: Failure | None) -> None:
        """Note that the rank's process has ended; `failure` says why, unless it was asked to end."""
        self._exited.add(rank)
        if failure is not None:
            self.deaths[rank] = failure


def _nodes(hellos: Sequence[Hello]) -> list[str]:
    """The name of each member's node: its host's name, with the address if several hosts have the same name."""
    addresses: dict[str, set[str]] = {}
    for hello in hellos:
        addresses.setdefault(hello.host, set()).add(hello.address)
    return [hello.host if len(addresses[hello.host]) == 1 else f"{hello.host}-{hello.address}" for hello in hellos]
