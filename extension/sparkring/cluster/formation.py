"""Decides how the tasks of a ring start on Spark, and knows what dynamic allocation can provide."""

from __future__ import annotations

import enum
import math
import re
from typing import TYPE_CHECKING, Literal

from sparkring.cluster.base import UNKNOWN_SLOTS

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster

IDLE_S = 60.0  # after this time without tasks, dynamic allocation ends an executor, unless a setting says otherwise
COPY_SETTING = "spark.speculation.task.duration.threshold"
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# Spark's reasons not to run a barrier stage: dynamic allocation, and a DataFrame after a union or a coalesce.
_NO_BARRIER = re.compile(r"SPARK-24942|SPARK-24820|[Bb]arrier (execution )?mode (is not supported|does not support)")


class Formation(enum.Enum):
    """How the members of a ring start.

    Spark starts the tasks of a barrier stage together. Ordinary tasks start one by one, as soon as Spark has a slot,
    and wait for each other at the driver.
    """

    BARRIER = "barrier stage"
    ORDINARY = "ordinary tasks"


def formation_of(cluster: Cluster, slots: int) -> Formation:
    """Return how a ring starts, if `slots` tasks can run at once.

    While dynamic allocation is on, Spark refuses barrier stages. If there are too few slots, Spark lets a barrier stage
    wait for many minutes without a word, so it must be known that there are enough.
    """
    return Formation.ORDINARY if dynamic_allocation(cluster) or slots >= UNKNOWN_SLOTS else Formation.BARRIER


def refuses_barrier(error: str) -> bool:
    """Return whether Spark's error says that it cannot run a stage as a barrier stage."""
    return _NO_BARRIER.search(error) is not None


def dynamic_allocation(cluster: Cluster) -> bool:
    """Return whether Spark's dynamic allocation is on. In local mode, Spark ignores the setting."""
    return cluster.setting("spark.dynamicAllocation.enabled").lower() == "true" and not cluster.is_driver_alone


def copies_tasks(cluster: Cluster) -> bool:
    """Return whether Spark runs copies of tasks that take long, even if no other task of their stage has ended."""
    return cluster.setting("spark.speculation").lower() == "true" and bool(cluster.setting(COPY_SETTING))


def idle_s(cluster: Cluster) -> float:
    """Return for how many seconds dynamic allocation keeps an executor without tasks."""
    written = re.fullmatch(r"(\d+)([a-z]*)", cluster.setting("spark.dynamicAllocation.executorIdleTimeout").strip())
    return IDLE_S if written is None else int(written[1]) * _UNITS_S.get(written[2], 1.0)


def executor_cores(cluster: Cluster) -> int:
    """Return how many cores an executor has, by the session's settings; 0 if they do not say."""
    default = "1" if re.match("yarn|k8s:", cluster.master) else "0"  # on a standalone cluster, all of a worker's cores
    return int(cluster.setting("spark.executor.cores", default))


def executor_slots(cluster: Cluster, gpus: int = 0) -> int:
    """Return how many tasks an executor runs at once, by the session's settings; 0 if they do not say.

    With `gpus`, these are tasks that get so many GPUs each.
    """
    slots = executor_cores(cluster) // int(cluster.setting("spark.task.cpus", "1"))
    gpus_each = gpus or gpus_per(cluster, "task")
    return min(slots, int(gpus_per(cluster, "executor") / gpus_each)) if gpus_each else slots


def gpus_per(cluster: Cluster, holder: Literal["task", "executor"]) -> float:
    """Return how many GPUs Spark gives to each task or to each executor, as `holder` says."""
    if cluster.is_driver_alone:
        return 0.0  # in local mode, Spark assigns no GPUs, whatever the settings say
    return float(cluster.setting(f"spark.{holder}.resource.gpu.amount") or 0)


def profile_gpus(cluster: Cluster, needed: int | None) -> int:
    """Return `needed` if tasks need a resource profile for so many GPUs, and executors have them; otherwise 0."""
    return needed if needed and gpus_per(cluster, "task") < needed <= gpus_per(cluster, "executor") else 0


def most_slots(cluster: Cluster, gpus: int = 0) -> tuple[float, str]:
    """Return how many slots dynamic allocation can provide, and the settings that say so; math.inf and '' if none do.

    With `gpus`, these are for tasks that get so many GPUs each. A cluster may provide fewer, because it is small,
    because others use it, or because of a quota.
    """
    cores, executors = cluster.setting("spark.cores.max"), cluster.setting("spark.dynamicAllocation.maxExecutors")
    limits = [(math.inf, "")]
    if cores and cluster.master.startswith("spark:"):
        limits.append((int(cores) // int(cluster.setting("spark.task.cpus", "1")), f"spark.cores.max={cores}"))
    if executors and (in_one := executor_slots(cluster, gpus)):
        words = f"spark.dynamicAllocation.maxExecutors={executors} with {in_one} in each executor"
        limits.append((int(executors) * in_one, words))
    return min(limits)
