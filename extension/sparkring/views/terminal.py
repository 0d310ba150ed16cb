"""A run as plain text, line by line, in a terminal or a script's output."""

from __future__ import annotations

from typing import TextIO

from sparkring.record import RunRecord
from sparkring.views import lines, summary


class TerminalView:
    """Prints lines as they come."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines = 0

    def refresh(self, record: RunRecord) -> None:
        """Print what is new."""
        new = record.recent_count - self._lines
        self._lines = record.recent_count
        for line in lines.visible(record.recent[-new:] if new else (), record.logs):
            self._stream.write(f"[{line.rank}] {lines.plain(line.text)}\n")
        self._stream.flush()

    def close(self, record: RunRecord) -> None:
        """Print how it ended."""
        self.refresh(record)
        self._stream.write(f"sparkring: {summary.outcome(record)}\n")
