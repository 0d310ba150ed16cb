"""Warm gangs: what their ranks keep between cells, and how cells and gangs end, on every launcher."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rings import READY, ready
from texts import mentions
from waiting import DEADLINE_S, until

from sparkring.engine.run import api, runner, warm_gang
from sparkring.errors import CaptureError, ResultError, RunFailed, RunTimeout
from sparkring.history import describe, run_store
from sparkring.launchers import slots_table

FOREVER = "import time\nwhile True:\n    time.sleep(0.05)"


def failed(gang, cell: str, *ranks: int, **options) -> RunFailed:
    """Run a cell that must fail, and return its error."""
    with pytest.raises(RunFailed) as caught:
        gang.cell(cell, *ranks, **options)
    return caught.value


def interrupt_when(gang, holds) -> None:
    """Interrupt the next cell once `holds(record)` is true."""
    sent = []

    def look(record) -> None:
        if not sent and holds(record):
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    gang.view.on_refresh = look


def printed(record, text: str) -> int:
    """Return how many ranks have printed `text`."""
    return sum(any(line.text == text for line in rank.tail) for rank in record.ranks)


def interrupted(gang, cell: str, *ranks: int, **options) -> str:
    """Interrupt a cell when every rank has printed `ready`, and return the KeyboardInterrupt's message."""
    count = len(ranks) or gang.gang.gang.size
    interrupt_when(gang, lambda record: printed(record, "ready") == count)
    with pytest.raises(KeyboardInterrupt) as caught:
        gang.cell(cell, *ranks, **options)
    gang.view.on_refresh = lambda record: None
    return str(caught.value)


def interrupt_after(delay_s: float, action: Callable[[], object]) -> str:
    """Interrupt `action` after `delay_s`, and return the message of the KeyboardInterrupt with which it must end."""
    # As in a kernel; pyspark's own handler would cancel every job.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    try:
        stop.start()
        action()
    except KeyboardInterrupt as error:
        return str(error)
    finally:
        stop.join()
        signal.signal(signal.SIGINT, before)
    pytest.fail("there was no KeyboardInterrupt")


def freeze(pid: int) -> None:
    """Stop a process as a debugger does, and wait until it has stopped."""
    psutil.Process(pid).suspend()
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the process has stopped")


# ── What stays ────────────────────────────────────────────────────────────────


@pytest.mark.standalone("the gang holds the executors' slots from cell to cell")
def test_variables_persist(shared_gang):
    """The next cell runs in the same processes, and has the previous cell's variables and functions."""
    first = shared_gang.values("import os\ncount = rank\ndef more():\n    global count\n    count += 1\nos.getpid()")
    assert shared_gang.values("more()\n[count, os.getpid()]") == [[rank + 1, pid] for rank, pid in enumerate(first)]


def test_a_module_that_has_changed(shared_gang, tmp_path):
    """The ranks load the module again, and say so once. If it cannot be loaded, each cell fails until it can be."""
    path = tmp_path / "changing.py"
    path.write_text("number = 1")
    shared_gang.cell(f"import importlib, sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport changing")
    told = []
    for number in (2, 3):
        path.write_text(f"number = {number}".ljust(20 + number))  # Python recognises a change by the file's size
        os.utime(path, (now := time.time(), now))
        for cell in ("changing.number", "changing.number", "importlib.reload(changing).number"):
            result = shared_gang.cell(cell)
            lines = [line.text for line in result.record.ranks[0].tail]
            told.append((result.value, any("`changing` has changed" in line for line in lines)))
    assert told == [(2, True), (2, False), (2, False), (3, True), (3, False), (3, False)]
    path.write_text("number = (")
    assert "SyntaxError" in str(failed(shared_gang, "changing.number"))
    assert "SyntaxError" in str(failed(shared_gang, "changing.number"))
    path.write_text("number = 4")
    assert shared_gang.cell("changing.number").value == 4
    shared_gang.cell("sys.path.pop(0)")


def test_some_ranks(shared_gang):
    """A cell on some ranks leaves the others alone. The names that it binds exist only on the ranks that ran it."""
    assert shared_gang.values("only = rank * 10\nonly", 0, 2) == [0, 20]
    assert [rank.state for rank in shared_gang.view.record.ranks] == ["finished", "idle", "finished"]
    assert shared_gang.values("only", 2) == [20]
    error = failed(shared_gang, "only")
    assert "rank 1" in str(error)
    assert "NameError" in str(error)
    assert shared_gang.values("'only' in globals()") == [True, False, True]


@pytest.mark.any_launcher
def test_trained_state_survives(shared_gang):
    """An object that a cell has changed on the ranks is kept while the notebook's own object is unchanged."""
    shared_gang.define("class Model:\n    def __init__(self): self.steps = 0\nmodel, rate = Model(), 0.25")
    assert shared_gang.values("model.steps += 3\nmodel.steps * rate") == [0.75] * 3
    assert shared_gang.values("model.steps += 1\nmodel.steps * rate") == [1.0] * 3
    shared_gang.define("rate = 2.5")
    assert shared_gang.values("model.steps * rate") == [10.0] * 3
    shared_gang.define("model.steps = 100")
    assert shared_gang.values("model.steps") == [100] * 3


@pytest.mark.any_launcher
def test_a_function_that_is_defined_anew_leaves_what_it_reads_as_it_is(shared_gang):
    """The new function is sent, and uses the ranks' own state, not the notebook's older state."""
    shared_gang.define("class Model:\n    steps = 0\nmodel = Model()\ndef train():\n    model.steps += 1")
    assert shared_gang.values("train()\ntrain()\nmodel.steps") == [2] * 3
    shared_gang.define("def train():\n    model.steps += 10\n    return model.steps")
    assert shared_gang.values("train()") == [12] * 3
    shared_gang.define("def step(): return train()")
    assert shared_gang.values("step()") == [22] * 3


