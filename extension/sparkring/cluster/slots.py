"""Finds out how many task slots Spark has, what holds them, and whether a ring would get enough of them."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sparkring.cluster.base import UNKNOWN_SLOTS
from sparkring.cluster.formation import dynamic_allocation, executor_slots, gpus_per, most_slots, profile_gpus
from sparkring.cluster.session import active_cluster, made_here, or_here
from sparkring.errors import LaunchError, SlotsError
from sparkring.history.describe import counted
from sparkring.runtime.interrupts import interrupted

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster
    from sparkring.cluster.partitions import Data

# If there are too few slots at first, they are counted again and again for SETTLE_S seconds. The wait is longer if more
# executors are expected. If Spark has just lost an executor, it should replace the executor within REPLACED_S seconds.
# If the session has just started, its first executor should register within REGISTERED_S seconds, and the others within
# TOGETHER_S seconds after one another. If the session's settings promise more executors, they should register within
# PROMISED_S seconds after the session has started, or after the last change. Each launch waits at least
# PROMISED_LEAST_S seconds for them.
SETTLE_S, REPLACED_S = 1.2, 30.0
REGISTERED_S, TOGETHER_S = 30.0, 3.0
PROMISED_S, PROMISED_LEAST_S = 120.0, 15.0
LIKELY_SLOTS = 16  # if Spark does not say how many slots there are
INSTANCES = 2  # the number of executors on YARN and Kubernetes, unless spark.executor.instances is set

Say = Callable[[str], None]  # shows the user a message


class Slots(NamedTuple):
    """How many tasks Spark can run at once (`total`), and how many it is running (`busy`).

    If Spark does not say how many it can run, `total` is UNKNOWN_SLOTS.

    `holders` holds a string for each stage or pool that is running: its name, and how many tasks it is running.
    `gpus_per_task` and `gpus_per_executor` count only GPUs that Spark itself assigns. If tasks share a GPU,
    `gpus_per_task` is a fraction. Without `shows_use`, only what sparkring itself is running counts as busy.
    """

    total: int
    busy: int
    master: str
    hosts: list[str]
    holders: list[str]
    gpus_per_task: float
    gpus_per_executor: float
    shows_use: bool = True

    @property
    def free(self) -> int:
        return self.total - self.busy

    @property
    def likely(self) -> int:
        """The total, or a guess if it is not known."""
        return LIKELY_SLOTS if self.total >= UNKNOWN_SLOTS else self.total

    @property
    def in_all(self) -> str:
        """The total in words."""
        return "an unknown number of task slots" if self.total >= UNKNOWN_SLOTS else counted(self.total, "task slot")

    @property
    def use(self) -> str:
        """How many slots are busy, in words."""
        return f"{self.busy} of them busy" if self.shows_use else "some of them perhaps busy with other sessions' jobs"

    @property
    def executor_hosts(self) -> set[str]:
        """The hosts that run tasks. In local mode, this is the driver's host."""
        return set(self.hosts[1:] or self.hosts)


@dataclass(eq=False)
class Stage:
    """A stage that sparkring has submitted, and that may be running.

    `title` says what the stage is for, and `size` is the number of slots that it holds. `persistent` says whether the
    stage keeps its slots until it is stopped, as a warm gang does.
    """

    cluster: Cluster
    title: str
    size: int
    persistent: bool = field(kw_only=True)
    group: str = field(init=False, default_factory=lambda: f"sparkring-{uuid.uuid4().hex[:12]}")

    def ids(self) -> set[int]:
        """Return Spark's ids of the stage and of the stages that it depends on."""
        return self.cluster.stage_ids(self.group)

    def active_tasks(self) -> int:
        """Return how many tasks Spark is running for the stage; 0 if all of them are waiting for slots."""
        return sum(status.active for number in self.ids() if (status := self.cluster.stage(number)) is not None)


running: set[Stage] = set()


def slots(cluster: Cluster, gpus: int | None = None, *, apart_from: Collection[int] = ()) -> Slots:
    """Return the slots of this session, for tasks that need `gpus` GPUs each.

    Tasks of the stages whose ids are in `apart_from` do not count as running.
    """
    total = cluster.total_slots(profile_gpus(cluster, gpus))
    ours = {number: stage.title for stage in list(running) for number in stage.ids()}
    holders, busy = Counter[str](), 0
    for number in cluster.active_stages():
        status = cluster.stage(number)
        if status is not None and status.active and number not in apart_from:
            busy += status.active
            holders[ours.get(number) or f"stage {number} ({status.name})"] += status.active
    if not cluster.shows_stages:
        holders.update({stage.title: stage.size for stage in list(running) if stage.cluster == cluster})
        busy = holders.total()
    per_task, per_executor = gpus_per(cluster, "task"), gpus_per(cluster, "executor")
    texts = [f"{holder}: {tasks}" for holder, tasks in holders.items()]
    return Slots(
        total, min(busy, total), cluster.title, cluster.hosts(), texts, per_task, per_executor, cluster.shows_stages
    )


