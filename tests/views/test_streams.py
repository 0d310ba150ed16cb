"""Tests how views show a run that trains on a stream: its batches, rates and times, and what its checkpoints cover."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from matplotlib.figure import Figure
from texts import mentions

from sparkring.history import describe, events, metrics
from sparkring.history.record import RunRecord, replay
from sparkring.views import attempts, charts, checkpoints, html, live
from sparkring.views.figure import stacked_bars
from sparkring.views.sections import stream as section
from sparkring.views.terminal import TerminalView

BEGAN = events.StreamBegan(100.0, "`<i>df</i>`", ("model", "optimizer"))


def begun(checkpoint_dir: str = "/live") -> list[events.Event]:
    started = events.RunStarted(
        100.0,
        "run",
        "stream df",
        "%%stream df\nx",
        2,
        "local",
        "torch",
        "all",
        warm=True,
        checkpoint_dir=checkpoint_dir,
    )
    attempt = [events.AttemptStarted(100.0, 1, 2)] if checkpoint_dir else []
    return [started, *attempt, *(events.RankStarted(100.0, rank, "host", 10 + rank) for rank in range(2))]


def batch(number: int, how: events.BatchEnding = "trained", **fields: Any) -> list[events.Event]:
    """Return the events of a batch of 100 rows, which ends after one second."""
    time, rows = 101.0 + number, 0 if how == "empty" else 100
    times = {"waiting_s": 0.5, "moving_s": 0.05, "reading_s": 0.05, "training_s": 0.3, "saving_s": 0.1}
    loss = [events.Metrics({"loss": 1 / (1 + number)}, step=number, time=time, rank=rank) for rank in range(2)]
    return [*(loss if rows else []), events.BatchEnded(time, number, rows, how, **times | fields)]


def streamed(numbers: Sequence[int], *more: events.Event, checkpoint_dir: str = "/live", **fields: Any) -> RunRecord:
    found = [event for number in numbers for event in batch(number, **fields)]
    return replay([*begun(checkpoint_dir), BEGAN, *found, *more])


def test_the_line():
    """The line says which batch is the last one, and which batches the weights in the last checkpoint have seen."""
    record = streamed(range(3), *batch(3, saved=True), *batch(4), *batch(5, "empty"))
    assert describe.stream(record) == "batch 5 · 500 rows · 80 rows/s · saved after batch 3 · 1 empty"
    assert describe.outcome(record) == describe.stream(record)
    assert describe.stream(streamed([0])) == "batch 0 · 100 rows · 100 rows/s · not saved yet"
    assert describe.stream(streamed(range(2), checkpoint_dir="")) == "batch 1 · 200 rows · 100 rows/s"
    assert describe.stream_total(record) == "5 batches · 500 rows · saved after batch 3"
    early = replay([events.CheckpointSaved("/live", "6", 6, 9, time=106.5, rank=0)], record)
    assert "saved after batch 5" in describe.stream(early), "the end of batch 6 is not recorded yet"
    over = replay([events.RunFinished(107.0, "finished")], record)
    assert describe.closing(over, 200.0).startswith("ended after batch 5 · 500 rows · 83 rows/s · saved after batch 3")
    failed = replay([events.RunFinished(107.0, "failed", "DataError: no x")], record)
    assert mentions(describe.closing(failed, 200.0), "DataError: no x", "7.0 s", "batch 5")


def test_before_the_first_batch():
    assert describe.outcome(replay(begun()[:2])) == "starting on 2 ranks", "no rank has to connect to a warm gang"
    assert describe.outcome(streamed([])) == "waiting for the first batch"
    resumed = replay([*begun(), BEGAN._replace(saved=45)])
    assert mentions(describe.outcome(resumed), "batch 45", "first batch")
    assert describe.stream_figures(resumed) == [("saved", "after batch 45")]
    ended = replay([events.RunFinished(103.0, "finished")], streamed([]))
    assert describe.outcome(ended) == "ended before the first batch"
    for record in (resumed, ended):
        for final in (False, True):
            assert "time per batch" not in html.panel(record, now=103.0, final=final)


def test_what_is_not_known_is_not_shown():
    """The rate at which rows arrive and the backlog are shown only if the source knows its backlog."""
    names = [name for name, _ in describe.stream_figures(streamed(range(3)))]
    assert names == ["batch", "rows", "trained", "saved"]
    record = streamed(range(2), *batch(2, backlog_rows=400), *batch(3, backlog_rows=550))
    assert ("backlog", "550 rows (2.8 s)") in describe.stream_figures(record)
    record = replay([event for n in range(4) for event in batch(n, backlog_rows=400 + 50 * n)], streamed([]))
    assert dict(describe.stream_figures(record)) == {
        "batch": "3",
        "rows": "400",
        "trained": "100 rows/s",
        "arriving": "150 rows/s",
        "backlog": "550 rows (2.8 s)",
        "saved": "not yet",
    }
    assert " · backlog 550 rows (2.8 s) · " in describe.stream(record)
    over = replay([events.RunFinished(104.0, "finished")], record)
    assert [name for name, _ in describe.stream_figures(over)][:3] == ["last batch", "rows", "trained, on average"]


def test_rates_are_those_of_the_last_minute():
    """Rows that were trained an hour ago, and rows that were trained again, do not count."""
    slow = [
        each._replace(time=each.time + 3600) for n in range(3) for each in batch(n + 10, "replayed" if n else "trained")
    ]
    record = replay(slow, streamed(range(10)))
    assert describe.stream_rates(record) == (0.0, None)
    assert dict(describe.stream_figures(record))["replayed"] == "2 batches"


def test_a_stream_that_is_idle():
    record = streamed(range(3))
    assert describe.stream_idle(record, 104.0) == ""
    assert describe.stream_idle(record, 143.5) == "no batch for 40 s"
    assert describe.stream_idle(streamed([0, 30]), 145.0) == "", "its batches are always that far apart"


@pytest.mark.parametrize("form", ["stacked", "final"])
def test_the_saved_view(form):
    """The view has the figures, the times of the parts, and no bar. Names from the user are escaped."""
    more = [events.RunFinished(104.0, "finished")] if form == "final" else []
    record = streamed(range(3), *batch(3, "replayed"), *more)
    shown = html.panel(record, now=104.0, final=form == "final")
    assert mentions(shown, "`&lt;i&gt;df&lt;/i&gt;`", "model, optimizer", "every batch")
    assert "<i>" not in shown
    assert "mean of 4 batches" in shown
    assert "width:" not in section.html(record, 104.0, form), "an endless stream has no percentage"
    assert ("data:image/png" in section.html(record, 104.0, form)) == (form == "final")
    assert ("trained again" in shown) == (form == "final")


def test_times_of_the_parts():
    record = streamed(range(3)).stream
    assert record is not None
    assert describe.parts_s(record) == pytest.approx((0.15, 0.15, 0.9, 0.3, 0.0, 1.5))
    assert describe.shares(record) == ["5 %", "5 %", "30 %", "10 %", "0 %", "50 %"]
    assert describe.charted(record) == describe.PARTS
    waiting = streamed(range(3), waiting_s=20.0, reading_s=0.001).stream
    assert waiting is not None
    assert describe.charted(waiting) == describe.PARTS[:-1], "the waiting would dwarf the other parts"
    assert describe.shares(waiting)[1] == "< 1 %"


def test_the_time_of_other_cells_is_a_part_of_its_own():
    """It is neither moving nor waiting, and is shown only if there has been any."""
    record = streamed(range(3), *batch(3, others_s=6.8))
    busy_s = record.stream.busy_s
    assert record.stream.others_s == 6.8
    assert busy_s == pytest.approx(4 * 0.5)
    assert dict(zip(describe.PARTS, describe.shares(record.stream), strict=True))["other cells"] == "63 %"
    finished = replay([events.RunFinished(110.0, "finished")], record)
    assert "other cells" in html.panel(finished, now=110.0, final=True)
    finished = replay([events.RunFinished(110.0, "finished")], streamed(range(3)))
    assert "other cells" not in html.panel(finished, now=110.0, final=True)


def test_the_page_is_told_of_each_batch_once():
    feed = live.Feed()

    def told(record: RunRecord, now: float) -> Iterator[dict[str, Any]]:
        return (each for each in feed.news(record, now) if each["kind"] == "stream")

    (first,) = told(streamed(range(3)), 104.0)
    assert [row[0] for row in first["rows"]] == [0, 1, 2]
    assert first["rows"][0] == (0, 100, "trained", 0.05, 0.05, 0.3, 0.1, 0.0, 0.5, 1.0, False, None, 1.0)
    assert first["end"] == 3
    record = streamed(range(3), *batch(3), *batch(4, "empty"))
    (then,) = told(record, 110.0)
    assert [(row[0], row[2]) for row in then["rows"]] == [(3, "trained"), (4, "empty")]
    assert then["end"] == 5
    assert not [*told(record, 120.0)], "nothing has changed"
    long = streamed(range(300))
    (whole,) = (each for each in live.whole(long, 500.0) if each["kind"] == "stream")
    assert (len(whole["rows"]), whole["end"], whole["rows"][-1][0]) == (whole["kept"], 300, 299)


def test_the_state_has_no_percentage():
    """The cell may report totals of its own, but a stream has no end."""
    reports = [events.Metrics({"loss": 1.0}, step=1, steps=4, time=104.0, rank=rank) for rank in range(2)]
    state = live.state_message(streamed(range(3), *reports), 104.0)
    assert (state["fraction"], state["left"], state["waiting"], state["streamed"]) == (None, "", "", True)
    assert state["progress"].startswith("batch 2 · 300 rows")
    assert state["noun"] == "batch"
    assert state["ranks"]["done"] == [None, None]


def test_metrics_are_by_batch():
    record = streamed(range(4))
    drawn = charts.charts(record)
    assert drawn["axis"] == "batch"
    assert mentions(drawn["charts"][0]["words"], "loss", "1", "0.25", "0.25", "batch 3")
    assert metrics.noun(record._replace(stream=None), metrics.table(record)) == "step"
    assert ">batch</th>" in html.panel(record, now=104.0, final=False)


def test_attempts_and_checkpoints_are_by_batch():
    lost = [
        events.CheckpointSaved("/live", "2", 2, 9, time=103.0, rank=0),
        events.RankFailed(103.5, 1, events.Failure("signal", "killed by SIGKILL")),
        events.AttemptEnded(103.5, 1, "rank 1 was killed by SIGKILL", 1),
        events.AttemptStarted(104.0, 2, 2, "2", 2),
        *(events.RankStarted(104.5, rank, "host", 20 + rank) for rank in range(2)),
        *(events.CheckpointRestored("/live", "2", 2, time=105.0, rank=rank) for rank in range(2)),
    ]
    record = streamed(range(3), *lost)
    first, second = attempts.story(record)
    assert "batch 2 was saved 0.5 s earlier" in first.line
    assert "continued after batch 2" in second.line
    assert "attempt 2 continues after batch 2 on 2 ranks" in attempts.news(record.attempts[:1], record)
    assert checkpoints.saved_words(record, checkpoints.recorded(record)[0], 106.0).startswith("saved batch 2, 3 s ago")
    assert describe.stream(record).endswith("saved after batch 2")


def test_the_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream, clock = Terminal(), itertools.count()
    view = TerminalView(stream, clock=lambda: float(next(clock)))
    record = streamed(range(3), *batch(3, saved=True))
    view.refresh(record)
    view.refresh(record)
    assert "batch 3 · 400 rows · 100 rows/s · saved after batch 3" in stream.getvalue()
    view.close(replay([events.RunFinished(105.0, "finished")], record))
    assert mentions(stream.getvalue(), "ended after batch 3", "400 rows", "100 rows/s", "saved", "5.0 s")


def test_a_short_stream_is_not_a_quick_cell():
    """Even a stream that ends within a second keeps its panel."""
    record = streamed([], events.RunFinished(100.5, "finished"), checkpoint_dir="")
    assert not describe.quick(record)


def test_the_saved_view_of_a_background_run_is_created_at_once():
    """A stream runs on a warm gang, but its view must exist before its cell returns."""
    shown: list[bool] = []
    view = html.HtmlView(clock=lambda: 0.0, show=lambda bundle, name, update: shown.append(update), early=True)
    view.refresh(streamed([]))
    assert shown[:1] == [False]
    assert len(shown) == 2, "the panel and the displays below it"


@pytest.mark.parametrize(("batches", "labels"), [(range(47, 167), ["50", "75", "100"]), (range(3, 9), ["4", "8"])])
def test_the_saved_chart_has_labels_at_round_batches(batches, labels):
    bars = section.described_tab(streamed(batches).stream, streamed(batches)).bars
    axes = Figure().add_subplot()
    stacked_bars(axes, bars)
    assert [label.get_text() for label in axes.get_xticklabels()][: len(labels)] == labels
    assert axes.get_xticks()[0] == int(labels[0]) - batches[0]
