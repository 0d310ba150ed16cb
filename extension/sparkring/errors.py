"""The classes of sparkring's errors, in one tree.

    SparkringError
    ├── OptionsError         a magic's line or an argument is invalid
    ├── CaptureError         a name that the cell reads cannot be found or sent to the ranks
    ├── LaunchError          the ranks could not be started
    │   ├── SlotsError       … because Spark has too few task slots
    │   └── MemberLost       … because a member (the process that starts a rank) died or stopped responding
    ├── RunFailed            a rank failed; the message says which rank, where and why
    │   ├── ItemsFailed      items of foreach() failed; the message says how many, and groups them by cause
    │   ├── RunTimeout       the run reached its time limit (also a TimeoutError)
    │   └── ResultError      a value could not be returned
    ├── StillRunning         a background run has not ended within the given time (also a TimeoutError)
    ├── PathError            a path is invalid
    ├── DataError            the data cannot be read or divided
    └── CheckpointError      a checkpoint cannot be written or read
        ├── CheckpointStorageError   … because the storage failed; another attempt may succeed
        └── CheckpointDamagedError   … because its files are missing or do not match their digests

A message says what happened, where, and what to do next. In IPython, these errors are shown without a traceback,
because a traceback would contain only sparkring's own frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkring.history.record import RunRecord


class SparkringError(Exception):
    """The root of sparkring's errors."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows for this error: its class and message, without sparkring's frames."""
        return [f"{type(self).__name__}: {self}"]


class OptionsError(SparkringError, ValueError):
    """A magic's options, or an argument of the Python API, cannot be used as given."""


class CaptureError(SparkringError):
    """A name that the cell reads does not exist, or its value cannot be sent to the ranks.

    `line` is the line number in the cell, or None if it is unknown. The magic is on line 1.
    """

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class LaunchError(SparkringError):
    """The ranks could not be started."""


class SlotsError(LaunchError):
    """Spark has too few task slots to run all ranks at once."""


class MemberLost(LaunchError):
    """A member (the process that starts a rank) died, or could not be reached, before its rank was up."""


class RunFailed(SparkringError):
    """A rank failed and the gang was ended.

    `record` holds everything that is known about the run: the failure, each rank's last lines, metrics. `values` maps
    each rank that had already finished to its value. `brief` is what IPython shows in place of the message, if the
    panel above the error shows the rest.
    """

    def __init__(
        self, message: str, *, record: RunRecord, values: dict[int, Any] | None = None, brief: str = ""
    ) -> None:
        super().__init__(message)
        self.record = record
        self.values = dict(values or {})
        self._brief = brief

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self._brief or self}"]


class ItemsFailed(RunFailed):
    """Items of foreach() failed. `values` maps the number of each finished item to its value."""


class RunTimeout(RunFailed, TimeoutError):
    """The run reached its time limit. The message says what each rank was doing."""


class ResultError(RunFailed):
    """The cell ran, but a rank's value could not be returned. `values` holds the values of the other ranks."""


class StillRunning(SparkringError, TimeoutError):
    """A background run has not ended within the time limit of result(). The run continues."""


class PathError(SparkringError, ValueError):
    """A path cannot be used as it is written, whether or not it exists."""


class DataError(SparkringError):
    """The data cannot be read, or cannot be divided among the ranks as asked."""


class NotFiniteError(SparkringError):
    """A metric is NaN or infinite, and the run was started with --stop-on nan."""


class CheckpointError(SparkringError):
    """A checkpoint cannot be written or read."""


class CheckpointStorageError(CheckpointError):
    """The storage for checkpoints cannot currently be read or written. Another attempt may succeed."""


class CheckpointDamagedError(CheckpointError):
    """Files of a checkpoint are missing, incomplete or changed."""