@pytest.mark.any_launcher
def test_changes_in_place_reach_the_ranks(shared_gang):
    """What the notebook changes in a class or an object counts in the next cell. What only ranks change stays."""
    gang = shared_gang
    gang.define("""
        import argparse, collections, functools, types
        class CFG:
            lr = 1
            def name(self): return "old"
        class Slots:
            __slots__ = ("a", "b")
        def scaled(x, by=1): return x * by
        def counter():
            n = [0]
            return lambda: n[0]
        cfg, slots, count = CFG(), Slots(), counter()
        namespace, arguments = types.SimpleNamespace(lr=1, inner=cfg), argparse.Namespace(lr=1)
        queue, part = collections.deque([1]), functools.partial(scaled, by=1)
        deep = {"a": [(cfg, {"b": [1]})]}
        def helper(): return CFG.lr, CFG().name(), cfg.name()
        slots.a = cfg.own = 1
    """)
    cell = """
        (CFG.lr, helper(), cfg.own, slots.a, namespace.lr, namespace.inner is cfg, arguments.lr, list(queue), part(1),
         deep["a"][0][1]["b"], deep["a"][0][0] is cfg, scaled(1), count(), getattr(cfg, "trained", 0))
    """
    same = (True, 1, [1], 1, [1], True, 1, 0, 0)
    assert gang.values(cell) == [(1, (1, "old", "old"), 1, 1, 1, *same)] * 3
    gang.cell("cfg.trained = 5")
    gang.define("CFG.lr = 2\nCFG.name = lambda self: 'new'\ncfg.own = slots.a = slots.b = namespace.lr = 2")
    gang.define("arguments.lr = 2\nqueue.append(2)\npart.keywords['by'] = 2\ndeep['a'][0][1]['b'].append(2)")
    gang.define("scaled.__defaults__ = (3,)\ncount.__closure__[0].cell_contents[0] = 3")
    new = (True, 2, [1, 2], 2, [1, 2], True, 3, 3, 5)
    for _ in range(2):
        assert gang.values(cell) == [(2, (2, "new", "new"), 2, 2, 2, *new)] * 3
    assert gang.values("slots.b") == [2] * 3
    gang.define("del CFG.lr, slots.b")
    assert gang.values("hasattr(CFG, 'lr'), hasattr(slots, 'b')") == [(False, False)] * 3


CHANGES = {
    "a base class": (
        "class Base:\n    lr = 1\nclass CFG(Base): pass\ncfg = CFG()",
        "CFG.lr, cfg.lr",
        "Base.lr = 2",
    ),
    "the bases of a class": (
        "class A:\n    v = 1\nclass B:\n    v = 2\nclass C(A): pass\nc = C()",
        "C.v, c.v",
        "C.__bases__ = (B,)",
    ),
    "a metaclass": (
        "class Meta(type):\n    k = 1\nclass A(metaclass=Meta): pass\na = A()",
        "A.k, type(a).k",
        "Meta.k = 2",
    ),
    "the text of a function": ("def f(x: int): 'old'", "f.__doc__, f.__annotations__", "f.__doc__ = 'new'"),
    "the name of a class": ("class A: pass\na = A()", "type(a).__name__", "A.__name__ = 'B'"),
    "the order of a dict": ("d = {'a': object(), 'b': object()}", "list(d)", "d['a'] = d.pop('a')"),
    "the factory of a dict": (
        "import collections\nd = collections.defaultdict(list, a=object())",
        "d.default_factory",
        "d.default_factory = dict",
    ),
    "a list that is two parts": (
        "from types import SimpleNamespace\ns = [1]\no = SimpleNamespace(a=s, b=SimpleNamespace(c=s))",
        "o.a, o.b.c, o.a is o.b.c",
        "s.append(2)",
    ),
    "a part that becomes another": (
        "from types import SimpleNamespace\no = SimpleNamespace(a=[1], b=[1])",
        "o.a, o.b, o.a is o.b",
        "o.b = o.a",
    ),
    "a computed value that is out of date": (
        "import functools\nclass A:\n    b = 1\n    @functools.cached_property\n    def c(self): return self.b\n"
        "a = A()\na.c",
        "a.c",
        "a.b = 2\ndel a.c",
    ),
    "a module that the notebook has made": ("import types\nm = types.ModuleType('m')\nm.x = 1", "m.x", "m.x = 2"),
}


@pytest.mark.any_launcher
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_in_place_reaches_the_ranks(shared_gang, what):
    """The next cell sees what the notebook sees."""
    setup, look, change = CHANGES[what]
    for code in (setup, change):
        shared_gang.define(code)
        assert shared_gang.values(f"({look})", 0) == [eval(look, shared_gang.notebook)]
        assert not shared_gang.view.record.notices


@pytest.mark.any_launcher
@pytest.mark.parametrize(
    ("value", "train", "change", "look"),
    [
        ("[Thing()]", "x[0].steps = 5", "x.append(Thing())", "x[0].steps, x[1].steps"),
        ("[Thing()]", "x[0].steps = 5", "x.insert(0, Thing())", "x[1].steps, x[0].steps"),
        ("[0, Thing(), Thing()]", "x[1].steps = 5", "x.pop()", "x[1].steps, len(x) - 2"),
        ("[{'m': Thing()}]", "x[0]['h'] = [5]", "x.append({'m': Thing()})", "x[0]['h'][0], x[1]['m'].steps"),
        ("collections.deque([Thing()])", "x[0].steps = 5", "x.append(Thing())", "x[0].steps, x[1].steps"),
        ("{'a': Thing(), 'b': 0}", "x['a'].steps = 5", "x['b'] = x.pop('a')", "x['b'].steps, len(x) - 1"),
        ("{'a': Thing(), 'b': Thing()}", "x['a'].steps = 5", "x['a'] = x.pop('a')", "x['a'].steps, x['b'].steps"),
    ],
)
def test_a_container_that_changes_keeps_what_ranks_have_made_of_its_items(shared_gang, value, train, change, look):
    """Only what the notebook has added or moved is changed on the ranks."""
    shared_gang.define(f"import collections\nclass Thing:\n    steps = 0\nx = {value}")
    shared_gang.cell(train)
    shared_gang.define(change)
    assert shared_gang.values(look, 0) == [(5, 0)]


