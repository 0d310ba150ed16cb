"""How long a cell takes to its first line and to its end, with a framework and without."""

from __future__ import annotations

import functools

from harness import US, Case, Effort, Goal, Row, Turns, cell, horovodrun, ours, script, spark_session
from peers import horovod_on_spark

MARKER = "hello from rank"
WITH_TENSORFLOW = Goal(0.55, ratio=True)
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
