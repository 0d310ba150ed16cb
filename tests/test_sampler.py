"""Where a rank's time goes: what stacks show, and how the sampler adds it up."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import types

import pytest

import sparkring
from sparkring.runtime import phase, report, world
from sparkring.wire.messages import PHASES, TimeSpent, UserCall, encode
from sparkring.worker.rank import sampler
from sparkring.worker.rank.sampler import Look, Sampler, read_stack

PACKAGES = "/opt/env/lib/python3.11/site-packages"
CELL = "<cell 2>"
MODULE = (CELL, "<module>")


ROOT = ("sparkring/worker/rank/rank.py", "compute")
_LIBRARY = "/usr/lib/python3.11/pretended.py"


def stack(*frames) -> types.FrameType:
    """Return a real stack of functions with these files and names, innermost first, each at line 3 of its file."""
    call = lambda: sys._getframe(1)  # noqa: E731 - the innermost of `frames` calls it
    for file, name in (*frames, ROOT):
        file = file if file.startswith(("/", "<", "sparkring/")) else f"{PACKAGES}/{file}"
        namespace = {"call": call}
        if name == "<module>":
            namespace["code"] = compile("\n\nvalue = call()", file, "exec")
            source, file, name = "def run():\n exec(code, globals())\n return value", _LIBRARY, "run"
        else:
            source = f"def {name}():\n\n return call()"
        exec(compile(source, file, "exec"), namespace)
        call = namespace[name]
    return call()


def shown(*frames) -> Look:
    sampler._labels.clear()
    return read_stack(stack(*frames), CELL)


LOADER = ("torch/utils/data/dataloader.py", "__next__")
ENGINE = ("torch/autograd/graph.py", "_engine_run_backward")
GRAPH = ("tensorflow/python/eager/context.py", "call_function")
FIT = ("keras/src/engine/training.py", "fit")
LAYER = ("torch/nn/modules/linear.py", "forward")
DDP = ("torch/nn/parallel/distributed.py", "forward")
AUGMENT = (CELL, "augment")


@pytest.mark.parametrize(
    ("frames", "kind", "what", "asleep_kind"),
    [
        ([MODULE], "compute", "", "idle"),
        ([AUGMENT, MODULE], "compute", "", "idle"),
        ([("numpy/linalg.py", "solve"), MODULE], "compute", "", "idle"),
        ([("multiprocessing/queues.py", "get"), LOADER, MODULE], "data", "DataLoader", ""),
        (
            [AUGMENT, ("torch/utils/data/_utils/fetch.py", "fetch"), LOADER, MODULE],
            "data",
            "DataLoader without workers",
            "",
        ),
        ([("sparkring/data/reader.py", "batches"), MODULE], "data", "shards", ""),
        ([("tensorflow/python/data/ops/iterator_ops.py", "__next__"), MODULE], "data", "tf.data", ""),
        ([("petastorm/reader.py", "__next__"), MODULE], "data", "Petastorm", ""),
        ([("pandas/io/parquet.py", "read_parquet"), MODULE], "data", "files", ""),
        ([("horovod/torch/mpi_ops.py", "synchronize"), ("horovod/torch/mpi_ops.py", "allreduce"), MODULE],
         "collective", "allreduce", ""),
        ([("torch/distributed/distributed_c10d.py", "all_reduce"), MODULE], "collective", "all_reduce", ""),
        ([("torch/serialization.py", "save"), MODULE], "save", "torch.save", ""),
        ([("fsspec/core.py", "write"), ("sparkring/checkpointing/writing.py", "w"), MODULE], "save", "checkpoint", ""),
        ([("<frozen importlib._bootstrap>", "_find_and_load"), MODULE], "start", "import", ""),
        ([("torch/_dynamo/convert_frame.py", "compile"), MODULE], "start", "torch.compile", ""),
        ([ENGINE, ("torch/_tensor.py", "backward"), MODULE], "compute", "backward pass", "engine"),
        ([("torch/distributed/c10d_logger.py", "wrapper"), MODULE], "compute", "torch.distributed", "engine"),
        ([GRAPH, FIT, MODULE], "compute", "TensorFlow", "graph"),
    ],
)  # fmt: skip
def test_what_a_stack_shows(frames, kind, what, asleep_kind):
    look = shown(*frames)
    assert (look.kind, look.what, look.asleep_kind) == (kind, what, asleep_kind)
    assert look.calls[-1] == UserCall("", 3)


def test_the_innermost_frame_of_a_phase_decides():
    barrier = ("horovod/torch/mpi_ops.py", "barrier")
    assert shown(barrier, ("sparkring/checkpointing/store.py", "save"), MODULE).kind == "collective"
    # What the user's code does in the forward pass of a DDP model, or in a Python function of a graph, is no waiting.
    assert shown(AUGMENT, LAYER, DDP, MODULE).asleep_kind == "idle"
    assert shown(LAYER, DDP, MODULE).asleep_kind == "idle"
    assert shown(AUGMENT, GRAPH, FIT, MODULE).asleep_kind == "idle"
    # While a graph is traced, its collectives are not run.
    allreduce, trace = ("horovod/tensorflow/mpi_ops.py", "_allreduce"), "tensorflow/python/framework/func_graph.py"
    assert shown(allreduce, (trace, "func_graph_from_py_func"), MODULE).kind == "start"
    # The user's own module may train while it is imported.
    train = [("/home/user/train.py", "train"), ("/home/user/train.py", "<module>")]
    assert shown(*train, ("<frozen importlib._bootstrap>", "_find_and_load"), MODULE).kind == "compute"


def test_the_calls_of_the_users_code():
    helpers = ("/home/user/helpers.py", "resize")
    look = shown(("numpy/core.py", "roll"), helpers, AUGMENT, AUGMENT, (CELL, "step"), MODULE)
    assert look.calls == (UserCall("helpers.resize", 0), UserCall("augment", 3), UserCall("step", 3), UserCall("", 3))
    assert [call.function for call in shown(*((CELL, f"f{at}") for at in range(9)), MODULE).calls] == [
        "f0",
        "f1",
        "f2",
        "",
    ]


@pytest.fixture
def sent(monkeypatch) -> list[TimeSpent]:
    reports: list[TimeSpent] = []
    monkeypatch.setattr(report, "_tell", reports.append)
    return reports


class Thread:
    """Stands for what the system says about the main thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.process_s, self.state_ = 100.0, 0.0, sampler._State(False, 0.0, 0.0)
        clock = types.SimpleNamespace(monotonic=lambda: self.now, process_time=lambda: self.process_s)
        monkeypatch.setattr(sampler, "time", clock)
        monkeypatch.setattr(sampler, "_main", types.SimpleNamespace(state=lambda: self.state_))

    def after(self, seconds, *, asleep=False, ran_s=None, queued_s=0.0, others_s=0.0):
        ran_s = (0.0 if asleep else seconds) if ran_s is None else ran_s
        _, ran_before_s, queued_before_s = self.state_
        self.state_ = sampler._State(asleep, ran_before_s + ran_s, queued_before_s + queued_s)
        self.now, self.process_s = self.now + seconds, self.process_s + ran_s + others_s


