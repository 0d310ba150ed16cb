"""One run from beginning to end: on a gang of its own, or on a warm one."""

from __future__ import annotations

import operator
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkring import events, runs
from sparkring.attempts import Attempts
from sparkring.capture import LARGE_BYTES, Captured, capture
from sparkring.checkpointing.here import Here
from sparkring.drive import Drive, TurnLost, fail
from sparkring.errors import CaptureError, OptionsError, ResultError, SparkringError
from sparkring.frameworks import FRAMEWORKS
from sparkring.gang import Gang
from sparkring.interrupts import Interrupts
from sparkring.launchers import every_slot, open_launcher
from sparkring.launchers.base import Wanted
from sparkring.options import Logs, Options, checked, restarts
from sparkring.options import timeline as asked_timeline
from sparkring.packing import pack_call
from sparkring.recorder import Recorder
from sparkring.result import RunResult
from sparkring.turn import Request
from sparkring.views import View, open_view, summary, tell
from sparkring.warm import WarmGang

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkring.checkpointing.directory import Directory
    from sparkring.launchers.spark.data import Data

PROVIDED = ("rank", "size", "local_rank", "get_ipython", "display")  # what ranks have unless the notebook defines it

last_result: RunResult | None = None


def run_cell(
    source: str,
    namespace: dict[str, Any],
    options: Options,
    *,
    framework: str,
    title: str,
    code: str,
    view: View | None = None,
    warm: WarmGang | None = None,
    ranks: Sequence[int] = (),
) -> RunResult:
    """Run a cell of the notebook whose names are in `namespace`, and put there what it pulls.

    It runs on `ranks` (all if none is named) of a `warm` gang, or on fresh ones. CaptureError if something that it
    reads is not there or cannot travel; RunFailed, LaunchError or KeyboardInterrupt if it does not end well.
    """
    taking_part = ranks or range(options.size)
    captured = take_along(source, namespace, options, framework, warm, taking_part)
    request = Request(
        "cell",
        captured.payload,
        framework,
        source,
        options.pull,
        options.autolog,
        options.env,
        captured.buffers,
        tuple(captured.sent),
        timeline=options.timeline,
    )
    large = {name.name: name.size_bytes or 0 for name in captured.large}
    data = None
    if options.data:
        from sparkring.launchers.spark.data import find_data

        data = find_data(options.data, namespace, counted=not options.np)
        options = replace(options, np=options.np or data.ranks())
    _look_ahead(captured, namespace, options.size)
    directory = _directory(options, code, [namespace.get(name.name) for name in captured.names])
    try:
        result = _run(request, options, title, code, large, view, data, warm, ranks, directory)
    except ResultError:  # the cell ran all the same
        if warm is not None:
            warm.held.bound(captured.binds, taking_part)
        raise
    namespace.update(result.pulled)
    if warm is not None:
        warm.held.bound({*captured.binds, *result.pulled}, taking_part)
    return result


def _look_ahead(captured: Captured, namespace: dict[str, Any], size: int) -> None:
    """Let what travels say what is wrong with it for so many ranks, before they are started."""
    for name in captured.names:
        value = namespace.get(name.name)
        look = getattr(type(value), "_sparkring_look_ahead", None)
        if look is not None and size:
            look(value, size)


def _directory(options: Options, code: str, values: Iterable[Any] = ()) -> Directory | None:
    """The directory of checkpoints, and what to go on from there. CheckpointError, PathError if that cannot work."""
    if not options.checkpoint_dir:
        return None
    from sparkring.checkpointing.directory import open_directory
    from sparkring.checkpointing.parts import versions

    data = versions([value for value in values if hasattr(type(value), "_sparkring_look_ahead")])
    size = options.size or every_slot()
    return open_directory(options.checkpoint_dir, size, code, data, fresh=options.fresh, resume=options.resume)


def take_along(
    source: str,
    namespace: dict[str, Any],
    options: Options,
    framework: str,
    warm: WarmGang | None = None,
    ranks: Sequence[int] = (),
) -> Captured:
    """What a cell takes from the notebook to the ranks, but for what those of a `warm` gang hold already."""
    try:
        return capture(
            source,
            namespace,
            provided=PROVIDED,
            reserved=FRAMEWORKS[framework].reserved,
            also=options.push,
            held=warm.held.beside(namespace, ranks) if warm else (),
            on_ranks=warm.held.names if warm else (),
            dry_run=options.dry_run,
        )
    except CaptureError as error:
        if warm and warm.news:  # what it misses may have been on the ranks that are gone
            raise CaptureError("\n".join([str(error), *warm.news]), line=error.line) from None
        raise


def run_function(
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    options: Options,
    *,
    framework: str,
) -> RunResult:
    """Run `function(**kwargs)` on a ring of ranks; errors as for run_cell()."""
    if not callable(function):
        raise TypeError(f"run() takes a function, not {type(function).__name__}")
    namespace = getattr(sys.modules.get("__main__"), "__dict__", None)
    title = options.name or getattr(function, "__qualname__", type(function).__name__)
    packed = pack_call(function, kwargs, namespace)
    request = Request(
        "call",
        packed.payload,
        framework,
        autolog=options.autolog,
        buffers=packed.buffers,
        timeline=options.timeline,
    )
    size_bytes = sum(packed.sizes.values())
    large = {title: size_bytes} if size_bytes > LARGE_BYTES else {}
    code = _source_of(function)
    directory = _directory(options, code, kwargs.values())
    return _run(request, options, title, code, large, directory=directory)


