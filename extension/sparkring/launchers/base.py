"""The interfaces of a place for ranks, and of its launchers, which start members and make sure that they exit."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparkring.errors import LaunchError
from sparkring.executor.orders import Ticket

if TYPE_CHECKING:
    from sparkring.capture.environment import PackedEnvironment
    from sparkring.cluster.partitions import Data


class ItemRoom(NamedTuple):
    """What limits the number of items on each host, apart from the host's memory and cores.

    `hosts` is the number of hosts. `tasks` is the number of items for which a host has enough of Spark's task slots,
    and `gpus` is the number for which it has enough GPUs; None means that there is no limit. `gpu_free` says how much
    memory is free on each GPU.
    """

    hosts: int = 1
    tasks: float | None = None
    gpus: int | None = None
    gpu_free: tuple[int, ...] = ()


class Place(ABC):
    """Where ranks can run. `np` and other options choose one place for a run, and nothing else depends on how.

    Records keep its `name`; users read its `title`. If it is `here`, its processes run on this machine: they see the
    notebook's files and GPUs, and nobody else takes their slots. `shares_gpus` says whether items can share a GPU.
    """

    name: str
    title: str
    here = False
    shares_gpus = False

    @abstractmethod
    def launcher(self, request: LaunchRequest, say: Callable[[str], None], *, patient: bool = True) -> Launcher:
        """Return a launcher for the request. Raise LaunchError if a launcher could not start the members.

        `patient` says whether to wait if some of the place has just been lost.
        """

    @abstractmethod
    def room(self, request: LaunchRequest) -> int:
        """Return how many ranks there is room for, including running ones."""

    @abstractmethod
    def item_room(self, request: LaunchRequest, gpus_each: float | None) -> ItemRoom:
        """Return the room for items that are launched like `request`, if each rank gets `gpus_each` GPUs."""

    @abstractmethod
    def gpus_of_a_rank(self, size: int, say: Callable[[str], None]) -> float:
        """Return the number of GPUs that each of `size` ranks gets by default."""

    @abstractmethod
    def every_slot(self) -> int:
        """Return the number of ranks for np=0: one for each slot. Raise SlotsError if there are none."""

    @abstractmethod
    def table(self) -> list[tuple[str, ...]]:
        """Return rows for `%slots`: what there is, slots, busy slots and details. This starts nothing."""

    def may_lack_packages(self) -> bool:
        """Return whether ranks may run another Python than the notebook's, as far as is known. This starts nothing."""
        return not self.here

    def pool_requests(self, request: LaunchRequest, at_once: int, gpus: float | None) -> list[LaunchRequest]:
        """Return a request for each of `at_once` slots of a pool, with `gpus` GPUs for each rank.

        Raise LaunchError if there are too few GPUs.
        """
        whole = request if gpus is None else request._replace(gpus=math.ceil(gpus))
        return [whole._replace(at_once=at_once)] * at_once


class LaunchRequest(NamedTuple):
    """What a launcher should start: `size` members in a place.

    gpus: the number of GPUs for each member; 0 hides all GPUs, None is the launcher's default.
    data: the DataFrame whose partitions the ranks read.
    here: whether error messages may suggest processes on this machine instead of Spark tasks.
    persistent: whether the members keep their slots until they are stopped, like those of a warm gang.
    environment_pack: an archive of the notebook's packages; the members use these instead of those that are there.
    at_once: if the launch belongs to a pool, the number of launches that the pool wants to run at once; otherwise 0.
        The members of a pool wait for free Spark slots, as long as it takes.
    """

    place: Place
    size: int
    environment: dict[str, str]
    title: str
    gpus: int | None = None
    data: Data | None = None
    here: bool = True
    persistent: bool = False
    at_once: int = 0
    environment_pack: PackedEnvironment | None = None


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

    If `one_by_one` is true, members may start at different times, and a member that is lost before all are up may be
    replaced. The gang then asks gives_back() whether the members that have connected should go on waiting for others.

    If some members cannot connect to the driver, the launcher may find another way for all of them. It then ends the
    others and sets `starts_over`, and the gang calls start_again().
    """

    bind_host = host = "127.0.0.1"
    port = 0
    pins_gpus = False
    slow_after_s = 5.0
    give_up_after_s = 120.0
    code: Code | None = None
    one_by_one = starts_over = False

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

    def gives_back(self, waited_s: float) -> bool:
        """Return whether to end the members that have waited `waited_s` seconds for others, and to start again later.

        They may hold what another gang waits for, which may hold what they wait for.
        """
        return False

    def start_again(self, ticket: Ticket) -> float:
        """End all members, start them again after a pause, and return its length in seconds. This waits for nothing."""
        raise NotImplementedError

    def why_missing(self) -> str:
        """Return a sentence: why some members may not have connected in time, and what to do."""
        return f"Members connect to the driver at {self.host}: check that they can reach this address."

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
