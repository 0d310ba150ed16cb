"""Spare processes, which are off except in their own tests and in tests that often launch a framework's ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from leaks import Watch
from waiting import until

from sparkring.launchers import executor_spares, local, spare
from sparkring.launchers.spare import ForkedMember, Setting, SpareProcess, Spares, Wanted, setting_of
from sparkring.runtime import storage
from sparkring.wire.ticket import Ticket
from sparkring.worker.member import process


@pytest.fixture
def spares(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spares]:
    """This machine's spare processes are on, and start as soon as no launch is under way. Executors have none."""
    monkeypatch.setenv("SPARKRING_SPARE", "1")
    monkeypatch.setattr(spare, "REST_S", 0.0)
    # They would stay for later launches, after the test.
    monkeypatch.setattr(executor_spares.ExecutorSpares, "order", lambda *_: None)
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
def forked(size: int, *modules: str) -> Iterator[None]:
    """In the `with` block, the `size` members of a gang on this machine are forked from one process.

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
        yield
    for source in begun:
        source.close()  # the process ends with its last member
    _sources[:] = [source for source in [*_sources, *begun] if not source.ended]
