"""Tests of saved runs: they are read back without lines that were cut off, and active runs are not removed."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from texts import mentions

from sparkring.engine.run import recorder
from sparkring.engine.run.result import RunResult
from sparkring.errors import DataError, LaunchError, OptionsError, SparkringError
from sparkring.history import (
    compression,
    describe,
    events,
    metrics,
    rank_logs,
    record,
    run_folder,
    run_store,
    snapshots,
)
from sparkring.history.observer import Observer
from sparkring.history.record import RunRecord, apply, replay
from sparkring.notebook.data import readers
from sparkring.notebook.extension import MAGICS
from sparkring.views import Quiet
from sparkring.views.shards import show_readers


def story(run_id: str, *, title: str = "cell", ended: bool = True) -> list[events.Event]:
    """Return events of every kind."""
    frame = events.CodeFrame("<cell>", 3, "f", in_cell=True, source=(events.SourceLine(3, "1 / 0"),))
    failure = events.Failure(
        "exception", "ZeroDivisionError: …", (frame,), "Traceback …", "advice", signal="SIGKILL", exit_code=3
    )
    found: list[events.Event] = [
        events.RunStarted(
            1.0,
            run_id,
            title,
            "1 / 0",
            2,
            "local",
            "plain",
            "all",
            captured=(
                events.CapturedName("x", "numpy.ndarray", 1_200, "by value"),
                events.CapturedName("l", "_thread.lock", None, "cannot", "is a lock", "make it there", False, via="f"),
            ),
            versions=(("python", "3.11.7"), ("torch", "2.1")),
        ),
        events.MemberJoined(1.1, 0, "h"),
        events.RankStarted(1.2, 0, "h", 10),
        events.Output("stdout", b"one\nbad \xff\n", time=1.3, rank=0),
        events.Output("stderr", b"two", time=1.4, rank=1),
        events.Output("stderr", b"three\n", time=1.5, rank=0),
        events.UserMessage("to you", time=1.6, rank=0),
        events.Metrics({"loss": 0.5}, step=1, epochs=2, ends_epoch=True, time=1.7, rank=0),
        events.GpuUsed("0", "NVIDIA", 10**9, 8 * 10**9, 50, time=1.75, rank=0),
        events.RankUsed(97, 10**9, 8, 64 * 10**9, time=1.755, rank=0),
        events.ModelGpuUsed(1.755, "h", 12, events.GpuUsed("1", "NVIDIA", 10**9, 8 * 10**9, None)),
        events.DataOpened(0, "digits", "parquet", ("a", "b"), "a > 3", "v1", 2, 4, 1000, 9000, 32, time=1.76, rank=0),
        events.DataPlanned(
            0, 1, (events.Piece(1, 0, 300), events.Piece(0, 2, 200, 3)), ((1, "b"), (0, "a")), 7, 64, time=1.765, rank=0
        ),
        events.DataRead(0, 1, 32, 1, 288, 500, 16, 0.1, 0.2, "part-0", time=1.77, rank=0),
        events.DataRead(0, 1, 500, 16, 4500, 500, 16, 0.1, 0.2, "part-1", done=True, time=1.78, rank=0),
        events.TimelineSaved(
            1.79,
            "timeline.json",
            9,
            1.0,
            slowest=(events.TensorTimes("w", 2, 0.5),),
            late=(events.Lateness(1, 2, 0.5),),
        ),
        events.Notice(1.8, "look"),
        events.StackTaken(1.9, 0, "waiting", 3, "text"),
        events.RankFinished(2.0, 0, "5"),
        events.RankFailed(2.1, 1, failure),
        events.RankExited(2.2, 1),
    ]
    return [*found, events.RunFinished(2.3, "failed", "why", 1)] if ended else found


def save(run_id: str, found: list[events.Event]) -> run_folder.RunFolder:
    """Write the events to a run's folder, and return it."""
    folder = run_folder.RunFolder(run_id)
    folder.seen(found, RunRecord())
    folder.ended(RunRecord())
    return folder


def test_a_saved_run_is_the_live_one():
    """The record that is loaded equals the live one; each log is complete."""
    found = story("2026-01-01_00-00-00_aaaa")
    folder = save("2026-01-01_00-00-00_aaaa", found)
    live = replay(found)
    loaded = run_store.load(folder.path)
    assert loaded.log_folder == str(folder.path)
    assert loaded == live._replace(log_folder=str(folder.path))
    assert run_store.log(folder.path, 0) == "one\nbad \\xff\nthree\n"
    assert run_store.log(folder.path, 1) == "two"
    assert run_store.log(folder.path, 7) == ""
    assert run_store.first(folder.path) == found[0]
    assert run_store.last(folder.path) == found[-1]


