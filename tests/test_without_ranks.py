"""Tests of runs, restarts and warm gangs on the driver's side. The members are threads of this process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_launcher import Exit, FakeLauncher, FakeRank
from texts import mentions
from waiting import DEADLINE_S

from sparkring.engine.run import spec, warm_gang
from sparkring.engine.run.options import Options
from sparkring.engine.run.prepare import prepare
from sparkring.engine.run.spec import RunSpec
from sparkring.errors import CaptureError, OptionsError, RunFailed
from sparkring.history import run_store
from sparkring.wire.messages import Metrics, Output, UserMessage

Cell = Callable[[FakeRank], object]


class Launched(list[FakeLauncher]):
    """The launchers that a test has used, and the cell that their ranks run."""

    cell: Cell

    def launch(self, *_: Any) -> FakeLauncher:
        self.append(FakeLauncher(lambda rank: self.cell(rank), len(self) + 1))
        return self[-1]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Make the ranks on this machine threads of this process."""
    found = Launched()
    monkeypatch.setattr("sparkring.launchers.local.LocalLauncher", found.launch)
    return found


@pytest.fixture
def run(launched: Launched, local: Any) -> Callable[..., Any]:
    """Return a function `run(cell, **options)` that starts a run whose ranks run `cell`."""

    def start(cell: Cell, **options: Any) -> Any:
        launched.cell = cell
        return local.run("pass", **options)

    return start


@pytest.fixture
def gang(launched: Launched, local_gang: Any) -> Any:
    """Return a warm gang on this machine that has not been started."""
    launched.cell = lambda rank: rank.world.rank
    local_gang.launched = launched
    return local_gang


# ── What is refused before the launch ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("home", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_that_the_notebook_has_made(home: str) -> None:
    """Where a Lightning Trainer was made for one process, ranks would train alone, so they must make their own."""
    trainer = type("Trainer", (), {"__module__": f"{home}.trainer.trainer"})()

    def refused(work: Any, np: int = -2, framework: str = "torch") -> str:
        try:
            prepare(RunSpec(work, Options(np=np), framework))
        except CaptureError as error:
            return str(error)
        return ""

    reads = spec.Cell("trainer.fit()", {"trainer": trainer})
    may_read = spec.Cell("for trainer in []: pass\ntrainer", {"trainer": trainer})
    told = "`trainer` is a Lightning Trainer that was made in the notebook"
    assert refused(reads).startswith(told)
    assert refused(spec.Call(lambda trainer: None, (trainer,))).startswith(told)
    assert [refused(may_read), refused(reads, np=-1), refused(reads, framework="plain")] == [""] * 3


# ── Runs and restarts ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_relative_directory_of_checkpoints(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has the whole path, so `%checkpoints` finds the directory from another folder, too."""
    monkeypatch.chdir(tmp_path)
    assert run(lambda rank: 1, checkpoint_dir="kept").record.checkpoint_dir == str(tmp_path / "kept")


def test_a_run(run):
    """The result has the values by rank; the record has the ranks' hosts and states."""
    result = run(lambda rank: rank.world.rank * 10)
    assert result.values == [0, 10]
    assert [(rank.host, rank.state) for rank in result.record.ranks] == [("host", "finished")] * 2


def test_without_restarts_nothing_is_said_of_them(run):
    """There is only one attempt, and the record lists no attempts."""

    def cell(rank: FakeRank) -> None:
        raise ValueError("no")

    with pytest.raises(RunFailed, match="ValueError: no") as caught:
        run(cell)
    assert "attempt" not in str(caught.value)
    assert caught.value.record.attempts == ()


def test_the_same_mistake_twice_ends_the_run(run):
    """The run is restarted after the first mistake, because the ranks had reached a step."""

    def cell(rank: FakeRank) -> None:
        rank.tell(Metrics({"loss": 0.5}, step=1))
        raise ValueError("no")

    with pytest.raises(RunFailed, match=r"(?s)ValueError: no.*failed twice .*same way") as caught:
        run(cell, max_restarts=9)
    assert len(caught.value.record.attempts) == 2


@pytest.mark.parametrize(
    ("error", "on", "why"),
    [
        (AttributeError("no_such_method"), (0,), "another attempt would raise the same AttributeError"),
        (ValueError("no"), (0, 1), "all ranks failed in the same way before the first step"),
    ],
)
def test_what_cannot_heal_ends_the_run_at_once(run, error, on, why):
    """The run ends because of the error's type, or because all ranks fail in the same way. The error says which."""

    def cell(rank: FakeRank) -> None:
        if rank.world.rank in on:
            raise type(error)(*error.args)
        rank.interrupted.wait(DEADLINE_S)

    with pytest.raises(RunFailed, match=rf"run .*not restarted: {why}") as caught:
        run(cell, max_restarts=3)
    assert len(caught.value.record.attempts) == 1


