"""How the tasks of a ring start on Spark, and what dynamic allocation can provide, by the session's settings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sparkring.cluster import slots as slots_module
from sparkring.cluster.base import UNKNOWN_SLOTS
from sparkring.cluster.formation import (
    Formation,
    dynamic_allocation,
    executor_slots,
    formation_of,
    idle_s,
    most_slots,
    profile_gpus,
    refuses_barrier,
)
from sparkring.errors import SlotsError

DYNAMIC = "spark.dynamicAllocation."
ON = {f"{DYNAMIC}enabled": "true"}


class Settings:
    """A cluster with these settings and `total` slots."""

    title = "the cluster"

    def __init__(self, settings: dict[str, str], master: str = "spark://x", total: int = 0) -> None:
        self.master, self.total = master, total
        self.is_driver_alone = master.startswith("local")
        self.shows_stages = True
        self.setting = lambda name, default="": settings.get(name, default)

    def total_slots(self, gpus: int = 0) -> int:
        return self.total

    def hosts(self) -> list[str]:
        return []

    def active_stages(self) -> list[int]:
        return []


def cluster(settings: dict[str, str], master: str = "spark://x", total: int = 0) -> Any:
    return Settings(settings, master, total)


@pytest.mark.parametrize(
    ("settings", "master", "slots", "expected"),
    [
        ({}, "spark://x", 2, Formation.BARRIER),
        ({}, "spark://x", UNKNOWN_SLOTS, Formation.ORDINARY),
        (ON, "spark://x", 2, Formation.ORDINARY),
        (ON, "local[4]", 4, Formation.BARRIER),
        ({f"{DYNAMIC}enabled": "false"}, "yarn", 1, Formation.BARRIER),
    ],
)
def test_how_a_ring_forms(settings, master, slots, expected):
    assert formation_of(cluster(settings, master), slots) is expected
    assert dynamic_allocation(cluster(settings, master)) == (settings == ON and master != "local[4]")


@pytest.mark.parametrize(
    ("error", "refuses"),
    [
        ("SparkException: [SPARK-24942]: Barrier execution mode does not support dynamic resource …", True),
        ("[SPARK-24820][SPARK-24821]: Barrier execution mode does not allow the following pattern …", True),
        ("Could not recover from a failed barrier ResultStage. Most recent failure reason: …", False),
    ],
)
def test_errors_about_barrier_stages(error, refuses):
    assert refuses_barrier(error) is refuses


@pytest.mark.parametrize(
    ("settings", "master", "each", "most"),
    [
        ({}, "yarn", 1, math.inf),
        ({f"{DYNAMIC}maxExecutors": "3"}, "yarn", 1, 3),
        ({f"{DYNAMIC}maxExecutors": "3", "spark.executor.cores": "4", "spark.task.cpus": "2"}, "k8s://x", 2, 6),
        ({f"{DYNAMIC}maxExecutors": "3"}, "spark://x", 0, math.inf),
        ({f"{DYNAMIC}maxExecutors": "3", "spark.cores.max": "5", "spark.executor.cores": "2"}, "spark://x", 2, 5),
        ({f"{DYNAMIC}maxExecutors": "2", "spark.cores.max": "5", "spark.executor.cores": "2"}, "spark://x", 2, 4),
        ({f"{DYNAMIC}maxExecutors": "2", "spark.executor.cores": "8", "spark.task.resource.gpu.amount": "0.5",
          "spark.executor.resource.gpu.amount": "2"}, "yarn", 4, 8),
    ],
)  # fmt: skip
def test_how_far_slots_can_grow(settings, master, each, most):
    assert executor_slots(cluster(settings, master)) == each
    limit, words = most_slots(cluster(settings, master))
    assert limit == most
    assert bool(words) == (most != math.inf)


@pytest.mark.parametrize(
    ("settings", "gpus", "needed", "slots"),
    [
        ({}, 1, 0, 4),
        ({"spark.executor.resource.gpu.amount": "2"}, 1, 1, 2),
        ({"spark.executor.resource.gpu.amount": "2"}, 3, 0, 4),
        ({"spark.executor.resource.gpu.amount": "2", "spark.task.resource.gpu.amount": "0.5"}, 1, 1, 2),
        ({"spark.executor.resource.gpu.amount": "2", "spark.task.resource.gpu.amount": "1"}, 1, 0, 2),
        ({"spark.executor.resource.gpu.amount": "2"}, None, 0, 4),
    ],
)
def test_tasks_with_gpus_of_their_own(settings, gpus, needed, slots):
    """Tasks need a profile if the session gives them fewer GPUs. Then, fewer tasks may run at once."""
    one = cluster({"spark.executor.cores": "4", **settings})
    assert profile_gpus(one, gpus) == needed
    assert executor_slots(one, needed) == slots


@pytest.mark.parametrize(("written", "expected"), [("", 60.0), ("5s", 5.0), ("1500ms", 1.5), ("2m", 120.0), ("7", 7.0)])
def test_how_long_executors_may_be_idle(written, expected):
    assert idle_s(cluster({f"{DYNAMIC}executorIdleTimeout": written})) == expected


def test_rings_that_cannot_form_are_refused_at_once():
    """The error names the setting. Without a limit, executors are waited for, even if there are none."""
    settings = {**ON, f"{DYNAMIC}maxExecutors": "1", "spark.executor.cores": "2"}
    slots_module.check(cluster(settings), 2, None, None, None, here=True)
    slots_module.check(cluster(ON), 99, None, None, None, here=True)
    slots_module.check_ring(cluster(ON), 99, None, None)
    with pytest.raises(SlotsError, match=r"needs 3 .* 2 at most: spark\.dynamicAllocation\.maxExecutors=1.*-n 2"):
        slots_module.check(cluster(settings), 3, None, None, None, here=True)
    with pytest.raises(SlotsError, match=r"\(--np-each 3\).*maxExecutors=1"):
        slots_module.check_ring(cluster(settings), 3, None, None)
