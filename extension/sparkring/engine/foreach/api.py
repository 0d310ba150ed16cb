"""`foreach(…)`: runs a function or a cell for each of many independent items, and returns the results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from sparkring.engine.foreach import run as foreach_run
from sparkring.engine.foreach.options import ForeachOptions, checked_foreach
from sparkring.engine.foreach.plan import Plan
from sparkring.engine.foreach.result import ForeachResult
from sparkring.engine.foreach.run import ForeachRun, ForeachSpec
from sparkring.engine.run import api
from sparkring.engine.run.background import BackgroundRun
from sparkring.engine.run.options import check_framework, whole
from sparkring.engine.run.spec import Call
from sparkring.engine.run.view import view_of
from sparkring.errors import OptionsError
from sparkring.history.view import Controls, View
from sparkring.launchers.local import default_at_once
from sparkring.runtime.interrupts import Interrupts

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sparkring.engine.foreach.keywords import ForeachKeywords


def foreach_spec(spec: ForeachSpec, view: View | None = None) -> ForeachResult | Plan:
    """Run the items of a spec, wait for them, and return the result. If the spec asks for a plan, return the Plan.

    Raises ItemsFailed if items fail, and RunFailed, LaunchError or KeyboardInterrupt if the run ends before all items
    have run. Also raises the errors of foreach.run.prepare(). If the run fails, `last_result` holds the results of the
    items that had ended by then.
    """
    run = open_items(foreach_run.prepare(spec), view)
    result = carry_out_items(run)
    return run.plan or result


def start_foreach(spec: ForeachSpec, view: View | None = None) -> BackgroundRun[ForeachResult]:
    """Start running the items of a spec in a thread. Errors that can be found before the launch are raised at once."""
    run = open_items(foreach_run.prepare(spec), view)
    kept = run.prepared.kept
    return BackgroundRun(
        lambda: carry_out_items(run), run.recorder, run.interrupts, None if kept is None else kept.location
    )


def open_items(prepared: foreach_run.PreparedItems, view: View | None = None) -> ForeachRun:
    """Return a run of the prepared items, which is recorded and shown. Without a `view`, open_view() chooses one."""
    interrupts = Interrupts()
    return ForeachRun(prepared, view or view_of(prepared.options, Controls(interrupts.request)), interrupts)


def carry_out_items(run: ForeachRun) -> ForeachResult:
    """Carry out a run of independent items, and wait for it. Raises the errors of ForeachRun.to_the_end()."""
    try:
        return run.to_the_end()
    finally:
        api.last_result = run.result


@overload
def foreach(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    background: Literal[True],
    **keywords: Unpack[ForeachKeywords],
) -> BackgroundRun[ForeachResult]: ...


@overload
def foreach(
    function: Callable[[Any], Any], items: Iterable[Any], *, plan: Literal[True], **keywords: Unpack[ForeachKeywords]
) -> Plan: ...


@overload
def foreach(
    function: Callable[[Any], Any], items: Iterable[Any], **keywords: Unpack[ForeachKeywords]
) -> ForeachResult: ...


def foreach(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    np: int | None = None,
    retries: int | None = None,
    timeout_each_s: float | None = None,
    fail_fast: bool = False,
    fresh_process: bool = False,
    fresh_after: int | None = None,
    np_each: int = 1,
    framework: str = "plain",
    gpus: float | None = None,
    checkpoint_dir: str | os.PathLike[str] = "",
    fresh: bool = False,
    keep_results: bool = False,
    seed: int = 0,
    env: Mapping[str, str] | None = None,
    env_pack: bool = False,
    name: str = "",
    quiet: bool = False,
    background: bool = False,
    plan: bool = False,
) -> ForeachResult | BackgroundRun[ForeachResult] | Plan:
    """Call `function(item)` for each item, several at a time, in processes on this machine or in Spark tasks.

        result = sparkring.foreach(train, stores, np=-4)
        result.table.sort_values("mape")

    The items are independent. `items` is any iterable, even an endless generator, since an item is taken only when a
    process is free for it. If `items` is a grouped Spark DataFrame, `df.groupBy("store")`, an item is a tuple of the
    key and a pandas DataFrame. For sparkring.partitions(df), an item is a pandas DataFrame.

    With np=-4, at most four items run at once, in processes on this machine. With np=4, they run in Spark tasks. By
    default, as many items run at once on this machine as its cores (and its GPUs, with `gpus`) allow. The other
    keywords have the same names and meanings as the options of %%foreach. With background=True, foreach() returns a
    BackgroundRun at once. With plan=True, only the first item runs, and foreach() returns a Plan, which says how many
    items fit at once.

    Raises ItemsFailed if items failed; `sparkring.last_result` then holds all results. Raises OptionsError if an
    argument is invalid.
    """
    check_framework("foreach", framework)
    options = ForeachOptions(
        np=-default_at_once(np_each, gpus, env or {}) if np is None else whole(np),
        np_each=np_each,
        framework=framework,
        timeout_each_s=timeout_each_s,
        retries=retries,
        fail_fast=fail_fast,
        fresh_after=1 if fresh_process else fresh_after,
        gpus=gpus,
        env=tuple((env or {}).items()),
        env_pack=env_pack,
        checkpoint_dir=os.fspath(checkpoint_dir),
        fresh=fresh,
        keep_results=keep_results,
        seed=seed,
        name=name,
        quiet=quiet,
        background=background,
        plan=plan,
    )
    if plan and isinstance(items, Iterator):
        raise OptionsError("foreach(plan=True) would consume the first item of an iterator: pass a list instead.")
    spec = ForeachSpec(Call(function), items, checked_foreach("foreach()", options))
    return start_foreach(spec) if background else foreach_spec(spec)
