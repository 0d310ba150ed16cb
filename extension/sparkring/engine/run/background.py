"""Runs in the background, each in its own thread.

Interrupting the kernel affects only the main thread, so it ends the cell that is running, but no background run.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from sparkring.engine.run.recorder import Recorder
from sparkring.errors import OptionsError, StillRunning
from sparkring.history import describe, run_store
from sparkring.history.record import RunRecord
from sparkring.runtime.interrupts import Interrupts, interrupted
from sparkring.runtime.kernel import current_cell, tell
from sparkring.runtime.storage import Location


class _Shown(Protocol):
    def _repr_pretty_(self, printer: Any, cycle: bool) -> None: ...


Result = TypeVar("Result", bound=_Shown)


class BackgroundRun(Generic[Result]):
    """A run in the background. The notebook does not wait for it.

    `result(timeout_s)` waits for the run and returns its result, or raises its error (KeyboardInterrupt if the run was
    stopped). `done` says whether the run has ended. `stop()` ends the run. `show()` shows the run's panel again, and so
    does a cell whose last expression is this object. `record` is the current RunRecord. `run_id` identifies the run in
    %runs and %logs.
    """

    def __init__(
        self, work: Callable[[], Result], recorder: Recorder, interrupts: Interrupts, directory: Location | None = None
    ) -> None:
        self.run_id = recorder.record.run_id
        self._directory = directory
        self._recorder = recorder
        self._interrupts = interrupts
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._asked = False
        self._started_in = current_cell()
        self._over = threading.Event()
        # The thread is a daemon. Otherwise, the interpreter would wait for the thread at exit, before it calls
        # stop_all().
        self._thread = threading.Thread(target=self._carry_out, args=(work,), name="sparkring-background", daemon=True)
        _going[self.run_id] = self
        self._thread.start()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    @property
    def record(self) -> RunRecord:
        return self._recorder.record

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the run, and return its result or raise its error. Raise StillRunning after `timeout_s` seconds."""
        self._asked = True
        try:
            over = self._over.wait(timeout_s)
        except KeyboardInterrupt:
            raise interrupted(f"the run continues: end it with .stop() or `%runs --stop {self.run_id}`") from None
        if not over:
            raise StillRunning(f"run {self.run_id} has not ended after {timeout_s:g} s and continues: {self}")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self, *, wait: bool = True) -> None:
        """End the run, as the panel's Stop button does. Wait for its processes to exit, unless `wait` is False."""
        self._interrupts.request()
        if not wait:
            return
        try:
            self._thread.join()
        except KeyboardInterrupt:
            raise interrupted("the run is ending, but some of its processes have not exited yet") from None

    def saves_in(self, directory: Location) -> bool:
        mine = self._directory if self.record.outcome is None else None  # its view may still be drawing the end
        return mine is not None and (mine.fs, mine.path) == (directory.fs, directory.path)

    def show(self) -> None:
        """Show the run's panel again, in the current cell, for example if the first panel has been cleared."""
        self._recorder.show_again()

    def __repr__(self) -> str:
        return f"BackgroundRun({self.run_id}: {describe.closing(self.record, time.time())})"

    def _ipython_display_(self) -> None:
        """Show the panel, except in the cell that started the run, which already shows it."""
        if current_cell() != self._started_in:
            self.show()
        raise NotImplementedError  # this tells IPython to print the text of _repr_pretty_(), too

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the text for Out[]: the ranks' values, which the panel does not show, or how to wait for them."""
        if len(printer.stack) > 1 or self._error is not None:
            printer.text(repr(self))
        elif self._result is not None:
            self._result._repr_pretty_(printer, cycle)
        else:
            # This text stays in the notebook, so it does not state the run's progress.
            printer.text(f"run {self.run_id} in the background: .result() waits for its result, .stop() ends it")

    def _carry_out(self, work: Callable[[], Result]) -> None:
        """Do the work, and keep its result or error. Runs in the run's thread."""
        try:
            self._result = work()
        except BaseException as error:  # catch every kind of error, because result() raises it again
            _empty_frames(error)
            self._error = error
        finally:
            del work
            _going.pop(self.run_id, None)
            self._over.set()
        if self._error is not None and not self._asked and not isinstance(self._error, KeyboardInterrupt):
            problem = f"{type(self._error).__name__}: {describe.first_line(str(self._error))}"
            tell(f"run {self.run_id} ({self.record.title}) in the background: {problem} (.result() raises this error)")


def _empty_frames(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks, which would keep alive everything that was sent to ranks."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


# The runs that have not ended, by id, in the order in which they were started.
_going: dict[str, BackgroundRun[Any]] = {}

# A forked process inherits `_going`. Without this hook, it would end its parent's runs when it exits.
os.register_at_fork(after_in_child=_going.clear)


def going() -> list[BackgroundRun[Any]]:
    """Return this process's background runs that have not ended, the most recently started first."""
    return list(_going.values())[::-1]


def find(name: str) -> BackgroundRun[Any] | None:
    """Return the background run that `name` refers to, or None if there is no such run.

    `name` is the run's id, the beginning or end of its id, or its title.
    """
    runs = going()
    by_id = (run for run in runs if run_store.is_named(name, run.run_id))
    return next(by_id, None) or next((run for run in runs if run.record.title == name), None)


def stop(name: str) -> BackgroundRun[Any]:
    """End the run that `name` refers to (see find()), and return it. Raises OptionsError if there is no such run."""
    run = find(name)
    if run is None:
        others = ", ".join(run.run_id for run in going())
        there = f"; running: {others}." if others else ", and there are no other runs."
        raise OptionsError(f"no run called {name!r} is running in the background of this notebook{there}")
    run.stop()
    return run


@atexit.register
def stop_all() -> None:
    """End all runs in the background, and wait until all of their processes have exited."""
    runs = going()
    for run in runs:
        run.stop(wait=False)
    for run in runs:
        run.stop()