@pytest.mark.any_launcher
def test_a_change_is_repeated_once(shared_gang):
    """A later cell that reads the object under another name finds what cells have made of it since."""
    gang = shared_gang
    gang.define("class Thing: pass\nmodel, trainer = Thing(), Thing()\ntrainer.model, model.steps = model, 0")
    assert gang.values("trainer.model is model") == [True] * 3
    gang.define("model.steps = 5")
    assert gang.values("trainer.model.steps += 1\ntrainer.model.steps") == [6] * 3
    assert gang.values("model.steps, trainer.model is model") == [(6, True)] * 3
    gang.define("items = [Thing()]\ntrainer.items = items")
    assert gang.values("len(items), trainer.items is items") == [(1, True)] * 3
    gang.define("items.append(Thing())")
    assert gang.values("len(trainer.items)") == [2] * 3
    assert gang.values("len(items), len(trainer.items)") == [(2, 2)] * 3
    gang.cell("del model.steps")
    gang.define("del model.steps")
    assert gang.values("hasattr(trainer.model, 'steps')") == [False] * 3


def test_objects_of_an_earlier_value_of_a_name(shared_gang):
    """A new object shares the ranks' objects even if the name's earlier value contained them, too."""
    shared_gang.define("class Thing: pass\nmodel, trainer = Thing(), Thing()\ntrainer.model = model")
    assert shared_gang.values("trainer.model is model") == [True] * 3
    shared_gang.define("trainer = Thing()\ntrainer.model = model")
    assert shared_gang.values("trainer.model is model") == [True] * 3


def test_a_change_that_cannot_be_sent_alone(shared_gang):
    """If the object's class leaves out what has changed when it is packed, the object is sent as a whole."""
    shared_gang.define("""
        import threading
        class Guarded:
            def __init__(self): self.lock, self.x = None, 1
            def __getstate__(self): return {"lock": None, "x": self.x}
        guarded = Guarded()
    """)
    assert shared_gang.values("guarded.x") == [1] * 3
    shared_gang.define("guarded.lock, guarded.x = threading.Lock(), 2")
    assert shared_gang.values("guarded.x, guarded.lock") == [(2, None)] * 3


def test_objects_that_are_sent_later(shared_gang):
    """They share the objects that ranks already have, as in the notebook."""
    shared_gang.define("NONE, held = object(), [1]\ndef f(): return 1\nclass Kind: pass")
    assert shared_gang.values("NONE, held, f(), Kind and 0")[0][1:] == ([1], 1, 0)
    shared_gang.define("labels = {f: 'f', NONE: 'none', Kind: 'kind'}\npair = (held, NONE)")
    cell = "labels[f], labels[NONE], labels[Kind], pair[0] is held, pair[1] is NONE"
    assert shared_gang.values(cell) == [("f", "none", "kind", True, True)] * 3
    shared_gang.define("held.append(2)\nlater = [held]")
    assert shared_gang.values("later[0], held, later[0] is held") == [([1, 2], [1, 2], True)] * 3


@pytest.mark.extended_on("spark", "what is sent does not depend on who starts the ranks: test_push_and_pull")
def test_a_change_of_a_model_leaves_what_ranks_have_trained(shared_gang):
    """Only the part that the notebook has changed is sent. New objects share the ranks' own parameters."""
    pytest.importorskip("torch")
    gang = shared_gang
    gang.define("""
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    """)
    train = """
        before = model[0].weight.item()
        model[0](torch.ones(1, 1)).sum().backward()
        optimizer.step()
        before != model[0].weight.item()
    """
    look = "model[0].weight.item(), model[1].p, optimizer.param_groups[0]['lr'], len(optimizer.state)"
    assert gang.values(train) == [True] * 3
    trained = gang.values("model[0].weight.item()", 0)[0]
    gang.define("model[1].p = 0.0\noptimizer.param_groups[0]['lr'] = 0.5\nmodel.eval()")
    assert gang.values(look, 0) == [(trained, 0.0, 0.5, 2)]
    assert not gang.view.record.notices
    assert gang.values(train) == [True] * 3
    trained = gang.values("model[0].weight.item()", 0)[0]
    gang.define("optimizer = torch.optim.SGD(model.parameters(), lr=2.0)")
    assert gang.values(look, 0) == [(trained, 0.0, 2.0, 0)]
    assert gang.values(train) == [True] * 3
    gang.define("with torch.no_grad(): model[0].weight.fill_(7.0)")
    assert gang.values(look, 0)[0][0] == 7.0
    assert "model.0.weight" in gang.view.record.notices[0].text
    assert gang.values(train, 0) == [True]


@pytest.mark.any_launcher
def test_globals_of_a_held_function_that_change(shared_gang):
    """The changed globals are sent, though neither the function nor the cell has changed."""
    shared_gang.define("rates = [0.5]\ndef rate(): return rates[-1]")
    assert shared_gang.values("rate()") == [0.5] * 3
    shared_gang.define("rates.append(0.75)")
    assert shared_gang.values("rate()") == [0.75] * 3


@pytest.mark.any_launcher
def test_the_class_of_what_is_sent(shared_gang):
    """The class is sent under its name. Its instances share it until the notebook or a cell redefines it."""
    gang = shared_gang
    gang.define("class Thing:\n    version = 1\nfirst, second = Thing(), Thing()")
    by_name = "import pickle\ntype(pickle.loads(pickle.dumps({0}))) is type({0}), {0}.version"
    assert gang.values(by_name.format("first")) == [(True, 1)] * 3
    assert gang.values("type(second) is type(first) is Thing, 'first' in globals()") == [(True, True)] * 3
    gang.define("class Thing:\n    version = 2\nthird = Thing()")
    assert gang.values(by_name.format("third")) == [(True, 2)] * 3
    gang.values("class Thing:\n    version = 3\nmine = Thing()")
    gang.define("fourth = Thing()")
    assert gang.values("type(mine) is Thing, type(fourth) is Thing, fourth.version") == [(True, False, 2)] * 3


