"""Every message between driver, member and rank, and how it is encoded as the header and the parts of a frame.

    driver  ── Stop, Interrupt, TakeStack, RecordTimeline ─────────────▶ member
    driver  ── EnterWorld, Run, Release, Leave ──────── passed on ─────▶ rank
    member  ── SetEnvironment ─────────────────────────────────────────▶ rank
    member  ── Hello, Output, GpuUsage, Beat, Stack, Exited, … ────────▶ driver
    rank    ── Done, Failed, Metrics, EpochPlan, … ──── passed on ─────▶ driver

To add a message, write its class here and name it in the unions below: it is encoded and decoded by its annotations. A
field of type `Buffer` is one part of the frame's body, and one of type `Buffers` is all the parts that are left; the
other fields go into the header as JSON. `decode` refuses whatever the annotations do not allow.

Members import this module at start-up, so it uses light parts of the standard library only. For the same reason the
messages are NamedTuples: importing `dataclasses` would take longer than all else here.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from sparkring.runtime.resume_point import Here
from sparkring.runtime.world import World

Buffer = bytes | bytearray | memoryview
Buffers = tuple[Buffer, ...]
Count = Annotated[int, range(1 << 63)]
Port = Annotated[int, range(1, 1 << 16)]
SignalNumber = Annotated[int, range(1, 65)]

Stream = Literal["stdout", "stderr"]
DataKind = Literal["parquet", "petastorm", "tfrecord"]
CheckpointKind = Literal["sparkring", "keras", "tensorflow", "torch"]
FailureCause = Literal[
    "exception",  # any other one: another attempt may succeed
    "code",  # an exception that the same code raises again, on any ranks
    "damaged checkpoint",  # the one that the attempt continued from
    "echo",  # of another rank's end: a collective broke
    "interrupt",  # a KeyboardInterrupt
    "exit",  # sys.exit(), or a process that ended itself
    "signal",
    "out of memory",  # a MemoryError, or a process that was killed for its memory
    "lost",  # the rank's member is gone, without an Exited message
]
DisplayType = Literal[
    "image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml", "text/html", "text/markdown", "text/latex"
]
PathKind = Literal["", "stdlib", "site"]


class MalformedMessage(ValueError):
    """A frame that is not one of the messages below."""


# ── From the driver to a member ───────────────────────────────────────────────────────────────────────────────────────


class Stop(NamedTuple):
    """Send the signal to the rank's process group, and kill what is left after `grace_s`."""

    signal: SignalNumber
    grace_s: float


class Interrupt(NamedTuple):
    """Send SIGINT to the rank's process group."""


class TakeStack(NamedTuple):
    """Answer with a Stack, the rank's current stack."""


class RecordTimeline(NamedTuple):
    """Give the rank a file for its framework's timeline, named in `variable`, and send it in the end if `wanted`."""

    variable: str
    wanted: bool


# ── From the driver to a rank, passed on by its member ────────────────────────────────────────────────────────────────


class EnterWorld(NamedTuple):
    """All ranks are there: the rank's place among them, its own `address`, and variables for its environment."""

    world: World
    address: str
    environment: dict[str, str]


class Handler(NamedTuple):
    """A logging handler that writes to `stream`; `format` holds the arguments of its Formatter, if it has one."""

    stream: Stream
    level: int
    format: tuple[str | None, str | None, Literal["%", "{", "$"]] | None


class Logger(NamedTuple):
    """The settings of a logger. `handlers` is None if the module that owns the logger sets it up on import."""

    level: int
    propagate: bool
    handlers: Sequence[Handler] | None


class NotebookState(NamedTuple):
    """The settings of the notebook that ranks take over.

    prefix, folder, path: its sys.prefix, working directory, and sys.path with the kind of each entry.
    environment: the variables that its process has changed since it started; None for a deleted one.
    loggers: by name; the root's name is ''.
    logging_disabled: the level up to which logging is disabled.
    """

    prefix: str = ""
    folder: str = ""
    path: Sequence[tuple[str, PathKind]] = ()
    environment: Mapping[str, str | None] = {}
    loggers: Mapping[str, Logger] = {}
    logging_disabled: int = 0


