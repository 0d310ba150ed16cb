"""The options of training on a stream as plain data, and the rules for combining them."""

from __future__ import annotations

from dataclasses import dataclass

from sparkring.engine.run.options import Options, SharedOptions, check_least
from sparkring.errors import OptionsError


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


def checked_stream(who: str, options: StreamOptions) -> StreamOptions:
    """Return the options `options`. Raise OptionsError if one is invalid, or if two of them exclude each other."""
    check_least(who, 1, save_every=options.save_every, keep=options.keep, max_rows=options.max_rows)
    check_least(who, 0, trigger=options.trigger_s, max_restarts=options.max_restarts)
    if options.fresh and options.resume:
        raise OptionsError(f"{who}: --fresh starts over, but --resume continues: choose one.")
    if options.available_now and options.trigger_s is not None:
        raise OptionsError(f"{who}: --available-now does not wait between micro-batches: leave --trigger out.")
    given = [name for name in ("fresh", "resume", "state", "sharded", "max_restarts") if getattr(options, name)]
    if given and not options.checkpoint_dir:
        raise OptionsError(f"{who}: --{given[0].replace('_', '-')} needs a --checkpoint-dir.")
    return options
