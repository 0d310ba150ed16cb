"""The specification of a run and its outcome, as plain data. Nothing has been looked up or checked yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sparkring.capture.scripts import Script
from sparkring.engine.options import Options
from sparkring.errors import LaunchError
from sparkring.history.events import Ending

if TYPE_CHECKING:
    from sparkring.engine.warm_gang import WarmGang


class Cell(NamedTuple):
    """A cell of the notebook whose variables are in `namespace`; `scripts` are those of its %run lines.

    The names that it pulls are put into `namespace`.
    """

    source: str
    namespace: dict[str, Any]
    scripts: Sequence[Script] = ()


class Call(NamedTuple):
    """A call of a function with these arguments."""

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


class RunSpec(NamedTuple):
    """What is to run, on what, and with which options.

    `framework` names the ranks' framework. `title` and `code` are what the record keeps: where they are left out, a
    call has its function's name and source. `gang` is a warm gang to run on, on `ranks` of it (all if none is named);
    without one, the run has ranks of its own. A `notice` is shown with the run. `bound` are names that have values on
    the ranks before the cell runs.
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


class Results(NamedTuple):
    """What ranks sent back: the values by rank, the pulled names, and what could not be unpacked."""

    values: dict[int, Any]
    pulled: dict[str, Any]
    problems: list[str]


@dataclass(frozen=True)
class Outcome:
    """How one execution of a request ended. The outcome of a run is that of its last execution.

    There are two endings besides those of a run: "not started" if the ranks could not be started (`error` says why),
    and "called off" if it was ended to be started again, for `reason`.

    `reason` is one line for the record. `rank` is the one whose failure ended it. `results` are what the ranks had
    sent by then. `explanation` is what an error message says in addition to the record.
    """

    ending: Ending | Literal["not started", "called off"]
    reason: str = ""
    rank: int | None = None
    results: Results = field(default_factory=lambda: Results({}, {}, []))
    explanation: str = ""
    error: LaunchError | None = None
