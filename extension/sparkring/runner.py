"""One run from beginning to end: launch, watch, record, show, bring back values, and end well or ill."""

from __future__ import annotations

import operator
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkring import events, runs
from sparkring.capture import LARGE_BYTES, Captured
from sparkring.errors import ResultError, RunFailed, RunTimeout, SlotsError, SparkringError
from sparkring.gang import FAILURE_GRACE_S, INTERRUPT_GRACE_S, LEAVE_GRACE_S, Gang, Request, Value
from sparkring.launchers.base import Launcher
from sparkring.launchers.local import LocalLauncher
from sparkring.options import Logs, Options
from sparkring.packing import pack_call
from sparkring.record import RunRecord
from sparkring.recorder import Recorder
from sparkring.views import View, open_view, summary

if TYPE_CHECKING:
    from sparkring.launchers.spark import Data

POLL_S = 0.1
STACKS_WAIT_S = 1.0
EVERYTHING_ENDS_S = 5.0  # beyond this, close() ends the rest by force

last_result: RunResult | None = None


class RunResult:
    """What a run brought back.

    `value`: rank 0's last expression (or what the function returned there); `values`: that of each
    rank, in rank order; `pulled`: the names of --pull, from rank 0; `record`: the RunRecord;
    `logs(rank)`: everything that the rank printed.
    """

    def __init__(self, values: dict[int, Any], pulled: dict[str, Any], record: RunRecord) -> None:
        self._values = values
        self.pulled = pulled
        self.record = record

    @property
    def value(self) -> Any:
        return self._values.get(0)

    @property
    def values(self) -> list[Any]:
        return [self._values.get(rank) for rank in range(self.record.size)]

    def logs(self, rank: int = 0) -> str:
        """Everything that `rank` wrote to stdout and stderr, in order of arrival; bad bytes as \\xNN."""
        if not 0 <= rank < self.record.size:
            raise IndexError(f"there is no rank {rank}: this run had ranks 0 to {self.record.size - 1}")
        return runs.log(Path(self.record.log_folder), rank)

    def __repr__(self) -> str:
        took = summary.duration(self.record.ended - self.record.started)
        shown = self.record.ranks[0].value if self.record.ranks else ""
        value = f", value={shown}" if shown else ""
        return f"RunResult({summary.rank_count(self.record.size)}, {self.record.outcome} in {took}{value})"


def run_cell(
    source: str,
    captured: Captured,
    options: Options,
    *,
    framework: str,
    title: str,
    code: str,
    namespace: Mapping[str, Any] | None = None,
    view: View | None = None,
) -> RunResult:
    """Run a cell's source on a ring of ranks. RunFailed, LaunchError or KeyboardInterrupt if it did not end well.

    `namespace` is the notebook's, for options that name something in it.
    """
    barrier = framework == "barrier"
    request = Request("cell", captured.payload, source, options.pull, options.autolog, barrier)
    large = {name.name: name.size_bytes or 0 for name in captured.large}
    data = None
    if options.data:
        from sparkring.launchers.spark import find_data

        data = find_data(options.data, namespace or {}, counted=not options.np)
        options = replace(options, np=options.np or data.ranks())
    return _run(request, options, framework, title, code, large, view, data)


def run_function(
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    options: Options,
    *,
    framework: str,
    namespace: dict[str, Any] | None = None,
) -> RunResult:
    """Run `function(**kwargs)` on a ring of ranks; errors as for run_cell()."""
    title = options.name or getattr(function, "__qualname__", type(function).__name__)
    payload = pack_call(function, kwargs, namespace)
    request = Request("call", payload, pull=(), autolog=options.autolog)
    large = {title: len(payload)} if len(payload) > LARGE_BYTES else {}
    return _run(request, options, framework, title, _source_of(function), large, None)


