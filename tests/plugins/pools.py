"""Independent runs on members that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_launcher import FakeLauncher, FakeRank
from rings import Recording

from sparkring.capture.packing import unpack_names
from sparkring.engine.foreach import api as foreach_api
from sparkring.engine.foreach.options import ForeachOptions
from sparkring.engine.foreach.run import ForeachSpec
from sparkring.engine.run.spec import Call
from sparkring.errors import LaunchError

ItemCell = Callable[[FakeRank, Any], object]


class Launched(list[FakeLauncher]):
    """The launchers that have been made for a run, one for each gang. Their ranks call `cell` for each item."""

    cell: ItemCell
    refused = 0  # how many of the next launchers will fail to start

    def launch(self, *_: Any) -> FakeLauncher:
        if self.refused:
            self.refused -= 1
            raise LaunchError("no more processes.")
        self.append(FakeLauncher(lambda rank: self.cell(rank, item_of(rank)), len(self) + 1))
        return self[-1]


def item_of(rank: FakeRank) -> Any:
    """Return the value of the item that a rank should run."""
    namespace: dict[str, Any] = {}
    payload, *buffers = rank.request.parts
    unpack_names(payload, namespace, buffers)
    return namespace["item"]


class Runs:
    """Runs items on ranks that are threads of this process."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self.view = Recording()

    def __call__(self, cell: ItemCell, items: Any, at_once: int = 2, **options: Any) -> Any:
        return foreach_api.foreach_spec(self._spec(cell, items, at_once, options), self.view)

    def in_background(self, cell: ItemCell, items: Any, at_once: int = 2, **options: Any) -> Any:
        return foreach_api.start_foreach(self._spec(cell, items, at_once, {**options, "background": True}), self.view)

    def _spec(self, cell: ItemCell, items: Any, at_once: int, options: dict[str, Any]) -> ForeachSpec:
        self.launched.cell = cell
        return ForeachSpec(Call(options.pop("call", len)), items, ForeachOptions(-at_once, **options))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, watch: Any) -> Runs:
    launched = Launched()
    monkeypatch.setattr("sparkring.launchers.local.LocalLauncher", launched.launch)
    return Runs(launched)
