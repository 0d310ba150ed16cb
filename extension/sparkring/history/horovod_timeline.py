"""Reads Horovod's timeline as a stream, saves it as valid JSON, and summarises it.

The timeline is a list of Chrome trace events. Each tensor appears as a "process", whose name is in an "M" event. Nested
"B" and "E" events mark the beginning and end of the operations on a tensor. Within NEGOTIATE_ALLREDUCE, an "X" event
whose name is a rank's number says that this rank is ready. The ALLREDUCE that follows contains events such as
WAIT_FOR_DATA, MEMCPY_IN_FUSION_BUFFER and GLOO_ALLREDUCE
(horovod.readthedocs.io/en/stable/timeline_include.html). Times are in microseconds.

If Horovod was killed, the end of the list is missing. The user's code may also have written to the file. Therefore,
parts that cannot be read are skipped, and the use of memory is limited.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Literal, NoReturn

from sparkring.history.events import Lateness, TensorTimes, TimelineSaved

EVENT_CHARACTERS = 64 * 1024  # anything longer is not one of Horovod's events
BROKEN_PLACES = 1_000  # after this many parts that cannot be read, reading stops
TENSORS = 20_000  # at most this many tensors are timed; events of further tensors are ignored
RANKS = 1_024
DEPTH = 16
NAME_CHARACTERS = 200
SLOWEST, LATEST = 20, 64  # how many tensors and ranks a summary names
PIECE_BYTES = 1 << 20
MOST_BYTES = 1 << 29  # at most this many bytes of an unpacked timeline are read; members send less
STRETCHES = 1_000

Phase = Literal["negotiating", "waiting", "copying", "reducing", "operation"]
# If several phases are under way at the same moment, the moment counts only towards the phase that is first in PHASES.
PHASES: tuple[Phase, ...] = ("reducing", "copying", "waiting", "operation", "negotiating")
_WAITING = {"QUEUE", "WAIT_FOR_DATA", "WAIT_FOR_OTHER_TENSOR_DATA"}
_COPYING = re.compile(r"FUSION_BUFFER|MEMCPY|ALLOCATE|^SCALE")
# The event that names a tensor. Horovod does not escape quotation marks in the name, so the event may be invalid JSON.
_NAMED = re.compile(
    r'\{"name": "process_name", "ph": "M", "pid": (\d{1,9}), "args": \{"name": "(.{0,10000}?)"\}\}(?=,\n|\])'
)
_BETWEEN = re.compile(r"[\s\[\],]*")


def phase_of(name: str, *, outermost: bool) -> Phase:
    """Return the phase that an event called `name` marks; `outermost` says whether no other event encloses it."""
    if name.startswith("NEGOTIATE_"):
        return "negotiating"
    if name in _WAITING:
        return "waiting"
    if _COPYING.search(name):
        return "copying"
    return "operation" if outermost else "reducing"


# ── Reading ───────────────────────────────────────────────────────────────────


class Scanner:
    """Parses a timeline piece by piece. `broken` is the number of parts that could not be parsed."""

    def __init__(self) -> None:
        self.broken = 0
        self._decoder = json.JSONDecoder(parse_constant=_refuse)
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes, *, last: bool = False) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the events that end in `data`, each with its text. `last` says whether `data` is the last piece."""
        text = self._rest + self._text.decode(data, last)
        at = 0
        while self.broken < BROKEN_PLACES:
            match = _BETWEEN.match(text, at)
            at = match.end() if match else at
            if at == len(text):
                break
            try:
                event, end = self._decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                named = _NAMED.match(text, at)
                if named:
                    event = {"name": "process_name", "ph": "M", "pid": int(named[1]), "args": {"name": named[2]}}
                    yield event, json.dumps(event)
                    at = named.end()
                    continue
                if len(text) - at < EVENT_CHARACTERS and not last:
                    break  # the event's end may be in the next piece
                self.broken += 1
                at = text.find("{", at + 1)
                if at < 0:
                    at = len(text)
                continue
            if isinstance(event, dict) and isinstance(event.get("ph"), str):
                yield event, text[at:end]
            at = end
        self._rest = text[at:] if self.broken < BROKEN_PLACES else ""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _problem(scanner: Scanner, tally: Tally, *, whole: bool, cut: int) -> str:
    """Say what is wrong with a timeline; return '' if nothing is wrong."""
    problems = []
    if not whole:
        problems.append("its end is missing: the connection to the rank was lost")
    if cut:
        problems.append(f"its last {cut / 2**20:,.0f} MiB were left out, since the timeline is too large")
    if scanner.broken >= BROKEN_PLACES:
        problems.append(f"reading stopped after {BROKEN_PLACES:,} parts that cannot be read")
    elif scanner.broken > 1:  # one unreadable part is normal, where the file was cut off
        problems.append(f"{scanner.broken:,} parts of it cannot be read")
    if not tally.operations:
        problems.append("it has no completed operation")
    return "; ".join(problems)


