"""Finds out, or sets, which Python Spark's executors run."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sparkring.cluster.java_errors import line_with
from sparkring.executor.tasks import Task, task_for

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

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


def stage_of(context: SparkContext, size: int, task: Task, *, barrier: bool = False) -> RDD[Any]:
    """Return a stage of `size` tasks, which call task(rows). Local executors run them with this kernel's Python."""
    with executed_by_this_python(context):
        numbers = context.parallelize(range(size), size)
        stage = (numbers.barrier() if barrier else numbers).mapPartitions(task)
        stage._jrdd  # noqa: B018 - reading it makes Spark note the Python that `with` has set
    return stage


def executors_python(context: SparkContext) -> str:
    """Return the path of the executors' Python, or the configured path if no task can run."""
    try:
        return str(context.parallelize([0], 1).mapPartitions(task_for(_executable, None)).collect()[0])
    except Exception:  # the executors' Python is a different version, or the session is stopped
        return str(context.pythonExec)


def _executable(order: None, rows: Iterable[Any]) -> Iterator[str]:
    yield sys.executable


def wrong_python(text: str, python: str) -> str | None:
    """Return what is wrong with the executors' `python`, if a job failed for this reason with the error `text`."""
    if "PYTHON_VERSION_MISMATCH" in text or "Python in worker has different version" in text:
        here = ".".join(map(str, sys.version_info[:2]))
        return (
            f"Spark's executors run {python}, which differs from this notebook's Python, {sys.executable} "
            f"({here}): {line_with(text, 'version')}"
        )
    if package := lacking_package(text):
        return f"Spark's executors run {python}, which has no {package}; this notebook runs {sys.executable}."
    return None


def lacking_package(text: str) -> str:
    """Return the package that Spark's own worker did not find, according to an error message; '' if it names none."""
    found = re.search(r"ModuleNotFoundError: No module named '(pyarrow|pandas|numpy|pyspark|py4j)\b", text)
    return found[1] if found else ""
