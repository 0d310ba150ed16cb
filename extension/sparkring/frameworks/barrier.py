"""The framework of %%barrier: rank i is the task of partition i in a Spark barrier stage.

The ranks communicate through Spark's BarrierTaskContext.
"""

from __future__ import annotations

from sparkring.frameworks.base import Lesson
from sparkring.frameworks.plain import Plain


class Barrier(Plain):
    """Ranks that are the tasks of one barrier stage, in the order of its partitions."""

    lesson = Lesson(
        "barrier",
        "the tasks of a Spark barrier stage.\n\n"
        "In the cell, `context` is Spark's BarrierTaskContext, and `rows` holds the rows of partition `rank` of the\n"
        "DataFrame in --data. Iterate over them, read batches with rows.pandas() or rows.arrow(), or read everything\n"
        "with rows.to_pandas()",
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
