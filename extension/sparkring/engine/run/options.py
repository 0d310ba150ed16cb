"""The options of a run and of a warm gang as plain data, and the rules for combining them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparkring.errors import OptionsError
from sparkring.frameworks import FRAMEWORKS

if TYPE_CHECKING:
    from sparkring.launchers.base import Place

Logs = Literal["all", "rank0", "callbacks"]
LOGS: tuple[Logs, ...] = ("all", "rank0", "callbacks")
RESTARTS = 3  # the default for a run with checkpoints


@dataclass(frozen=True)
class SharedOptions:
    """The options that runs of cells, of independent items and of streams have in common."""

    np: int = -1
    push: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    autolog: bool = True
    name: str = ""
    quiet: bool = False
    notify: bool = False
    background: bool = False
    checkpoint_dir: str = ""
    fresh: bool = False
    place_name: str = ""  # '' means the place that `np` means

    @property
    def place(self) -> Place:
        """Where the ranks run."""
        from sparkring.launchers import place_of

        return place_of(self.np, self.place_name)


@dataclass(frozen=True)
class Options(SharedOptions):
    """How to run a cell.

    `np`: if it is negative, the ranks are -np processes on this machine; if it is positive, they are np Spark tasks.
    `gpus`: the number of GPUs for each rank; 0 hides all GPUs, None means the launcher's default.
    `data`: an expression for a DataFrame; each rank is given a partition, and `np` 0 means a rank for each partition.
    `checkpoint_dir`: the directory of checkpoints. The run continues from the last checkpoint, unless `fresh` is set.
    With `resume`, the run continues even if the cell or what it uses has changed.
    `max_restarts`: how often all ranks may be restarted after a rank is lost.
    `min_np`: the minimum number of ranks for a restart; 0 means as many as at the first start.
    `background`: the notebook does not wait for the run.
    `notify`: the browser shows a notification if the run ends while the user looks at something else.
    `independent`: each rank is meant to train alone, so the run does not say that the ranks have exchanged nothing.
    `timeline`: Horovod records a timeline. A recording can only begin when Horovod starts, so the run needs new ranks.
    """

    timeout_s: float | None = None
    pull: tuple[str, ...] = ()
    gpus: int | None = None
    logs: Logs = "all"
    dry_run: bool = False
    stall_s: float = 30.0
    data: str = ""
    max_restarts: int = 0
    min_np: int = 0
    resume: bool = False
    timeline: bool = False
    independent: bool = False

    @property
    def size(self) -> int:
        """The number of ranks asked for; 0 means every slot."""
        return abs(self.np)

    @property
    def survives(self) -> bool:
        """Whether the run saves checkpoints or can restart, and therefore needs its own ranks."""
        return bool(self.checkpoint_dir or self.max_restarts)


def restarts(asked: int | None, checkpoint_dir: str) -> int:
    """Return how often a run may restart. If `asked` is None, a run with checkpoints may restart RESTARTS times."""
    return asked if asked is not None else RESTARTS if checkpoint_dir else 0


def checked(who: str, asked: Options, *, horovod: bool) -> Options:
    """Return the options `asked`. Raise OptionsError if one is invalid, or if two of them exclude each other.

    `horovod` says whether the run starts ranks with Horovod. Only such a run can record a timeline.
    """
    check_least(who, 0, timeout=asked.timeout_s, gpus=asked.gpus, max_restarts=asked.max_restarts, min_np=asked.min_np)
    if asked.timeline and not horovod:
        raise OptionsError(f"{who}: --timeline is for Horovod only and needs new ranks: use %%horovod --timeline.")
    if (asked.fresh or asked.resume) and not asked.checkpoint_dir:
        raise OptionsError(f"{who}: --{'fresh' if asked.fresh else 'resume'} needs a --checkpoint-dir.")
    if asked.background and asked.dry_run:
        raise OptionsError(f"{who}: --dry-run starts nothing, but --background starts a run: choose one.")
    if asked.fresh and asked.resume:
        raise OptionsError(f"{who}: --fresh starts over, but --resume continues: choose one.")
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
    known = [name for name, one in FRAMEWORKS.items() if not one.in_task]
    if framework not in known:
        raise OptionsError(f"{who}(framework={framework!r}): expected one of {', '.join(known)}.")


def whole(np: Any) -> int:
    """Return the number `np`. Raise TypeError if it is not a whole number."""
    try:
        return operator.index(np)
    except TypeError:
        raise TypeError(f"np must be a whole number, not {type(np).__name__}") from None


def check_least(who: str, least: int, **given: float | None) -> None:
    """Raise OptionsError if an option's number is less than `least`. The keywords are the names of the options."""
    for name, value in given.items():
        if value is not None and value < least:
            raise OptionsError(
                f"{who}: --{name.replace('_', '-')} {value:g} is too small: it must be at least {least}."
            )


@dataclass(frozen=True)
class GangOptions:
    """The options of a warm gang. `np` means the same as in Options. `framework` is used by %%ranks cells."""

    np: int
    framework: str
    idle_s: float
    env: tuple[tuple[str, str], ...]
    gpus: int | None = None
    place_name: str = ""  # as in SharedOptions

    @property
    def place(self) -> Place:
        """Where the ranks run."""
        from sparkring.launchers import place_of

        return place_of(self.np, self.place_name)
