"""Independent runs on real processes: what an item finds, what it leaves behind, and how it may end."""

from __future__ import annotations

import ast
import builtins
import random
import re
import shutil
import signal
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyspark.sql.pandas.types
import pytest
from leaks import MARK, marked
from rings import Recording
from texts import mentions
from waiting import DEADLINE_S, until

import sparkring
from sparkring.engine.foreach import api as foreach_api
from sparkring.engine.foreach.items import Targets
from sparkring.engine.foreach.meanwhile import Meanwhile
from sparkring.engine.foreach.options import ForeachOptions
from sparkring.engine.foreach.run import ForeachSpec
from sparkring.engine.run.spec import Cell, seed_of
from sparkring.errors import ItemsFailed, LaunchError, RunFailed
from sparkring.gangs.gang import Gang
from sparkring.history import run_store
from sparkring.history.record import RunRecord

pytestmark = pytest.mark.forked


class Pools:
    """Runs a cell for each item, as %%foreach does, in a notebook of its own."""

    def __init__(self, mark: str, where: str = "local") -> None:
        self.where = where
        self.notebook: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        self.view = Recording()
        self._mark = mark

    def define(self, source: str) -> None:
        exec(textwrap.dedent(source), self.notebook)

    def run(self, clause: str, cell: str, at_once: int = 2, **options: Any) -> Any:
        return foreach_api.foreach_spec(self._spec(clause, cell, at_once, options), self.view)

    def in_background(self, clause: str, cell: str, at_once: int = 2, **options: Any) -> Any:
        return foreach_api.start_foreach(self._spec(clause, cell, at_once, {**options, "background": True}), self.view)

    def _spec(self, clause: str, cell: str, at_once: int, options: dict[str, Any]) -> ForeachSpec:
        targets, _, items = clause.partition(" in ")
        work = Cell("\n" + textwrap.dedent(cell).strip("\n"), self.notebook)
        np = -at_once if self.where == "local" else at_once
        settings = ForeachOptions(np, env=((MARK, self._mark),), **options)
        return ForeachSpec(work, eval(items, self.notebook), settings, Targets(targets))


@pytest.fixture
def pools(request: pytest.FixtureRequest, watch: Any) -> Pools:
    """Pools on this machine, or where the fixture `ring` or `spark` runs ranks, if the test uses it."""
    if "ring" in request.fixturenames:
        return Pools(watch.mark, request.getfixturevalue("ring").where)
    return Pools(watch.mark, "spark" if "spark" in request.fixturenames else "local")


# A stand-in for Keras: it has random number generators of its own, and draws from Python's generator when imported.
KERAS = """
import random

random.random()
own = random.Random()

class utils:
    def set_random_seed(seed):
        own.seed(seed)
        random.seed(seed + 1)

class backend:
    layers = 0

    def clear_session():
        backend.layers = 0
"""


def test_items_share_objects_with_captured_names(pools):
    """As in a for loop, an item is the object that the notebook's names refer to, wherever the item holds it."""
    pools.define(
        """
        import collections, dataclasses, math
        def relu(x): return x
        class Kind: pass
        @dataclasses.dataclass
        class Case:
            of: object
        class Plain: pass
        NONE, plain, data, square = object(), Plain(), [1, 2], lambda x: x * x
        labels = {relu: "relu", Kind: "Kind", NONE: "none", plain: "plain", square: "square", math.sqrt: "sqrt"}
        members, datas = {plain, relu}, [[3], data]
        def generated():
            for value in labels:
                yield {"a": (Case(value),)}
        """
    )
    every = ["relu", "Kind", "none", "plain", "square", "sqrt"]
    assert pools.run("v in labels", "labels[v]").values == every
    assert pools.run("v in list(labels)", "labels[v], v is NONE").values == [(x, x == "none") for x in every]
    pairs = pools.run("v, text in labels.items()", "labels[v] == text")
    assert pairs.values == [True] * 6
    assert pools.run("item in generated()", "labels[item['a'][0].of]").values == every
    cell = "[v is NONE, v is not data and v in members, v is data, [v is each for each in datas]]"
    own = [[True, False, False, [False] * 2], [False, True, False, [False] * 2], [False, False, True, [False, True]]]
    assert pools.run("v in [NONE, plain, data]", cell).values == own
    assert pools.run("v in zip([NONE, plain])", "v[0] is NONE, v[0] is plain").values == [(True, False), (False, True)]
    for items in ("enumerate(datas)", "zip(range(2), datas)", "collections.OrderedDict(enumerate(datas)).items()"):
        assert pools.run(f"at, v in {items}", "v is datas[at]").values == [True] * 2

    def function(value: Any) -> Any:
        return labels[value["v"]]

    function.__module__, labels = "__main__", pools.notebook["labels"]
    assert sparkring.foreach(function, [{"v": value} for value in labels], np=-1).values == every


