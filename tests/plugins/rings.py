"""Rings of ranks on each launcher, and warm gangs."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from extended import marks_on
from kinds import pair_at
from leaks import MARK, Watch
from spares import forked
from waiting import PACE

from sparkring.engine.run import polling, restarts, supervisor, warm_gang
from sparkring.engine.run.api import run_spec, start_spec
from sparkring.engine.run.background import BackgroundRun
from sparkring.engine.run.options import GangOptions, Options
from sparkring.engine.run.result import RunResult
from sparkring.engine.run.spec import Cell, RunSpec
from sparkring.history.record import RunRecord

LIMIT_S = 300.0 * PACE  # ranks that wait for one another forever then fail the test; the error says where each one is
QUIET = (("TF_CPP_MIN_LOG_LEVEL", "2"),)  # hides what TensorFlow's C++ code prints about the processor


class Recording:
    """A view that keeps the record that it was shown."""

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
        """Return the -n with which this launcher starts `n` ranks."""
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
        """Run a cell. Its first line is line 2, as in a notebook. `self.view` shows it, unless `view` is given."""
        return run_spec(self._spec(source, n, namespace, framework, options), view or self.view)

    def in_background(
        self,
        source: str,
        n: int = 2,
        *,
        namespace: dict[str, Any] | None = None,
        framework: str = "plain",
        **options: Any,
    ) -> BackgroundRun:
        """Start a cell without waiting for it. It is stopped when the test ends, if not before."""
        spec = self._spec(source, n, namespace, framework, {**options, "background": True})
        return start_spec(spec, self.view)

    def _spec(
        self, source: str, n: int, namespace: dict[str, Any] | None, framework: str, options: dict[str, Any]
    ) -> RunSpec:
        code = self._prepared(source)
        options["env"] = (*options.get("env", ()), (MARK, self._mark))
        return RunSpec(
            Cell(code, {} if namespace is None else namespace),
            Options(np=self.np(n), **{"timeout_s": LIMIT_S, **options}),
            framework,
            "test",
            f"%%{framework} -n {self.np(n)}{code}",
        )

    def _prepared(self, source: str) -> str:
        """Return the cell as IPython transforms it, and make a new view for it."""
        on_refresh = self.view.on_refresh
        self.view = Recording()
        self.view.on_refresh = on_refresh
        return "\n" + textwrap.dedent(source).strip("\n")


class WarmRing(Ring):
    """Runs cells on one launcher's warm gang, one after another, as a notebook does.

    `notebook` holds the notebook's variables, and `told` the messages that the notebook got between cells.
    """

    def __init__(self, where: str, mark: str) -> None:
        super().__init__(where, mark)
        self.notebook: dict[str, Any] = {"__name__": "__main__"}
        self.told: list[str] = []

    def start(
        self,
        n: int = 3,
        *,
        framework: str = "plain",
        idle_s: float = 3600.0,
        mark: bool = True,
        env: tuple[tuple[str, str], ...] = (),
    ) -> WarmRing:
        """Start the gang, which must not exist yet."""
        env = ((MARK, self._mark), *env) if mark else env
        warm_gang.start(GangOptions(self.np(n), framework, idle_s, env), self.told.append, self.told.append)
        return self

    @property
    def gang(self) -> warm_gang.WarmGang:
        """The launcher's current gang, or else its last one."""
        return next(gang for gang in warm_gang.every() if gang.where == self.place)

    @property
    def place(self) -> str:
        return "local" if self.where == "local" else "spark"

    def pids(self) -> list[int]:
        """Return the process ids of the ranks."""
        return [self.gang.gang.place_of(rank)[2] for rank in range(self.gang.gang.size)]

    def define(self, source: str) -> None:
        """Run code in the notebook."""
        exec(textwrap.dedent(source), self.notebook)

    def cell(self, source: str, *ranks: int, framework: str = "plain", **options: Any) -> RunResult:
        """Run a cell on the gang, or on some `ranks`. Afterwards, `notebook` has the values of names that it pulls."""
        gang = warm_gang.find(self.gang.wanted.np, self.told.append)
        assert gang is not None
        code = self._prepared(source)
        settings = Options(np=gang.wanted.np, **{"timeout_s": LIMIT_S, **options})
        spec = RunSpec(Cell(code, self.notebook), settings, framework, "test", f"%%{framework}{code}", gang, ranks)
        return run_spec(spec, self.view)

    def run(self, source: str, n: int = 2, **options: Any) -> RunResult:
        """Run a cell on the gang, which has `n` ranks, with a notebook of its own."""
        assert n == self.gang.gang.size
        namespace = options.pop("namespace", None)
        self.notebook = {"__name__": "__main__"} if namespace is None else namespace
        return self.cell(source, **options)

    def values(self, source: str, *ranks: int, **options: Any) -> list[Any]:
        """Return the value of the cell's last expression on each rank that takes part."""
        return self.cell(source, *ranks, **options).values


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of rings locally and on Spark: on a cluster if one makes a difference, otherwise in local mode."""
    marked = metafunc.definition.get_closest_marker("standalone") is not None
    if metafunc.config.getoption("--standalone"):
        places = ["standalone"]
    elif metafunc.definition.get_closest_marker("any_launcher"):
        places = ["local"]
    else:
        places = [
            pytest.param(place, marks=marks_on("spark" if place != "local" else place, metafunc.definition))
            for place in ("local", "standalone" if marked else "spark")
        ]
    if "ring" in metafunc.fixturenames:
        metafunc.parametrize("ring", places, indirect=True)
    elif marked:
        metafunc.parametrize("spark", places[-1:], indirect=True)


@pytest.fixture
def ring(request: pytest.FixtureRequest, watch: Watch) -> Ring:
    """A ring on one launcher. A test that uses this fixture runs once on each launcher."""
    if request.param != "local":
        request.getfixturevalue("spark")
    return shared(request.param, watch, 2) if pair_at(request.node) else Ring(request.param, watch.mark)


@pytest.fixture
def local(watch: Watch) -> Ring:
    """A ring of processes on this machine, for tests in which the launcher makes no difference."""
    return Ring("local", watch.mark)


@pytest.fixture
def tasks(spark: Any, watch: Watch) -> Ring:
    """A ring of Spark tasks, for tests that concern only this launcher."""
    return Ring("spark", watch.mark)


_READY = """
import sys, threading, time, traceback

