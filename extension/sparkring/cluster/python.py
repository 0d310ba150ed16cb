"""Finds out which Python Spark's executors run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sparkring.cluster.java_errors import line_with
from sparkring.executor.tasks import task_for

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster

SET_PYTHON = "Set PYSPARK_PYTHON to a Python with this notebook's version and packages before the SparkSession is made."


def executors_python(cluster: Cluster) -> str:
    """Return the path of the executors' Python, or the configured path if no task can run."""
    try:
        return str(cluster.collect(1, task_for(_executable, None))[0])
    except Exception:  # the executors' Python is a different version, or the session is stopped
        return cluster.python


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
    match = re.search(r"ModuleNotFoundError: No module named '(pyarrow|pandas|numpy|pyspark|py4j)\b", text)
    return match[1] if match else ""
