"""The interface of a view of a run: views implement it, and the engine calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from sparkring.history.record import RunRecord


class Controls(NamedTuple):
    """What the user can do with a run from its view. Any thread may call these functions.

    stop: ends the run.
    answer: gives `text` as the answer to request `number` of the rank: `answer(rank, number, text)`. None if the view
    does not answer what ranks ask.
    """

    stop: Callable[[], None]
    answer: Callable[[int, int, str], None] | None = None


class View(Protocol):
    """Shows one run: its progress while it runs, and then how it ended."""

    def refresh(self, record: RunRecord) -> None:
        """Show the run as it is now. This is called often; the view itself limits how often it draws."""

    def close(self, record: RunRecord) -> None:
        """Show the run as it ended."""

    def again(self, record: RunRecord) -> None:
        """Show the run in the current cell, too, because the user has asked for this."""