@pytest.mark.standalone("values go to executors and back")
def test_push_and_pull(shared_gang):
    """--push sends the notebook's value even if the ranks' value is newer.

    --pull copies the value of the first rank that ran the cell.
    """
    shared_gang.define("x = [1]")
    assert shared_gang.values("x.append(rank)\nx", pull=("x",)) == [[1, 0], [1, 1], [1, 2]]
    assert shared_gang.notebook["x"] == [1, 0]
    assert shared_gang.values("x") == [[1, 0], [1, 1], [1, 2]]
    assert shared_gang.values("x", push=("x",)) == [[1, 0]] * 3
    shared_gang.cell("y = rank", 1, 2, pull=("y",))
    assert shared_gang.notebook["y"] == 1
    with pytest.raises(ResultError, match="rank 0 has no variable `nothing`"):
        shared_gang.cell("if rank:\n    nothing = 1", pull=("nothing",))
    with pytest.raises(CaptureError, match="Did you mean `y`"):
        shared_gang.cell("rank", pull=("yy",))


@pytest.mark.any_launcher
def test_a_notebook_change_counts_whatever_was_asked_in_between(shared_gang):
    """A request for the ranks' stacks does not make a changed value of the notebook count as sent."""
    shared_gang.cell("chosen = 1")
    shared_gang.define("chosen = 2")
    shared_gang.gang.stacks()
    assert shared_gang.values("chosen") == [2] * 3


@pytest.mark.any_launcher
def test_a_value_that_could_not_be_loaded_is_sent_again(shared_gang):
    """If a rank could not load a value, the value does not count as held by that rank."""
    shared_gang.define("""
        import os
        class Picky:
            def __reduce__(self): return (load, (os.environ.get("FLAW"),))
        def load(flaw): return 1 // int(flaw)
        a, b = Picky(), [1]
    """)
    os.environ["FLAW"] = "0"
    try:
        assert "ZeroDivisionError" in str(failed(shared_gang, "a, b"))
        os.environ["FLAW"] = "1"
        assert shared_gang.values("a, b") == [(1, [1])] * 3
    finally:
        del os.environ["FLAW"]


@pytest.mark.any_launcher
def test_values_show_once_for_equal_ranks(shared_gang):
    """The notebook shows equal values of several ranks once."""
    from IPython.lib.pretty import pretty

    assert pretty(shared_gang.cell("7")) == "ranks 0–2: 7"
    assert pretty(shared_gang.cell("rank // 2")) == "ranks 0, 1: 0\nrank 2: 1"


# ── Errors, interrupts, time limits: the cell ends, the gang stays ────────────


@pytest.mark.any_launcher
def test_an_exception_ends_the_cell_alone(shared_gang):
    """The other ranks are interrupted, the error shows the failing line, and all variables are kept."""
    pids = shared_gang.values("import os, time\nkept = rank\nos.getpid()")
    error = failed(shared_gang, "if rank == 1:\n    raise ValueError('bad shape')\ntime.sleep(600)")
    assert error.record.failed_rank == 1
    assert "→ 3      raise ValueError('bad shape')" in str(error)
    assert not shared_gang.gang.ended
    assert shared_gang.values("[kept, os.getpid()]") == [[rank, pid] for rank, pid in enumerate(pids)]


@pytest.mark.any_launcher
def test_an_error_in_a_function_of_an_earlier_cell(shared_gang):
    """The error says that the failing line is in an earlier cell, and which line of the current cell called it."""
    shared_gang.cell("\n\n\ndef divide(x):\n    return 1 / x")
    text = str(failed(shared_gang, "a = 0\ndivide(a)"))
    assert "an earlier cell" in text
    assert mentions(text, "called from", "cell line 3", "divide(a)")


EXITS = {
    "sys.exit()": "import sys\nsys.exit()",
    "sys.exit(main())": "import sys\ndef main(): return 0\nsys.exit(main())",
    "exit()": "exit()",
    "absl": "from absl import app\napp.run(lambda arguments: None)",
    "click": "import click\n@click.command()\ndef main(): pass\nmain()",
}


