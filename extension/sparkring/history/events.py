"""What happens in a run: a closed set of events. A RunRecord is a fold over them.

What members and ranks report is kept as it is, so these events are messages (`wire/messages.py`); the others are here.
Times are Unix seconds on the driver's clock, taken when the driver heard of the event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from sparkring.wire.messages import CheckpointDamaged as CheckpointDamaged
from sparkring.wire.messages import CheckpointFailed as CheckpointFailed
from sparkring.wire.messages import CheckpointKind as CheckpointKind
from sparkring.wire.messages import CheckpointRemoved as CheckpointRemoved
from sparkring.wire.messages import CheckpointRestored as CheckpointRestored
from sparkring.wire.messages import CheckpointSaved as CheckpointSaved
from sparkring.wire.messages import CodeFrame as CodeFrame
from sparkring.wire.messages import DataKind as DataKind
from sparkring.wire.messages import DataOpened as DataOpened
from sparkring.wire.messages import DataPlanned as DataPlanned
from sparkring.wire.messages import DataRead as DataRead
from sparkring.wire.messages import Displayed as Displayed
from sparkring.wire.messages import DisplayType as DisplayType
from sparkring.wire.messages import Failure as Failure
from sparkring.wire.messages import FailureCause as FailureCause
from sparkring.wire.messages import GpuUsed as GpuUsed
from sparkring.wire.messages import Kept
from sparkring.wire.messages import Metrics as Metrics
from sparkring.wire.messages import Output as Output
from sparkring.wire.messages import Piece as Piece
from sparkring.wire.messages import SourceLine as SourceLine
from sparkring.wire.messages import Stream as Stream
from sparkring.wire.messages import TimelinePart as TimelinePart
from sparkring.wire.messages import UserMessage as UserMessage

Until = Literal["", "up", "heard"]
Ending = Literal["finished", "failed", "interrupted", "timed out"]
ItemEnding = Literal[
    "finished",
    "failed",
    "again",  # the attempt failed, and another one follows
    "stopped",  # it had not ended when the run was over
    "kept",  # it did not run: its result was kept by an earlier run
]

CAPTURED_KEPT = 200  # names: they are all saved on one line of the run's events


class CapturedName(NamedTuple):
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


class RunStarted(NamedTuple):
    """The run exists; `code` is what the user wrote, and its first line is the magic's.

    `ranks` are those that the cell runs on, empty for all. `warm`: the run is on a gang whose ranks are up already.
    `checkpoint_dir` is where its checkpoints go, as the user wrote it, '' for nowhere. `captured` are the names that
    were sent along, at most CAPTURED_KEPT; `versions` are names and versions of packages installed at the driver.
    """

    time: float
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


class AttemptStarted(NamedTuple):
    """Attempt `number` (from 1) of a run that can restart is started, with `size` ranks.

    `checkpoint` is the name of the checkpoint that it continues from, `step` its step; '' and 0 for a new run.
    """

    time: float
    number: int
    size: int
    checkpoint: str = ""
    step: int = 0


class AttemptEnded(NamedTuple):
    """An attempt is over, and another one follows in `pause_s`. `reason` says in a line why.

    `failed_rank` is the rank whose failure ended it; None if none failed, such as when the ring is to grow.
    """

    time: float
    number: int
    reason: str
    failed_rank: int | None = None
    pause_s: float = 0.0


class MemberJoined(NamedTuple):
    """A member has connected; ranks are numbered when all have."""

    time: float
    member: int
    host: str


class RankStarted(NamedTuple):
    """A rank has its place; `pid` is its process on `host`."""

    time: float
    rank: int
    host: str
    pid: int


class TensorTimes(NamedTuple):
    """Where the time of one tensor's operations went, in seconds, all `count` of them together."""

    name: str
    count: int  # type: ignore[assignment] # hides tuple.count; saved runs have this name
    negotiating_s: float = 0.0
    waiting_s: float = 0.0
    copying_s: float = 0.0
    reducing_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of the four times."""
        return self.negotiating_s + self.waiting_s + self.copying_s + self.reducing_s


class Lateness(NamedTuple):
    """How often a rank was the last to be ready, and how long all others had been ready by then.

    Time in which they waited for it with several tensors counts once.
    """

    rank: int
    times: int
    waited_s: float


class TimelineSaved(NamedTuple):
    """Horovod's timeline of an attempt is in the run's folder as `name`; the other fields summarise it.

    `wall_s` is from its first event to its last, and is the sum of the five that follow. Each moment counts for the
    operation that was furthest along: reducing, else copying, else waiting for data, else negotiating. `elsewhere_s`
    is the time without an operation, as while gradients are computed. `slowest` are the tensors that took longest,
    `late` the ranks that others waited for, worst first. `problem` says what the file lacks, '' for nothing.
    """

    time: float
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


class RankFinished(NamedTuple):
    """A rank has run the cell to its end; `value` is a short repr of its last expression."""

    time: float
    rank: int
    value: str


class RankFailed(NamedTuple):
    """A rank has failed, in the cell or by the end of its process."""

    time: float
    rank: int
    failure: Failure


class RankStopped(NamedTuple):
    """A rank has come back from an interrupt, and waits for what comes next."""

    time: float
    rank: int


class RankExited(NamedTuple):
    """A rank's process has ended, and its output is complete."""

    time: float
    rank: int