@pytest.fixture
def main_thread(monkeypatch) -> Thread:
    return Thread(monkeypatch)


@pytest.fixture
def of_two(monkeypatch):
    monkeypatch.setattr(world, "_current", world.World(rank=0, size=2))


def phases_after(sampled: Sampler, main_thread: Thread, frames, monkeypatch, **state) -> dict[str, float]:
    """Return the seconds of each phase after 0.1 s in which the main thread had this stack."""
    main_thread.after(0.1, **state)
    at = stack(*frames)
    monkeypatch.setattr(sampler.sys, "_current_frames", lambda: {1: at})
    sampled.look(1, CELL)
    return {name: pytest.approx(seconds) for name, seconds in sampled._phases.items()}


@pytest.mark.parametrize(
    ("frames", "state", "phases"),
    [
        ([MODULE], {}, {"compute": 0.1}),
        ([MODULE], {"asleep": True}, {"idle": 0.1}),
        ([ENGINE, MODULE], {}, {"compute": 0.1}),
        ([ENGINE, MODULE], {"asleep": True}, {"collective": 0.1}),
        ([GRAPH, MODULE], {"asleep": True, "others_s": 0.4}, {"compute": 0.1, "native": 0.0}),
        ([GRAPH, MODULE], {"asleep": True, "others_s": 0.03}, {"compute": 0.03, "native": 0.07}),
        ([MODULE], {"asleep": None, "ran_s": 0.1}, {"compute": 0.1}),
        ([MODULE], {"asleep": None, "ran_s": 0.0}, {"other": 0.1}),
        ([ENGINE, MODULE], {"asleep": None, "ran_s": 0.0}, {"native": 0.1}),
        ([LOADER, MODULE], {"asleep": None, "ran_s": 0.0}, {"data": 0.1}),
    ],
)
def test_running_or_asleep(frames, state, phases, sent, main_thread, of_two, monkeypatch):
    """Where a stack cannot tell, the state of the thread does; without it (macOS), unknown is "other" or "native"."""
    assert phases_after(Sampler(), main_thread, frames, monkeypatch, **state) == phases


