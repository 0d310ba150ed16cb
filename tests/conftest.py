"""What every test gets: a check that it leaves nothing behind, rings of ranks on each launcher, and Spark."""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.util
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
import venv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import sparkring
from sparkring.engine import background, warm_gang
from sparkring.engine.background import BackgroundRun
from sparkring.engine.options import GangOptions, Options
from sparkring.engine.result import RunResult
from sparkring.engine.runner import run_cell, start_cell
from sparkring.history.record import RunRecord

MARK = "SPARKRING_TEST"  # in the environment of all that a test starts, and so in /proc
SOURCE_ROOT = str(Path(sparkring.__file__).parents[1])
sys.path.append(str(Path(__file__).parent))  # fake_launcher.py, for those that import it
SETTLE_S = 1.0  # what is still there then stays
DEADLINE_S = 60.0  # a wait that takes this long has failed; nothing is ever expected to be that slow


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--standalone", action="store_true", help="run the behaviour suite on a real Spark standalone cluster"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    # A temp folder of our own: what other programs leave in the machine's is not our tests' doing.
    folder = tempfile.mkdtemp(prefix="tests-of-")
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under --standalone only what that cluster can make a difference to is run."""
    if config.getoption("--standalone"):
        gone = [item for item in items if not {"ring", "spark"} & set(getattr(item, "fixturenames", ()))]
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until `condition()` holds and return what it gave; fails, naming `what`, at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {deadline_s:.0f} s in vain: {what}"
        time.sleep(0.02)
    return found


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    """`wait_until(condition, what)`: see until()."""
    return until


@pytest.fixture
def notebook_cell(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`notebook_cell(source, **values)`: the namespace in which a cell has run as under ipykernel.

    Its lines are in linecache, and in no file.
    """

    def run(source: str, filename: str = "/tmp/ipykernel_1/2.py", **values: Any) -> dict[str, Any]:
        source = textwrap.dedent(source)
        lines = source.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, filename, (len(source), None, lines, filename))
        namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins, **values}
        exec(compile(source, filename, "exec", dont_inherit=True), namespace)
        return namespace

    return run


# ── Nothing is left behind ────────────────────────────────────────────────────────────────────────────────────────────


class Traces(NamedTuple):
    """What this process and its family hold at one moment."""

    children: set[int]
    threads: set[int]
    listening: set[int]
    descriptors: Counter[str]
    folders: set[str]

    def beside(self, other: Traces) -> Traces:
        """What is here and was not there."""
        return Traces(
            self.children - other.children,
            self.threads - other.threads,
            self.listening - other.listening,
            self.descriptors - other.descriptors,
            self.folders - other.folders,
        )

    def and_also(self, other: Traces) -> Traces:
        return Traces(
            self.children | other.children,
            self.threads | other.threads,
            self.listening | other.listening,
            self.descriptors + other.descriptors,
            self.folders | other.folders,
        )


def family(processes: Iterable[psutil.Process]) -> set[int]:
    """The processes and all below them that are alive."""
    found: set[int] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {process.pid, *(below.pid for below in process.children(recursive=True))}
    return found


class Lasting:
    """What outlives a test on purpose: Spark's JVM and all below it, and the cluster."""

    def __init__(self) -> None:
        self.processes: list[psutil.Process] = []
        # Where the session and the JVM talk: py4j keeps a connection per thread, the accumulators' server one.
        self.ports: set[int] = set()
        self.sockets: set[str] = set()  # those that have led there; one that the JVM has closed leads nowhere

    def pids(self) -> set[int]:
        return family(self.processes)


lasting = Lasting()


@pytest.fixture(scope="session")
def lasting_processes() -> list[psutil.Process]:
    """For fixtures of a session or a module: what they put here, and all below it, is not left behind by a test."""
    return lasting.processes


def traces() -> Traces:
    """Everything that a test could leave behind, as it is now."""
    me = psutil.Process()
    spark = lasting.pids()
    children = {
        child.pid
        for child in me.children(recursive=True)
        if child.pid not in spark and _status(child) != psutil.STATUS_ZOMBIE
    }
    zombies = {child.pid for child in me.children() if _status(child) == psutil.STATUS_ZOMBIE}
    connections = me.net_connections("inet")
    to_spark = {c.fd for c in connections if c.raddr and {c.raddr.port, c.laddr.port} & lasting.ports}
    descriptors: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            target = os.readlink(f"/proc/self/fd/{name}")
            if int(name) in to_spark:
                lasting.sockets.add(target)
            # A socket is told by its number, since where it leads to changes when the other end closes it.
            # matplotlib leaves the fonts open that it has drawn with, and TensorFlow its process's command line.
            if target not in lasting.sockets and not re.search(r"/mpl-data/fonts/|^/proc/\d+/cmdline$", target):
                descriptors[re.sub(r"\d+", "N", target) if target.startswith("pipe:") else target] += 1
    return Traces(
        children | zombies,
        {thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith("sparkring-")},
        {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN},
        descriptors,
        {str(path) for path in Path(tempfile.gettempdir()).glob("sparkring-*")},
    )