class StackTaken(NamedTuple):
    """Where a rank stood when asked; `cell_line` is 0 if no line of the cell was on its stack."""

    time: float
    rank: int
    state: str
    cell_line: int
    text: str


class ItemsPlanned(NamedTuple):
    """The run is one of independent items. This is sent again when one of the numbers changes.

    At most `at_once` items run at the same time. Each runs on `ranks_each` ranks: those of slot s are numbered from
    s × ranks_each. `total` is the number of items, None while it is not known.
    """

    time: float
    at_once: int
    ranks_each: int = 1
    total: int | None = None


class ItemStarted(NamedTuple):
    """An attempt (from 1) of an item begins, on the ranks of `slot`; slot -1 if it ends without having run.

    `item` is its number, from 0; `name` is a short text of its values.
    """

    time: float
    item: int
    name: str
    slot: int
    attempt: int = 1


class ItemEnded(NamedTuple):
    """An attempt of an item is over; `value` is a short repr of its value.

    `metrics` and `seconds` are those of the earlier run, if the result was kept.
    """

    time: float
    item: int
    ending: ItemEnding
    value: str = ""
    failure: Failure | None = None
    metrics: Mapping[str, float] = {}
    seconds: float = 0.0


class Notice(NamedTuple):
    """Something the user should know: progress of a slow start, a warning.

    `until` says how long it is shown: until the ranks are "up", until a rank is "heard" from, or always ("").
    """

    time: float
    text: str
    until: Until = ""


class RunFinished(NamedTuple):
    """The run is over; `failed_rank` is the one whose failure ended it."""

    time: float
    outcome: Ending
    message: str = ""
    failed_rank: int | None = None


RankEvent = Kept | RankStarted | RankFinished | RankFailed | RankStopped | RankExited | StackTaken
ItemEvent = ItemsPlanned | ItemStarted | ItemEnded
Event = (
    RankEvent
    | ItemEvent
    | RunStarted
    | AttemptStarted
    | AttemptEnded
    | MemberJoined
    | TimelineSaved
    | Notice
    | RunFinished
)

_BY_NAME: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
_BY_NAME["Message"] = UserMessage  # as version 0.1 called it


def to_json(event: Event, **more: Any) -> str:
    """The event as JSON with its type, and `more` fields. Bytes stay out: they have files of their own."""
    found = {name: _plain(value) for name, value in event._asdict().items() if name != "data"}
    return json.dumps({"type": type(event).__name__, **found, **more})


def _plain(value: Any) -> Any:
    """The value for JSON: named tuples as dicts, except for pieces, of which there may be many."""
    if not isinstance(value, tuple) or isinstance(value, Piece):
        return value
    named = value._asdict() if hasattr(value, "_asdict") else None
    return list(map(_plain, value)) if named is None else {name: _plain(each) for name, each in named.items()}


def from_json(found: dict[str, Any]) -> Event:
    """The event that to_json() wrote, with the `data` of Output and Displayed. Unknown fields are ignored."""
    kind: Any = _BY_NAME[found["type"]]
    known = _known(kind, found)
    for name in known.keys() & _FROM_JSON.keys():
        known[name] = _FROM_JSON[name](known[name])
    event: Event = kind(**known)
    return event


def _known(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in kind._fields if name in found}


def failure_from_json(found: dict[str, Any]) -> Failure:
    """A Failure from JSON values, including those of version 0.1."""
    frames = tuple(
        CodeFrame(**{**frame, "source": tuple(SourceLine(**line) for line in frame.get("source", ()))})
        for frame in found.get("frames", ())
    )
    return Failure(**{**_known(Failure, found if "kind" not in found else _of_0_1(found)), "frames": frames})


# Conversions by the names of fields: JSON has lists in place of tuples.
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "failure": lambda found: None if found is None else failure_from_json(found),
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
