"""Runs in the background, each in its own thread. The notebook does not wait for them.

The kernel's interrupt reaches only the main thread: it ends what the notebook runs, but not these runs.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from sparkring.engine.recorder import Recorder
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
    """A run in the background, which leaves the notebook free.

    `result(timeout_s)` waits for the run and returns its result, or raises its error (KeyboardInterrupt if it was
    stopped). `done`: whether the run has ended. `stop()` ends it. `show()`, or the object as the last expression of a
    cell, shows its panel again. `record`: the current RunRecord. `run_id`: its name in %runs and %logs.
    """

    def __init__(
        self,
        work: Callable[[], Result],
        recorder: Recorder,
        interrupts: Interrupts,
        directory: Location | None = None,
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
        # A daemon, which the interpreter does not wait for when it exits; stop_all() is called then.
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
        """Wait for the run; return its result or raise its error. StillRunning: `timeout_s` seconds have passed."""
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
        """End the run as Stop does. Returns when all of its processes have ended, or at once with wait=False."""
        self._interrupts.request()
        if wait:
            self._thread.join()

    def saves_in(self, directory: Location) -> bool:
        mine = self._directory
        return mine is not None and (mine.fs, mine.path) == (directory.fs, directory.path)

    def show(self) -> None:
        """Show the run's panel again, in the current cell, for example if the first one has been cleared."""
        self._recorder.show_again()

    def __repr__(self) -> str:
        return f"BackgroundRun({self.run_id}: {describe.closing(self.record, time.time())})"

    def _ipython_display_(self) -> None:
        """Show the panel, except in the cell that has started the run and already shows it."""
        if current_cell() != self._started_in:
            self.show()
        raise NotImplementedError  # IPython then shows the text form

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """IPython's Out[]: what the panel above it does not show."""
        if len(printer.stack) > 1 or self._error is not None:
            printer.text(repr(self))
        elif self._result is not None:
            self._result._repr_pretty_(printer, cycle)
        else:
            # This text stays in the notebook after the run has ended, so it does not say how far the run is.
            printer.text(f"run {self.run_id} in the background: .result() waits for its result, .stop() ends it")

    def _carry_out(self, work: Callable[[], Result]) -> None:
        """Do the work and keep its result or error; runs in this run's own thread."""
        try:
            self._result = work()
        except BaseException as error:  # raised again by result()
            _empty_frames(error)
            self._error = error
        finally:
            del work
            _going.pop(self.run_id, None)
            self._over.set()
        if self._error is not None and not self._asked and not isinstance(self._error, KeyboardInterrupt):
            said = f"{type(self._error).__name__}: {describe.first_line(str(self._error))}"
            tell(f"run {self.run_id} ({self.record.title}) in the background: {said} (.result() raises it)")


def _empty_frames(error: BaseException | None) -> None:
    """Clear the frames of the error and its causes, which refer to everything that was sent to the ranks."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


_going: dict[str, BackgroundRun[Any]] = {}  # by id, the last started comes last

# A forked process must not end, at its exit, what belongs to this one.
os.register_at_fork(after_in_child=_going.clear)


def going() -> list[BackgroundRun[Any]]:
    """The runs of this process in the background, the last started first."""
    return list(_going.values())[::-1]


def find(name: str) -> BackgroundRun[Any] | None:
    """The run in the background called `name`: its id, the beginning or the end of its id, or its title; or None."""
    found = going()
    by_id = (each for each in found if run_store.is_named(name, each.run_id))
    return next(by_id, None) or next((each for each in found if each.record.title == name), None)


def stop(name: str) -> BackgroundRun[Any]:
    """End the run called `name`, and return it. OptionsError if no such run is running."""
    found = find(name)
    if found is None:
        others = ", ".join(run.run_id for run in going())
        raise OptionsError(
            f"no run called {name!r} is running in the background of this notebook"
            + (f"; running: {others}." if others else ", and neither is any other.")
        )
    found.stop()
    return found


@atexit.register
def stop_all() -> None:
    """End all runs in the background; returns when all of their processes have ended."""
    found = going()
    for each in found:
        each.stop(wait=False)
    for each in found:
        each.stop()
