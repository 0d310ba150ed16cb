"""Saves runs and loads them. Each run has a folder with its events as JSON lines and one log file per rank.

    RUNS/2026-11-20_14-03-22_a1b2c3/
        events.jsonl     the events, one on each line. The bytes of an output event are in the rank's log, and the event
                         says where in the log. Of frequent events (reading progress, use of GPUs and machines), only
                         the newest event of each reader, GPU and rank is stored, every PROGRESS_EVERY_S seconds.
                         The use of machines is stored less often as the run goes on
                         If the file becomes too large, it is replaced by its beginning and a snapshot of the record
        rank-0.log …     what each rank wrote to stdout and stderr, in order of arrival (rank_logs.py)
        displays/        what the ranks displayed: rank-0-1.png is rank 0's first display in attempt 1,
                         attempt-2-rank-0-1.png its first display in attempt 2
        timeline.json    Horovod's timeline, if there is one; attempt 2's timeline is timeline-2.json
        trace.json.gz    the trace of PyTorch's profiler, if there is one
        tensorboard/     the metrics, after %runs RUN --tensorboard

When a run has ended, its large files are compressed (compression.py).

Only the user can read the folder (mode 0700). The newest runs are kept, as many as kept_runs() says, and as long as
they are not larger than kept_bytes() together. A run in progress is never removed.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sparkring.errors import LaunchError, OptionsError
from sparkring.history import events, snapshots
from sparkring.history.events import Notice, RunStarted
from sparkring.history.rank_logs import COMPRESSED as COMPRESSED
from sparkring.history.rank_logs import LogReader, left_out
from sparkring.history.rank_logs import log as log
from sparkring.history.rank_logs import log_name as log_name
from sparkring.history.record import QUICK_S, RunRecord, apply
from sparkring.history.snapshots import Snapshot
from sparkring.runtime.storage import user_folder

KEEP = 100  # unless SPARKRING_KEEP_RUNS is set
KEEP_GB = 10.0  # unless SPARKRING_KEEP_GB is set
KEEP_RUN_MB = 200.0  # unless SPARKRING_KEEP_RUN_MB is set
LARGE_BYTES = 1_000_000  # the size of all runs is looked at when a run of at least this size has ended
NEWEST = 20  # this many of the newest runs are never removed, not even quick ones
# Old runs are removed only when there are this many too many. If old runs were removed after each cell of a warm gang,
# a quarter of the time would be spent on this.
SLACK = 20
EVENTS = "events.jsonl"
MIDDLE = "events-middle.jsonl.gz"  # the lines of EVENTS that are replaced by MIDDLE_LINE when a run has ended
MIDDLE_LINE = b'{"type": "Compressed"}\n'
DISPLAYS = "displays"
# The file suffixes that differ from the MIME subtype.
_SUFFIXES = {"jpeg": "jpg", "svg+xml": "svg", "markdown": "md", "latex": "tex"}
# data() looks for data sets only in this many bytes at the beginning of a run's events, because data sets are usually
# opened early in a run.
LOOKED_THROUGH_BYTES = 256 * 1024
DATA_LINES = 200
END_BYTES = 64 * 1024  # the last event is within this many bytes of the end
_IS_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+").fullmatch
ABANDONED_AFTER_S = 24 * 3600  # an unfinished run whose events have not changed for this long is not running


def home() -> Path:
    """Return where runs are saved: `$SPARKRING_HOME/runs`, or `runs` in the user's data folder."""
    root = os.environ.get("SPARKRING_HOME") or user_folder("data")
    # Absolute, because the notebook may change its folder. `%env` leaves a `~` as it is.
    return Path(os.path.expanduser(root), "runs").absolute()


def kept_runs() -> int:
    """Return how many runs are kept. Raise LaunchError if the setting is not a number."""
    return int(_setting("SPARKRING_KEEP_RUNS", KEEP, "a whole number of runs", str.isdecimal))


def kept_bytes() -> float:
    """Return how many bytes all runs together may have. Raise LaunchError if the setting is not a number."""
    return _setting("SPARKRING_KEEP_GB", KEEP_GB, "a number of gigabytes", _IS_NUMBER) * 1e9


def kept_run_bytes() -> float:
    """Return how many bytes the logs of one run may have. Raise LaunchError if the setting is not a number."""
    return _setting("SPARKRING_KEEP_RUN_MB", KEEP_RUN_MB, "a number of megabytes", _IS_NUMBER) * 1e6