class Arriving:
    """A timeline that is being received. add() takes its compressed pieces and writes them to `file` as valid JSON."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._unpack = zlib.decompressobj()
        self._scanner = Scanner()
        self._tally = Tally()
        self._size = 0
        self._damaged = False
        self._written = self._file.write("[")

    @staticmethod
    def holds_any(data: bytes) -> bool:
        """Return whether `data`, a complete compressed stream, has any content."""
        try:
            return bool(zlib.decompressobj().decompress(data, 1))
        except zlib.error:
            return True  # damaged, but not empty

    def add(self, data: bytes) -> None:
        """Unpack the piece `data`, and write its events. Raise OSError if writing fails."""
        while data and not self._damaged and self._size < MOST_BYTES:
            try:
                piece = self._unpack.decompress(data, PIECE_BYTES)
            except zlib.error:
                self._damaged = True
                return
            data = self._unpack.unconsumed_tail
            self._size += len(piece)
            self._take(self._scanner.feed(piece))

    def end(self, time: float, name: str, attempt: int, *, whole: bool, cut: int) -> TimelineSaved:
        """Complete and close the file, and return the timeline's summary. Raise OSError if writing fails."""
        try:
            self._take(self._scanner.feed(self._unpack.flush() if not self._damaged else b"", last=True))
            self._written += self._file.write("\n]\n")
        finally:
            self._file.close()
        problem = _problem(self._scanner, self._tally, whole=whole and not self._damaged, cut=cut)
        return self._tally.summary(time, name, self._written, attempt, problem)

    def _take(self, events: Iterable[tuple[dict[str, Any], str]]) -> None:
        texts = []
        for event, text in events:
            self._tally.add(event)
            texts.append(text)
        if texts:
            joint = ",\n" if self._written > 1 else "\n"
            self._written += self._file.write(joint + ",\n".join(texts))


# ── Summing up ────────────────────────────────────────────────────────────────


@dataclass
class _Tensor:
    """What is known about a tensor: the time in each phase, the phases under way, and when each rank became ready."""

    name: str = ""
    operations: int = 0
    spent: dict[str, float] = field(default_factory=dict)
    stack: list[tuple[Phase, float]] = field(default_factory=list)
    ready: dict[int, float] = field(default_factory=dict)


class _Stretches:
    """Measures the time that intervals cover; overlaps count once. Intervals are added in order of their end times."""

    def __init__(self) -> None:
        self.covered = 0.0
        self._last: deque[tuple[float, float]] = deque(maxlen=STRETCHES)  # without overlaps: add() merges intervals

    def add(self, begin: float, end: float) -> None:
        while self._last and self._last[-1][1] >= begin:
            earlier = self._last.pop()
            self.covered -= earlier[1] - earlier[0]
            begin, end = min(begin, earlier[0]), max(end, earlier[1])
        self._last.append((begin, end))
        self.covered += end - begin