def current_slots(gpus: int | None = None) -> Slots | None:
    """Return the slots of the notebook's session for tasks with `gpus` GPUs each; None if there is no session."""
    cluster = active_cluster()
    return None if cluster is None or cluster.is_stopped() else slots(cluster, gpus)


def room(size: int, gpus: int | None) -> int:
    """Return how many tasks the notebook's session has room for, if `size` are wanted; 0 if there is no session.

    Each task needs `gpus` GPUs. With dynamic allocation, this includes the tasks for which executors would start.
    """
    cluster = active_cluster()
    if cluster is None or cluster.is_stopped():
        return 0
    return (_reachable(cluster, size, gpus, None)[0] if dynamic_allocation(cluster) else slots(cluster, gpus)).total


def check_gpus(cluster: Cluster, size: int, needed: int) -> None:
    """Raise LaunchError if Spark gives a task fewer than `each` GPUs."""
    held = gpus_per(cluster, "task")
    if held >= needed:
        return
    if profile_gpus(cluster, needed):
        cluster.profile(needed)
        return
    advice = (
        f"Spark assigns no GPUs in this mode: use -n -{size} for processes on this machine, with its GPUs."
        if cluster.is_driver_alone
        else f"Start the session with spark.task.resource.gpu.amount={needed}, spark.executor.resource.gpu.amount (the "
        "amount per task times the tasks that run in an executor at once) and, if the cluster does not know its GPUs "
        f"yet, spark.executor.resource.gpu.discoveryScript; or use -n -{size} for this machine's own GPUs."
    )
    raise LaunchError(
        f"needs {counted(needed, 'GPU')} for each task, but Spark assigns {held:g} ({cluster.title}). {advice}"
    )


def check(cluster: Cluster, size: int, gpus: int | None, data: Data | None, say: Say | None, *, here: bool) -> Slots:
    """Return the slots. Raise SlotsError if a ring of `size` tasks with `gpus` GPUs each cannot start in the session.

    `data` is the partitioned data that the stage reads, if any. `here` says whether errors may suggest processes on
    this machine instead of Spark tasks. If Spark has just started, or has just lost an executor, wait for executors,
    unless `say` is None. With dynamic allocation, executors come when the tasks wait for them.
    """
    capacity, limit = _reachable(cluster, size, gpus, say)
    with_gpus = _with_gpus(cluster, gpus)
    gangs = [one for one in list(running) if one.persistent and one.cluster == cluster]
    held = sum(one.size for one in gangs)
    if held and capacity.total - held < size <= capacity.total:
        raise SlotsError(
            f"needs {size} task slots{with_gpus}, but the {gangs[0].title} holds {held} of {capacity.total}. Run on "
            f"the gang (leave out -n, or use -n {held}), or stop it (%gang stop){or_here(size, here)}."
        )
    if capacity.total < size and limit:
        raise SlotsError(
            f"needs {size} task slots{with_gpus}, but Spark can have {capacity.total} at most: {limit}. Use -n "
            f"{max(capacity.total, 1)}, or start the session with a higher limit{or_here(size, here)}."
        )
    if capacity.total < size and data is not None:
        raise SlotsError(
            f"{size} partitions of `{data.name}` need {size} task slots{with_gpus}, but there are {capacity.total} in "
            f"all, {capacity.use} ({cluster.title}). Use -n {max(capacity.total, 1)}, or add executors or cores."
        )
    if capacity.total < size:
        more = (
            "stop this session (SparkSession.builder.getOrCreate().stop()), which sparkring made and will replace with "
            "a larger one"
            if made_here(cluster)
            else "add executors or cores (new executors count once they have registered)"
        )
        fewer = f"Use -n {capacity.total}, {'' if here else 'or '}" if capacity.total else "There are no executors: "
        raise SlotsError(
            f"needs {size} task slots{with_gpus}, but there are {capacity.total} in all, {capacity.use} "
            f"({cluster.title}). {fewer}{more}{or_here(size, here)}."
        )
    return capacity


