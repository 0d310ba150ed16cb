"""What happens in a run: a closed set of frozen events. A RunRecord is a fold over them.

Times are Unix seconds on the driver's clock, taken when the driver heard of the event.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from sparkring.wire.messages import CheckpointKind as CheckpointKind
from sparkring.wire.messages import DataKind as DataKind
from sparkring.wire.messages import DisplayType as DisplayType
from sparkring.wire.messages import FailureCause as FailureCause
from sparkring.wire.messages import Stream as Stream

Until = Literal["", "up", "heard"]
Ending = Literal["finished", "failed", "interrupted", "timed out"]

CAPTURED_KEPT = 200  # names: they are all saved on one line of the run's events


@dataclass(frozen=True)
class SourceLine:
    """A line of source around the place where an exception was raised."""

    number: int
    text: str


@dataclass(frozen=True)
class CodeFrame:
    """One frame of a traceback; `in_cell` marks the user's notebook code, `source` surrounds `line`."""

    filename: str
    line: int
    function: str
    in_cell: bool = False
    source: tuple[SourceLine, ...] = ()


@dataclass(frozen=True)
class Failure:
    """Why a rank ended before its time.

    `summary` is one line: `ValueError: bad shape`, `killed by SIGKILL`, `exited with code 3`. `error` is the class of
    the exception with its module, '' if there was none; `signal` is the name of the signal that ended the process, and
    `exit_code` the code that the process exited with.
    """

    cause: FailureCause
    summary: str
    frames: tuple[CodeFrame, ...] = ()
    traceback: str = ""
    advice: str = ""
    error: str = ""
    signal: str = ""
    exit_code: int | None = None

    @property
    def is_exception(self) -> bool:
        """Whether the rank's own code raised an exception, other than to exit or because of another rank."""
        return bool(self.error) and self.cause not in ("exit", "echo")


@dataclass(frozen=True)
class CapturedName:
    """One name of the notebook and how it reaches the ranks.

    size_bytes: what the name adds to the payload; None if it could not be packed.
    travels: modules and importable functions and classes go by reference, as their name.
    problem: why it cannot travel, with the path to the object at fault ("`trainer.loader._lock` is a `_thread.lock`").
    advice: what to do then.
    required: the cell cannot run without it.
    via: the name whose functions use this one, where the cell itself does not.
    """

    name: str
    type_name: str
    size_bytes: int | None
    travels: Literal["by value", "by reference", "cannot"]
    problem: str | None = None
    advice: str | None = None
    required: bool = True
    via: str | None = None


@dataclass(frozen=True)
class Event:
    """Something that has happened; `time` is when."""

    time: float


@dataclass(frozen=True)
class RankEvent(Event):
    """Something that has happened on a rank."""

    rank: int


