"""Tests how views show runs of items: the progress, and the running, failed and best items."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from texts import mentions

from sparkring.history import describe, events, item_records, lines, metrics, run_store
from sparkring.history.events import CodeFrame, Failure
from sparkring.history.record import RunRecord, replay
from sparkring.views import displays, html, live
from sparkring.views.figure import Drawing
from sparkring.views.sections import items as items_section
from sparkring.views.sections import search as search_section
from sparkring.views.terminal import TerminalView

CODE = "%%foreach shop in shops\n1 / 0"
AT = CodeFrame("<cell>", 2, "<module>", in_cell=True)
FAILED = Failure("exception", "ValueError: <b>no</b> data", (AT,), error="builtins.ValueError")


def begun(total: int | None = 300, at_once: int = 2) -> Iterator[events.Event]:
    yield events.RunStarted(100.0, "run", "shop in shops", CODE, at_once, "local", "plain", "all")
    yield events.ItemsPlanned(100.0, at_once, 1, total)
    for rank in range(at_once):
        yield events.RankStarted(100.0, rank, "host", 10 + rank)


def item(number: int, ending: events.ItemEnding | None = "finished", slot: int = 0) -> Iterator[events.Event]:
    """Return the events of an item that reports a metric. The item ends after one second, unless `ending` is None."""
    time = 100.0 + number
    yield events.ItemStarted(time, number, f"shop='<i>{number}</i>'", slot)
    yield events.Metrics({"mape": number / 10}, time=time, rank=slot)
    if ending is not None:
        yield events.ItemEnded(time + 1, number, ending, str(number), FAILED if ending == "failed" else None)


def running() -> RunRecord:
    """Return a record of 300 items. After 12 s, one has failed, ten have finished, and two are running."""
    found = [*begun(), *item(0, "failed")]
    for number in range(1, 11):
        found += item(number)
    return replay([*found, *item(11, None), *item(12, None, slot=1)])


def ended() -> RunRecord:
    found = [*begun(12), *item(0, "failed"), *item(1, "again")]
    for number in range(1, 12):
        found += item(number)
    return replay([*found, events.RunFinished(112.0, "failed", "11 of 12 items finished · 1 failed")])


def test_how_far_it_is():
    record = running()
    assert describe.items_progress(record, 122.0) == "11 of 300 items · 1 failed · ■■ 2 at once · 30 items/min"
    assert describe.items_left(record, 122.0) == "", "no item has ended for much longer than usual"
    assert describe.items_left(record, 112.0) == "2 min 24 s left"
    assert describe.facts(record) == ["2 at once on this machine"]
    endless = replay([*begun(None), *item(0), *item(1, None)])
    assert describe.items_progress(endless, 200.0) == "1 item · ■□ 2 at once"
    assert describe.items_left(endless, 200.0) == ""
    assert describe.items_progress(replay(begun()), 200.0) == "0 of 300 items · □□ 2 at once", "nothing is known yet"
    assert describe.took(ended(), 200.0) == "12 s · 1.0 items/s"


def test_a_record_keeps_the_last_items_of_many(monkeypatch):
    """The counts include the items that the record no longer keeps."""
    monkeypatch.setattr(item_records, "ITEMS_KEPT", 3)
    found = replay([*begun(None), *item(0, "failed"), *item(1), *item(2), *item(3), *item(4, None)]).items
    assert found is not None
    assert [each.item for each in found.known] == [1, 2, 3, 4]
    assert (found.finished, found.failed, found.done) == (3, 1, 4)


@pytest.mark.parametrize("final", [False, True])
def test_html(final):
    """Text from users and items is escaped. Items that are running or have failed are shown."""
    shown = html.panel(ended() if final else running(), now=122.0, final=final)
    assert "ValueError: &lt;b&gt;no&lt;/b&gt; data" in shown
    assert "&lt;i&gt;0&lt;/i&gt;" in shown
    assert "<i>" not in shown
    assert "<b>no" not in shown
    assert ("▶ running" in shown, "Lowest and highest mape" in shown) == (not final, final)
    assert "rank 0" not in shown, "the ranks of a pool are replaced, so they are not shown"
    if not final:
        assert "width:3.7%" in shown


def test_lines_are_labelled_with_the_item():
    """Even an unfinished line belongs to the item that wrote it, and the next item begins a new line."""

    def output(data: bytes, slot: int) -> events.Output:
        return events.Output("stdout", data, time=110.0, rank=slot)

    record = replay(
        [
            *begun(),
            *item(5, None, slot=1),
            output(b"one\nno end", 1),
            events.ItemEnded(110.0, 5, "finished"),
            output(b"after it\n", 1),
            *item(7, None, slot=1),
            *item(8, None, slot=0),
            output(b"two\n", 1),
            output(b"three\nhalf", 0),
        ]
    )
    assert [(line.rank, line.text) for line in record.recent] == [
        (5, "one"),
        (5, "no end"),
        (5, "after it"),
        (7, "two"),
        (8, "three"),
    ]
    assert [(line.rank, line.text) for line in lines.pending(record)] == [(8, "half")]
    assert [line.rank for line in record.ranks[1].tail] == [1] * 4, "a rank's tail has the number of the rank"


def test_displays_are_labelled_with_the_item():
    """An item does not replace displays of another item in the same process. Displays are in the items' order."""
    found = [*begun()]
    for number in (2, 1):
        shown = events.Displayed(1, "text/html", f"<b>{number}</b>".encode(), f"picture {number}", item=number, rank=0)
        found += [*item(number, None), shown, events.ItemEnded(110.0, number, "finished")]
    record = replay(found)
    drawn = displays.bundle(record)
    assert drawn is not None
    assert drawn["text/plain"] == "[item 1] picture 1\n[item 2] picture 2"
    assert len({run_store.display_name(each) for each in record.displays}) == 2


