"""The options of independent items as plain data, and the rules for combining them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkring.engine.run.option_types import count, number_of_gpus, number_of_ranks, option, seconds
from sparkring.engine.run.options import OF_FUNCTIONS, SharedOptions, check_least
from sparkring.errors import OptionsError


@dataclass(frozen=True)
class ForeachOptions(SharedOptions):
    """How to run independent items."""

    np: int = option(
        -1,
        "run at most K items at once: -K in processes on this machine, K in Spark tasks; default: as many on this "
        "machine as its cores (and its GPUs, with --gpus) allow",
        "K",
        number_of_ranks,
    )
    retries: int | None = option(
        None,
        "try a failed item again, at most R times; default: once if its process died, never after an exception",
        "R",
        count,
        least=0,
    )
    timeout_each_s: float | None = option(
        None, "end an item that takes longer than S seconds; the item counts as failed", "S", seconds, least=0
    )
    fail_fast: bool = option(False, "end the run when an item has failed")
    fresh_after: int | None = option(None, "replace a process after N items", "N", count, least=1)
    checkpoint_dir: str = option(
        "", "keep the items' results in PATH (dbfs: or any URL); items with a result there do not run again", "PATH"
    )
    fresh: bool = option(False, "run all items, even those with a result in --checkpoint-dir")
    keep_results: bool = option(
        False, "use the results in --checkpoint-dir even if the code has changed since they were kept"
    )
    np_each: int = option(1, "run each item on R ranks", "R", count, least=1)
    framework: str = option(
        "plain",
        "the framework that connects the ranks of an item",
        choices=tuple(name for name in OF_FUNCTIONS if name != "plain"),
    )
    gpus: float | None = option(
        None,
        "number of GPUs for each rank; with 0.5, two items share a GPU; 0 hides all GPUs",
        "G",
        number_of_gpus,
    )
    seed: int = option(0, "a seed for the items' random numbers; default: 0", "N", count)
    plan: bool = option(False, "run only the first item, and say how many items fit at once")
    background: bool = option(False, "return a BackgroundRun at once, so that the notebook is free")

    @property
    def at_once(self) -> int:
        """How many items may run at once."""
        return abs(self.np)


def checked_foreach(who: str, options: ForeachOptions) -> ForeachOptions:
    """Return the options `options`. Raise OptionsError if one is invalid, or if two of them exclude each other."""
    if options.np == 0:
        raise OptionsError(
            f"{who} needs the number of items that run at once: -n -4 for processes here, -n 4 for Spark tasks."
        )
    check_least(who, options)
    if options.np_each > 1 and options.framework == "plain":
        raise OptionsError(
            f"{who}: --np-each {options.np_each} needs a --framework that connects the ranks of an item."
        )
    if (options.fresh or options.keep_results) and not options.checkpoint_dir:
        raise OptionsError(f"{who}: --{'fresh' if options.fresh else 'keep-results'} needs a --checkpoint-dir.")
    if options.fresh and options.keep_results:
        raise OptionsError(f"{who}: --fresh runs all items, but --keep-results uses their results: choose one.")
    gpus = options.gpus or 0
    if not (math.isfinite(gpus) and gpus >= 0) or (gpus > 1 and gpus != int(gpus)):
        raise OptionsError(f"{who}: --gpus {gpus:g} is neither a number of GPUs nor a fraction of one.")
    if 0 < gpus < 1 and options.np_each > 1:
        raise OptionsError(f"{who}: --gpus {gpus:g} with --np-each: the ranks of an item cannot share a GPU.")
    if 0 < gpus < 1 and not options.place.shares_gpus:
        raise OptionsError(f"{who}: Spark divides its GPUs itself: set spark.task.resource.gpu.amount={gpus:g}.")
    if options.plan and options.background:
        raise OptionsError(f"{who}: --plan runs one item and waits for it: leave --background out.")
    return options
