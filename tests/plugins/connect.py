"""A server of Spark Connect, and processes that use it. The server and its executors are processes of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from clusters import Cluster, set_java
from drivers import Driver
from leaks import MARK, Watch, family, lasting, runs
from waiting import DEADLINE_S, until

# What pyspark's client of Spark Connect imports, and older sets of versions lack.
NEEDED = ("grpc_status", "google.rpc", "zstandard")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that would contain it is missing
        return False


class ConnectServer:
    """The server that the tests share, on local[4]. The first test that needs it starts it.

    It ends as soon as the next test does not need it. With a `master`, the server belongs to one test.
    """

    def __init__(self, folder: Path, master: str = "local[4]", python: str = sys.executable, **settings: str) -> None:
        self._folder, self._master, self._python, self._settings = folder, master, python, settings
        self.process: subprocess.Popen[bytes] | None = None
        self._url = ""

    def url(self, watch: Watch) -> str:
        if self.process is None:
            watch.except_for(self._start)
        return self._url

    def _start(self) -> None:
        import pyspark

        set_java()
        home = str(Path(pyspark.__file__).parent)
        settings = {
            "spark.ui.enabled": "false",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
            "spark.local.dir": str(self._folder),
            **self._settings,
        }
        environment = {
            **os.environ,
            "SPARK_HOME": home,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "TMPDIR": str(self._folder),  # model processes outlive a test
            "PYSPARK_PYTHON": self._python,
        }
        for name in ("PYTHONPATH", MARK, "PYSPARK_SUBMIT_ARGS"):
            environment.pop(name, None)
        log = self._folder / "server.log"
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [f"{home}/bin/spark-submit", "--master", self._master,
                 *(part for name, value in settings.items() for part in ("--conf", f"{name}={value}")),
                 "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"],
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        lasting.processes.append(psutil.Process(self.process.pid))
        match = until(lambda: re.search(r"Connect server started at: (\S+)", log.read_text()), "the server is up")
        self._url = f"sc://{match[1]}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> Iterator[None]:
        yield
        if "connected" not in getattr(nextitem, "fixturenames", ()):
            self.stop()

    def stop(self) -> None:
        if self.process is None:
            return
        server = psutil.Process(self.process.pid)
        ours = family([server])
        self.process.terminate()
        self.process.wait(DEADLINE_S)
        until(lambda: not [pid for pid in ours if runs(pid)], "the server's processes have ended")
        lasting.processes.remove(server)
        self.process = None


@pytest.fixture(scope="session")
def connect_server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    server = ConnectServer(tmp_path_factory.mktemp("connect"))
    pytestconfig.pluginmanager.register(server)
    yield server
    server.stop()


@pytest.fixture
def connected(connect_server: ConnectServer, driver: Callable[[str], Driver], watch: Watch) -> Callable[[str], Driver]:
    """Starts a script in a process of its own, where `session` is a session of Spark Connect."""
    _needs_client()
    url = connect_server.url(watch)
    return lambda script: driver(_with_session(url, script))


@pytest.fixture
def connected_to(driver: Callable[[str], Driver], watch: Watch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a server on a cluster for one test. Like `connected`, what it returns starts a script."""
    _needs_client()
    servers: list[ConnectServer] = []

    def start(cluster: Cluster, **settings: str) -> tuple[ConnectServer, Callable[[str], Driver]]:
        folder = tmp_path / f"server-{len(servers)}"
        folder.mkdir()
        servers.append(ConnectServer(folder, cluster.url, cluster.python, **settings))
        url = servers[-1].url(watch)
        return servers[-1], lambda script: driver(_with_session(url, script))

    yield start
    for server in servers:
        server.stop()


def _needs_client() -> None:
    if missing := [name for name in NEEDED if not _is_installed(name)]:
        pytest.skip(f"pyspark's client of Spark Connect needs {', '.join(missing)}")


def _with_session(url: str, script: str) -> str:
    return (
        "import warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from pyspark.sql import SparkSession\n"
        f"session = SparkSession.builder.remote({url!r}).getOrCreate()\n{script}"
    )
