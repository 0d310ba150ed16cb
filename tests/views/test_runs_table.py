"""The list of runs: its columns, its order, its filter, and its forms."""

from __future__ import annotations

import time

import pytest

from sparkring.errors import OptionsError
from sparkring.history.events import CapturedName, RunFinished, RunStarted
from sparkring.history.run_store import EVENTS, home
from sparkring.views import runs_table
from sparkring.views.runs_table import ListedRun

NOW = time.mktime((2026, 11, 20, 14, 3, 22, 0, 0, -1))


def run(number, *, loss=None, lr=None, name="train", message="", outcome="finished", code="%%torchrun -n -2\ntrain()"):
    """A run that began `number` minutes after NOW and took as many seconds."""
    numbers = () if lr is None else (("", lr),)
    captured = (CapturedName("lr", "float", 9, "by value", numbers=numbers),)
    run_id, began = f"2026-11-20_14-03-22_00000{number}", NOW + 60 * number
    started = RunStarted(began, run_id, name, code, 2, "local", "torch", "all", captured=captured)
    return ListedRun(run_id, started, began + number, outcome, message, [], {} if loss is None else {"loss": loss})


RUNS = [
    run(4, loss=float("nan"), lr=0.3),
    run(3, loss=0.5, lr=0.1, name="<b>small</b>"),
    run(2, message="<b>no</b>", outcome="failed"),
    run(1, loss=0.25, lr=0.3),
]


def ids(runs):
    return "".join(listed.run_id[-1] for listed in runs)


def test_metrics_and_parameters_have_columns():
    headers, *_, failed, _ = [line.split() for line in runs_table.words(RUNS, 999).splitlines()]
    assert headers == ["run", "name", "began", "time", "ranks", "lr", "loss", "outcome"]
    assert failed[0] == "000002"
    same = [run(1, lr=0.1), run(2, lr=0.1)]
    assert "lr" not in runs_table.words(same, 999).split(), "the parameter is the same in all runs"


def test_a_narrow_terminal_shows_fewer_columns():
    headers = runs_table.words(RUNS, 80).splitlines()[0].split()
    assert "lr" not in headers
    assert headers[:4] == ["run", "name", "began", "time"]
    assert max(map(len, runs_table.words(RUNS, 80).splitlines())) <= 80


def test_when_a_run_began(monkeypatch):
    monkeypatch.setattr(time, "localtime", lambda at=NOW, real=time.localtime: real(at))
    assert runs_table.began(NOW) == "14:03:22"
    assert runs_table.began(NOW - 86_400) == "Nov 19 14:03"
    assert runs_table.began(NOW - 400 * 86_400).startswith("2025-10-16 1")
    assert runs_table.began(0.0) == ""


@pytest.mark.parametrize(
    ("sort", "reverse", "expected"),
    [
        ("loss", False, "1342"),  # the lowest loss is the best; nan and no loss come last
        ("loss", True, "3142"),
        ("began", False, "4321"),
        ("time", False, "1234"),
        ("name", False, "3421"),
        ("", True, "1234"),
    ],
)
def test_sorting(sort, reverse, expected):
    assert ids(runs_table.chosen(RUNS, "", sort, reverse=reverse)) == expected


def test_the_highest_accuracy_comes_first():
    runs = [run(at)._replace(metrics={"accuracy": at / 10}) for at in (1, 3, 2)]
    assert ids(runs_table.chosen(runs, "", "accuracy", reverse=False)) == "321"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("loss < 0.3", "1"),
        ("loss <= 0.5 and lr = 0.1", "3"),
        ("outcome = 'failed' or time > 3", "42"),
        ("began >= '2026-11-20 14:06'", "43"),
        ("not outcome = 'failed'", "431"),
    ],
)
def test_filtering(where, expected):
    assert ids(runs_table.chosen(RUNS, where, "", reverse=False)) == expected


def test_columns_that_do_not_exist():
    with pytest.raises(OptionsError, match=r"--sort accuracy: .*\bloss\b"):
        runs_table.chosen(RUNS, "", "accuracy", reverse=False)
    with pytest.raises(OptionsError, match=r"--where: .*accuracy"):
        runs_table.chosen(RUNS, "accuracy > 3", "", reverse=False)


def test_the_saved_form():
    """Each row opens without a script, and shows the cell; what users write is escaped."""
    page = runs_table.html(RUNS)
    assert page.count("<details") == len(RUNS)
    assert page.count("%%torchrun -n -2") == len(RUNS)
    assert "<b>" not in page
    assert "&lt;b&gt;no" in page
    long = runs_table.html([run(1, code="x = 1\n" * 500)])
    assert long.count("x = 1") == runs_table.CODE_LINES
    assert "460 more lines" in long


def test_the_message_for_the_page():
    told = runs_table.message(RUNS)
    columns = {column["title"]: column for column in told["columns"]}
    assert told["runs"][0] == RUNS[0].run_id
    assert columns["loss"]["texts"] == ["nan", "0.5", "", "0.25"]
    assert columns["loss"]["keys"] == [None, 0.5, None, 0.25]
    assert (columns["loss"]["right"], columns["name"]["right"]) == (True, False)


def test_no_runs(capsys):
    runs_table.show_runs([], "no runs")
    assert capsys.readouterr().out == "no runs\n"


def test_what_was_saved_is_listed(replayed):
    """The list reads the last metrics from the event that ends a run. Runs in progress have those of their record."""
    for name, ended in (("1_aaaaaa", True), ("2_bbbbbb", False)):
        folder = home() / name
        folder.mkdir(parents=True)
        end = [RunFinished(5.0, "finished", measured=(("loss", 0.5),))] if ended else []
        write_events(folder / EVENTS, [RunStarted(1.0, name, "t", "c", 2, "local", "torch", "all"), *end])
    running, ended = runs_table.listed({"2_bbbbbb": replayed()})
    assert (ended.metrics, ended.ended, ended.outcome) == ({"loss": 0.5}, 5.0, "finished")
    assert (running.outcome, running.metrics) == ("running", {})
    assert runs_table.listed({}, most=1)[0].outcome == runs_table.UNFINISHED


def write_events(path, story):
    from sparkring.history.events import to_json

    path.write_text("".join(f"{to_json(event)}\n" for event in story))