def reading(seconds: float, *, ended: bool) -> list[events.Event]:
    """Return events of two ranks that read four epochs and report five times a second; one of the ranks also prints."""
    found: list[events.Event] = [events.RunStarted(100.0, "reads", "t", "c", 2, "local", "plain", "all")]
    found += [events.RankStarted(100.0, rank, "h", 10 + rank) for rank in (0, 1)]
    found += [events.DataOpened(0, "digits", "parquet", rows=1000, time=100.0, rank=rank) for rank in (0, 1)]
    steps = int(seconds * 5)
    for step in range(1, steps + 1):
        at = 100 + step / 5
        for rank in (0, 1):
            epoch, done = 1 + (step - 1) * 4 // steps, step % (steps // 4) == 0
            found.append(
                events.DataRead(0, epoch, step, step, 9 * step, 999, elapsed_s=step / 5, done=done, time=at, rank=rank)
            )
            gpu = events.GpuUsed("0", "NVIDIA", step, 8 * 10**9, step % 100, time=at, rank=rank)
            found += [gpu, events.ModelGpuUsed(at, f"h{rank}", 12, gpu._replace(time=0.0, rank=0))]
        if step % 7 == 0:
            found.append(events.StackTaken(at + 0.01, 0, "waiting", 3, f"stack {step}"))
            found.append(events.Output("stdout", b"line\n", time=at + 0.02, rank=1))
    found.append(events.DataRead(0, 5, 7, 1, 63, 999, time=at + 0.03, rank=1))
    if ended:
        found += [events.RankFinished(at + 0.1, rank, "") for rank in (0, 1)]
        found += [events.RankExited(at + 0.2, rank) for rank in (0, 1)]
        found.append(events.RunFinished(at + 0.3, "finished"))
    return found


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "broken off"])
@pytest.mark.parametrize("seconds", [2, 60])
def test_what_is_told_often_is_thinned_and_the_end_is_the_same(seconds, ended):
    """Readers and GPUs report five times a second. The last report of every 5 s and all ends of epochs are kept."""
    found = reading(seconds, ended=ended)
    path = save("reads", found).path
    kept = list(run_store._events(path))
    often = [event for event in kept if isinstance(event, (events.DataRead, events.GpuUsed, events.ModelGpuUsed))]
    assert len(often) <= 6 * (seconds / run_folder.PROGRESS_EVERY_S + 1) + 8 + 4
    assert [e for e in kept if getattr(e, "done", False)] == [e for e in found if getattr(e, "done", False)]
    told = [event for event in kept if isinstance(event, events.DataRead) and event.rank == 0]
    assert all(
        later.time - earlier.time <= run_folder.PROGRESS_EVERY_S + 1 for earlier, later in itertools.pairwise(told)
    )
    assert replay(kept) == replay(found)
    assert (run_store.last(path) is not None) == ended


@pytest.mark.parametrize(("size", "lines"), [(4, 230), (1_024, 12)])
def test_what_ranks_use_is_saved_less_often_later(size, lines):
    """Ranks report every five seconds for an hour. Few of the reports are saved, but the last ones are."""
    started = events.RunStarted(100.0, "used", "t", "c", size, "local", "plain", "all")
    ranks = (0, size - 1)
    found = [
        events.RankUsed(50, at, 8, 10**9, time=100.0 + at, rank=rank) for at in range(5, 3600, 5) for rank in ranks
    ]
    path = save("used", [started, *found, events.RunFinished(3_800.0, "finished")]).path
    kept = list(run_store.events_of_kind(path, events.RankUsed))
    assert len(kept) <= 2 * lines
    assert {*kept[-2:]} == {*found[-2:]}
    assert [rank.used for rank in run_store.load(path).ranks] == [rank.used for rank in replay([started, *found]).ranks]


def test_what_fewer_ranks_use_after_a_restart():
    """A report of a rank that the next attempt no longer has is saved before this attempt."""
    started = events.RunStarted(100.0, "fewer", "t", "c", 3, "local", "plain", "all")
    used = [events.RankUsed(50, 1, 8, 9, time=at, rank=2) for at in (101.0, 102.0)]
    gpus = [events.GpuUsed("0", "A", 1, 2, 3, time=at, rank=2) for at in (101.0, 102.0)]
    later = [events.AttemptStarted(103.0, 2, 2), events.Notice(110.0, "x"), events.RunFinished(111.0, "finished")]
    path = save("fewer", [started, events.AttemptStarted(100.5, 1, 3), *used, *gpus, *later]).path
    assert run_store.load(path).size == 2


def test_a_run_that_a_newer_version_saved():
    """Events of unknown kinds are skipped."""
    path = save("newer", [*story("newer", ended=False)]).path
    with (path / run_store.EVENTS).open("a", encoding="utf-8") as file:
        file.write('{"type": "SomethingNew", "time": 3.0, "rank": 0}\n')
        file.write(events.to_json(events.RunFinished(4.0, "finished")) + "\n")
    assert run_store.load(path).outcome == "finished"
    assert run_store.last(path) is not None


def test_what_a_killed_driver_last_knew():
    """If the driver was killed, the saved progress of a reader is only a few seconds old."""
    found = reading(60, ended=False)
    folder = run_folder.RunFolder("killed")
    folder.seen(found, RunRecord())
    now = run_store.load(folder.path).ranks[0].readings[0].now
    assert now is not None
    assert found[-1].time - now.time <= run_folder.PROGRESS_EVERY_S + 1
    folder.ended(RunRecord())


