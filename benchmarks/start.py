"""How long a cell takes until its first line and until its end, with and without a framework."""

from __future__ import annotations

import functools

from harness import US, Case, Effort, Goal, Kernel, Measured, Row, Turns, cell, horovodrun, ours, script, spark_session
from peers import horovod_on_spark

MARKER = "hello from rank"
WITH_TENSORFLOW = Goal(0.55, ratio=True)
FIRST = "hello from rank 0 of"  # the cell prints this text, but does not contain it
NEW = f"{US}, new processes"
# Waits until the spare process has imported what the last launch has imported.
WAIT = """
import time
from sparkring.launchers.spare import spares
until = time.monotonic() + 60
while not (spares.spare and spares.spare.is_ready()):
    assert time.monotonic() < until
    time.sleep(0.05)
"""
ON_SPARK = f"{US} on Spark"


def frameworks(effort: Effort) -> list[Row]:
    local: dict[str, Case] = {
        US: functools.partial(ours, cell("tensorflow_line"), -2, MARKER),
        "horovodrun": functools.partial(horovodrun, script("tensorflow_line"), marker=MARKER),
    }
    on_spark: dict[str, Case] = {
        US: functools.partial(ours, cell("tensorflow_line"), 2, MARKER),
        "horovod.spark.run": functools.partial(horovod_on_spark, MARKER),
    }
    spark_session()
    rows = []
    for where, cases in (("local ranks", local), ("Spark tasks", on_spark)):
        turns = Turns(effort.runs, cases)
        _, peer = cases
        what = f"Horovod with TensorFlow, 2 {where}: start to"
        rows += [
            turns.row(f"{what} first line", "s", "first", peer, goal=WITH_TENSORFLOW),
            turns.row(f"{what} end", "s", "total", peer),
        ]
    return rows


def trivial(effort: Effort) -> list[Row]:
    spark_session()
    source = f"print({MARKER!r}, rank)"
    turns = Turns(
        effort.runs,
        {
            US: functools.partial(ours, source, -2, MARKER),
            ON_SPARK: functools.partial(ours, source, 2, MARKER),
        },
    )
    what = "cell that only prints, 2 {}: start to {}"
    return [
        turns.row(what.format("local ranks", "first line"), "s", "first"),
        turns.row(what.format("local ranks", "end"), "s", "total", goal=Goal(0.5)),
        turns.row(what.format("Spark tasks", "first line"), "s", "first", us=ON_SPARK),
        turns.row(what.format("Spark tasks", "end"), "s", "total", us=ON_SPARK, goal=Goal(1.0)),
    ]


def again(effort: Effort) -> list[Row]:
    """Measure the second launch of a notebook: with processes that a spare process forks, and with new processes."""
    source = f"%%horovod -n -2\n{cell('tensorflow_line')}"
    pool = "%%foreach i in range(4) -n -2\nimport tensorflow"
    # Without a page, the panel would show nothing before the end of the cell. The static view shows lines earlier.
    view = {"SPARKRING_PANEL": "0"}
    with Kernel(SPARKRING_SPARE="1", **view) as forking, Kernel(SPARKRING_SPARE="0", **view) as starting:
        for kernel in (forking, starting):
            kernel.run("%load_ext sparkring")
            kernel.run(source)
        turns = Turns(
            effort.runs,
            {
                US: functools.partial(_again, forking, source),
                NEW: functools.partial(starting.run, source, FIRST),
                "horovodrun": functools.partial(horovodrun, script("tensorflow_line"), marker=MARKER),
            },
        )
        for kernel in (forking, starting):
            kernel.run(pool)
        pools = Turns(
            effort.runs,
            {US: functools.partial(_again, forking, pool), NEW: functools.partial(starting.run, pool, FIRST)},
        )
    what = "second cell with Horovod and TensorFlow, 2 local ranks, in a notebook's kernel: start to"
    return [
        turns.row(f"{what} first line", "s", "first", "horovodrun", goal=Goal(0.15, ratio=True)),
        turns.row("… compared with new processes", "s", "first", NEW, goal=Goal(0.4)),
        turns.row(f"{what} end", "s", "total", "horovodrun"),
        pools.row("second %%foreach, 4 items on 2 processes that import TensorFlow: start to end", "s", "total", NEW),
    ]


def first(effort: Effort) -> list[Row]:
    """Measure the first launch of a notebook: with processes that a spare process forks, and with new processes.

    Each turn has a new kernel. The last item of a pool begins when all processes have imported the framework.
    """
    rows = []
    for name in ("torch", "tensorflow"):
        pool = f"%%foreach i in range(4) -n -4\nimport {name}\nimport time\ntime.time()"
        cases: dict[str, Case] = {
            US: functools.partial(_first, pool, "1"),
            NEW: functools.partial(_first, pool, "0"),
        }
        turns = Turns(effort.runs, cases)
        what = f"first %%foreach, 4 processes that import {name}: start to the import in"
        rows += [turns.row(f"{what} {each}", "s", each.split()[0], NEW) for each in ("one process", "all processes")]
    return rows


def _first(source: str, spare: str) -> Measured:
    with Kernel(SPARKRING_SPARE=spare, SPARKRING_PANEL="0") as kernel:
        kernel.run("%load_ext sparkring")
        kernel.run("import time\nbegun = time.time()")
        kernel.run(source)
        ends = kernel.value("[at - begun for at in sparkring.last_result.values]")
    return {"one": min(ends), "all": max(ends)}


def _again(kernel: Kernel, source: str) -> Measured:
    kernel.run(WAIT)
    return kernel.run(source, FIRST)
