"""The events of a run. Applying them one by one yields a RunRecord.

Most reports from members and ranks are kept unchanged, so these events are messages of `wire/messages/`. The other
events are defined in this module. `time` is when the driver learned of the event, in Unix seconds on the driver's
clock.
"""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from sparkring.wire.messages import CodeFrame as CodeFrame
from sparkring.wire.messages import Failure as Failure
from sparkring.wire.messages import GpuUsed as GpuUsed
from sparkring.wire.messages import Kept
from sparkring.wire.messages import Output as Output
from sparkring.wire.messages import Piece as Piece
from sparkring.wire.messages import RankUsed as RankUsed
from sparkring.wire.messages import SourceLine as SourceLine
from sparkring.wire.messages import Stream as Stream
from sparkring.wire.messages import TimelinePart as TimelinePart
from sparkring.wire.messages import UserMessage as UserMessage
from sparkring.wire.messages.gpus import *  # noqa: F403 - all of its classes are parts of events
from sparkring.wire.messages.run_reports import *  # noqa: F403 - all of its classes are events

Until = Literal["", "up", "heard", "ended", "short", "over"]
Ending = Literal["finished", "failed", "interrupted", "timed out"]
Curve = tuple[tuple[float, float], ...]
CurvesBy = Literal["report", "step", "epoch"]
ItemEnding = Literal[
    "finished",
    "failed",
    "again",  # the attempt failed, and another attempt follows
    "stopped",  # the item had not ended when the run was over
    "kept",  # the item did not run, since its result was kept from an earlier run
    "pruned",  # a search ended the item early, because other items were better
]

BatchEnding = Literal["trained", "replayed", "passed over", "empty"]

CAPTURED_KEPT = 200  # RunStarted has at most this many captured names, because each event is saved as one line


class CapturedName(NamedTuple):
    """One name of the notebook, and how its value reaches the ranks.

    size_bytes: how many bytes the name adds to the payload; None if its value could not be packed.
    travels: how the value is sent. Modules and importable functions and classes are sent by reference: only their names
    are sent.
    problem: why the value cannot be sent, with the path to the object at fault ("`trainer.loader._lock` is a
    `_thread.lock`").
    advice: what to do about the problem.
    required: whether the cell cannot run without the name.
    via: another name, which needs this one; None if the cell itself uses this one.
    numbers: the value if it is a number (its key is ''), or the numbers in a dict, by key. So runs can be compared by
    their parameters. Texts are not kept, because they may be secrets.
    """

    name: str
    type_name: str
    size_bytes: int | None
    travels: Literal["by value", "by reference", "cannot"]
    problem: str | None = None
    advice: str | None = None
    required: bool = True
    via: str | None = None
    numbers: tuple[tuple[str, float], ...] = ()


class RunStarted(NamedTuple):
    """The run has begun. `code` is what the user wrote, including the line of the magic.

    `ranks` are the ranks that the cell runs on; () means all ranks. `warm` says whether the run is on a gang that is
    already up. `checkpoint_dir` is the directory for checkpoints, or ''; a relative path is made absolute.
    `captured` are the names that were sent to the ranks, at most CAPTURED_KEPT. `versions` are the names and versions
    of packages that are installed on the driver. `notify` says whether the browser shows a notification at the end.
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
    notify: bool = False


class AttemptStarted(NamedTuple):
    """A run that can restart starts its attempt `number`, counted from 1, with `size` ranks.

    `checkpoint` is the name of the checkpoint that the attempt continues from, and `step` is the checkpoint's step. If
    there is no checkpoint, they are '' and 0. `most` is the number of attempts that failures leave room for; 0 if it is
    not known, as in runs that version 0.1 saved.
    """

    time: float
    number: int
    size: int
    checkpoint: str = ""
    step: int = 0
    most: int = 0


class AttemptEnded(NamedTuple):
    """An attempt is over, and another attempt follows after `pause_s`. `reason` says in one line why this one ended.

    `failed_rank` is the rank whose failure ended the attempt. It is None if no rank failed, for example if the attempt
    was ended so that the next one can have more ranks.
    """

    time: float
    number: int
    reason: str
    failed_rank: int | None = None
    pause_s: float = 0.0


class MemberJoined(NamedTuple):
    """A member has connected. Ranks get their numbers when all members have connected."""

    time: float
    member: int
    host: str


class MemberLeft(NamedTuple):
    """A member that has joined is gone before all have joined: it was lost, or has given back its place."""

    time: float
    member: int


class RankStarted(NamedTuple):
    """A rank has been sent the cell to run. `pid` is the id of the rank's process on `host`."""

    time: float
    rank: int
    host: str
    pid: int