def _setting(name: str, default: float, what: str, is_valid: Callable[[str], object]) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not is_valid(text) or float(text) <= 0:
        raise LaunchError(f"the environment variable {name} must be {what} greater than 0, not {text!r}.")
    return float(text)


Kind = TypeVar("Kind", bound=events.Event)


def new_id() -> str:
    """Return the id of a new run: the local time, five hex digits for the fraction of the second, and a random digit.

    Ids sort by time, even if several runs begin within a second. Because of the random digit, two runs rarely get the
    same id.
    """
    now = time.time()
    fraction = int(now % 1 * 0x10_0000)
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S', time.localtime(now))}_{fraction:05x}{secrets.token_hex(1)[0]}"


def display_name(display: events.Displayed) -> str:
    """Return the name of a display's file in the folder DISPLAYS of a run."""
    attempt = f"attempt-{display.attempt}-" if display.attempt > 1 else ""
    attempt += "" if display.item is None else f"item-{display.item}-"
    kind = display.mime_type.partition("/")[2]
    return f"{attempt}rank-{display.rank}-{display.number}.{_SUFFIXES.get(kind, kind)}"


def timeline_name(attempt: int) -> str:
    """Return the name of an attempt's timeline in a run's folder."""
    return "timeline.json" if attempt == 1 else f"timeline-{attempt}.json"


def item_log(path: Path, item: int) -> str | None:
    """Return what the ranks wrote while they ran the item, in all attempts; None if no such item has started.

    Lines say how much is no longer kept.
    """
    written: list[bytes] = []
    ranks, ranks_each, has_started, is_over, missing = range(0), 1, False, False, 0
    with contextlib.closing(LogReader(path)) as logs:
        for fields in filter(None, _lines(path)):
            match event := _event(fields, path, logs):
                case events.ItemsPlanned():
                    ranks_each = event.ranks_each
                case events.ItemStarted(item=number) if number == item:
                    ranks, has_started = range(event.slot * ranks_each, (event.slot + 1) * ranks_each), True
                case events.ItemEnded(item=number) if number == item:
                    ranks, is_over = range(0), event.ending != "again"
                case Snapshot(record, is_cut=True) if record.items is not None and not is_over:
                    if item <= max((known.item for known in record.items.known), default=-1):
                        has_started = True
                        written.append("… earlier output left out …\n".encode())
                    slot = next((running.slot for running in record.items.running if running.item == item), None)
                    ranks = range(0) if slot is None else range(slot * ranks_each, (slot + 1) * ranks_each)
                case events.Output() if event.rank in ranks:
                    if missing and event.data:
                        written.append(left_out(missing))
                        missing = 0
                    written.append(event.data)
                    missing += fields["size"] - len(event.data)
    written += [left_out(missing)] if missing else []
    return b"".join(written).decode("utf-8", "backslashreplace") if has_started else None


def saved() -> list[Path]:
    """Return the folders of all saved runs, newest first."""
    try:
        return sorted((path for path in home().iterdir() if (path / EVENTS).is_file()), reverse=True)
    except OSError:
        return []


def find(name: str) -> Path | None:
    """Return the folder of the saved run called `name`; None if there is no such run.

    `name` is the run's id, the beginning or the end of its id, or its title; '' means the newest run.
    """
    every = saved()
    if not name:
        return every[0] if every else None
    by_id = (path for path in every if is_named(name, path.name))
    return next(by_id, None) or next((path for path in every if first(path).title == name), None)


def find_saved(name: str) -> Path:
    """Return what find() returns, but raise OptionsError if there is no such run."""
    path = find(name)
    if path is None:
        raise OptionsError(f"no saved run called {name!r}: %runs lists them." if name else "no runs saved yet.")
    return path


def last_checkpoint_dir() -> str:
    """Return the --checkpoint-dir of the newest saved run that had one; raise OptionsError if none had."""
    directories = (first(path).checkpoint_dir for path in saved())
    directory = next(filter(None, directories), "")
    if not directory:
        raise OptionsError("no saved run had a --checkpoint-dir: name a directory, as in `%checkpoints dbfs:/ml/run1`.")
    return directory


def is_named(name: str, run_id: str) -> bool:
    """Return whether `name` is the run's id, or the beginning or the end of this id."""
    return run_id.startswith(name) or run_id.endswith(name)