class Script(NamedTuple):
    """A script as a rank is to run it.

    line: the text after %run, by which the rank finds the script; `arguments` is the script's part of it.
    parts: the code, as pairs of a file name for tracebacks and source; a notebook has one for each cell.
    module: the module to run instead, which the rank imports.
    written: the path as the user wrote it.
    name: the value of `__name__`.
    inside: run in the cell's own namespace.
    any_exit: take every sys.exit() as a success.
    patterns: expand `*`, `?` and `[…]` in the arguments.
    """

    line: str
    written: str
    path: str
    parts: tuple[tuple[str, str], ...]
    arguments: str = ""
    module: str = ""
    name: str = "__main__"
    inside: bool = False
    any_exit: bool = False
    patterns: bool = True

    @property
    def title(self) -> str:
        return f"-m {self.module}" if self.module else self.written

    @property
    def source(self) -> str:
        """All its code, with the notebook's cells one below the other."""
        return "\n".join(source for _, source in self.parts)


class Run(NamedTuple):
    """Run a cell's `source`, or a call, with what is packed in `parts`: the payload, then its buffers.

    pull: names to send back when it has run.
    barrier: give the cell what the rank's Spark task has.
    environment: variables to set; `defaults` are set unless the rank has them already.
    """

    what: Literal["cell", "call"]
    source: str = ""
    pull: tuple[str, ...] = ()
    autolog: bool = True
    barrier: bool = False
    environment: Mapping[str, str] = {}
    defaults: Mapping[str, str] = {}
    notebook: NotebookState = NotebookState()
    checkpoints: Here = Here()
    scripts: tuple[Script, ...] = ()
    parts: Buffers = ()

    def problem(self) -> str:
        return "" if self.parts else "there is no payload"


class Release(NamedTuple):
    """End the rank's collectives, so that neither it nor another rank waits in one any longer."""


class Leave(NamedTuple):
    """Nothing more will come: end."""


# ── From a member to its rank ─────────────────────────────────────────────────────────────────────────────────────────


class SetEnvironment(NamedTuple):
    """Variables that the member sets for all requests to come; they override those of the notebook."""

    variables: dict[str, str]


# ── From a member to the driver ───────────────────────────────────────────────────────────────────────────────────────


class Hello(NamedTuple):
    """The first message: which member this is, where it runs, and the process of its rank.

    `interface` is the network interface that has `address`, and `port` is free there. `gpus` are the addresses of
    those that the rank has for itself. `packages` are those of the rank's Python, None if it is the notebook's own.
    """

    member: Count
    pid: Count
    host: str
    address: str
    interface: str
    port: Port
    python: str
    gpus: tuple[str, ...]
    packages: dict[str, str] | None


class Beat(NamedTuple):
    """The member is alive."""


class Output(NamedTuple):
    """Bytes that the rank wrote: whole lines, unless the end of a line takes too long."""

    stream: Stream
    data: Buffer


class GpuUsage(NamedTuple):
    """How a GPU is used, by all processes together; None for what NVML does not tell. Sent when it changes."""

    address: str
    name: str
    used_bytes: Count | None
    total_bytes: Count | None
    busy_percent: int | None

    def __str__(self) -> str:
        memory = "" if self.total_bytes is None else f", {self.total_bytes / 1e9:.0f} GB"
        return f"{self.address} ({self.name}{memory})"


class Stack(NamedTuple):
    """Where the rank stands: the `state` of its process, and the `text` of its stack, '' if it gave none."""

    state: str
    text: str


class TimelinePiece(NamedTuple):
    """A piece of the rank's timeline, of one zlib stream; `last` ends it, and `cut` is how many bytes were left out."""

    last: bool
    cut: Count
    data: Buffer


class Exited(NamedTuple):
    """The last message: the rank's process has ended, with an exit code or by a signal."""

    code: int | None
    signal: SignalNumber | None
    out_of_memory: bool
    peak_memory_bytes: Count


# ── From a rank to the driver, passed on by its member ────────────────────────────────────────────────────────────────


class RankNews(NamedTuple):
    """What the gang needs for the next request.

    `names_bound` are new in the rank's `__main__`, `loaded` says whether it has all that was sent, `port` is free.
    """

    names_bound: tuple[str, ...]
    loaded: bool
    port: Port


class PackedValue(NamedTuple):
    """A returned value: `parts` is its number of parts in the message, or `error` says why it cannot be packed."""

    name: str
    type_name: str
    parts: Count
    error: str


class Done(NamedTuple):
    """The rank has run the request; `repr` is a short one of its value.

    The value comes first, under the name '', then what was to be pulled, except for names that are `missing`.
    """

    values: tuple[PackedValue, ...]
    missing: tuple[str, ...]
    repr: str
    news: RankNews
    parts: Buffers

    def problem(self) -> str:
        same = sum(value.parts for value in self.values) == len(self.parts)
        return "" if same else "its values are not in as many parts as there are"