class TensorTimes(NamedTuple):
    """How many seconds the `count` operations on one tensor spent in each phase, all operations added up."""

    name: str
    count: int  # type: ignore[assignment] # hides tuple.count, but saved runs use this name
    negotiating_s: float = 0.0
    waiting_s: float = 0.0
    copying_s: float = 0.0
    reducing_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of the four times."""
        return self.negotiating_s + self.waiting_s + self.copying_s + self.reducing_s


class Lateness(NamedTuple):
    """How often a rank was the last one to be ready for an operation, and how long the other ranks waited for it.

    `waited_s` is the time in which all other ranks were ready and this rank was not. If the ranks waited for this rank
    with several tensors at once, that time counts only once.
    """

    rank: int
    times: int
    waited_s: float


class TimelineSaved(NamedTuple):
    """Horovod's timeline of an attempt is in the run's folder as `name`; the other fields summarise it.

    `wall_s` is the time from the timeline's first event to its last. It is the sum of the five times that follow it,
    since each moment counts towards only one of them. If several operations are under way, the moment counts as
    reducing if any of them is reducing, otherwise as copying, waiting for data or negotiating, in this order.
    `elsewhere_s` is the time in which no operation is under way, for example while gradients are computed. `slowest`
    are the tensors that took longest. `late` are the ranks that other ranks waited for, with the longest wait first.
    `problem` says what is wrong with the file; '' if nothing is wrong.
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


class TraceSaved(NamedTuple):
    """The file `name` in the run's folder shows `steps` steps of `ranks` ranks, recorded by PyTorch's profiler."""

    time: float
    name: str
    ranks: int
    steps: int
    size_bytes: int


class ModelGpuUsed(NamedTuple):
    """How the model process `pid` on `host` uses a GPU; recorded when this changes."""

    time: float
    host: str
    pid: int
    gpu: GpuUsed


class RankFinished(NamedTuple):
    """A rank has run the cell to its end. `value` is a short repr of the value of the cell's last expression."""

    time: float
    rank: int
    value: str


class RankFailed(NamedTuple):
    """A rank has failed: the cell raised an exception, or the rank's process exited or was killed."""

    time: float
    rank: int
    failure: Failure


class RankStopped(NamedTuple):
    """An interrupt has ended the cell on a rank. That is not a failure of the rank."""

    time: float
    rank: int


class RankExited(NamedTuple):
    """A rank's process has exited, and its output is complete."""

    time: float
    rank: int


class StackTaken(NamedTuple):
    """Where a rank was when its stack was captured; `cell_line` is 0 if no line of the cell was on the stack."""

    time: float
    rank: int
    state: str
    cell_line: int
    text: str


class ItemsPlanned(NamedTuple):
    """The run consists of independent items. This event is recorded again when one of its numbers changes.

    At most `at_once` items run at the same time. Each item runs on the `ranks_each` ranks of a slot; the first rank of
    slot s has the number s × ranks_each. `total` is the number of items; None while this is not known. `up` is the
    number of slots that can currently run items; None if the ranks of a slot never have to wait for resources. `noun`
    is what an item is called; '' if this stays as it was. `waits_for` says what the items wait for, in words.
    """

    time: float
    at_once: int
    ranks_each: int = 1
    total: int | None = None
    up: int | None = None
    noun: str = ""
    waits_for: str = ""


class ItemStarted(NamedTuple):
    """An attempt to run an item has begun on the ranks of `slot`, or the item ends without an attempt: `slot` is -1.

    `item` is the number of the item, counted from 0, and `name` is a short string with its values. `attempt` is counted
    from 1. If the item is a trial of a search, `parameters` holds the values of its parameters; values that are not
    numbers are given as text.
    """

    time: float
    item: int
    name: str
    slot: int
    attempt: int = 1
    parameters: Mapping[str, float | str] = {}