def test_a_phase_that_the_user_has_named(sent, main_thread, of_two, monkeypatch):
    sampled = Sampler()
    with sparkring.phase("augment"), sparkring.phase("crop"):
        phases_after(sampled, main_thread, [MODULE], monkeypatch)
        phases_after(sampled, main_thread, [LOADER, MODULE], monkeypatch)
        phases_after(sampled, main_thread, [ENGINE, MODULE], monkeypatch, asleep=True)
    assert phases_after(sampled, main_thread, [MODULE], monkeypatch) == {"crop": 0.2, "collective": 0.1, "compute": 0.1}


def test_a_process_that_was_suspended_was_not_computing(sent, main_thread, of_two, monkeypatch):
    sampled = Sampler()
    main_thread.after(30.0, ran_s=0.0)
    phases_after(sampled, main_thread, [MODULE], monkeypatch)
    main_thread.after(30.0)  # native code that holds Python's lock
    phases = phases_after(sampled, main_thread, [MODULE], monkeypatch)
    assert phases == {"other": pytest.approx(29.1), "compute": pytest.approx(31.1)}


def test_what_the_driver_is_told(sent, main_thread, of_two, monkeypatch):
    """Once a second, and at the end; a report is small, however many places there are. A quick cell tells nothing."""
    quick = Sampler()
    phases_after(quick, main_thread, [MODULE], monkeypatch)
    quick.finish()
    assert not sent
    sampled = Sampler()
    for number in range(1_000):
        name = f"a_function_with_a_long_name_that_is_number_{number}"
        with sparkring.phase(f"a phase with a very long name, number {number % 40}"):
            phases_after(sampled, main_thread, [(CELL, name), (CELL, "step"), MODULE], monkeypatch)
    assert 90 <= len(sent) <= 100
    sampled.finish()
    last = sent[-1]
    assert last.looks == 1_000
    assert last.elapsed_s == pytest.approx(100.0)
    assert sum(last.phases.values()) == pytest.approx(100.0, abs=0.1)
    assert len(last.phases) <= sampler.NAMES_KEPT + len(PHASES)
    assert len(json.dumps(encode(last)[0])) < 2_000
    assert len(sampled._places) <= sampler.PLACES_KEPT
    count = len(sent)
    main_thread.after(5.0)
    sampled.look(1, CELL)
    assert len(sent) == count, "after the end, nothing is told"


def test_a_large_ring_tells_less_often(sent, main_thread, monkeypatch):
    monkeypatch.setattr(world, "_current", world.World(rank=0, size=1_024))
    sampled = Sampler()
    for _ in range(200):
        phases_after(sampled, main_thread, [MODULE], monkeypatch)
    assert len(sent) == 1


def test_the_main_thread_is_seen_running_and_asleep(sent, monkeypatch):
    """With the system's own answers: a loop computes, and sleep() is idle."""
    monkeypatch.setattr(sampler, "_main", None)
    sampled, main_thread = Sampler(), threading.get_ident()
    over = threading.Event()

    def look():
        while not over.is_set():
            sampled.look(main_thread, CELL)
            time.sleep(sampled.pause_s(0.1))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        while sampled._phases.get("compute", 0.0) < 0.3:
            sum(range(1_000))
        while sampled._phases.get("idle", 0.0) < 0.3:
            time.sleep(0.2)
    finally:
        over.set()
        looking.join()
        os.close(sampler._main._stat)
        os.close(sampler._main._times)


def test_phase_is_for_the_main_thread_and_for_names():
    inside = []

    def elsewhere():
        with sparkring.phase("elsewhere"):
            inside.append(phase.innermost())

    @sparkring.phase("decorated")
    def decorated():
        inside.append(phase.innermost())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    decorated()
    decorated()
    assert inside == ["", "decorated", "decorated"]
    assert phase.innermost() == ""
    with pytest.raises(TypeError, match="phase"), sparkring.phase(3):
        pass
