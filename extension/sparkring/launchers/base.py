"""The interface of a launcher, which starts members and makes sure that they end. It does not know what they do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from sparkring.errors import LaunchError
from sparkring.wire.ticket import Ticket

if TYPE_CHECKING:
    from sparkring.cluster.partitions import Data


class LaunchRequest(NamedTuple):
    """What a launcher is to start: `size` members, on this machine if `np` is negative, else on Spark.

    gpus: the number of GPUs for each member; 0 hides all GPUs, None is the launcher's default.
    data: the DataFrame whose partitions the ranks read.
    here: whether errors may suggest processes on this machine instead.
    persistent: whether the members keep their slots until they are stopped, as those of a warm gang do.
    """

    np: int
    size: int
    environment: dict[str, str]
    title: str
    gpus: int | None = None
    data: Data | None = None
    here: bool = True
    persistent: bool = False


class Launcher(ABC):
    """One place where members can run. A launcher serves one gang, once.

    The driver listens on `bind_host`, and members reach it at `host`, both on `port` (0: any free one). With
    `pins_gpus`, ranks see only the GPUs of the ranks on their node. After `slow_after_s`, a notice says what the start
    waits for. After `give_up_after_s`, the start fails if members have not connected.
    """

    bind_host = host = "127.0.0.1"
    port = 0
    pins_gpus = False
    slow_after_s = 5.0
    give_up_after_s = 120.0

    @abstractmethod
    def start(self, size: int, ticket: Ticket) -> None:
        """Start `size` members. Each gets a copy of `ticket` with its own number in `member`. Returns at once."""

    @abstractmethod
    def problem(self, wait_s: float = 0.0) -> LaunchError | None:
        """Why members cannot start, or have ended; None if nothing is known after waiting up to `wait_s`."""

    @abstractmethod
    def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` for the members to end, then end them; returns when none is left."""

    def waits_for(self) -> str:
        """What a slow start may be waiting for; '' if that is not known."""
        return ""

    def warning(self) -> str:
        """What the user should know while the members are up and idle; '' if nothing, or if it was said already."""
        return ""