@pytest.mark.any_launcher
def test_exits_that_are_exceptions(shared_gang):
    """An exit ends the cell, not the rank.

    Without a code, the cell succeeds. With a code, it fails, and the error names the code.
    """
    for code in EXITS.values():
        result = shared_gang.cell(f"reached = rank\n{code}\nreached = 'the rest of the cell'", pull=("reached",))
        assert (result.values, result.pulled) == ([None] * 3, {"reached": 0})
        assert [rank.state for rank in result.record.ranks] == ["finished"] * 3
    assert "called sys.exit(2)" in str(failed(shared_gang, "import sys\nsys.exit(2)"))
    assert shared_gang.values("import sys\nreached, sys.stdin.read()") == [(rank, "") for rank in range(3)]
    # A process that the cell forks ends with the code that it passes to sys.exit().
    forked = """
import os, sys
child = os.fork()
if child == 0:
    sys.exit(rank)
os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
    assert shared_gang.values(forked) == [0, 1, 2]


@pytest.mark.standalone("ranks are interrupted on executors")
def test_interrupt_keeps_the_gang(shared_gang):
    """Stop ends the cell; the ranks keep their variables, with the values that they had at that moment."""
    shared_gang.cell("import time\nsteps = 0")
    said = interrupted(shared_gang, "steps += 1\nprint('ready')\nwhile True:\n    steps += 1\n    time.sleep(0.01)")
    assert "3 ranks stopped" in said
    assert not shared_gang.gang.ended
    assert all(steps > 0 for steps in shared_gang.values("steps"))


def test_interrupt_of_some_ranks(shared_gang):
    """Only the ranks that run the cell are interrupted."""
    assert "1 rank stopped" in interrupted(shared_gang, f"print('ready')\n{FOREVER}", 1)
    assert shared_gang.values("rank") == [0, 1, 2]


def test_interrupt_at_any_time(shared_gang):
    """No matter how far the cell has run, Stop ends it at once, and the gang stays up."""
    pids = shared_gang.pids()
    for step in range(12):
        interrupt_after(0.002 * step, lambda: shared_gang.cell(FOREVER))
    assert shared_gang.pids() == pids


def test_timeout_keeps_the_gang(shared_gang, limit):
    """When the time limit is exceeded, the error says which line each rank had reached, and the gang stays up."""
    cell = f"import threading, time; {READY}\nif rank == 0:\n    time.sleep(600)\nelse:\n    time.sleep(601)"
    with pytest.raises(RunTimeout) as caught:
        shared_gang.cell(cell, timeout_s=limit(shared_gang, ready(3)))
    assert mentions(str(caught.value), "rank 0", "waits", "cell line 4")
    assert not shared_gang.gang.ended
    assert shared_gang.values("rank") == [0, 1, 2]


STEP = """
import torch
import horovod.torch as hvd
hvd.init()
sums = [hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, name="total").item()]
"""
SOON = f"import threading\n{READY}"
LONELY = {
    "horovod": (
        STEP,
        f"{SOON}\nif rank == 0:\n    hvd.allreduce(torch.ones(3), name='lonely')",
        "hvd.shutdown()",
    ),
    "torch": (
        "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.tensor(float(rank))\ndist.all_reduce(x)\nsums = [x.item()]",
        f"{SOON}\nif rank == 0:\n    dist.all_reduce(torch.ones(3))",
        "dist.destroy_process_group()",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", LONELY)
@pytest.mark.standalone("the ranks meet at the executors' addresses")
def test_a_collective_in_every_cell(shared_gang, framework):
    """Ranks form a ring in each of several cells. An interrupt frees them from a collective that one of them skips."""
    make, wait, leave = LONELY[framework]
    for _ in range(2):
        assert shared_gang.values(f"{make}\n{leave}\nsums", framework=framework) == [[3.0]] * 3
    if framework == "horovod":  # once more, without a shutdown in between
        assert shared_gang.values(f"{make}\nsums", framework=framework) == [[3.0]] * 3
    else:
        shared_gang.cell(make, framework=framework)
    said = interrupted(
        shared_gang, f"{wait}\nelse:\n    {FOREVER.replace(chr(10), chr(10) + '    ')}", framework=framework
    )
    assert not shared_gang.gang.ended
    assert mentions(said, "ended", "hvd.init()")
    assert shared_gang.values(f"{make}\n{leave}\nsums", framework=framework) == [[3.0]] * 3


@pytest.mark.extended_on("spark", "test_a_collective_in_every_cell runs collectives there; the exception ends them")
def test_one_that_fails_lets_the_others_out_of_a_collective(shared_gang):
    """The error is the exception, not the failures that it caused on other ranks."""
    shared_gang.cell(STEP, framework="horovod")
    cell = "if rank == 1:\n    raise ValueError('bad shape')\nhvd.allreduce(torch.ones(3), name='lonely')"
    error = failed(shared_gang, cell, framework="horovod")
    assert error.record.failure.summary == "ValueError: bad shape"
    assert not shared_gang.gang.ended
    assert shared_gang.values(f"{STEP}\nhvd.shutdown()\nsums", framework="horovod") == [[3.0]] * 3


# ── Where every rank is ───────────────────────────────────────────────────────


@pytest.mark.standalone("the stacks are read on the executors")
def test_stacks_between_cells(shared_gang, wait_until):
    """Ranks without a cell are idle, even if a thread of an earlier cell is still running."""
    shared_gang.cell(
        "import threading\nover = threading.Event()\nif rank == 0:\n    threading.Thread(target=over.wait).start()"
    )

    def states():
        return [row[2:4] for row in describe.stacks_table(shared_gang.gang.stacks())]

    # A rank may still be in the call that sent the end of the cell.
    wait_until(lambda: states() == [("idle", "")] * 3, "all ranks are idle")
    assert shared_gang.values("goes_on = threading.active_count() > 2\nover.set()\ngoes_on", 0) == [True]


def test_a_stall_is_told(shared_gang):
    """When one rank has finished and there is no output, a notice says which lines the others are waiting at."""
    shared_gang.cell("\n\n\nimport time\ndef wait():\n    time.sleep(600)")
    interrupt_when(shared_gang, lambda record: any("silent for" in notice.text for notice in record.notices))
    with pytest.raises(KeyboardInterrupt):
        shared_gang.cell("if rank != 2:\n    wait()", stall_after_s=1.0)
    shared_gang.view.on_refresh = lambda record: None
    (notice,) = shared_gang.view.record.notices
    assert mentions(notice.text, "rank 2", "finished", "ranks 0, 1", "wait", "cell line 3", "`wait()`")


@pytest.mark.extended_on("spark", "test_a_stall_is_told")
def test_a_stall_is_told_again_once_a_rank_was_heard_in_between(shared_gang):
    """A thread that prints once does not hide for good where the ranks wait."""
    cell = """
        import threading, time
        if rank == 0:
            threading.Timer(3, print, ["still here"]).start()
        if rank != 2:
            time.sleep(600)
    """
    told = []

    def twice(record):
        there = any("silent for" in notice.text for notice in record.notices)
        if there != (len(told) % 2 == 1):
            told.append(there)
        return told == [True, False, True]

    interrupt_when(shared_gang, twice)
    with pytest.raises(KeyboardInterrupt):
        shared_gang.cell(cell, stall_after_s=1.0, timeout_s=DEADLINE_S)
    shared_gang.view.on_refresh = lambda record: None


@pytest.mark.slow
def test_ranks_that_wait_in_different_collectives_of_one_line_are_a_stall(pair):
    """Keras' fit(), for example, is one line. The interrupt ends the cell even if TensorFlow swallows it."""
    pair.cell("import horovod.tensorflow as hvd, tensorflow as tf\nhvd.init()", framework="horovod")
    interrupt_when(pair, lambda record: bool(record.notices))
    with pytest.raises(KeyboardInterrupt):
        pair.cell("(hvd.allreduce if rank else hvd.allgather)(tf.ones(3))", framework="horovod", stall_after_s=1.0)
    record = pair.view.record
    (notice,) = record.notices
    for rank, collective in enumerate(("allgather", "allreduce")):
        assert mentions(notice.text, f"rank {rank}", "waits", collective, "cell line 2")
    assert [rank.state for rank in record.ranks] == ["stopped"] * 2
    assert not any("pybind11" in line.text for rank in record.ranks for line in rank.tail)