def test_the_time_left_does_not_count_what_only_the_first_items_wait_for():
    """The first item of each slot takes 60 s, because it loads a model, and each later one takes 5 s."""
    found = [*begun(20)]
    for number in range(6):
        slot, turn = number % 2, number // 2
        began = 100.0 if not turn else 155.0 + 5 * turn
        found += [events.ItemStarted(began, number, "", slot), events.ItemEnded(160.0 + 5 * turn, number, "finished")]
        record = replay(found)
        if number < 2:
            assert describe.items_left(record, 161.0) == describe.items_rate(record, 161.0) == "", "too early to tell"
    assert describe.items_left(record, 170.0) == "35 s left"
    assert describe.items_rate(record, 170.0) == "24 items/min"


def test_items_that_score_rows():
    """Rows and rows/s take the place of slots and items/s, and the time in which the model is loaded does not count."""
    loading = events.ItemsPlanned(100.0, 2, noun="partition", waits_for="the model is being loaded on 1 machine")
    record = replay([events.RunStarted(100.0, "run", "t", "c", 2, "spark", "plain", "all"), loading])
    assert mentions(describe.items_progress(record, 106.0), "model", "being loaded", "1 machine")
    assert "rank" not in html.panel(record, now=106.0, final=False)
    of_files = [events.ItemsPlanned(106.0, 1, noun="part", total=1), events.ItemStarted(106.0, 0, "part-0.parquet", 0)]
    assert "being loaded" in describe.items_progress(replay(of_files, record), 107.0)
    of_files.append(events.Metrics({"rows": 0}, time=107.0))
    assert "first batch" in describe.items_progress(replay(of_files, record), 108.0)
    found = [events.ItemsPlanned(106.0, 2, total=8)]
    for number in range(4):
        found += [events.ItemStarted(106.0, number, f"partition {number}", number % 2)]
        found += [events.Metrics({"rows": 7500.0, "rows/s": 2500.0}, time=109.0, rank=number % 2)]
        found += [events.ItemEnded(109.0, number, "finished", seconds=3.0)] if number < 2 else []
    record = replay(found, record)
    assert describe.items_progress(record, 112.0) == "2 of 8 partitions · 30,000 rows · 2 running · 5,000 rows/s"
    assert "7,500" in html.panel(record, now=112.0, final=False)
    record = replay([events.RunFinished(112.0, "finished")], record)
    assert describe.took(record, 112.0) == "12 s · 5,000 rows/s"


