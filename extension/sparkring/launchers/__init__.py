"""Where members run: processes on this machine, or tasks of a Spark barrier stage."""

from __future__ import annotations

import os
import sys


def slots_table() -> list[tuple[str, ...]]:
    """Where ranks can run now, as rows: where, slots, busy, details. Makes no SparkSession."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = f"load {os.getloadavg()[0]:.1f}"
    rows = [("this machine (n < 0)", f"{cores} cores", "", load)]
    if "pyspark" in sys.modules:
        from sparkring.launchers import spark

        found = spark.current_slots()
        if found is not None:
            hosts = ", ".join(sorted(set(found.hosts)))
            details = f"{found.master} on {hosts}" + "".join(f"; {holder}" for holder in found.holders)
            return [*rows, ("Spark (n > 0)", str(found.total), str(found.busy), details)]
    return [*rows, ("Spark (n > 0)", "", "", "no SparkSession; -n 2 makes a local one")]
