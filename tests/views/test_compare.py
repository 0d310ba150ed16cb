"""Runs beside each other."""

from __future__ import annotations

from texts import mentions

from sparkring.history.events import (
    CapturedName,
    CodeFrame,
    DataOpened,
    Failure,
    Metrics,
    RankFailed,
    RankFinished,
    RunFinished,
)
from sparkring.views import compare

STARTED = 1_700_000_000.0  # as in conftest.py
CELL = "%%torchrun -n -2 --seed {seed}\ntrain(lr={lr})\nscore()"


def steps(slope):
    for step in range(1, 9):
        for rank in (0, 1):
            yield Metrics({"loss": slope / step, "accuracy": 1 - slope / step}, step=step, time=2.0 + step, rank=rank)


def two(replayed):
    """A run that finished, and one with another learning rate, other versions and a failure."""
    ended = [RankFinished(20.0, rank, "") for rank in (0, 1)]
    first = replayed(
        *steps(1.0),
        *ended,
        RunFinished(21.0, "finished"),
        code=CELL.format(seed=1, lr=0.1),
        versions=(("torch", "2.1"),),
    )
    failure = Failure("exception", "ValueError: <b>bad</b>", (CodeFrame("<cell>", 2, "<module>", True),))
    second = replayed(
        *steps(2.0),
        RankFailed(12.0, 1, failure),
        RunFinished(13.0, "failed", "", 1),
        run_id="2026-11-21_08-00-00_c3d4",
        code=CELL.format(seed=1, lr=0.3),
        versions=(("torch", "2.2"),),
    )
    return first, second


def test_only_what_differs_is_listed(replayed):
    first, second = two(replayed)
    rows = {name: values for name, *values in compare.facts([first, second])}
    assert rows["torch"] == ["2.1", "2.2"]
    assert rows["outcome"] == ["2 ranks finished", "rank 1 failed: ValueError: <b>bad</b>"]
    assert "where" not in rows, "both ran on this machine"
    assert "line" not in rows
    same = [name for name, *_ in compare.facts([first, first])]
    assert same == ["run", "name", "outcome", "time"]


def test_parameters_and_versions_of_data_that_differ(replayed):
    """The numbers that the cells have read from the notebook are parameters, also those in a dict."""

    def run(lr, version):
        names = (("lr", (("", lr),)), ("config", (("width", 64), ("decay", lr / 2))))
        captured = tuple(CapturedName(name, "?", 1, "by value", numbers=numbers) for name, numbers in names)
        opened = DataOpened(0, "digits", "delta", version=version, time=2.0, rank=0)
        return replayed(opened, captured=captured)

    rows = {name: values for name, *values in compare.facts([run(0.1, "7"), run(0.3, "8")])}
    assert (rows["lr"], rows["config.decay"], "config.width" in rows) == (["0.1", "0.3"], ["0.05", "0.15"], False)
    assert ["version 7" in rows["data"][0], "version 8" in rows["data"][1]] == [True, True]


def test_metrics_curves_and_code(replayed):
    first, second = two(replayed)
    assert compare.measured([first, second]) == [
        ("loss", "0.125", "0.25", "+0.125"),
        ("accuracy", "0.875", "0.75", "-0.125"),
    ]
    assert compare.measured([first, replayed()])[0] == ("loss", "0.125", "", "")
    assert compare.measured([first, replayed(), second])[0] == ("loss", "0.125", "", "0.25")
    by_axis = compare.curves([first, second])
    assert [*by_axis] == ["step", "time"]
    [(name, (a, b)), _] = by_axis["step"]
    assert (name, a.name, b.name) == ("loss", "A loss", "B loss")
    assert (a.points[0].value.mean, b.points[0].value.mean) == (1.0, 2.0)
    assert compare.difference(first, second)[-3:] == ["-train(lr=0.1)", "+train(lr=0.3)", " score()"]
    assert compare.difference(first, first) == []


def test_what_is_shown(replayed, capsys):
    first, second = two(replayed)
    compare.show_compared([first, second])
    said = capsys.readouterr().out
    assert "2.2" in said
    assert "+train(lr=0.3)" in said
    page = compare.html([first, second])
    assert page.count("<img") == 2
    assert "<b>bad" not in page, "what users and ranks write is escaped"
    assert "are the same." in compare.html([first, first])
    assert mentions(compare.words([first, first, second]), "of C", "that of A:")


def test_the_axis_that_all_runs_share(replayed):
    """Runs are compared by step, by epoch if an epoch's number of steps is known, or by time."""

    def run(count, began=1.0):
        return replayed(
            *(Metrics({"loss": 1 / at}, time=STARTED + began + at, rank=0, **count(at)) for at in range(1, 9))
        )

    by_epoch, by_step = run(lambda at: {"epoch": at}), run(lambda at: {"step": at}, began=11.0)
    by_both = run(lambda at: {"epoch": (at + 1) // 2, "step": (at + 1) % 2 + 1, "steps": 2})
    assert [*compare.curves([by_step, by_epoch])] == ["time"]
    assert [*compare.curves([by_step, by_both])] == ["step", "time"]
    both = compare.curves([by_epoch, by_both])
    assert [*both] == ["epoch", "time"]
    assert [curve.points[-1].x for curve in both["epoch"][0][1]] == [8, 4]
    [(_, (a, b))] = compare.curves([by_step, by_epoch])["time"]
    assert [b.points[0].x, b.points[-1].x] == [2.0, 9.0], "time since the start of each run"
    assert a.points[-1].x - b.points[-1].x == 10
    assert compare.html([by_step, by_epoch]).count("<img") == 1


def test_the_message_for_the_page(replayed):
    first, second = two(replayed)
    told = compare.message([first, second, first])
    [loss, _] = told["charts"]["step"]["charts"]
    assert [curve["name"] for curve in loss["curves"]] == ["A loss", "B loss", "C loss"]
    assert len({curve["colour"] for curve in loss["curves"]}) == 3
    assert loss["time"] is None, "runs reach a step at different times"
    [loss, _] = told["charts"]["time"]["charts"]
    assert loss["time"] == loss["x"]
    assert "<b>bad" not in told["html"]
    assert compare.message([replayed(), replayed()])["charts"] == {}
