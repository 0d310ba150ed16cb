"""Every message between driver, member and rank, and how it is encoded as the header and the parts of a frame.

    driver  ── Stop, Interrupt, TakeStack, RecordTimeline ─────────────▶ member
    driver  ── EnterWorld, Work, Run, MoreItems, EndItem, … ─ passed on ─▶ rank
    member  ── SetEnvironment, GiveBack ───────────────────────────────▶ rank
    member  ── Hello, Output, GpuUsed, Beat, Exited, … ────────────────▶ driver
    rank    ── Done, ItemDone, Failed, Metrics, … ───── passed on ─────▶ driver

To add a message, write its class here and name it in one of the unions below. Its annotations define how it is encoded
and decoded: a field of type `bytes` is one part of the frame's body, a field of type `Buffers` is all of the body's
parts, and other fields go into the header as JSON. `decode` refuses whatever the annotations do not allow.

Members import this module at start-up, so it uses light parts of the standard library only. For the same reason the
messages are NamedTuples: importing `dataclasses` would take longer than everything else here. And there is no
`from __future__ import annotations`: it makes annotations strings, and typing would have to compile each of them.
"""

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
    "exception",  # an exception that is not listed below: another attempt may succeed
    "code",  # an exception that the same code would raise again, on whatever ranks it runs
    "damaged checkpoint",  # the checkpoint from which the attempt had to continue turned out to be damaged
    "echo",  # a collective failed because another rank ended
    "interrupt",  # a KeyboardInterrupt
    "exit",  # sys.exit(), or a process that ended itself
    "signal",
    "out of memory",  # a MemoryError, or a process that was killed for its memory
    "lost",  # the rank's member is gone, without an Exited message
    "timed out",  # the driver ended an item, which took longer than allowed
]
DisplayType = Literal[
    "image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml", "text/html", "text/markdown", "text/latex"
]
PathKind = Literal["", "stdlib", "site"]


class MalformedMessage(ValueError):
    """A frame that is not one of the messages below."""


# ── From the driver to a member ───────────────────────────────────────────────────────────────────────────────────────


class Stop(NamedTuple):
    """Send the signal to the rank's process group; after `grace_s` seconds, kill the processes that still run."""

    signal: SignalNumber
    grace_s: float


class Interrupt(NamedTuple):
    """Send SIGINT to the rank's process group."""


class TakeStack(NamedTuple):
    """Answer with a Stack: what the rank is doing now."""


class RecordTimeline(NamedTuple):
    """Choose a file for the rank's timeline, and set `variable` in the rank's environment to the file's path.

    If `wanted`, send the file's contents to the driver when the rank has ended.
    """

    variable: str
    wanted: bool


# ── From the driver to a rank, passed on by its member ────────────────────────────────────────────────────────────────


class EnterWorld(NamedTuple):
    """All ranks are up. This gives the rank its place among them, its `address`, and variables for its environment."""

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
    """Settings of the notebook's process, which ranks apply to themselves.

    prefix, folder, path: sys.prefix, the working directory, and sys.path with the kind of each entry.
    environment: the variables that have changed since the process started; None for a deleted one.
    loggers: the settings of loggers, by name; the root logger's name is ''.
    logging_disabled: the level up to which logging is disabled.
    """

    prefix: str = ""
    folder: str = ""
    path: Sequence[tuple[str, PathKind]] = ()
    environment: Mapping[str, str | None] = {}
    loggers: Mapping[str, Logger] = {}
    logging_disabled: int = 0


class Script(NamedTuple):
    """A script that a rank runs, and how to run it.

    line: the text after %run, by which the rank finds the script.
    written: the path as the user wrote it, or the name of a module.
    path: the absolute path, '' for a module.
    parts: the code, as pairs: the file name that tracebacks show, and the source. A notebook has a pair for each cell.
    arguments: the script's own arguments, which follow the script in `line`.
    module: the module to run, for -m. The rank finds its code, so `parts` is empty.
    name: the value of `__name__`.
    inside: whether to run the script in the cell's own namespace.
    any_exit: whether every sys.exit() counts as a success.
    patterns: whether to expand `*`, `?` and `[…]` in the arguments.
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
        """All of the script's code; if the script is a notebook, the code of its cells, one below the other."""
        return "\n".join(source for _, source in self.parts)


