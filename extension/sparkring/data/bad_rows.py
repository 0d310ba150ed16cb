"""Finds the rows that cannot be decoded or transformed, names them, and puts other rows in their places.

Arrays and transforms are made for many rows at a time. If that raises an error, each row is tried alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from sparkring.errors import DataError

OnError = Literal["raise", "skip"]
ON_ERROR: tuple[OnError, ...] = get_args(OnError)
NAMED = 10  # how many rows that were left out are named
_REASON_CHARACTERS = 300


class BadRows(NamedTuple):
    """What to do with a bad row: `place(row)` says where it is stored; with `skips`, it is noted in `left_out`.

    `may_skip` says whether the user can choose to skip such rows.
    """

    place: Callable[[int], str]
    skips: bool
    left_out: list[str]
    may_skip: bool

    def good(self, count: int, work: Callable[[int], object], error: Exception, begin: int = 0) -> list[int]:
        """Return which of `count` rows `work(row)` accepts. Raise `error` if it is not the error of single rows.

        The rows are numbered from `begin` for place(). Raise DataError for the first bad row, unless bad rows are
        skipped.
        """
        good = []
        for row in range(count):
            try:
                work(row)
            except Exception as problem:  # the user's transform can raise any exception
                shown = error if isinstance(error, DataError) and not self.skips else problem  # it counts all bad rows
                reason = " ".join(str(shown).split())[:_REASON_CHARACTERS]
                if not isinstance(problem, DataError):
                    reason = f"{type(problem).__name__}: {reason}"
                if not self.skips:
                    # With the traceback of the error, the user sees the line of the transform.
                    named = self.error(f"{self.place(begin + row)}: {reason}")
                    raise named.with_traceback(problem.__traceback__) from None
                self.left_out.append(f"{self.place(begin + row)}: {reason}")
            else:
                good.append(row)
        if len(good) == count:
            raise error
        return good

    def error(self, note: str) -> DataError:
        """Return the error for a bad row. `note` says where the row is, and what is wrong with it."""
        advice = ', exclude it with where=, or skip such rows with on_error="skip"' if self.may_skip else ""
        return DataError(f"{note.rstrip('.')}. Correct the row or the transform{advice}.")


def instead(good: Sequence[int], count: int) -> Any:
    """Return `count` rows, as indices: each good row in its place, and the good row before it in that of a bad one."""
    indices = np.full(count, -1)
    indices[list(good)] = good
    return np.maximum(np.maximum.accumulate(indices), good[0])


def too_many(left_out: Sequence[str], most: int, name: str) -> DataError:
    """Return the error for more bad rows than `most`."""
    return DataError(
        f"this rank skipped {len(left_out):,} rows of {name} in this epoch, more than most={most:,} allows. The first: "
        f"{left_out[0].rstrip('.')}. Correct the data or the transform, or raise most=."
    )
