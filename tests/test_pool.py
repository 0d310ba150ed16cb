"""Tests of independent runs on the driver's side. The members are threads of this process."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_launcher import CELL, Exit, FakeLauncher, FakeRank, Vanish
from texts import mentions
from waiting import DEADLINE_S

from sparkring.capture.content import digest
from sparkring.capture.packing import pack, unpack_names
from sparkring.capture.source_lines import keep_lines
from sparkring.checkpointing.results import KeptResults
from sparkring.engine.foreach import api as foreach_api
from sparkring.engine.foreach import item_execution, kept, pool, slot, slots
from sparkring.engine.foreach.items import Items, Targets
from sparkring.engine.foreach.meaning import meaning_of
from sparkring.engine.foreach.options import ForeachOptions
from sparkring.engine.foreach.run import ForeachSpec, prepare
from sparkring.engine.foreach.schedule import Item, ItemAttempt
from sparkring.engine.run import api
from sparkring.engine.run.polling import poll_until
from sparkring.engine.run.spec import Call, Cell
from sparkring.errors import ItemsFailed, LaunchError, OptionsError, RunFailed
from sparkring.history import describe, item_records, run_store
from sparkring.history.record import RunRecord
from sparkring.wire.messages import FunctionCall, Metrics, NextItem, Output, Script


def test_items_in_their_order(runs):
    """The values come in the items' order, whichever item ends first. The work is sent once to each process."""
    first = threading.Event()

    def cell(rank: FakeRank, item: int) -> int:
        first.wait(DEADLINE_S) if item == 0 else first.set()
        rank.tell(Output("stdout", f"item {item}\n".encode()))
        rank.tell(Metrics({"loss": item / 2}))
        return item * 10

    result = runs(cell, range(5))
    assert result.values == [0, 10, 20, 30, 40]
    assert len(runs.launched) == 2
    works = [rank.work for launcher in runs.launched for rank in launcher.ranks]
    assert [type(work.what) for work in works] == [FunctionCall, FunctionCall]
    table = result.table
    assert list(table.columns) == ["item", "state", "attempts", "seconds", "place", "loss", "value", "error"]
    assert list(table.item) == [0, 1, 2, 3, 4]
    assert set(table.state) == {"finished"}
    assert set(table.place) == {"host"}
    assert result.best("loss", mode="max").value == 40
    assert result.best("loss").value == 0
    with pytest.raises(OptionsError, match="have reported loss"):
        result.best("mape")
    record = run_store.load(run_store.find_saved(result.record.run_id))
    assert record.items == result.record.items, "a later kernel reads the same"
    assert (record.items.total, record.items.finished, record.items.running) == (5, 5, ())
    assert len(runs.view.record.items.ended) == 5


def test_the_table_of_many_items(runs, monkeypatch):
    """The result contains all items, even if the record keeps only the last ones."""
    monkeypatch.setattr(item_records, "ITEMS_KEPT", 100)

    def cell(rank: FakeRank, item: int) -> int:
        rank.tell(Metrics({"loss": item}))
        return item

    result = runs(cell, range(150), 1)
    assert len(result.record.items.ended) == 100
    assert set(result.table.state) == {"finished"}
    assert list(result.table.loss) == list(range(150))
    assert result.best("loss").value == 0


def test_an_item_takes_its_scripts_along():
    """The key of an item's result depends on its scripts' contents. Names that the scripts read are sent, too."""
    script = Script("{path}", "a.py", "/a.py", (("/a.py", "x = 1"),))
    found = [
        Items(["a.py"], Targets("path"), {"table": [1]}, scripts_of=lambda values, made=made: (made, ["table"]))
        for made in ((), (script,), (script._replace(parts=(("/a.py", "x = 2"),)),))
    ]
    taken = []
    for items in found:
        items.key_of = lambda values: digest(values)
        taken.append(items.take())
    assert len({item.key for item in taken}) == 3
    assert taken[1].scripts == (script,)
    namespace: dict[str, Any] = {}
    unpack_names(taken[1].parts[0], namespace, taken[1].parts[1:])
    assert (namespace["path"], namespace["table"]) == ("a.py", [1])
    assert taken[1].name == "path='a.py'"


