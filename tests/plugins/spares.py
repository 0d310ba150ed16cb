"""Spare processes, which are off except in their own tests and in tests that often launch a framework's ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from leaks import Watch
from waiting import until

from sparkring.executor.orders import Ticket
from sparkring.launchers import local, spare
from sparkring.launchers.spare import ForkedMember, Setting, SpareProcess, Spares, Wanted, setting_of
from sparkring.runtime import storage
from sparkring.worker.member import process


@pytest.fixture
def spares(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spares]:
    """This machine's spare processes are on, and start as soon as no launch is under way."""
    monkeypatch.setenv("SPARKRING_SPARE", "1")
    monkeypatch.setattr(spare, "REST_S", 0.0)
    yield spare.spares
    spare.spares.stop()
    until(lambda: not spare.spares.leaving(), "the spare process ends with its last member")


def new(spares: Spares, size: int, *modules: str, **environment: str) -> SpareProcess:
    """Return the spare process that follows a launch of `size` ranks that have imported `modules`."""
    spares.note_imports(setting_of({**os.environ, **storage.root_for_ranks(), **environment}, size), modules)
    found: SpareProcess = until(lambda: spares.spare, "a spare process")
    return found


def ready(spares: Spares) -> SpareProcess:
    """Return the spare process that follows a launch, once it has imported its modules."""
    until(lambda: spares.spare is not None and spares.spare.is_ready(), "a spare process")
    assert spares.spare is not None
    return spares.spare


def prepared(spares: Spares, size: int, *modules: str) -> SpareProcess:
    """Return a spare process that serves the next launch of `size` ranks, if they import `modules`."""
    new(spares, size, *modules)
    return ready(spares)


_sources: list[SpareProcess] = []  # kept, because Python warns about a process that nobody waits for


@contextlib.contextmanager
def forked(size: int, *modules: str) -> Iterator[list[SpareProcess]]:
    """In the `with` block, the `size` members of a gang on this machine are forked from one process, which it yields.

    This process has imported all installed modules among `modules`, so they are imported once instead of `size` times.
    """
    start = local._start
    installed = tuple(name for name in modules if importlib.util.find_spec(name.partition(".")[0]))
    begun: list[SpareProcess] = []

    def fork(environment: dict[str, str], ticket: Ticket) -> subprocess.Popen[bytes] | ForkedMember:
        if not begun:
            threads = {"OMP_NUM_THREADS": str(process.fair_share(size)), **environment}
            begun.append(SpareProcess(Wanted(Setting(sys.executable, threads, (), ()), installed), is_awaited=True))
            until(lambda: begun[0].is_ready() or begun[0].ended, "the modules are imported, or cannot be")
        return begun[0].fork(ticket) or start(environment, ticket)

    with patch.object(local, "_start", fork):
        yield begun
    for source in begun:
        source.close()  # the process ends with its last member
    _sources[:] = [source for source in [*_sources, *begun] if not source.ended]


@pytest.fixture(autouse=True)
def ranks_are_forked(request: pytest.FixtureRequest, watch: Watch) -> Iterator[None]:
    """In a test that is marked `forked(*modules)`, ranks on this machine are forked: see forked()."""
    marker = request.node.get_closest_marker("forked")
    if marker is None:
        yield
        return
    with forked(2, *marker.args) as sources:
        yield
    until(lambda: all(source.ended for source in sources), "the process ends with its last rank")


BINDS_STREAMS = """
import faulthandler, logging, os, sys, warnings
import absl.logging, click

absl.logging.use_absl_handler()  # as TensorFlow does; its handler closes its stream if this is not sys.stderr
handler = logging.StreamHandler()
copies = {1: os.dup(1), 2: os.dup(2)}
stderr, write, own_stderr = sys.stderr, sys.stdout.write, sys.__stderr__
by_descriptor = os.fdopen(os.dup(2), "w")
opened = open("/dev/stderr", "w")
stated = sys.stdout.isatty(), sys.stdout.seekable(), sys.stdout.encoding, sys.stdout.line_buffering
faulthandler.enable(stderr)
click.echo("printed by the import")


def show(message, category, filename, lineno, file=None, line=None):
    print(message, file=stderr)


warnings.showwarning = show
"""


def check_streams(ring: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that what an import has bound to the streams of a spare process writes to the streams of its ranks."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "binds_streams.py").write_text(BINDS_STREAMS)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(spare, "FRAMEWORKS", spare.FRAMEWORKS | {"binds_streams"})
    env = (("OMP_NUM_THREADS", "2"), ("PYTHONPATH", os.pathsep.join((str(packages), *sys.path))))
    source = """
        import binds_streams as b
        import logging.config, os, sys, warnings
        from absl import logging as absl_logging
        from sparkring.worker.rank import preloads
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # closes all handlers
        absl_logging.warning("by absl")
        b.handler.emit(logging.makeLogRecord({"msg": "by a handler"}))
        warnings.warn("by warnings")
        b.write("by a method\\n")
        print("by its stream", file=b.stderr)
        print("by its descriptor", file=b.by_descriptor, flush=True)
        print("by its file", file=b.opened, flush=True)
        b.click.echo("by click")
        for fd, copy in b.copies.items():
            os.write(copy, f"by copy {fd}\\n".encode())
        same = sys.stderr is b.stderr is b.own_stderr is sys.__stderr__
        preloads.ahead, same, b.stated, (sys.stdout.isatty(), sys.stdout.seekable()), os.get_inheritable(b.copies[1])
    """
    for size in (1, 2):
        expected = [(("binds_streams",), True, (False, False, "utf-8", True), (False, False), False)] * size
        assert ring.run(source, size, env=env).values == expected
        for rank in range(size):
            lines = [(line.stream, line.text) for line in ring.view.record.recent if line.rank == rank]
            assert sorted(text for stream, text in lines if stream == "stdout") == [
                "by a method",
                "by click",
                "by copy 1",
            ]
            texts = [text for stream, text in lines if stream == "stderr"]
            texts.remove("WARNING: Logging before flag parsing goes to stderr.")
            assert "by absl" in texts.pop(0)
            assert texts == [
                "by a handler",
                "by warnings",
                "by its stream",
                "by its descriptor",
                "by its file",
                "by copy 2",
            ]