def test_ranks_that_all_work_at_one_place_are_no_stall(local_gang, tmp_path):
    """Silence alone does not cause a notice. A rank that is waiting for the other one prints, so it is not silent."""
    local_gang.start(2)
    local_gang.notebook["folder"] = tmp_path / "there"
    local_gang.notebook["folder"].mkdir()
    cell = """
        import time
        (folder / str(rank)).touch()
        while len(list(folder.iterdir())) < 2:
            print("waits")
            time.sleep(0.05)
        time.sleep(60)
    """
    with pytest.raises(RunTimeout):
        local_gang.cell(cell, stall_after_s=0.5, timeout_s=3)
    assert not local_gang.view.record.notices


# ── Between cells ─────────────────────────────────────────────────────────────


@pytest.mark.any_launcher
def test_output_between_cells_comes_with_the_next(shared_gang, wait_until, tmp_path):
    """What a thread prints while no cell is running is shown by the next cell, even after a request for stacks."""
    shared_gang.notebook["folder"] = tmp_path
    shared_gang.cell("""
        import threading, time
        def later():
            while not (folder / "go").exists():
                time.sleep(0.01)
            print("from", rank, "later")
            (folder / f"said by {rank}").touch()
        threading.Thread(target=later).start()
    """)
    (tmp_path / "go").touch()

    def all_have_printed():
        shared_gang.gang.stacks()
        return len(list(tmp_path.glob("said by *"))) == 3

    wait_until(all_have_printed, "the threads have printed")
    shared_gang.cell("rank")
    assert sorted(line.text for line in shared_gang.view.record.recent) == [f"from {rank} later" for rank in range(3)]


@pytest.mark.any_launcher
def test_a_flood_between_cells_is_bounded(shared_gang, wait_until):
    """The end of the output is kept, and a notice says that the beginning was dropped."""
    shared_gang.cell("""
        import threading, time
        def flood():
            time.sleep(0.3)
            for _ in range(5_000):
                print('x' * 999)
            print("the end of", rank)
        flooding = threading.Thread(target=flood)
        flooding.start()
    """)
    gang = shared_gang.gang
    wait_until(lambda: "more between cells than can be kept" in "".join(gang.news), "the flood is noticed")
    shared_gang.cell("flooding.join()")
    assert mentions(shared_gang.view.record.notices[0].text, "between cells", "can be kept")
    folder = Path(shared_gang.view.record.log_folder)
    for rank in range(3):
        assert run_store.log(folder, rank).endswith(f"the end of {rank}\n")


# ── Gangs that end ────────────────────────────────────────────────────────────


@pytest.mark.standalone("the executor says that its worker has died")
def test_a_rank_that_dies_in_a_cell(new_gang):
    """The error names the rank, and the gang ends. Its names are lost, and the next cell says that its gang is new."""
    new_gang.start()
    new_gang.cell("import os, signal, time\nweights = 1")
    error = failed(new_gang, "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)")
    assert (error.record.failed_rank, error.record.failure.summary) == (1, "killed by SIGKILL")
    assert mentions(str(error), "gang", "ended", "rank 1 died")
    assert new_gang.gang.lost
    with pytest.raises(CaptureError, match="weights"):
        new_gang.cell("weights")
    assert "rank 1: killed by SIGKILL" in new_gang.gang.news[0]
    assert new_gang.values("rank") == [0, 1, 2]
    assert "a new gang" in new_gang.view.record.notices[0].text


def test_a_fault_of_a_gpu_ends_the_gang(local_gang):
    """After such an error, the process of the rank cannot use CUDA any more, so the next cell gets new ranks."""
    local_gang.start(2)
    error = failed(local_gang, "raise RuntimeError('CUDA error: device-side assert triggered')", 0)
    assert error.record.failure.gpu.kind == "assert"
    assert local_gang.gang.lost
    assert local_gang.cell("rank").values == [0, 1]


@pytest.mark.standalone("the executor says that its worker has died")
def test_ranks_killed_between_cells(new_gang, wait_until):
    """The notebook is told at once which ranks died, and the next cell says that their state is gone."""
    new_gang.start().cell("weights = 1")
    for pid in new_gang.pids()[:2]:
        psutil.Process(pid).kill()
    pattern = r"gang of 3 ranks .* has ended, .*ranks? 0.*: killed by SIGKILL"
    wait_until(lambda: any(re.search(pattern, text) for text in new_gang.told), "the notebook is told")
    assert new_gang.values("rank") == [0, 1, 2]
    assert "a new gang" in new_gang.view.record.notices[0].text


def test_a_rank_that_dies_after_it_has_finished(new_gang):
    """The death of a rank that has finished ends the cell, while other ranks are still running it."""
    new_gang.start()
    killed = []

    def kill(record):
        if not killed and record.ranks[0].state == "finished":
            killed.append(True)
            psutil.Process(record.ranks[0].pid).kill()

    new_gang.view.on_refresh = kill
    error = failed(new_gang, f"if rank:\n{textwrap.indent(FOREVER, '    ')}", timeout_s=DEADLINE_S)
    new_gang.view.on_refresh = lambda record: None
    assert (error.record.failed_rank, error.record.failure.summary) == (0, "killed by SIGKILL")
    assert new_gang.values("rank") == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.extended("repetition", "test_any_rank_killed_at_any_time, and test_a_rank_that_dies_in_a_cell")
def test_any_rank_killed_at_any_time_of_a_cell(new_gang):
    """The error names the rank that was killed, whichever it is and whenever it is killed; the next cell works."""
    new_gang.start()
    chance = random.Random(11)
    for _ in range(10 if new_gang.where == "local" else 4):
        assert new_gang.values("rank") == [0, 1, 2]
        victim, at = chance.randrange(3), time.monotonic() + chance.uniform(0, 0.2)
        pid = new_gang.pids()[victim]

        def kill(record, pid=pid, at=at):
            if time.monotonic() >= at:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()

        new_gang.view.on_refresh = kill
        error = failed(new_gang, "import time\nfor _ in range(1000):\n    print(rank)\n    time.sleep(0.05)")
        new_gang.view.on_refresh = lambda record: None
        assert (error.record.failed_rank, error.record.failure.summary) == (victim, "killed by SIGKILL")
        assert new_gang.gang.lost