def test_after_the_last_item_the_ranks_end():
    found = [*begun(1), events.ItemStarted(100.0, 0, "", 0), events.ItemEnded(101.0, 0, "finished")]
    assert describe.items_progress(replay(found), 103.0) == "1 item · ending the ranks"


def test_the_page_is_told_of_each_item_once():
    """Only items that have changed, for example items with new metrics, are sent to the page again."""
    feed = live.Feed()

    def told(record: RunRecord, now: float) -> list[list[object]]:
        return [row for message in feed.news(record, now) if message["kind"] == "items" for row in message["rows"]]

    rows = told(running(), 122.0)
    assert [(row[0], row[3]) for row in rows] == [
        (0, "failed"),
        *[(number, "finished") for number in range(1, 11)],
        (11, "running"),
        (12, "running"),
    ]
    failed = (
        0,
        "shop='<i>0</i>'",
        {},
        "failed",
        None,
        "host",
        1.0,
        {"mape": 0.0},
        "0",
        f"{FAILED.summary} (cell line 2: `1 / 0`)",
    )
    assert rows[0] == (*failed, 0.0, "", "report", {})
    later = replay([events.ItemEnded(130.0, 12, "finished")], running())
    assert [(row[0], row[6]) for row in told(later, 130.0)] == [(12, 18.0)]
    later = replay([events.Metrics({"mape": 9.0}, time=130.0, rank=0)], later)
    assert [(row[0], row[6]) for row in told(later, 132.0)] == [(11, None)]
    later = replay([events.ItemEnded(140.0, 11, "finished")], later)
    (state,) = (each for each in live.whole(later, 140.0) if each["kind"] == "state")
    assert (state["fraction"], state["pooled"]) == (13 / 300, "item")
    assert state["progress"] == "13 of 300 items · 1 failed · □□ 2 at once · 34 items/min"
    assert state["left"] == "8 min 29 s left"


def test_the_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    view = TerminalView(stream)
    view.refresh(running())
    assert "11 of 300 items · 1 failed · ■■ 2 at once · " in stream.getvalue()
    view.close(ended())
    assert "sparkring: failed: 11 of 12 items finished · 1 failed · 12 s · 1.0 items/s" in stream.getvalue()


# ── Their curves ──────────────────────────────────────────────────────────────


def curved(number: int, *reports: events.Metrics, ending: events.ItemEnding | None = "finished") -> list[events.Event]:
    """Return the events of an item that sends these reports."""
    found = [events.ItemStarted(100.0, number, f"shop={number}", 0), *reports]
    return [*found, *([] if ending is None else [events.ItemEnded(102.0, number, ending, "")])]


def steps(count: int, *names: str, **fields: Any) -> list[events.Metrics]:
    return [
        events.Metrics(dict.fromkeys(names, 1 / step), step=step, time=101.0, rank=0, **fields)
        for step in range(1, count + 1)
    ]


def test_items_have_curves():
    """Curves are by step or by epoch, or by the number of the report if neither is known."""
    found = replay(
        [
            *begun(),
            *curved(0, *steps(3, "loss")),
            *curved(
                1, *steps(3, "loss", epoch=1), *steps(2, "loss", epoch=2), events.Metrics({"loss": math.nan}, epoch=3)
            ),
            *curved(2, *steps(2, "loss", epoch=1, epochs=1)),
            *curved(3, *(events.Metrics({"loss": value}) for value in (3.0, 2.0))),
        ]
    ).items
    assert found is not None
    assert [(each.by, each.curves) for each in found.known] == [
        ("step", {"loss": ((1.0, 1.0), (2.0, 1 / 2), (3.0, 1 / 3))}),
        ("epoch", {"loss": ((1.0, 1 / 3), (2.0, 1 / 2))}),
        ("step", {"loss": ((1.0, 1.0), (2.0, 1 / 2))}),
        ("report", {"loss": ((1.0, 3.0), (2.0, 2.0))}),
    ]