@dataclass(frozen=True)
class RunStarted(Event):
    """The run exists; `code` is what the user wrote, and its first line is the magic's.

    `ranks` are those that the cell runs on, empty for all. `warm`: the run is on a gang whose ranks are up already.
    `checkpoint_dir` is where its checkpoints go, as the user wrote it, '' for nowhere. `captured` are the names that
    were sent along, at most CAPTURED_KEPT; `versions` are names and versions of packages installed at the driver.
    """

    run_id: str
    title: str
    code: str
    size: int
    where: str
    framework: str
    logs: str
    ranks: tuple[int, ...] = ()
    warm: bool = False
    checkpoint_dir: str = ""
    captured: tuple[CapturedName, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class AttemptStarted(Event):
    """Attempt `number` (from 1) of a run that can restart is started, with `size` ranks.

    `checkpoint` is the name of the checkpoint that it continues from, `step` its step; '' and 0 for a new run.
    """

    number: int
    size: int
    checkpoint: str = ""
    step: int = 0


@dataclass(frozen=True)
class AttemptEnded(Event):
    """An attempt is over, and another one follows in `pause_s`. `reason` says in a line why.

    `failed_rank` is the rank whose failure ended it; None if none failed, such as when the ring is to grow.
    """

    number: int
    reason: str
    failed_rank: int | None = None
    pause_s: float = 0.0


@dataclass(frozen=True)
class MemberJoined(Event):
    """A member has connected; ranks are numbered when all have."""

    member: int
    host: str


@dataclass(frozen=True)
class RankStarted(RankEvent):
    """A rank has its place; `pid` is its process on `host`."""

    host: str
    pid: int


@dataclass(frozen=True)
class Output(RankEvent):
    """Bytes that a rank wrote: whole lines, unless the end of a line takes too long."""

    stream: Stream
    data: bytes


@dataclass(frozen=True)
class Displayed(RankEvent):
    """A rank has shown something other than text, with display() or plt.show().

    `number` counts the rank's displays in an attempt, from 1. A display replaces an earlier one with the same number;
    one with `clears` replaces all displays of the rank. `data` is of type `mime_type`, and empty if its `size_bytes`
    were too many. `text` is the text form, which the rank has also printed.
    """

    number: int
    mime_type: DisplayType
    data: bytes
    text: str = ""
    size_bytes: int = 0
    clears: bool = False
    attempt: int = 1


@dataclass(frozen=True)
class Message(RankEvent):
    """Text that a rank sent to the notebook on purpose (log_to_driver, LogCallback)."""

    text: str


@dataclass(frozen=True)
class Metrics(RankEvent):
    """Numbers that a rank reported; `epochs` and `steps` (per epoch) are totals where known.

    Under Keras, `step` counts from 1 within the epoch; with log(), it is what the user passes.
    """

    values: dict[str, float]
    step: int | None = None
    epoch: int | None = None
    steps: int | None = None
    epochs: int | None = None
    ends_epoch: bool = False


@dataclass(frozen=True)
class GpuUsed(RankEvent):
    """How one of a rank's GPUs is used, by all processes together; None for what its driver does not tell."""

    address: str
    name: str
    used_bytes: int | None
    total_bytes: int | None
    busy_percent: int | None


@dataclass(frozen=True)
class DataOpened(RankEvent):
    """A rank has opened a data set to read its shard of it; counts and `version` are the whole set's.

    `reader` counts this rank's readers, from 0; those of other ranks with the same number read the same data if the
    ranks run the same code. `name` is what the user wrote. `where` is the row filter in words, '' for none. `version`
    is a digest of what the files were when they were opened. Unknown values are '' or 0.
    """

    reader: int
    name: str
    kind: DataKind
    columns: tuple[str, ...] = ()
    where: str = ""
    version: str = ""
    files: int = 0
    row_groups: int = 0
    rows: int = 0
    size_bytes: int = 0
    batch_size: int = 0


class Piece(NamedTuple):
    """Rows of one row group of one file that a rank reads; numbers are from 0, and row group -1 is the whole file.

    If there are many row groups, `groups` neighbours are one piece, which has the number of the first.
    """

    file: int
    row_group: int
    rows: int
    groups: int = 1


@dataclass(frozen=True)
class DataPlanned(RankEvent):
    """What a rank is to read in an epoch (from 1), in its order.

    `names` are the numbers and names of files; of many files, of the first ones only. The first `begun` rows were
    read before this reader was made. Rows are handed out in order, or shuffled within each `window` rows.
    """

    reader: int
    epoch: int
    pieces: tuple[Piece, ...]
    names: tuple[tuple[int, str], ...] = ()
    begun: int = 0
    window: int = 0

    @functools.cached_property
    def rows(self) -> int:
        """The number of rows in all pieces."""
        return sum(piece.rows for piece in self.pieces)


@dataclass(frozen=True)
class DataRead(RankEvent):
    """How far a rank has read in an epoch (from 1): rows, steps and bytes since it began, and the planned numbers.

    `place` is where it reads: `part-3.parquet, row group 2 of 8`. `waited_s` is how long the rank's own code has
    waited for batches in this epoch. Unknown values are None or ''.
    """

    reader: int
    epoch: int
    rows: int
    steps: int
    size_bytes: int
    rows_planned: int | None = None
    steps_planned: int | None = None
    waited_s: float = 0.0
    elapsed_s: float = 0.0
    place: str = ""
    done: bool = False


@dataclass(frozen=True)
class CheckpointSaved(RankEvent):
    """A checkpoint is whole and can be read.

    `folder` is the directory of checkpoints as the user wrote it, `name` the checkpoint's own in it. `took_s` is from
    the call to the commit, `blocked_s` the part for which training waited. `metrics` are those saved with it. `kind`
    says what wrote it: "keras" is ModelCheckpoint, "tensorflow" BackupAndRestore, and `step` is then the epoch.
    """

    folder: str
    name: str
    step: int
    size_bytes: int
    took_s: float = 0.0
    blocked_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    best: bool = False
    kind: CheckpointKind = "sparkring"


@dataclass(frozen=True)
class CheckpointFailed(RankEvent):
    """A checkpoint could not be saved; the run fails at its next save, or at its end."""

    folder: str
    step: int
    reason: str


@dataclass(frozen=True)
class CheckpointDamaged(RankEvent):
    """A checkpoint was found damaged, and skipped."""

    folder: str
    name: str
    step: int
    reason: str


@dataclass(frozen=True)
class CheckpointRestored(RankEvent):
    """A rank has restored a checkpoint."""

    folder: str
    name: str
    step: int
    took_s: float = 0.0


@dataclass(frozen=True)
class CheckpointRemoved(RankEvent):
    """A checkpoint was removed to make room for newer ones."""

    folder: str
    name: str


@dataclass(frozen=True)
class TimelinePart(RankEvent):
    """A piece of the file that Horovod has written on a rank, compressed with zlib as one stream.

    `last` ends the stream. `cut` is the number of bytes that were left out because the file is too large. The bytes
    go into the run's folder, not into its record.
    """

    data: bytes
    last: bool = False
    cut: int = 0


@dataclass(frozen=True)
class TensorTimes:
    """Where the time of one tensor's operations went, in seconds, all `count` of them together."""

    name: str
    count: int
    negotiating_s: float = 0.0
    waiting_s: float = 0.0
    copying_s: float = 0.0
    reducing_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of the four times."""
        return self.negotiating_s + self.waiting_s + self.copying_s + self.reducing_s


@dataclass(frozen=True)
class Lateness:
    """How often a rank was the last to be ready, and how long all others had been by then.

    Time in which they waited for it with several tensors counts once.
    """

    rank: int
    times: int
    waited_s: float


@dataclass(frozen=True)
class TimelineSaved(Event):
    """Horovod's timeline of an attempt is in the run's folder as `name`; the other fields summarise it.

    `wall_s` is from its first event to its last, and is the sum of the five that follow. Each moment counts for the
    operation that was furthest along: reducing, else copying, else waiting for data, else negotiating. `elsewhere_s`
    is the time without any, as while gradients are computed. `slowest` are the tensors that took longest, `late` the
    ranks that others waited for, worst first. `problem` says what the file lacks, '' for nothing.
    """

    name: str
    size_bytes: int
    wall_s: float = 0.0
    negotiating_s: float = 0.0
    waiting_s: float = 0.0
    copying_s: float = 0.0
    reducing_s: float = 0.0
    elsewhere_s: float = 0.0
    operations: int = 0
    tensors: int = 0
    slowest: tuple[TensorTimes, ...] = ()
    late: tuple[Lateness, ...] = ()
    attempt: int = 1
    problem: str = ""


@dataclass(frozen=True)
class RankFinished(RankEvent):
    """A rank has run the cell to its end; `value` is a short repr of its last expression."""

    value: str


@dataclass(frozen=True)
class RankFailed(RankEvent):
    """A rank has ended before its time."""

    failure: Failure


@dataclass(frozen=True)
class RankStopped(RankEvent):
    """A rank has come back from an interrupt, and waits for what comes next."""


@dataclass(frozen=True)
class RankExited(RankEvent):
    """A rank's process has ended, and its output is complete."""


@dataclass(frozen=True)
class StackTaken(RankEvent):
    """Where a rank stood when asked; `cell_line` is 0 if no line of the cell was on its stack."""

    state: str
    cell_line: int
    text: str


@dataclass(frozen=True)
class Notice(Event):
    """Something the user should know: progress of a slow start, a warning.

    `until` says how long it is shown: until the ranks are "up", until a rank is "heard" from, or always ("").
    """

    text: str
    until: Until = ""


@dataclass(frozen=True)
class RunFinished(Event):
    """The run is over; `failed_rank` is the one whose failure ended it."""

    outcome: Ending
    message: str = ""
    failed_rank: int | None = None


_BY_NAME: dict[str, type[Any]] = {each.__name__: each for base in (Event, RankEvent) for each in base.__subclasses__()}


def to_json(event: Event, **more: Any) -> str:
    """The event as JSON with its type, and `more` fields. Bytes stay out: they have files of their own."""
    found = {each.name: getattr(event, each.name) for each in fields(event) if each.name != "data"}
    return json.dumps({"type": type(event).__name__, **found, **more}, default=vars)  # dataclasses within it


def from_json(found: dict[str, Any]) -> Event:
    """The event that to_json() wrote, with the `data` of Output and Displayed. Unknown fields are ignored."""
    kind = _BY_NAME[found["type"]]
    known = _known(kind, found)
    for name in known.keys() & _FROM_JSON.keys():
        known[name] = _FROM_JSON[name](known[name])
    event: Event = kind(**known)
    return event


def _known(kind: type[Any], found: dict[str, Any]) -> dict[str, Any]:
    return {f.name: found[f.name] for f in fields(kind) if f.name in found}


def failure_from_json(found: dict[str, Any]) -> Failure:
    """A Failure from JSON values, including those of version 0.1."""
    frames = tuple(
        CodeFrame(**{**frame, "source": tuple(SourceLine(**line) for line in frame.get("source", ()))})
        for frame in found.get("frames", ())
    )
    return Failure(**{**_known(Failure, found if "kind" not in found else _of_0_1(found)), "frames": frames})


# By the names of fields: JSON has lists for tuples, and objects for dataclasses.
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "failure": failure_from_json,
    "captured": lambda found: tuple(CapturedName(**_known(CapturedName, each)) for each in found),
    "pieces": lambda found: tuple(Piece(*each) for each in found),
    "slowest": lambda found: tuple(TensorTimes(**each) for each in found),
    "late": lambda found: tuple(Lateness(**each) for each in found),
    "versions": lambda found: tuple(map(tuple, found)),
    "names": lambda found: tuple(map(tuple, found)),
    "ranks": tuple,
    "columns": tuple,
}


def _of_0_1(found: dict[str, Any]) -> dict[str, Any]:
    """A failure that version 0.1 saved, in today's form: 0.1 spread the cause over several fields and the summary."""
    named = {"code": "code", "damaged": "damaged checkpoint"}.get(found.get("cause", ""), found["kind"])
    cause = "interrupt" if found.get("interrupt") else "echo" if found.get("follows") else named
    signal = re.search(r"killed by (SIG\w+|signal \d+)", found["summary"]) if cause == "signal" else None
    code = re.search(r"exited with code (-?\d+)", found["summary"]) if cause == "exit" else None
    if signal is not None and found["summary"].startswith("out of memory"):
        cause = "out of memory"
    return {
        **found,
        "cause": cause,
        "signal": signal[1] if signal else "",
        "exit_code": int(code[1]) if code else None,
    }