def test_of_plans_the_last_is_kept():
    """Thousands of short epochs do not fill the disk with their plans; the record is the same."""
    pieces = tuple(events.Piece(number, 0, 10) for number in range(500))
    found = [event for event in reading(20, ended=True) if not isinstance(event, events.DataRead)]
    start = len(found) - 6
    epochs = [(epoch, rank) for epoch in range(1, 1001) for rank in (0, 1)]
    plans = [events.DataPlanned(0, epoch, pieces, time=100 + epoch / 50, rank=rank) for epoch, rank in epochs]
    found = [*found[:start], *plans, *found[start:]]
    path = save("plans", found).path
    kept = [event for event in run_store._events(path) if isinstance(event, events.DataPlanned)]
    assert len(kept) <= 2 * (20 / run_folder.PROGRESS_EVERY_S + 2)
    assert run_store.load(path).ranks == replay(found).ranks


def test_what_data_a_run_has_read():
    """Each data set is listed once, in the order of opening. Messages that look like such an event are not listed."""
    opened = [
        events.DataOpened(reader, name, "parquet", time=100.0, rank=rank)
        for rank in range(3)
        for reader, name in enumerate(("/data/digits", '{"type": "DataOpened", "name": 1}'))
    ]
    said = events.UserMessage('\n{"type": "DataOpened", "name": "no"}\n', time=100.0, rank=0)
    start = events.RunStarted(99.0, "reads", "t", "c", 3, "local", "plain", "all")
    path = save("reads", [start, said, *opened, *opened]).path
    assert run_store.data(path) == ["/data/digits", '{"type": "DataOpened", "name": 1}']
    assert run_store.data(save("none", [start]).path) == []
    file = path / run_store.EVENTS
    file.write_bytes(file.read_bytes()[:-20])
    assert len(run_store.data(path)) == 2


def test_the_runs_that_have_read_a_table(capsys):
    """They are listed by the table's version, whether its name or its path was given, each once."""
    read = [("db.sales", "9 (aa)"), ("/tables/sales/", "10 (bb)"), ("sales2", "10 (bb)"), ("sales", "cc")]
    for run, (name, version) in zip("abcd", read, strict=True):
        opened = [events.DataOpened(0, name, "parquet", version=version, time=100.0, rank=rank) for rank in (0, 1)]
        save(run, [events.RunStarted(99.0, run, f"cell {run}", "c", 2, "local", "plain", "all"), *opened])
    found = readers("sales")
    assert [run_id for run_id, _, _ in found] == ["b", "a", "d"]
    show_readers("sales", found)
    shown = capsys.readouterr().out
    assert "3 saved runs" in shown
    assert all(text in shown for text in ("10 (bb)", "cell b", "cell d"))
    with pytest.raises(OptionsError, match=r"\bales\b"):
        readers("ales")


def test_only_the_beginning_of_a_run_is_looked_through(monkeypatch):
    """Only the beginning of the file is searched, even if this cuts a line."""
    start = events.RunStarted(99.0, "long", "t", "c", 3, "local", "plain", "all")
    opened = [events.DataOpened(number, f"data {number}", "parquet", time=100.0, rank=0) for number in range(50)]
    path = save("long", [start, *opened]).path
    monkeypatch.setattr(run_store, "LOOKED_THROUGH_BYTES", 5_000)
    found = run_store.data(path)
    assert found == [f"data {number}" for number in range(len(found))]
    assert 5 < len(found) < 30


def test_every_event_survives_json():
    """from_json() is the inverse of to_json(), except for the bytes of output."""
    for event in story("x"):
        found = json.loads(events.to_json(event))
        if isinstance(event, events.Output):
            found["data"] = event.data
        assert events.from_json({**found, "later": 1}) == event


def test_every_record_survives_json():
    """A snapshot has everything that a record has, except for what is in files."""
    curves = {"loss": ((1.0, 0.5), (2.0, 0.25))}
    failure = events.Failure("exception", "x", (events.CodeFrame("<cell>", 3, "f", in_cell=True),), "Traceback …", "")
    more: list[events.Event] = [
        events.AttemptStarted(3.0, 1, 2, "step-5", 5, 3),
        events.CommandFailed("ls", 2, time=3.0, rank=1),
        events.CheckpointSaved("/c", "step-6", 6, 100, time=3.0, rank=0),
        events.InputRequested(1, "name?", time=3.0, rank=0),
        events.AttemptEnded(3.5, 1, "lost", 1),
        events.ItemsPlanned(4.0, 2, 1, 9, 1),
        events.SearchBegan(4.0, "loss", "min", (events.Searched("lr", 0.1), events.Searched("c", choices=("a",)))),
        events.ItemStarted(4.1, 0, "x", 0, 1, {"lr": 0.5, "c": "a"}),
        events.Metrics({"loss": 0.5}, step=1, time=4.2, rank=0),
        events.ItemStarted(4.2, 1, "y", 1),
        events.ItemEnded(4.3, 0, "finished", "1", metrics={"loss": 0.5}, curves=curves),
        events.ItemEnded(4.4, 1, "failed", failure=failure),
        events.SearchEnded(4.5, {"lr": 1.0}),
        events.StreamBegan(5.0, "rate", ("model",)),
        events.BatchEnded(5.1, 0, 100, training_s=0.5, saved=True),
        events.LogsCut(6.0, 100, 7),
    ]  # fmt: skip
    after = RunRecord()
    for event in [*story("x", ended=False), *more]:
        after = apply(after, event)
        line = snapshots.to_json(snapshots.Snapshot(after, is_cut=True))
        assert line.encode().startswith(snapshots.BEGIN_OF_CUT)
        assert snapshots.from_json(json.loads(line)) == snapshots.Snapshot(after, is_cut=True)
    assert snapshots.from_json({"is_cut": False, "record": {"later": 1}}).record == RunRecord()