class Work(NamedTuple):
    """What the rank is to run for each item: a cell's `source`, or a function of one argument, packed in `parts`.

    It is sent once, before the first item. The fields have the same meanings as in Run. The Run of an item has only
    what differs from item to item.
    """

    what: Literal["cell", "call"]
    source: str = ""
    autolog: bool = True
    environment: Mapping[str, str] = {}
    notebook: NotebookState = NotebookState()
    scripts: tuple[Script, ...] = ()
    parts: Buffers = ()

    def problem(self) -> str:
        return "" if self.parts else "there is no payload"


class Run(NamedTuple):
    """Run a cell's `source`, or a call, with the values that are packed in `parts`: the payload, then its buffers.

    If `what` is "item", the rank runs the Work that was sent before. Then `parts` has the item's values, and `seed` is
    the seed of the item's random numbers. With `measure`, the rank sends an ItemMeasured when the item has finished.

    pull: names whose values to send back afterwards.
    barrier: whether to give the cell the context and the rows of the rank's Spark task.
    environment: variables to set; `defaults` are set unless the rank has them already.
    """

    what: Literal["cell", "call", "item"]
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
    seed: Annotated[int, range(1 << 32)] = 0
    measure: bool = False

    def problem(self) -> str:
        return "" if self.parts else "there is no payload"


class MoreItems(NamedTuple):
    """Run further items, one after another, once the items sent before have ended. Only a rank of its own gets this.

    Each item is a Run with the same fields as the last one, but with its own seed and checkpoints. `counts` says how
    many of the `parts` each item has. The items have the numbers from `first` on, by which they can be given back. If
    no item has checkpoints of its own, `checkpoints` is empty.
    """

    first: Count
    seeds: tuple[Annotated[int, range(1 << 32)], ...]
    counts: tuple[Count, ...]
    checkpoints: tuple[Here, ...]
    parts: Buffers

    def problem(self) -> str:
        same = len(self.seeds) == len(self.counts) and len(self.checkpoints) in (0, len(self.seeds))
        return "" if same and sum(self.counts) == len(self.parts) > 0 else "its parts are not those of its items"


class Release(NamedTuple):
    """End the rank's collectives, so that no rank waits in them any longer."""


class EndItem(NamedTuple):
    """End the current item if the rank is still running it, because the result of the item is no longer wanted."""


class Leave(NamedTuple):
    """The driver will send nothing more; the rank ends."""


# ── From a member to its rank ─────────────────────────────────────────────────────────────────────────────────────────


class GiveBack(NamedTuple):
    """Give the items that have not begun back to the driver."""


class SetEnvironment(NamedTuple):
    """Environment variables to set for all requests to come; they override the notebook's variables."""

    variables: dict[str, str]


# ── From a member to the driver ───────────────────────────────────────────────────────────────────────────────────────

# Messages with `time` and `rank` are kept in the run's record. These two fields are not sent: the driver sets them.


class Hello(NamedTuple):
    """The first message: which member this is, where it runs, and the process of its rank.

    `interface` is the network interface that has `address`, and `port` is a port that is free on `address`. `gpus` are
    the addresses of the GPUs that only this rank uses. `packages` are the versions of the packages in the rank's
    Python, by module. `packages` is None if the rank uses the notebook's own Python.
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
    """Bytes that the rank wrote: whole lines, or a part of a line if the end of the line does not come soon."""

    stream: Stream
    data: bytes
    time: float = 0.0
    rank: int = 0


class GpuUsed(NamedTuple):
    """How much all processes together use one of the rank's GPUs. It is sent when one of the numbers changes.

    A number is None if NVML does not give it.
    """

    address: str
    name: str
    used_bytes: Count | None
    total_bytes: Count | None
    busy_percent: int | None
    time: float = 0.0
    rank: int = 0

    def __str__(self) -> str:
        memory = "" if self.total_bytes is None else f", {self.total_bytes / 1e9:.0f} GB"
        return f"{self.address} ({self.name}{memory})"


class Stack(NamedTuple):
    """What the rank is doing: the `state` of its process, and its stack as `text`, '' if the stack is not known."""

    state: str
    text: str


class TimelinePart(NamedTuple):
    """A piece of the timeline that Horovod has written on a rank. The pieces together are one zlib stream.

    `last` ends the stream. `cut` is the number of bytes that were left out because the file is too large. `data`
    goes into the run's folder, not into its record.
    """

    data: bytes
    last: bool = False
    cut: Count = 0
    time: float = 0.0
    rank: int = 0


class Exited(NamedTuple):
    """The last message: the rank's process has ended, with an exit code or by a signal."""

    code: int | None
    signal: SignalNumber | None
    out_of_memory: bool
    peak_memory_bytes: Count


# ── From a rank to the driver, passed on by its member ────────────────────────────────────────────────────────────────


