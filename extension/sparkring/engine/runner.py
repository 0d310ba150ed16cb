"""One run from beginning to end: on a gang of its own, or on a warm one."""

from __future__ import annotations

import operator
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from sparkring.capture import notebook_state
from sparkring.capture.calls import check_call, name_of, options_apart, source_of
from sparkring.capture.cell import LARGE_BYTES, Captured, capture, captured_call
from sparkring.capture.packing import pack_call
from sparkring.capture.scripts import Script
from sparkring.capture.versions import modules_of, versions
from sparkring.engine import background
from sparkring.engine.background import BackgroundRun
from sparkring.engine.options import Logs, Options, checked, restarts
from sparkring.engine.options import timeline as asked_timeline
from sparkring.engine.recorder import Recorder
from sparkring.engine.restarts import Attempts
from sparkring.engine.result import RunResult
from sparkring.engine.supervisor import Drive, TurnLost, fail
from sparkring.engine.warm_gang import WarmGang
from sparkring.errors import CaptureError, CheckpointError, OptionsError, ResultError, SparkringError
from sparkring.frameworks import FRAMEWORKS
from sparkring.gangs.execution import Request, Turn
from sparkring.gangs.gang import Gang
from sparkring.history import describe, events, run_store
from sparkring.launchers import every_slot, open_launcher
from sparkring.launchers.base import Wanted
from sparkring.runtime.interrupts import Interrupts, when
from sparkring.runtime.kernel import tell
from sparkring.runtime.resume_point import Here
from sparkring.runtime.storage import locate
from sparkring.views import View, open_view

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkring.checkpointing.directory import Directory
    from sparkring.cluster.partitions import Data

# Names that ranks have unless the notebook defines them. IPython removes `exit` and `quit` from its kernel's builtins.
PROVIDED = ("rank", "size", "local_rank", "get_ipython", "display", "displayHTML", "exit", "quit")

last_result: RunResult | None = None


def run_cell(
    source: str,
    namespace: dict[str, Any],
    options: Options,
    *,
    framework: str,
    title: str,
    code: str,
    scripts: Sequence[Script] = (),
    view: View | None = None,
    warm: WarmGang | None = None,
    ranks: Sequence[int] = (),
) -> RunResult:
    """Run a cell of the notebook whose names are in `namespace`, and put there what it pulls.

    `scripts` are those of its %run lines. It runs on `ranks` (all if none is named) of a `warm` gang, or on fresh ones.
    CaptureError if something that it reads is not there or cannot travel; RunFailed, LaunchError or KeyboardInterrupt
    if it does not end well.
    """
    return _open_cell(source, namespace, options, framework, title, code, scripts, view, warm, ranks).to_the_end()


def start_cell(
    source: str,
    namespace: dict[str, Any],
    options: Options,
    *,
    framework: str,
    title: str,
    code: str,
    scripts: Sequence[Script] = (),
    view: View | None = None,
) -> BackgroundRun:
    """The same on fresh ranks, without waiting for them: what can be wrong before a launch is told at once."""
    return _open_cell(source, namespace, options, framework, title, code, scripts, view).in_background()


def _open_cell(
    source: str,
    namespace: dict[str, Any],
    options: Options,
    framework: str,
    title: str,
    code: str,
    scripts: Sequence[Script],
    view: View | None,
    warm: WarmGang | None = None,
    ranks: Sequence[int] = (),
) -> _Run:
    taking_part = ranks or range(options.size)
    captured = take_along(source, namespace, options, framework, scripts, warm, taking_part)
    request = Request(
        "cell",
        captured.payload,
        framework,
        source,
        options.pull,
        options.autolog,
        (*(warm.wanted.env if warm else ()), *options.env),
        captured.buffers,
        modules_of(namespace[name] for name in captured.sent),
        tuple(captured.sent),
        timeline=options.timeline,
        notebook=notebook_state.gather(),
        scripts=tuple(scripts),
    )
    large = {name.name: name.size_bytes or 0 for name in captured.large}
    data = None
    if options.data:
        from sparkring.cluster.partitions import find_data

        data = find_data(options.data, namespace, counted=not options.np)
        options = replace(options, np=options.np or data.ranks())
    _look_ahead(captured, namespace, options.size)
    whole = "\n".join([code, *(script.source for script in scripts)])
    directory = _directory(options, whole, [namespace.get(name.name) for name in captured.names])

    def bring(result: RunResult) -> None:
        pulled = {} if result.problems else result.pulled
        namespace.update(pulled)
        if warm is not None:
            warm.held.bound({*captured.binds, *pulled}, taking_part)

    return _Run(request, options, title, code, captured.table, large, view, data, warm, ranks, directory, bring)


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
    _not_taken(options.checkpoint_dir)
    from sparkring.checkpointing.directory import open_directory
    from sparkring.checkpointing.parts import versions as versions_of

    data = versions_of([value for value in values if hasattr(type(value), "_sparkring_look_ahead")])
    size = options.size or every_slot()
    return open_directory(options.checkpoint_dir, size, code, data, fresh=options.fresh, resume=options.resume)