def check_ring(cluster: Cluster, size: int, gpus: int | None, say: Say | None) -> Slots:
    """Return the slots. Raise SlotsError if Spark cannot start a pool's items, each of which runs on `size` ranks."""
    (capacity, limit), with_gpus = _reachable(cluster, size, gpus, say), _with_gpus(cluster, gpus)
    if capacity.total < size:
        raise SlotsError(
            f"each item needs {size} task slots{with_gpus} (--np-each {size}), but there are {capacity.total} in all "
            f"({limit or cluster.title}): use fewer ranks for each item, or add executors or cores."
        )
    return capacity


def _with_gpus(cluster: Cluster, gpus: int | None) -> str:
    return f" with {counted(gpus, 'GPU')} each" if gpus and profile_gpus(cluster, gpus) else ""


def _reachable(cluster: Cluster, size: int, gpus: int | None, say: Say | None) -> tuple[Slots, str]:
    """Return the slots with those that a launch of `size` tasks can wait for, and the settings that limit them, if any.

    Dynamic allocation starts executors for tasks that wait. So, up to its limit, slots that do not exist yet count.
    """
    if not dynamic_allocation(cluster):
        return _settled(cluster, size, gpus, say), ""
    capacity, (most, limit) = slots(cluster, gpus), most_slots(cluster, profile_gpus(cluster, gpus))
    return capacity._replace(total=max(capacity.total, int(min(most, UNKNOWN_SLOTS)))), limit


def _settled(cluster: Cluster, size: int, gpus: int | None, say: Say | None) -> Slots:
    """Return the slots. If there are fewer than `size`, wait for executors that are about to register."""
    began, is_announced = time.monotonic(), say is None
    capacity = slots(cluster, gpus)
    try:
        while capacity.total < size and not cluster.is_driver_alone:
            waited_s = time.monotonic() - began
            left_s, why = (0.0, "") if say is None else _expected(cluster, capacity, size, waited_s)
            if max(left_s, SETTLE_S - waited_s) <= 0:
                break
            if say is not None and why and not is_announced:
                is_announced = True
                say(f"waiting up to {left_s:.0f} s for executors: {why}")
            time.sleep(0.1)
            capacity = slots(cluster, gpus)
    except KeyboardInterrupt:
        raise interrupted(f"while {size} ranks were waiting for executors") from None
    return capacity


def _expected(cluster: Cluster, capacity: Slots, size: int, waited_s: float) -> tuple[float, str]:
    """Return for how many seconds to wait for more executors, and why; '' if the reason need not be told."""
    age_s, added_s, lost_s = cluster.ages_s()
    promised, setting = _promised(cluster, capacity)
    there = f"Spark has {capacity.total} of the {size} task slots that are needed"
    if promised >= size:
        left_s = max(PROMISED_S - min(age_s, lost_s, added_s), PROMISED_LEAST_S - waited_s)
        return left_s, f"{setting} promises {counted(promised, 'task slot')}, and {there}"
    if lost_s < REPLACED_S:
        return REPLACED_S - lost_s, f"Spark lost one {lost_s:.0f} s ago, and {there}"
    if not capacity.total and age_s < REGISTERED_S:
        why = f"the SparkSession started {age_s:.0f} s ago, and no executor has registered yet"
        return REGISTERED_S - age_s, why
    return TOGETHER_S - added_s, ""


def _promised(cluster: Cluster, capacity: Slots) -> tuple[int, str]:
    """Return how many slots there will be when all executors have registered, and the setting that says so; else 0."""
    setting = cluster.setting
    cores_per_task = int(setting("spark.task.cpus", "1"))
    in_all = setting("spark.cores.max") if cluster.master.startswith("spark:") else ""
    if in_all:
        return int(in_all) // cores_per_task, f"spark.cores.max={in_all}"
    default = str(INSTANCES) if re.match("yarn|k8s:", cluster.master) else "0"
    executors = setting("spark.executor.instances", default)
    per_executor = capacity.total // max(1, len(capacity.hosts) - 1)  # the first host is the driver's
    if not (capacity.total and capacity.hosts):
        per_executor = executor_slots(cluster) or 1
    return int(executors) * per_executor, f"spark.executor.instances={executors}"


def waiting(cluster: Cluster, mine: Collection[int]) -> dict[int, str]:
    """Return the names, by id, of the stages (except `mine`) that are ready but are not running any tasks."""
    stages = {number: cluster.stage(number) for number in cluster.active_stages() if number not in mine}
    return {number: status.name for number, status in stages.items() if status is not None and not status.active}
