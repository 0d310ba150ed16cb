"""Applies a run's events to its record, saves them in its folder, and refreshes the view."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable

from sparkring.history import events, record, run_store
from sparkring.history.compression import compress_in_background
from sparkring.history.events import Event
from sparkring.history.record import RunRecord
from sparkring.history.run_folder import RunFolder
from sparkring.history.view import View


class Recorder:
    """Applies events to the record, saves them, and keeps the view up to date."""

    def __init__(self, view: View, started: events.RunStarted, notices: Iterable[str] = ()) -> None:
        self._view = view
        self._shows = True
        self._folder = RunFolder(started.run_id)
        self.record = RunRecord(log_folder=str(self._folder.path))
        self.add([started])
        for notice in notices:
            self.notice(notice)

    def add(self, found: Iterable[Event]) -> None:
        replaced: set[str] = set()
        for event in found:
            if isinstance(event, events.Displayed):
                event = record.bounded(self.record, event)
            if isinstance(event, events.TimelinePart):
                self.add(self._folder.take_timeline(event, len(self.record.attempts) or 1))
                continue
            before, self.record = self.record, record.apply(self.record, event)
            if before.displays is not self.record.displays:
                replaced |= set(map(run_store.display_name, before.displays))
            if (notice := self._folder.write(event)) is not None:
                self.record = record.apply(self.record, notice)
        self._folder.flush()
        if replaced:
            self._folder.remove_displays(replaced - set(map(run_store.display_name, self.record.displays)))
        self.record = self._folder.limit(self.record)
        if self._shows:
            self._show(self._view.refresh)

    def _show(self, show: Callable[[RunRecord], None]) -> None:
        """Show the record. If this fails, report the error and show only the end of the run: the run must continue."""
        try:
            show(self.record)
        except Exception as error:  # a front end may raise any error
            self._shows = False
            text = f"the run continues, but can no longer be shown: {type(error).__name__}: {error}"
            self.notice(text)
            with contextlib.suppress(RuntimeWarning):  # Python may have been told to turn warnings into errors
                warnings.warn(f"sparkring: {text}", RuntimeWarning, stacklevel=2)

    def notice(self, text: str, until: events.Until = "") -> None:
        self.add([events.Notice(time.time(), text, until)])

    def show_again(self) -> None:
        """Also show the run in the current cell."""
        self._show(self._view.again)

    def close(
        self, ending: events.Ending, message: str = "", failed_rank: int | None = None, *, at: float | None = None
    ) -> RunRecord:
        """Record that the run has ended, now or at the time `at` (Unix seconds)."""
        try:
            self.add(self._folder.end_timeline(time.time()))
            self.add([events.RunFinished(at or time.time(), ending, message, failed_rank)])
        finally:
            self._folder.close()
        # Even after an error, because the panel would otherwise show the run as still running.
        self._show(self._view.close)
        run_store.prune(slack=run_store.SLACK, newest=self._folder.path)
        if self._folder.has_large_files:
            compress_in_background()
        return self.record