def _not_taken(directory: str) -> None:
    """CheckpointError if a run saves in that directory, however it is written, in the background."""
    location = locate(directory)
    other = next((each for each in background.going() if each.saves_in(location)), None)
    if other is not None:
        raise CheckpointError(
            f"{directory} is where run {other.run_id} saves, which goes on in the background: wait for it, stop it "
            f"(%runs --stop {other.run_id}), or choose another directory."
        )


def take_along(
    source: str,
    namespace: dict[str, Any],
    options: Options,
    framework: str,
    scripts: Sequence[Script] = (),
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
            scripts=scripts,
            dry_run=options.dry_run,
        )
    except CaptureError as error:
        if warm and warm.news:  # what it misses may have been on the ranks that are gone
            raise CaptureError("\n".join([str(error), *warm.news]), line=error.line) from None
        raise


def run_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: Options,
    *,
    framework: str,
    code: str | None = None,
    notice: str = "",
) -> RunResult:
    """Run `function(*args, **kwargs)` on a ring of ranks; errors as for run_cell().

    `code` is the source to keep, by default the function's; a `notice` is shown with the run.
    """
    run = _open_function(function, args, kwargs, options, framework, code)
    if notice:
        run.recorder.notice(notice)
    return run.to_the_end()


def _open_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: Options,
    framework: str,
    code: str | None = None,
) -> _Run:
    if not callable(function):
        raise TypeError(f"run() takes a function, not {type(function).__name__}")
    check_call(function, args, kwargs)
    namespace = getattr(sys.modules.get("__main__"), "__dict__", None)
    title = options.name or name_of(function)
    packed = pack_call(function, kwargs, namespace, args)
    request = Request(
        "call",
        packed.payload,
        framework,
        autolog=options.autolog,
        buffers=packed.buffers,
        modules=modules_of((function, *args, *kwargs.values())),
        timeline=options.timeline,
        notebook=notebook_state.gather(),
    )
    size_bytes = len(packed.payload) + sum(buffer.nbytes for buffer in packed.buffers)
    large = {title: size_bytes} if size_bytes > LARGE_BYTES else {}
    code = source_of(function) if code is None else code
    directory = _directory(options, code, [*args, *kwargs.values()])
    captured = captured_call(function, kwargs, packed, args)
    return _Run(request, options, title, code, captured, large, directory=directory)


def spark(slots: int = 2) -> SparkSession:
    """The notebook's SparkSession; where there is none a new one on this machine, with `slots` and some to spare.

    It finds a Java from pip where there is no other. LaunchError if there is none, or the session has been stopped.
    """
    from sparkring.cluster.session import find_session

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
        options = Options(np=self.num_processor, logs=self._logs)
        return run_function(main, (), kwargs, options, framework="horovod").value