def load(path: Path) -> RunRecord:
    """Return the record of a saved run. If the last event is incomplete, leave it out.

    Damaged events, and events that need them, are left out, too. A notice then says that the record is damaged.
    """
    record, is_damaged, now = RunRecord(), False, 0.0
    for event in _events(path, _last_line(path, snapshots.BEGIN)):
        try:
            if event is None:
                is_damaged = True
            elif isinstance(event, Snapshot):
                record = event.record
            else:
                record, now = apply(record, event), getattr(event, "time", now)
        except Exception:  # which error it is depends on the events that are missing
            is_damaged = True
    record = record._replace(log_folder=str(path))
    if not is_damaged:
        return record
    text = f"this run's record is damaged, and the damaged part is not shown: {path / EVENTS}"
    return apply(record, Notice(now, text))


def _events(path: Path, begin: int = 0) -> Iterator[events.Event | Snapshot | None]:
    """Yield the events and snapshots of a saved run, from the line `begin` on, with None for each damaged one."""
    with contextlib.closing(LogReader(path)) as logs:
        for fields in _lines(path, begin):
            event = None if fields is None else _event(fields, path, logs)
            # A display whose file has been removed was replaced by a later one.
            if not (isinstance(event, events.Displayed) and not event.data and fields and fields.get("file")):
                yield event


def _event(fields: dict[str, Any], path: Path, logs: LogReader) -> events.Event | Snapshot | None:
    """Return the event of a line, with its data; None if the line is damaged."""
    try:
        if fields["type"] == snapshots.KIND:
            return _with_displays(snapshots.from_json(fields), path)
        if fields["type"] == events.Output.__name__:
            fields["data"] = logs.read(fields["rank"], fields["start"], fields["size"])
        if fields["type"] == events.Displayed.__name__:
            fields["data"] = _shown(path, fields.get("file", ""))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return _without_data(fields)


def _with_displays(snapshot: Snapshot, path: Path) -> Snapshot:
    displays = (display._replace(data=_shown(path, display_name(display))) for display in snapshot.record.displays)
    record = snapshot.record._replace(displays=tuple(display for display in displays if display.data))
    return snapshot._replace(record=record)


def _shown(path: Path, name: str) -> bytes:
    file = path / DISPLAYS / Path(name).name
    return file.read_bytes() if file.is_file() else b""


def _without_data(fields: dict[str, Any] | None) -> events.Event | None:
    """Return the event of a line, without data from other files; None if the line is damaged."""
    try:
        return None if fields is None else events.from_json(fields)
    except Exception:  # which error it is depends on what is missing or has another type
        return None


def _raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a run's events, including those that are compressed."""
    with (path / EVENTS).open("rb") as file:
        for line in file:
            if line == MIDDLE_LINE:
                with gzip.open(path / MIDDLE) as middle:
                    yield from middle
            else:
                yield line


def _last_line(path: Path, begin: bytes) -> int:
    """Return the number of the last line of a run's events that begins in this way, counted from 0; 0 if none does."""
    return max((number for number, line in enumerate(_raw_lines(path)) if line.startswith(begin)), default=0)


def _lines(path: Path, begin: int = 0) -> Iterator[dict[str, Any] | None]:
    """Yield the events and snapshots as JSON, from the line `begin` on, without those that only a newer version knows.

    Yield None for a damaged line.
    """
    for line in itertools.islice(_raw_lines(path), begin, None):
        try:
            fields = json.loads(line.decode("utf-8", "replace"))
            is_known = events.is_known(fields["type"]) or fields["type"] == snapshots.KIND
        except (KeyError, TypeError, ValueError):
            if line.endswith(b"\n"):  # otherwise, the driver was killed while it was writing this line
                yield None
            continue
        if is_known:
            yield fields


def events_of_kind(path: Path, kind: type[Kind]) -> Iterator[Kind]:
    """Yield the events of one kind in a saved run, in order of arrival.

    Of metrics and attempts whose events are no longer saved, yield those that the record has kept.
    """
    for fields in _lines(path, _last_line(path, snapshots.BEGIN_OF_CUT)):
        if fields and fields["type"] == snapshots.KIND and fields["is_cut"]:
            record = snapshots.from_json(fields).record
            begun = [
                events.AttemptStarted(attempt.started, attempt.number, attempt.size) for attempt in record.attempts
            ]
            yield from (report for report in (*begun, *record.metrics) if isinstance(report, kind))
        elif fields and fields["type"] == kind.__name__ and isinstance(event := _without_data(fields), kind):
            yield event