def test_a_run_that_an_older_version_saved():
    """Events without captured names and versions can be read, as can captured names with fields of a later version."""
    started = json.loads(events.to_json(story("x")[0]))
    older = {name: value for name, value in started.items() if name not in ("captured", "versions")}
    found = events.from_json(older)
    assert (found.captured, found.versions, found.run_id) == ((), (), "x")
    started["captured"][0]["later"] = 1
    assert events.from_json(started) == story("x")[0]


def test_the_folder_is_the_user_s_alone():
    """Others cannot list or read a run."""
    assert save("private", story("private")).path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("cut", range(0, 400, 23))
def test_a_record_that_was_cut_off(cut):
    """Whatever a killed driver has left of its last lines, the other lines can be read, and the run has no end."""
    path = save("cut", story("cut")).path
    file = path / run_store.EVENTS
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - cut - 2])
    assert run_store.load(path).run_id == "cut"
    assert run_store.first(path).title == "cell"
    assert run_store.last(path) is None


def test_a_record_whose_last_event_is_output():
    """A driver that was killed while ranks were printing leaves a run without an end, which prune() can handle."""
    events = story("killed")
    at = max(index for index, event in enumerate(events) if type(event).__name__ == "Output")
    path = save("killed", events[: at + 1]).path
    assert run_store.last(path) is None
    run_store.prune(keep=0)
    assert path.exists()


def test_logs_that_were_cut_off():
    """If a log is shorter than the record says, the part that exists is read."""
    path = save("short", story("short")).path
    (path / run_store.log_name(0)).write_bytes(b"on")
    (path / run_store.log_name(1)).unlink()
    assert run_store.load(path).ranks[0].size_bytes == 2


@pytest.mark.parametrize(
    "damage",
    [b"\xff\xfe", b"\0" * 600, b"\n1\n[2]\n{}\n", b'\n{"type": "RunStarted", "time": 1}\n'],
    ids=["not UTF-8", "zeros", "other JSON", "missing fields"],
)
@pytest.mark.parametrize("at", [0, 930])
def test_a_damaged_record(damage, at):
    """The other events are read, a notice says what is wrong, and the run hides no other run and can be removed."""
    other, path = save("2026-01-01", story("2026-01-01", title="other")).path, save("2026-01-02", story("x")).path
    file = path / run_store.EVENTS
    data = file.read_bytes()
    file.write_bytes(data[:at] + damage + data[at + len(damage) :])
    assert "damaged" in run_store.load(path).notices[-1].text
    assert run_store.load(path).outcome == "failed"
    assert run_store.find("other") == other
    assert run_store.data(path) in (["digits"], [])
    assert run_store.last(path) is not None
    run_store.prune(keep=0)
    assert run_store.saved() == []


def test_an_event_whose_line_is_damaged_may_be_needed_by_others():
    """If the event that began a run is lost, the events of its ranks are left out."""
    path = save("headless", story("headless")[1:]).path
    saved = run_store.load(path)
    assert (saved.size, saved.outcome) == (0, "failed")
    assert "damaged" in saved.notices[-1].text


def test_an_empty_record():
    """A run whose first line was never written still has a row in the list."""
    path = save("empty", []).path
    assert run_store.first(path).title == "?"
    assert run_store.last(path) is None
    assert run_store.load(path).size == 0


def test_the_ranks_in_the_list(capsys, monkeypatch):
    """%runs says on how many ranks of a warm gang a cell ran."""
    monkeypatch.setenv("COLUMNS", "120")
    for name, ranks in (("all", ()), ("some", (0, 2))):
        save(name, [events.RunStarted(100.0, name, "t", "c", 3, "local", "plain", "all", ranks=ranks)])
    MAGICS["runs"].run(None, "")
    found = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert "2 of 3 local" in found["some"]
    assert " 3 local" in found["all"]


def test_logs_of_items(capsys):
    """%logs prints what an item wrote. If the item does not exist, or if a rank is named too, it says so."""
    start, *_ = story("items")
    found = [start, events.ItemsPlanned(1.0, 1), events.ItemStarted(1.1, 3, "x", 0), story("items")[3]]
    save("items", found)
    MAGICS["logs"].run(None, "--item 3")
    assert capsys.readouterr().out == "one\nbad \\xff\n"
    with pytest.raises(OptionsError, match=r"not started .*item 4"):
        MAGICS["logs"].run(None, "--item 4")
    with pytest.raises(OptionsError, match="--rank or --item"):
        MAGICS["logs"].run(None, "--item 3 --rank 0")


def test_the_last_lines_of_a_log(capsys):
    """The states of a progress bar are one line."""
    save("bar", [story("bar")[0], events.Output("stdout", b"one\ntwo\n1 %\r2 %\r3 %\n", time=1.3, rank=0)])
    MAGICS["logs"].run(None, "--rank 0 --tail 2")
    assert capsys.readouterr().out == "two\n1 %\r2 %\r3 %\n"


