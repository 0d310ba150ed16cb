"""Spark's own barrier stage: ranks meet through its task context, and rank i has partition i."""

from __future__ import annotations

from sparkring.frameworks.base import Lesson
from sparkring.frameworks.plain import Plain


class Barrier(Plain):
    """Ranks that are the tasks of one barrier stage, in the order of its partitions."""

    lesson = Lesson(
        "barrier",
        "the tasks of a Spark barrier stage, where `context` is the BarrierTaskContext and `rows` the\n"
        "rows of partition `rank` of --data: iterate over them, or take rows.pandas() or rows.arrow() in batches, or\n"
        "rows.to_pandas() at once",
        """
        part = rows.to_pandas()
        print("rank", rank, "has", len(part), "rows, all have", context.allGather(str(len(part))))
        make_model().fit(part[["x1", "x2"]], part["y"])
        """,
        "make_model",
        "-n 4 --data digits",
    )

    by_node = False
    in_task = True
    reserved = ("context", "rows")
