"""Chooses the warm gang for a cell, and refuses options that cannot be used with a warm gang."""

from __future__ import annotations

from sparkring.engine.run import warm_gang
from sparkring.engine.run.options import Options
from sparkring.engine.run.warm_gang import WarmGang
from sparkring.errors import OptionsError
from sparkring.runtime.kernel import tell


def default_np() -> int:
    """Return `np` for a cell without -n: the latest gang's `np`, or -1 (one rank on this machine)."""
    latest = warm_gang.latest()
    return -1 if latest is None else latest.wanted.np


def gang_for(options: Options) -> WarmGang | None:
    """Return the warm gang for a cell with these options, or None if the cell must start its own ranks.

    Raises OptionsError if the cell asks for a different number of GPUs than the gang's ranks have.
    """
    # None of these runs can use a warm gang. A dry run shows what sparkring would send to new ranks. With --data, Spark
    # gives each rank its partition when it starts the rank. A restart needs new ranks. A timeline is complete only when
    # the ranks have exited, but the ranks of a warm gang stay. A run in the background would keep the gang busy.
    if options.dry_run or options.data or options.survives or options.timeline or options.background:
        return None
    gang = warm_gang.find(options.np, tell, options.place)
    if gang and options.gpus is not None and options.gpus != gang.wanted.gpus:
        raise OptionsError(
            f"--gpus {options.gpus}: the ranks of the {gang.describe()} have a different number of GPUs. To change "
            f"this number, use %gang stop, then %gang start -n {options.np} --gpus {options.gpus}."
        )
    if gang and options.env_pack and not gang.wanted.env_pack and not options.place.here:
        raise OptionsError(
            f"--env-pack: the ranks of the {gang.describe()} have been started without the notebook's packages: use "
            f"%gang stop, then %gang start -n {options.np} --env-pack."
        )
    return gang


def latest_gang(magic: str) -> WarmGang:
    """Return the gang that was started last. If its ranks are lost, start a new gang in its place and return that one.

    Raises OptionsError if no gang is free.
    """
    latest = warm_gang.latest()
    gang = None if latest is None else warm_gang.find(latest.wanted.np, tell, latest.wanted.place)
    if gang is None:
        raise OptionsError(
            f"{magic} needs a gang that is up and free: %gang start -n -4 starts one with four local ranks."
        )
    return gang


def gang_with(magic: str, np: int) -> WarmGang:
    """Return the warm gang with this `np`. If its ranks are lost, start a new gang in its place and return that one.

    Raises OptionsError if there is no such gang, or if it is not free.
    """
    gang = warm_gang.find(np, tell) if warm_gang.every() else None
    if gang is None:
        raise OptionsError(
            f"{magic} needs a warm gang that is up and free, on which earlier cells have defined what it trains: "
            "%gang start -n -2 starts one with two local ranks."
        )
    return gang


def latest_gang_alive(magic: str) -> WarmGang:
    """Return the gang that was started last. Raises OptionsError if its ranks are lost, or if no gang is free."""
    latest = warm_gang.latest()
    if latest is not None and latest.ended:
        raise OptionsError(f"the {latest.describe()} has ended: {latest.ended}. The next cell starts a new one.")
    return latest_gang(magic)


def check_ranks_options(options: Options) -> None:
    """Raise OptionsError if these options do not fit %%ranks, which runs on the gang that was started last."""
    if options.np != default_np():
        raise OptionsError(
            f"%%ranks runs on the gang that was started last, which has -n {default_np()}: leave out -n."
        )
    if options.survives:
        raise OptionsError(
            "%%ranks runs on a warm gang, which does not restart its ranks: leave out the options for restarts."
        )
    if options.env_pack:
        raise OptionsError("%%ranks runs on a warm gang, whose ranks have packages already: leave out --env-pack.")
    if options.background:
        raise OptionsError(
            "%%ranks runs on a warm gang, but a run with --background starts its own ranks: use %%horovod."
        )
