"""Finds out where the time of a rank's main thread goes, and tells the driver about once a second.

The thread that receives messages looks at the main thread's stack about twelve times a second, and asks the system
whether the main thread is running or asleep. The time since the previous look is added to the phase that the two show.
A look takes some ten microseconds. Nothing of the user's code is traced or replaced.

Many calls neither show on the stack whether they compute or wait: DDP's backward pass does both in native code, and so
does a TensorFlow graph. There, a thread that is running computes, and one that is asleep waits.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import NamedTuple

from sparkring.history import stacks
from sparkring.runtime import phase, report, world
from sparkring.wire.messages import PHASES, SpentAt, TimeSpent, UserCall

DATA, COMPUTE, COLLECTIVE, NATIVE, SAVE, START, IDLE, OTHER = PHASES

# The pauses between looks differ, since steps of the same length as the pauses would always be met at the same place.
LEAST_PAUSE_S, MORE_PAUSE_S = 0.06, 0.04
TELL_EVERY_S = 1.0
RANKS_PER_S = 64  # the ranks of a larger ring tell less often, so that the driver gets so many messages a second
PLACES_KEPT, PLACES_TOLD = 400, 8
NAMES_KEPT = 12  # further names of the user's own phases count as "other"
FUNCTION_CHARACTERS, CALLS_TOLD = 40, 4
# After a longer pause, the time counts only if the main thread was computing: it held Python's lock, and the thread
# that looks could not run. Otherwise, the process was suspended.
LONGEST_PAUSE_S = 1.0
_GOLDEN = 0.618034  # multiples of it, modulo 1, are spread evenly

_LIBRARIES = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3\.\d+/|\.zip/|^<(?:frozen |string>|__array)|__autograph_generated_file"
)
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_Kind = str
_USER, _NESTED = "user", "nested"  # the second: a lambda or a comprehension, which belongs to its caller
_WEAK = "weak"  # reads or writes files, unless a frame farther out says why
_GRAPH, _ENGINE, _THROUGH, _TRACES, _CALLBACK = "graph", "engine", "through", "traces", "callback"
_END = "end"  # what is farther out has only called the cell
# Phases by the file that a frame is in, and what the file belongs to. The first pattern that matches counts.
_FILES: tuple[tuple[str, _Kind, str], ...] = (
    (r"^<frozen importlib", START, "import"),
    (r"sparkring/worker/rank/rank\.py$", _END, ""),
    (r"sparkring/checkpointing/", SAVE, "checkpoint"),
    (r"sparkring/data/", DATA, "shards"),
    (r"/torch/utils/data/_utils/fetch\.py$", DATA, "DataLoader without workers"),
    (r"/torch/utils/data/", DATA, "DataLoader"),
    (r"/torch/(?:serialization|distributed/checkpoint/.*)\.py$", SAVE, "torch.save"),
    (r"/torch/(?:_dynamo|_inductor)/", START, "torch.compile"),
    (r"/torch/autograd/(?:graph|__init__)\.py$", _ENGINE, "backward pass"),
    (r"/torch/(?:_ops|utils/_contextlib)\.py$", _THROUGH, ""),
    (r"/torch/(?:distributed|nn/parallel)/", _ENGINE, "torch.distributed"),
    (r"/tensorflow/python/data/", DATA, "tf.data"),
    (r"/tensorflow/python/ops/script_ops\.py$", _CALLBACK, "tf.data"),
    (r"/tensorflow/python/(?:checkpoint|saved_model|training/saver)", SAVE, "TensorFlow checkpoint"),
    (r"/(?:keras|tf_keras)/src/(?:trainers/data_adapters|utils/data_utils)", DATA, "Keras"),
    (r"/(?:keras|tf_keras)/src/saving/", SAVE, "Keras model"),
    (r"/petastorm/", DATA, "Petastorm"),
    (r"/site-packages/(?:datasets|webdataset|streaming)/", DATA, "dataset"),
    (r"/(?:safetensors|h5py|orbax)/|/joblib/numpy_pickle", SAVE, "file"),
    (r"/jax/_src/(?:array|interpreters/pxla|api)\.py$", _GRAPH, "jax"),
    (r"/jax/_src/(?:compiler|pjit|interpreters/(?:mlir|partial_eval))\.py$", START, "jit"),
    (r"/(?:fsspec|pyarrow|s3fs|gcsfs|adlfs)/|/pandas/io/(?:parquet|parsers|sql|json|feather)", _WEAK, "files"),
)


class _Label(NamedTuple):
    """What a function is: the kind of its frames, what it belongs to, and the function's name in the user's code."""

    kind: _Kind
    what: str = ""
    function: str = ""


class Look(NamedTuple):
    """What a stack shows: a phase, its place, and the kind of the stack if it is something else in a thread asleep."""

    kind: _Kind
    what: str
    calls: tuple[UserCall, ...]
    asleep_kind: _Kind = ""


_labels: dict[types.CodeType, _Label] = {}
_LABELS_KEPT = 20_000


def _label(code: types.CodeType) -> _Label:
    """Return what a function is. The answers are remembered, since a stack has many frames."""
    known = _labels.get(code)
    if known is None:
        if len(_labels) >= _LABELS_KEPT:
            _labels.clear()
        known = _labels[code] = _labelled(code.co_filename, code.co_name, getattr(code, "co_qualname", code.co_name))
    return known


def _labelled(file: str, name: str, qualified_name: str) -> _Label:
    if name == stacks.TRACES_GRAPH:
        return _Label(_TRACES, "tracing")
    if what := stacks.waits_in(file, name):
        return _Label(COLLECTIVE, what)
    if stacks.runs_graph(file, name):
        return _Label(_GRAPH, "TensorFlow")
    own = file.startswith((_OWN, "sparkring/"))  # executors import sparkring from a zip, where paths are relative
    short = f"sparkring/{file.removeprefix(_OWN)}" if file.startswith(_OWN) else file
    for pattern, kind, what in _FILES:
        if re.search(pattern, short):
            return _Label(kind, what)
    if own or _LIBRARIES.search(file):
        return _Label("")
    function = qualified_name.rpartition("<locals>.")[2]
    if name.startswith("<"):
        return _Label(_USER if name == "<module>" else _NESTED)
    if not (stacks.is_cell(file) or file.startswith("<") or "ipykernel" in file):
        function = f"{os.path.basename(file).removesuffix('.py')}.{function}"
    return _Label(_USER, "", function[:FUNCTION_CHARACTERS])


def read_stack(frame: types.FrameType | None, cell: str) -> Look:
    """Say what the stack that ends with `frame` shows. `cell` is the file name of the cell that is running.

    The innermost frame that belongs to a phase decides. The frames farther out have called it.
    """
    calls: list[UserCall] = []
    line = 0
    strong = conditional = weak = _Label("")
    traces, direct = False, True  # direct: so far, only PyTorch's engine
    while frame is not None:
        label = _label(frame.f_code)
        kind = label.kind
        if kind in (_USER, _NESTED):
            line = line or (frame.f_lineno if frame.f_code.co_filename == cell else 0)
            if kind == _USER:
                if not calls or calls[-1].function != label.function:  # a recursion counts as one call
                    calls.append(UserCall(label.function, line))
                line = 0
        elif kind == _END:
            break
        elif kind == _WEAK:
            weak = weak if weak.kind else label
        elif kind == _TRACES:
            traces = True
        elif kind == _ENGINE:
            conditional = label if direct else conditional
        elif kind == _GRAPH:
            conditional = label if not (calls or strong.kind or conditional.kind) else conditional
        elif kind in (COLLECTIVE, DATA, SAVE) or (kind == START and not any(call.function for call in calls)):
            # An import that has called a function of the user's does not count: it may be the training itself.
            strong = strong if strong.kind else label
        direct = direct and kind in (_ENGINE, _THROUGH)
        frame = frame.f_back
    user = (*calls[: CALLS_TOLD - 1], *calls[CALLS_TOLD - 1 :][-1:])
    if traces and strong.kind in ("", COLLECTIVE):  # while TensorFlow traces a graph, it only records collectives
        return Look(START, "tracing", user)
    if conditional.kind:
        return Look(strong.kind or COMPUTE, conditional.what, user, conditional.kind)
    if strong.kind or weak.kind:
        return Look(strong.kind or DATA, strong.what or weak.what, user)
    return Look(COMPUTE, "", user, IDLE)


class _State(NamedTuple):
    """What the system knows about the main thread. `asleep` is None if it is not known."""

    asleep: bool | None
    ran_s: float
    queued_s: float


class _MainThread:
    """Asks the system whether the main thread is asleep, and how long it has run. This works on Linux only."""

    def __init__(self) -> None:
        self._stat = self._times = -1
        folder = f"/proc/self/task/{os.getpid()}"
        try:
            self._stat = os.open(f"{folder}/stat", os.O_RDONLY | os.O_CLOEXEC)
            self._times = os.open(f"{folder}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass  # not Linux, or a sandbox such as gVisor

    def state(self) -> _State:
        asleep, ran_s, queued_s = None, 0.0, 0.0
        try:
            if self._stat >= 0:
                # Python's lock is released during the read, so a main thread that has waited only for it is running.
                asleep = os.pread(self._stat, 100, 0).rpartition(b") ")[2][:1] in b"SDI"
            if self._times >= 0:
                ran, queued, _ = os.pread(self._times, 100, 0).split()
                ran_s, queued_s = int(ran) / 1e9, int(queued) / 1e9
        except (OSError, ValueError):
            pass
        return _State(asleep, ran_s, queued_s)


_main: _MainThread | None = None
_Place = tuple[str, str, tuple[UserCall, ...]]  # the phase, what is called, and the calls of the user's code


class Sampler:
    """Adds up where the time of the main thread goes while one cell runs."""

    def __init__(self) -> None:
        global _main
        _main = _main or _MainThread()
        self._began = self._looked = time.monotonic()
        self._last = _main.state()
        self._process_s = time.process_time()
        self._cpu_s = self._process_cpu_s = self._queued_s = self._start_queued_s = self._awake_s = 0.0
        self._looks = 0
        self._due = 0.0
        self._phases: dict[str, float] = {}
        self._places: dict[_Place, float] = {}
        self._tell_every_s = TELL_EVERY_S * max(1.0, world.world().size / RANKS_PER_S)
        self._tell_due = self._began + self._tell_every_s
        self._is_over = False
        self._telling = threading.Lock()

    def pause_s(self, most: float) -> float:
        """Return how long the thread that looks may wait until the next look, at most `most`."""
        return max(0.0, min(most, self._due - time.monotonic()))

    def look(self, main_thread: int, cell: str) -> None:
        """If it is time, look at the main thread, and tell the driver from time to time."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + LEAST_PAUSE_S + MORE_PAUSE_S * ((self._looks * _GOLDEN) % 1)
        frames = sys._current_frames()
        try:
            look, named = read_stack(frames.pop(main_thread, None), cell), phase.innermost()
            assert _main is not None
            self._add(now, look, named, _main.state(), [*frames.values()], cell)
        finally:
            frames.clear()  # it has this function's own frame: the cycle would keep the values of the user's code alive
        if now >= self._tell_due:
            with self._telling:
                if not self._is_over:
                    self._tell_due = now + self._tell_every_s
                    report.tell(self.message())

    def finish(self) -> None:
        """Tell the driver for the last time, unless the cell was quick. The main thread calls this after the cell."""
        with self._telling:
            self._is_over = True
            if self._looks and time.monotonic() - self._began >= TELL_EVERY_S:
                report.tell(self.message())

    def _add(
        self, now: float, look: Look, named: str, state: _State, others: Sequence[types.FrameType], cell: str
    ) -> None:
        """Add the time since the previous look to what this look shows."""
        took_s, self._looked = now - self._looked, now
        ran_s, queued_s = state.ran_s - self._last.ran_s, state.queued_s - self._last.queued_s
        process_s = time.process_time()
        process_ran_s = process_s - self._process_s
        others_s = max(0.0, process_ran_s - ran_s)
        self._last, self._process_s = state, process_s
        self._looks += 1
        if took_s > LONGEST_PAUSE_S and ran_s < took_s / 2:
            self._count((OTHER, "", ()), took_s - LONGEST_PAUSE_S)
            took_s = LONGEST_PAUSE_S
        place = look.what, look.calls
        kind = look.kind
        if look.asleep_kind and state.asleep is None:  # the system does not say, but CPU time says whether it computes
            asleep = ran_s + others_s < took_s / 2
            kind = NATIVE if look.asleep_kind in (_GRAPH, _ENGINE) else kind if not asleep else OTHER
        elif look.asleep_kind and state.asleep:
            busy_s = min(took_s, others_s)
            if look.asleep_kind == _ENGINE:
                on_gpu = getattr(sys.modules.get("torch.cuda"), "_initialized", False)
                kind = NATIVE if on_gpu or world.world().size == 1 else COLLECTIVE
            elif look.asleep_kind == _GRAPH:  # other threads compute, or none does
                self._count((named or COMPUTE, *place), busy_s)
                took_s -= busy_s
                kind, place = _in_graph(place, others, cell)
            else:
                kind = look.asleep_kind
        if named and kind not in (COLLECTIVE, NATIVE, START):
            kind = named
        if kind == START:
            self._start_queued_s += queued_s
        else:
            self._awake_s += 0.0 if state.asleep or kind in (COLLECTIVE, NATIVE) else took_s
            self._queued_s += queued_s
            self._cpu_s += ran_s
            self._process_cpu_s += process_ran_s
        self._count((kind, *place), took_s)

    def _count(self, key: _Place, seconds: float) -> None:
        if key[0] not in self._phases and key[0] not in PHASES and len(self._phases) >= NAMES_KEPT:
            key = (OTHER, *key[1:])
        if key not in self._places and len(self._places) >= PLACES_KEPT:
            kept = sorted(self._places.items(), key=lambda place: -place[1])[: PLACES_KEPT // 2]
            self._places = dict(kept)
        self._places[key] = self._places.get(key, 0.0) + seconds
        self._phases[key[0]] = self._phases.get(key[0], 0.0) + seconds

    def message(self) -> TimeSpent:
        """Return where the time has gone since the cell began. Of places that differ only in lines, one is kept."""
        sums: dict[tuple[str, str, tuple[str, ...]], tuple[_Place, float]] = {}
        for place, seconds in sorted(self._places.items(), key=lambda entry: -entry[1]):
            key = (*place[:2], tuple(call.function or f"line {call.line}" for call in place[2]))
            first, sum_s = sums.get(key, (place, 0.0))
            sums[key] = first, sum_s + seconds
        places = sorted(sums.values(), key=lambda entry: -entry[1])[:PLACES_TOLD]
        times_s = self._cpu_s, self._process_cpu_s, self._queued_s, self._start_queued_s, self._awake_s
        cpu_s, process_cpu_s, queued_s, start_queued_s, awake_s = (round(seconds, 3) for seconds in times_s)
        return TimeSpent(
            self._looks,
            round(self._looked - self._began, 3),
            {name: round(seconds, 3) for name, seconds in self._phases.items()},
            tuple(SpentAt(*place, round(seconds, 3)) for place, seconds in places),
            cpu_s,
            process_cpu_s,
            queued_s,
            start_queued_s,
            awake_s,
        )


def _in_graph(
    place: tuple[str, tuple[UserCall, ...]], others: Sequence[types.FrameType], cell: str
) -> tuple[_Kind, tuple[str, tuple[UserCall, ...]]]:
    """Return the phase and the place of a main thread that waits for a graph in which no thread computes.

    `others` are the stacks of the other threads. If a Python function of the graph's input is on one of them, the graph
    waits for it.
    """
    for frame in others:
        at: types.FrameType | None = frame
        while at is not None:
            if (label := _label(at.f_code)).kind == _CALLBACK:
                return DATA, (label.what, (*read_stack(frame, cell).calls, *place[1])[:CALLS_TOLD])
            at = at.f_back
    return NATIVE, place
