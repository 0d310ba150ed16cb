"""What the pool tells an iterator that follows the progress of its items, such as the iterator of a search.

Other iterators are only asked for the next item.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sparkring.history.events import Failure, ItemEnding, Metrics, SearchBegan, SearchEnded
from sparkring.runtime.storage import Location


class Place(Protocol):
    """The directory in which a run keeps results for later runs; Kept is one."""

    location: Location

    def key_of_code(self, *more: Any) -> str:
        """Return a key that is the same in a later run if its code and `more` are the same."""

    @property
    def fresh(self) -> bool:
        """Whether nothing from earlier runs is used."""


@runtime_checkable
class Steering(Protocol):
    """An iterator that is told what its items report and how they end, and that may end items early.

    Items are known by their numbers, from 0. All methods are called in the thread of the pool. `names` are the names of
    an item's values. The value of an item that was ended early is the last value of `metric` that it reported. `study`
    is what the user may look at after the run.
    """

    names: tuple[str, ...]
    metric: str
    study: Any

    def __next__(self) -> Any: ...

    def begin(self, folder: Path, place: Place | None) -> SearchBegan:
        """Begin a run whose folder is `folder`, and which keeps its results in `place`; called once, before all else.

        Raises CheckpointError if what an earlier run has kept cannot be read.
        """

    def reported(self, number: int, report: Metrics) -> bool:
        """Take note of what the first rank of an item has reported. Return whether the item is to end now."""

    def problem(self, number: int, metrics: Mapping[str, float]) -> Failure | None:
        """Return why an item that has run to its end counts as failed; None if it does not count as failed."""

    def ended(self, number: int, ending: ItemEnding, metrics: Mapping[str, float]) -> None:
        """Take note of how an item has ended, after its last attempt."""

    def close(self) -> None:
        """End the run: write what is still to be written."""

    def summary(self) -> SearchEnded | None:
        """Return what is recorded of the whole run after its end. This may take a second."""
