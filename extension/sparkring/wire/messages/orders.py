"""The messages that the driver sends to a member or to its rank, and those that a member sends to its rank."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from sparkring.runtime.resume_point import Here
from sparkring.runtime.world import World
from sparkring.wire.messages.fields import Buffers, Count, PathKind, Seed, SignalNumber, Stream


class Stop(NamedTuple):
    """Send the signal to the rank's process group; after `grace_s` seconds, kill the remaining processes."""

    signal: SignalNumber
    grace_s: float


class Interrupt(NamedTuple):
    """Send SIGINT to the rank's process group."""


class GiveBack(NamedTuple):
    """Give back the requests that the rank has not begun. The member always answers with GivenBack."""


class TakeStack(NamedTuple):
    """Answer with a Stack, which says what the rank is doing."""


class RecordTimeline(NamedTuple):
    """Choose a file for the rank's timeline, and set `variable` in the rank's environment to the file's path.

    If `wanted`, send the file's contents to the driver when the rank has exited.
    """

    variable: str
    wanted: bool


class EnterWorld(NamedTuple):
    """All ranks are up. The rank gets its world, its `address`, and variables for its environment.

    `peers` has, for each member, its address and a port that is free there, as host:port.
    """

    world: World
    address: str
    environment: dict[str, str]
    peers: tuple[str, ...] = ()


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
    environment: the variables that have changed since the process started; the value of a deleted variable is None.
    loggers: the settings of loggers, by name; the root logger's name is ''.
    logging_disabled: the level up to which logging is disabled.
    autologging: the arguments of MLflow's autolog() functions, as JSON, by the names of their integrations.
    raises: whether a shell command that fails raises an error, as IPython's `system_raise_on_error` says.
    """

    prefix: str = ""
    folder: str = ""
    path: Sequence[tuple[str, PathKind]] = ()
    environment: Mapping[str, str | None] = {}
    loggers: Mapping[str, Logger] = {}
    logging_disabled: int = 0
    autologging: Mapping[str, str] = {}
    raises: bool = False


class Script(NamedTuple):
    """A script that a rank runs, and how to run it.

    line: the text after %run. The rank uses it to look up the script.
    written: the path as the user wrote it, or the name of a module.
    path: the absolute path, '' for a module.
    parts: the code, as pairs: the file name that tracebacks show, and the source. A notebook has a pair for each cell.
    arguments: the script's own arguments, which follow the script in `line`.
    module: the module to run, for -m. The rank finds the module's code, so `parts` is empty.
    name: the value of `__name__`.
    inside: whether to run the script in the cell's own namespace.
    any_exit: whether every sys.exit() counts as a success.
    patterns: whether to expand `*`, `?` and `[…]` in the arguments.
    parameters: the indices of the parts that assign defaults to parameters.
    replaced: the parameters that have been given a value, and whose defaults have been left out of `parts`.
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
    parameters: tuple[Count, ...] = ()
    replaced: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"-m {self.module}" if self.module else self.written

    @property
    def source(self) -> str:
        """All of the script's code; if the script is a notebook, the code of its cells, one below the other."""
        return "\n".join(source for _, source in self.parts)


class ModuleFiles(NamedTuple):
    """The user's own modules, which ranks on other machines write to a folder unless they find the same files.

    names: the modules. files: a compressed pickle of a dict from relative paths to the contents of files.
    """

    names: tuple[str, ...]
    files: bytes


class LackingPackages(NamedTuple):
    """Packages of the notebook that the rank's Python lacks, and that the code may import.

    sent: the modules that go along, because their packages are pure Python. files: as in ModuleFiles, b"" if there are
        none.
    requirements: what pip would install for the other modules. The code fails without those that are also `needed`.
    """

    sent: tuple[str, ...]
    requirements: Mapping[str, str]
    needed: tuple[str, ...]
    files: bytes


class CellCode(NamedTuple):
    """A cell. The values that it reads are packed in the message's `parts`."""

    source: str
    scripts: tuple[Script, ...] = ()


