"""Keeps the cells that have run on a warm gang, so that a gang that takes its place can be given the same variables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from sparkring.capture.names import names_read
from sparkring.gangs.execution import Execution, Request

# The values of a cell are not kept if they exceed CELL_BYTES. The oldest cells are dropped if all values together
# exceed ALL_BYTES, or if there are more than MOST cells.
CELL_BYTES, ALL_BYTES, MOST = 16 * 1024**2, 64 * 1024**2, 1_000


class PastCell(NamedTuple):
    """A cell that has run to its end on `ranks`. `request` is None if the values that were sent with
    the cell were too large to keep."""

    source: str
    sent: tuple[str, ...]
    ranks: tuple[int, ...]
    request: Request | None
    size_bytes: int

    @property
    def title(self) -> str:
        return self.source.strip().partition("\n")[0]


class PastCells:
    """The cells that have run on a gang, oldest first."""

    def __init__(self) -> None:
        self._cells: deque[PastCell] = deque()
        self._bytes = 0

    def add(self, execution: Execution) -> None:
        """Keep the cell of an execution that has ended well, with a copy of the values that were sent with it."""
        run, request = execution.request.run, execution.request
        if run.what != "cell":
            return
        size_bytes, kept = sum(memoryview(part).nbytes for part in run.parts), None
        if size_bytes <= CELL_BYTES:
            # The parts are copied, since they share memory with the notebook's arrays, which the notebook may change.
            kept = request._replace(run=run._replace(parts=tuple(map(bytes, run.parts)), pull=()))
        self._cells.append(PastCell(run.source, request.sent, execution.ranks, kept, size_bytes if kept else 0))
        self._bytes += self._cells[-1].size_bytes
        while self._bytes > ALL_BYTES or len(self._cells) > MOST:
            self._bytes -= self._cells.popleft().size_bytes

    def that_define(self, needed: Iterable[str]) -> list[PastCell]:
        """Return the cells to run again, in their order, so that the names in `needed` get values on new ranks.

        These are the cells that have bound these names, and those that have bound what such cells read.
        """
        wanted, found = set(needed), []
        for cell in reversed(self._cells):
            names = names_read(cell.source)
            if wanted & {*names.bound, *cell.sent}:
                found.append(cell)
                wanted |= {*names.required, *names.optional}.difference(cell.sent)
        return found[::-1]