def first(path: Path) -> RunStarted:
    """Return the event with which a saved run began.

    If it is missing or damaged, return a RunStarted with "?" for most values.
    """
    try:
        event = next(map(_without_data, _lines(path)), None)
    except FileNotFoundError:  # another kernel has removed the run
        event = None
    return event if isinstance(event, RunStarted) else RunStarted(0.0, path.name, "?", "", 0, "?", "?", "all")


def data(path: Path) -> list[str]:
    """Return the names of the data sets that a saved run has opened. Only the beginning of a long run is searched."""
    return list(dict.fromkeys(data_set.name for data_set in opened_data(path)))


def opened_data(path: Path) -> list[events.DataOpened]:
    """Return the data sets that a saved run has opened, each with the rank that opened it first.

    Only the beginning of a long run is searched.
    """
    with (path / EVENTS).open("rb") as file:
        seen = file.read(LOOKED_THROUGH_BYTES)
    begin = f'{{"type": "{events.DataOpened.__name__}",'.encode()
    opened = [line for line in seen.split(b"\n")[:-1] if line.startswith(begin)]
    data_sets: dict[tuple[str, str, str], events.DataOpened] = {}
    for line in opened[:DATA_LINES]:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # the line is damaged
            event = events.from_json(json.loads(line))
            if isinstance(event, events.DataOpened):
                data_sets.setdefault((event.name, event.version, event.where), event)
    return list(data_sets.values())


def last(path: Path) -> events.RunFinished | None:
    """Return the event with which a saved run ended; None if the run has not ended, or if its driver was killed."""
    with (path / EVENTS).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
        tail = file.read().splitlines()
    for line in reversed(tail[-2:]):
        try:
            fields = json.loads(line)
            if fields["type"] != events.RunFinished.__name__:
                return None
            event = events.from_json(fields)
        except (ValueError, KeyError, TypeError):
            continue  # the event is cut off, or another version wrote it
        return event if isinstance(event, events.RunFinished) else None
    return None


def prune(keep: int | None = None, slack: int = 0, newest: Path | None = None) -> None:
    """If more than `keep` + `slack` runs are saved, remove all but `keep` of them. Runs that may be in progress stay.

    `keep` is kept_runs() by default. The runs of quick cells are removed first, since a hundred quick cells must not
    displace yesterday's training. If the run `newest`, which has just ended, is large, also remove the oldest runs
    until all runs together have at most kept_bytes(). `newest` stays.
    """
    try:
        keep = kept_runs() if keep is None else keep
        if len(os.listdir(home())) > keep + slack:
            every = saved()
            left, oldest_first = len(every), every[min(NEWEST, keep) :][::-1]
            for path in itertools.chain(filter(_was_quick, oldest_first), oldest_first):  # lazy, so few runs are read
                if left <= keep:
                    break
                left -= remove(path)
        if newest is not None and size_bytes(newest) >= LARGE_BYTES:
            _prune_large(newest)
    except (OSError, LaunchError):  # the folder cannot be read, or the notebook has just changed a setting to nonsense
        pass


def _prune_large(newest: Path) -> None:
    sizes = {path: size_bytes(path) for path in saved()}
    total, most = sum(sizes.values()), kept_bytes()
    for path in reversed(sizes):
        if total <= most:
            return
        if path != newest and remove(path):
            total -= sizes[path]


def remove(path: Path) -> bool:
    """Remove a run, unless it may be in progress or cannot be removed. Return whether it was removed."""
    try:
        if is_going_on(path):
            return False
        shutil.rmtree(path)
    except OSError:  # another kernel has removed the run
        return False
    return True


def is_going_on(path: Path) -> bool:
    """Return whether a run may be in progress: it has no end, and was written to less than a day ago."""
    return last(path) is None and time.time() - (path / EVENTS).stat().st_mtime <= ABANDONED_AFTER_S


def size_bytes(path: Path) -> int:
    """Return the size of a run's files."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # it has just been removed
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _was_quick(path: Path) -> bool:
    try:
        begun, ended = first(path), last(path)
    except OSError:  # another run or kernel has removed this run
        return False
    return begun.warm and ended is not None and ended.outcome == "finished" and ended.time - begun.time < QUICK_S
