"""The interface of iterators that follow the progress of their items, such as the iterator of a search.

Other iterators are only asked for the next item.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sparkring.history.events import Failure, ItemEnding, Metrics, SearchBegan, SearchEnded
from sparkring.runtime.storage import Location


class ResultDirectory(Protocol):
    """The directory in which a run keeps results for later runs. Kept implements this protocol."""

    location: Location

    def key_of_code(self, *more: Any) -> str:
        """Return a key that is the same in a later run if its code and `more` are the same."""

    @property
    def fresh(self) -> bool:
        """Whether the results of earlier runs are ignored."""


@runtime_checkable
class Steering(Protocol):
    """An iterator that receives its items' reports and outcomes, and may end items early.

    Items are identified by their numbers, from 0. All methods are called in the thread of the pool. `names` are the
    names of an item's values. The value of an item that was ended early is the last value of `metric` that it reported.
    The user may examine `study` after the run.
    """

    names: tuple[str, ...]
    metric: str
    study: Any

    def __next__(self) -> Any: ...

    def begin(self, folder: Path, place: ResultDirectory | None) -> SearchBegan:
        """Begin a run in the run folder `folder`. The run keeps results in `place`.

        Called once, before the other methods. Raises CheckpointError if the data kept by an earlier run cannot be read.
        """

    def reported(self, number: int, report: Metrics) -> bool:
        """Take note of what the first rank of an item has reported. Return whether the item should end now."""

    def problem(self, number: int, metrics: Mapping[str, float]) -> Failure | None:
        """Return why an item that has run to completion counts as failed; None if it does not."""

    def ended(self, number: int, ending: ItemEnding, metrics: Mapping[str, float]) -> None:
        """Take note of how an item has ended, after its last attempt."""

    def close(self) -> None:
        """End the run, and write everything that is still unwritten."""

    def summary(self) -> SearchEnded | None:
        """Return an event that sums up the ended run, or None. This may take a second."""
