"""Decides how the tasks of a ring start on Spark, and knows what dynamic allocation can provide."""

from __future__ import annotations

import enum
import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster

IDLE_S = 60.0  # after this time without tasks, dynamic allocation ends an executor, unless a setting says otherwise
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


def formation_of(cluster: Cluster, size: int, *, pool: bool) -> Formation:
    """Return how a ring of `size` tasks starts. `pool` says whether it belongs to a pool, whose members wait for slots.

    While dynamic allocation is on, Spark refuses barrier stages. The single task of an item needs none.
    """
    return Formation.ORDINARY if dynamic_allocation(cluster) or (pool and size == 1) else Formation.BARRIER


def refuses_barrier(error: str) -> bool:
    """Return whether Spark's error says that it cannot run a stage as a barrier stage."""
    return _NO_BARRIER.search(error) is not None


def dynamic_allocation(cluster: Cluster) -> bool:
    """Return whether Spark's dynamic allocation is on. In local mode, Spark ignores the setting."""
    return cluster.setting("spark.dynamicAllocation.enabled").lower() == "true" and not cluster.is_driver_alone


def idle_s(cluster: Cluster) -> float:
    """Return for how many seconds dynamic allocation keeps an executor without tasks."""
    written = re.fullmatch(r"(\d+)([a-z]*)", cluster.setting("spark.dynamicAllocation.executorIdleTimeout").strip())
    return IDLE_S if written is None else int(written[1]) * _UNITS_S.get(written[2], 1.0)


def executor_slots(cluster: Cluster) -> int:
    """Return how many tasks an executor runs at once, by the session's settings; 0 if they do not say."""
    setting = cluster.setting
    default = "1" if re.match("yarn|k8s:", cluster.master) else "0"  # on a standalone cluster, all of a worker's cores
    slots = int(setting("spark.executor.cores", default)) // int(setting("spark.task.cpus", "1"))
    gpus_each, gpus = (float(setting(f"spark.{of}.resource.gpu.amount", "0")) for of in ("task", "executor"))
    return min(slots, int(gpus / gpus_each)) if gpus_each else slots


def most_slots(cluster: Cluster) -> tuple[float, str]:
    """Return how many slots dynamic allocation can provide, and the settings that say so; math.inf and '' if none do.

    A cluster may provide fewer, because it is small, because others use it, or because of a quota.
    """
    cores, executors = cluster.setting("spark.cores.max"), cluster.setting("spark.dynamicAllocation.maxExecutors")
    limits = [(math.inf, "")]
    if cores and cluster.master.startswith("spark:"):
        limits.append((int(cores) // int(cluster.setting("spark.task.cpus", "1")), f"spark.cores.max={cores}"))
    if executors and (in_one := executor_slots(cluster)):
        words = f"spark.dynamicAllocation.maxExecutors={executors} with {in_one} in each executor"
        limits.append((int(executors) * in_one, words))
    return min(limits)