def test_many_items_keep_fewer_points(monkeypatch):
    monkeypatch.setattr(item_records, "POINTS_KEPT", 60)
    told = steps(30, *"abcdefgh")
    found = replay(
        [*begun(), *curved(0, *told), *curved(1, *told), *curved(2, *told), *curved(3, *told, ending=None)]
    ).items
    assert found is not None
    assert [list(each.curves) for each in found.known] == [[*"abcdef"]] * 4
    assert [len(each.curves["a"]) for each in found.known] == [10, 5, 4, 30]
    for each in found.known:
        assert (each.curves["a"][0], each.curves["a"][-1]) == ((1.0, 1.0), (30.0, 1 / 30))
    monkeypatch.setattr(live, "RUNNING_POINTS", 60)
    *_, row = next(
        each for each in live.whole(replay(begun())._replace(items=found), 103.0) if each["kind"] == "items"
    )["rows"]
    assert [len(curve) for curve in row[-1].values()] == [10] * 6, "all points are sent when the item has ended"


def test_curves_are_saved_as_pictures():
    """There is a picture for each metric with curves. A metric that was reported only once or twice has no curve."""
    found = [*begun(3), *curved(0, *steps(5, "<i>loss", "acc")), *curved(1, *steps(4, "<i>loss"), ending="failed")]
    found[-1] = found[-1]._replace(failure=FAILED)
    record = replay([*found, *curved(2, *steps(2, "mape")), events.RunFinished(103.0, "failed")])
    shown = html.panel(record, now=103.0, final=True)
    assert shown.count('src="data:image/png;base64,') == 2
    assert "<b>&lt;i&gt;loss</b> by step" in shown
    assert 'alt="<i>loss of 2 items"' in shown, "an attribute may have any text"
    assert "blue: finished · red: failed" in shown
    assert "data:image" not in html.panel(record._replace(outcome=None), now=103.0, final=False)


def test_a_value_that_is_not_a_number_is_not_extreme():
    found = [*begun(9, 1)]
    for number, value in enumerate([5.0, math.nan, 1.0, 7.0, math.inf, 2.0, 3.0, 6.0, 4.0]):
        found += [events.ItemStarted(100.0, number, str(number), 0)]
        found += [events.Metrics({"mape": value}, time=101.0, rank=0), events.ItemEnded(102.0, number, "finished")]
    shown = html.panel(replay([*found, events.RunFinished(103.0, "finished")]), now=103.0, final=True)
    tables = re.split(r"<small[^>]*>(?:lowest|highest) mape<", shown)[1:]
    numbers = [re.findall(r"<tr[^>]*><td[^>]*>(\d)<", table)[:3] for table in tables]
    assert numbers == [["2", "5", "6"], ["3", "7", "0"]]


# ── A search ──────────────────────────────────────────────────────────────────


def trial(number: int, values: list[float], ending: events.ItemEnding | None, **parameters: float | str) -> list:
    """Return the events of a trial that reports these values of val_loss, one at each step."""
    found: list[events.Event] = [events.ItemStarted(100.0, number, f"lr={number}", 0, parameters=parameters)]
    for step, value in enumerate(values, 1):
        found.append(events.Metrics({"val_loss": value, "<b>": 1.0}, step=step, time=101.0, rank=0))
    return [*found, *([] if ending is None else [events.ItemEnded(102.0, number, ending, "")])]


