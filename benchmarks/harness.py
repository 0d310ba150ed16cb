"""Code that the benchmarks share: turns, medians, goals, and functions that run a script with sparkring or a peer."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sparkring.engine.run.api import run_spec
from sparkring.engine.run.options import Options
from sparkring.engine.run.result import RunResult
from sparkring.engine.run.spec import Cell, RunSpec
from sparkring.history.record import RunRecord
from sparkring.views import View

HERE = Path(__file__).parent
US = "sparkring"
_SPEED = re.compile(r"images/s ([\d.]+)")  # what the cells that train print

Measured = dict[str, float]  # the figures of one turn of one contestant, by name
Case = Callable[[], Measured]


# ── What is reported ──────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Effort:
    """How much to measure: the number of turns, and whether the data is small."""

    runs: int
    quick: bool


@dataclass(frozen=True)
class Series:
    """The figures of several turns."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def shown(self, unit: str) -> str:
        spread = f" ({_number(min(self.values))} to {_number(max(self.values))})" if len(self.values) > 1 else ""
        return f"{_number(self.median)} {unit}{spread}"


@dataclass(frozen=True)
class Goal:
    """A bound on our median, or on its ratio to the peer's."""

    bound: float
    at_least: bool = False
    ratio: bool = False

    def shown(self, unit: str) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:,g}" + ("×" if self.ratio else f" {unit}")

    def verdict(self, found: float) -> str:
        short = self.bound - found if self.at_least else found - self.bound
        if short <= 0:
            return "met"
        return "falls short by " + (f"{short / self.bound:.1%}" if self.bound else _number(short))


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    unit: str
    ours: Series
    peer_name: str = ""
    peer: Series | None = None
    goal: Goal | None = None

    @property
    def ratio(self) -> float | None:
        """Our median divided by the peer's, if there is a peer that worked."""
        return self.ours.median / self.peer.median if self.peer else None

    def ratio_shown(self) -> str:
        if self.ratio is None:
            return "did not work" if self.peer_name else ""
        return f"{self.ratio:.2f}×" if self.ratio >= 0.1 else f"{self.ratio:.2g}×"

    def cells(self) -> tuple[str, ...]:
        found = self.ratio if self.goal and self.goal.ratio else self.ours.median
        return (
            self.what,
            self.ours.shown(self.unit),
            self.peer_name,
            self.peer.shown(self.unit) if self.peer else "did not work" if self.peer_name else "",
            self.ratio_shown() if self.peer else "",
            self.goal.shown(self.unit) if self.goal else "",
            "" if self.goal is None else "unknown" if found is None else self.goal.verdict(found),
        )


HEADERS = ("what", US, "peer", "peer's", "ratio", "goal", "")


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table."""
    return columns([HEADERS, *(row.cells() for row in rows)])


def columns(lines: list[tuple[str, ...]]) -> str:
    """Return the lines as a Markdown table that is also aligned as plain text. The first line has the headings."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "".join("| " + " | ".join(cells) + " |\n" for cells in padded)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# ── Taking turns ──────────────────────────────────────────────────────────────


class Turns:
    """Runs the contestants in turn (A B A B …), so that a slow minute affects all of them, and keeps the figures."""

    def __init__(self, runs: int, cases: Mapping[str, Case]) -> None:
        self._found: dict[str, list[Measured]] = {name: [] for name in cases}
        lost: set[str] = set()
        for turn in range(runs):
            for name, case in cases.items():
                if name in lost:
                    continue
                say(f"turn {turn + 1} of {runs}: {name} …")
                try:
                    self._found[name].append(case())
                except Exception as error:
                    if name.startswith(US):
                        raise
                    # A peer that does not work on this machine leaves its column empty.
                    say(f"{name} did not work: {type(error).__name__}: {error}", keep=True)
                    lost.add(name)
                    self._found[name] = []

    def series(self, key: str, name: str = US) -> Series:
        """Return the figures `key` of the contestant `name`. Raise LookupError for a peer that did not work."""
        if not self._found[name]:
            raise LookupError(name)
        return Series(tuple(measured[key] for measured in self._found[name]))

    def row(
        self,
        what: str,
        unit: str,
        key: str,
        peer: str = "",
        *,
        us: str = US,
        of: Turns | None = None,
        goal: Goal | None = None,
    ) -> Row:
        """Return one line of the table; `of`: the turns that include the peer, if `self` does not."""
        turns = of or self
        theirs = turns.series(key, peer) if turns._found.get(peer) else None
        return Row(what, unit, self.series(key, us), peer, theirs, goal)