class Tally:
    """Sums up events. They must be added in the order in which Horovod wrote them. All times are in microseconds."""

    def __init__(self) -> None:
        self.operations = 0
        self._tensors: dict[int, _Tensor] = {}
        self._active = dict.fromkeys(PHASES, 0)
        self._wall = dict.fromkeys((*PHASES, "elsewhere"), 0.0)
        self._now: float | None = None
        self._late: dict[int, tuple[int, _Stretches]] = {}

    def add(self, event: dict[str, Any]) -> None:
        """Add an event. Events of a kind that Horovod does not write are ignored."""
        pid, name, at = event.get("pid"), event.get("name"), event.get("ts")
        if not isinstance(pid, int) or (pid not in self._tensors and len(self._tensors) >= TENSORS):
            return
        match event:
            case {"ph": "M", "name": "process_name", "args": {"name": str(called)}}:
                self._tensors.setdefault(pid, _Tensor()).name = called[:NAME_CHARACTERS]
                return
        if not isinstance(at, int | float) or not 0 <= at < 1e15 or event["ph"] not in ("B", "E", "X"):
            return
        self._pass(at)
        tensor = self._tensors.setdefault(pid, _Tensor())
        if event["ph"] == "B":
            self._begin(tensor, str(name), at)
        elif event["ph"] == "E":
            self._end(tensor, at)
        elif isinstance(name, str) and name.isdecimal() and len(name) <= 5 and len(tensor.ready) < RANKS:
            tensor.ready.setdefault(int(name), at)

    def _pass(self, at: float) -> None:
        """Add the time since the last event to the first of PHASES that was under way, or else to "elsewhere"."""
        if self._now is not None and at > self._now:
            phase = next((phase for phase in PHASES if self._active[phase]), "elsewhere")
            self._wall[phase] += at - self._now
        self._now = at if self._now is None else max(at, self._now)

    def _begin(self, tensor: _Tensor, name: str, at: float) -> None:
        if len(tensor.stack) >= DEPTH:
            return
        phase = phase_of(name, outermost=not tensor.stack)
        if phase == "negotiating":
            tensor.ready.clear()
        tensor.stack.append((phase, at))
        self._active[phase] += 1

    def _end(self, tensor: _Tensor, at: float) -> None:
        if not tensor.stack:
            return
        phase, begun = tensor.stack.pop()
        self._active[phase] -= 1
        tensor.spent[phase] = tensor.spent.get(phase, 0.0) + max(0.0, at - begun)
        if phase == "negotiating":
            self._judge(tensor.ready)
        elif not tensor.stack:
            tensor.operations += 1
            self.operations += 1

    def _judge(self, ready: dict[int, float]) -> None:
        """Record which rank became ready last, and how long all other ranks had been ready by then."""
        if len(ready) > 1:
            *_, (before, _), (last, rank) = sorted((at, rank) for rank, at in ready.items())
            times, stretches = self._late.get(rank, (0, _Stretches()))
            stretches.add(before, last)
            self._late[rank] = times + 1, stretches
        ready.clear()

    def summary(self, time: float, name: str, size_bytes: int, attempt: int, problem: str) -> TimelineSaved:
        """Return the summary of all events that were added."""
        wall = {phase: spent / 1e6 for phase, spent in self._wall.items()}
        used = [_times(tensor) for tensor in self._tensors.values() if tensor.spent]
        late = [Lateness(rank, times, stretches.covered / 1e6) for rank, (times, stretches) in self._late.items()]
        slowest = tuple(sorted(used, key=lambda tensor: -tensor.total_s)[:SLOWEST])
        latest = tuple(sorted(late, key=lambda lateness: -lateness.waited_s)[:LATEST])
        reducing = wall["reducing"] + wall["operation"]
        phases = sum(wall.values()), wall["negotiating"], wall["waiting"], wall["copying"], reducing, wall["elsewhere"]
        counts = self.operations, len(used)
        return TimelineSaved(time, name, size_bytes, *phases, *counts, slowest, latest, attempt, problem)


def _times(tensor: _Tensor) -> TensorTimes:
    spent = {phase: value / 1e6 for phase, value in tensor.spent.items()}
    waiting, copying = spent.get("waiting", 0.0), spent.get("copying", 0.0)
    # All time in which an operation is not waiting or copying counts as reducing, even the time between two phases.
    reducing = max(0.0, spent.get("reducing", 0.0), spent.get("operation", 0.0) - waiting - copying)
    return TensorTimes(tensor.name, tensor.operations, spent.get("negotiating", 0.0), waiting, copying, reducing)