class RankNews(NamedTuple):
    """What the gang needs for the next request.

    `names_bound` are the names that are new in the rank's `__main__`. `loaded` says whether the rank has loaded all
    values that were sent to it. `port` is a port that is free on the rank's address. `memory_bytes` is how much
    memory the process holds after an item; 0 if that is not known. `imported` are the frameworks that the rank has
    imported; None if the code has changed the environment on which their import depends. `seconds` is how long the
    request has taken.
    """

    names_bound: tuple[str, ...]
    loaded: bool
    port: Port
    memory_bytes: Count = 0
    imported: tuple[str, ...] | None = ()
    seconds: float = 0.0


class PackedValue(NamedTuple):
    """A returned value. If it could not be packed, `error` says why.

    `parts` is the number of the message's parts that belong to this value.
    """

    name: str
    type_name: str
    parts: Count
    error: str


class Done(NamedTuple):
    """The rank has run the request. `repr` is the shortened repr() of the value that the request returned.

    In `values`, the returned value is first, under the name ''. The values of the names to pull follow. If the rank
    does not have one of these names, the name is in `missing` instead.
    """

    values: tuple[PackedValue, ...]
    missing: tuple[str, ...]
    repr: str
    news: RankNews
    parts: Buffers

    def problem(self) -> str:
        same = sum(value.parts for value in self.values) == len(self.parts)
        return "" if same else "the parts of its values do not add up to those of the message"


class ItemDone(NamedTuple):
    """The rank has run an item that others follow. There is no RankNews; the Done of a later item has it.

    `repr` means the same as in Done, and `seconds` the same as in RankNews.

    `parts` is the packed value. If it could not be packed, there are no parts, and `error` says why.
    """

    type_name: str
    error: str
    repr: str
    seconds: float
    parts: Buffers

    def problem(self) -> str:
        return "" if bool(self.parts) != bool(self.error) else "it has neither parts nor an error, or both"


class GivenBack(NamedTuple):
    """The items with these numbers will not run on this rank: other ranks can run them sooner.

    Items are given back if the one before them takes long, fails or is interrupted.
    """

    numbers: tuple[Count, ...]


class SourceLine(NamedTuple):
    """A line of source around the place where an exception was raised."""

    number: int
    text: str


class CodeFrame(NamedTuple):
    """One frame of a traceback. `in_cell` marks the user's notebook code; `source` has the lines around `line`."""

    filename: str
    line: int
    function: str
    in_cell: bool = False
    source: tuple[SourceLine, ...] = ()