def test_a_mistake_that_only_echoes_a_death_is_no_reason_to_give_up(run):
    """A rank fails because another rank has died. The run is restarted, and succeeds."""
    gone = threading.Event()

    def cell(rank: FakeRank) -> int:
        if rank.attempt == 1 and rank.world.rank == 1:
            gone.set()
            raise Exit(signal=11)
        assert gone.wait(DEADLINE_S)
        if rank.attempt == 1:
            raise TypeError("no")
        return rank.attempt

    assert run(cell, max_restarts=1).values == [2, 2]


def test_the_time_limit_is_the_runs(run, local, clock):
    """The time limit is not reset by a new attempt."""

    def look(record) -> None:
        clock.ahead_s = 20.0 * len(record.attempts)

    def cell(rank: FakeRank) -> None:
        if rank.attempt < 3:
            raise Exit(code=3)
        rank.interrupted.wait(DEADLINE_S)
        raise KeyboardInterrupt

    local.view.on_refresh = look
    with pytest.raises(TimeoutError, match="time limit of 50 s") as caught:
        run(cell, max_restarts=1000, timeout_s=50.0)
    assert len(caught.value.record.attempts) == 3


def test_a_display_that_fails_does_not_end_the_run(run):
    """If a view fails, the run continues to its end, and the record says that it could not be shown.

    The view may still show the end. Otherwise, a panel would say forever that the run is running.
    """
    ends = []

    class Broken:
        def refresh(self, record):
            raise OSError("the terminal is gone")

        def close(self, record):
            ends.append(record.outcome)
            raise OSError("the terminal is gone")

    with pytest.warns(RuntimeWarning, match=r"no longer .*shown.*terminal .*gone"):
        result = run(lambda rank: rank.world.rank, view=Broken())
    assert result.values == [0, 1]
    assert any("terminal is gone" in notice.text for notice in result.record.notices)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(lambda rank: rank.world.rank, view=Broken()).values == [0, 1]
    assert ends == ["finished", "finished"]


# ── Warm gangs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_gang_at_the_same_place(gang):
    """A second gang is refused, and the error says what to do. After a loss, a new gang replaces the lost one."""
    gang.start(2)
    with pytest.raises(OptionsError, match="%gang stop ends"):
        gang.start(2)

    def dies(rank: FakeRank) -> None:
        raise Exit(code=3)

    gang.launched.cell = dies
    with pytest.raises(RunFailed):
        gang.cell("pass")
    gang.launched.cell = lambda rank: rank.world.rank
    gang.start(3)
    assert len(warm_gang.every()) == 1
    assert gang.values("pass") == [0, 1, 2]


def test_ranks_that_die_between_cells(gang, wait_until):
    """The notebook shows at once which ranks died, and the next cell says that their state is lost."""
    gang.start(3)
    for rank in gang.launched[0].ranks[1:]:
        rank.exit(signal=9)
    wait_until(lambda: gang.told, "the loss is told")
    assert mentions(gang.told[0], "ranks 1", "2", "killed", "SIGKILL")
    assert gang.values("pass") == [0, 1, 2]
    assert "a new gang" in gang.view.record.notices[0].text
    assert [launcher.attempt for launcher in gang.launched] == [1, 2]


def test_a_flood_of_messages_between_cells_is_bounded(gang, wait_until):
    """Only the end of the output is kept, and a notice says that the beginning was dropped."""
    gang.start(2)
    for rank in gang.launched[0].ranks:
        for _ in range(5_000):
            rank.tell(UserMessage("y" * 999))
        rank.tell(Output("stdout", b"the end\n"))
    wait_until(lambda: "more between cells than can be kept" in "".join(gang.gang.news), "the flood is noticed")
    gang.cell("pass")
    assert mentions(gang.view.record.notices[0].text, "between cells", "can be kept")
    folder = Path(gang.view.record.log_folder)
    assert all(run_store.log(folder, rank).endswith("the end\n") for rank in range(2))


def test_a_rank_that_does_not_come_back_takes_the_gang_with_it(gang, monkeypatch):
    """If a rank does not respond, the gang is ended after a grace period. The error says so, and names the rank."""
    monkeypatch.setattr("sparkring.engine.run.supervisor.RETURN_GRACE_S", 0.2)
    gang.start(2)

    def cell(rank: FakeRank) -> None:
        if rank.world.rank == 0:
            raise ValueError("no")
        rank.ended.wait(DEADLINE_S)

    gang.launched.cell = cell
    with pytest.raises(RunFailed, match=r"(?s)ValueError: no.*gang .*ended.*rank 1 did not respond"):
        gang.cell("pass")