@overload
def run(main: Callable[..., Any], *args: Any, background: Literal[True], **kwargs: Any) -> BackgroundRun: ...


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
    **kwargs: Any,
) -> RunResult | BackgroundRun:
    """Call `main(*args, **kwargs)` on a ring of ranks: HorovodRunner's keywords, and a launch magic's options.

        sparkring.run(train, x, y, np=-2, checkpoint_dir="dbfs:/ml/run1", max_restarts=3, learning_rate=0.001).value

    np, driver_log_verbosity: as of HorovodRunner. framework: horovod, torch, tensorflow or plain. The others are the
    options of %%horovod (`--checkpoint-dir`, …) with the same meanings; in the background, a BackgroundRun is returned
    at once.

    A keyword that is an option and also a parameter of `main` is refused. Pass the argument of `main` by position, or
    with functools.partial(main, checkpoint_dir=…); then the keyword is the option.

    Errors as for run_cell(); OptionsError.
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
        background=background,
        timeline=asked_timeline("run()", framework == "horovod", timeline),
    )
    opened = _open_function(main, args, kwargs, checked("run()", options), framework)
    return opened.in_background() if background else opened.to_the_end()


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


class _Run:
    """One run, of which nothing is known that is wrong: it is shown where the cell stands, and yet to be carried out.

    `bring` is told what it has brought.
    """

    def __init__(
        self,
        request: Request,
        options: Options,
        title: str,
        code: str,
        captured: tuple[events.CapturedName, ...],
        large: dict[str, int],
        view: View | None = None,
        data: Data | None = None,
        warm: WarmGang | None = None,
        ranks: Sequence[int] = (),
        directory: Directory | None = None,
        bring: Callable[[RunResult], None] = lambda result: None,
    ) -> None:
        size = options.size or every_slot()
        here = request.framework != "barrier"
        self.wanted = Wanted(options.np, size, dict(options.env), title, options.gpus, data, here)
        if options.background:
            # What is wrong is told at once; and a SparkSession that is to be made is to be the main thread's.
            open_launcher(self.wanted, tell)
            # The notebook may change its arrays before ranks have them, those that are started again included.
            request = request._replace(buffers=tuple(memoryview(bytes(each)) for each in request.buffers))
        started = events.RunStarted(
            time.time(),
            run_store.new_id(),
            title,
            code,
            size,
            "local" if options.np < 0 else "spark",
            request.framework,
            options.logs,
            tuple(ranks),
            warm is not None,
            options.checkpoint_dir,
            captured[: events.CAPTURED_KEPT],
            versions(),
        )
        self.request = request
        self.options = options
        self.warm = warm
        self.ranks = ranks
        self.directory = directory
        self.bring = bring
        self.interrupts = Interrupts()
        if view is None:
            view = open_view(quiet=options.quiet, stop=self.interrupts.request, background=options.background)
        self.recorder = Recorder(view, started)
        if options.np == 0:
            self.recorder.notice(f"-n 0 (every task slot, {size} here) is deprecated: give the number of ranks")
        for name, size_bytes in large.items():
            self.recorder.notice(
                f"`{name}` ({describe.size(size_bytes)}) travels to every rank; "
                "let ranks load or make large data themselves where they can"
            )

    def in_background(self) -> BackgroundRun:
        """Carry it out in a thread of its own."""
        location = None if self.directory is None else self.directory.location
        return BackgroundRun(self.to_the_end, self.recorder, self.interrupts, location)

    def to_the_end(self) -> RunResult:
        """Carry it out; errors as for run_cell()."""
        recorder = self.recorder
        try:
            result = self._on_ranks()
        except TurnLost as lost:
            fail(recorder, lost)
        except BaseException as error:  # raised again: the record and the view must not be left in the middle
            if recorder.record.outcome is None:
                if isinstance(error, KeyboardInterrupt):
                    recorder.close("interrupted", when(error))
                else:
                    said = str(error) if isinstance(error, SparkringError) else f"{type(error).__name__}: {error}"
                    recorder.close("failed", said)
            raise
        global last_result
        last_result = result
        self.bring(result)
        if result.problems:
            raise ResultError(
                f"the cell ran, but {'; '.join(result.problems)}. The other values are in "
                "sparkring.last_result.values.",
                record=result.record,
                values=result.by_rank,
            )
        return result

    def _on_ranks(self) -> RunResult:
        if self.warm is None and self.options.survives:
            return Attempts(
                self.request, self.wanted, self.options, self.recorder, self.interrupts, self.directory
            ).to_the_end()
        request = self.request._replace(checkpoints=Here(run_id=self.recorder.record.run_id))
        if self.warm is not None:
            with self.interrupts, self.warm.take(self.recorder) as gang:
                return self._drive(gang, gang.submit(request, self.ranks))
        launcher = open_launcher(self.wanted, self.recorder.notice)
        with self.interrupts, Gang(launcher, self.wanted.size) as gang:
            turn = gang.submit(request)
            gang.start()
            return self._drive(gang, turn)

    def _drive(self, gang: Gang, turn: Turn) -> RunResult:
        warm = self.warm is not None
        return Drive(gang, turn, self.recorder, self.options, self.interrupts, warm=warm).to_the_end()
