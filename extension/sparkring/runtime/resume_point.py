"""What the driver tells the ranks about checkpoints in a run with --checkpoint-dir.

Members import this module at start-up: see wire/messages.py for why annotations are not strings here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Here(NamedTuple):
    """This attempt's directory of checkpoints, and the checkpoint that it continues from.

    `directory` is as the user wrote it. `stamp` is when the attempt began (ms since 1970, on the driver's clock); a
    larger stamp means that a checkpoint is newer. `resume` is the name of the checkpoint that all ranks continue from,
    '' for none; `commit` is its commit.json, if the driver could read it. `there` has the names of the checkpoints that
    the driver has seen in the directory. `lineage` is an id that all checkpoints of one training share, from its first
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
    """What the driver has told this process; without a --checkpoint-dir, `directory` is ''."""
    return _current


def enter(found: Here) -> None:
    """Make `found` what here() returns; called before each request."""
    global _current
    _current = found