def searched(*, over: bool) -> RunRecord:
    """Return a search of four trials: two have finished, one was pruned, and one diverges."""
    space = (
        events.Searched("lr", 1e-4, 1e-1, log=True),
        events.Searched("act", choices=("relu", "<i>tanh</i>")),
        events.Searched("width", choices=("64", "128", "$not math$ \\frac")),
    )
    found = [
        *begun(4, 1),
        events.SearchBegan(100.0, "val_loss", "min", space),
        *trial(0, [3.0, 2.0, 1.5], "finished", lr=1e-4, act="relu", width=64),
        *trial(1, [3.0, 2.5, 0.03125], "finished", lr=1e-2, act="<i>tanh</i>", width=128),
        *trial(2, [4.0], "pruned", lr=1e-1, act="relu", width=64),
        *trial(3, [9.0, 1e9], "finished" if over else None, lr=1e-3, act="relu", width=128),
    ]
    if over:
        found += [events.SearchEnded(103.0, {"act": 0.25, "lr": 0.75}, 34), events.RunFinished(103.0, "finished")]
    return replay(found)


def test_the_best_trial_is_said_everywhere():
    assert describe.items_progress(searched(over=False), 103.0) == (
        "3 of 4 trials · 1 pruned · best val_loss 0.03125 (trial 1) · ■ 1 at once"
    )
    record = searched(over=True)
    assert describe.outcome(record) == "4 trials: 3 finished · 1 pruned · best val_loss 0.03125 (trial 1)"
    stream = io.StringIO()
    TerminalView(stream).close(record)
    assert stream.getvalue().splitlines()[-2:] == [
        "sparkring: importance: lr 75 %, act 25 % (from 34 finished trials)",
        "sparkring: 4 trials: 3 finished · 1 pruned · best val_loss 0.03125 (trial 1) in 3.0 s · 1.3 trials/s",
    ]
    (state,) = (each for each in live.whole(record, 103.0) if each["kind"] == "state")
    assert state["progress"] == describe.items(record), "the panel says so also after the run"
    assert metrics.means(record) == {"val_loss": 0.03125}, "a list of runs shows the best trial"


def test_a_search_as_pictures():
    """The saved form has three pictures, and one for each parameter. Text from users is escaped."""
    shown = html.panel(searched(over=True), now=103.0, final=True)
    assert shown.count('src="data:image/png;base64,') == 6
    assert 'alt="lr, act, width and val_loss of all trials"' in shown
    assert "4 trials: 3 finished · 1 pruned · best val_loss 0.03125 (trial 1)" in shown
    assert "grey: pruned · blue: finished · orange: best" in shown
    first = re.search(r"best val_loss</small></caption>.*?<td[^>]*>(\d+)</td>", shown)
    assert first is not None
    assert first[1] == "1", "the best trial"
    assert "importance: lr 75 %, act 25 % (from 34 finished trials)" in shown
    assert "<i>tanh" not in shown
    assert "data:image" not in html.panel(searched(over=False), now=103.0, final=False)


def test_the_best_value_so_far_is_a_number(monkeypatch):
    """A trial whose metric is NaN is in no picture, as in the live panel."""
    drawings: list[Drawing] = []
    monkeypatch.setattr(search_section, "pictures", lambda found: drawings.extend(found) or [""] * len(found))
    trials = [trial(0, [math.nan], "finished"), trial(1, [3.0, 2.0], "finished"), trial(2, [4.0], "finished")]
    found = [*begun(3, 1), events.SearchBegan(100.0, "val_loss", "min"), *itertools.chain(*trials)]
    html.panel(replay([*found, events.RunFinished(103.0, "finished")]), now=103.0, final=True)
    axes = Figure().add_subplot()
    drawings[1].draw(axes)
    assert axes.lines[-1].get_xydata().tolist() == [[1, 2], [2, 2]]


def test_pruned_trials_are_not_among_final_values():
    """Their last values are far worse, because these trials have been pruned at once."""
    found = [*begun(8, 1), events.SearchBegan(100.0, "val_loss", "min")]
    for number in range(8):
        found += trial(number, [90.0], "pruned") if number > 2 else trial(number, [90.0, 1 + number / 10], "finished")
    record = replay(found)
    search, known = record.items.search, record.items.known
    axes = Figure().add_subplot()
    search_section._history(axes, search, known)
    assert axes.lines[0].get_xydata().tolist() == [[0, 1.0], [1, 1.1], [2, 1.2]]
    assert axes.get_ylim()[1] < 2