def test_an_item_leaves_out_what_the_work_has():
    """The captured values are not sent again with each item that holds one of them."""
    data = {"large": [str(number) for number in range(10_000)]}
    namespace = {"data": data, "f": lambda: data}
    items = Items([(data, 1), ([data], namespace["f"]), ("other", [2])], Targets("a, b"), namespace)
    items.share(pack(namespace, namespace, numbered=True).objects, namespace)
    sizes = [len(item.parts[0]) for _ in range(3) if isinstance(item := items.take(), Item)]
    assert max(sizes) < 200


def test_a_view_that_fails_at_the_end(runs, monkeypatch):
    """If a view fails when it is closed, the result is still returned."""

    def close(record: RunRecord) -> None:
        raise OSError("the page is gone")

    monkeypatch.setattr(runs.view, "close", close)
    with pytest.warns(RuntimeWarning, match=r"no longer .*shown.*page .*gone"):
        result = runs(lambda rank, item: item, [1])
    assert result.values == [1]


def test_an_empty_list_starts_nothing(runs):
    result = runs(lambda rank, item: item, [])
    assert (result.values, len(result), len(result.table), list(runs.launched)) == ([], 0, 0, [])
    assert result.record.outcome == "finished"


def test_an_endless_iterable_is_taken_from_when_there_is_room(runs):
    """A run over an endless iterable can be stopped: running items are interrupted, and the results so far are kept."""
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield taken

    def cell(rank: FakeRank, item: int) -> int:
        if item > 7:
            rank.interrupted.wait(DEADLINE_S)
            raise KeyboardInterrupt
        return item

    def stop_when_full(record: RunRecord) -> None:
        if record.items is not None and (record.items.done, len(record.items.running)) == (7, 2):
            run.stop(wait=False)

    run = runs.in_background(cell, endless())
    runs.view.on_refresh = stop_when_full
    with pytest.raises(KeyboardInterrupt, match="7 of 9 items finished"):
        run.result(DEADLINE_S)
    result = api.last_result
    assert taken == 9
    assert result.values[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert list(result.table.state[7:]) == ["stopped"] * 2
    assert result.record.outcome == "interrupted"


def test_a_failed_item_leaves_the_others_alone(runs):
    """One error says how many items failed and why, with one line for each cause. All results are available."""

    def cell(rank: FakeRank, item: int) -> int:
        if item in (1, 2):
            raise ValueError(f"no data for {item}")
        if item == 5:
            raise Exit(signal=9)
        if item == 6:
            raise Vanish
        return item

    with pytest.raises(ItemsFailed) as caught:
        runs(cell, range(8))
    said = str(caught.value)
    assert mentions(
        said, "4 of 8 items failed", "4", "finished", "2", "ValueError", "no", "1", "fake_launcher.py", "line"
    )
    assert "): items 1, 2\n" in said
    assert mentions(said, "1", "killed", "SIGKILL", "item 5 (5)")
    assert caught.value.values == {0: 0, 3: 3, 4: 4, 7: 7}
    assert caught.value.record.outcome == "failed"
    result = api.last_result
    assert result.values == [0, None, None, 3, 4, None, None, 7]
    assert {number: failure.cause for number, failure in result.errors.items()} == {
        1: "exception",
        2: "exception",
        5: "signal",
        6: "lost",
    }
    assert list(result.table.attempts) == [1, 1, 1, 1, 1, 2, 2, 1], "an item whose process died is tried once more"
    assert result.record.items.again == 2


def test_retries_succeed(runs):
    """A retry runs in a different process from the first attempt. After an exception, only --retries causes a retry."""
    processes: dict[int, list[int]] = {}

    def cell(rank: FakeRank, item: int) -> int:
        processes.setdefault(item, []).append(rank.attempt)
        if len(processes[item]) < item:
            raise OSError("the store is busy")
        return item

    assert runs(cell, [1, 2, 3], retries=2).values == [1, 2, 3]
    assert [len(processes[item]) for item in (1, 2, 3)] == [1, 2, 3]
    assert all(before != after for each in processes.values() for before, after in itertools.pairwise(each))


def test_out_of_memory_is_tried_with_fewer_at_once(runs):
    """If one of three items at once runs out of memory, only one item runs at a time from then on."""
    three, told, lock, begun, running = threading.Barrier(3), threading.Event(), threading.Lock(), [], 0

    def wait_for_notice(record: RunRecord) -> None:
        if any("ran out of memory" in notice.text for notice in record.notices):
            told.set()

    runs.view.on_refresh = wait_for_notice

    def cell(rank: FakeRank, item: int) -> int:
        nonlocal running
        with lock:
            begun.append(item)
            running += 1
            is_first, is_alone = len(begun) <= 3, running == 1
        if is_first:
            three.wait(DEADLINE_S)
            if item:
                told.wait(DEADLINE_S)
        with lock:
            running -= 1
        if item == 0 if is_first else not is_alone:
            raise MemoryError
        return item

    result = runs(cell, range(6), 3)
    assert result.values == list(range(6))
    assert sorted(begun) == [0, 0, 1, 2, 3, 4, 5]
    assert any(mentions(notice.text, "1 item") for notice in result.record.notices)


def test_a_process_is_replaced(runs, monkeypatch):
    """A process is replaced after a number of items, or when its memory has grown too much."""
    assert runs(lambda rank, item: rank.attempt, range(5), 1, fresh_after=2).values == [1, 1, 2, 2, 3]
    runs.launched.clear()
    monkeypatch.setattr(slot.SlotSettings, "__new__", _with(slot.SlotSettings.__new__, growth_bytes=100))

    def cell(rank: FakeRank, item: int) -> int:
        rank.memory_bytes += 60
        return rank.attempt

    assert runs(cell, range(7), 1).values == [1, 1, 1, 2, 2, 2, 3]


def _with(make: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: make(*args, **{**kwargs, **more})


def test_ranks_without_an_item_end_first(runs, monkeypatch):
    """If ranks may have to wait for a slot to start, ranks without an item end while the last item is still running."""
    monkeypatch.setattr(slot.SlotSettings, "__new__", _with(slot.SlotSettings.__new__, queues=True))
    done = [threading.Event() for _ in range(3)]

    def cell(rank: FakeRank, item: int) -> list[bool]:
        done[item].set()
        if item:
            return []
        assert all(event.wait(DEADLINE_S) for event in done)
        return [
            each.ended.wait(DEADLINE_S) for launcher in runs.launched for each in launcher.ranks if each is not rank
        ]

    ended, *_ = runs(cell, range(3), 3).values
    assert ended
    assert all(ended)


def test_while_ranks_wait_to_start(runs, monkeypatch):
    """A notice says what they wait for, until all have started. It does not count: the number of items changes."""
    monkeypatch.setattr(slot.SlotSettings, "__new__", _with(slot.SlotSettings.__new__, queues=True))
    monkeypatch.setattr(slots, "SHORT_AFTER_S", 0.0)
    monkeypatch.setattr(FakeLauncher, "waits_for", lambda launcher: "2 of 2 task slots are busy")
    start, told, gone = FakeLauncher.start, threading.Event(), threading.Event()
    expected = "fewer than 2 items run at once until more ranks have started: 2 of 2 task slots are busy"

    def start_when_told(launcher: FakeLauncher, *args: Any) -> None:
        late = threading.Thread(target=lambda: told.wait(DEADLINE_S) and start(launcher, *args))
        start(launcher, *args) if launcher is runs.launched[0] else late.start()

    def look(record: RunRecord) -> None:
        notices = [notice.text for notice in record.notices]
        assert notices in ([], [expected])
        if notices and record.items.up == 1:
            told.set()
        if told.is_set() and not notices and not record.outcome:
            gone.set()

    monkeypatch.setattr(FakeLauncher, "start", start_when_told)
    runs.view.on_refresh = look
    assert runs(lambda rank, item: gone.wait(DEADLINE_S), range(2), 2).values == [True, True]
    assert not runs.view.record.notices


def test_an_item_that_takes_too_long(runs, monkeypatch):
    """The item is interrupted, and its process is replaced. Meanwhile, other items continue."""
    monkeypatch.setattr(item_execution, "TIMEOUT_GRACE_S", 0.1)

    def cell(rank: FakeRank, item: int) -> int:
        if item == 1:
            rank.interrupted.wait(DEADLINE_S)
            raise KeyboardInterrupt
        if item == 2:
            rank.ended.wait(DEADLINE_S)  # the item does not respond to the interrupt
        return rank.attempt

    with pytest.raises(ItemsFailed, match=r"2 × .*not end within 0.2 s: items 1, 2"):
        runs(cell, range(6), timeout_each_s=0.2)
    result = api.last_result
    assert {failure.cause for failure in result.errors.values()} == {"timed out"}
    assert set(result.by_item) == {0, 3, 4, 5}


@pytest.mark.parametrize(
    ("waits", "cause"), [(False, "interrupt"), (True, "lost")], ids=["has ended in time", "ends when interrupted"]
)
def test_the_item_behind_one_that_takes_too_long(waits, cause, watch, monkeypatch):
    """The next item was sent in advance. If it then ends with an interrupt, it has failed.

    If the interrupt may have been that of the time limit, the item is tried again.
    """
    monkeypatch.setattr(FakeRank, "give_back", lambda rank: None)  # the item begins before it can be given back
    sent, second = threading.Event(), threading.Event()

    def cell(rank: FakeRank) -> None:
        sent.wait(DEADLINE_S)
        if rank.request.what.seed:
            second.set()
            raise KeyboardInterrupt
        if waits:
            rank.interrupted.wait(DEADLINE_S)

    settings = slot.SlotSettings(lambda number: FakeLauncher(cell), timeout_each_s=0.05, ahead=True)
    found = slot.Slot(0, settings, lambda number: None)
    requests = [CELL._replace(run=CELL.run._replace(what=NextItem(seed=seed))) for seed in (0, 1)]
    attempts = [ItemAttempt(Item(number, str(number))) for number in (0, 1)]
    ended: list[slot.Ended] = []

    def poll(seconds: float) -> None:
        time.sleep(min(seconds, 0.002))
        found.poll()
        ended.extend(each for each in [found.ended()] if each is not None)

    try:
        found.start(attempts[0], requests[0])
        assert poll_until(lambda: found.running, time.monotonic() + DEADLINE_S, poll)
        found.start(attempts[1], requests[1])
        found.send()
        sent.set()
        if not waits:
            second.wait(DEADLINE_S)
            time.sleep(0.1)  # the driver may poll late
        assert poll_until(lambda: len(ended) == 2, time.monotonic() + DEADLINE_S, poll)
    finally:
        found.retire(kill=True)
        found.join()
    assert [each.failure and each.failure.cause for each in ended] == [None, cause]


def test_fail_fast(runs):
    """The first failure ends the run: items that have not begun never run."""

    third = threading.Event()

    def cell(rank: FakeRank, item: int) -> int:
        if item == 1:
            third.wait(DEADLINE_S)
            raise ValueError("no")
        if item > 1:
            third.set()
            rank.interrupted.wait(DEADLINE_S)
            raise KeyboardInterrupt
        return item

    with pytest.raises(ItemsFailed, match=r"1 of 3 items failed \(1 finished, 1 stopped\)"):
        runs(cell, range(100), fail_fast=True)
    assert list(api.last_result.table.state) == ["finished", "failed", "stopped"]


def test_items_that_cannot_be_sent_or_taken(runs):
    """An item that cannot be sent fails, and the message says why. An error of the iterable itself ends the run."""
    with pytest.raises(ItemsFailed, match=r"cannot .*sent .*process: `item` is a `_thread\.lock`") as caught:
        runs(lambda rank, item: item, [1, threading.Lock(), 3])
    assert caught.value.values == {0: 1, 2: 3}
    assert list(api.last_result.table.state) == ["finished", "failed", "finished"]

    def broken():
        yield 1
        raise FileNotFoundError("stores.csv")

    with pytest.raises(RunFailed, match=r"FileNotFoundError: stores\.csv .*\b1 item\b") as caught:
        runs(lambda rank, item: item, broken())
    assert 'raise FileNotFoundError("stores.csv")' in str(caught.value)
    assert "foreach/pool.py" not in str(caught.value)
    assert api.last_result.values == [1]


def test_an_item_that_cannot_be_compared(runs, tmp_path, monkeypatch):
    """The item runs each time, and a notice says so. An item that contains itself can be compared."""
    monkeypatch.setattr("sparkring.capture.content._OBJECTS", 10)
    endless: list[Any] = []
    endless.append(endless)
    items, options = [1, endless, [{(at,): at} for at in range(20)]], {"checkpoint_dir": str(tmp_path / "kept")}
    for states in (["finished"] * 3, ["kept", "kept", "finished"]):
        result = runs(lambda rank, item: None, items, **options)
        assert list(result.table.state) == states
    assert any("cannot be compared" in notice.text for notice in result.record.notices)
    function = functools.partial(lambda rows, item: item, items.pop())
    result = runs(lambda rank, item: None, items, call=function, **options)
    assert any("are not noticed" in notice.text for notice in result.record.notices)


def test_targets_are_bound_as_by_for():
    assert Targets("a").bind([1, 2]) == {"a": [1, 2]}
    assert Targets("a, (b, *rest)").bind((1, "xyz")) == {"a": 1, "b": "x", "rest": ["y", "z"]}
    with pytest.raises(ValueError, match="not enough values"):
        Targets("a, b").bind([1])
    for wrong in ("a.b", "a[0]", "1", "f()", "a in b", "a: pass\nfor b"):
        with pytest.raises(OptionsError):
            Targets(wrong)


def test_an_item_that_does_not_fit_the_targets_fails(runs):
    runs.launched.cell = lambda rank, item: None
    work = Cell("\nx", {})
    spec = ForeachSpec(work, [(1,)], ForeachOptions(-1), Targets("x, y"))
    with pytest.raises(ItemsFailed, match=r"cannot .*unpacked .* `x, y`: not enough values .*unpack"):
        foreach_api.foreach_spec(spec, runs.view)


def test_processes_that_cannot_be_started(runs, monkeypatch):
    """The pool tries again, without counting an attempt of the item. If this keeps failing, an error says why."""
    monkeypatch.setattr(slots, "START_PAUSE_S", 0.01)
    runs.launched.refused = 2
    result = runs(lambda rank, item: item, [1])
    assert result.values == [1]
    assert list(result.table.attempts) == [1]
    assert "no more processes. sparkring will try again." in [notice.text for notice in result.record.notices]
    runs.launched.refused = 9
    with pytest.raises(LaunchError, match="no more processes"):
        runs(lambda rank, item: item, [1])
    assert runs.view.record.outcome == "failed"


def test_an_item_that_ends_when_the_last_start_fails(runs, monkeypatch, tmp_path):
    """An item that has ended is recorded and its result kept, even if the run fails at the same moment."""
    monkeypatch.setattr(slots, "STARTS_TRIED", 1)
    monkeypatch.setattr(slots, "LOOK_EVERY_S", 0.0)  # each time, poll both slots
    poll, ended = slot.Slot.poll, slot.Slot.ended
    finished = []

    def poll_or_fail(self):
        if self.number == 1 and finished:
            raise LaunchError("no more processes.")
        return poll(self)

    def note(self):
        result = ended(self)
        finished.extend([] if result is None else [self.number])
        return result

    monkeypatch.setattr(slot.Slot, "poll", poll_or_fail)
    monkeypatch.setattr(slot.Slot, "ended", note)

    def cell(rank: FakeRank, item: int) -> int:
        if item == 1:
            rank.ended.wait(DEADLINE_S)
        return item

    options = {"checkpoint_dir": str(tmp_path / "kept")}
    with pytest.raises(LaunchError, match="no more processes"):
        runs(cell, [0, 1], **options)
    assert api.last_result.table.state[0] == "finished"
    assert list(runs(cell, [0], 1, **options).table.state) == ["kept"]


def test_an_error_at_the_end_closes_the_record(runs):
    """If any error is raised after the last item, the run has failed, and leaves no files open."""
    run = foreach_api.open_items(prepare(ForeachSpec(Call(len), [1], ForeachOptions(-1))), runs.view)
    runs.launched.cell = lambda rank, item: item

    def full(values: Any) -> None:
        raise OSError("no space left")

    run.finish = full
    with pytest.raises(OSError, match="no space left"):
        foreach_api.carry_out_items(run)
    assert runs.view.record.outcome == "failed"
    assert api.last_result.values == [1]


def test_what_cannot_be_run():
    """Invalid arguments raise an error before anything starts."""
    for arguments, what in [
        ((len, 5), "needs something to iterate over, not int"),
        ((lambda: 1, [1]), "cannot be called with these arguments"),
    ]:
        with pytest.raises(OptionsError, match=what):
            foreach_api.foreach(*arguments)
    with pytest.raises(OptionsError, match=r"number .*items .*run .*once: -n -4 for processes here"):
        foreach_api.foreach(len, [], np=0)
    with pytest.raises(OptionsError, match="needs a --framework"):
        foreach_api.foreach(len, [], np_each=2)
    with pytest.raises(OptionsError, match=r"expected .*horovod, jax, plain"):
        foreach_api.foreach(len, [], framework="barrier")
    with pytest.raises(OptionsError, match=r"takes .*function, not int"):
        foreach_api.foreach(1, [])


# ── What is kept ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_what_is_missing_runs_again(runs, tmp_path):
    """A kept result is used only for the same item and code. Each of two equal items has its own result."""
    ran: list[Any] = []

    def cell(rank: FakeRank, item: Any) -> Any:
        ran.append(item)
        if item == "bad":
            raise ValueError("no")
        rank.tell(Metrics({"loss": 0.75}, step=2))
        rank.tell(Metrics({"loss": 0.5}, step=4))
        return [item, len(ran)]

    options = {"checkpoint_dir": str(tmp_path / "kept")}
    with pytest.raises(ItemsFailed, match=r"1 of 4 items failed \(3 finished\)"):
        runs(cell, ["a", "a", "bad", ("b", {"x", "y"})], 1, **options)
    assert ran == ["a", "a", "bad", ("b", {"x", "y"})]
    ran.clear()
    result = runs(cell, [("b", {"y", "x"}), "c", "a", "a", "a"], 1, **options)
    assert ran == ["c", "a"]
    assert result.values == [[("b", {"x", "y"}), 4], ["c", 1], ["a", 1], ["a", 2], ["a", 2]]
    assert list(result.table.state) == ["kept", "finished", "kept", "kept", "finished"]
    assert list(result.table.loss) == [0.5] * 5
    for record in (result.record, run_store.load(run_store.find_saved(result.record.run_id))):
        assert [(each.curves, each.by) for each in record.items.known] == [
            ({"loss": ((2, 0.75), (4, 0.5))}, "step")
        ] * 5
    assert mentions(describe.outcome(result.record), "2 of 5 items finished", "3 kept")
    assert any("not run again" in notice.text for notice in result.record.notices)
    ran.clear()
    assert runs(cell, ["a"], 1, fresh=True, **options).values == [["a", 1]]
    assert runs(cell, ["a"], 1, **options).values == [["a", 1]], "the new result is kept"
    assert ran == ["a"]


def test_results_of_changed_code(runs, tmp_path):
    """A notice says how many results are not used, and why. --keep-results uses them, now and later."""
    options = {"checkpoint_dir": str(tmp_path / "kept")}

    def states(function: Any, items: Any = (1, 2, 3), **more: Any) -> tuple[list[str], list[str]]:
        result = runs(lambda rank, item: item, items, call=function, **options, **more)
        notices = [notice.text for notice in result.record.notices]
        return list(result.table.state), [text for text in notices if "although" in text or "not use" in text]

    one, two, three = (lambda e: e + 1), (lambda e: e + 2), (lambda e: e + 3)
    assert states(one) == (["finished"] * 3, [])
    assert states(one) == (["kept"] * 3, [])
    assert states(two, [9]) == (["finished"], []), "other code may keep results of other items here"
    states_of_two, (told,) = states(two, [1])
    assert states_of_two == ["finished"]
    assert "3 results" in told
    assert "function has changed" in told
    assert "--keep-results" in told
    found, (told,) = states(three, keep_results=True)
    assert found == ["kept"] * 3
    assert "4 results" in told
    assert states(three, [1, 2, 3, 9, 4]) == (["kept"] * 4 + ["finished"], []), "they count from now on"
    assert states(one, [4])[0] == ["finished"]


def test_results_of_earlier_versions(runs, tmp_path):
    """Results under the keys of earlier versions are not used, and a notice says so."""
    path = tmp_path / "kept"
    options = {"checkpoint_dir": str(path)}
    runs(lambda rank, item: item, [1], **options)
    (file,) = (path / "results").glob("*.json")
    file.rename(path / "results" / f"{'0' * 32}.json")
    (path / "code" / f"{file.stem.partition('-')[2]}.json").unlink()
    result = runs(lambda rank, item: item, [1], **options)
    assert list(result.table.state) == ["finished"]
    assert any("an earlier version" in notice.text for notice in result.record.notices)


def test_results_that_take_long_to_write(runs, tmp_path, monkeypatch):
    """Several results are written at once, and a notice says what the run waits for. Stop ends the wait."""
    monkeypatch.setattr(pool, "TELL_AFTER_S", 0.01)
    write, writing = KeptResults.write, threading.Barrier(kept.WRITERS)
    stopped = threading.Event()

    def slow(self: KeptResults, *result: Any) -> None:
        writing.wait(DEADLINE_S)
        stopped.wait(DEADLINE_S)
        write(self, *result)

    class Writers(kept.ThreadPoolExecutor):
        def shutdown(self, *args: Any, **kwargs: Any) -> None:
            stopped.set()
            super().shutdown(*args, **kwargs)

    def stop_while_writing(record: RunRecord) -> None:
        if any("writing 20 results" in notice.text for notice in record.notices):
            run.stop(wait=False)

    options = {"checkpoint_dir": str(tmp_path / "kept")}
    with monkeypatch.context() as patched:
        patched.setattr(KeptResults, "write", slow)
        patched.setattr(kept, "ThreadPoolExecutor", Writers)
        run = runs.in_background(lambda rank, item: item, range(20), **options)
        runs.view.on_refresh = stop_while_writing
        with pytest.raises(KeyboardInterrupt, match="20 items finished"):
            run.result(DEADLINE_S)
    (notice,) = runs.view.record.notices  # the one about writing has gone
    assert mentions(notice.text, "12", "not", "kept")
    assert sorted(runs(lambda rank, item: item, range(20), **options).table.state) == ["finished"] * 12 + ["kept"] * 8


def test_results_of_other_code_are_not_used(tmp_path, monkeypatch):
    """The key of a result depends on the cell without its comments, on the targets, and on the items' types."""
    home = tmp_path / "home"
    monkeypatch.setenv("SPARKRING_HOME", str(home))
    path = str(tmp_path / "kept")

    def key(code: str, item: object) -> str:
        return kept.Kept(path, meaning_of({"the cell": [code]}, {}, {}, ()), 1).key_of({"x": item})

    assert key("y = x  # doubled", 1) == key("y = x", 1)
    different = [key("y = x", each) for each in (1, 1.0, True, "1", b"1", (1,), [1], {1}, {1: 1}, None, Mode.ONE)]
    assert len({*different, key("y = x + 1", 1)}) == len(different) + 1
    arrays = [np.zeros(3), np.zeros(3, "f4"), np.zeros((3, 1)), np.ones(3)]
    assert len({key("", each) for each in arrays}) == 4
    assert len({key("", each) for each in (Small, Large, Small(), Large())}) == 4
    modes = [enum.Enum("Mode", {"ONE": value}).ONE for value in (1, 2)]
    assert key("", modes[0]) != key("", modes[1]), "the notebook has changed the value"
    assert key("", enum.IntFlag("Bits", ["A"])(0)) != key("", 0), "a flag without a name"
    assert key("", {"a": 1, "b": {2, 3}}) == key("", {"a": 1, "b": {3, 2}}) != key("", {"b": {2, 3}, "a": 1})


NOTEBOOK = """
import dataclasses, enum, functools
epochs, config, frame = 30, {"lr": [0.1, 0.2]}, list(range(1000))
@dataclasses.dataclass
class Settings:
    width: int = 8
    def double(self):
        return self.width * 2
settings = Settings()
class Mode(enum.Enum):
    FAST = 1
class Net:
    depth = 2
    def forward(self, x):
        return x
def helper(x):
    return Net().forward(x) * epochs
def train(x, rate=0.5):
    return helper(x) + config["lr"][0] + settings.width + len(frame) + Mode.FAST.value
some = functools.partial(train, rate=0.1)
net = Net()
"""


def test_what_the_results_depend_on():
    """Results depend on functions and classes of the notebook, on the functions that these use, and on settings."""

    def meaning(text: str = NOTEBOOK, used: str = "train", hidden: tuple[str, ...] = ()) -> str:
        namespace = {"__name__": "__main__"}
        filename = f"<notebook {hash(text)}>"
        keep_lines(filename, text)
        exec(compile(text, filename, "exec"), namespace)
        return meaning_of({"the cell": ["y = train(x)"]}, {used: namespace[used]}, namespace, hidden).key

    changes = [("epochs, config", "epochs , config"), ("x\n", "x  # the same\n")]
    assert {meaning(NOTEBOOK.replace(*change)) for change in changes} == {meaning()}
    changes = [("= 30", "= 60"), ("0.2]", "0.3]"), ("int = 8", "int = 9"), ("depth = 2", "depth = 3"),
               ("FAST = 1", "FAST = 2"), ("range(1000)", "range(2000)"),
               ("return x\n", "return x + 1\n"), ("* epochs", "+ epochs"), ("rate=0.5", "rate=0.6")]  # fmt: skip
    different = [meaning(NOTEBOOK.replace(*change)) for change in changes]
    assert len({meaning(), *different}) == len(changes) + 1
    assert meaning(used="some") != meaning(NOTEBOOK.replace("rate=0.1", "rate=0.2"), used="some")
    for used, line in (("net", "return x"), ("settings", "return self.width * 2")):
        assert meaning(used=used) != meaning(NOTEBOOK.replace(f"{line}\n", f"{line} + 1\n"), used=used)
    assert meaning(NOTEBOOK.replace("= 30", "= 60"), hidden=("epochs",)) == meaning(hidden=("epochs",))


class Mode(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Small:
    width: int = 8


@dataclasses.dataclass
class Large:
    width: int = 8
