"""Decides where members run: in processes on this machine, or in tasks of a Spark stage."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sparkring.errors import SlotsError
from sparkring.history.describe import counted
from sparkring.launchers.base import Launcher, LaunchRequest
from sparkring.launchers.local import LocalLauncher, pool_shares, sharers, visible_gpus
from sparkring.runtime import limits
from sparkring.worker.member import gpus


def open_launcher(request: LaunchRequest, say: Callable[[str], None], *, patient: bool = True) -> Launcher:
    """Return a launcher for the request. Raise LaunchError if a launcher could not start the members.

    `patient` says whether to wait for executors if Spark has just lost one.
    """
    if request.np < 0:
        return LocalLauncher(request.environment, request.size, request.gpus)
    from sparkring.cluster.session import find_session
    from sparkring.launchers.spark import SparkLauncher

    if request.data is not None:
        return SparkLauncher(request.data.session(), request, say if patient else None)
    session = find_session(request.size * max(1, request.at_once), say, here=request.here)
    return SparkLauncher(session, request, say if patient else None)


def pool_requests(request: LaunchRequest, slots: int, gpus: float | None) -> list[LaunchRequest]:
    """Return each slot's request, with `gpus` GPUs for each rank. Raise LaunchError if this machine has too few."""
    if gpus is None:
        return [request] * slots
    whole = request._replace(gpus=math.ceil(gpus))
    if request.np > 0 or gpus == 0:
        return [whole] * slots
    shares = pool_shares(slots, request.size, gpus, visible_gpus(request.environment))
    return [whole._replace(environment={**whole.environment, "CUDA_VISIBLE_DEVICES": share}) for share in shares]


def default_at_once(size: int, gpus_each: float | None, environment: Mapping[str, str]) -> int:
    """Return how many items run at once on this machine by default: as many as it has cores and GPUs for.

    Each item has `size` ranks, and each rank needs a core and `gpus_each` GPUs. `environment` holds the ranks'
    variables.
    """
    size = max(1, size)  # not yet checked, and neither is `gpus_each`
    by_cores = limits.cores() // size
    if not gpus_each or not math.isfinite(gpus_each):
        return max(1, by_cores)
    return max(1, min(by_cores, _room_on_gpus(gpus.find(visible_gpus(environment)), size, gpus_each)))


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


def item_room(request: LaunchRequest, each: float | None) -> ItemRoom:
    """Return the room for items that are launched like `request`, if each rank gets `each` GPUs.

    On Spark, this is the room on the current executors. GPUs that Spark assigns are not a separate limit, because the
    number of task slots already depends on them.
    """
    if request.np > 0:
        from sparkring.cluster.slots import current_slots

        slots = current_slots()
        if slots is None:
            return ItemRoom()
        hosts = max(1, len(slots.executor_hosts))
        return ItemRoom(hosts, slots.total / hosts / request.size)
    found = gpus.find(visible_gpus(request.environment)) if each != 0 else []
    free = tuple((gpu.used.total_bytes or 0) - (gpu.used.used_bytes or 0) for gpu in found)
    if not each:
        return ItemRoom(gpu_free=free)
    return ItemRoom(gpus=_room_on_gpus(found, request.size, each), gpu_free=free)


def _room_on_gpus(found: Sequence[gpus.Gpu], size: int, each: float) -> int:
    if each < 1:
        return len(found) * sharers(each)
    # A process can use only one MIG instance.
    return sum(each == 1 or not gpu.is_mig for gpu in found) // (size * int(each))


def every_slot() -> int:
    """Return the number of ranks for np=0: one rank for each of Spark's task slots."""
    from sparkring.cluster.session import find_session
    from sparkring.cluster.slots import slots

    found = slots(find_session(0, print).sparkContext)
    if found.total == 0:
        raise SlotsError(f"-n 0 uses every task slot, but there are none ({found.master}): add executors.")
    return found.total


def gpus_of_a_rank(np: int, say: Callable[[str], None]) -> float:
    """Return the number of GPUs for each rank: on this machine, one if it has any; on Spark, as many as a task gets."""
    if np < 0:
        return float(bool(gpus.found(os.environ.get("CUDA_VISIBLE_DEVICES"))))
    from sparkring.cluster.session import find_session
    from sparkring.cluster.slots import gpus_per

    return gpus_per(find_session(np, say).sparkContext, "task")


def room(request: LaunchRequest) -> int:
    """Return how many ranks there is room for, including running ones; on this machine, as many as are requested."""
    if request.np < 0:
        return request.size
    from sparkring.cluster.slots import current_slots

    found = current_slots()
    return 0 if found is None else found.total


def slots_table() -> list[tuple[str, ...]]:
    """Return a table of where ranks can run: place, slots, busy slots and details. This starts no SparkSession."""
    load = f"load {os.getloadavg()[0]:.1f}"
    rows = [("this machine (n < 0)", counted(limits.cores(), "core"), "", load)]
    found = gpus.found(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if found:
        busy = sum(bool(gpu.busy_percent) for gpu in found)
        told = (str(gpu) + (f", {gpu.used_bytes / 1e9:.0f} GB used" if gpu.used_bytes else "") for gpu in found)
        rows.append(("GPUs here (n < 0)", str(len(found)), str(busy), "; ".join(told)))
    spark = "Spark (n > 0)"
    if importlib.util.find_spec("pyspark") is None:
        return [*rows, (spark, "", "", "pyspark is not installed: `pip install 'sparkring[spark]'`")]
    from sparkring.cluster.session import only_connect
    from sparkring.cluster.slots import current_slots

    connect = only_connect()
    if connect:
        return [*rows, (spark, "", "", connect)]
    slots = current_slots()
    if slots is None:
        return [*rows, (spark, "", "", "no SparkSession; -n 2 starts a local one")]
    hosts = ", ".join(sorted(set(slots.hosts)))
    details = f"{slots.master} on {hosts}" + "".join(f"; {holder}" for holder in slots.holders)
    if slots.gpus_per_task:
        details += f"; GPUs: {slots.gpus_per_task:g} per task, {slots.gpus_per_executor:g} per executor"
    return [*rows, (spark, str(slots.total), str(slots.busy), details)]
