"""Where members run: processes on this machine, or tasks of a Spark barrier stage."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from sparkring.errors import SlotsError
from sparkring.launchers.base import Launcher
from sparkring.launchers.local import LocalLauncher
from sparkring.worker import process


def open_launcher(np: int, size: int, environment: dict[str, str], title: str, say: Callable[[str], None]) -> Launcher:
    """The launcher for `size` ranks, here if `np` is negative, else on Spark. LaunchError if that cannot work."""
    if np < 0:
        return LocalLauncher(environment)
    from sparkring.launchers.spark import SparkLauncher, find_session

    return SparkLauncher(find_session(size, say), size, environment, title)


def every_slot() -> int:
    """The number of ranks that np=0 stands for."""
    from sparkring.launchers.spark import find_session, slots

    found = slots(find_session(0, print).sparkContext)
    if found.total == 0:
        raise SlotsError(f"-n 0 takes every task slot, and there is none ({found.master}): add executors.")
    return found.total


def _gpus() -> list[str]:
    """The GPUs of this machine, as nvidia-smi lists them; none where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=index,name,memory.used,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # a driver that does not answer has no GPU to offer
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def slots_table() -> list[tuple[str, ...]]:
    """Where ranks can run now, as rows: where, slots, busy, details. Makes no SparkSession."""
    load = f"load {os.getloadavg()[0]:.1f}"
    rows = [("this machine (n < 0)", f"{process.cores()} cores", "", load)]
    gpus = _gpus()
    if gpus:
        rows.append(("GPUs here", str(len(gpus)), "", "; ".join(gpus)))
    if "pyspark" in sys.modules:
        from sparkring.launchers import spark

        found = spark.current_slots()
        if found is not None:
            hosts = ", ".join(sorted(set(found.hosts)))
            details = f"{found.master} on {hosts}" + "".join(f"; {holder}" for holder in found.holders)
            return [*rows, ("Spark (n > 0)", str(found.total), str(found.busy), details)]
    return [*rows, ("Spark (n > 0)", "", "", "no SparkSession; -n 2 makes a local one")]
