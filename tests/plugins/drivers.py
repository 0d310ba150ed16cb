"""Separate processes that run cells, and that a test can interrupt or kill."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import set_java
from leaks import MARK, Watch, marked, runs, told
from waiting import DEADLINE_S, until

import sparkring

SOURCE_ROOT = str(Path(sparkring.__file__).parents[1])

_PRELUDE = """
import os, signal, sys, textwrap, time
from sparkring.engine.run.options import Options
from sparkring.engine.run.api import run_spec, start_spec
from sparkring.engine.run.spec import Cell, RunSpec

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
    work = Cell(code, {} if namespace is None else namespace)
    return run_spec(RunSpec(work, Options(np=np, **options), "plain", "test", "%%plain" + code), view)

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
    """A separate Python process that runs cells, and that a test can interrupt or kill."""

    def __init__(self, script: str, folder: Path) -> None:
        set_java()
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
        """Wait for the driver to end, and return what it printed."""
        self.process.wait(3 * DEADLINE_S)
        return self.text

    def family(self) -> list[str]:
        """Return the running processes that the driver has started, directly or not."""
        return told({pid for pid in marked(os.environ[MARK]) if pid != self.process.pid and runs(pid)})


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
