"""Spark's task slots as a place for ranks. Its launcher, which needs pyspark, is imported when it is first used."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from sparkring.errors import SlotsError
from sparkring.launchers.base import ItemRoom, Launcher, LaunchRequest, Place


class SparkTasks(Place):
    """The tasks of the notebook's SparkSession."""

    name, title = "spark", "Spark"

    def launcher(self, request: LaunchRequest, say: Callable[[str], None], *, patient: bool = True) -> Launcher:
        from sparkring.cluster.session import find_cluster
        from sparkring.launchers.spark import SparkLauncher

        if request.data is not None:
            return SparkLauncher(request.data.cluster(), request, say if patient else None)
        cluster = find_cluster(request.size * max(1, request.at_once), say, here=request.here)
        return SparkLauncher(cluster, request, say if patient else None)

    def room(self, request: LaunchRequest) -> int:
        from sparkring.cluster.slots import room

        return room(request.size, request.gpus)

    def item_room(self, request: LaunchRequest, gpus_each: float | None) -> ItemRoom:
        """Return the room on the current executors.

        GPUs that Spark assigns are not a separate limit, because the number of task slots already depends on them.
        """
        from sparkring.cluster.base import UNKNOWN_SLOTS
        from sparkring.cluster.slots import current_slots

        slots = current_slots(request.gpus)
        if slots is None:
            return ItemRoom()
        hosts = max(1, len(slots.executor_hosts))
        if slots.total >= UNKNOWN_SLOTS:
            return ItemRoom(hosts)
        return ItemRoom(hosts, slots.total / hosts / request.size)

    def gpus_of_a_rank(self, size: int, say: Callable[[str], None]) -> float:
        from sparkring.cluster.formation import gpus_per
        from sparkring.cluster.session import find_cluster

        return gpus_per(find_cluster(size, say), "task")

    def every_slot(self) -> int:
        from sparkring.cluster.base import UNKNOWN_SLOTS
        from sparkring.cluster.session import find_cluster
        from sparkring.cluster.slots import slots
        from sparkring.launchers.tunnel import why_needed

        cluster = find_cluster(0, print)
        all_slots = slots(cluster)
        if all_slots.total == 0:
            raise SlotsError(f"-n 0 uses every task slot, but there are none ({all_slots.master}): add executors.")
        if all_slots.total >= UNKNOWN_SLOTS:
            raise SlotsError("-n 0 uses every task slot, but Spark does not say how many there are: use -n K.")
        return max(1, all_slots.total - bool(why_needed(cluster)))

    def may_lack_packages(self) -> bool:
        """Return whether there is a session whose ranks do. A local one, which -n 2 starts by default, has none."""
        from sparkring.cluster.session import active_cluster

        cluster = active_cluster()
        return cluster is not None and not cluster.runs_this_python

    def table(self) -> list[tuple[str, ...]]:
        spark = "Spark (n > 0)"
        if importlib.util.find_spec("pyspark") is None:
            return [(spark, "", "", "pyspark is not installed: `pip install 'sparkring[spark]'`")]
        from sparkring.cluster.base import UNKNOWN_SLOTS
        from sparkring.cluster.session import uses_connect
        from sparkring.cluster.slots import current_slots

        slots = current_slots()
        if slots is None:
            none = "no session of Spark Connect" if uses_connect() else "no SparkSession; -n 2 starts a local one"
            return [(spark, "", "", none)]
        hosts = f" on {', '.join(sorted(set(slots.hosts)))}" if slots.hosts else ""
        details = f"{slots.master}{hosts}" + "".join(f"; {holder}" for holder in slots.holders)
        if slots.gpus_per_task:
            details += f"; GPUs: {slots.gpus_per_task:g} per task, {slots.gpus_per_executor:g} per executor"
        total = "?" if slots.total >= UNKNOWN_SLOTS else str(slots.total)
        return [(spark, total, str(slots.busy) if slots.shows_use else "?", details)]