def spark(slots: int = 2) -> SparkSession:
    """The notebook's SparkSession; where there is none a new one on this machine, with `slots` and some to spare.

    It finds a Java from pip where there is no other. LaunchError if there is none, or the session has been stopped.
    """
    from sparkring.launchers.spark.session import find_session

    return find_session(slots, tell)


class HorovodRunner:
    """Runs a training function on a ring of Horovod ranks, with the signature that notebooks know.

    np < 0: that many processes on this machine; np > 0: that many Spark barrier tasks; np = 0: every
    task slot (deprecated). `driver_log_verbosity` is "all", or "log_callback_only": then the notebook
    shows only what log_to_driver and LogCallback send, and everything else is in the run's logs.

    The API is that of sparkdl's public documentation, where this class is described.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        np = _whole(np)
        if np == 0:
            warnings.warn(
                "np=0 (every task slot) is deprecated: give the number of ranks",
                DeprecationWarning,
                stacklevel=2,
            )
        self.num_processor = np
        self._logs = _logs(driver_log_verbosity)

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` on every rank; returns what rank 0 returned.

        Both are packed with cloudpickle. RunFailed says which rank failed and why.
        """
        return run_function(main, kwargs, Options(np=self.num_processor, logs=self._logs), framework="horovod").value


def run(
    main: Callable[..., Any],
    *,
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
    timeline: bool = False,
    **kwargs: Any,
) -> RunResult:
    """Call `main(**kwargs)` on a ring of ranks: HorovodRunner's keywords, and what a launch magic's line can say.

        sparkring.run(train, np=-2, checkpoint_dir="dbfs:/ml/run1", max_restarts=3, learning_rate=0.001).value

    np, driver_log_verbosity: as of HorovodRunner. framework: horovod, torch, tensorflow or plain. The others are the
    options of %%horovod (`--checkpoint-dir`, …) with the same meanings. Errors as for run_cell(); OptionsError.
    """
    if framework not in FRAMEWORKS or FRAMEWORKS[framework].in_task:
        carried = ", ".join(name for name, each in FRAMEWORKS.items() if not each.in_task)
        raise OptionsError(f"run(framework={framework!r}): it is one of {carried}.")
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
        timeline=asked_timeline("run()", framework == "horovod", timeline),
    )
    return run_function(main, kwargs, checked("run()", options), framework=framework)


def _whole(np: Any) -> int:
    try:
        return operator.index(np)
    except TypeError:
        raise TypeError(f"np must be a whole number, not {type(np).__name__}") from None


def _logs(driver_log_verbosity: str) -> Logs:
    logs: dict[str, Logs] = {"all": "all", "log_callback_only": "callbacks"}
    if driver_log_verbosity not in logs:
        raise ValueError(f"driver_log_verbosity is 'all' or 'log_callback_only', not {driver_log_verbosity!r}")
    return logs[driver_log_verbosity]


def _run(
    request: Request,
    options: Options,
    title: str,
    code: str,
    large: dict[str, int],
    view: View | None = None,
    data: Data | None = None,
    warm: WarmGang | None = None,
    ranks: Sequence[int] = (),
    directory: Directory | None = None,
) -> RunResult:
    size = options.size or every_slot()
    where = "local" if options.np < 0 else "spark"
    started = events.RunStarted(
        time.time(),
        runs.new_id(),
        title,
        code,
        size,
        where,
        request.framework,
        options.logs,
        tuple(ranks),
        warm is not None,
        options.checkpoint_dir,
    )
    recorder = Recorder(view if view is not None else open_view(quiet=options.quiet), started)
    if options.np == 0:
        recorder.notice(f"-n 0 (every task slot, {size} here) is deprecated: give the number of ranks")
    for name, size_bytes in large.items():
        recorder.notice(
            f"`{name}` ({summary.size(size_bytes)}) travels to every rank; "
            "let ranks load or make large data themselves where they can"
        )
    try:
        if warm is None:
            here = request.framework != "barrier"
            wanted = Wanted(options.np, size, dict(options.env), title, options.gpus, data, here)
            if options.survives:
                result = Attempts(request, wanted, options, recorder, directory).to_the_end()
            else:
                result = _cold(request, wanted, options, recorder)
        else:
            with Interrupts() as interrupts, warm.take(recorder) as gang:
                turn = gang.submit(request._replace(checkpoints=Here(run_id=started.run_id)), ranks)
                result = Drive(gang, turn, recorder, options, interrupts, warm=True).to_the_end()
    except TurnLost as lost:
        fail(recorder, lost)
    except BaseException as error:  # raised again: the record and the view must not be left in the middle
        if recorder.record.outcome is None:
            said = str(error) if isinstance(error, SparkringError) else f"{type(error).__name__}: {error}"
            recorder.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", said)
        raise
    global last_result
    last_result = result
    if result.problems:
        raise ResultError(
            f"the cell ran, but {'; '.join(result.problems)}. The other values are in sparkring.last_result.values.",
            record=result.record,
            values=result.by_rank,
        )
    return result


def _cold(request: Request, wanted: Wanted, options: Options, recorder: Recorder) -> RunResult:
    """Run on a gang of its own, which ends with the turn."""
    launcher = open_launcher(wanted, recorder.notice)
    with Interrupts() as interrupts, Gang(launcher, wanted.size) as gang:
        turn = gang.submit(request._replace(checkpoints=Here(run_id=recorder.record.run_id)))
        gang.start()
        return Drive(gang, turn, recorder, options, interrupts, warm=False).to_the_end()


def _source_of(function: Callable[..., Any]) -> str:
    import inspect

    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