def say(text: str, *, keep: bool = False) -> None:
    """Show progress: on a terminal, in one line that changes; elsewhere, only if `keep` is true."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K    {text}" + ("\n" if keep else ""))
    elif keep:
        sys.stderr.write(f"    {text}\n")
    sys.stderr.flush()


# ── Us ────────────────────────────────────────────────────────────────────────


class FirstLine:
    """A view that shows nothing, and notes when the first line that contains `marker` arrived."""

    def __init__(self, marker: str) -> None:
        self.at: float | None = None
        self._marker = marker

    def refresh(self, record: RunRecord) -> None:
        if self.at is None and any(self._marker in line.text for line in record.recent):
            self.at = time.perf_counter()

    def close(self, record: RunRecord) -> None:
        self.refresh(record)


def cell(name: str) -> str:
    """Return the source of a script, which can be run as a cell with sparkring, or with a peer."""
    return script(name).read_text(encoding="utf-8")


def script(name: str) -> Path:
    return HERE / "cells" / f"{name}.py"


def run(
    source: str, np: int, view: View, *, framework: str = "horovod", env: Mapping[str, str] | None = None
) -> RunResult:
    """Run a cell as the magic does, including the capture of its names."""
    options = Options(np=np, env=tuple((env or {}).items()))
    return run_spec(RunSpec(Cell(source, {}), options, framework, "benchmark", source), view)


def ours(source: str, np: int, marker: str) -> Measured:
    """Run a cell with sparkring, and return the seconds to the first line with `marker`, and to the end."""
    view, begun = FirstLine(marker), time.perf_counter()
    run(source, np, view)
    ended = time.perf_counter()
    assert view.at is not None, f"no line with {marker!r} came"
    return {"first": view.at - begun, "total": ended - begun}


@functools.cache
def notebook() -> Any:
    """Return an IPython shell as in a terminal, with the extension loaded. It writes nothing to the user's history."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "sparkring")
    return shell


def run_cell(source: str, shown: TextIO | None = None) -> Any:
    """Run a cell in the notebook as the user does. Its output goes to `shown`, or is discarded."""
    with open(os.devnull, "w") as nowhere:
        stream = shown or nowhere
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            done = notebook().run_cell(source)
    done.raise_error()
    return done.result


@contextlib.contextmanager
def on_gang(np: int) -> Iterator[None]:
    """Start a warm gang and run a first cell on it. The gang ends with the context."""
    run_cell(f"%gang start -n {np}")
    try:
        run_cell(f"%%horovod -n {np}\npass")
        yield
    finally:
        run_cell(f"%gang stop {'local' if np < 0 else 'spark'}")


