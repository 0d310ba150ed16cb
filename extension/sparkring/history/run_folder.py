"""Writes a run to its folder while it runs; `run_store.py` says what is in the folder, and reads it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from sparkring.errors import LaunchError
from sparkring.history import events, snapshots
from sparkring.history.compression import beginning, new_file
from sparkring.history.events import Notice, TimelineSaved
from sparkring.history.horovod_timeline import Arriving
from sparkring.history.observer import Observer
from sparkring.history.rank_logs import RankLog, Removed, take_removable
from sparkring.history.record import LARGE_FILE_BYTES, RunRecord, samples_kept
from sparkring.history.run_store import (
    DISPLAYS,
    EVENTS,
    display_name,
    home,
    kept_bytes,
    kept_run_bytes,
    kept_runs,
    timeline_name,
)
from sparkring.history.snapshots import Snapshot

PROGRESS_EVERY_S = 5.0
SEGMENTS, SEGMENT_BYTES = 8, 64 * 1024  # how many segments a rank's part of the logs has, and their least size
EVENTS_PART = 4  # the events may have this part of the bytes that the logs may have


class RunFolder(Observer):
    """Writes one run to its folder. `add` is called with events about the folder itself, which are to be recorded."""

    def __init__(self, run_id: str, add: Callable[[events.Event], object] = lambda event: None) -> None:
        kept_runs(), kept_bytes()  # refuse settings that are not valid before the ranks start
        self._kept_bytes = kept_run_bytes()
        self._add = add
        self.path = home() / run_id
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.mkdir(mode=0o700)
            self._events = (self.path / EVENTS).open("a", encoding="utf-8")
        except OSError as error:
            raise LaunchError(
                f"the run's record cannot be saved in {self.path}: {error.strerror or error}. Set SPARKRING_HOME to a "
                "writable folder."
            ) from error
        self._logs: dict[int, RankLog] = {}
        self._log_bytes, self._most_log_bytes = 0, self._kept_bytes
        self._event_bytes, self._most_event_bytes = 0, self._kept_bytes / EVENTS_PART
        self._removed: list[Removed] = []  # parts of the logs; they are removed when the record says so
        self._is_cut = False  # whether some events have been removed
        self._displays: tuple[events.Displayed, ...] = ()  # those that the record had when it was last seen
        self._display_names: set[str] = set()  # of the displays' files
        # Frequent events that have not been written yet: only the newest event of each reader and of each GPU.
        self._later: dict[tuple[object, ...], events.Event] = {}
        self._due = 0.0
        # In the same way, the newest events of each rank about its use of the machine and of the time.
        self._used: dict[tuple[type, int], events.RankUsed | events.TimeSpent] = {}
        self._used_due = 0.0
        self._began, self._size = 0.0, 1  # of the current attempt
        self._closed = False

    def seen(self, new: Sequence[events.Event], record: RunRecord) -> None:
        """Save the events, and make them visible to other processes. After ended(), nothing is saved."""
        if self._closed or not new:
            return
        try:
            for event in new:
                self._write(event)
            for file in self._files():
                file.flush()
            if record.displays is not self._displays:
                self._remove_displays(record)
            if record.outcome is None:
                self._limit(record)
        except OSError:
            self._later.clear()  # so that ended() writes nothing more
            self._used.clear()
            raise

    def ended(self, record: RunRecord) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # closing the files below will fail, too
            self._catch_up()
        for file in self._files():
            with contextlib.suppress(OSError):
                file.close()

    def dropped(self, error: Exception) -> str:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        return (
            f"this run's record and logs end here: {reason} ({self.path}). The run continues. Free up some space, or "
            "set SPARKRING_HOME to another folder."
        )

    @property
    def has_large_files(self) -> bool:
        """Whether a file of the run is worth compressing."""
        return max(self._log_bytes, self._event_bytes) >= LARGE_FILE_BYTES

    def _remove_displays(self, record: RunRecord) -> None:
        """Remove the files of displays that others have replaced."""
        self._displays = record.displays
        names = set(map(display_name, record.displays))
        for name in self._display_names - names:
            with contextlib.suppress(OSError):
                (self.path / DISPLAYS / name).unlink()
        self._display_names &= names

    def _limit(self, record: RunRecord) -> None:
        """If the logs or the events have become too large, leave out a part of them."""
        if self._removed:
            # Without the snapshot, the record would need the output that is removed.
            self._add_line(snapshots.to_json(Snapshot(record, is_cut=False)))
            self._events.flush()
            for segment in self._removed:
                segment.path.unlink(missing_ok=True)
            self._removed = []
        if self._log_bytes > self._most_log_bytes:
            self._cut_logs()
        if self._event_bytes > self._most_event_bytes:
            self._cut_events(record)

    def _cut_logs(self) -> None:
        self._removed = take_removable([*self._logs.values()], self._kept_bytes / 4)
        if self._removed:
            size_bytes = sum(segment.size_bytes for segment in self._removed)
            self._add(events.LogsCut(time.time(), size_bytes, sum(segment.lines for segment in self._removed)))
            self._log_bytes -= size_bytes
        self._most_log_bytes = max(self._kept_bytes, self._log_bytes + self._kept_bytes / 8)

    def _cut_events(self, record: RunRecord) -> None:
        """Replace all events but the first ones with a snapshot, whose record has the events that are still to come."""
        if not self._is_cut:
            self._is_cut = True
            text = "this run has many events, so the earlier ones are kept only in summary (SPARKRING_KEEP_RUN_MB)"
            self._add(Notice(time.time(), f"{text}: %logs --item and --tensorboard lack some of them."))
            return  # the events are cut when the record has the notice
        self._later.clear()
        self._used.clear()
        self._events.flush()
        file = self.path / EVENTS
        with file.open("rb") as old, new_file(file) as new:
            new.write(beginning(old))
            new.write(f"{snapshots.to_json(Snapshot(record, is_cut=True))}\n".encode())
            self._event_bytes = new.tell()
        self._events.close()
        self._events = file.open("a", encoding="utf-8")
        self._most_event_bytes = self._event_bytes + self._kept_bytes / EVENTS_PART

    def _files(self) -> list[IO[Any]]:
        return [*(log.file for log in self._logs.values()), self._events]

    def _write(self, event: events.Event) -> None:
        match event:
            case events.DataRead(done=True):
                self._later.pop((events.DataRead, event.rank, event.reader), None)
                self._append(event)
            case events.DataRead():
                self._later[events.DataRead, event.rank, event.reader] = event
            case events.DataPlanned():
                self._later[events.DataPlanned, event.rank, event.reader] = event
            case events.GpuUsed():
                self._later[events.GpuUsed, event.rank, event.address] = event
            case events.AtLine():
                pass  # a saved run has no use for it
            case events.RankUsed() | events.TimeSpent():
                self._used[type(event), event.rank] = event
            case events.RunStarted() | events.AttemptStarted():
                self._catch_up()  # the ranks of the next attempt may be fewer
                self._append(event)
                self._began, self._size = event.time, event.size
            case events.ModelGpuUsed():
                self._later[events.ModelGpuUsed, event.host, event.gpu.address] = event
            case events.RunFinished():
                self._catch_up()
                self._append(event)
            case _:
                self._append(event)
        if self._later and event.time >= self._due:
            self._store(self._later)
            self._due = event.time + PROGRESS_EVERY_S
        if self._used and event.time >= self._used_due:
            self._store(self._used)
            # The longer the run, the longer the pause: the record would drop most of the earlier events.
            pause_s = (event.time - self._began) / samples_kept(self._size)
            self._used_due = event.time + max(PROGRESS_EVERY_S, pause_s)

    def _catch_up(self) -> None:
        self._store(self._later)
        self._store(self._used)

    def _store(self, later: dict[Any, Any]) -> None:
        for event in later.values():
            self._append(event)
        later.clear()

    def _append(self, event: events.Event) -> None:
        more: dict[str, Any] = {}
        if isinstance(event, events.Output):
            log = self._logs.get(event.rank)
            if log is None:
                log = self._logs[event.rank] = RankLog(self.path, event.rank)
            segment_bytes = max(SEGMENT_BYTES, self._kept_bytes / SEGMENTS / self._size)
            more = {"start": log.write(event.data, segment_bytes), "size": len(event.data)}
            self._log_bytes += len(event.data)
        if isinstance(event, events.Displayed) and event.data:
            more = {"file": display_name(event)}
            self._display_names.add(more["file"])
            (self.path / DISPLAYS).mkdir(exist_ok=True, mode=0o700)
            (self.path / DISPLAYS / more["file"]).write_bytes(event.data)
        self._add_line(events.to_json(event, **more))

    def _add_line(self, line: str) -> None:
        self._events.write(f"{line}\n")
        self._event_bytes += len(line) + 1  # JSON is ASCII


class TimelineFiles:
    """Saves the timelines of a run's attempts, which arrive in pieces, in the run's folder `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._timeline: tuple[int, Arriving] | None = None  # an attempt's number, and its unfinished timeline

    def take(self, part: events.TimelinePart, attempt: int) -> list[TimelineSaved | Notice]:
        """Save a piece of an attempt's timeline. Return what to report if the timeline is complete or saving fails."""
        reports: list[TimelineSaved | Notice] = []
        if self._timeline is not None and self._timeline[0] != attempt:
            reports += self.end(part.time)
        try:
            if self._timeline is None:
                if part.last and not Arriving.holds_any(part.data):
                    return [Notice(part.time, "no timeline: Horovod starts one only when rank 0 calls hvd.init().")]
                self._timeline = attempt, Arriving((self._path / timeline_name(attempt)).open("w", encoding="utf-8"))
            self._timeline[1].add(part.data)
        except OSError as error:
            problem = f"the timeline could not be saved in {self._path}: {error.strerror or error}"
            reports.append(Notice(part.time, problem))
            part = part._replace(last=True)
        if part.last:
            reports += self.end(part.time, whole=True, cut=part.cut)
        return reports

    def end(self, time: float, *, whole: bool = False, cut: int = 0) -> list[TimelineSaved | Notice]:
        """Close the timeline that is being saved, if any. Return its summary, or a Notice if it cannot be saved."""
        if self._timeline is None:
            return []
        (attempt, arriving), self._timeline = self._timeline, None
        try:
            return [arriving.end(time, timeline_name(attempt), attempt, whole=whole, cut=cut)]
        except OSError as error:
            return [Notice(time, f"the timeline could not be saved in {self._path}: {error.strerror or error}")]