class ItemEnded(NamedTuple):
    """An attempt to run an item has ended. `value` is a short repr of the item's value.

    `seconds` is how long the attempt took on its ranks; 0 if this is not known. If the result was kept from an earlier
    run, `metrics`, `seconds`, `curves` and `by` come from that run, and `pruned` says whether that run pruned the item.
    item_records.ItemRecord explains `curves` and `by`.
    """

    time: float
    item: int
    ending: ItemEnding
    value: str = ""
    failure: Failure | None = None
    metrics: Mapping[str, float] = {}
    seconds: float = 0.0
    pruned: bool = False
    curves: Mapping[str, Curve] = {}
    by: CurvesBy = "report"


class Searched(NamedTuple):
    """A parameter of a search, with its range, or its choices as strings. `log`: whether the scale is logarithmic."""

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[str, ...] = ()


class SearchBegan(NamedTuple):
    """The items are the trials of a search for the lowest ("min") or the highest ("max") value of `metric`."""

    time: float
    metric: str
    mode: Literal["min", "max"]
    parameters: tuple[Searched, ...] = ()


class SearchEnded(NamedTuple):
    """The search is over. `importance` says how much each parameter matters, as a fraction of 1.

    It was estimated from so many finished `trials`; 0 if this is not known.
    """

    time: float
    importance: Mapping[str, float]
    trials: int = 0


class StreamBegan(NamedTuple):
    """The run trains on the micro-batches of a stream. This event is recorded again when new ranks take over.

    `source` describes where the rows come from. `state` are the names whose values checkpoints save. `saved` is the
    last batch whose effect a checkpoint has; None if there is none. `save_every` is the number of batches between two
    checkpoints.
    """

    time: float
    source: str
    state: tuple[str, ...] = ()
    saved: int | None = None
    save_every: int = 1


class BatchEnded(NamedTuple):
    """The stream has finished with a micro-batch. `rows` is the number of its rows.

    `how`: "trained"; "replayed", if ranks that had been lost had already trained on it after the last checkpoint;
    "passed over", if a checkpoint already has its effect; or "empty".

    The times are in seconds: `waiting_s` until there were rows, `moving_s` for moving the rows to the ranks, and for
    the slowest rank, `reading_s` for making arrays, `training_s` for the cell and `saving_s` for the checkpoint.
    `saved` says whether a checkpoint was saved. `backlog_rows` is the number of rows that wait in the source; None if
    it is not known. `others_s` is how long other cells held the ranks meanwhile.
    """

    time: float
    batch_id: int
    rows: int
    how: BatchEnding = "trained"
    waiting_s: float = 0.0
    moving_s: float = 0.0
    reading_s: float = 0.0
    training_s: float = 0.0
    saving_s: float = 0.0
    saved: bool = False
    backlog_rows: int | None = None
    others_s: float = 0.0


class Notice(NamedTuple):
    """Something the user should know: progress of a slow start, a warning.

    `until` says how long the notice is shown: until the ranks are up ("up"), until the next message from a rank
    ("heard"), until all ranks have finished the cell ("ended"), while fewer items than possible run at once because
    ranks are waiting to start ("short"), until the run is over ("over"), or permanently ("").
    With `once`, it is left out if the record has the same text: each gang of a pool may say it.
    """

    time: float
    text: str
    until: Until = ""
    once: bool = False


class LogsCut(NamedTuple):
    """The logs of the run have become too large: this many bytes and lines in the middle of logs have been removed."""

    time: float
    size_bytes: int
    lines: int


class RunFinished(NamedTuple):
    """The run is over; `failed_rank` is the rank whose failure ended the run.

    `measured` holds the last mean of each metric over the ranks, so that lists of runs need not read all reports. It is
    empty for runs that older versions saved.
    """

    time: float
    outcome: Ending
    message: str = ""
    failed_rank: int | None = None
    measured: tuple[tuple[str, float], ...] = ()


