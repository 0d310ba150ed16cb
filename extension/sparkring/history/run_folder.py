"""Writes a run to its folder while it runs; `run_store.py` says what is in the folder, and reads it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import IO, Any

from sparkring.errors import LaunchError
from sparkring.history import events, snapshots
from sparkring.history.compression import beginning, new_file
from sparkring.history.events import Notice, TimelineSaved
from sparkring.history.horovod_timeline import Arriving
from sparkring.history.rank_logs import RankLog, take_removable
from sparkring.history.record import LARGE_FILE_BYTES, RunRecord, apply, samples_kept
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


class RunFolder:
    """Writes one run to its folder. After an error, it writes nothing more and reports this once; the run goes on."""

    def __init__(self, run_id: str) -> None:
        kept_runs(), kept_bytes()  # refuse settings that are not valid before the ranks start
        self._kept_bytes = kept_run_bytes()
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
        self._is_cut = False  # whether some events have been removed
        # Frequent events that have not been written yet: only the newest event of each reader and of each GPU.
        self._later: dict[tuple[object, ...], events.Event] = {}
        self._due = 0.0
        # In the same way, the newest event of each rank about its use of the machine.
        self._used: dict[int, events.RankUsed] = {}
        self._used_due = 0.0
        self._began, self._size = 0.0, 1  # of the current attempt
        self._timeline: tuple[int, Arriving] | None = None  # an attempt's number, and its unfinished timeline
        self._broken: str | None = None
        self._closed = False
        self._is_reported = False

    def write(self, event: events.Event) -> Notice | None:
        """Save one event. Return a Notice the first time that saving fails. After close(), nothing is saved."""
        if self._closed:
            return None
        if self._broken is None:
            try:
                self._write(event)
            except OSError as error:
                self._broken = error.strerror or str(error)
        if self._broken is None or self._is_reported:
            return None
        self._is_reported = True
        return Notice(
            event.time,
            f"this run's record and logs end here: {self._broken} ({self.path}). The run continues. Free up some "
            "space, or set SPARKRING_HOME to another folder.",
        )

    def flush(self) -> None:
        """Make what was written visible to other processes."""
        if self._closed:
            return
        try:
            for file in self._files():
                file.flush()
        except OSError as error:
            self._broken = self._broken or error.strerror or str(error)

    def limit(self, record: RunRecord) -> RunRecord:
        """If the logs or the events have become too large, leave out a part of them.

        `record` is the record of all events so far. Return it, with what has been left out.
        """
        is_within = self._log_bytes <= self._most_log_bytes and self._event_bytes <= self._most_event_bytes
        if is_within or self._broken or self._closed or record.outcome is not None:
            return record
        try:
            if self._log_bytes > self._most_log_bytes:
                record = self._cut_logs(record)
            if self._event_bytes > self._most_event_bytes:
                record = self._cut_events(record)
        except OSError as error:
            self._broken = error.strerror or str(error)
        return record

    def _cut_logs(self, record: RunRecord) -> RunRecord:
        removed = take_removable([*self._logs.values()], self._kept_bytes / 4)
        if removed:
            size_bytes, lines = (
                sum(segment.size_bytes for segment in removed),
                sum(segment.lines for segment in removed),
            )
            event = events.LogsCut(time.time(), size_bytes, lines)
            record = apply(record, event)
            self._append(event)
            # Without the snapshot, the record would need the output that is removed.
            self._add_line(snapshots.to_json(Snapshot(record, is_cut=False)))
            self.flush()
            for segment in removed:
                segment.path.unlink(missing_ok=True)
            self._log_bytes -= size_bytes
        self._most_log_bytes = max(self._kept_bytes, self._log_bytes + self._kept_bytes / 8)
        return record

    def _cut_events(self, record: RunRecord) -> RunRecord:
        """Replace all events but the first ones with a snapshot, whose record has the events that are still to come."""
        if not self._is_cut:
            text = "this run has many events, so the earlier ones are kept only in summary (SPARKRING_KEEP_RUN_MB)"
            record = apply(record, Notice(time.time(), f"{text}: %logs --item and --tensorboard lack some of them."))
        self._is_cut = True
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
        return record

    def remove_displays(self, names: Iterable[str]) -> None:
        """Remove the files of displays that others have replaced."""
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / DISPLAYS / name).unlink()

    @property
    def has_large_files(self) -> bool:
        """Whether a file of the run is worth compressing."""
        return max(self._log_bytes, self._event_bytes) >= LARGE_FILE_BYTES

    def close(self) -> None:
        self._closed = True
        try:
            if self._broken is None:
                self._catch_up()
        except OSError:
            pass  # closing the files below will fail, too
        for file in self._files():
            try:
                file.close()
            except OSError:
                pass  # write() or flush() has noted the error already

    def take_timeline(self, part: events.TimelinePart, attempt: int) -> list[TimelineSaved | Notice]:
        """Save a piece of an attempt's timeline. Return what to report if the timeline is complete or saving fails."""
        reports: list[TimelineSaved | Notice] = []
        if self._timeline is not None and self._timeline[0] != attempt:
            reports += self.end_timeline(part.time)
        try:
            if self._timeline is None:
                if part.last and not Arriving.holds_any(part.data):
                    return [Notice(part.time, "no timeline: Horovod starts one only when rank 0 calls hvd.init().")]
                self._timeline = attempt, Arriving((self.path / timeline_name(attempt)).open("w", encoding="utf-8"))
            self._timeline[1].add(part.data)
        except OSError as error:
            problem = f"the timeline could not be saved in {self.path}: {error.strerror or error}"
            reports.append(Notice(part.time, problem))
            part = part._replace(last=True)
        if part.last:
            reports += self.end_timeline(part.time, whole=True, cut=part.cut)
        return reports

    def end_timeline(self, time: float, *, whole: bool = False, cut: int = 0) -> list[TimelineSaved | Notice]:
        """Close the timeline that is being saved, if any. Return its summary, or a Notice if it cannot be saved."""
        if self._timeline is None:
            return []
        (attempt, arriving), self._timeline = self._timeline, None
        try:
            return [arriving.end(time, timeline_name(attempt), attempt, whole=whole, cut=cut)]
        except OSError as error:
            return [Notice(time, f"the timeline could not be saved in {self.path}: {error.strerror or error}")]

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
            case events.RankUsed():
                self._used[event.rank] = event
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
            (self.path / DISPLAYS).mkdir(exist_ok=True, mode=0o700)
            (self.path / DISPLAYS / more["file"]).write_bytes(event.data)
        self._add_line(events.to_json(event, **more))

    def _add_line(self, line: str) -> None:
        self._events.write(f"{line}\n")
        self._event_bytes += len(line) + 1  # JSON is ASCII
