"""The options of training on a stream as plain data, and the rules for combining them."""

from __future__ import annotations

from dataclasses import dataclass

from sparkring.engine.run.option_types import count, number_of_ranks, option, seconds, variables
from sparkring.engine.run.options import Options, SharedOptions
from sparkring.errors import OptionsError


@dataclass(frozen=True)
class StreamOptions(SharedOptions):
    """How to train on a stream. If `state` is empty, the ranks choose the variables that are saved."""

    np: int = option(
        -1,
        "which gang to use, if there are two: -NP for the one on this machine, NP for the one on Spark; default: the "
        "gang that was started last",
        "NP",
        number_of_ranks,
    )
    trigger_s: float | None = option(
        None, "begin a micro-batch at most once every S seconds; default: as soon as the ranks are free", "S", seconds
    )
    available_now: bool = option(False, "use the rows that are available now, and then end the stream")
    checkpoint_dir: str = option(
        "",
        "save the state and the position of the stream in PATH (dbfs: or any URL), and continue from there",
        "PATH",
    )
    save_every: int = option(1, "save after every N micro-batches; default: 1", "N", count, least=1)
    keep: int = option(3, "keep the newest K checkpoints; default: 3", "K", count, least=1)
    state: tuple[str, ...] = option((), "the variables that are saved", "NAME,…", variables)
    sharded: bool = option(False, "let every rank save its own state, for example with FSDP")
    max_rows: int | None = option(
        None,
        "train on a micro-batch with more than N rows in several parts: the cell runs for each part",
        "N",
        count,
        least=1,
    )
    by: tuple[str, ...] = option(
        (),
        "keep a state for each key of this column, and run the cell for each key, on the rank to which it belongs",
        "COLUMN,…",
        variables,
    )
    arrow: bool = option(False, "make `batch` an Arrow table")
    max_restarts: int = option(
        0,
        "if ranks are lost more than K times before another checkpoint is saved, give up; default: 3 with "
        "--checkpoint-dir",
        "K",
        count,
    )
    fresh: bool = option(False, "start from the beginning; existing checkpoints are kept")
    resume: bool = option(False, "continue from a checkpoint even if the cell has changed")
    seed: int = option(0, "a seed for the random numbers; default: 0", "N", count)
    background: bool = True
    stall_after_s: float = Options.stall_after_s

    @property
    def of_run(self) -> Options:
        """The options that a supervisor needs for a micro-batch."""
        return Options(
            np=self.np,
            push=self.push,
            env=self.env,
            autolog=self.autolog,
            quiet=self.quiet,
            stall_after_s=self.stall_after_s,
        )


def checked_stream(who: str, options: StreamOptions) -> StreamOptions:
    """Return the options `options`. Raise OptionsError if one is invalid, or if two of them exclude each other."""
    if options.fresh and options.resume:
        raise OptionsError(f"{who}: --fresh starts over, but --resume continues: choose one.")
    if options.available_now and options.trigger_s is not None:
        raise OptionsError(f"{who}: --available-now does not wait between micro-batches: leave --trigger out.")
    given = [name for name in ("fresh", "resume", "state", "sharded", "max_restarts") if getattr(options, name)]
    if given and not options.checkpoint_dir:
        raise OptionsError(f"{who}: --{given[0].replace('_', '-')} needs a --checkpoint-dir.")
    return options
