"""Spare processes are off, except in tests of them, and in tests that often launch a framework's ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from leaks import Watch
from waiting import until

from sparkring.launchers import spare
from sparkring.launchers.spare import Setting, SpareProcess, Spares


@pytest.fixture
def spares(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spares]:
    """Spare processes are on, and start as soon as no launch is under way."""
    monkeypatch.setenv("SPARKRING_SPARE", "1")
    monkeypatch.setattr(spare, "REST_S", 0.0)
    yield spare.spares
    spare.spares.stop()
    until(lambda: not spare.spares.leaving(), "the spare process ends with its last member")


def also(spares: Spares, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Spare processes import these modules, too, although spare processes for users import only frameworks."""
    note = spares.note_imports

    def note_more(setting: Setting | None, found: tuple[str, ...] | None) -> None:
        note(setting, None if found is None else (*found, *modules))

    monkeypatch.setattr(spares, "note_imports", note_more)


def ready(spares: Spares) -> SpareProcess:
    """The spare process that follows a launch, once it has imported its modules."""
    until(lambda: spares.spare is not None and spares.spare.is_ready(), "a spare process")
    assert spares.spare is not None
    return spares.spare
