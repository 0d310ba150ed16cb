"""Plain data that says what a run should do, and how it ended. Specifications may be invalid; prepare() checks them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sparkring.capture.scripts import Script
from sparkring.engine.run.options import Options
from sparkring.errors import LaunchError
from sparkring.history.events import Ending

if TYPE_CHECKING:
    from sparkring.engine.run.warm_gang import WarmGang


class Cell(NamedTuple):
    """A cell of a notebook. `scripts` are the scripts that the cell's %run lines name.

    If the path of a script depends on the item, `scripts_of` returns all scripts for an item with the given values.

    `namespace` contains the notebook's variables. The variables named in --pull are copied into it from rank 0. If the
    cell is `apart`, its namespace is not the notebook's, but has only the variables that are sent or pulled.
    """

    source: str
    namespace: dict[str, Any]
    scripts: Sequence[Script] = ()
    scripts_of: Callable[[Mapping[str, Any]], Sequence[Script]] | None = None
    apart: bool = False


class Call(NamedTuple):
    """A call of a function with these arguments.

    `imports` are modules that the function imports before it runs any code of the user.
    """

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    imports: tuple[str, ...] = ()


class RunSpec(NamedTuple):
    """What to run, on which ranks, and with which options.

    `framework` names the ranks' framework. `title` and `code` are kept in the record; for a call, they default to the
    name and the source of its function. `gang` is the warm gang to run on, and `ranks` are the ranks of this gang to
    use (if empty, all of them). Without a gang, the run has ranks of its own. A `notice` is shown with the run. `bound`
    lists names that the ranks bind before the cell runs, such as the names of an item's values. These names are not
    captured. `frame` is the value of --data, unless --data is the name of a variable.
    """

    work: Cell | Call
    options: Options
    framework: str
    title: str = ""
    code: str | None = None
    gang: WarmGang | None = None
    ranks: tuple[int, ...] = ()
    notice: str = ""
    bound: tuple[str, ...] = ()
    frame: Any = None


def seed_of(seed: int, number: int) -> int:
    """Return the seed of one of many parts: an item, a trial or a micro-batch. It depends only on the two numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4], "big")


class Lost(NamedTuple):
    """A value that has not arrived: why, and how to load what could be saved of it ('' if there was nothing)."""

    problem: str
    kept: str = ""

    def __str__(self) -> str:
        return f"{self.problem}. {self.kept}" if self.kept else self.problem


class Results(NamedTuple):
    """What ranks sent back: the values by rank, the pulled values by name, and which are missing.

    `notices` say what is different in the notebook, for example that a wrapper was left out.
    """

    values: dict[int, Any]
    pulled: dict[str, Any]
    lost: list[Lost]
    notices: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """How one execution of a request ended. The outcome of a run is the outcome of its last execution.

    `ending` can be an ending of a run, "not started" or "called off". "not started" means that the ranks could not be
    started; `error` says why. "called off" means that the execution was ended so that the run can restart; `reason`
    says why.

    `reason` is one line for the record. `rank` is the rank whose failure ended the execution. `results` are what the
    ranks had sent by then. `explanation` is text for the message of the error that the run raises. After a failure,
    this text follows the description of the failure; after a timeout, it is the whole message. `stalled` says that no
    rank had made a step for too long, which another attempt may change.
    """

    ending: Ending | Literal["not started", "called off"]
    reason: str = ""
    rank: int | None = None
    results: Results = field(default_factory=lambda: Results({}, {}, []))
    explanation: str = ""
    error: LaunchError | None = None
    stalled: bool = False