class Failure(NamedTuple):
    """Why a rank did not finish.

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
        """Whether the rank's code raised an exception.

        An exit does not count, nor does an exception that was raised only because another rank had ended.
        """
        return bool(self.error) and self.cause not in ("exit", "echo")


class Failed(NamedTuple):
    """The request has ended with an exception, an exit or an interrupt."""

    failure: Failure
    news: RankNews


class Importing(NamedTuple):
    """An interrupt waits, since the rank is importing a package. The rank sends this again while the import goes on."""


class CollectivesEnded(NamedTuple):
    """The rank is about to end collectives, as a Release has asked it to. A rank that has none does not send this."""


class UserMessage(NamedTuple):
    """Text that a rank sent to the notebook on purpose (log_to_driver, LogCallback)."""

    text: str
    time: float = 0.0
    rank: int = 0


class Metrics(NamedTuple):
    """Numbers that a rank reported.

    `epochs` is the total number of epochs, and `steps` is the total number of steps in an epoch, if they are known.
    Under Keras, `step` counts from 1 within the epoch; with log(), it is what the user passes.
    """

    values: dict[str, float]
    step: int | None = None
    epoch: int | None = None
    steps: int | None = None
    epochs: int | None = None
    ends_epoch: bool = False
    time: float = 0.0
    rank: int = 0


class Displayed(NamedTuple):
    """A rank has shown something other than text, with display() or plt.show().

    `number` counts the rank's displays in an attempt, from 1. A display replaces an earlier one with the same number;
    a display with `clears` replaces all displays of the rank. `data` is of type `mime_type`. It is empty if the data
    was too large; `size_bytes` is the original size. `text` is the text form, which the rank has also printed. The
    driver sets `attempt` and, in a run of items, `item`.
    """

    number: Count
    mime_type: DisplayType
    data: bytes
    text: str = ""
    size_bytes: Count = 0
    clears: bool = False
    attempt: Count = 1
    item: int | None = None
    time: float = 0.0
    rank: int = 0


class ItemMeasured(NamedTuple):
    """What an item has used on one rank, in a process that has run nothing else before.

    `seconds`, `cpu_s` and `read_bytes` leave out imports, which have taken `import_s`. `read_bytes` is what was read
    with system calls, from files and pipes, whether or not the system had it in memory.
    `own_bytes` is the highest amount of memory that was not shared with processes of other items. It is the sum over
    the rank's process, its member, and the processes that the rank has started. `shared_bytes` is the memory that can
    be shared with processes of other items: mapped files, above all libraries, and what a spare process had imported.
    `free_bytes` is the memory that was free on the machine before the item, together with what the spare process holds
    of `shared_bytes`; 0 if that is not known. `cores` is the number of cores. `gpu_bytes` is the largest growth of the
    memory in use on any one GPU.
    If the item has made a model of Keras or PyTorch, `parameters` is the number of the largest model's parameters,
    which take `parameter_bytes`. `batch_size` is the value of this name in the cell, 0 if there is none.
    """

    seconds: float
    import_s: float
    cpu_s: float
    read_bytes: Count
    own_bytes: Count
    shared_bytes: Count
    free_bytes: Count
    cores: Count
    gpu_bytes: Count = 0
    parameters: Count = 0
    parameter_bytes: Count = 0
    batch_size: Count = 0
    time: float = 0.0
    rank: int = 0


class DataOpened(NamedTuple):
    """A rank has opened a data set, to read its shard. The counts and `version` are those of the whole data set.

    `reader` is the number of this rank's reader, from 0. If the ranks run the same code, readers with the same number
    read the same data. `name` is what the user wrote. `where` is the row filter in words, '' for none. `version` is a
    digest of the files as they were when they were opened. Unknown values are '' or 0.
    """

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
    time: float = 0.0
    rank: int = 0


class Piece(NamedTuple):
    """The rows that a rank reads of one row group. Numbers are from 0; row group -1 stands for the whole file.

    If there are many row groups, `groups` adjacent ones form one piece; `file` and `row_group` are those of the first.
    """

    file: Count
    row_group: Annotated[int, range(-1, 1 << 63)]
    rows: Count
    groups: Count = 1


class DataPlanned(NamedTuple):
    """What a rank is to read in an epoch: `pieces`, in this order. `epoch` counts from 1.

    `names` are the numbers and names of the files; if there are many files, only of the first ones. The first `begun`
    rows of the epoch were read before this reader was made. If `window` is 0, rows are handed out in order; otherwise,
    they are shuffled within each block of `window` rows.
    """

    reader: Count
    epoch: Count
    pieces: tuple[Piece, ...]
    names: tuple[tuple[Count, str], ...] = ()
    begun: Count = 0
    window: Count = 0
    time: float = 0.0
    rank: int = 0

    @property
    def rows(self) -> int:
        """The number of rows in all pieces."""
        return sum(piece.rows for piece in self.pieces)


class DataRead(NamedTuple):
    """How far a rank has read in an epoch: the rows, steps and bytes so far, and the rows and steps that are planned.

    `epoch` counts from 1. `place` says where the rank reads now: `part-3.parquet, row group 2 of 8`. `waited_s` is how
    long the rank's own code has waited for batches in this epoch. Unknown values are None or ''.
    """

    reader: Count
    epoch: Count
    rows: Count
    steps: Count
    size_bytes: Count
    rows_planned: Count | None = None
    steps_planned: Count | None = None
    waited_s: float = 0.0
    elapsed_s: float = 0.0
    place: str = ""
    done: bool = False
    time: float = 0.0
    rank: int = 0


class CheckpointSaved(NamedTuple):
    """A checkpoint is whole and can be read.

    `folder` is the directory of checkpoints as the user wrote it, and `name` is the checkpoint's name in it. `took_s`
    is the time from the call to the commit; training waited for `blocked_s` of it. `metrics` were saved with the
    checkpoint. `kind` says what wrote it: "keras" is ModelCheckpoint, "tensorflow" is BackupAndRestore; for these two,
    `step` is the epoch.
    """

    folder: str
    name: str
    step: int
    size_bytes: Count
    took_s: float = 0.0
    blocked_s: float = 0.0
    metrics: Mapping[str, float] = {}
    best: bool = False
    kind: CheckpointKind = "sparkring"
    time: float = 0.0
    rank: int = 0


class CheckpointFailed(NamedTuple):
    """A checkpoint could not be saved.

    If the save was in the background, the run does not fail now, but at the next save or at the end of the cell.
    """

    folder: str
    step: int
    reason: str
    time: float = 0.0
    rank: int = 0


class CheckpointDamaged(NamedTuple):
    """A checkpoint was found damaged, and skipped."""

    folder: str
    name: str
    step: int
    reason: str
    time: float = 0.0
    rank: int = 0


class CheckpointRestored(NamedTuple):
    """A rank has restored a checkpoint."""

    folder: str
    name: str
    step: int
    took_s: float = 0.0
    time: float = 0.0
    rank: int = 0


class CheckpointRemoved(NamedTuple):
    """A checkpoint was removed to make room for newer ones."""

    folder: str
    name: str
    time: float = 0.0
    rank: int = 0


# ── Which messages each end sends ─────────────────────────────────────────────────────────────────────────────────────

MemberOrder = Stop | Interrupt | TakeStack | RecordTimeline
RankOrder = EnterWorld | Work | Run | MoreItems | Release | EndItem | Leave | SetEnvironment | GiveBack
MemberReport = Hello | Beat | Output | GpuUsed | Stack | TimelinePart | Exited
# What a rank reports while it runs a request.
Told = (
    UserMessage
    | Metrics
    | Displayed
    | ItemMeasured
    | DataOpened
    | DataPlanned
    | DataRead
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointDamaged
    | CheckpointRestored
    | CheckpointRemoved
)
RankReport = Done | ItemDone | GivenBack | Failed | Importing | CollectivesEnded | Told
Report = MemberReport | RankReport
Kept = Output | GpuUsed | TimelinePart | Told  # passed to the run's record unchanged
Message = MemberOrder | RankOrder | Report

KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


# ── Encoding and decoding ─────────────────────────────────────────────────────────────────────────────────────────────


def encode(message: Message) -> tuple[dict[str, Any], list[Buffer]]:
    """Return the fields of the message's header, as JSON values, and the parts of its body."""
    plan = _plan(type(message))
    parts: list[Buffer] = []
    for name in plan.binary:
        found = getattr(message, name)
        parts += found if isinstance(found, tuple) else [found]
    return {name: getattr(message, name) for name in plan.converters}, parts


