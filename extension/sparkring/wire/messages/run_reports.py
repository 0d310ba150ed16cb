"""What a rank reports for the run's record while it is running a request. Its member passes it on.

`time` and `rank` are not sent: the driver sets them.
"""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from sparkring.wire.messages.fields import CheckpointKind, Count, DataKind, DisplayType


class UserMessage(NamedTuple):
    """Text that a rank sent to the notebook on purpose (log_to_driver, LogCallback)."""

    text: str
    time: float = 0.0
    rank: int = 0


class CommandFailed(NamedTuple):
    """A shell command of the cell has failed, and the cell went on. A negative `code` is the number of a signal.

    `command` is the command as the cell has it, before names in it were replaced.
    """

    command: str
    code: int
    time: float = 0.0
    rank: int = 0


class InputRequested(NamedTuple):
    """The rank waits for an Answer, since its code has called input() or getpass().

    `number` counts the requests of the rank's process, from 1. With `hidden`, what the user types must not be shown.
    """

    number: Count
    prompt: str
    hidden: bool = False
    time: float = 0.0
    rank: int = 0


class InputEnded(NamedTuple):
    """The rank no longer waits for an Answer: it has got one, or it was interrupted."""

    number: Count
    time: float = 0.0
    rank: int = 0


class Metrics(NamedTuple):
    """Numbers that a rank reported.

    `epochs` is the total number of epochs, and `steps` is the total number of steps in an epoch, if they are known.
    Under Keras, `step` counts from 1 within the epoch; with log(), it is the number that the user passes. `iterations`
    has the completed iterations of the cell's training loop, and their number, if they are known.
    """

    values: dict[str, float]
    step: int | None = None
    epoch: int | None = None
    steps: int | None = None
    epochs: int | None = None
    ends_epoch: bool = False
    iterations: tuple[int, int] | None = None
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

    `seconds`, `cpu_s` and `read_bytes` do not include imports, which took `import_s`. `read_bytes` is how much was read
    with system calls, from files and pipes, whether or not the system had the data in memory.

    `own_bytes` is the peak of the memory that was not shared with processes of other items, summed over the rank's
    process, its member, and the processes that the rank has started. `shared_bytes` is the memory that can be shared
    with other items: mapped files, above all libraries, and what a spare process had imported. `free_bytes` is the
    memory that was free on the machine before the item, together with what the spare process holds of `shared_bytes`; 0
    if that is not known. `gpu_bytes` is the largest growth of the memory in use on any one GPU.

    If the item made a Keras or PyTorch model, `parameters` is the number of parameters of the largest model, and
    `parameter_bytes` is their size. `batch_size` is the value of the cell's variable with this name; 0 if there is
    none.
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
    read the same data. `name` is the data set as the user wrote it. `where` is the row filter in words, '' for none.
    `version` is a digest of the files as they were when they were opened. Unknown values are '' or 0.
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
    """The rows that a rank reads from one row group. Numbers start at 0; row group -1 stands for the whole file.

    If there are many row groups, `groups` adjacent ones form one piece; `file` and `row_group` are those of the first
    row group.
    """

    file: Count
    row_group: Annotated[int, range(-1, 1 << 63)]
    rows: Count
    groups: Count = 1


class DataPlanned(NamedTuple):
    """What a rank will read in an epoch: `pieces`, in this order. `epoch` counts from 1.

    `names` holds the numbers and names of the files, or only of the first files if there are many. The first `begun`
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
    """A rank's progress in an epoch: the rows, steps and bytes read so far, and the planned rows and steps.

    `epoch` counts from 1. `place` says where the rank is reading, as in `part-3.parquet, row group 2 of 8`. `waited_s`
    is how long the rank's own code has waited for batches in this epoch. `left_out` counts the rows that could not be
    decoded or transformed. Unknown values are None or ''.
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
    left_out: Count = 0
    time: float = 0.0
    rank: int = 0


class CheckpointSaved(NamedTuple):
    """A checkpoint is complete and can be read.

    `folder` is the directory of checkpoints as the user wrote it, and `name` is the checkpoint's name in it. `took_s`
    is the time from the call to the commit; training waited for `blocked_s` of it. `metrics` were saved with the
    checkpoint. `kind` says what wrote it: "keras" is ModelCheckpoint, "tensorflow" is BackupAndRestore; for these two,
    `step` is the epoch. `not_finite` says which weights or which metric are NaN or infinite, '' if none is.
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
    not_finite: str = ""
    time: float = 0.0
    rank: int = 0


class CheckpointFailed(NamedTuple):
    """A checkpoint could not be saved.

    If the save was in the background, the run fails at the next save or at the end of the cell.
    """

    folder: str
    step: int
    reason: str
    time: float = 0.0
    rank: int = 0


class CheckpointDamaged(NamedTuple):
    """A checkpoint was found to be damaged, and was skipped."""

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


class TracePart(NamedTuple):
    """A piece of the trace that PyTorch's profiler has recorded on the rank: part of a compressed JSON file.

    `number` counts the pieces from 0, and `last` ends the trace. It shows `steps` steps of an optimizer. If there is no
    trace, `problem` says why. `data` goes into the run's folder, not into its record.
    """

    data: bytes
    number: Count = 0
    last: bool = False
    steps: Count = 0
    problem: str = ""
    time: float = 0.0
    rank: int = 0


class AtLine(NamedTuple):
    """The line of the cell that the rank is running, sent about once a second if it changes.

    `calls` are the calls that are in progress, innermost first: those of the cell, and those that the line has made.
    `iterations` has the completed iterations of the cell's only loop, and their number, if they are known.
    """

    line: Count
    calls: tuple[str, ...]
    iterations: tuple[int, int] | None = None
    time: float = 0.0
    rank: int = 0


class UserCall(NamedTuple):
    """A function of the user's code, and its current line in the cell; 0 if it is not in the cell.

    `function` is '' for the top level of the cell or of a module.
    """

    function: str
    line: Count


class SpentAt(NamedTuple):
    """How many seconds a rank has spent in a phase at one place of the user's code.

    `what` says what the rank has called, such as `DataLoader` or `allreduce`. `calls` are the calls of the user's code
    that led there, innermost first.
    """

    phase: str
    what: str
    calls: tuple[UserCall, ...]
    seconds: float


class TimeSpent(NamedTuple):
    """Where the time of a rank's main thread has gone since the cell began, from `looks` looks at its stack.

    `phases` has the seconds of each phase, which add up to `elapsed_s`: the PHASES, and those that the user has named.
    `places` are the places with most of the time. The other times do not include the phase "start": `cpu_s` is the CPU
    time of the main thread, and `process_cpu_s` that of all threads of its process. During `queued_s`, the main thread
    was ready to run, but no core was free; for the phase "start", this is `start_queued_s`. During `awake_s`, it was
    neither asleep nor waiting for other ranks. Values that are not known are 0.
    """

    looks: Count
    elapsed_s: float
    phases: Mapping[str, float]
    places: tuple[SpentAt, ...] = ()
    cpu_s: float = 0.0
    process_cpu_s: float = 0.0
    queued_s: float = 0.0
    start_queued_s: float = 0.0
    awake_s: float = 0.0
    time: float = 0.0
    rank: int = 0