RankEvent = Kept | RankStarted | RankFinished | RankFailed | RankStopped | RankExited | StackTaken
StreamEvent = StreamBegan | BatchEnded
ItemEvent = ItemsPlanned | ItemStarted | ItemEnded | SearchBegan | SearchEnded
RunEvent = (
    RunStarted
    | AttemptStarted
    | AttemptEnded
    | MemberJoined
    | MemberLeft
    | ModelGpuUsed
    | TimelineSaved
    | TraceSaved
    | Notice
    | LogsCut
    | RunFinished
)
Event = RankEvent | ItemEvent | StreamEvent | RunEvent

_BY_NAME: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
_BY_NAME["Message"] = UserMessage  # version 0.1 saved a UserMessage under this name


_SAME_IN_JSON = frozenset({bool, float, int, str, type(None)})


def is_known(kind: str) -> bool:
    """Return whether this version has events of this kind; a newer version may have saved others."""
    return kind in _BY_NAME


def to_json(event: Event, **more: Any) -> str:
    """Return the event as JSON, with its type and the fields `more`, but without `data`, which is saved separately."""
    left_out = {"data"} if getattr(event, "iterations", True) else {"data", "iterations"}  # most reports have none
    fields = {name: plain(value) for name, value in event._asdict().items() if name not in left_out}
    return json.dumps({"type": type(event).__name__, **fields, **more})


def plain(value: Any) -> Any:
    """Return the value for JSON: named tuples become dicts, except Pieces, which stay tuples to save space.

    Bytes become text with one character for each byte, and mappings whose keys are tuples become pairs.
    """
    if type(value) in _SAME_IN_JSON:  # a shortcut: a run with many items writes many events
        return value
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, Mapping) and any(isinstance(key, tuple) for key in value):
        return [[key, plain(item)] for key, item in value.items()]
    if not isinstance(value, tuple) or isinstance(value, Piece):
        return value
    named = value._asdict() if hasattr(value, "_asdict") else None
    return list(map(plain, value)) if named is None else {name: plain(item) for name, item in named.items()}


def from_json(content: dict[str, Any]) -> Event:
    """Return the event that to_json() wrote, without unknown fields. Any `data` must have been added to `content`."""
    kind: Any = _BY_NAME[content["type"]]
    event: Event = converter(kind)(content)
    return event


@functools.cache
def converter(hint: Any) -> Callable[[Any], Any]:
    """Return a function that makes a value of type `hint` from what plain() returned and JSON has changed to lists."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hasattr(hint, "_fields"):
        fields = {name: converter(field) for name, field in get_type_hints(hint).items()}

        def make(content: Any) -> Any:
            if isinstance(content, list):  # a Piece
                return hint(*content)
            content = _of_0_1(content) if hint is Failure and "kind" in content else content
            return hint(**{name: convert(content[name]) for name, convert in fields.items() if name in content})

        return make
    if origin is tuple:
        convert_item = converter(arguments[0])
        return lambda items: tuple(map(convert_item, items))
    if origin is Mapping:
        convert_value = converter(arguments[1])
        if get_origin(arguments[0]) is tuple:
            return lambda pairs: {tuple(key): convert_value(value) for key, value in pairs}
        return lambda mapping: {name: convert_value(value) for name, value in mapping.items()}
    if hint is bytes:
        return lambda text: text if isinstance(text, bytes) else text.encode("latin-1")
    if types.NoneType in arguments:
        convert = converter(arguments[0])
        return lambda value: None if value is None else convert(value)
    return lambda value: value


def _of_0_1(content: dict[str, Any]) -> dict[str, Any]:
    """Convert a failure that version 0.1 saved. There, the cause is spread over several fields and the summary."""
    named = {"code": "code", "damaged": "damaged checkpoint"}.get(content.get("cause", ""), content["kind"])
    cause = "interrupt" if content.get("interrupt") else "echo" if content.get("follows") else named
    signal = re.search(r"killed by (SIG\w+|signal \d+)", content["summary"]) if cause == "signal" else None
    code = re.search(r"exited with code (-?\d+)", content["summary"]) if cause == "exit" else None
    if signal is not None and content["summary"].startswith("out of memory"):
        cause = "out of memory"
    return {
        **content,
        "cause": cause,
        "signal": signal[1] if signal else "",
        "exit_code": int(code[1]) if code else None,
    }
