"""The information about checkpoints that the driver gives the ranks in a run with --checkpoint-dir.

Members import this module at start-up, so `from __future__ import annotations` would make them start more slowly. The
docstring of wire/messages says why.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Here(NamedTuple):
    """This attempt's directory of checkpoints, and the checkpoint that it continues from.

    directory: the directory, as the user wrote it.
    stamp: when the attempt began (ms since 1970, on the driver's clock). It is part of the names of the attempt's
        checkpoints: of two attempts, the newer one has the larger stamp.
    resume: the name of the checkpoint that all ranks continue from, '' for none.
    lineage: an id that all checkpoints of one training run share, from its first attempt on.
    code, run_id: the cell's code and the run's id.
    there: the names of all checkpoints that the driver has seen in the directory.
    commit: the content of the commit.json of `resume`, if the driver could read it.
    uses: digests of the values and functions that the code uses, by name.
    """

    directory: str = ""
    stamp: int = 0
    resume: str = ""
    lineage: str = ""
    code: str = ""
    run_id: str = ""
    there: Sequence[str] = ()
    commit: dict[str, Any] | None = None
    uses: Mapping[str, str] = {}


_current = Here()


def here() -> Here:
    """Return what the driver has told this process about checkpoints. Without --checkpoint-dir, `directory` is ''."""
    return _current


def enter(point: Here) -> None:
    """Make here() return `point` from now on. A rank calls this before it runs a cell or a function."""
    global _current
    _current = point
