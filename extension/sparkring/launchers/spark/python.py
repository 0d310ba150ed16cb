"""Which Python Spark's executors run."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext

SET_PYTHON = "Set PYSPARK_PYTHON to a Python with this notebook's version and packages before the SparkSession is made."

_changing = threading.Lock()


@contextlib.contextmanager
def executed_by_this_python(context: SparkContext) -> Iterator[None]:
    """Have the Python functions that are handed to Spark meanwhile executed by this Python, under a local master.

    Executors are then on this machine. Which Python they run is PYSPARK_PYTHON or `python3`, which in a virtual
    environment that is not activated is another one. The session's own setting stays as it is for all other jobs.
    """
    if not context.master.startswith("local"):
        yield
        return
    with _changing:
        before, context.pythonExec = context.pythonExec, sys.executable
        try:
            yield
        finally:
            context.pythonExec = before


def executors_python(context: SparkContext) -> str:
    """The path of the Python that executors run, or what Spark was told to run if it runs nothing."""

    def look(_: int) -> str:  # by value, since executors need not have sparkring: so what it needs is in it
        import sys

        return sys.executable

    try:
        return str(context.parallelize([0], 1).map(look).collect()[0])
    except Exception:  # it has another version, or the session has been stopped
        return str(context.pythonExec)