def test_the_page_is_told_of_a_search():
    feed = live.Feed()

    def told(record: RunRecord, now: float, kind: str) -> list[live.Message]:
        return [message for message in feed.news(record, now) if message["kind"] == kind]

    (search,) = told(searched(over=False), 103.0, "search")
    assert (search["metric"], search["mode"], search["importance"]) == ("val_loss", "min", [])
    assert search["parameters"][0] == {"name": "lr", "low": 1e-4, "high": 1e-1, "log": True, "choices": []}
    assert json.loads(json.dumps(search)) == search
    assert not told(searched(over=False), 110.0, "search"), "an unchanged search was sent twice"
    (search,) = told(searched(over=True), 120.0, "search")
    assert search["importance"] == [("lr", 0.75, "75 %"), ("act", 0.25, "25 %")]
    assert search["basis"] == "(from 34 finished trials)"
    rows = [row for each in live.whole(searched(over=True), 120.0) if each["kind"] == "items" for row in each["rows"]]
    assert rows[1][2] == {"lr": 0.01, "act": "<i>tanh</i>", "width": 128}
    assert search["best"] == "dict(lr=0.01, act='<i>tanh</i>', width=128)"
    assert rows[1][-2:] == (
        "step",
        {"val_loss": [(1.0, 3.0), (2.0, 2.5), (3.0, 0.03125)], "<b>": [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]},
    )
    assert rows[2][-1] == {"val_loss": [(1.0, 4.0)]}, "only the search's metric may have a single point"


def test_a_trial_keeps_a_limited_curve():
    found = replay([*begun(1, 1), events.SearchBegan(100.0, "val_loss", "max"), *trial(0, [*range(5000)], None)]).items
    assert found is not None
    (running,) = found.running
    curve = running.curves["val_loss"]
    assert 32 <= len(curve) <= 64
    assert (curve[0], curve[-1]) == ((1.0, 0.0), (5000.0, 4999.0))


def test_charts_of_searches_follow_the_rules_of_the_page():
    """tests/views/panel/search.test.mjs tests the page with the same cases."""
    cases = json.loads((Path(__file__).parent / "search.json").read_text(encoding="utf-8"))
    for values, mode, expected in cases["extent"]:
        assert search_section.extent(values, mode) == tuple(expected)
    for curves, expected in cases["curves_extent"]:
        assert search_section.curves_extent(curves) == pytest.approx(tuple(expected))
    for parameter, value, expected in cases["place"]:
        assert search_section.place(events.Searched("x", **parameter), value) == pytest.approx(expected)


def test_the_saved_curves_of_items_begin_where_the_items_did():
    """All curves begin at 1, far above most of their values."""
    found = [*begun(3)]
    for number in range(3):
        found.append(events.ItemStarted(100.0, number, "", 0))
        found += [events.Metrics({"loss": 0.1 + 0.9 / step**3}, step=step, time=101.0, rank=0) for step in range(1, 30)]
        found.append(events.ItemEnded(102.0, number, "finished", ""))
    axes = Figure().add_subplot()
    items_section._curves(axes, "loss", replay(found).items.known)
    assert axes.get_ylim()[1] > 1


def test_the_tab_of_metrics_has_those_of_the_items():
    def tab(record: RunRecord) -> str:
        [message] = [message for message in live.whole(record, 112.0) if message["kind"] == "sections"]
        return re.sub("<[^>]*>", " ", message["html"].get("metrics", ""))

    assert "lowest mape" in tab(running())
    assert "by mape" in tab(replay([*begun(), *item(1), *item(2, None)])), "few items are in one table"
    assert not tab(replay([*begun(), events.ItemStarted(100.0, 1, "", 0)]))