class Kernel:
    """A notebook's kernel, with `env` in its environment."""

    def __init__(self, **env: str) -> None:
        self._env = env

    def __enter__(self) -> Kernel:
        from jupyter_client.manager import start_new_kernel

        self._manager, self._client = start_new_kernel(
            kernel_name="python3", stderr=subprocess.DEVNULL, env={**os.environ, **self._env}
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel()

    def run(self, source: str, marker: str = "") -> Measured:
        """Run a cell as a front end does, until the kernel is idle again.

        Return the seconds to the first output with `marker`, which must not be in the source, and to the end.
        """
        seen: list[float] = []

        def look(message: dict[str, Any]) -> None:
            if marker and not seen and marker in str(message["content"]):
                seen.append(time.perf_counter())

        begun = time.perf_counter()
        reply = self._client.execute_interactive(source, store_history=False, output_hook=look)
        ended = time.perf_counter()
        content = reply["content"]
        if content["status"] != "ok":
            raise RuntimeError(f"{content['ename']}: {content['evalue']}")
        return {"first": (seen or [ended])[0] - begun, "total": ended - begun}

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the kernel. The value must consist of literals."""
        reply = self._client.execute_interactive("", user_expressions={"value": expression}, store_history=False)
        return ast.literal_eval(reply["content"]["user_expressions"]["value"]["data"]["text/plain"])


ARRAY_MB = 100


def new_array() -> Any:
    """Return a new array of ARRAY_MB, with values that no earlier array has."""
    import numpy

    return numpy.full(ARRAY_MB * 125_000, time.time())


# ── Peers ─────────────────────────────────────────────────────────────────────


def horovodrun(path: Path, *, marker: str, ranks: int = 2) -> Measured:
    """Run a script under horovodrun, and return the seconds to the first line with `marker`, and to the end."""
    begun = time.perf_counter()
    with start_horovodrun(path, ranks=ranks) as process:
        assert process.stdout is not None
        first, said = None, b""
        for line in process.stdout:
            said = (said + line)[-2000:]
            if first is None and marker.encode() in line:
                first = time.perf_counter()
    ended = time.perf_counter()
    if process.returncode or first is None:
        raise RuntimeError(f"exit code {process.returncode}: …{said.decode(errors='replace')}")
    return {"first": first - begun, "total": ended - begun}


def start_horovodrun(path: Path, *, ranks: int = 2, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a script under horovodrun. Its output is unbuffered, as in a terminal."""
    launcher = Path(sys.executable).with_name("horovodrun")
    return subprocess.Popen(
        [launcher, "-np", str(ranks), "--gloo", sys.executable, path],
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def said_by_horovodrun(path: Path, *, ranks: int = 2, env: Mapping[str, str] | None = None) -> str:
    """Run a script under horovodrun to its end, and return its output."""
    with start_horovodrun(path, ranks=ranks, env=env) as process:
        assert process.stdout is not None
        return process.stdout.read().decode(errors="replace")


def speed_in(said: str) -> Measured:
    """Return the speed that a training has printed. Raise RuntimeError if its output has none."""
    found = _SPEED.search(said)
    if found is None:
        raise RuntimeError(f"the output has no speed: …{said[-2000:]}")
    return {"speed": float(found[1])}


class Ear:
    """A stream that notes when `marker` first arrived, for peers that print to the driver's stdout."""

    def __init__(self, marker: str) -> None:
        self.at: float | None = None
        self._marker = marker
        self._lock = threading.Lock()
        self._rest = ""

    def write(self, text: str | bytes) -> int:
        now = time.perf_counter()
        with self._lock:  # peers write from several threads, and may write a line in pieces
            self._rest = (self._rest + (text if isinstance(text, str) else text.decode()))[-1000:]
            if self.at is None and self._marker in self._rest:
                self.at = now
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


# ── Spark ─────────────────────────────────────────────────────────────────────


@functools.cache
def spark_session() -> Any:
    """Return the warm session for everything that runs on Spark: local[4], on loopback, without the UI."""
    from pyspark.sql import SparkSession

    from sparkring.cluster.session import find_java

    say("starting Spark …")
    java = find_java()
    if java:
        os.environ["JAVA_HOME"] = java
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = (
        SparkSession.builder.master("local[4]")
        .appName("benchmarks")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
    )
    with _silent_children():  # Java would print pages about ranks that are killed on purpose
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    for _ in range(3):
        session.sparkContext.parallelize(range(4), 4).barrier().mapPartitions(lambda rows: rows).collect()
    return session


@contextlib.contextmanager
def _silent_children() -> Iterator[None]:
    """Discard the output of processes that are started in this context."""
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        for fd, copy in enumerate(kept, start=1):
            os.dup2(copy, fd)
            os.close(copy)
        os.close(nowhere)
