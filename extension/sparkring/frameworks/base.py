"""The interface of a framework: an environment for each rank, and what has to exist as long as the gang does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from sparkring.runtime.world import World


class Endpoint(NamedTuple):
    """Where other ranks can reach a rank.

    host: the name of its host.
    address, interface: its address on the network that leads to the driver, and the interface that has the address.
    seen_as: the address that the driver sees, which differs behind network address translation.
    port: a port that was free when the rank started, or at the end of its last request. Some frameworks listen on it.
    """

    host: str
    address: str
    interface: str
    seen_as: str
    port: int


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
    """`variable` is the environment variable that names a timeline's file; `beside` has others to set with it."""

    variable: str
    beside: dict[str, str]


class Start(NamedTuple):
    """An attempt of run `run_id`, after `restarts` restarts. `max_restarts` is the limit."""

    run_id: str
    restarts: int
    max_restarts: int


class Framework(ABC):
    """Connects the ranks of a gang. It is made when all ranks are up, with their endpoints in rank order.

    `bind_host` is where the driver listens, `host` where ranks reach it; the gang keeps `endpoints` up to date.
    `by_node`: whether ranks on one node are neighbours. Otherwise, ranks are in the order of their members, which
    on Spark is the order of the partitions. `in_task`: whether cells get the context and the rows of the Spark task.
    `lesson`: the cell magic and its help. `reserved`: names that ranks define for a cell, even if the notebook defines
    them, too. `timeline`: how the framework is told to record a timeline.
    """

    by_node: ClassVar[bool] = True
    in_task: ClassVar[bool] = False
    lesson: ClassVar[Lesson | None] = None
    reserved: ClassVar[tuple[str, ...]] = ()
    timeline: ClassVar[Timeline | None] = None

    def __init__(self, host: str, bind_host: str, endpoints: list[Endpoint]) -> None:
        self.host = host
        self.bind_host = bind_host
        self.endpoints = endpoints

    @abstractmethod
    def environment(self, world: World, start: Start) -> dict[str, str]:
        """The variables to add to the environment of the rank at `world`; called before each request."""

    def defaults(self, world: World) -> dict[str, str]:
        """The variables to add unless the rank already has them: the user's own values take precedence."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what was kept open for the gang."""