def test_items_that_the_iterable_changes(pools):
    """An object that the iterable changes between two items arrives as it is when the item is taken."""
    pools.define(
        """
        class Settings: lr = 0
        settings, values = Settings(), []
        def generated():
            for lr in range(3):
                settings.lr = lr
                values.append(lr)
                yield settings, values
        """
    )
    assert pools.run("s, v in generated()", "settings, values\ns.lr, v").values == [
        (0, [0]),
        (1, [0, 1]),
        (2, [0, 1, 2]),
    ]


def test_items_do_not_see_one_another(pools, tmp_path, monkeypatch):
    """Whatever an item binds or changes, the next item in the same process finds the notebook's values again.

    An item's random numbers depend only on the item's number. So the values are the same if each item has its own
    process.
    """
    (tmp_path / "tf_keras.py").write_text(KERAS)
    monkeypatch.syspath_prepend(tmp_path)
    pools.define(
        """
        import random
        import numpy as np

        class Model:
            fitted = 0

            def fit(self, times):
                self.fitted += times
                Model.fitted += 1
                return self.fitted

        def helper(x):
            global calls
            calls += 1
            return x * factor

        calls, factor, seen = 0, 10, []
        model, table = Model(), np.zeros(200_000)
        kinds = [Model(), Model()]
        """
    )
    cell = """
        assert "left" not in globals()
        left = number
        seen.append(number)
        table += number
        first = helper(number), model.fit(3), len(seen), float(table.sum()), calls
        import tf_keras
        tf_keras.backend.layers += 1
        noise = random.random(), float(np.random.rand()), tf_keras.own.random(), tf_keras.backend.layers
        isinstance(kind, Model), rank, size, first, noise
    """
    result = pools.run("number, (kind, *_) in [(n, [kinds[0], n]) for n in range(6)]", cell)
    for number, (is_model, rank, size, first, _) in enumerate(result.values):
        assert (is_model, rank, size) == (True, 0, 1)
        assert first == (number * 10, 3, 1, number * 200_000.0, 1)
    assert len({noise for *_, noise in result.values}) == 6
    fresh = pools.run("number, (kind, *_) in [(n, [kinds[0], n]) for n in range(6)]", cell, 1, fresh_after=1)
    assert fresh.values == result.values
    assert pools.notebook["calls"] == 0


