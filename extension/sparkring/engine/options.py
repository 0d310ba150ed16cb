"""The options of a run and of a warm gang as plain data, and the rules for combining them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sparkring.errors import OptionsError

Logs = Literal["all", "rank0", "callbacks"]
LOGS: tuple[Logs, ...] = ("all", "rank0", "callbacks")
RESTARTS = 3  # the default for a run with checkpoints


@dataclass(frozen=True)
class SharedOptions:
    """The options that Options and ForeachOptions have in common."""

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


@dataclass(frozen=True)
class Options(SharedOptions):
    """How to run a cell.

    `np`: if it is negative, the ranks are -np processes on this machine; if it is positive, they are np Spark tasks.
    `gpus`: the number of GPUs for each rank; 0 hides all GPUs, None means the launcher's default.
    `data`: an expression for a DataFrame; each rank is given a partition, and `np` 0 means a rank for each partition.
    `checkpoint_dir`: the directory of checkpoints. The run continues from the last checkpoint, unless `fresh` is set.
    With `resume`, the run continues even if the cell or what it uses has changed.
    `max_restarts`: how often all ranks may be restarted after a rank is lost.
    `least`: the minimum number of ranks for a restart; 0 means as many as at the first start.
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
    least: int = 0
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


@dataclass(frozen=True)
class ForeachOptions(SharedOptions):
    """How to run independent items. Options that are not described here have the same meanings as in Options.

    If `np` is negative, at most -np items run at once, in processes on this machine. If `np` is positive, at most np
    items run at once, in Spark tasks. Each item runs on `each` ranks, which `framework` connects. `retries` is how
    often a failed item is tried again; None means once if its process died, and never after an exception. A process
    runs at most `fresh_after` items; None means no limit. Each rank gets `gpus` GPUs; if that is a fraction, items
    share a GPU. The random numbers of an item depend on `seed` and on the item's number. Results are kept in
    `checkpoint_dir`. Items whose results are already there do not run, unless `fresh` is set. With `keep_results`, the
    results that other code has left there count, too. With `plan`, only the first item runs, and is measured.
    """

    each: int = 1
    framework: str = "plain"
    timeout_each_s: float | None = None
    retries: int | None = None
    fail_fast: bool = False
    fresh_after: int | None = None
    gpus: float | None = None
    seed: int = 0
    plan: bool = False
    keep_results: bool = False

    @property
    def at_once(self) -> int:
        """How many items may run at once."""
        return abs(self.np)


@dataclass(frozen=True)
class StreamOptions(SharedOptions):
    """How to train on a stream. Options that are not described here have the same meanings as in Options.

    A micro-batch begins at most every `trigger_s` seconds; None means as soon as possible. With `available_now`, the
    stream ends when the rows that are available now have been used. The state is saved in
    `checkpoint_dir` after every `save_every` micro-batches, and the newest `keep` checkpoints are kept. `state` are the
    names of the variables that are saved; () means that the ranks choose them. With `sharded`, each rank saves its own
    state. A micro-batch with more than `max_rows` rows is trained in several parts. If `by` names columns, there is a
    state for each key of these columns. With `arrow`, `batch` is an Arrow
    table. If ranks are lost `max_restarts` times in a row before another checkpoint is saved, the run gives up. Random
    numbers depend on `seed` and on the number of the micro-batch.
    """

    background: bool = True
    trigger_s: float | None = None
    available_now: bool = False
    save_every: int = 1
    keep: int = 3
    state: tuple[str, ...] = ()
    sharded: bool = False
    max_rows: int | None = None
    by: tuple[str, ...] = ()
    arrow: bool = False
    max_restarts: int = 0
    resume: bool = False
    seed: int = 0
    stall_s: float = 30.0

    @property
    def of_run(self) -> Options:
        """The options that a supervisor needs for a micro-batch."""
        return Options(
            np=self.np, push=self.push, env=self.env, autolog=self.autolog, quiet=self.quiet, stall_s=self.stall_s
        )