STUBBORN = {
    "swallows every interrupt": (
        # `ready` is printed within the try: an interrupt may come as soon as the last rank is ready.
        "import time\nsaid = False\nwhile True:\n    try:\n        said = said or print('ready') is None\n"
        "        time.sleep(1)\n    except KeyboardInterrupt:\n        pass",
        "ranks 0–2 did not respond",
    ),
    "is frozen": (
        # Rank 1 ignores an interrupt that comes before it stops itself.
        "import os, signal, time\nif rank == 1:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready')\n"
        f"if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n{FOREVER}",
        "rank 1 did not respond",
    ),
}


@pytest.mark.parametrize("what", STUBBORN)
def test_a_rank_that_does_not_come_back_takes_the_gang_with_it(local_gang, what):
    """After the grace period, the gang is ended. The KeyboardInterrupt says so, and names the ranks at fault."""
    local_gang.start(3)
    cell, why = STUBBORN[what]
    said = interrupted(local_gang, cell)
    assert local_gang.gang.lost
    assert why in said
    assert local_gang.values("rank") == [0, 1, 2]


def test_one_interrupt_that_is_lost(local_gang):
    """A rank that swallows one interrupt, as callbacks do, is interrupted again and keeps its state."""
    local_gang.start(2)
    said = interrupted(local_gang, f"kept = 1\ntry:\n    print('ready')\n    import time\n    time.sleep(60)\n"
                                   f"except KeyboardInterrupt:\n    pass\n{FOREVER}")  # fmt: skip
    assert not local_gang.gang.ended
    assert "collectives" not in said  # the ranks were asked to end their collectives, but had none
    assert local_gang.values("kept") == [1, 1]


def test_the_end_of_a_cell_waits_for_the_end_of_an_import(local_gang, tmp_path, monkeypatch):
    """If torch were only half imported, it could neither be used nor be imported again in the same process.

    The time that an import takes does not count. Here, each import ends only after a notice has said that the cell is
    waiting for it. The ranks' collectives are not ended, since no rank is waiting in one.
    """
    monkeypatch.setattr("sparkring.engine.run.supervisor.RETURN_GRACE_S", 1.0)
    packages = tmp_path / "site-packages"
    packages.mkdir()
    for name in ("first", "second"):
        (packages / f"{name}.py").write_text(f"""
import os, sys, time
assert not hasattr(sys, '{name}')
sys.{name} = True
print('ready')
while not os.path.exists({str(tmp_path / name)!r}):
    time.sleep(0.01)
whole = True
""")
    local_gang.start(2)
    local_gang.cell(f"import sys\nsys.path.insert(0, {str(packages)!r})")
    told = []

    def end_import(record) -> None:
        for notice in record.notices:
            told.append(notice.text)
            (tmp_path / ("first" if "ranks 0, 1" in notice.text else "second")).touch()

    interrupt_when(local_gang, lambda record: printed(record, "ready") == 2)
    stop = local_gang.view.on_refresh
    local_gang.view.on_refresh = lambda record: (stop(record), end_import(record))
    with pytest.raises(KeyboardInterrupt) as stopped:
        local_gang.cell(f"import first\n{FOREVER}")
    local_gang.view.on_refresh = end_import
    error = failed(local_gang, "if rank == 0:\n    import second\nraise ValueError('bad shape')")
    local_gang.view.on_refresh = lambda record: None
    said = "waiting for {} to finish importing a package; interrupt again to end the gang instead"
    assert set(told) == {said.format("ranks 0, 1"), said.format("rank 0")}
    for message in (str(stopped.value), str(error)):
        assert mentions(message, "gang", "stays up")
        assert "collectives" not in message
    assert not local_gang.view.record.notices
    assert local_gang.values("import first\nfirst.whole") == [True] * 2
    assert local_gang.values("import second\nsecond.whole", 0) == [True]


def test_a_frozen_rank_is_named(local_gang, monkeypatch):
    """The notice about a stall and the table of stacks name the rank.

    A time limit works even if a large value cannot be sent to a frozen rank.
    """
    local_gang.start(2)
    freeze(local_gang.pids()[1])
    record = local_gang.gang.stacks()
    assert "frozen" in record.ranks[1].stack.state
    interrupt_when(local_gang, lambda record: any("rank 1 is frozen" in notice.text for notice in record.notices))
    with pytest.raises(KeyboardInterrupt, match="rank 1 did not respond"):
        local_gang.cell(FOREVER, stall_after_s=1.0)
    local_gang.view.on_refresh = lambda record: None
    local_gang.cell("1")
    freeze(local_gang.pids()[1])
    local_gang.notebook["large"] = bytes(30_000_000)
    monkeypatch.setattr("sparkring.engine.run.supervisor.RETURN_GRACE_S", 1.0)
    with pytest.raises(RunTimeout):
        local_gang.cell("len(large)", timeout_s=1)


@pytest.mark.standalone("the executors' slots are free again")
def test_stop_and_the_idle_limit_leave_nothing(new_gang, wait_until):
    """Stopping a gang and its idle limit both end all its processes. A fixture checks that nothing else is left."""
    new_gang.start()
    pids = new_gang.pids()
    (stopped,) = warm_gang.stop(new_gang.place)
    assert not stopped.lost
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the ranks have ended")
    new_gang.start(idle_s=1.0)
    pids = new_gang.pids()
    wait_until(lambda: any("no cell ran on it for 1" in text for text in new_gang.told), "the idle limit ends it")
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the ranks have ended")


def test_an_interrupt_while_a_gang_starts_or_stops(local_gang):
    """An interrupted start leaves nothing behind, however far it has come. An interrupted stop is completed."""
    for step in range(6):
        interrupt_after(0.05 * step, lambda: (local_gang.start(2), time.sleep(60)))
        warm_gang.stop("local")
    local_gang.start(2)
    freeze(local_gang.pids()[1])  # so that stopping takes some time
    assert mentions(interrupt_after(0.5, lambda: warm_gang.stop("local")), "after", "gang", "stopped")
    assert not warm_gang.every()