def test_a_log_has_no_lines_of_bars_that_removed_themselves(capsys):
    output = b"one\n\n1 %\r    \r\nouter\n\r inner\x1b[A\n\r      \x1b[A\router\n\r1 %\r    \r"
    save("bar", [story("bar")[0], events.Output("stderr", output, time=1.3, rank=0)])
    MAGICS["logs"].run(None, "--rank 0")
    assert capsys.readouterr().out == "one\n\nouter\n\r inner\r\r      \x1b[A\router\n"


@pytest.mark.parametrize("ending", ["", "\n"])
@pytest.mark.parametrize("block", [1, 3, 7, 1_000])
def test_only_the_end_of_a_long_log_is_read(monkeypatch, block, ending):
    """The last lines do not depend on how the file is read. The beginning of the file is not read."""
    monkeypatch.setattr(rank_logs, "BLOCK_BYTES", block)
    path = save("long", story("long")[:1]).path
    lines = ["one\n", "\n", "two\r3\n", f"four{ending}"]
    (path / run_store.log_name(0)).write_text("".join(lines), newline="")
    for count in range(6):
        assert run_store.log(path, 0, count) == "".join(lines[max(0, 4 - count) :])
    with (path / run_store.log_name(0)).open("r+b") as file:
        file.truncate(2**40)  # a sparse file, which is larger than the memory
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    assert run_store.log(path, 0, 1) == "last\n"


def test_the_logs_of_a_run_that_has_been_removed():
    """A result says that its logs have been removed, instead of returning an empty log."""
    path = save("gone", story("gone")).path
    result = RunResult({}, {}, run_store.load(path))
    assert result.logs(1) == "two"
    run_store.prune(keep=0)
    with pytest.raises(DataError, match=r"run gone\b"):
        result.logs(1)


def test_a_saved_run_in_a_terminal(capsys):
    """%runs RUN also shows what the run has noted, for example that a part of its record is missing."""
    save("noted", story("noted"))
    MAGICS["runs"].run(None, "noted")
    assert capsys.readouterr().out.endswith("\nsparkring: look\n")


def test_the_list_has_the_last_metrics(capsys):
    """They are in the event that ends a run, so the list does not read all reports."""
    start, *rest = story("measured", ended=False)
    live = recorder.Recorder(Quiet(), start)
    live.add([*rest, events.Metrics({"loss": 0.25, "acc": 0.75}, step=2, time=1.9, rank=1)])
    live.close("finished")
    assert dict(run_store.last(Path(live.record.log_folder)).measured) == metrics.means(live.record)
    MAGICS["runs"].run(None, "--sort loss")
    headers, _, row = capsys.readouterr().out.splitlines()
    assert {"loss", "acc"} <= set(headers.split())
    assert row.startswith("measured")
    with pytest.raises(OptionsError, match="no such column"):
        MAGICS["runs"].run(None, "--sort no")
    MAGICS["runs"].run(None, "--where 'loss > 1'")
    assert mentions(capsys.readouterr().out, "no run", "filter")


def test_finding_runs(monkeypatch):
    """A run is found by the beginning or the end of its id, or by its title; an empty word means the newest."""
    names = ["2026-01-01_00-00-00_aaaa", "2026-01-02_00-00-00_bbbb", "2026-01-02_00-00-01_cccc"]
    assert run_store.find("") is None
    for name in names:
        save(name, story(name, title=f"title of {name[-4:]}"))
    assert [path.name for path in run_store.saved()] == names[::-1]
    assert run_store.find("").name == names[2]
    assert run_store.find("2026-01-01").name == names[0]
    assert run_store.find("bbbb").name == names[1]
    assert run_store.find("title of aaaa").name == names[0]
    assert run_store.find("nothing") is None
    # Another kernel may remove a run while the titles are compared.
    there = run_store.saved()
    monkeypatch.setattr(run_store, "saved", lambda: [run_store.home() / "removed", *there])
    assert run_store.find("title of aaaa").name == names[0]


def test_new_ids_are_new():
    """Two runs that start in the same second do not share a folder."""
    assert len({run_store.new_id() for _ in range(100)}) > 95


def test_pruning_keeps_the_newest_and_what_is_going_on():
    """Old runs are removed. Runs without an end are removed only if nothing has been written to them for a day."""
    for number in range(6):
        save(f"run-{number}", story(f"run-{number}", ended=number not in (0, 1)))
    long_ago = time.time() - run_store.ABANDONED_AFTER_S - 60
    os.utime(run_store.home() / "run-1" / run_store.EVENTS, (long_ago, long_ago))
    run_store.prune(keep=2)
    assert [path.name for path in run_store.saved()] == ["run-5", "run-4", "run-0"]


