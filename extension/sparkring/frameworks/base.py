"""The interface of a framework, which connects the ranks of a gang.

A framework provides environment variables for each rank. It also runs what the ranks need to connect, for example a
server through which they find each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from sparkring.runtime.world import World


class Endpoint(NamedTuple):
    """Where other ranks can reach a rank.

    host: the name of the rank's host.
    address: the host's address on the network that leads to the driver.
    interface: the name of the network interface that has this address.
    port: a port on the host that was free when the rank started, or when its last request ended. Some frameworks
    listen on this port.
    """

    host: str
    address: str
    interface: str
    port: int

    @property
    def host_and_port(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


class Lesson(NamedTuple):
    """The cell magic that starts ranks of a framework, and what its help says.

    `what` completes "Run the cell on …". `example` is a cell, and `reads` are the notebook's names that it reads.
    `line` has options that may follow the magic.
    """

    magic: str
    what: str
    example: str
    reads: str
    line: str = "-n -2"


class Timeline(NamedTuple):
    """How to make a framework record a timeline.

    `variable` is the environment variable that names the timeline's file. `beside` are other variables, with their
    values, that must be set if a timeline is recorded.
    """

    variable: str
    beside: dict[str, str]


class Start(NamedTuple):
    """A start of the ranks for the run `run_id`, after `restarts` restarts. At most `max_restarts` are allowed."""

    run_id: str
    restarts: int
    max_restarts: int


class Framework(ABC):
    """Connects the ranks of a gang. A framework is made when all ranks are up.

    `endpoints[i]` is the endpoint of rank i; the gang keeps it up to date.

    by_node: whether the ranks of one node have consecutive numbers. Otherwise, ranks are in the order of their members,
    which on Spark is the order of the partitions.
    in_task: whether cells get the context and the rows of the Spark task.
    lesson: the cell magic and its help.
    reserved: names that ranks define for a cell, even if the notebook defines them, too.
    makes_ring: what to change in code for one process so that the ranks train together, by the library that trains.
    timeline: how to make the framework record a timeline; None if it cannot record one.
    """

    by_node: ClassVar[bool] = True
    in_task: ClassVar[bool] = False
    lesson: ClassVar[Lesson | None] = None
    reserved: ClassVar[tuple[str, ...]] = ()
    makes_ring: ClassVar[Mapping[str, str]] = {}
    timeline: ClassVar[Timeline | None] = None

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self.endpoints = endpoints

    @abstractmethod
    def environment(self, world: World, start: Start) -> dict[str, str]:
        """Return the variables to add to the environment of the rank that `world` describes.

        This method is called before each request.
        """

    def defaults(self, world: World) -> dict[str, str]:
        """Return the variables to add unless the rank already has them: the user's own values take precedence."""
        return {}
