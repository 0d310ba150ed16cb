"""The functions for notebooks and programs that run a function or a cell on a ring of ranks, and return its result."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from sparkring.capture.calls import options_apart
from sparkring.engine.run.background import BackgroundRun
from sparkring.engine.run.options import Logs, Options, StopOn, check_framework, checked, restarts, whole
from sparkring.engine.run.prepare import prepare
from sparkring.engine.run.questions import RankQuestions
from sparkring.engine.run.result import Result, RunResult
from sparkring.engine.run.runner import Runner
from sparkring.engine.run.spec import Call, RunSpec
from sparkring.engine.run.view import panel_asks, view_of
from sparkring.errors import OptionsError, ResultError
from sparkring.history.view import Controls, View
from sparkring.runtime.interrupts import Interrupts, interrupted
from sparkring.runtime.kernel import tell

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The result of this process's latest run, of a cell or of independent items; `sparkring.last_result` returns it.
last_result: Result | None = None


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


def _open(spec: RunSpec, view: View | None) -> Runner:
    prepared, interrupts = prepare(spec), Interrupts()
    options = prepared.options
    by_panel = options.background and panel_asks(options)
    questions = RankQuestions(by_panel=by_panel, nobody=options.background and not by_panel)
    controls = Controls(interrupts.request, questions.answer if by_panel else None)
    return Runner(prepared, view or view_of(options, controls), interrupts, questions)


def _carry_out(run: Runner) -> RunResult:
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


def spark(slots: int = 2) -> SparkSession:
    """Return the notebook's SparkSession or, if there is none, start one on this machine with at least `slots` slots.

    A slot runs one task at a time. A new session needs Java. If no other Java installation is found, the one installed
    with pip is used. Raises LaunchError if there is no Java, if the session has been stopped, or if Spark Connect
    cannot be reached.
    """
    from sparkring.cluster.session import find_cluster

    return find_cluster(slots, tell, here=False).session


class HorovodRunner:
    """Runs a training function on a ring of Horovod ranks. It has the same signature as Databricks' class.

    If `np` is negative, the ranks are -np processes on this machine. If `np` is positive, they are np Spark barrier
    tasks. With np=0, which is deprecated, there is a rank for every task slot. If `driver_log_verbosity` is "all", the
    notebook shows the ranks' output; if it is "log_callback_only", the notebook shows only the messages of
    log_to_driver and LogCallback. The run's logs contain all output in either case.

    The class follows sparkdl's public documentation.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        np = whole(np)
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
    step_timeout_s: float | None = None,
    checkpoint_dir: str | os.PathLike[str] = "",
    max_restarts: int | None = None,
    stop_on: StopOn = "",
    grace_s: float = 30.0,
    min_np: int = 0,
    fresh: bool = False,
    resume: bool = False,
    background: bool = False,
    timeline: bool = False,
    independent: bool = False,
    profile: bool | Literal["torch"] = True,
    pm: bool = False,
    env_pack: bool = False,
    **kwargs: Any,
) -> RunResult | BackgroundRun[RunResult]:
    """Call `main(*args, **kwargs)` on a ring of ranks.

        sparkring.run(train, x, y, np=-2, checkpoint_dir="dbfs:/ml/run1", max_restarts=3, learning_rate=0.001).value

    `np` and `driver_log_verbosity` have the same meanings as in HorovodRunner. `framework` is "horovod", "jax",
    "torch", "tensorflow" or "plain". The other keywords have the same names and meanings as the options of %%horovod
    (`--checkpoint-dir`, …); profile=False stands for `--no-profile`. With background=True, run() returns a
    BackgroundRun at once.

    If `main` has a parameter with the same name as an option, such as checkpoint_dir, run() rejects this keyword,
    because it could mean the parameter or the option. Pass the argument of `main` by position, or with
    functools.partial(main, checkpoint_dir=…). The keyword then sets the option.

    Raises the same errors as %%horovod, and OptionsError if an argument is invalid.
    """
    check_framework("run", framework)
    directory = os.fspath(checkpoint_dir)
    options = Options(
        np=whole(np),
        logs=_logs(driver_log_verbosity),
        gpus=gpus,
        timeout_s=timeout_s,
        step_timeout_s=step_timeout_s,
        checkpoint_dir=directory,
        max_restarts=restarts(max_restarts, directory),
        stop_on=stop_on,
        grace_s=grace_s,
        min_np=min_np,
        fresh=fresh,
        resume=resume,
        background=background,
        timeline=timeline,
        independent=independent,
        profile=profile is not False,
        trace=_trace(profile),
        pm=pm,
        env_pack=env_pack,
    )
    options = checked("run()", options, horovod=framework == "horovod")
    spec = RunSpec(Call(main, args, kwargs), options, framework)
    return start_spec(spec) if background else run_spec(spec)


def _trace(profile: bool | str) -> Literal["", "torch"]:
    if profile not in (True, False, "torch"):
        raise OptionsError(f"profile must be True, False or 'torch', not {profile!r}.")
    return "torch" if profile == "torch" else ""


def _logs(driver_log_verbosity: str) -> Logs:
    logs: dict[str, Logs] = {"all": "all", "log_callback_only": "callbacks"}
    if driver_log_verbosity not in logs:
        raise OptionsError(f"driver_log_verbosity must be 'all' or 'log_callback_only', not {driver_log_verbosity!r}.")
    return logs[driver_log_verbosity]