def tell(thread, frame, line):
    while (frame, line) in traceback.walk_stack(sys._current_frames()[thread]):
        time.sleep(0.05)
    time.sleep(0.5)
    print("ready")

frame = sys._getframe(1)
threading.Thread(target=tell, args=(threading.get_ident(), frame, frame.f_lineno), daemon=True).start()
"""
READY = f"exec({_READY!r}, {{}})"  # prints "ready" half a second after the rank has gone on to the next line


def ready(n: int) -> Callable[[RunRecord], bool]:
    """Return a condition that holds once `n` ranks have printed "ready"."""
    return lambda record: sum(line.text == "ready" for line in record.recent) >= n


class Clock:
    """A stand-in for the module `time`, whose clock is `ahead_s` seconds ahead."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which runs measure their time limits."""
    clock = Clock()
    for module in (polling, restarts, supervisor, warm_gang):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def limit(clock: Clock) -> Callable[[Ring, Callable[[RunRecord], bool]], float]:
    """`timeout_s=limit(ring, condition)` sets a time limit that is reached only when `condition(record)` holds.

    So the ranks are where the test wants them, however slow the machine is.
    """
    long_s = 3600.0

    def passes_when(ring: Ring, condition: Callable[[RunRecord], bool]) -> float:
        def look(record: RunRecord) -> None:
            if not clock.ahead_s and condition(record):
                clock.ahead_s = long_s

        ring.view.on_refresh = look
        return long_s

    return passes_when


@pytest.fixture(scope="module")
def lasting_gangs() -> Iterator[None]:
    """End the gangs that the tests of a module share when the last of these tests has ended."""
    yield
    warm_gang.stop()


@pytest.fixture
def shared_gang(ring: Ring, watch: Watch, lasting_gangs: None) -> WarmRing:
    """Three warm ranks on one launcher, for tests that leave them alive. Each test has a new notebook."""
    return shared(ring.where, watch)


@pytest.fixture
def shared_local_gang(watch: Watch, lasting_gangs: None) -> WarmRing:
    """Like shared_gang, but on this machine. The ranks have imported TensorFlow."""
    return shared("local", watch, imports=("tensorflow",))


def shared(where: str, watch: Watch, n: int = 3, framework: str = "plain", imports: tuple[str, ...] = ()) -> WarmRing:
    """Return a launcher's warm ranks, which all tests share. Start new ones if there are none.

    New ranks on this machine have already imported `imports`.
    """
    found = WarmRing(where, watch.mark)
    if not any(gang.where == found.place and not gang.ended for gang in warm_gang.every()):

        def start() -> None:
            with forked(n, *imports) if imports and where == "local" else contextlib.nullcontext():
                found.start(n, framework=framework, mark=False, env=QUIET)
            found.cell("rank", framework="horovod")  # Horovod's rendezvous lasts as long as the gang

        watch.except_for(start)
    return found


@pytest.fixture
def pair(watch: Watch) -> WarmRing:
    """Two warm ranks on this machine, which all tests of frameworks in a cell share, whatever their file.

    A test that takes `ring` and is marked `pair` uses two such ranks on each launcher. Sharing saves time: the imports
    need 4 s of processor time for TensorFlow, 2 s for PyTorch, and another second for PyTorch's first optimizer.
    """
    return shared("local", watch, 2)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the pair after the last test that uses it. The tests that use it run one after another."""
    if pair_at(item) and (nextitem is None or pair_at(nextitem) != pair_at(item)):
        warm_gang.stop()


@pytest.fixture
def new_gang(ring: Ring, watch: Watch) -> Iterator[WarmRing]:
    """For a test that starts a gang of its own, and may lose it."""
    found = WarmRing(ring.where, watch.mark)
    warm_gang.stop(found.place)
    yield found
    warm_gang.stop(found.place)


@pytest.fixture
def local_gang(watch: Watch) -> Iterator[WarmRing]:
    """Like new_gang, but on this machine, for tests in which the launcher makes no difference."""
    warm_gang.stop("local")
    yield WarmRing("local", watch.mark)
    warm_gang.stop("local")


@pytest.fixture
def spark_gang(spark: Any, watch: Watch) -> Iterator[WarmRing]:
    """Like new_gang, but on Spark, for tests that concern only Spark's tasks."""
    warm_gang.stop("spark")
    yield WarmRing("spark", watch.mark)
    warm_gang.stop("spark")