@pytest.mark.extended_on("spark", "the same members end the items; test_stop_keeps_what_is_done ends some on Spark")
def test_how_items_may_end(ring, pools):
    """If a process is killed, exits or hangs, or a value cannot be sent, only one item is lost."""
    pools.define("import os, sys, time, threading\nnumbers = range(9)")
    with pytest.raises(ItemsFailed) as caught:
        pools.run(
            "n in numbers",
            """
            print("item", n, flush=True)
            if n == 1: os.kill(os.getpid(), 9)
            if n == 2: os._exit(3)
            if n == 3: sys.exit("no")
            if n == 4: time.sleep(60)
            value = threading.Lock() if n == 5 else n
            if n == 6: n.missing
            if n == 7: sys.exit(0)
            value
            """,
            timeout_each_s=3.0,
        )
    result = sparkring.last_result
    failures = result.errors
    assert {number: (failure.cause, failure.exit_code) for number, failure in failures.items()} == {
        1: ("signal", None),
        2: ("exit", 3),
        3: ("exit", None),
        4: ("timed out", None),
        5: ("code", None),
        6: ("code", None),
    }
    assert result.values == [0, *[None] * 7, 8]
    assert list(result.table.attempts) == [1, 2, 2, 1, 1, 1, 1, 1, 1]
    said = str(caught.value)
    assert "6 of 9 items failed (3 finished)" in said
    assert mentions(said, "3.0 s", "cell line 6", "item 4 (n=4)")
    assert mentions(said, "AttributeError", "'missing'", "cell line 8")
    assert "cannot be pickled" in failures[5].summary
    path = run_store.find_saved(result.record.run_id)
    logs = "".join(run_store.log(path, rank) for rank in range(2))
    assert sorted(line for line in logs.splitlines() if line.startswith("item")) == sorted(
        f"item {n}" for n in (0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8)
    )
    assert run_store.item_log(path, 2) == "item 2\nitem 2\n"
    assert run_store.item_log(path, 6).startswith("item 6\nTraceback")
    assert run_store.load(path).items == result.record.items


def test_stop_keeps_what_is_done(ring, pools):
    """Stop interrupts the running items, kills those that do not respond, and leaves no process behind.

    Items that are still waiting behind another one do not count as begun. On Spark, up to six items may run at once,
    but there are slots for only four; the other two wait for slots.
    """
    at_once, running = (2, 2) if pools.where == "local" else (6, 4)
    pools.define("import itertools, signal, time")
    run = pools.in_background(
        "n in itertools.count()",
        """
        if n >= 60:
            if n % 2: signal.signal(signal.SIGINT, signal.SIG_IGN)
            print("waits", flush=True)
            while True: time.sleep(60)
        n
        """,
        at_once,
    )
    waits = threading.Event()
    pools.view.on_refresh = lambda record: (
        waits.set() if sum(line.text == "waits" for line in record.recent) == running else None
    )
    assert waits.wait(DEADLINE_S)
    up = run.record.items.up
    run.stop()
    with pytest.raises(KeyboardInterrupt, match=f"60 of {60 + running} items finished"):
        run.result()
    assert up == (None if pools.where == "local" else running)
    result = sparkring.last_result
    assert result.values[:60] == list(range(60))
    assert list(result.table.state) == ["finished"] * 60 + ["stopped"] * (len(result) - 60)
    assert 60 + running <= len(result) < 200, "the iterable is not read far ahead"
    assert [item.state for item in result.record.items.known] == ["finished"] * 60 + ["stopped"] * running


