"""Shows the progress of a magic on one line, which is cleared at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO, TypeVar

Line = TypeVar("Line", bound="ProgressLine")

# The progress first appears after QUIET_S seconds, and then changes every PROGRESS_EVERY_S seconds.
QUIET_S, PROGRESS_EVERY_S = 2.0, 0.5


class ProgressLine:
    """A context manager that shows progress on one line. If the block ends quickly, it shows nothing."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._due = clock() + QUIET_S
        self._width = 0

    def __enter__(self: Line) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._write("")

    def say(self, words: str) -> None:
        """Show `words` in place of what the line showed before, unless the line has just changed."""
        if self._clock() >= self._due:
            self._due = self._clock() + PROGRESS_EVERY_S
            self._write(words)

    def _write(self, words: str) -> None:
        self._stream.write(f"\r{words.ljust(self._width)}" + "\r" * (not words))
        self._stream.flush()
        self._width = len(words)