class CodeLine(NamedTuple):
    """A line of source near the place where an exception was raised."""

    number: int
    text: str


class CodePlace(NamedTuple):
    """One frame of a traceback, as events.CodeFrame says."""

    filename: str
    line: int
    function: str
    in_cell: bool
    source: tuple[CodeLine, ...]


class RankFailure(NamedTuple):
    """Why the rank ended before its time, as events.Failure says."""

    cause: FailureCause
    summary: str
    frames: tuple[CodePlace, ...]
    traceback: str
    advice: str
    error: str


class Failed(NamedTuple):
    """The request has ended with an exception, an exit or an interrupt."""

    failure: RankFailure
    news: RankNews


class UserMessage(NamedTuple):
    """Text for the notebook, from log_to_driver()."""

    text: str


class Metrics(NamedTuple):
    """Numbers for the notebook; `epochs` and `steps` (per epoch) are totals where known."""

    values: dict[str, float]
    step: int | None = None
    epoch: int | None = None
    steps: int | None = None
    epochs: int | None = None
    ends_epoch: bool = False


class Display(NamedTuple):
    """Something other than text that the rank has shown, as events.Displayed says."""

    number: Count
    mime_type: DisplayType
    text: str
    size_bytes: Count
    clears: bool
    data: Buffer


class DataOpened(NamedTuple):
    """The rank has opened a data set, as events.DataOpened says."""

    reader: Count
    name: str
    kind: DataKind
    columns: tuple[str, ...] = ()
    where: str = ""
    version: str = ""
    files: Count = 0
    row_groups: Count = 0
    rows: Count = 0
    size_bytes: Count = 0
    batch_size: Count = 0


class PlannedPiece(NamedTuple):
    """Rows that a rank reads one after another, as events.Piece says; the row group -1 is a whole file."""

    file: Count
    row_group: Annotated[int, range(-1, 1 << 63)]
    rows: Count
    groups: Count = 1


class EpochPlan(NamedTuple):
    """What the rank is to read in an epoch, as events.DataPlanned says."""

    reader: Count
    epoch: Count
    pieces: tuple[PlannedPiece, ...]
    names: tuple[tuple[Count, str], ...]
    begun: Count
    window: Count


class ReadProgress(NamedTuple):
    """How far the rank has read in an epoch, as events.DataRead says."""

    reader: Count
    epoch: Count
    rows: Count
    steps: Count
    size_bytes: Count
    rows_planned: Count | None
    steps_planned: Count | None
    waited_s: float
    elapsed_s: float
    place: str
    done: bool


class CheckpointSaved(NamedTuple):
    """A checkpoint is whole and can be read, as events.CheckpointSaved says."""

    folder: str
    name: str
    step: int
    size_bytes: Count
    took_s: float
    blocked_s: float
    metrics: Mapping[str, float] = {}
    best: bool = False
    kind: CheckpointKind = "sparkring"


class CheckpointFailed(NamedTuple):
    """A checkpoint could not be saved."""

    folder: str
    step: int
    reason: str


class CheckpointDamaged(NamedTuple):
    """A checkpoint was found damaged, and skipped."""

    folder: str
    name: str
    step: int
    reason: str


class CheckpointRestored(NamedTuple):
    """The rank has restored a checkpoint."""

    folder: str
    name: str
    step: int
    took_s: float


class CheckpointRemoved(NamedTuple):
    """A checkpoint was removed to make room for newer ones."""

    folder: str
    name: str


# ── Who says what ─────────────────────────────────────────────────────────────────────────────────────────────────────

MemberOrder = Stop | Interrupt | TakeStack | RecordTimeline
RankOrder = EnterWorld | Run | Release | Leave | SetEnvironment
MemberReport = Hello | Beat | Output | GpuUsage | Stack | TimelinePiece | Exited
# What a rank tells while it runs; each becomes an event of the run.
Told = (
    UserMessage
    | Metrics
    | DataOpened
    | EpochPlan
    | ReadProgress
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointDamaged
    | CheckpointRestored
    | CheckpointRemoved
)
RankReport = Done | Failed | Display | Told
Report = MemberReport | RankReport
Message = MemberOrder | RankOrder | Report

KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