def test_how_much_is_kept_is_a_setting(monkeypatch):
    """After a large run, the oldest runs are removed until all runs together are small enough; the new run stays."""
    for number in range(6):
        save(f"run-{number}", story(f"run-{number}", ended=number != 1))
        (run_store.home() / f"run-{number}" / "large").write_bytes(bytes(1_100_000))
    newest = run_store.home() / "run-5"
    monkeypatch.setenv("SPARKRING_KEEP_GB", "0.0045")
    run_store.prune()
    run_store.prune(newest=run_store.home() / "gone")
    assert len(run_store.saved()) == 6
    run_store.prune(newest=newest)
    assert [path.name for path in run_store.saved()] == ["run-5", "run-4", "run-3", "run-1"]
    monkeypatch.setenv("SPARKRING_KEEP_GB", "0.0001")
    run_store.prune(newest=newest)
    assert [path.name for path in run_store.saved()] == ["run-5", "run-1"], "run-1 may be in progress"
    for name, value in (
        ("SPARKRING_KEEP_GB", "ten"),
        ("SPARKRING_KEEP_RUN_MB", "-1"),
        ("SPARKRING_KEEP_RUNS", "0"),
        ("SPARKRING_KEEP_RUNS", "1.5"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(LaunchError, match=rf"{name} must be a .*number .*, not '{value}'"):
                run_folder.RunFolder("another")
            run_store.prune()
    for number in range(4):
        save(f"small-{number}", story(f"small-{number}"))
    monkeypatch.setenv("SPARKRING_KEEP_RUNS", "3")
    run_store.prune()
    assert [path.name for path in run_store.saved()] == ["small-3", "small-2", "small-1", "run-1"]


def test_deleting_runs(capsys):
    now = time.time()
    for name, days, is_ended in (("old", 40, True), ("older", 50, True), ("killed", 60, False), ("new", 1, True)):
        begun = events.RunStarted(now - days * 86400, name, f"the {name}", "x", 2, "local", "plain", "all")
        save(name, [begun, *([events.RunFinished(begun.time + 9, "finished")] if is_ended else [])])
    with pytest.raises(OptionsError, match=r"run .*'nothing'"):
        MAGICS["runs"].run(None, "--delete nothing")
    with pytest.raises(OptionsError, match=r"run killed .*progress .*another kernel"):
        MAGICS["runs"].run(None, "--delete killed")
    MAGICS["runs"].run(None, "--delete 'the new'")
    assert capsys.readouterr().out.startswith("deleted new (")
    MAGICS["runs"].run(None, "--delete-older 30d")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("deleted 2 runs (")
    assert mentions(second, "1 run", "not")
    assert [path.name for path in run_store.saved()] == ["killed"]


class Killed(BaseException):
    """The kernel is killed."""


@pytest.fixture
def small(monkeypatch):
    """Make all limits small, and compress only when a test asks for it."""
    monkeypatch.setenv("SPARKRING_KEEP_RUN_MB", "0.02")
    monkeypatch.setattr(run_folder, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(run_store, "END_BYTES", 500)
    for name, value in (("RECENT_LINES", 40), ("TAIL_LINES", 10), ("METRICS_KEPT", 100)):
        monkeypatch.setattr(record, name, value)
    for module in (run_store, compression):
        monkeypatch.setattr(module, "LOOKED_THROUGH_BYTES", 1_000)
    monkeypatch.setattr(compression, "LARGE_FILE_BYTES", 500)
    monkeypatch.setattr(recorder, "compress_in_background", lambda: None)


def numbered(first: int, count: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(first, first + count))


def recorded(run_id: str, found: Sequence[events.Event], *, size: int = 2) -> recorder.Recorder:
    live = recorder.Recorder(Quiet(), events.RunStarted(1.0, run_id, "cell", "c", size, "local", "plain", "all"))
    for event in found:
        live.add([event])
    return live


def printed(count: int) -> list[events.Event]:
    """Return events of two ranks that print `count` lines each, sometimes without the end of a line, and report."""
    found: list[events.Event] = [events.RankStarted(1.0, rank, "h", rank) for rank in (0, 1)]
    for at in range(0, count, 10):
        data = numbered(at, 10)
        for piece in (data[:25], data[25:]):
            found += [events.Output("stdout", piece, time=2.0 + at, rank=rank) for rank in (0, 1)]
        found.append(events.Metrics({"loss": float(at)}, step=at, time=2.0 + at, rank=0))
    return found


def assert_logs(path: Path, count: int, left_out_lines: int) -> None:
    """Check that the first and the last lines are there, and that what is missing is counted right."""
    missing = 0
    for rank in (0, 1):
        text = run_store.log(path, rank)
        gap = re.search(r"… (\d+ B|[\d.]+ kB) \(([\d,]+) lines\) left out …\n", text)
        assert gap is not None
        begin, end = text[: gap.start()], text[gap.end() :]
        lines = int(gap[2].replace(",", ""))
        assert (begin + numbered(begin.count("\n"), lines).decode() + end).encode() == numbered(0, count)
        missing += lines
        assert begin.startswith("line 0\n")
        every = text.splitlines(keepends=True)
        for tail in (0, 1, 20, end.count("\n"), end.count("\n") + 1, len(every) - 1, len(every) + 1):
            assert run_store.log(path, rank, tail) == "".join(every[max(0, len(every) - tail) :])
    assert missing == left_out_lines


def test_a_run_that_prints_and_reports_a_lot(small):
    """The folder stays small while the run goes on. Its logs say what is missing, and its record is the live one."""
    live = recorded("long", [])
    path = Path(live.record.log_folder)
    largest = 0
    for event in printed(4_000):
        live.add([event])
        largest = max(largest, run_store.size_bytes(path))
    assert live.record.left_out_lines > 4_000
    assert largest < 20_000 + 90_000, "the logs, and the events with up to two records"
    assert run_store.load(path) == live.record
    assert_logs(path, 4_000, live.record.left_out_lines)
    assert run_store.last(path) is None
    assert len(list(run_store.events_of_kind(path, events.Metrics))) == len(live.record.metrics)
    assert "left out)" in describe.log_path(live.record)
    assert sum("SPARKRING_KEEP_RUN_MB sets" in notice.text for notice in live.record.notices) == 1
    ended = live.close("finished")
    for _ in range(2):
        assert run_store.load(path) == ended
        assert_logs(path, 4_000, ended.left_out_lines)
        assert run_store.last(path).outcome == "finished"
        compression.compress(path)


def test_only_runs_that_have_ended_are_compressed(small):
    """A run that another kernel may still write is left alone, however long it has been silent."""
    going = recorded("going", printed(200))
    os.utime(Path(going.record.log_folder, run_store.EVENTS), (0, 0))
    ended = save("ended", [events.RunStarted(1.0, "ended", "cell", "c", 2, "local", "plain", "all"), *printed(200)])
    with (ended.path / run_store.EVENTS).open("a") as file:
        file.write(events.to_json(events.RunFinished(9.0, "finished")) + "\n")
    compression.compress_in_background().join()
    assert (ended.path / "rank-0.log.gz").exists()
    assert not any(Path(going.record.log_folder).glob("*.gz"))
    going.close("finished")


@pytest.mark.parametrize("kill", range(12))
def test_a_kernel_that_is_killed_while_it_compresses(small, monkeypatch, kill):
    """Whatever it has done, the run can be read, and is compressed later."""
    monkeypatch.setenv("SPARKRING_KEEP_RUN_MB", "0.06")
    live = recorded("long", printed(1_600))
    live.close("finished")
    path = Path(live.record.log_folder)
    before = run_store.load(path), [run_store.log(path, rank) for rank in (0, 1)], run_store.data(path)
    size_bytes = run_store.size_bytes(path)
    left = kill

    def counted(change):
        def changed(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return change(*arguments, **options)

        return changed

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        with pytest.raises(Killed):
            compression.compress(path)
    for _ in range(2):
        after = run_store.load(path), [run_store.log(path, rank) for rank in (0, 1)], run_store.data(path)
        assert after == before
        assert run_store.last(path)._replace(measured=()) == events.RunFinished(live.record.ended, "finished")
        for part in path.glob("*.part"):
            with pytest.raises(FileExistsError):
                compression.compress(path)
            os.utime(part, (0, 0))
        compression.compress(path)
    assert not list(path.glob("*.part"))
    assert run_store.size_bytes(path) < size_bytes / 3


def test_what_is_kept_of_the_logs_of_items(small):
    """An item's log says what is missing from it, and has no output of another item in the same slot."""
    found: list[events.Event] = [events.ItemsPlanned(1.0, 2), *(events.RankStarted(1.0, r, "h", r) for r in (0, 1))]
    for item in range(60):
        found.append(events.ItemStarted(2.0, item, f"item {item}", item % 2))
        begin = numbered(1000 * item, 60)
        found += [
            events.Output("stdout", begin[at : at + 50], time=2.0, rank=item % 2) for at in range(0, len(begin), 50)
        ]
        found.append(events.ItemEnded(3.0, item, "finished"))
    live = recorded("items", found)
    path = Path(live.record.log_folder)
    assert run_store.load(path) == live.record
    assert run_store.item_log(path, 60) is None
    assert run_store.item_log(path, 59).endswith("line 59058\nline 59059\n")
    logs = [run_store.item_log(path, item) for item in range(60)]
    assert all(logs)
    for item, text in enumerate(logs):
        own = numbered(1000 * item, 60).decode()
        assert text == own or "left out …\n" in text
        assert all(line in own for line in text.splitlines() if "left out" not in line)
    assert "… earlier output" in logs[10]


def test_displays_that_are_replaced_leave_no_files(small):
    """A figure that is drawn again and again fills neither the folder nor the record."""
    shown = [
        events.Displayed(number, "image/png", b"picture %d" % number, "", 9, True, time=2.0, rank=0)
        for number in range(1, 9)
    ]
    live = recorded("shown", shown)
    path = Path(live.record.log_folder)
    assert [file.name for file in (path / run_store.DISPLAYS).iterdir()] == ["rank-0-8.png"]
    assert run_store.load(path) == live.record


def test_quick_cells_of_a_warm_gang_go_first(monkeypatch):
    """Many quick cells do not displace yesterday's training run. The newest runs stay, even if they are quick cells."""
    monkeypatch.setattr(run_store, "NEWEST", 3)
    save("run-00", story("run-00"))
    for number in range(1, 12):
        name = f"run-{number:02}"
        begun = events.RunStarted(1.0, name, "x", "x", 2, "local", "plain", "all", warm=number != 5)
        save(name, [begun, events.RunFinished(1.01, "finished")])
    run_store.prune(keep=5)
    assert [path.name for path in run_store.saved()] == ["run-11", "run-10", "run-09", "run-05", "run-00"]


def test_a_full_disk_is_told_once(monkeypatch):
    """The first write that fails causes a notice. After that, nothing is written, and no error is raised."""
    start, *rest = story("full")
    live = recorder.Recorder(Quiet(), start)

    def full(event: events.Event) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(live._folder, "_write", full)
    for event in rest:
        live.add([event])
    live.close("failed")
    notices = [notice.text for notice in live.record.notices if "No space left on device" in notice.text]
    assert len(notices) == 1
    assert "SPARKRING_HOME" in notices[0]
    assert run_store.load(Path(live.record.log_folder)).size == 2


class Follower(Observer):
    """Notes what it is told. In the methods in `fails`, it then raises an error."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.seen_events: list[events.Event] = []
        self.records: list[record.RunRecord] = []
        self.fails = fails

    def _note(self, method: str, record: record.RunRecord) -> None:
        self.calls.append(method)
        self.records.append(record)
        if method in self.fails:
            raise ValueError(f"no {method}")

    def started(self, record):
        self._note("started", record)

    def seen(self, events, record):
        self.seen_events += events
        self._note("seen", record)

    def ended(self, record):
        self._note("ended", record)


def test_an_observer_from_elsewhere_follows_a_run(monkeypatch):
    """An observer is told about every event of each run, in order, with the record after the events."""
    followers: list[Follower] = []
    monkeypatch.setattr(recorder, "OBSERVERS", [lambda: followers.append(Follower()) or followers[-1]])
    start, *rest = story("followed", ended=False)
    live = recorder.Recorder(Quiet(), start, ["a notice"])
    live.add(rest)
    live.add([])  # nothing has happened
    live.close("failed", "why", 1)
    (follower,) = followers
    assert follower.calls == ["started", *["seen"] * (len(follower.calls) - 2), "ended"]
    assert (follower.records[0].run_id, follower.records[0].outcome) == (start.run_id, None)
    assert follower.records[-1] == live.record
    first, notice, *others, last = follower.seen_events
    assert (first, notice.text, others) == (start, "a notice", rest)
    assert last == events.RunFinished(live.record.ended, "failed", "why", 1, (("loss", 0.5),))
    recorder.Recorder(Quiet(), start._replace(run_id="next")).close("finished")
    assert [observer.records[0].run_id for observer in followers] == ["followed", "next"]


@pytest.mark.parametrize("fails", ["started", "seen", "ended", "seen ended"])
def test_an_observer_that_fails_is_dropped(monkeypatch, fails):
    """One notice names it. The run, what is saved and the other observers are as without it; it is told of the end."""
    follower, other = Follower(fails), Follower()
    monkeypatch.setattr(recorder, "OBSERVERS", [lambda: follower, lambda: other])
    start, *rest = story("goes-on", ended=False)
    live = recorder.Recorder(Quiet(), start)
    for event in rest:
        live.add([event])
    live.close("finished")
    about = [notice.text for notice in live.record.notices if "Follower" in notice.text]
    assert [mentions(text, "Follower", f"ValueError: no {fails.split()[0]}") for text in about] == [True]
    assert follower.calls.count("seen") == ("seen" in fails or other.calls.count("seen") * (fails == "ended"))
    assert follower.calls[-1] == "ended"
    assert other.records[-1] == live.record
    saved = run_store.load(Path(live.record.log_folder))
    assert saved == live.record or fails == "ended"  # the saved run has already been closed
    assert saved.outcome == "finished"


def test_an_observer_that_cannot_be_made(monkeypatch):
    monkeypatch.setattr(recorder, "OBSERVERS", [lambda: 1 / 0, Follower])
    live = recorder.Recorder(Quiet(), story("goes-on")[0])
    (notice,) = live.record.notices
    assert mentions(notice.text, "test_an_observer_that_cannot_be_made.<locals>.<lambda>", "ZeroDivisionError")
    assert run_store.load(Path(live.close("finished").log_folder)) == live.record


def test_a_home_that_is_not_absolute(monkeypatch, tmp_path):
    """`~` is the user's folder. If the notebook changes its folder, the run is still saved where it began."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SPARKRING_HOME", "~/mine")
    assert run_store.home() == tmp_path / "mine" / "runs"
    monkeypatch.setenv("SPARKRING_HOME", "here")
    monkeypatch.chdir(tmp_path)
    folder = run_folder.RunFolder("x")
    monkeypatch.chdir("/")
    folder.seen(story("x"), RunRecord())
    folder.ended(RunRecord())
    assert run_store.log(folder.path, 1) == "two"


def test_a_home_that_cannot_be_written(monkeypatch, tmp_path):
    """A SPARKRING_HOME that is a file is an error."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARKRING_HOME", str(tmp_path / "file"))
    with pytest.raises((OSError, SparkringError)):
        run_folder.RunFolder("x")


def test_a_home_that_cannot_be_written_to(monkeypatch):
    """If runs cannot be saved, one sentence names the folder and what to set."""
    monkeypatch.setenv("SPARKRING_HOME", os.devnull)
    with pytest.raises(SparkringError, match=r"cannot .*saved .* /dev/null/runs/.*Set SPARKRING_HOME"):
        run_folder.RunFolder("2026-01-01_00-00-00_aaaa")
