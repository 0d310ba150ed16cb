"""The functions for notebooks and programs. They prepare, show and execute a run, and return its result.

This is the only module of the engine that opens a view: a panel in a notebook, text elsewhere.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from sparkring.capture.calls import options_apart
from sparkring.engine.background import BackgroundRun
from sparkring.engine.foreach import run as foreach_run
from sparkring.engine.foreach.plan import Plan
from sparkring.engine.foreach.result import ForeachResult
from sparkring.engine.foreach.run import ForeachRun, ForeachSpec
from sparkring.engine.options import ForeachOptions, Logs, Options, SharedOptions, checked, checked_foreach, restarts
from sparkring.engine.prepare import prepare
from sparkring.engine.questions import Questions
from sparkring.engine.result import RunResult
from sparkring.engine.runner import Run
from sparkring.engine.spec import Call, RunSpec
from sparkring.errors import OptionsError, ResultError
from sparkring.frameworks import FRAMEWORKS
from sparkring.history.view import Controls, View
from sparkring.launchers import default_at_once
from sparkring.runtime.interrupts import Interrupts, interrupted
from sparkring.runtime.kernel import can_ask, in_notebook, tell
from sparkring.views import open_view, shown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import Unpack

    from sparkring.engine.keywords import ForeachKeywords
    from sparkring.engine.stream.run import StreamResult, StreamSpec

# The result of this process's latest run; `sparkring.last_result` returns it.
last_result: RunResult | ForeachResult | None = None


def run_spec(spec: RunSpec, view: View | None = None) -> RunResult:
    """Carry out a run, and wait for it. Without a `view`, open_view() chooses one.

    Raises CaptureError if something that the cell reads is missing or cannot be sent. Raises RunFailed, LaunchError or
    KeyboardInterrupt if the run does not finish. Also raises the other errors of prepare().
    """
    run = _open(spec, view)
    result = _carry_out(run)
    if run.interrupts.seen:
        raise interrupted("after the run had finished: its result is in sparkring.last_result")
    return result


def start_spec(spec: RunSpec, view: View | None = None) -> BackgroundRun[RunResult]:
    """Start a run in its own thread, and return its BackgroundRun.

    Errors that can be found before the launch are raised at once.
    The options of `spec` must have `background` set, and `spec` must not name a warm gang.
    """
    run = _open(spec, view)
    directory = run.prepared.directory
    return BackgroundRun(
        lambda: _carry_out(run), run.recorder, run.interrupts, None if directory is None else directory.location
    )


def _open(spec: RunSpec, view: View | None) -> Run:
    prepared, interrupts = prepare(spec), Interrupts()
    options = prepared.options
    by_panel = options.background and not options.quiet and shown() == "live" and can_ask()
    questions = Questions(by_panel=by_panel, nobody=options.background and not by_panel)
    controls = Controls(interrupts.request, questions.answer if by_panel else None)
    return Run(prepared, view or _open_view(options, controls), interrupts, questions)


def _open_view(options: SharedOptions, controls: Controls) -> View:
    return open_view(quiet=options.quiet, controls=controls, background=options.background)


def background_view() -> View:
    """Return a view for a run that is recorded in other threads. In a notebook, it is a panel without a Stop button.

    Elsewhere, the view shows nothing.
    """
    return open_view(quiet=not in_notebook(), background=True)


def _carry_out(run: Run) -> RunResult:
    global last_result
    last_result = result = run.to_the_end()
    if result.problems:
        pulled = f" and .pulled ({', '.join(result.pulled)})" if result.pulled else ""
        raise ResultError(
            f"the cell ran, but {'; '.join(result.problems)}.\n"
            f"What did arrive is in sparkring.last_result: .values{pulled}.",
            record=result.record,
            values=result.by_rank,
        )
    return result


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


def start_stream(spec: StreamSpec) -> BackgroundRun[StreamResult]:
    """Start training on a stream in a thread. Errors that can be found before the first batch are raised at once."""
    from sparkring.engine.stream import run as stream_run  # not at the top: it imports NumPy and pyarrow

    prepared, interrupts = stream_run.prepare(spec), Interrupts()
    run = stream_run.StreamRun(prepared, _open_view(spec.options, Controls(interrupts.request)), interrupts)
    directory = prepared.directory
    return BackgroundRun(
        run.to_the_end, run.recorder, run.interrupts, None if directory is None else directory.location
    )


def open_items(prepared: foreach_run.Prepared, view: View | None = None) -> ForeachRun:
    """Return a run of the prepared items, which is recorded and shown. Without a `view`, open_view() chooses one."""
    interrupts = Interrupts()
    return ForeachRun(prepared, view or _open_view(prepared.options, Controls(interrupts.request)), interrupts)


def carry_out_items(run: ForeachRun) -> ForeachResult:
    """Carry out a run of independent items, and wait for it. Raises the errors of ForeachRun.to_the_end()."""
    global last_result
    try:
        return run.to_the_end()
    finally:
        last_result = run.result


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
    _check_framework("foreach", framework)
    options = ForeachOptions(
        np=-default_at_once(np_each, gpus, env or {}) if np is None else _whole(np),
        each=np_each,
        framework=framework,
        timeout_each_s=timeout_each_s,
        retries=retries,
        fail_fast=fail_fast,
        fresh_after=1 if fresh_process else fresh_after,
        gpus=gpus,
        env=tuple((env or {}).items()),
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


def spark(slots: int = 2) -> SparkSession:
    """Return the notebook's SparkSession or, if there is none, start one on this machine with at least `slots` slots.

    A slot runs one task at a time. A new session needs Java. If no other Java installation is found, the one installed
    with pip is used. Raises LaunchError if there is no Java, if the session has been stopped, or if there is only a
    Spark Connect session.
    """
    from sparkring.cluster.session import find_session

    return find_session(slots, tell, here=False)


class HorovodRunner:
    """Runs a training function on a ring of Horovod ranks. It has the same signature as Databricks' class.

    If `np` is negative, the ranks are -np processes on this machine. If `np` is positive, they are np Spark barrier
    tasks. With np=0, which is deprecated, there is a rank for every task slot. If `driver_log_verbosity` is "all", the
    notebook shows the ranks' output; if it is "log_callback_only", the notebook shows only the messages of
    log_to_driver and LogCallback. The run's logs contain all output in either case.

    The class follows sparkdl's public documentation.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        np = _whole(np)
        if np == 0:
            warnings.warn(
                "np=0 (every task slot) is deprecated: pass the number of ranks", DeprecationWarning, stacklevel=2
            )
        self.num_processor = np
        self._logs = _logs(driver_log_verbosity)

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` on every rank; return what rank 0 returned.

        The function and its arguments are sent with cloudpickle. If a rank fails, RunFailed is raised, and says which
        rank failed and why.
        """
        options = Options(np=self.num_processor, logs=self._logs)
        return run_spec(RunSpec(Call(main, (), kwargs), options, "horovod")).value


@overload
def run(main: Callable[..., Any], *args: Any, background: Literal[True], **kwargs: Any) -> BackgroundRun[RunResult]: ...


@overload
def run(main: Callable[..., Any], *args: Any, background: Literal[False] = False, **kwargs: Any) -> RunResult: ...


@options_apart
def run(
    main: Callable[..., Any],
    *args: Any,
    np: int = -1,
    driver_log_verbosity: str = "all",
    framework: str = "horovod",
    gpus: int | None = None,
    timeout_s: float | None = None,
    checkpoint_dir: str | os.PathLike[str] = "",
    max_restarts: int | None = None,
    min_np: int = 0,
    fresh: bool = False,
    resume: bool = False,
    background: bool = False,
    timeline: bool = False,
    independent: bool = False,
    **kwargs: Any,
) -> RunResult | BackgroundRun[RunResult]:
    """Call `main(*args, **kwargs)` on a ring of ranks.

        sparkring.run(train, x, y, np=-2, checkpoint_dir="dbfs:/ml/run1", max_restarts=3, learning_rate=0.001).value

    `np` and `driver_log_verbosity` have the same meanings as in HorovodRunner. `framework` is "horovod", "jax",
    "torch", "tensorflow" or "plain". The other keywords have the same names and meanings as the options of %%horovod
    (`--checkpoint-dir`, …). With background=True, run() returns a BackgroundRun at once.

    If `main` has a parameter with the same name as an option, such as checkpoint_dir, run() rejects this keyword,
    because it could mean the parameter or the option. Pass the argument of `main` by position, or with
    functools.partial(main, checkpoint_dir=…). The keyword then sets the option.

    Raises the same errors as %%horovod, and OptionsError if an argument is invalid.
    """
    _check_framework("run", framework)
    directory = os.fspath(checkpoint_dir)
    options = Options(
        np=_whole(np),
        logs=_logs(driver_log_verbosity),
        gpus=gpus,
        timeout_s=timeout_s,
        checkpoint_dir=directory,
        max_restarts=restarts(max_restarts, directory),
        least=min_np,
        fresh=fresh,
        resume=resume,
        background=background,
        timeline=timeline,
        independent=independent,
    )
    options = checked("run()", options, horovod=framework == "horovod")
    spec = RunSpec(Call(main, args, kwargs), options, framework)
    return start_spec(spec) if background else run_spec(spec)


def _check_framework(who: str, framework: str) -> None:
    known = [name for name, each in FRAMEWORKS.items() if not each.in_task]
    if framework not in known:
        raise OptionsError(f"{who}(framework={framework!r}): expected one of {', '.join(known)}.")


def _whole(np: Any) -> int:
    try:
        return operator.index(np)
    except TypeError:
        raise TypeError(f"np must be a whole number, not {type(np).__name__}") from None


def _logs(driver_log_verbosity: str) -> Logs:
    logs: dict[str, Logs] = {"all": "all", "log_callback_only": "callbacks"}
    if driver_log_verbosity not in logs:
        raise OptionsError(f"driver_log_verbosity must be 'all' or 'log_callback_only', not {driver_log_verbosity!r}.")
    return logs[driver_log_verbosity]
