"""The interface of a launcher, which starts members and makes sure that they exit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparkring.errors import LaunchError
from sparkring.wire.ticket import Ticket

if TYPE_CHECKING:
    from sparkring.cluster.partitions import Data


class LaunchRequest(NamedTuple):
    """What a launcher should start: `size` members, on this machine if `np` is negative, otherwise on Spark.

    gpus: the number of GPUs for each member; 0 hides all GPUs, None is the launcher's default.
    data: the DataFrame whose partitions the ranks read.
    here: whether error messages may suggest processes on this machine instead of Spark tasks.
    persistent: whether the members keep their slots until they are stopped, like those of a warm gang.
    at_once: if the launch belongs to a pool, the number of launches that the pool wants to run at once; otherwise 0.
        The members of a pool wait for free Spark slots, as long as it takes.
    """

    np: int
    size: int
    environment: dict[str, str]
    title: str
    gpus: int | None = None
    data: Data | None = None
    here: bool = True
    persistent: bool = False
    at_once: int = 0


class Code(NamedTuple):
    """What ranks will run: sources, and pickled functions and values.

    The variables in `environment` will be set on the ranks before the ranks run this code. Before these, ranks on other
    machines set the variables in `notebook`, which the notebook has changed; None stands for a deleted variable.
    `imports` are modules that the ranks will import before they run any other code of the user.
    """

    texts: Sequence[bytes]
    environment: Mapping[str, str]
    imports: Sequence[str] = ()
    notebook: Mapping[str, str | None] = {}


class Launcher(ABC):
    """Starts the members of one gang in one place. A launcher cannot be used for a second gang.

    The driver listens on the address `bind_host` and on `port` (0: any free port). Members reach the driver at `host`,
    on the same port. If `pins_gpus` is true, each rank sees only the GPUs that are assigned to the ranks on its node.
    If the start takes longer than `slow_after_s`, a notice says what it is waiting for. If some members have not
    connected after `give_up_after_s`, the start fails. The gang sets `code` to what the ranks will run first. In
    start(), `code` is None if that is not known yet, as for a warm gang.
    """

    bind_host = host = "127.0.0.1"
    port = 0
    pins_gpus = False
    slow_after_s = 5.0
    give_up_after_s = 120.0
    code: Code | None = None

    @abstractmethod
    def start(self, size: int, ticket: Ticket) -> None:
        """Start `size` members, each with a copy of `ticket` that has the member's number, and do not wait for them."""

    @abstractmethod
    def problem(self, wait_s: float = 0.0) -> LaunchError | None:
        """Return why members cannot start or have exited; None if that is not known within `wait_s` seconds."""

    @abstractmethod
    def stop(self, grace_s: float, *, joined: bool) -> None:
        """Wait up to `grace_s` seconds for the members to exit, then end those that are still running.

        `joined` says whether any member has connected to the driver.
        """

    def note_imports(self, modules: Sequence[str] | None) -> None:  # noqa: B027 - most launchers have no use for it
        """Record the frameworks that a rank has imported; None if other ranks must not import any in advance."""

    def note_gpus(self, addresses: Sequence[str]) -> None:  # noqa: B027 - a launcher may know its GPUs from the start
        """Record which GPUs of the driver's machine the ranks use. The gang calls this when all ranks are up."""

    def waits_for(self) -> str:
        """Return what a slow start may be waiting for; '' if that is not known."""
        return ""

    def warning(self) -> str:
        """Return what the user should know while the members are up and idle; '' if there is nothing new to say."""
        return ""
