"""Spark for the tests: a session that they share, and standalone clusters."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import java_archive
import psutil
import pytest
from kinds import kind_of, places
from leaks import MARK, Watch, family, lasting, runs
from waiting import DEADLINE_S, until

from sparkring.engine.run import warm_gang


class Cluster(NamedTuple):
    """A standalone cluster, the Python that its executors run, and its workers' processes; `add()` starts a worker."""

    url: str
    python: str
    workers: list[subprocess.Popen[bytes]]
    add: Callable[..., object]


@pytest.hookimpl(trylast=True)  # after our own temporary folder has been made
def pytest_configure(config: pytest.Config) -> None:
    """Sets Spark options for every session of the tests, including those of notebooks and other processes."""
    folder = java_folder(config)
    settings = shlex.quote(str(folder / java_archive.SETTINGS))
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--properties-file {settings} pyspark-shell"
    os.environ["SPARK_LAUNCHER_OPTS"] = java_archive.SHORT_LIVED  # for the JVM that only composes a command line
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    java_archive.write_settings(folder)
    # Making the archive takes as long as it saves in a few tests. Meanwhile, pytest-xdist's workers collect tests.
    if config.getoption("numprocesses", None) and not (folder / java_archive.TRIED).exists():
        set_java()
        maker = subprocess.Popen(
            [sys.executable, java_archive.__file__, str(folder)],
            cwd=folder,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        config.add_cleanup(maker.wait)


def java_folder(config: pytest.Config) -> Path:
    """Return the folder in which the archive of Spark's classes is kept between runs of the tests."""
    folder = config.rootpath / ".pytest_cache" / "java"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def set_java() -> None:
    from sparkring.cluster.session import find_java

    home = find_java()
    if home:
        os.environ["JAVA_HOME"] = home


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python of this version with all packages that this one has, except sparkring itself."""
    folder = tmp_path_factory.mktemp("bare") / "python"
    venv.create(folder, symlinks=True, with_pip=False)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = folder / "lib" / version / "site-packages"
    # Python does not read .pth files in a folder that a .pth file names, so an editable sparkring stays unknown.
    theirs = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "everything-else.pth").write_text("\n".join(theirs) + "\n")
    return str(folder / "bin" / "python")


def _gpu_properties(folder: Path, gpus: int) -> str:
    """Write the settings file of a worker with `gpus` GPUs, and return its path."""
    script = folder / "discover.sh"
    addresses = ", ".join(f'"{index}"' for index in range(gpus))
    script.write_text(f"""#!/bin/sh\necho '{{"name": "gpu", "addresses": [{addresses}]}}'\n""")
    script.chmod(0o755)
    properties = folder / "worker.properties"
    amount, discovery = "spark.worker.resource.gpu.amount", "spark.worker.resource.gpu.discoveryScript"
    properties.write_text(f"{amount} {gpus}\n{discovery} {script}\n")
    return str(properties)


class Master(NamedTuple):
    """The master of a standalone cluster on loopback."""

    url: str
    log: Path

    def has_no_worker(self) -> bool:
        """Return whether the master knows that all of its workers have ended."""
        log = self.log.read_text()
        return log.count("Registering worker ") == log.count("Removing worker ")


class Daemons:
    """The master or the workers of a standalone cluster: Java processes that do not count as left behind by a test."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self._java_options = java_archive.java_options(java_folder(config))
        self._folder = folder

    def start(self, role: str, *arguments: str) -> Path:
        """Start a process, and return the path of its log."""
        import pyspark

        set_java()
        home = str(Path(pyspark.__file__).parent)
        environment = {**os.environ, "SPARK_HOME": home, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1"}
        environment["SPARK_DAEMON_JAVA_OPTS"] = self._java_options
        for name in ("PYTHONPATH", MARK):
            environment.pop(name, None)
        log = self._folder / f"{role}-{len(self.started)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [f"{home}/bin/spark-class", f"org.apache.spark.deploy.{role}", "--host", "127.0.0.1", *arguments],
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        lasting.processes.append(psutil.Process(process.pid))
        return log

    def stop(self) -> None:
        ours = family(psutil.Process(process.pid) for process in self.started)
        for process in reversed(self.started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.started:
            process.wait(DEADLINE_S)
        until(lambda: not [pid for pid in ours if runs(pid)], "the daemons have ended")
        lasting.processes[:] = [process for process in lasting.processes if process.is_running()]


@contextlib.contextmanager
def _master(config: pytest.Config, folder: Path) -> Iterator[Master]:
    daemons = Daemons(config, folder)
    try:
        # The master chooses a port itself, because a port that was free before may not be free now.
        log = daemons.start("master.Master", "--port", "0", "--webui-port", "0")
        until(lambda: "New state: ALIVE" in log.read_text(), "the master is up")
        match = re.search(r"Starting Spark master at (spark://\S+)", log.read_text())
        assert match is not None
        yield Master(match[1], log)
    finally:
        daemons.stop()


@contextlib.contextmanager
def _workers(
    config: pytest.Config, folder: Path, master: Master, python: str, count: int = 2, gpus: int = 0
) -> Iterator[Cluster]:
    daemons = Daemons(config, folder)
    work = ("--cores", "2", "--memory", "1g", "--webui-port", "0", "--work-dir", str(folder / "work"), master.url)
    if gpus:
        work = ("--properties-file", _gpu_properties(folder, gpus), *work)

    def add(host: str = "127.0.0.1") -> Path:
        return daemons.start("worker.Worker", "--host", host, *work)

    try:
        logs = [add() for _ in range(count)]
        until(lambda: all("Successfully registered" in log.read_text() for log in logs), "the workers are up")
        yield Cluster(master.url, python, daemons.started, add)
    finally:
        daemons.stop()
        until(master.has_no_worker, "the master knows that the workers have ended")


class SharedMaster:
    """The master for tests that start workers of their own. The first such test starts it.

    It ends as soon as the next test does not need it.
    """

    def __init__(self, config: pytest.Config, folders: pytest.TempPathFactory) -> None:
        self._config = config
        self._folders = folders
        self._open = contextlib.ExitStack()
        self._master: Master | None = None

    def get(self) -> Master:
        if self._master is None:
            self._master = self._open.enter_context(_master(self._config, self._folders.mktemp("master")))
        return self._master

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> Generator[None]:
        yield
        if nextitem is None or kind_of(nextitem) != "cluster":
            self.stop()

    def stop(self) -> None:
        self._master = None
        self._open.close()


@pytest.fixture(scope="session")
def shared_master(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedMaster]:
    found = SharedMaster(pytestconfig, tmp_path_factory)
    pytestconfig.pluginmanager.register(found)
    yield found
    found.stop()


Workers = Callable[..., contextlib.AbstractContextManager[Cluster]]


@pytest.fixture
def workers_of_its_own(
    shared_master: SharedMaster, bare_python: str, pytestconfig: pytest.Config, tmp_path: Path
) -> Workers:
    """Starts workers for one test, which may kill them."""
    return functools.partial(_workers, pytestconfig, tmp_path, shared_master.get(), bare_python)


@pytest.fixture
def lonely_master(workers_of_its_own: Workers) -> Iterator[Cluster]:
    """A standalone cluster that has no worker yet."""
    with workers_of_its_own(count=0) as found:
        yield found


@pytest.fixture
def brittle_cluster(workers_of_its_own: Workers) -> Iterator[Cluster]:
    """A standalone cluster of two workers, for a test that kills one of them."""
    with workers_of_its_own() as found:
        yield found


@pytest.fixture
def gpu_cluster(workers_of_its_own: Workers) -> Iterator[Cluster]:
    """A standalone cluster of one worker with two cores and four GPUs."""
    with workers_of_its_own(count=1, gpus=4) as found:
        yield found


class Spark:
    """The session that tests share. The first test that needs it starts it, and there is only one at a time.

    It ends as soon as the next test does not need it, because it and its cluster take CPU time even when idle.
    """

    def __init__(self, config: pytest.Config, folders: pytest.TempPathFactory) -> None:
        self._config = config
        self._folders = folders
        self._session: Any = None
        self._python: str | None = None
        self._clusters = contextlib.ExitStack()

    def session(self, watch: Watch, python: str | None) -> Any:
        """Return the session on a standalone cluster whose executors run `python`, or on local[4] if it is None."""
        if self._session is None or python != self._python:
            self._session = watch.except_for(lambda: self._start(python))
        if python:
            tracker = self._session.sparkContext._jsc.sc()  # the test before this one may have lost an executor
            until(lambda: tracker.getExecutorMemoryStatus().size() == 3, "both executors have registered")
        return self._session

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> Generator[None]:
        yield
        if nextitem is None or kind_of(nextitem) != "spark":
            self.stop()

    def _start(self, python: str | None) -> Any:
        from pyspark.java_gateway import ensure_callback_server_started
        from pyspark.sql import SparkSession

        self.stop()
        self._python = python
        cluster = None
        if python:
            # A real standalone cluster on loopback: a master and two workers with two cores each.
            folder = self._folders.mktemp("cluster")
            master = self._clusters.enter_context(_master(self._config, folder))
            cluster = self._clusters.enter_context(_workers(self._config, folder, master, python))
        set_java()
        os.environ["PYSPARK_PYTHON"] = python or sys.executable
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "FATAL",
            "spark.executor.memory": "600m",
        }
        builder = SparkSession.builder.master(cluster.url if cluster else "local[4]").appName("tests")
        for name, value in settings.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        context = session.sparkContext
        gateway = context._gateway
        assert gateway is not None
        lasting.processes.append(psutil.Process(gateway.proc.pid))
        ensure_callback_server_started(gateway)  # Spark calls Python through it, for each micro-batch of a stream
        lasting.ports |= {
            gateway.gateway_parameters.port,
            gateway._callback_server.get_listening_port(),
            context._accumulatorServer.server_address[1],
        }
        return session

    def stop(self) -> None:
        """End the session, its JVM and its cluster, so that another one can be started."""
        if self._session is not None:
            self._stop_session()
        self._clusters.close()

    def _stop_session(self) -> None:
        from pyspark import SparkContext

        warm_gang.stop("spark")  # a gang that the tests of a module share
        gateway = self._session.sparkContext._gateway
        self._session.stop()
        self._session = None
        gateway.shutdown()
        gateway.proc.stdin.close()  # the JVM ends when its stdin is closed
        gateway.proc.wait(DEADLINE_S)
        gateway.shutdown_callback_server()  # not earlier: it waits for connections that the JVM closes
        SparkContext._gateway = SparkContext._jvm = None
        lasting.ports.clear()


@pytest.fixture(scope="session")
def shared_spark(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    found = Spark(pytestconfig, tmp_path_factory)
    pytestconfig.pluginmanager.register(found)
    yield found
    found.stop()


@pytest.fixture
def spark(request: pytest.FixtureRequest, shared_spark: Spark, watch: Watch) -> Any:
    """The shared SparkSession: on local[4], or on the cluster for tests that are run on a cluster."""
    there = request.config.getoption("--standalone") or "standalone" in places(request.node)
    return shared_spark.session(watch, request.getfixturevalue("bare_python") if there else None)
