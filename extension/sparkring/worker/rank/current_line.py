"""Tells the driver about once a second which line of the cell this rank is running, and what the line has called.

The thread that receives messages looks at the main thread's frames. This takes some microseconds, and slows nothing
else down, as tracing would.
"""

from __future__ import annotations

import sys
import time

from sparkring.history import stacks
from sparkring.runtime import loops, report
from sparkring.wire.messages import AtLine

EVERY_S = 1.0
MOST_CALLS = 20  # the innermost calls that are sent
MOST_RANKS = 32  # the page shows lines for no more ranks than this


class LineWatch:
    """Remembers what was sent last, and when to look again."""

    def __init__(self) -> None:
        self._due = 0.0
        self._sent: AtLine | None = None

    def look(self, main_thread: int, cell: str) -> None:
        """If it is time, send the line of the file `cell` that the main thread is running, unless nothing has changed.

        While the main thread is not in this file, nothing is sent.
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + EVERY_S
        line, calls = 0, list[tuple[str, int, str]]()
        frame = sys._current_frames().get(main_thread)
        iterations = loops.under_way(frame)
        while frame is not None:
            code = frame.f_code
            in_cell = code.co_filename == cell
            if in_cell or not line:
                calls.append((code.co_filename, frame.f_lineno, code.co_name))
            if in_cell and not line:
                line = frame.f_lineno
            frame = frame.f_back
        at = AtLine(line, tuple(stacks.place(*call) for call in calls[:MOST_CALLS]), iterations)
        if line and at != self._sent:
            self._sent = at
            report.tell(at)
