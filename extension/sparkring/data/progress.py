"""What a rank tells the notebook of its reading: what data, and how far it is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from sparkring import report
from sparkring.events import DataKind

TELL_EVERY_S = 0.2

_numbers = itertools.count()


class Progress:
    """One reader of this rank. What is told often goes home a few times a second at most; the end of an epoch always."""

    def __init__(
        self,
        *,
        name: str,
        kind: DataKind,
        columns: Sequence[str] = (),
        where: str = "",
        version: str = "",
        files: int = 0,
        row_groups: int = 0,
        rows: int = 0,
        size_bytes: int = 0,
        batch_size: int = 0,
    ) -> None:
        self._reader = next(_numbers)
        self._due = 0.0
        self.begin(0)
        report.tell(
            "data",
            {
                "reader": self._reader,
                "name": name,
                "data_kind": kind,  # a frame has a kind of its own
                "columns": list(columns),
                "where": where,
                "version": version,
                "files": files,
                "row_groups": row_groups,
                "rows": rows,
                "size_bytes": size_bytes,
                "batch_size": batch_size,
            },
        )

    def begin(self, epoch: int, rows: int | None = None, steps: int | None = None) -> None:
        """An epoch begins (they count from 1), of so many rows and batches for this rank as far as that is known."""
        self._epoch, self._rows_planned, self._steps_planned = epoch, rows, steps
        self._rows = self._steps = self._size_bytes = 0
        self._waited_s, self._began, self._place = 0.0, time.monotonic(), ""

    def batch(self, rows: int, size_bytes: int, waited_s: float = 0.0, place: str = "") -> None:
        """One batch more, for which the rank's own code has waited so long; `place` is where it was read."""
        self._rows += rows
        self._steps += 1
        self._size_bytes += size_bytes
        self._waited_s += waited_s
        self._place = place or self._place
        now = time.monotonic()
        if now >= self._due:
            self._due = now + TELL_EVERY_S
            self._tell(now, done=False)

    def end(self) -> None:
        """The epoch is over for this rank."""
        self._tell(time.monotonic(), done=True)

    def _tell(self, now: float, *, done: bool) -> None:
        report.tell(
            "read",
            {
                "reader": self._reader,
                "epoch": self._epoch,
                "rows": self._rows,
                "steps": self._steps,
                "size_bytes": self._size_bytes,
                "rows_planned": self._rows_planned,
                "steps_planned": self._steps_planned,
                "waited_s": round(self._waited_s, 3),
                "elapsed_s": round(now - self._began, 3),
                "place": self._place,
                "done": done,
            },
        )