def decode(kind: type[Message], fields: dict[str, Any], parts: Sequence[Buffer]) -> Message:
    """Return the message. Raise MalformedMessage if the fields and parts are not those of a message of this kind."""
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
        found[name] = tuple(parts) if several else bytes(parts[0])
    message = kind(**found)
    problem = message.problem() if isinstance(message, Work | Run | MoreItems | Done | ItemDone) else ""
    if problem:
        raise MalformedMessage(f"{kind.__name__}: {problem}")
    return message


Converter = Callable[[Any], Any]


class _Plan(NamedTuple):
    """How a kind of message is encoded and decoded.

    `converters` has a function for each field in the header. `binary` has the other fields, which are in the body: the
    value is True for a field of type `Buffers`, and False for a field of type `bytes`.
    """

    converters: dict[str, Converter]
    binary: dict[str, bool]


_plans: dict[Any, _Plan] = {}  # for the kinds of messages that this process has sent or received


def _plan(kind: Any) -> _Plan:
    if kind not in _plans:
        hints = get_type_hints(kind, include_extras=True)
        if kind in get_args(Kept):
            del hints["time"], hints["rank"]
        binary = {name: hint == Buffers for name, hint in hints.items() if hint in (bytes, Buffers)}
        converters = {name: _converter(hint) for name, hint in hints.items() if name not in binary}
        _plans[kind] = _Plan(converters, binary)
    return _plans[kind]


def _converter(hint: Any) -> Converter:
    """Return a function that turns a value from JSON into a value of type `hint`, or raises ValueError."""
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
    """Return a converter that calls `make` with the value, or keeps the value if there is no `make`.

    It raises ValueError if the value is not of type `kind`, or not in `within`.
    """

    def convert(value: Any) -> Any:
        if type(value) is not kind or (within is not None and value not in within):
            raise _wrong(value, expected)
        return value if make is None else make(value)

    return convert


def _each(converters: Sequence[Converter], expected: str, make: Converter) -> Converter:
    """Return a converter for lists, with a function from `converters` for each item.

    The converter calls `make` with the list of converted items. It raises ValueError if the value is not a list, or if
    the list does not have as many items as there are `converters`.
    """

    def convert(value: Any) -> Any:
        if type(value) is not list or len(value) != len(converters):
            raise _wrong(value, expected)
        return make([convert(item) for convert, item in zip(converters, value, strict=True)])

    return convert


def _wrong(value: Any, expected: str) -> ValueError:
    text = repr(value)
    return ValueError(f"expected {expected}, not {text if len(text) < 60 else f'{text[:59]}…'}")
