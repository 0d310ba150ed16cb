"""Finds out how many task slots Spark has, what holds them, and whether a barrier stage would get enough of them."""

from __future__ import annotations

import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from sparkring.cluster.jobs import stage_ids
from sparkring.cluster.session import made_here, or_here
from sparkring.errors import LaunchError, SlotsError
from sparkring.history.describe import counted
from sparkring.runtime.interrupts import interrupted

if TYPE_CHECKING:
    from pyspark import SparkContext

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
INSTANCES = 2  # the number of executors on YARN and Kubernetes, unless spark.executor.instances is set

Say = Callable[[str], None]  # shows the user a message


class Slots(NamedTuple):
    """How many tasks Spark can run at once (`total`), and how many it is running (`busy`).

    `holders` holds a string for each stage or pool that is running: its name, and how many tasks it is running.
    `gpus_per_task` and `gpus_per_executor` count only GPUs that Spark itself assigns. If tasks share a GPU,
    `gpus_per_task` is a fraction.
    """

    total: int
    busy: int
    master: str
    hosts: list[str]
    holders: list[str]
    gpus_per_task: float
    gpus_per_executor: float

    @property
    def free(self) -> int:
        return self.total - self.busy

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

    context: SparkContext
    title: str
    size: int
    persistent: bool = field(kw_only=True)
    group: str = field(init=False, default_factory=lambda: f"sparkring-{uuid.uuid4().hex[:12]}")

    def ids(self) -> set[int]:
        """Return Spark's ids of the stage and of the stages that it depends on."""
        return stage_ids(self.context, self.group)

    def active_tasks(self) -> int:
        """Return how many tasks Spark is running for the stage; 0 if all of them are waiting for slots."""
        found = [self.context.statusTracker().getStageInfo(stage) for stage in self.ids()]
        return sum(info.numActiveTasks for info in found if info is not None)


running: set[Stage] = set()


def slots(context: SparkContext, *, apart_from: Collection[int] = ()) -> Slots:
    """Return the slots of this session. Tasks of the stages whose ids are in `apart_from` do not count as running."""
    assert context._jsc is not None
    jvm_context = context._jsc.sc()
    profile = jvm_context.resourceProfileManager().defaultResourceProfile()
    total = int(jvm_context.maxNumConcurrentTasks(profile))
    tracker = context.statusTracker()
    ours = {stage: one.title for one in list(running) for stage in one.ids()}
    holders, busy = Counter[str](), 0
    for stage in tracker.getActiveStageIds():
        info = tracker.getStageInfo(stage)
        if info is not None and info.numActiveTasks and stage not in apart_from:
            busy += info.numActiveTasks
            holders[ours.get(stage) or f"stage {stage} ({info.name})"] += info.numActiveTasks
    iterator = jvm_context.getExecutorMemoryStatus().keysIterator()
    hosts = []
    while iterator.hasNext():
        hosts.append(str(iterator.next()).rpartition(":")[0])
    per_task, per_executor = gpus_per(context, "task"), gpus_per(context, "executor")
    told = [f"{holder}: {tasks}" for holder, tasks in holders.items()]
    return Slots(total, min(busy, total), context.master, hosts, told, per_task, per_executor)


def current_slots() -> Slots | None:
    """Return the slots of the notebook's session; None if there is no session."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    return None if context is None or context._jsc is None else slots(context)


def gpus_per(context: SparkContext, holder: Literal["task", "executor"]) -> float:
    """Return how many GPUs Spark gives to each task or to each executor, as `holder` says."""
    if _on_driver_alone(context):
        return 0.0  # in local mode, Spark assigns no GPUs, whatever the settings say
    return float(context.getConf().get(f"spark.{holder}.resource.gpu.amount", "0") or 0)


def _on_driver_alone(context: SparkContext) -> bool:
    return re.match(r"local(\[|$)", context.master) is not None


def check_gpus(context: SparkContext, size: int, each: int) -> None:
    """Raise LaunchError if Spark gives a task fewer than `each` GPUs."""
    held = gpus_per(context, "task")
    if held >= each:
        return
    advice = (
        f"Spark assigns no GPUs in this mode: use -n -{size} for processes on this machine, with its GPUs."
        if _on_driver_alone(context)
        else f"Start the session with spark.task.resource.gpu.amount={each}, spark.executor.resource.gpu.amount (the "
        "amount per task times the tasks that run in an executor at once) and, if the cluster does not know its GPUs "
        f"yet, spark.executor.resource.gpu.discoveryScript; or use -n -{size} for this machine's own GPUs."
    )
    raise LaunchError(
        f"needs {each} GPU{'s' if each > 1 else ''} for each task, but Spark assigns {held:g} ({context.master}). "
        f"{advice}"
    )


def check(context: SparkContext, size: int, data: Data | None, say: Say | None, *, here: bool) -> None:
    """Raise LaunchError or SlotsError if a barrier stage of `size` tasks cannot start in the session as it is.

    `data` is the partitioned data that the stage reads, if any. `here` says whether errors may suggest processes on
    this machine instead of Spark tasks. If Spark has just started, or has just lost an executor, wait for executors,
    unless `say` is None.
    """
    _refuse_dynamic_allocation(context)
    found = _settled(context, size, say)
    gangs = [one for one in list(running) if one.persistent and one.context is context]
    held = sum(one.size for one in gangs)
    if held and found.total - held < size <= found.total:
        raise SlotsError(
            f"needs {size} task slots, but the {gangs[0].title} holds {held} of {found.total}. Run on the gang (leave "
            f"out -n, or use -n {held}), or stop it (%gang stop){or_here(size, here)}."
        )
    if found.total < size and data is not None:
        raise SlotsError(
            f"{size} partitions of `{data.name}` need {size} task slots, but there are {found.total} in all, "
            f"{found.busy} of them busy ({context.master}). Use -n {max(found.total, 1)}, or add executors or cores."
        )
    if found.total < size:
        more = (
            "stop this session (SparkSession.builder.getOrCreate().stop()), which sparkring made and will replace with "
            "a larger one"
            if made_here(context)
            else "add executors or cores (new executors count once they have registered)"
        )
        fewer = f"Use -n {found.total}, {'' if here else 'or '}" if found.total else "There are no executors: "
        raise SlotsError(
            f"needs {size} task slots, but there are {found.total} in all, {found.busy} of them busy "
            f"({context.master}). {fewer}{more}{or_here(size, here)}."
        )


def check_ring(context: SparkContext, size: int, say: Say | None) -> None:
    """Raise LaunchError or SlotsError if Spark cannot start a pool's items, each of which runs on `size` ranks."""
    _refuse_dynamic_allocation(context)
    total = _settled(context, size, say).total
    if total < size:
        raise SlotsError(
            f"each item needs {size} task slots (--np-each {size}), but there are {total} in all ({context.master}): "
            "use fewer ranks for each item, or add executors or cores."
        )


