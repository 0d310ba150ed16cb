"""What a framework is to sparkring: an environment per rank, and a rendezvous that lasts as long as the gang."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from sparkring.place import World


class Seat(NamedTuple):
    """Where a rank sits: its host's name, its address on the way to the driver, the interface that has it.

    `port` was free there when the rank came up, for a framework whose ranks listen themselves.
    """

    host: str
    address: str
    interface: str
    port: int


class Framework(AbstractContextManager[Any], Protocol):
    """One of the things a gang can carry. Made with the driver's address and the ranks' seats, in rank order."""

    name: str

    def environment(self, world: World, seat: Seat) -> dict[str, str]:
        """What to add to the environment of the rank at `world`."""
        ...
