"""The options of independent items as plain data, and the rules for combining them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkring.engine.run.options import SharedOptions, check_least
from sparkring.errors import OptionsError


@dataclass(frozen=True)
class ForeachOptions(SharedOptions):
    """How to run independent items. Options that are not described here have the same meanings as in Options.

    If `np` is negative, at most -np items run at once, in processes on this machine. If `np` is positive, at most np
    items run at once, in Spark tasks. Each item runs on `np_each` ranks, which `framework` connects. `retries` is how
    often a failed item is tried again; None means once if its process died, and never after an exception. A process
    runs at most `fresh_after` items; None means no limit. Each rank gets `gpus` GPUs; if that is a fraction, items
    share a GPU. The random numbers of an item depend on `seed` and on the item's number. Results are kept in
    `checkpoint_dir`. Items whose results are already there do not run, unless `fresh` is set. With `keep_results`, the
    results that other code has left there count, too. With `plan`, only the first item runs, and is measured.
    """

    np_each: int = 1
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


def checked_foreach(who: str, options: ForeachOptions) -> ForeachOptions:
    """Return the options `options`. Raise OptionsError if one is invalid, or if two of them exclude each other."""
    if options.np == 0:
        raise OptionsError(
            f"{who} needs the number of items that run at once: -n -4 for processes here, -n 4 for Spark tasks."
        )
    check_least(who, 1, np_each=options.np_each, fresh_after=options.fresh_after)
    check_least(who, 0, retries=options.retries, timeout_each=options.timeout_each_s)
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