@pytest.mark.extended_on("spark", "test_more_at_once_than_spark_has_slots gives items to ranks on Spark")
def test_short_items_are_given_ahead(ring, pools, tmp_path, monkeypatch):
    """A member is given its next items early, but only while items are short.

    If the member dies, only the item that was running counts as tried. If an item takes long or fails, another member
    runs the items behind it. Each item has its own output and reports.
    """
    given, send = [], Gang.submit_ahead
    monkeypatch.setattr(Gang, "submit_ahead", lambda gang, request: given.append(request) or send(gang, request))
    pools.notebook["folder"] = tmp_path
    pools.define("import os, random, time, sparkring")
    with pytest.raises(ItemsFailed, match=r"1 of 300 items failed \(299 finished\)"):
        pools.run(
            "n in range(300)",
            """
            if n == 100 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), 9)
            if n == 200:
                raise ValueError(n)
            while n == 250 and len([*folder.glob("later-*")]) < 49:
                time.sleep(0.01)
            if n % 9 == 0:
                os.write(1, b"item %d" % n)
            sparkring.log(half=n / 2)
            if n > 250:
                (folder / f"later-{n}").touch()
            n, random.random()
            """,
            timeout_each_s=30.0,
        )
    result = sparkring.last_result
    assert len(given) > 100
    assert {number: value for number, (value, _) in result.by_item.items()} == {n: n for n in range(300) if n != 200}
    assert list(result.errors) == [200]
    assert {item.item: item.attempt for item in result.record.items.known if item.attempt > 1} == {100: 2}
    assert [item.metrics.get("half") for item in result.record.items.known] == [
        None if n == 200 else n / 2 for n in range(300)
    ]
    path = run_store.find_saved(result.record.run_id)
    assert run_store.load(path).items == result.record.items
    assert [run_store.item_log(path, n) for n in (0, 9, 18, 135, 136)] == [
        "item 0",
        "item 9",
        "item 18",
        "item 135",
        "",
    ]
    alone = random.Random(seed_of(0, 135)).random()
    assert result.values[135] == (135, alone)


@pytest.mark.parametrize("long", [-1, 48])
def test_an_iterable_that_waits_for_results(pools, tmp_path, long):
    """Items that were given ahead run even while the iterable waits for what they do, and behind a `long` item."""
    folder = tmp_path / "done"
    folder.mkdir()

    def waiting():
        for number in range(60):
            if number == 50:
                until(lambda: len([*folder.iterdir()]) == 50, "all items so far have run")
            yield number

    pools.notebook.update(folder=folder, items=waiting(), long=long, time=time)
    pools.run("n in items", "if n == long: time.sleep(0.3)\n(folder / str(n)).touch()")


def test_an_iterable_that_waits_for_each_result(pools, tmp_path):
    """Ranks start, output arrives, and items are tried again while the iterable waits."""
    folder = tmp_path / "done"
    folder.mkdir()

    def waiting():
        for number in range(4):
            if number:
                until((folder / str(number - 1)).exists, f"item {number - 1} has run")
            yield number

    pools.notebook.update(folder=folder, items=waiting())
    result = pools.run(
        "n in items",
        """
        import os
        if n == 1 and not (folder / "tried").exists():
            (folder / "tried").touch()
            os.abort()
        for line in range(300 if n == 2 else 0):
            print(line, flush=True)
        (folder / str(n)).touch()
        n
        """,
    )
    assert result.values == [0, 1, 2, 3]


def test_ranks_that_cannot_start_while_the_iterable_waits():
    """The error of the other thread ends the block, which is then raised in the pool's own thread."""
    tried = threading.Event()

    def work():
        tried.set()
        raise LaunchError("no ranks")

    meanwhile = Meanwhile(work, 0.01)
    with pytest.raises(LaunchError, match="no ranks"), meanwhile:
        assert tried.wait(DEADLINE_S)
    meanwhile.end()


@pytest.mark.standalone("executors run the items")
def test_more_at_once_than_spark_has_slots(spark, pools, tmp_path):
    """Up to twenty items may run at once, but there are slots for only four. The user's session stays up."""
    most = 0
    pools.notebook["folder"] = tmp_path / "begun"
    pools.notebook["folder"].mkdir()

    def note(record: RunRecord) -> None:
        nonlocal most
        most = max(most, record.items.up if record.items else 0)

    pools.view.on_refresh = note
    result = pools.run(
        "n in range(300)",
        """
        import os, sparkring, time
        from pyspark import BarrierTaskContext, TaskContext
        if n < 4:  # wait until four items run at once
            (folder / f"{n}").touch()
            while len(os.listdir(folder)) < 4:
                time.sleep(0.02)
        refused = ""
        if n == 7:
            try:
                sparkring.foreach(len, ["a"], np=2)
            except sparkring.errors.OptionsError as error:
                refused = str(error)
        task = TaskContext.get()
        in_barrier = isinstance(task, BarrierTaskContext)
        n * 2, refused, os.getpid(), (task.stageId(), task.taskAttemptId(), task.resources(), in_barrier)
        """,
        20,
    )
    assert [value[0] for value in result.values] == [n * 2 for n in range(300)]
    assert mentions(result.values[7][1], "in the notebook", "a loop")
    assert len({pid for _, _, pid, _ in result.values}) == most == 4
    of_tasks = {task[:2]: task[2:] for *_, task in result.values}
    assert list(of_tasks.values()) == [({}, False)] * 4
    assert (result.record.where, result.record.items.at_once) == ("spark", 20)
    assert set(result.table.attempts) == {1}
    assert pools.run("n in []", "n").values == []
    assert spark.range(3).count() == 3


