"""The interface of an observer, which follows a run: the saved run, the view, a tracker, a file for other programs."""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.history.events import Event
from sparkring.history.record import RunRecord


class Observer:
    """Follows one run. The recorder of the run calls these methods, one at a time, but in different threads.

    If a method raises an error, the recorder drops the observer: the run continues, and a notice names the observer. A
    slow method delays the run.
    """

    def started(self, record: RunRecord) -> None:
        """The run has begun. `record` says which run it is; there are no ranks yet."""

    def seen(self, events: Sequence[Event], record: RunRecord) -> None:
        """These events have happened; `record` is the run after them. RunStarted is the first, RunFinished the last.

        While nothing happens, this is called without events from time to time.
        """

    def ended(self, record: RunRecord) -> None:
        """The run is over. This is the last call, even if the observer has been dropped before."""

    def dropped(self, error: Exception) -> str:
        """Return the notice that says what is missing from now on, because the observer has raised `error`."""
        name = type(self).__qualname__
        return f"the run continues, but {name} no longer follows it: {type(error).__name__}: {error}"
