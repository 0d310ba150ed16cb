"""Reports which data a rank reads, and how far it has read."""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sparkring.runtime import report, world
from sparkring.wire.messages import DataOpened, DataPlanned, DataRead, Piece

TELL_EVERY_S = 0.2
# The largest number of pieces that one rank reports for an epoch, and the largest number for all ranks together.
PIECES, PIECES_OF_ALL = 500, 32_000
FILES_NAMED, NAME_CHARACTERS = 100, 80  # how many files a rank names in a report, and how long a name may be

_numbers = itertools.count()


class Route(NamedTuple):
    """What a rank reads in an epoch, in the order of reading, for the report DataPlanned.

    `named` returns the path of a file by its number. `begun` and `window` are as in DataPlanned. `pieces` is used only
    if this process reports to a notebook.
    """

    pieces: Iterable[Piece]
    named: Callable[[int], str]
    begun: int = 0
    window: int = 0


class ReadProgress:
    """Reports the progress of one reader of this rank: at most a few times a second, and at the end of each epoch."""

    def __init__(self, **data: Any) -> None:
        """Report a new reader. `data` holds the fields of DataOpened except `reader`."""
        self._reader = next(_numbers)
        self._due = 0.0
        self.begin(0)
        report.tell(DataOpened(self._reader, **data))

    def begin(self, epoch: int, rows: int | None = None, steps: int | None = None, route: Route | None = None) -> None:
        """Begin an epoch (counted from 1). `rows` and `steps` are this rank's planned numbers, or None if unknown."""
        if route is not None and report.connected():
            self._tell_plan(epoch, route)
        self._epoch, self._rows_planned, self._steps_planned = epoch, rows, steps
        self._rows = self._steps = self._size_bytes = 0
        self.left_out: list[str] = []  # what the reader has left out in this epoch
        self._waited_s, self._began, self._place = 0.0, time.monotonic(), ""

    def batch(self, rows: int, size_bytes: int, waited_s: float = 0.0, place: str = "", steps: int = 1) -> None:
        """Count `rows` rows as one batch, or as `steps` batches, and report the progress if a report is due.

        `place` says where the last row is stored. `waited_s` is how long the rank's code has waited for the rows.
        """
        self._rows += rows
        self._steps += steps
        self._size_bytes += size_bytes
        self._waited_s += waited_s
        self._place = place or self._place
        now = time.monotonic()
        if now >= self._due:
            self._due = now + TELL_EVERY_S
            self._tell(now, done=False)

    def end(self) -> None:
        self._tell(time.monotonic(), done=True)

    def _tell_plan(self, epoch: int, route: Route) -> None:
        most = max(1, min(PIECES, PIECES_OF_ALL // world.world().size))
        pieces = at_most(most, joined(route.pieces))
        files = list(dict.fromkeys(piece.file for piece in pieces))[: min(FILES_NAMED, most)]
        names = tuple((file, os.path.basename(route.named(file))[:NAME_CHARACTERS]) for file in files)
        report.tell(DataPlanned(self._reader, epoch, tuple(pieces), names, route.begun, route.window))

    def _tell(self, now: float, *, done: bool) -> None:
        counts = self._rows, self._steps, self._size_bytes, self._rows_planned, self._steps_planned
        times = round(self._waited_s, 3), round(now - self._began, 3)
        report.tell(DataRead(self._reader, self._epoch, *counts, *times, self._place, done, len(self.left_out)))


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Merge consecutive pieces if they belong to the same row group."""
    for (file, row_group), same in itertools.groupby(pieces, key=operator.itemgetter(0, 1)):
        yield Piece(file, row_group, sum(piece.rows for piece in same))


def at_most(most: int, pieces: Iterable[Piece]) -> list[Piece]:
    """Return at most `most` pieces. If `pieces` has more, neighbouring pieces are merged."""
    all_pieces = list(pieces)
    length = -(-len(all_pieces) // most)
    if length <= 1:
        return all_pieces
    return [_together(all_pieces[begin : begin + length]) for begin in range(0, len(all_pieces), length)]


def _together(pieces: Sequence[Piece]) -> Piece:
    rows, groups = sum(piece.rows for piece in pieces), sum(piece.groups for piece in pieces)
    return pieces[0]._replace(rows=rows, groups=groups)
