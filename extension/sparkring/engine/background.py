"""Runs in the background, each in its own thread. The notebook does not wait for them.

An interrupt of the kernel reaches only the main thread: it ends the cell that is running, but not these runs.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from sparkring.engine.recorder import Recorder
from sparkring.engine.result import RunResult
from sparkring.errors import OptionsError, StillRunning
from sparkring.history import describe, run_store
from sparkring.history.record import RunRecord
from sparkring.runtime.interrupts import Interrupts, interrupted
from sparkring.runtime.kernel import current_cell, tell
from sparkring.runtime.storage import Location


class BackgroundRun:
    """A run in the background. The notebook does not wait for it.

    `result(timeout_s)` waits for the run and returns its RunResult, or raises its error (KeyboardInterrupt if it was
    stopped). `done`: whether the run has ended. `stop()` ends it. `show()`, or the object as the last expression of a
    cell, shows its panel again. `record`: the current RunRecord. `run_id`: its name in %runs and %logs.
    """

    def __init__(
        self,
        work: Callable[[], RunResult],
        recorder: Recorder,
        interrupts: Interrupts,
        directory: Location | None = None,
    ) -> None:
        self.run_id = recorder.record.run_id
        self._directory = directory
        self._recorder = recorder
        self._interrupts = interrupts
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._asked = False
        self._started_in = current_cell()
        self._over = threading.Event()
        # A daemon: the interpreter does not wait for it at exit, but calls stop_all().
        self._thread = threading.Thread(target=self._carry_out, args=(work,), name="sparkring-background", daemon=True)
        _going[self.run_id] = self
        self._thread.start()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    @property
    def record(self) -> RunRecord:
        return self._recorder.record

    def result(self, timeout_s: float | None = None) -> RunResult:
        """Wait for the run; return its result or raise its error. StillRunning: it has not ended after `timeout_s`."""
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
        """End the run as the panel's Stop does. Returns when its processes have ended, or at once with wait=False."""
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
        """Print the text of Out[]: the ranks' values, which the panel does not show, or how to wait for them."""
        if len(printer.stack) > 1 or self._error is not None:
            printer.text(repr(self))
        elif self._result is not None:
            self._result._repr_pretty_(printer, cycle)
        else:
            # This text stays in the notebook after the run has ended, so it does not say how far the run is.
            printer.text(f"run {self.run_id} in the background: .result() waits for its result, .stop() ends it")

    def _carry_out(self, work: Callable[[], RunResult]) -> None:
        """In the run's own thread: do the work, and keep its result or error."""
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
    """Clear the frames of the error and its causes: they hold references to everything that was sent to the ranks."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


_going: dict[str, BackgroundRun] = {}  # by id, in the order of their starts

# When a forked process exits, it must not end its parent's runs.
os.register_at_fork(after_in_child=_going.clear)


def going() -> list[BackgroundRun]:
    """This process's runs in the background, the most recently started first."""
    return list(_going.values())[::-1]


def find(name: str) -> BackgroundRun | None:
    """The run in the background called `name`: its id, the beginning or the end of its id, or its title; or None."""
    found = going()
    by_id = (each for each in found if run_store.is_named(name, each.run_id))
    return next(by_id, None) or next((each for each in found if each.record.title == name), None)


def stop(name: str) -> BackgroundRun:
    """End the run called `name`, and return it. OptionsError if no such run is running."""
    found = find(name)
    if found is None:
        others = ", ".join(run.run_id for run in going())
        raise OptionsError(
            f"no run called {name!r} is running in the background of this notebook"
            + (f"; running: {others}." if others else " (no run is).")
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