def _where_it_leads(descriptor: str) -> str:
    """A descriptor as a reader of a failed test wants to see it."""
    for connection in psutil.Process().net_connections("inet"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{connection.fd}") == descriptor:
                return f"{descriptor}: {connection.status} to {connection.raddr.port if connection.raddr else '?'}"
    return descriptor


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def marked(mark: str) -> list[int]:
    """Processes, anywhere, that inherited `mark`: a rank's grandchild that called setsid is among them."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def told(pids: set[int] | list[int]) -> list[str]:
    """Processes as a reader of a failed test wants to see them."""
    lines = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            lines.append(f"{pid} ({process.status()}, parent {process.ppid()}): {' '.join(process.cmdline())[:120]}")
    return lines


@dataclass
class Watch:
    """The state that the test must leave as it found it."""

    mark: str
    before: Traces = field(default_factory=traces)

    def except_for(self, start: Callable[[], Any]) -> Any:
        """Run `start`, whose traces are meant to last (Spark)."""
        mark = os.environ.pop(MARK, None)
        earlier = traces()
        try:
            return start()
        finally:
            self.before = self.before.and_also(traces().beside(earlier))
            if mark is not None:
                os.environ[MARK] = mark


@pytest.fixture(autouse=True)
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Fails a test that leaves a process, thread, listening socket, descriptor or temp folder behind."""
    monkeypatch.setenv("SPARKRING_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    found = Watch(os.environ[MARK])
    yield found
    background.stop_all()
    deadline = time.monotonic() + SETTLE_S
    while any(left := traces().beside(found.before)) and time.monotonic() < deadline:
        gc.collect()  # what only waits for it is not left behind, nor is what is just being opened or closed
        time.sleep(0.05)
    marks = set(marked(found.mark)) - lasting.pids()
    complaints = {
        "processes": told(left.children | marks),
        "threads": [thread.name for thread in threading.enumerate() if thread.ident in left.threads],
        "listening sockets": sorted(left.listening),
        "descriptors": sorted(map(_where_it_leads, left.descriptors.elements())),
        "temp folders": sorted(left.folders),
    }
    for pid in marks:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not any(complaints.values()), f"left behind: { {k: v for k, v in complaints.items() if v} }"


# ── Spark ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Cluster(NamedTuple):
    """A standalone cluster, the Python that its executors run, and its workers' processes; `add()` starts one more."""

    url: str
    python: str
    workers: list[subprocess.Popen[bytes]]
    add: Callable[[], None]


def _java() -> None:
    from sparkring.cluster.session import find_java

    home = find_java()
    if home:
        os.environ["JAVA_HOME"] = home


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python of this version with everything that this one has, but for sparkring itself."""
    folder = tmp_path_factory.mktemp("bare") / "python"
    venv.create(folder, symlinks=True, with_pip=False)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = folder / "lib" / version / "site-packages"
    # A folder named in a .pth file does not have its own .pth files read: an editable sparkring stays unknown.
    theirs = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "everything-else.pth").write_text("\n".join(theirs) + "\n")
    return str(folder / "bin" / "python")


def _gpu_properties(folder: Path, gpus: int) -> str:
    """The settings of a worker that has so many GPUs."""
    script = folder / "discover.sh"
    addresses = ", ".join(f'"{index}"' for index in range(gpus))
    script.write_text(f"""#!/bin/sh\necho '{{"name": "gpu", "addresses": [{addresses}]}}'\n""")
    script.chmod(0o755)
    properties = folder / "worker.properties"
    amount, discovery = "spark.worker.resource.gpu.amount", "spark.worker.resource.gpu.discoveryScript"
    properties.write_text(f"{amount} {gpus}\n{discovery} {script}\n")
    return str(properties)


@contextlib.contextmanager
def _standalone(folder: Path, python: str, workers: int = 2, gpus: int = 0) -> Iterator[Cluster]:
    import pyspark

    _java()
    home = str(Path(pyspark.__file__).parent)
    environment = {**os.environ, "SPARK_HOME": home, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1"}
    for name in ("PYTHONPATH", MARK):
        environment.pop(name, None)
    url = f"spark://127.0.0.1:{_free_port()}"
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        log = folder / f"{name}.log"
        role = "master.Master" if name == "master" else "worker.Worker"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [f"{home}/bin/spark-class", f"org.apache.spark.deploy.{role}", "--host", "127.0.0.1", *arguments],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        lasting.processes.append(psutil.Process(process.pid))
        return log

    try:
        log = start("master", "--port", url.rpartition(":")[2], "--webui-port", "0")
        until(lambda: "New state: ALIVE" in log.read_text(), "the master is up")
        work = ("--cores", "2", "--memory", "1g", "--webui-port", "0", "--work-dir", str(folder / "work"), url)
        if gpus:
            work = ("--properties-file", _gpu_properties(folder, gpus), *work)
        logs: list[Path] = []

        def add() -> None:
            logs.append(start(f"worker-{len(logs)}", *work))
            found.workers.append(started[-1])

        found = Cluster(url, python, [], add)
        for _ in range(workers):
            add()
        until(lambda: all("Successfully registered" in log.read_text() for log in logs), "the workers are up")
        yield found
    finally:
        ours = family(psutil.Process(process.pid) for process in started)
        for process in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            process.wait(DEADLINE_S)
        until(lambda: not told([pid for pid in ours if psutil.pid_exists(pid)]), "the cluster has ended")


@pytest.fixture(scope="session")
def cluster(bare_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real standalone cluster on loopback: a master and two workers with two cores each."""
    with _standalone(tmp_path_factory.mktemp("cluster"), bare_python) as found:
        yield found


@pytest.fixture
def lonely_master(bare_python: str, tmp_path: Path) -> Iterator[Cluster]:
    """A standalone cluster to which no worker has come yet."""
    with _standalone(tmp_path, bare_python, workers=0) as found:
        yield found


@pytest.fixture
def brittle_cluster(bare_python: str, tmp_path: Path) -> Iterator[Cluster]:
    """A standalone cluster of two workers, for a test that kills one."""
    with _standalone(tmp_path, bare_python) as found:
        yield found


@pytest.fixture
def gpu_cluster(bare_python: str, tmp_path: Path) -> Iterator[Cluster]:
    """A standalone cluster of one worker with two cores and four GPUs."""
    with _standalone(tmp_path, bare_python, workers=1, gpus=4) as found:
        yield found


class Spark:
    """The session that the tests share, made when the first of them asks for it."""

    def __init__(self) -> None:
        self._session: Any = None

    def session(self, watch: Watch, cluster: Cluster | None) -> Any:
        if self._session is None:
            self._session = watch.except_for(lambda: self._start(cluster))
        return self._session

    def _start(self, cluster: Cluster | None) -> Any:
        from pyspark.sql import SparkSession

        _java()
        os.environ["PYSPARK_PYTHON"] = cluster.python if cluster else sys.executable
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
        lasting.ports |= {gateway.gateway_parameters.port, context._accumulatorServer.server_address[1]}
        if cluster:
            tracker = context._jsc.sc()
            until(lambda: tracker.getExecutorMemoryStatus().size() == 3, "both executors have registered")
        return session

    def stop(self) -> None:
        if self._session is None:
            return
        gateway = self._session.sparkContext._gateway
        self._session.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # the JVM ends with it
        gateway.proc.wait(DEADLINE_S)


@pytest.fixture(scope="session")
def shared_spark(request: pytest.FixtureRequest) -> Iterator[Spark]:
    if request.config.getoption("--standalone"):
        request.getfixturevalue("cluster")  # before the session, so that it ends after it
    found = Spark()
    yield found
    found.stop()


@pytest.fixture
def spark(request: pytest.FixtureRequest, shared_spark: Spark, watch: Watch) -> Any:
    """The shared SparkSession: local[4], or the standalone cluster's."""
    standalone = request.config.getoption("--standalone")
    return shared_spark.session(watch, request.getfixturevalue("cluster") if standalone else None)


# ── Rings ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Recording:
    """A view that keeps what it was shown."""

    def __init__(self) -> None:
        self.record = RunRecord()
        self.closed = 0
        self.on_refresh: Callable[[RunRecord], None] = lambda record: None

    def refresh(self, record: RunRecord) -> None:
        self.record = record
        self.on_refresh(record)

    def close(self, record: RunRecord) -> None:
        self.record = record
        self.closed += 1


class Ring:
    """Runs cells on one launcher."""

    def __init__(self, where: str, mark: str) -> None:
        self.where = where
        self.view = Recording()
        self._mark = mark

    def np(self, n: int) -> int:
        """`n` ranks, as this launcher's -n has it."""
        return -n if self.where == "local" else n

    def run(
        self,
        source: str,
        n: int = 2,
        *,
        namespace: dict[str, Any] | None = None,
        framework: str = "plain",
        view: Any = None,
        **options: Any,
    ) -> RunResult:
        """Run a cell; its first line is line 2, as in a notebook. `self.view` has seen it, unless `view` did."""
        code = self._prepared(source)
        options["env"] = (*options.get("env", ()), (MARK, self._mark))
        return run_cell(
            code,
            {} if namespace is None else namespace,
            Options(np=self.np(n), **options),
            framework=framework,
            title="test",
            code=f"%%{framework} -n {self.np(n)}{code}",
            view=view or self.view,
        )

    def in_background(
        self,
        source: str,
        n: int = 2,
        *,
        namespace: dict[str, Any] | None = None,
        framework: str = "plain",
        **options: Any,
    ) -> BackgroundRun:
        """Start a cell without waiting for it; it is stopped, at the latest, when the test ends."""
        code = self._prepared(source)
        options["env"] = (*options.get("env", ()), (MARK, self._mark))
        return start_cell(
            code,
            {} if namespace is None else namespace,
            Options(np=self.np(n), background=True, **options),
            framework=framework,
            title="test",
            code=f"%%{framework} -n {self.np(n)}{code}",
            view=self.view,
        )

    def _prepared(self, source: str) -> str:
        """The cell as IPython would have it; `self.view` is a new one for it."""
        on_refresh = self.view.on_refresh
        self.view = Recording()
        self.view.on_refresh = on_refresh
        return "\n" + textwrap.dedent(source).strip("\n")


class WarmRing(Ring):
    """Runs cells on a warm gang at one place, one after another, as a notebook does.

    `notebook` holds the notebook's variables, `told` what the notebook was told between cells.
    """

    def __init__(self, where: str, mark: str) -> None:
        super().__init__(where, mark)
        self.notebook: dict[str, Any] = {"__name__": "__main__"}
        self.told: list[str] = []

    def start(self, n: int = 3, *, framework: str = "plain", idle_s: float = 3600.0, mark: bool = True) -> WarmRing:
        """Start the gang, which must not be there yet."""
        env = ((MARK, self._mark),) if mark else ()
        warm_gang.start(GangOptions(self.np(n), framework, idle_s, env), self.told.append, self.told.append)
        return self

    @property
    def gang(self) -> warm_gang.WarmGang:
        """The gang that is, or was last, at this place."""
        return next(gang for gang in warm_gang.every() if gang.where == self.place)

    @property
    def place(self) -> str:
        return "local" if self.where == "local" else "spark"

    def pids(self) -> list[int]:
        """The ranks' processes."""
        return [self.gang.gang.place_of(rank)[2] for rank in range(self.gang.gang.size)]

    def define(self, source: str) -> None:
        """Run code in the notebook."""
        exec(textwrap.dedent(source), self.notebook)

    def cell(self, source: str, *ranks: int, framework: str = "plain", **options: Any) -> RunResult:
        """Run a cell on the gang, on `ranks` if some are named; what it pulls is in `notebook` then."""
        gang = warm_gang.find(self.gang.wanted.np, self.told.append)
        assert gang is not None
        code = self._prepared(source)
        return run_cell(
            code,
            self.notebook,
            Options(np=gang.wanted.np, **options),
            framework=framework,
            title="test",
            code=f"%%{framework}{code}",
            view=self.view,
            warm=gang,
            ranks=ranks,
        )

    def values(self, source: str, *ranks: int, **options: Any) -> list[Any]:
        """What the cell's last expression is on each rank that takes part."""
        return self.cell(source, *ranks, **options).values


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ring" in metafunc.fixturenames:
        standalone = metafunc.config.getoption("--standalone")
        metafunc.parametrize("ring", ["standalone"] if standalone else ["local", "spark"], indirect=True)


@pytest.fixture
def ring(request: pytest.FixtureRequest, watch: Watch) -> Ring:
    """A ring on one launcher; a test that takes it runs once on each."""
    if request.param != "local":
        request.getfixturevalue("spark")
    return Ring(request.param, watch.mark)


@pytest.fixture
def local(watch: Watch) -> Ring:
    """A ring of processes on this machine, for tests that the launcher makes no difference to."""
    return Ring("local", watch.mark)


@pytest.fixture
def tasks(spark: Any, watch: Watch) -> Ring:
    """A ring of Spark tasks, for tests of what only that launcher does."""
    return Ring("spark", watch.mark)


@pytest.fixture(scope="module")
def lasting_gangs() -> Iterator[None]:
    """Gangs that the tests of a module share end with it."""
    yield
    warm_gang.stop()


@pytest.fixture
def shared_gang(ring: Ring, watch: Watch, lasting_gangs: None) -> WarmRing:
    """Three warm ranks on one launcher, for tests that leave them alive; the notebook is a new one."""
    found = WarmRing(ring.where, watch.mark)
    if not any(gang.where == found.place and not gang.ended for gang in warm_gang.every()):
        # Horovod's meeting point lasts as long as the gang.
        watch.except_for(lambda: found.start(mark=False).cell("rank", framework="horovod"))
    return found


@pytest.fixture
def new_gang(ring: Ring, watch: Watch) -> Iterator[WarmRing]:
    """For a test that starts a gang of its own, and may lose it."""
    found = WarmRing(ring.where, watch.mark)
    warm_gang.stop(found.place)
    yield found
    warm_gang.stop(found.place)


@pytest.fixture
def local_gang(watch: Watch) -> Iterator[WarmRing]:
    """The same of processes on this machine, where the launcher makes no difference."""
    warm_gang.stop("local")
    yield WarmRing("local", watch.mark)
    warm_gang.stop("local")


@pytest.fixture
def spark_gang(spark: Any, watch: Watch) -> Iterator[WarmRing]:
    """The same of Spark tasks, for what only they do."""
    warm_gang.stop("spark")
    yield WarmRing("spark", watch.mark)
    warm_gang.stop("spark")


# ── Drivers of their own ──────────────────────────────────────────────────────────────────────────────────────────────

_PRELUDE = """
import os, signal, sys, textwrap, time
from sparkring.engine.options import Options
from sparkring.engine.runner import run_cell

class View:
    said = 0
    def refresh(self, record):
        for line in record.recent[len(record.recent) - (record.recent_count - self.said):]:
            print(f"[{line.rank}]", line.text, flush=True)
        self.said = record.recent_count
        self.record = record
    close = refresh

view = View()

def run(source, np, namespace=None, **options):
    global view
    view = View()
    code = chr(10) + textwrap.dedent(source).strip()
    return run_cell(code, namespace or {}, Options(np=np, **options),
                    framework="plain", title="test", code="%%plain" + code, view=view)

def spark(master, **settings):
    from pyspark.sql import SparkSession
    builder = SparkSession.builder.master(master)
    settings = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false", "spark.log.level": "FATAL", **settings}
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
"""


class Driver:
    """A Python process of its own that runs cells: something that can be interrupted, or killed."""

    def __init__(self, script: str, folder: Path) -> None:
        _java()
        path = folder / "driver.py"
        path.write_text(_PRELUDE + textwrap.dedent(script))
        self.log = folder / "driver.log"
        environment = {**os.environ, "PYTHONPATH": SOURCE_ROOT, "PYSPARK_PYTHON": sys.executable}
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(path)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until_said(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the driver's output that `pattern` matches."""

        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.text, re.MULTILINE)
            assert found or self.process.poll() is None, f"the driver ended without {pattern!r}:\n{self.text}"
            return found

        match: re.Match[str] = until(look, pattern)
        return match

    def wait(self) -> str:
        """Wait for its end; returns what it printed."""
        self.process.wait(3 * DEADLINE_S)
        return self.text

    def family(self) -> list[str]:
        """What it has started, directly or not, and still runs."""
        return told(set(marked(os.environ[MARK])) - {self.process.pid})


@pytest.fixture
def driver(tmp_path: Path, watch: Watch) -> Iterator[Callable[[str], Driver]]:
    """Starts a script in a process of its own, where `run(source, np, **options)` runs a cell."""
    started: list[Driver] = []

    def start(script: str) -> Driver:
        folder = tmp_path / f"driver-{len(started)}"
        folder.mkdir()
        started.append(Driver(script, folder))
        return started[-1]

    yield start
    for found in started:
        if found.process.poll() is None:
            found.process.kill()
        found.process.wait()
        until(lambda found=found: not found.family(), "Spark's JVM ends a moment after its driver")


# ── Notebooks ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def run_demo() -> Any:
    """notebooks/run_demo.py, which is what `make demo` runs; it can execute any of the notebooks."""
    path = Path(__file__).parents[1] / "notebooks" / "run_demo.py"
    spec = importlib.util.spec_from_file_location("run_demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