def test_an_interrupt_at_the_end_is_not_lost(local_gang, monkeypatch, request):
    """An interrupt is also raised if the gang is already up when it arrives, or if the run has already ended."""
    # As in a kernel; pyspark's own handler would cancel every job.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupted_before(function):
        def call(*args):
            signal.raise_signal(signal.SIGINT)
            return function(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(warm_gang, "WarmGang", interrupted_before(warm_gang.WarmGang))
        with pytest.raises(KeyboardInterrupt, match=r"after .*gang .*started"):
            local_gang.start(2)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "close", interrupted_before(runner.close))
        with pytest.raises(KeyboardInterrupt, match=r"after .*run .*finished"):
            local_gang.cell("rank * 2")
    assert api.last_result.values == [0, 2]
    assert local_gang.values("rank") == [0, 1]


def test_two_gangs_at_once(spark_gang, local_gang):
    """A local gang and one on Spark each have their own variables."""
    for gang in (spark_gang, local_gang):
        gang.start(2)
        gang.cell(f"where = {gang.where!r}, rank")
    for gang in (spark_gang, local_gang):
        assert gang.values("where") == [(gang.where, 0), (gang.where, 1)]


# ── Spark ─────────────────────────────────────────────────────────────────────


@pytest.mark.standalone("the slots are counted on the cluster")
def test_held_slots_are_shown_and_a_starving_job_is_explained(spark_gang, spark, wait_until):
    """The notebook is told once that a job is waiting for the gang's slots. The job runs when the gang has ended."""
    spark_gang.start(4)
    wait_until(lambda: "warm gang of 4: 4" in slots_table()[-1][-1], "Spark has counted the tasks")
    counted: list[int] = []
    job = threading.Thread(target=lambda: counted.append(spark.range(10).count()), name="the user's job")
    job.start()

    def starving() -> list[str]:  # there may also be a message about a slow start
        return [text for text in spark_gang.told if "waits for task slots" in text]

    wait_until(starving, "the starving job is noticed")
    assert mentions(starving()[0], "stage", "task slots", "gang of 4", "4 of 4")
    assert "%gang stop" in starving()[0]
    warm_gang.stop("spark")
    job.join()
    assert counted == [10]
    assert len(starving()) == 1


@pytest.mark.extended("repetition", "test_a_gang_ends_with_its_session, and runs that make a session")
def test_a_session_of_our_own_and_one_that_ends(driver):
    """If sparkring made the session for a gang, the notebook's own jobs run in this session, too.

    When a session is stopped, its gang ends at once, and a message says so. A later cell's error gives the reason.
    """
    text = driver("""
        import threading
        from pyspark.sql import SparkSession
        from sparkring.engine.run import warm_gang as warm
        from sparkring.errors import LaunchError
        from sparkring.engine.run.options import GangOptions
        warm.start(GangOptions(3, "plain", 3600.0, ()), print, print)
        ours = SparkSession.getActiveSession()
        print("COUNT", ours.range(10).count())
        warm.stop()
        ours.stop()

        session = spark("local[2]")
        say = lambda text: print("SAID", text, flush=True)
        gang = warm.start(GangOptions(2, "plain", 3600.0, ()), say, say)
        session.stop()
        while not gang.ended:
            time.sleep(0.05)
        try:
            warm.find(2, say)
        except LaunchError as error:
            print("ERROR", error)
        warm.stop()
        print("LEFT", [thread.name for thread in threading.enumerate() if thread.name.startswith("sparkring")])
    """).wait()
    assert "COUNT 10" in text, text
    assert mentions(text, "SAID", "gang of 2 ranks", "Spark", "ended"), text
    assert mentions(text, "ERROR", "SparkSession", "stopped")
    assert "LEFT []" in text


# ── Drivers that end, and long lives ──────────────────────────────────────────

WARM = """
from sparkring.engine.run import warm_gang as warm
from sparkring.engine.run.options import GangOptions

def cell(source, gang, namespace=None):
    code = chr(10) + textwrap.dedent(source).strip()
    work = Cell(code, {} if namespace is None else namespace)
    return run_spec(RunSpec(work, Options(np=gang.wanted.np), "plain", "test", code, gang), View())
"""
HOW = {"kill": "os.kill(os.getpid(), signal.SIGKILL)", "exit": "sys.exit()"}


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("kill", "local"),
        pytest.param("kill", "spark", marks=pytest.mark.extended("launcher", "test_interrupt_and_kill_on_spark")),
        ("exit", "local"),
    ],
)
def test_a_driver_that_ends_takes_its_gang_with_it(driver, wait_until, how, where):
    """Whether the driver exits or is killed, all ranks end, and all processes that the ranks have started."""
    found = driver(f"""{WARM}
if {where == "spark"}:
    session = spark("local[2]")
gang = warm.start(GangOptions({2 if where == "spark" else -2}, "plain", 3600.0, ()), print, print)
cell('import os, subprocess; away = subprocess.Popen(["sleep", "600"], start_new_session=True)', gang)
print("PIDS", *[gang.gang.place_of(rank)[2] for rank in range(2)], *cell("away.pid", gang).values, flush=True)
{HOW[how]}
""")
    pids = list(map(int, found.until_said(r"^PIDS (.*)$")[1].split()))
    found.wait()
    assert len(pids) == 4
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "ranks and what they started have ended")
    wait_until(lambda: not found.family(), "members, and Spark, have ended")


@pytest.mark.slow
def test_hundreds_of_cells_leave_nothing(driver):
    """Driver and ranks have the same descriptors and threads as before, and have grown by less than 10 MB."""
    text = driver(f"""{WARM}
import gc, json, threading, psutil
gang = warm.start(GangOptions(-2, "plain", 3600.0, ()), print, print)

def state(of=psutil.Process()):
    gc.collect()
    return [of.num_fds(), of.num_threads(), of.memory_info().rss]

def states():
    return [state(), *(state(psutil.Process(gang.gang.place_of(rank)[2])) for rank in range(2))]

def cells(count):
    notebook = {{"data": list(range(1000))}}
    exec("def total(): return sum(data)", notebook)
    for number in range(count):
        notebook["data"][0] = number
        assert cell("x = [total()] * 100; rank", gang, notebook).values == [0, 1]

cells(50)
before = states()
cells(200)
print("STATES", json.dumps([before, states()]))
""").wait()
    assert "STATES" in text, text
    import json

    for before, after in zip(*json.loads(text.rpartition("STATES")[2]), strict=True):
        assert after[:2] == before[:2]
        assert after[2] - before[2] < 10e6
