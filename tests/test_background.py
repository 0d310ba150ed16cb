"""The parts of background runs that need no ranks: options, how a run is found, and how it ends."""

from __future__ import annotations

import io
import time

import pytest
from texts import mentions

from sparkring.engine.run import background
from sparkring.engine.run.api import run
from sparkring.engine.run.options import Options
from sparkring.engine.run.recorder import Recorder
from sparkring.engine.run.result import RunResult
from sparkring.errors import OptionsError
from sparkring.history import run_store
from sparkring.history.events import RunStarted
from sparkring.history.record import RunRecord
from sparkring.notebook.extension import MAGICS
from sparkring.notebook.history import RunsRequest, parse_runs
from sparkring.notebook.launch import parse
from sparkring.runtime.interrupts import Interrupts, interrupted
from sparkring.views import Quiet
from sparkring.views.terminal import TerminalView


def started(title: str, work) -> background.BackgroundRun:
    """Start a run that only calls `work(interrupts)`."""
    recorder = Recorder(Quiet(), RunStarted(1.0, run_store.new_id(), title, "", 1, "local", "plain", "all"))
    interrupts = Interrupts()

    def to_the_end() -> RunResult:
        try:
            return work(interrupts)
        finally:
            recorder.close("finished")

    return background.BackgroundRun(to_the_end, recorder, interrupts)


def until_stopped(interrupts: Interrupts) -> RunResult:
    while not interrupts.seen:
        time.sleep(0.01)
    raise interrupted("at once")


def test_the_option():
    assert parse("horovod", "-n -2 --background") == Options(np=-2, background=True)
    with pytest.raises(OptionsError, match="--dry-run starts nothing"):
        parse("torchrun", "--background --dry-run")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", RunsRequest()),
        ("50", RunsRequest(50)),
        ("--stop 2026", RunsRequest(run="2026", stop=True)),
        ("2026-11-20_a", RunsRequest(run="2026-11-20_a")),
        ("--stop 'my run'", RunsRequest(run="my run", stop=True)),
    ],
)
def test_lines_of_runs(line, expected):
    assert parse_runs(line) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--stop", "name of a background run"),
        ("--stop a b", "takes one run"),
    ],
)
def test_lines_of_runs_that_make_no_sense(line, words):
    with pytest.raises(OptionsError, match=words):
        parse_runs(line)


def test_tab_offers_what_can_be_stopped():
    one, other = started("one", until_stopped), started("other", until_stopped)
    for line, expected in {
        " ": ["--sort", "--reverse", "--where", "--tensorboard", "--stop", "--delete", "--delete-older"],
        " --s": ["--sort", "--stop"],
        " --stop ": [other.run_id, one.run_id],
        f" --stop {one.run_id}": [one.run_id],
        " --stop x": [],
        f" --stop {one.run_id} ": [],
        " 50 ": ["--sort", "--reverse", "--where", "--tensorboard", "--stop", "--delete", "--delete-older"],
    }.items():
        assert MAGICS["runs"].complete(line) == expected
    one.stop()
    other.stop()
    assert MAGICS["runs"].complete(" --stop ") == []


def test_a_run_is_found_by_its_id_or_its_name():
    """A run that has not ended is found by the same words as in %logs."""
    one, other = started("one", until_stopped), started("other", until_stopped)
    assert background.going() == [other, one]
    assert background.find(one.run_id) is one
    assert background.find(one.run_id[-6:]) is one
    assert background.find("other") is other
    assert background.find("2026" if one.run_id.startswith("2026") else one.run_id[:4]) is other
    assert background.find("no-such") is None
    one.stop()
    assert background.find("one") is None
    background.stop_all()
    assert background.going() == []
    assert other.done


def test_an_interrupt_while_a_run_ends(monkeypatch):
    """stop() no longer waits. What it raises has a message, and no traceback of this package."""
    run = started("one", until_stopped)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run._thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt, match=r"run .*ending") as caught:
            run.stop()
    assert len(caught.value._render_traceback_()) == 1
    run.stop()


def test_an_error_holds_nothing_of_the_run():
    """An error does not refer to the values that were sent. They may be large, and a notebook keeps its errors."""

    class Large:
        alive = 0

        def __init__(self) -> None:
            Large.alive += 1

        def __del__(self) -> None:
            Large.alive -= 1

    def work(interrupts: Interrupts) -> RunResult:
        large = Large()
        try:
            raise OSError(f"{Large.alive} of {type(large).__name__}")
        except OSError as error:
            raise ValueError("in the end") from error

    run = started("large", work)
    with pytest.raises(ValueError, match="in the end") as caught:
        run.result()
    assert str(caught.value.__cause__) == "1 of Large"
    assert Large.alive == 0


def test_out_says_what_the_panel_does_not():
    """If a cell returns a run, its methods or its result are shown; in a list, each run is shown with its state."""
    from IPython.lib.pretty import pretty

    run = started("cell", until_stopped)
    assert mentions(pretty(run), f"run {run.run_id}", "waits")
    assert mentions(pretty([run]), f"[BackgroundRun({run.run_id}", "0 of 1 rank", "connected")
    run.stop()
    done = started("cell", lambda interrupts: RunResult({0: 42}, {}, RunRecord(size=1)))
    result = done.result()
    assert pretty(done) == pretty(result)


def test_a_run_that_goes_while_another_makes_room(monkeypatch):
    """Two runs may end at the same time, and both remove old runs."""
    gone = run_store.home() / "2026-01-01_00-00-00_gone"
    gone.parent.mkdir(parents=True)
    (gone.parent / "other").mkdir()
    monkeypatch.setattr(run_store, "saved", lambda: [gone, gone])
    run_store.prune(keep=0)


def test_a_terminal_is_left_to_the_prompt():
    """A background run has no progress line, because rewriting the line would disturb the user's typing."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for progress in (True, False):
        stream = Terminal()
        view = TerminalView(stream, progress=progress)
        view.refresh(RunRecord(run_id="x", size=1, started=1.0))
        assert bool(stream.getvalue()) is progress


def test_not_everything_can_be_run():
    with pytest.raises(OptionsError, match="run\\(\\) takes a function"):
        run(3, background=True)  # type: ignore[call-overload]
    assert run_store.saved() == []
