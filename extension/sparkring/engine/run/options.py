"""The options of a run and of a warm gang as plain data, and the rules for combining them."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from sparkring.engine.run.option_types import (
    assignment,
    count,
    flag_of,
    minutes,
    number_of_ranks,
    option,
    seconds,
    variables,
)
from sparkring.errors import OptionsError
from sparkring.frameworks import FRAMEWORKS
from sparkring.runtime.going import MOST_GRACE_S

if TYPE_CHECKING:
    from sparkring.launchers.base import Place

Logs = Literal["all", "rank0", "callbacks"]
Trace = Literal["", "torch"]
StopOn = Literal["", "nan"]
RESTARTS = 3  # the default for a run with checkpoints
# The frameworks on whose ranks a function can run.
OF_FUNCTIONS = tuple(name for name, framework in FRAMEWORKS.items() if not framework.in_task)


class _Placed:
    """Options that say where ranks run. If `place_name` is '', they run in the place that `np` means."""

    np: int
    place_name: str

    @property
    def place(self) -> Place:
        """Where the ranks run."""
        from sparkring.launchers import place_of

        return place_of(self.np, self.place_name)


@dataclass(frozen=True)
class SharedOptions(_Placed):
    """The options that runs of cells, of independent items and of streams have in common.

    If `np` is negative, ranks are processes on this machine; if it is positive, they are Spark tasks.
    """

    np: int = -1
    push: tuple[str, ...] = option(
        (), "notebook variables to send, even if the cell does not name them", "NAME,…", variables
    )
    env: tuple[tuple[str, str], ...] = option(
        (), "an environment variable for the ranks; may be repeated", "K=V", assignment
    )
    env_pack: bool = option(
        False, "send the notebook's installed packages to Spark's executors, as an archive; the ranks use them"
    )
    autolog: bool = option(True, "do not automatically report the metrics of Keras' fit()")
    name: str = option("", "the name of the run in %runs", "NAME")
    quiet: bool = option(False, "show only errors")
    notify: bool = option(False, "let the browser show a notification if the run ends while you look elsewhere")
    dry_run: bool = option(False, "show what would be sent to the ranks, and start nothing")
    background: bool = False
    checkpoint_dir: str = ""
    fresh: bool = False
    place_name: str = ""


@dataclass(frozen=True)
class Options(SharedOptions):
    """How to run a cell on abs(np) ranks.

    `data` is an expression for a DataFrame; each rank is given a partition, and `np` 0 means a rank for each partition.
    """

    np: int = option(
        -1,
        "-2: two processes on this machine; 2: two Spark tasks; default: the warm gang, or -1 without a gang",
        "NP",
        number_of_ranks,
    )
    timeout_s: float | None = option(
        None, "end the run after S seconds, and say which line each rank was running", "S", seconds, least=0
    )
    step_timeout_s: float | None = option(
        None,
        "end the ranks if none of them has made a step for S seconds, counted from the first one that log(), Keras' "
        "fit() or the cell's loop shows; a run that can restart then restarts",
        "S",
        seconds,
        least=0,
    )
    pull: tuple[str, ...] = option((), "variables of rank 0 to copy into the notebook", "NAME,…", variables)
    gpus: int | None = option(None, "number of GPUs for each rank; 0 hides all GPUs", "K", count, least=0)
    logs: Logs = option(  # noqa: RUF009 - it returns a field
        "all",
        "what to show: the output of all ranks, the output of rank 0, or only messages from callbacks",
        choices=get_args(Logs),
    )
    stall_after_s: float = option(
        30.0,
        "if ranks are on different lines and have been silent for S seconds (default: 30), say where each rank is",
        "S",
        seconds,
    )
    stop_on: StopOn = option(  # noqa: RUF009 - it returns a field
        "",
        "end the run, without a restart, at the step where a rank reports a metric that is NaN or infinite",
        choices=("nan",),
    )
    checkpoint_dir: str = option(
        "",
        "the directory for checkpoints() (dbfs: or any URL); the run continues from the last checkpoint there",
        "PATH",
    )
    max_restarts: int = option(
        0,
        "restart all ranks, at most K times, if a rank is lost; default: 3 with --checkpoint-dir, otherwise 0",
        "K",
        count,
        least=0,
    )
    grace_s: float = option(
        30.0,
        "after SIGTERM, let ranks whose code saves checkpoints go on for up to S seconds (default: 30) and save",
        "S",
        seconds,
    )
    min_np: int = option(
        0,
        "if Spark has lost slots, continue with at least K ranks, and with all ranks once the slots are back",
        "K",
        count,
        least=1,
    )
    fresh: bool = option(False, "start from the beginning; existing checkpoints are kept")
    resume: bool = option(False, "continue from a checkpoint even if the cell or what it uses has changed")
    timeline: bool = option(
        False, "record how Horovod spends its time, and which ranks the others wait for; saved with the run"
    )
    independent: bool = option(
        False, "each rank is meant to train a model of its own: do not say that ranks exchange nothing, or differ"
    )
    profile: bool = option(True, "do not find out where the ranks' time goes, and which rank the others wait for")
    trace: Trace = option(  # noqa: RUF009 - it returns a field
        "",
        "record a few steps of every rank with PyTorch's profiler, as one trace for ui.perfetto.dev",
        choices=("torch",),
    )
    pm: bool = option(
        False, "if a rank raises an exception, open Python's debugger there, as %debug does; the other ranks wait"
    )
    background: bool = option(
        False, "return a BackgroundRun at once, so that the notebook is free; the run does not use the warm gang"
    )
    data: str = ""

    @property
    def size(self) -> int:
        """The number of ranks asked for; 0 means every slot."""
        return abs(self.np)

    @property
    def survives(self) -> bool:
        """Whether the run saves checkpoints or can restart, and therefore needs its own ranks."""
        return bool(self.checkpoint_dir or self.max_restarts)


def restarts(asked: int | None, checkpoint_dir: str | None) -> int:
    """Return how often a run may restart. If `asked` is None, a run with checkpoints may restart RESTARTS times."""
    return asked if asked is not None else RESTARTS if checkpoint_dir else 0


def checked(who: str, asked: Options, *, horovod: bool) -> Options:
    """Return the options `asked`. Raise OptionsError if one is invalid, or if two of them exclude each other.

    `horovod` says whether the run starts ranks with Horovod. Only such a run can record a timeline.
    """
    check_least(who, asked)
    if asked.timeline and not horovod:
        raise OptionsError(f"{who}: --timeline is for Horovod only and needs new ranks: use %%horovod --timeline.")
    if (asked.fresh or asked.resume) and not asked.checkpoint_dir:
        raise OptionsError(f"{who}: --{'fresh' if asked.fresh else 'resume'} needs a --checkpoint-dir.")
    if asked.background and asked.dry_run:
        raise OptionsError(f"{who}: --dry-run starts nothing, but --background starts a run: choose one.")
    if asked.fresh and asked.resume:
        raise OptionsError(f"{who}: --fresh starts over, but --resume continues: choose one.")
    if asked.stop_on not in get_args(StopOn):
        raise OptionsError(f'{who}: stop_on={asked.stop_on!r}: expected "nan", or "" to go on after NaN.')
    if asked.stop_on and not asked.autolog:
        raise OptionsError(f"{who}: --stop-on nan needs the metrics that --autolog turns off: leave out one of them.")
    if not 0 < asked.grace_s <= MOST_GRACE_S:
        raise OptionsError(f"{who}: --grace {asked.grace_s:g}: expected more than 0 s, and at most {MOST_GRACE_S:g} s.")
    if asked.min_np and not asked.max_restarts:
        raise OptionsError(
            f"{who}: --min-np {asked.min_np} is for restarts: add --max-restarts 3, or --checkpoint-dir."
        )
    if asked.min_np and asked.place.here:
        raise OptionsError(
            f"{who}: --min-np {asked.min_np} is for Spark, which may lose slots: the ranks of -n {asked.np} are on "
            "this machine, and all of them are restarted. Leave --min-np out."
        )
    if asked.min_np > asked.size > 0:
        raise OptionsError(f"{who}: --min-np {asked.min_np} is more than the {asked.size} ranks of -n {asked.np}.")
    if asked.min_np and asked.data:
        raise OptionsError(f"{who}: --min-np and --data cannot be combined: each partition needs a rank.")
    return asked


def check_framework(who: str, framework: str) -> None:
    """Raise OptionsError if a function cannot run on ranks of this framework."""
    if framework not in OF_FUNCTIONS:
        raise OptionsError(f"{who}(framework={framework!r}): expected one of {', '.join(OF_FUNCTIONS)}.")


def whole(np: Any) -> int:
    """Return the number `np`. Raise TypeError if it is not a whole number."""
    try:
        return operator.index(np)
    except TypeError:
        raise TypeError(f"np must be a whole number, not {type(np).__name__}") from None


def check_least(who: str, options: SharedOptions) -> None:
    """Raise OptionsError if the number of an option is less than the smallest value that the option may have."""
    for one in fields(options):
        value, least = getattr(options, one.name), one.metadata.get("least")
        if least is not None and value not in (None, one.default) and value < least:
            raise OptionsError(f"{who}: {flag_of(one.name)} {value:g} is too small: it must be at least {least}.")


@dataclass(frozen=True)
class GangOptions(_Placed):
    """The options of a warm gang. `np` means the same as in Options."""

    np: int = option(0, "-4: processes on this machine; 4: Spark tasks", "NP", number_of_ranks)
    framework: str = option(
        "horovod",
        "the framework for %%ranks cells (default: horovod); other magics use their own",
        choices=OF_FUNCTIONS,
    )
    idle_s: float = option(3600.0, "stop after MIN minutes without a cell (default: 60)", "MIN", minutes)
    env: tuple[tuple[str, str], ...] = option((), "an environment variable for the ranks", "K=V", assignment)
    gpus: int | None = option(None, "number of GPUs for each rank; 0 hides all GPUs", "K", count)
    env_pack: bool = option(
        False, "send the notebook's installed packages to Spark's executors, as an archive; the ranks use them"
    )
    place_name: str = ""
