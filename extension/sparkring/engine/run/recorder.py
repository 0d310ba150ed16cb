"""Applies a run's events to its record, and tells the observers of the run about them."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sparkring.history import events, metrics, record, run_store
from sparkring.history.compression import compress_in_background
from sparkring.history.events import Event
from sparkring.history.observer import Observer
from sparkring.history.record import RunRecord
from sparkring.history.run_folder import RunFolder, TimelineFiles
from sparkring.history.step_traces import StepTraces
from sparkring.history.view import View
from sparkring.products import OBSERVERS


class Recorder:
    """Applies events to the record of a run, and tells the run's observers.

    The observers are the saved run, those that OBSERVERS makes, and the view, in this order.
    """

    def __init__(
        self, view: View, started: events.RunStarted, notices: Iterable[str] = (), first: Sequence[Event] = ()
    ) -> None:
        """`first` holds events that belong to the start: no observer sees the run without them."""
        self._more: list[Event] = []  # what the observers' work has added to the events
        self._folder = RunFolder(started.run_id, self._more.append)
        self._timelines = TimelineFiles(self._folder.path)
        self._traces = StepTraces(self._folder.path)
        self._shown = _ShownRun(view)
        self._observers: list[Observer] = [self._folder]
        self._dropped: list[Observer] = []
        self._is_over = False
        self.record = record.apply(RunRecord(log_folder=str(self._folder.path)), started)
        for make in OBSERVERS:
            try:
                self._observers.append(make())
            except Exception as error:  # an observer may raise any error
                name = getattr(make, "__qualname__", repr(make))
                self._note(f"the run continues, but {name} does not follow it: {type(error).__name__}: {error}")
        self._observers.append(self._shown)
        for observer in self._observers:
            self._tell(observer, observer.started, self.record)
        self._tell_all([started, *self._applied(first)])
        for notice in notices:
            self.notice(notice)

    def add(self, new_events: Iterable[Event]) -> None:
        self._tell_all(self._applied(new_events))

    def _applied(self, new_events: Iterable[Event]) -> list[Event]:
        """Apply events to the record. Return the events that are recorded."""
        recorded: list[Event] = []
        for event in new_events:
            if isinstance(event, events.Displayed):
                event = record.bounded(self.record, event)
            elif isinstance(event, events.TimelinePart):
                recorded += self._applied(self._timelines.take(event, len(self.record.attempts) or 1))
                continue
            elif isinstance(event, events.TracePart):
                recorded += self._applied(self._traces.take(event))
                continue
            self.record = record.apply(self.record, event)
            recorded.append(event)
        return recorded

    def _tell_all(self, recorded: Sequence[Event]) -> None:
        """Tell the observers about these events, and then about those that this has added."""
        while not self._is_over:
            for observer in self._observers:
                self._tell(observer, observer.seen, recorded, self.record)
            if not self._more:
                return
            recorded = self._applied(self._added())

    def _tell(self, observer: Observer, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method of an observer. If it raises an error, drop the observer: the run must continue."""
        if observer in self._dropped:
            return
        try:
            method(*arguments)
        except Exception as error:  # an observer may raise any error
            self._dropped.append(observer)
            self._note(observer.dropped(error))

    def _note(self, text: str) -> None:
        self._more.append(events.Notice(time.time(), text))

    def _added(self) -> list[Event]:
        added = self._more.copy()
        self._more.clear()
        return added

    def notice(self, text: str, until: events.Until = "") -> None:
        self.add([events.Notice(time.time(), text, until)])

    def show_again(self) -> None:
        """Also show the run in the current cell."""
        self._tell(self._shown, self._shown.again, self.record)
        self.add(self._added())

    def close(
        self, ending: events.Ending, message: str = "", failed_rank: int | None = None, *, at: float | None = None
    ) -> RunRecord:
        """Record that the run has ended, now or at the time `at` (Unix seconds)."""
        try:
            self.add([*self._timelines.end(time.time()), *self._traces.end(time.time())])
            measured = tuple(metrics.means(self.record).items())
            self.add([events.RunFinished(at or time.time(), ending, message, failed_rank, measured)])
        except BaseException:  # raised again; the files must not stay open
            self._folder.ended(self.record)
            raise
        self._is_over = True
        for observer in self._observers:
            if observer in self._dropped:
                with contextlib.suppress(Exception):  # it only has to let go of what it holds
                    observer.ended(self.record)
            else:
                self._tell(observer, observer.ended, self.record)
                self._applied(self._added())
        run_store.prune(slack=run_store.SLACK, newest=self._folder.path)
        if self._folder.has_large_files:
            compress_in_background()
        return self.record


class _ShownRun(Observer):
    """Keeps a view of the run up to date. It is told about the end even if it has failed, as any observer is.

    Otherwise, a panel would show the run as still running.
    """

    def __init__(self, view: View) -> None:
        self._view = view

    def seen(self, events: Sequence[Event], record: RunRecord) -> None:
        self._view.refresh(record)

    def ended(self, record: RunRecord) -> None:
        self._view.close(record)

    def again(self, record: RunRecord) -> None:
        self._view.again(record)

    def dropped(self, error: Exception) -> str:
        text = f"the run continues, but can no longer be shown: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeWarning):  # Python may have been told to turn warnings into errors
            warnings.warn(f"sparkring: {text}", RuntimeWarning, stacklevel=2)
        return text