def test_rows_of_a_dataframe(spark, pools, tmp_path, monkeypatch):
    """Partitions, and groups of rows, can be items. A later run finds the results that were kept."""
    if not hasattr(pyspark.sql.pandas.types, "_create_converter_to_pandas"):
        pytest.skip("Spark before 3.5 cannot convert columns as toPandas() does")
    monkeypatch.setenv("SPARKRING_CACHE", str(tmp_path / "cache"))
    pools.notebook |= {"df": spark.range(12).selectExpr("id", "id % 3 AS k").repartition(20), "sparkring": sparkring}
    result = pools.run("frame in sparkring.partitions(df)", "type(frame).__name__, frame['id'].tolist()", 4)
    assert {kind for kind, _ in result.values} == {"DataFrame"}
    assert sorted(number for _, numbers in result.values for number in numbers) == list(range(12))
    assert (len(result), set(result.table.attempts)) == (20, {1})
    groups = "key, frame in df.groupBy('k')", "key, len(frame), int(frame['id'].sum())"
    result = pools.run(*groups, 1, checkpoint_dir=str(tmp_path / "kept"))
    assert result.values == [(key, 4, sum(range(key, 12, 3))) for key in range(3)]
    assert [item.name for item in result.record.items.known] == ["key=0", "key=1", "key=2"]
    shutil.rmtree(tmp_path / "cache")
    result = pools.run(*groups, checkpoint_dir=str(tmp_path / "kept"))
    assert set(result.table.state) == {"kept"}


def test_large_values_both_ways(pools):
    """Arrays of 16 MB and values of 200 MB arrive. The array that the cell reads is not copied for each item."""
    pools.notebook["arrays"] = [np.full(2_000_000, float(number)) for number in range(3)]
    pools.notebook["np"] = np
    pools.notebook["shared"] = np.ones(5_000_000)
    result = pools.run("x in arrays", "shared[:10] += x[0]\nnp.full(25_000_000, x[0] + shared[0] + shared[-1])", 1)
    assert [value.nbytes for value in result.values] == [200_000_000] * 3
    assert [float(value[0]) for value in result.values] == [2.0, 4.0, 6.0]


