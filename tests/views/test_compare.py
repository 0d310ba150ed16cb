"""Two runs beside each other."""

from __future__ import annotations

from sparkring.history.events import CodeFrame, Failure, Metrics, RankFailed, RankFinished, RunFinished
from sparkring.views import compare

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
    rows = {name: values for name, *values in compare.facts(first, second)}
    assert rows["torch"] == ["2.1", "2.2"]
    assert rows["outcome"] == ["2 ranks finished", "rank 1 failed: ValueError: <b>bad</b>"]
    assert "where" not in rows, "both ran on this machine"
    assert "line" not in rows
    same = [name for name, *_ in compare.facts(first, first)]
    assert same == ["run", "outcome", "time"]


def test_metrics_curves_and_code(replayed):
    first, second = two(replayed)
    assert compare.measured(first, second) == [
        ("loss", "0.125", "0.25", "+0.125"),
        ("accuracy", "0.875", "0.75", "-0.125"),
    ]
    assert compare.measured(first, replayed())[0] == ("loss", "0.125", "", "")
    [(name, (a, b)), _] = compare.curves(first, second)
    assert (name, a.name, b.name, a.points[0].value.mean, b.points[0].value.mean) == ("loss", "A", "B", 1.0, 2.0)
    assert compare.difference(first, second)[-3:] == ["-train(lr=0.1)", "+train(lr=0.3)", " score()"]
    assert compare.difference(first, first) == []


def test_what_is_shown(replayed, capsys):
    first, second = two(replayed)
    compare.show_compared(first, second)
    said = capsys.readouterr().out
    assert "2.2" in said
    assert "+train(lr=0.3)" in said
    page = compare._html(first, second)
    assert page.count("<img") == 2
    assert "<b>bad" not in page, "what users and ranks write is escaped"
    assert "The cells are the same." in compare._html(first, first)
    by_epoch = replayed(*(Metrics({"loss": 1 / at}, epoch=at, time=2.0 + at, rank=0) for at in range(1, 9)))
    assert "A has curves by step, and B has curves by epoch" in compare._html(first, by_epoch)
