"""Tests of the address at which executors reach a client of Spark Connect, and of what is advised if they cannot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparkring.cluster import connect
from sparkring.cluster.connect import Connect
from sparkring.errors import LaunchError


def cluster(server: str, **settings: str) -> Connect:
    """Return the cluster of a session whose server has these settings, with `_` for dots."""

    def get(name: str, default: str | None) -> str | None:
        if name == "spark.hidden":
            raise RuntimeError("[CONFIG_NOT_AVAILABLE] Configuration spark.hidden is not available.")
        return settings.get(name.replace(".", "_"), default)

    return Connect(SimpleNamespace(client=SimpleNamespace(host=server), conf=SimpleNamespace(get=get)))


def test_a_server_on_this_machine():
    """Executors elsewhere reach this machine at the server's address, if the machine has this address."""
    pod = {"spark_master": "k8s://https://api", "spark_driver_host": "127.0.0.2"}
    assert cluster("127.0.0.1", **pod).address() == ("127.0.0.2", "127.0.0.2", 0)
    assert cluster("127.0.0.1", **{**pod, "spark_master": "local[4]"}).address().host == "127.0.0.1"
    # The server is behind a tunnel, such as that of ssh or kubectl.
    assert cluster("127.0.0.1", **{**pod, "spark_driver_host": "192.0.2.1"}).address().host == "127.0.0.1"
    assert cluster("127.0.0.1", **pod, spark_sparkring_driver_host="10.0.0.5").address().host == "10.0.0.5"


def test_databricks(monkeypatch):
    """Settings that are hidden count as not set. Errors say which compute can run ranks."""
    assert cluster("host").setting("spark.hidden", "default") == "default"
    monkeypatch.delenv(connect._DATABRICKS, raising=False)
    assert cluster("host").elsewhere == ""
    assert "spark.sparkring.driver.host" in cluster("host").reachable_by
    assert "dedicated" in cluster("adb-1.2.azuredatabricks.net").reachable_by
    monkeypatch.setenv(connect._DATABRICKS, "client.1.13")
    assert "dedicated" in cluster("host").elsewhere
    with pytest.raises(LaunchError, match="dedicated"):
        cluster("unix:///server.sock").address()