class StreamCode(NamedTuple):
    """A cell that is run for each micro-batch of a stream. The values that it reads are packed in `parts`."""

    source: str
    scripts: tuple[Script, ...] = ()


class FunctionCall(NamedTuple):
    """A function, packed in `parts` with its arguments. In a Work, its only argument comes with each item."""


class NextItem(NamedTuple):
    """The Work, for one item, whose values are packed in `parts`.

    scripts: the scripts that only this item runs.
    seed: the seed for the item's random numbers.
    measure: whether the rank sends an ItemMeasured when the item has finished.
    """

    scripts: tuple[Script, ...] = ()
    seed: Seed = 0
    measure: bool = False


class NextBatch(NamedTuple):
    """The Work, for a micro-batch. `parts` contains an order of worker/rank/batches.py."""

    seed: Seed = 0


class Work(NamedTuple):
    """What the rank runs for each item or for each micro-batch.

    Work is sent once, before the first item. The fields have the same meanings as in Run. The Run of an item contains
    only what differs from item to item.
    """

    what: CellCode | FunctionCall | StreamCode
    autolog: bool = True
    environment: Mapping[str, str] = {}
    notebook: NotebookState = NotebookState()
    parts: Buffers = ()

    def problem(self) -> str:
        return "" if self.parts else "there is no payload"

    def completed(self, request: "Run") -> "Run":
        """Return the request for an item or a micro-batch with the fields that are the same for all of them."""
        environment = {**request.environment, **self.environment}
        return request._replace(autolog=self.autolog, environment=environment, notebook=self.notebook)


class Run(NamedTuple):
    """Run a cell, a call, or the Work that was sent before. `parts` has the values: the payload, then its buffers.

    If a Run arrives while the rank is running another one, the new Run waits at the member.

    pull: names whose values the rank sends back afterwards. If it is not the one that is `pulled`, it sends only its
        shards of sharded tensors in these values.
    grace_s: how long the rank may stay after SIGTERM to save a checkpoint.
    stops_on_nan: whether to raise an error when a metric is reported that is NaN or infinite.
    barrier: whether to give the cell the context and the rows of the rank's Spark task.
    post_mortem: whether to open Python's debugger if the code raises an exception.
    traces: whether to record some steps with PyTorch's profiler.
    environment: variables to set; `defaults` are set unless the rank already has them.
    profile: whether the rank says where its time goes.
    """

    what: CellCode | FunctionCall | NextItem | NextBatch
    pull: tuple[str, ...] = ()
    autolog: bool = True
    barrier: bool = False
    environment: Mapping[str, str] = {}
    defaults: Mapping[str, str] = {}
    notebook: NotebookState = NotebookState()
    checkpoints: Here = Here()
    parts: Buffers = ()
    pulled: bool = True
    post_mortem: bool = False
    traces: bool = False
    stops_on_nan: bool = False
    grace_s: float = 30.0
    profile: bool = False

    def problem(self) -> str:
        return "" if self.parts else "there is no payload"


class Release(NamedTuple):
    """End the rank's collectives, so that no rank is left waiting in them."""


class EndItem(NamedTuple):
    """End the current item if the rank is still running it, because the result of the item is no longer wanted."""


class SaveSoon(NamedTuple):
    """A host is shutting down. Save at the save point `number`; if it is 0, first answer with a SavePoint."""

    number: Count = 0


class GoNow(NamedTuple):
    """End as SIGTERM would have ended the rank, which has stayed until the checkpoint was saved."""


class Answer(NamedTuple):
    """The user's answer to the InputRequested with this `number`. `text` is None if nobody can answer."""

    number: int
    text: str | None


class Gathered(NamedTuple):
    """All ranks have sent a Gather: their texts, in the order of ranks.

    `mismatch` says that some ranks have called barrier(), and others allGather().
    """

    texts: tuple[str, ...]
    mismatch: bool = False


class Leave(NamedTuple):
    """End the rank. The driver will send nothing more."""


class SetEnvironment(NamedTuple):
    """Set environment variables for all later requests. They override the notebook's variables."""

    variables: dict[str, str]