def test_rings(pools, spares):
    """With --np-each 2, each item runs on two connected ranks. The same two ranks then run the next item.

    PyTorch's random numbers are seeded, too, even for the item that imports it. A pruned trial ends on both
    ranks without a traceback, even if one rank is waiting in a collective, and the other catches the interrupt and then
    raises another error.
    """
    pools.notebook["seeds"] = [seed_of(0, number) for number in range(4)]
    pools.define("import sparkring\nfrom optuna.pruners import ThresholdPruner")
    result = pools.run(
        "(n,) in sparkring.search(n=[0, 1, 2, 3], sampler='grid', minimize='loss', prune=ThresholdPruner(upper=4))",
        """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(rank + n)])
        dist.all_reduce(total)
        drawn = torch.rand(())
        torch.manual_seed(seeds[n])
        if rank == 0:
            try:
                sparkring.log(step=1, loss=[1, 3, 5, 2][n])
                while n == 2: time.sleep(0.01)
            except KeyboardInterrupt:
                try:
                    sparkring.log(step=2, loss=4)  # the item ends here, at the latest
                    print("goes on")
                finally:
                    raise OSError("the clean-up failed")
        dist.barrier()
        print("whole", n, flush=True)
        float(total), os.getpid(), bool(drawn == torch.rand(()))
        """,
        1,
        np_each=2,
        framework="torch",
    )
    assert list(result.table.state) == ["finished", "finished", "pruned", "finished"]
    assert result.values[2] == 4.0
    values = [result.values[number] for number in (0, 1, 3)]
    assert [(total, seeded) for total, _, seeded in values] == [(1.0, True), (3.0, True), (7.0, True)]
    assert len({pid for _, pid, _ in values}) == 1
    assert [rank.pid > 0 for rank in result.record.ranks] == [True, True]
    path = run_store.find_saved(result.record.run_id)
    for rank in range(2):
        assert run_store.log(path, rank).splitlines() == ["whole 0", "whole 1", "whole 3"]


def test_not_on_a_rank(local):
    """A rank cannot start items of its own, and the error says what to do instead."""
    with pytest.raises(RunFailed, match=r"call .*notebook, .*use .*loop"):
        local.run("import sparkring\nsparkring.foreach(len, ['a'])", 1)


# Uses four kinds of memory: the process's own, the notebook's `table`, a child process's, and mapped files.
MEASURED = """
    import os, pathlib, subprocess, sys, time
    import ctypes.util
    own = b"x" * 60_000_000
    code = "block = b'x' * 40_000_000; print(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-SEc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    read = len(pathlib.Path("large").read_bytes()) + float(table.sum())
    begun = time.thread_time()
    while time.thread_time() < begun + 0.3 or (number and not os.path.exists("go")):
        pathlib.Path(f"up-{number}").touch()
    child.communicate(b"\\n")
    batch_size = 16
    number * 10
"""


def test_plan(pools, tmp_path, monkeypatch, watch):
    """Only the first item runs, and its result can be kept. The plan predicts the memory of items that run later."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large").write_bytes(bytes(5_000_000))
    pools.notebook["table"] = np.ones(4_000_000)
    plan = pools.run("number in range(3)", MEASURED, plan=True, checkpoint_dir="kept")
    assert plan.result.values == [0]
    assert [each.name for each in tmp_path.glob("up-*")] == ["up-0"]
    assert (plan.items, plan.at_once, plan.warning, plan.rule_bytes) == (3, 2, "", None)
    assert 0.25 < plan.cpu_share * plan.seconds < 10
    assert 5_000_000 < plan.read_bytes < 6_000_000, "neither imports nor the measuring count"
    assert plan.start_s > 0
    assert plan.binds == "cores"
    assert "3 items" in str(plan)
    assert plan._repr_html_().count("<tr") == 7

    later = pools.in_background("number in range(3)", MEASURED, checkpoint_dir="kept")
    until(lambda: all((tmp_path / f"up-{number}").exists() for number in (1, 2)), "two items are at their peak")
    measured = sum(proportional_bytes(pid) for pid in marked(watch.mark))
    (tmp_path / "go").touch()
    assert list(later.result(DEADLINE_S).table.state) == ["kept", "finished", "finished"]
    assert plan.memory_at(2) == pytest.approx(measured, rel=0.2)


def proportional_bytes(pid: int) -> int:
    """Return how much memory a process holds. A page that n processes share counts as one nth for each of them."""
    found = re.search(r"^Pss: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) * 1024


SURVIVES = """
import sparkring
from pathlib import Path

def kept():
    # A result's file is there before its content is.
    return sum(path.read_bytes().endswith(b"}\\n") for path in Path("../kept/results").glob("*.json"))