class HorovodRunner:
    """Runs a training function on a ring of Horovod ranks, with the signature that notebooks know.

    np < 0: that many processes on this machine; np > 0: that many Spark barrier tasks; np = 0: every
    task slot (deprecated). `driver_log_verbosity` is "all", or "log_callback_only": then the notebook
    shows only what log_to_driver and LogCallback send, and everything else is in the run's logs.

    The API is that of sparkdl's public documentation, where this class is described.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        try:
            np = operator.index(np)
        except TypeError:
            raise TypeError(f"np must be a whole number, not {type(np).__name__}") from None
        logs: dict[str, Logs] = {"all": "all", "log_callback_only": "callbacks"}
        if driver_log_verbosity not in logs:
            raise ValueError(f"driver_log_verbosity is 'all' or 'log_callback_only', not {driver_log_verbosity!r}")
        if np == 0:
            warnings.warn(
                "np=0 (every task slot) is deprecated: give the number of ranks",
                DeprecationWarning,
                stacklevel=2,
            )
        self.num_processor = np
        self._logs = logs[driver_log_verbosity]

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` on every rank; returns what rank 0 returned.

        Both are packed with cloudpickle. RunFailed says which rank failed and why.
        """
        if not callable(main):
            raise TypeError(f"run() takes a function, not {type(main).__name__}")
        namespace = getattr(sys.modules.get("__main__"), "__dict__", None)
        options = Options(np=self.num_processor, logs=self._logs)
        return run_function(main, kwargs, options, framework="horovod", namespace=namespace).value


def _run(
    request: Request,
    options: Options,
    framework: str,
    title: str,
    code: str,
    large: dict[str, int],
    view: View | None,
    data: Data | None = None,
) -> RunResult:
    size = options.size or _every_slot()
    where = "local" if options.np < 0 else "spark"
    started = events.RunStarted(time.time(), runs.new_id(), title, code, size, where, framework, options.logs)
    recorder = Recorder(view if view is not None else open_view(quiet=options.quiet), started)
    if options.np == 0:
        recorder.notice(f"-n 0 (every task slot, {size} here) is deprecated: give the number of ranks")
    for name, size_bytes in large.items():
        recorder.notice(
            f"`{name}` ({summary.size(size_bytes)}) travels to every rank; "
            "let ranks load or make large data themselves where they can"
        )
    try:
        launcher = _launcher(options, size, title, recorder.notice, data, here=not request.barrier)
        with _Interrupts() as interrupts, Gang(launcher, size, framework) as gang:
            gang.submit(request)
            gang.start()
            return _Drive(gang, recorder, options, interrupts).to_the_end()
    except BaseException as error:  # raised again: the record and the view must not be left in the middle
        if recorder.record.outcome is None:
            said = str(error) if isinstance(error, SparkringError) else f"{type(error).__name__}: {error}"
            recorder.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", said)
        raise


