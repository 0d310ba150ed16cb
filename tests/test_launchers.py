"""Tests of places: where ranks run is one value, and a place can be added from outside the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_launcher import FakeLauncher
from texts import mentions

from sparkring.engine.foreach.options import ForeachOptions
from sparkring.engine.foreach.run import ForeachSpec
from sparkring.engine.foreach.run import prepare as prepare_items
from sparkring.engine.run import warm_gang
from sparkring.engine.run.api import run_spec
from sparkring.engine.run.gang_selection import gang_for
from sparkring.engine.run.options import GangOptions, Options
from sparkring.engine.run.spec import Call, RunSpec
from sparkring.errors import OptionsError
from sparkring.history.describe.run import facts
from sparkring.launchers import PLACES, place_of, slots_table
from sparkring.launchers.base import ItemRoom, Launcher, LaunchRequest, Place
from sparkring.notebook.gang import parse


class Threads(Place):
    """Ranks that are threads of this process."""

    name, title = "threads", "threads of this process"

    def launcher(self, request: LaunchRequest, say: Callable[[str], None], *, patient: bool = True) -> Launcher:
        return FakeLauncher(lambda rank: f"{request.title}: rank {rank.world.rank} of {rank.world.size}")

    def room(self, request: LaunchRequest) -> int:
        return 8

    def item_room(self, request: LaunchRequest, gpus_each: float | None) -> ItemRoom:
        return ItemRoom(tasks=8)

    def gpus_of_a_rank(self, size: int, say: Callable[[str], None]) -> float:
        return 0.0

    def every_slot(self) -> int:
        return 8

    def table(self) -> list[tuple[str, ...]]:
        return [(self.title, "8", "0", "")]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Threads()
    monkeypatch.setitem(PLACES, place.name, place)
    return place


def test_the_sign_of_np_means_a_place() -> None:
    for np, name in ((-1, "local"), (-64, "local"), (0, "spark"), (1, "spark"), (64, "spark")):
        options: tuple[Any, ...] = (Options(np), ForeachOptions(np), GangOptions(np, "plain", 1.0, ()))
        assert {asked.place.name for asked in options} == {place_of(np).name} == {name}


def test_a_warm_gang_in_a_place_from_outside(threads: Place) -> None:
    """A gang is found by the place of its ranks, not only by their number."""
    wanted = GangOptions(2, "plain", 60.0, (), place_name="threads")
    gang = warm_gang.start(wanted, print, print)
    try:
        assert mentions(gang.describe(), "gang of 2 ranks")
        assert gang_for(Options(2, place_name="threads")) is gang
        assert gang_for(Options(2)) is None
        assert gang_for(Options(-2)) is None
        with pytest.raises(OptionsError, match="--env-pack"):  # its ranks run another Python
            gang_for(Options(2, place_name="threads", env_pack=True))
        assert parse("stop threads").where == "threads"
        assert warm_gang.stop("spark") == []
    finally:
        assert warm_gang.stop("threads") == [gang]


def test_a_place_from_outside(threads: Place) -> None:
    """A run, the requests of a pool and `%slots` use a new place as they use the others."""
    result = run_spec(RunSpec(Call(len, ("ab",)), Options(2, place_name="threads", quiet=True), "plain"))
    assert result.values == ["len: rank 0 of 2", "len: rank 1 of 2"]
    assert result.record.where == "threads"
    assert facts(result.record)[0] == "2 ranks on threads"
    items = prepare_items(ForeachSpec(Call(len), ["a"], ForeachOptions(3, place_name="threads")))
    assert [(launch.place, launch.size, launch.at_once) for launch in items.launches] == [(threads, 1, 3)] * 3
    assert ("8", "0", "") in [tuple(row[1:]) for row in slots_table() if row[0].startswith("threads")]
