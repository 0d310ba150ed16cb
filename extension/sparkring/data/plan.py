"""Computes which rank reads which rows, from the row groups' sizes, the number of ranks, a seed and a position.

In an epoch, all row groups form one sequence. If rows are shuffled, each epoch has a different order of row groups. The
sequence is cut into as many contiguous parts as there are ranks, and each rank reads one part. So every row is read
once, the ranks' numbers of rows differ by at most one, and a row group is read by one rank or by neighbouring ranks.
Within its part, a rank shuffles one window of rows at a time, to limit the memory that it needs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from sparkring.errors import DataError

Remainder = Literal["drop", "pad", "join"]
REMAINDERS: tuple[Remainder, ...] = get_args(Remainder)


class RowRange(NamedTuple):
    """Rows `start` to `stop` (not included) of a row group of a file. Rows that the filter drops are not counted."""

    file: int
    row_group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Leg(NamedTuple):
    """A part of an epoch that `size` ranks have read: each rank has read `rows` rows, in windows of `window` rows."""

    size: int
    rows: int
    window: int


class Position(NamedTuple):
    """How far the ranks have read: the epoch (from 1), its seed, and the legs of the epoch that they have read.

    A position contains only numbers, so it can be saved as JSON. In JSON, tuples become lists, which of() accepts.
    """

    epoch: int = 1
    seed: int = 0
    legs: tuple[Leg, ...] = ()

    @classmethod
    def of(cls, value: Sequence[Any]) -> Position:
        """Return the position that `value` (loaded from JSON) describes. Raise DataError if it is not a position."""
        try:
            epoch, seed, legs = value
            return cls(int(epoch), int(seed), tuple(Leg(*map(int, leg)) for leg in legs))
        except (TypeError, ValueError):
            raise DataError(f"{value!r} is not a position in a data set: use one from shards.position().") from None


class Shard(NamedTuple):
    """What one rank reads in an epoch, or in the rest of an epoch: `steps` batches of rows from `ranges`.

    `rows` is the number of rows in `ranges`. Within each window, the rows are read in the order of shuffled(); the
    first `read` rows have already been read. With the remainder "drop", the last rows may be left out. With "pad", the
    rows in `pad` fill the last batch.
    """

    ranges: tuple[RowRange, ...]
    rows: int
    steps: int
    pad: tuple[RowRange, ...] = ()
    read: int = 0


def seat(rank: int | None, size: int | None) -> tuple[int, int] | None:
    """Return (rank, size), or None if neither is given. Raise DataError if one is missing or out of range."""
    if rank is None and size is None:
        return None
    whole = isinstance(rank, int | np.integer) and isinstance(size, int | np.integer)
    if rank is None or size is None or not whole or not 0 <= rank < size:
        raise DataError(f"rank={rank!r}, size={size!r}: give both, with rank from 0 to size - 1, or neither.")
    return rank, size


def plan(
    counts: Sequence[Sequence[int]],
    size: int,
    batch_size: int,
    *,
    position: Position | None = None,
    remainder: Remainder = "drop",
    window: int = 0,
) -> tuple[Shard, ...]:
    """Return the shard of each of `size` ranks for the epoch, or for the rest of the epoch after `position`.

    `counts[file][row_group]` is the number of rows of a row group. With a `window` of 0, nothing is shuffled: files and
    rows keep their order.

    `remainder` decides how many steps a rank takes:

    - "drop": all ranks take the same number of steps, which is the number of full batches that the rank with the
      fewest rows has.
    - "pad": all ranks take as many steps as the rank with the most rows needs. If a rank's own rows do not fill
      all its batches, the rank repeats some rows.
    - "join": each rank takes as many steps as its own rows need. Its last batch may be smaller, and some ranks may need
      one more step than others (call `hvd.join()` after the epoch).
    """
    position, read = begun(position or Position(), size, window, batch_size)
    line = remaining(counts, position, window)
    stretches = list(stretch(line, size))
    rows = [sum(row_range.rows for row_range in ranges) for ranges in stretches]
    shards = []
    for ranges, own in zip(stretches, rows, strict=True):
        if remainder == "drop":
            shards.append(Shard(ranges, own, max(0, min(rows) - read) // batch_size, (), read))
        elif remainder == "join":
            shards.append(Shard(ranges, own, -(-max(0, own - read) // batch_size), (), read))
        else:
            steps = -(-max(0, max(rows) - read) // batch_size)
            pad = first_rows(ranges or line, read + steps * batch_size - own)
            shards.append(Shard(ranges, own, steps, pad, read))
    return tuple(shards)


def begun(position: Position, size: int, window: int, batch_size: int) -> tuple[Position, int]:
    """Return the position at which `size` ranks began to read with this window, and how many rows each has read since.

    If the last leg had a different size or window, or if its rows are not whole batches of `batch_size` rows, the
    remaining rows are divided again, so the result is `position` itself and 0 rows.
    """
    legs = position.legs
    if legs and (legs[-1].size, legs[-1].window) == (size, window) and legs[-1].rows % batch_size == 0:
        return position._replace(legs=legs[:-1]), legs[-1].rows
    return position, 0


def even(rows: int, size: int) -> list[int]:
    """Return each rank's number of rows if `rows` rows are divided among `size` ranks."""
    return [rows * (rank + 1) // size - rows * rank // size for rank in range(size)]


def epoch_order(counts: Sequence[Sequence[int]], seed: int, epoch: int) -> list[RowRange]:
    """Return all row groups that have rows, in the shuffled order of this epoch."""
    groups = in_order(counts)
    random.Random(f"{seed}/{epoch}").shuffle(groups)
    return groups


def in_order(counts: Sequence[Sequence[int]]) -> list[RowRange]:
    """Return all row groups that have rows, in the order of the files."""
    return [
        RowRange(file, group, 0, rows)
        for file, groups in enumerate(counts)
        for group, rows in enumerate(groups)
        if rows
    ]


def remaining(counts: Sequence[Sequence[int]], position: Position, window: int) -> list[RowRange]:
    """Return the rows of the epoch that no rank has read at `position`, as one sequence of ranges.

    In each leg, the rows that the earlier legs have left are cut into stretches, one for each rank. A rank
    may have read only a part of its stretch.
    """
    # The first leg determines the order of the row groups, because a later leg may have switched shuffling on or off.
    first = position.legs[0].window if position.legs else window
    line = epoch_order(counts, position.seed, position.epoch) if first else in_order(counts)
    for number, leg in enumerate(position.legs):
        left: list[RowRange] = []
        for rank, ranges in enumerate(stretch(line, leg.size)):
            left += _after(ranges, leg, (position.seed, position.epoch, number, rank))
        line = left
    return line


def stretch(line: Sequence[RowRange], size: int) -> Iterator[tuple[RowRange, ...]]:
    """Cut a sequence of rows into `size` stretches, whose numbers of rows differ by one at most."""
    rest = iter(line)
    here = next(rest, None)
    for wanted in even(sum(row_range.rows for row_range in line), size):
        ranges: list[RowRange] = []
        while wanted and here is not None:
            taken = min(wanted, here.rows)
            ranges.append(here._replace(stop=here.start + taken))
            wanted -= taken
            here = here._replace(start=here.start + taken) if taken < here.rows else next(rest, None)
        yield tuple(ranges)


def cut(line: Sequence[RowRange], begin: int, end: int) -> list[RowRange]:
    """Return rows `begin` to `end` (not included) of a sequence of rows, counted from 0."""
    ranges = []
    for row_range in line:
        start, stop = max(row_range.start, row_range.start + begin), min(row_range.stop, row_range.start + end)
        if start < stop:
            ranges.append(row_range._replace(start=start, stop=stop))
        begin, end = begin - row_range.rows, end - row_range.rows
    return ranges


def first_rows(ranges: Sequence[RowRange], rows: int) -> tuple[RowRange, ...]:
    """Return the first `rows` rows of `ranges`. If `ranges` has fewer rows, they are repeated."""
    result: list[RowRange] = []
    for row_range in itertools.cycle(ranges):
        if rows <= 0:
            break
        result.append(row_range._replace(stop=min(row_range.stop, row_range.start + rows)))
        rows -= result[-1].rows
    return tuple(result)


def shuffled(rows: int, window: int, key: tuple[int, ...], number: int) -> Any:
    """Return the order in which the `rows` rows of window `number` are read, as an int64 array of their indices.

    The order depends on `key`, which is (seed, epoch, leg, rank). With a `window` of 0, the rows keep their order.
    """
    if not window:
        return np.arange(rows)
    return np.random.default_rng([*key, number]).permutation(rows)


def _after(ranges: Sequence[RowRange], leg: Leg, key: tuple[int, ...]) -> list[RowRange]:
    """Return the rows that a rank has not read in a leg. `ranges` is the rank's stretch in this leg."""
    rows = sum(row_range.rows for row_range in ranges)
    if leg.rows >= rows:
        return []
    if not leg.window:
        return cut(ranges, leg.rows, rows)
    number, inside = divmod(leg.rows, leg.window)
    begin = number * leg.window
    length = min(leg.window, rows - begin)
    unread = np.sort(shuffled(length, leg.window, key, number)[inside:]) + begin
    return [*_rows_at(ranges, unread), *cut(ranges, begin + length, rows)]


def _rows_at(ranges: Sequence[RowRange], places: Any) -> list[RowRange]:
    """Return the rows of `ranges` at `places` (sorted, counted from 0). Adjacent rows form one range."""
    runs: list[RowRange] = []
    begin = 0
    for row_range in ranges:
        low, high = np.searchsorted(places, [begin, begin + row_range.rows])
        inside = places[low:high] - begin + row_range.start
        for run in np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1):
            if len(run):
                runs.append(row_range._replace(start=int(run[0]), stop=int(run[-1]) + 1))
        begin += row_range.rows
    return runs