def train(number):
    with open("../ran", "a") as file:
        file.write(f"{number}\\n")
    store = sparkring.checkpoints()
    state = {"steps": 0}
    before = store.restore(state)
    store.save(before + 1, {"steps": before + 1})
    store.wait()  # it is saved in the background, and the kernel is killed soon
    if number == 5 and not before:
        time.sleep(60)
    return number * 10, before

def numbers():
    for number in range(8):
        if number == LAST:
            while kept() < 6:
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        yield number

result = sparkring.foreach(train, numbers(), np=-2, checkpoint_dir="../kept", quiet=True)
print("values", result.values, "states", list(result.table.state))
"""


def test_after_a_killed_kernel_only_what_is_missing_runs(driver, tmp_path):
    """No process is left, no finished item runs again, and an item that had saved a checkpoint continues from it."""
    killed = driver(SURVIVES.replace("LAST", "7"))
    killed.wait()
    assert killed.process.returncode == -signal.SIGKILL
    until(lambda: not killed.family(), "the pool's processes end with their kernel")
    assert sorted((tmp_path / "ran").read_text().split()) == list("0123456")
    (tmp_path / "ran").unlink()
    text = driver(SURVIVES.replace("LAST", "None")).wait()
    values = [(number * 10, int(number == 5)) for number in range(8)]
    states = ["kept"] * 5 + ["finished", "kept", "finished"]
    assert f"values {values} states {states}" in text
    assert sorted((tmp_path / "ran").read_text().split()) == list("57")


SEARCHES = """
import optuna, sparkring
from pathlib import Path

last = LAST
BEGUN = '"op_code":4'  # in Optuna's journal, the line with which a trial begins

class Pruner(optuna.pruners.ThresholdPruner):
    def prune(self, study, trial):
        if trial.params["q"] == last:
            kept = Path("../kept")
            while len([*kept.glob("results/*.json")]) < 6 or (kept / "study.journal").read_text().count(BEGUN) < 8:
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        return super().prune(study, trial)

def train(trial):
    with open("../ran", "a") as file:
        file.write(f"{trial.q}\\n")
    store = sparkring.checkpoints()
    state = {"steps": 0}
    before = store.restore(state)
    store.save(before + 1, {"steps": before + 1})
    store.wait()  # it is saved in the background, and the kernel is killed soon
    sparkring.log(step=1, loss=trial.q % 7)
    while trial.q in (5, 6) or (trial.q == 7 and Path("../endless").exists()):
        time.sleep(0.01)
    return trial.q, before

space = {"q": range(8), "sampler": "grid", "minimize": "loss", "prune": Pruner(upper=4.5)}
result = sparkring.foreach(train, sparkring.search(**space), np=-2, checkpoint_dir="../kept", quiet=True)
print("values", result.values)
print("states", list(result.table.state))
print("study", [trial.state.name for trial in result.study.trials if trial.params.get("q") == 7], ",", result.best().q)
"""


def test_after_a_killed_kernel_a_search_goes_on(driver, tmp_path):
    """The study has the killed kernel's trials, even pruned ones. The running trial is run again, as a new trial."""
    (tmp_path / "endless").touch()
    killed = driver(SEARCHES.replace("LAST", "7"))
    killed.wait()
    assert killed.process.returncode == -signal.SIGKILL
    until(lambda: not killed.family(), "the pool's processes end with their kernel")
    (tmp_path / "ran").unlink()
    (tmp_path / "endless").unlink()
    lines = driver(SEARCHES.replace("LAST", "None")).wait().splitlines()
    found = {what: ast.literal_eval(rest) for what, _, rest in (line.partition(" ") for line in lines[-3:])}
    assert found["values"][5:] == [5.0, 6.0, (7, 1)]
    assert found["states"][5:] == ["pruned", "pruned", "finished"]
    assert found["study"] == (["FAIL", "COMPLETE"], 0)
    again = set((tmp_path / "ran").read_text().split())
    assert "7" in again
    assert len(again) <= 2, "one more item may have been running when the kernel was killed"
    assert found["states"][:5].count("kept") >= 4