# ── As frames ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(message: Message) -> tuple[dict[str, Any], list[Buffer]]:
    """The fields of the message's header, as JSON values, and the parts of its body."""
    fields = message._asdict()
    parts: list[Buffer] = []
    for name in _plan(type(message)).binary:
        found = fields.pop(name)
        parts += found if isinstance(found, tuple) else [found]
    return fields, parts


def decode(kind: type[Message], fields: dict[str, Any], parts: Sequence[Buffer]) -> Message:
    """The message; MalformedMessage if the fields and parts are not those of its kind."""
    plan = _plan(kind)
    if fields.keys() != plan.converters.keys():
        wrong = ", ".join(sorted(fields.keys() ^ plan.converters.keys()))
        raise MalformedMessage(f"{kind.__name__}: fields that are missing or unknown: {wrong}")
    found: dict[str, Any] = {}
    for name, convert in plan.converters.items():
        try:
            found[name] = convert(fields[name])
        except (ValueError, OverflowError) as error:
            raise MalformedMessage(f"{kind.__name__}.{name}: {error}") from None
    if len(parts) != len(plan.binary) and not any(plan.binary.values()):
        raise MalformedMessage(f"{kind.__name__}: {len(parts)} parts instead of {len(plan.binary)}")
    for name, several in plan.binary.items():
        found[name] = tuple(parts) if several else parts[0]
    message = kind(**found)
    problem = message.problem() if isinstance(message, Run | Done) else ""
    if problem:
        raise MalformedMessage(f"{kind.__name__}: {problem}")
    return message


Converter = Callable[[Any], Any]


class _Plan(NamedTuple):
    """How a kind of message is decoded: its fields in JSON, and its binary fields, with whether each is `Buffers`."""

    converters: dict[str, Converter]
    binary: dict[str, bool]


_plans: dict[Any, _Plan] = {}  # of the kinds that this process has met


def _plan(kind: Any) -> _Plan:
    if kind not in _plans:
        hints = get_type_hints(kind, include_extras=True)
        binary = {name: hint == Buffers for name, hint in hints.items() if hint in (Buffer, Buffers)}
        converters = {name: _converter(hint) for name, hint in hints.items() if name not in binary}
        _plans[kind] = _Plan(converters, binary)
    return _plans[kind]


def _converter(hint: Any) -> Converter:
    """A function that turns what JSON gives into a value of type `hint`, or raises ValueError."""
    if hint is Any:
        return lambda value: value
    if hint is float:
        return _float
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        return _each(list(_plan(hint).converters.values()), hint.__name__, lambda items: hint(*items))
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _checked(int, f"int from {arguments[1].start} to {arguments[1].stop - 1}", within=arguments[1])
    if origin is Literal:
        return _checked(str, f"one of {', '.join(map(repr, arguments))}", within=arguments)
    if origin in (Union, types.UnionType):
        (inner,) = (_converter(each) for each in arguments if each is not types.NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _each([_converter(each) for each in arguments], f"list of {len(arguments)}", tuple)
    if origin in (tuple, Sequence):
        kind, convert_item = tuple if origin is tuple else list, _converter(arguments[0])
        return _checked(list, "list", lambda items: kind(map(convert_item, items)))
    if origin in (dict, Mapping):
        convert_value = _converter(arguments[1])
        return _checked(dict, "object", lambda found: {key: convert_value(item) for key, item in found.items()})
    return _checked(hint, hint.__name__)


def _float(value: Any) -> float:
    if type(value) not in (float, int):
        raise _wrong(value, "float")
    return float(value)


def _checked(
    kind: type[Any], expected: str, make: Converter | None = None, within: Container[Any] | None = None
) -> Converter:
    """A converter of values that must be of type `kind` and in `within`; without `make`, the value is kept as it is."""

    def convert(value: Any) -> Any:
        if type(value) is not kind or (within is not None and value not in within):
            raise _wrong(value, expected)
        return value if make is None else make(value)

    return convert


def _each(converters: Sequence[Converter], expected: str, make: Converter) -> Converter:
    """A converter of lists with an item for each of `converters`; `make` gets the list of converted items."""

    def convert(value: Any) -> Any:
        if type(value) is not list or len(value) != len(converters):
            raise _wrong(value, expected)
        return make([convert(item) for convert, item in zip(converters, value, strict=True)])

    return convert


def _wrong(value: Any, expected: str) -> ValueError:
    text = repr(value)
    return ValueError(f"{text if len(text) < 60 else f'{text[:59]}…'} is no {expected}")
