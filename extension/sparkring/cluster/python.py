"""Finds out, or sets, which Python Spark's executors run."""

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
    """Within this context, have local executors run Python functions with this kernel's Python.

    Otherwise, they would use PYSPARK_PYTHON or `python3`, which may be a different Python.
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
    """Return the path of the executors' Python, or the configured path if no task can run."""

    # Executors may lack sparkring, so look() is nested. Then it is pickled by value, with the import that it needs.
    def look(_: int) -> str:
        import sys

        return sys.executable

    try:
        return str(context.parallelize([0], 1).map(look).collect()[0])
    except Exception:  # the executors' Python is a different version, or the session is stopped
        return str(context.pythonExec)
