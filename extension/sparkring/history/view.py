"""The interface of a view of a run: views implement it, and the engine calls it."""

from __future__ import annotations

from typing import Protocol

from sparkring.history.record import RunRecord


class View(Protocol):
    """Shows one run: its progress while it runs, and then how it ended."""

    def refresh(self, record: RunRecord) -> None:
        """Show the run as it is now. This is called often; the view itself limits how often it draws."""

    def close(self, record: RunRecord) -> None:
        """Show the run as it ended."""

    def again(self, record: RunRecord) -> None:
        """Show the run in the current cell, too, because the user has asked for this."""