def checked_stream(who: str, found: StreamOptions) -> StreamOptions:
    """Return the options `found`. Raise OptionsError if one is invalid, or if two of them exclude each other."""
    _check_least(who, 1, save_every=found.save_every, keep=found.keep, max_rows=found.max_rows)
    _check_least(who, 0, trigger=found.trigger_s, max_restarts=found.max_restarts)
    if found.fresh and found.resume:
        raise OptionsError(f"{who}: --fresh starts over, but --resume continues: choose one.")
    if found.available_now and found.trigger_s is not None:
        raise OptionsError(f"{who}: --available-now does not wait between micro-batches: leave --trigger out.")
    given = [name for name in ("fresh", "resume", "state", "sharded", "max_restarts") if getattr(found, name)]
    if given and not found.checkpoint_dir:
        raise OptionsError(f"{who}: --{given[0].replace('_', '-')} needs a --checkpoint-dir.")
    return found


def checked_foreach(who: str, found: ForeachOptions) -> ForeachOptions:
    """Return the options `found`. Raise OptionsError if one is invalid, or if two of them exclude each other."""
    if found.np == 0:
        raise OptionsError(
            f"{who} needs the number of items that run at once: -n -4 for processes here, -n 4 for Spark tasks."
        )
    _check_least(who, 1, np_each=found.each, fresh_after=found.fresh_after)
    _check_least(who, 0, retries=found.retries, timeout_each=found.timeout_each_s)
    if found.each > 1 and found.framework == "plain":
        raise OptionsError(f"{who}: --np-each {found.each} needs a --framework that connects the ranks of an item.")
    if (found.fresh or found.keep_results) and not found.checkpoint_dir:
        raise OptionsError(f"{who}: --{'fresh' if found.fresh else 'keep-results'} needs a --checkpoint-dir.")
    if found.fresh and found.keep_results:
        raise OptionsError(f"{who}: --fresh runs all items, but --keep-results uses their results: choose one.")
    gpus = found.gpus or 0
    if not (math.isfinite(gpus) and gpus >= 0) or (gpus > 1 and gpus != int(gpus)):
        raise OptionsError(f"{who}: --gpus {gpus:g} is neither a number of GPUs nor a fraction of one.")
    if 0 < gpus < 1 and found.each > 1:
        raise OptionsError(f"{who}: --gpus {gpus:g} with --np-each: the ranks of an item cannot share a GPU.")
    if 0 < gpus < 1 and found.np > 0:
        raise OptionsError(f"{who}: Spark divides its GPUs itself: set spark.task.resource.gpu.amount={gpus:g}.")
    if found.plan and found.background:
        raise OptionsError(f"{who}: --plan runs one item and waits for it: leave --background out.")
    return found


def restarts(asked: int | None, checkpoint_dir: str) -> int:
    """Return how often a run may restart. If `asked` is None, a run with checkpoints may restart RESTARTS times."""
    return asked if asked is not None else RESTARTS if checkpoint_dir else 0


def checked(who: str, found: Options, *, horovod: bool) -> Options:
    """Return the options `found`. Raise OptionsError if one is invalid, or if two of them exclude each other.

    `horovod` says whether the run starts ranks with Horovod. Only such a run can record a timeline.
    """
    _check_least(who, 0, timeout=found.timeout_s, gpus=found.gpus, max_restarts=found.max_restarts, min_np=found.least)
    if found.timeline and not horovod:
        raise OptionsError(f"{who}: --timeline is for Horovod only and needs new ranks: use %%horovod --timeline.")
    if (found.fresh or found.resume) and not found.checkpoint_dir:
        raise OptionsError(f"{who}: --{'fresh' if found.fresh else 'resume'} needs a --checkpoint-dir.")
    if found.background and found.dry_run:
        raise OptionsError(f"{who}: --dry-run starts nothing, but --background starts a run: choose one.")
    if found.fresh and found.resume:
        raise OptionsError(f"{who}: --fresh starts over, but --resume continues: choose one.")
    if found.least and not found.max_restarts:
        raise OptionsError(f"{who}: --min-np {found.least} is for restarts: add --max-restarts 3, or --checkpoint-dir.")
    if found.least and found.np < 0:
        raise OptionsError(
            f"{who}: --min-np {found.least} is for Spark, which may lose slots: the ranks of -n {found.np} are on this "
            "machine, and all of them are restarted. Leave --min-np out."
        )
    if found.least > found.size > 0:
        raise OptionsError(f"{who}: --min-np {found.least} is more than the {found.size} ranks of -n {found.np}.")
    if found.least and found.data:
        raise OptionsError(f"{who}: --min-np and --data cannot be combined: each partition needs a rank.")
    return found


def _check_least(who: str, least: int, **given: float | None) -> None:
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