def _settled(context: SparkContext, size: int, say: Say | None) -> Slots:
    """Return the slots. If there are fewer than `size`, wait for executors that are about to register."""
    began, told = time.monotonic(), say is None
    found = slots(context)
    try:
        while found.total < size and not _on_driver_alone(context):
            waited_s = time.monotonic() - began
            left_s, why = (0.0, "") if say is None else _expected(context, found, size, waited_s)
            if max(left_s, SETTLE_S - waited_s) <= 0:
                break
            if say is not None and why and not told:
                told = True
                say(f"waiting up to {left_s:.0f} s for executors: {why}")
            time.sleep(0.1)
            found = slots(context)
    except KeyboardInterrupt:
        raise interrupted(f"while {size} ranks were waiting for executors") from None
    return found


def _expected(context: SparkContext, found: Slots, size: int, waited_s: float) -> tuple[float, str]:
    """Return for how many seconds to wait for more executors, and why; '' if the reason need not be told."""
    age_s, lost_s = time.time() - context.startTime / 1000, _executor_ago(context, "removeTime")
    added_s = _executor_ago(context, "addTime")
    promised, setting = _promised(context, found)
    there = f"Spark has {found.total} of the {size} task slots that are needed"
    if promised >= size:
        left_s = max(PROMISED_S - min(age_s, lost_s, added_s), PROMISED_LEAST_S - waited_s)
        return left_s, f"{setting} promises {counted(promised, 'task slot')}, and {there}"
    if lost_s < REPLACED_S:
        return REPLACED_S - lost_s, f"Spark lost one {lost_s:.0f} s ago, and {there}"
    if not found.total and age_s < REGISTERED_S:
        why = f"the SparkSession started {age_s:.0f} s ago, and no executor has registered yet"
        return REGISTERED_S - age_s, why
    return TOGETHER_S - added_s, ""


def _promised(context: SparkContext, found: Slots) -> tuple[int, str]:
    """Return how many slots there will be when all executors have registered, and the setting that says so; else 0."""
    setting = context.getConf().get
    cores_per_task = int(setting("spark.task.cpus", "1"))
    in_all = setting("spark.cores.max", None) if context.master.startswith("spark:") else None
    if in_all is not None:
        return int(in_all) // cores_per_task, f"spark.cores.max={in_all}"
    default = str(INSTANCES) if re.match("yarn|k8s:", context.master) else "0"
    executors = setting("spark.executor.instances", default)
    each = found.total // max(1, len(found.hosts) - 1)  # the first host is the driver's
    if not found.total:
        each = int(setting("spark.executor.cores", "1")) // cores_per_task
        if found.gpus_per_task:
            each = min(each, int(found.gpus_per_executor / found.gpus_per_task))
    return int(executors) * each, f"spark.executor.instances={executors}"


def _executor_ago(context: SparkContext, event: Literal["addTime", "removeTime"]) -> float:
    """Return how many seconds ago an executor was last added or lost, as `event` says; infinity if none was."""
    assert context._jsc is not None
    executors = context._jsc.sc().statusStore().executorList(False).iterator()
    ago_s = math.inf
    while executors.hasNext():
        executor = executors.next()
        if executor.id() == "driver":
            continue
        if event == "addTime":
            ago_s = min(ago_s, time.time() - executor.addTime().getTime() / 1000)
        elif executor.removeTime().isDefined():
            ago_s = min(ago_s, time.time() - executor.removeTime().get().getTime() / 1000)
    return ago_s


def dynamic_allocation(context: SparkContext) -> bool:
    """Return whether Spark's dynamic allocation is on. While it is on, Spark runs no barrier stages."""
    return str(context.getConf().get("spark.dynamicAllocation.enabled", "false")).lower() == "true"


def _refuse_dynamic_allocation(context: SparkContext) -> None:
    if dynamic_allocation(context):
        raise LaunchError(
            "Spark cannot run barrier stages while its dynamic allocation is on: start the session with "
            "spark.dynamicAllocation.enabled=false and a fixed spark.executor.instances."
        )


def waiting(context: SparkContext, mine: Collection[int]) -> dict[int, str]:
    """Return the names, by id, of the stages (except `mine`) that are ready but are not running any tasks."""
    tracker = context.statusTracker()
    found = {stage: tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds() if stage not in mine}
    return {stage: str(info.name) for stage, info in found.items() if info is not None and not info.numActiveTasks}
