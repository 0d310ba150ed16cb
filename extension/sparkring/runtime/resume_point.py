"""What the driver tells the ranks about checkpoints in a run with --checkpoint-dir.

Members import this module at start-up, so `from __future__ import annotations` would make them start more slowly. The
docstring of wire/messages says why.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Here(NamedTuple):
    """This attempt's directory of checkpoints, and the checkpoint that it continues from.

    `directory` is as the user wrote it. `stamp` is when the attempt began (ms since 1970, on the driver's clock). The
    stamp becomes part of the names of the attempt's checkpoints. So the names of two checkpoints from different
    attempts show which checkpoint is newer, namely the one with the larger stamp.
    `resume` is the name of the checkpoint that all ranks continue from, '' for none; `commit` is the content of this
    checkpoint's commit.json, if the driver could read it. `there` has the names of all checkpoints that the driver has
    seen in the directory. `lineage` is an id that is the same in all checkpoints of one training, from its first
    attempt on. `code` is the cell's code, `run_id` the run's id.
    """

    directory: str = ""
    stamp: int = 0
    resume: str = ""
    lineage: str = ""
    code: str = ""
    run_id: str = ""
    there: Sequence[str] = ()
    commit: dict[str, Any] | None = None


_current = Here()


def here() -> Here:
    """Return what the driver has told this process about checkpoints. Without --checkpoint-dir, `directory` is ''."""
    return _current


def enter(found: Here) -> None:
    """Make here() return `found` from now on. A rank calls this before it runs a cell or a function."""
    global _current
    _current = found