class _Drive:
    """Watches one request on one gang until it has ended, in whichever way."""

    def __init__(self, gang: Gang, recorder: Recorder, options: Options, interrupts: _Interrupts) -> None:
        self.gang = gang
        self.recorder = recorder
        self.options = options
        self.interrupts = interrupts

    def to_the_end(self) -> RunResult:
        began = time.monotonic()
        slow_told = False
        while not self.gang.done:
            self.recorder.add(self.gang.poll(POLL_S))
            now = time.monotonic()
            if self.interrupts.seen:
                self._interrupted()
            if self.gang.failed_rank is not None:
                self._failed(self.gang.failed_rank)
            if self.options.timeout_s is not None and now - began > self.options.timeout_s:
                self._timed_out(self.options.timeout_s)
            if not self.gang.up and not slow_told and now - began > self.gang.launcher.slow_after_s:
                slow_told = True
                self.recorder.notice(self._what_it_waits_for())
        return self._finished()

    def _finished(self) -> RunResult:
        self.gang.leave()
        self._until_gone(LEAVE_GRACE_S)
        if not self.gang.gone:
            self.recorder.notice(
                f"some ranks did not end within {LEAVE_GRACE_S:.0f} s after the cell (a thread or an atexit "
                "function that hangs?) and were killed"
            )
        values, pulled, problems = self._values()
        message = "; ".join(problems)
        self.gang.close()
        done = self.recorder.close("failed" if problems else "finished", message)
        global last_result
        last_result = RunResult(values, pulled, done)
        if problems:
            raise ResultError(
                f"the cell ran, but {message}. The other values are in sparkring.last_result.values.",
                record=done,
                values=values,
            )
        return last_result

    def _failed(self, rank: int) -> None:
        self.gang.stop(signal.SIGTERM, FAILURE_GRACE_S)
        self._until_gone(EVERYTHING_ENDS_S)
        values, _, _ = self._values()
        self.gang.close()
        failure = self.recorder.record.ranks[rank].failure
        done = self.recorder.close("failed", failure.summary if failure else "", rank)
        raise RunFailed(summary.explain_failure(done), record=done, values=values)

    def _interrupted(self) -> None:
        running = [rank.rank for rank in self.recorder.record.ranks if rank.state == "running"]
        self.gang.stop(signal.SIGINT, INTERRUPT_GRACE_S)
        self._until_gone(INTERRUPT_GRACE_S + EVERYTHING_ENDS_S)
        self.gang.close()
        message = f"{summary.rank_count(len(running))} ended" if running else "before the ranks were up"
        self.recorder.close("interrupted", message)
        raise KeyboardInterrupt(f"sparkring: interrupted, {message}")

    def _timed_out(self, timeout_s: float) -> None:
        self.gang.ask_for_stacks()
        until = time.monotonic() + STACKS_WAIT_S
        while time.monotonic() < until and any(
            rank.state == "running" and rank.stack is None for rank in self.recorder.record.ranks
        ):
            self.recorder.add(self.gang.poll(POLL_S))
        # What they were doing when the time was up, before they are stopped.
        message = summary.explain_timeout(self.recorder.record, timeout_s)
        self.gang.stop(signal.SIGINT, INTERRUPT_GRACE_S)
        self._until_gone(INTERRUPT_GRACE_S + EVERYTHING_ENDS_S)
        values, _, _ = self._values()
        self.gang.close()
        done = self.recorder.close("timed out", f"after {timeout_s:g} s")
        raise RunTimeout(message, record=done, values=values)

    def _until_gone(self, most_s: float) -> None:
        deadline = time.monotonic() + most_s
        # Members that have not become ranks yet are close()'s affair.
        while self.gang.up and not self.gang.gone and time.monotonic() < deadline:
            self.recorder.add(self.gang.poll(POLL_S))
        # Frames that were already in the queue behind the last goodbye.
        self.recorder.add(self.gang.poll(0.0))

    def _what_it_waits_for(self) -> str:
        joined = self.recorder.record.joined
        reason = self.gang.launcher.waits_for() if not joined else ""
        return f"waiting for ranks to start: {joined} of {self.gang.size} have dialled home" + (
            reason and f" ({reason})"
        )

    def _values(self) -> tuple[dict[int, Any], dict[str, Any], list[str]]:
        """The values by rank, the pulled names, and what could not be brought back."""
        values: dict[int, Any] = {}
        pulled: dict[str, Any] = {}
        problems = [f"rank 0 has no variable `{name}` to pull" for name in self.gang.missing]
        for rank, named in enumerate(self.gang.values):
            for name, packed in named.items():
                what = f"`{name}`" if name else "the value"
                try:
                    value = _unpacked(packed)
                except SparkringError as error:
                    problems.append(f"{what} of rank {rank} {error}")
                    continue
                if name:
                    pulled[name] = value
                else:
                    values[rank] = value
        return values, pulled, problems


class _Interrupts:
    """While open, an interrupt (Stop, Ctrl-C) is noted instead of raised in the middle of something.

    Outside the main thread Python offers no such choice; there the interrupt belongs to the main thread.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: object) -> None:
        self.seen = True


def _launcher(
    options: Options, size: int, title: str, say: Callable[[str], None], data: Data | None, *, here: bool
) -> Launcher:
    environment = dict(options.env)
    if options.np < 0:
        return LocalLauncher(environment)
    from sparkring.launchers.spark import SparkLauncher, find_session

    session = find_session(size, say, here=here) if data is None else data.session()
    return SparkLauncher(session, size, environment, title, data, here=here)


def _every_slot() -> int:
    """The number of ranks that np=0 stands for."""
    from sparkring.launchers.spark import find_session, slots

    found = slots(find_session(0, print).sparkContext)
    if found.total == 0:
        raise SlotsError(f"-n 0 takes every task slot, and there is none ({found.master}): add executors.")
    return found.total


def _unpacked(packed: Value) -> Any:
    import cloudpickle

    if packed.error:
        raise SparkringError(f"is a {packed.type_name}, which cannot be pickled ({packed.error})")
    try:
        # From a peer that has proved the gang's secret, and so is as trusted as this process.
        return cloudpickle.loads(packed.parts[0], buffers=packed.parts[1:])
    except Exception as error:  # whatever the value's class does when it is rebuilt
        raise SparkringError(
            f"is a {packed.type_name}, which cannot be rebuilt here ({type(error).__name__}: {error})"
        ) from error


def _source_of(function: Callable[..., Any]) -> str:
    import inspect

    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
