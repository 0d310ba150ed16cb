"""Joins the traces of PyTorch's profiler that the ranks send for `--profile torch`: one file, on one clock."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

from sparkring.history.describe.text import rank_list
from sparkring.history.events import Notice, TracePart, TraceSaved

NAME = "trace.json.gz"
_PIDS = 10_000_000  # more than the largest number of a process


class StepTraces:
    """Saves the traces of a run in the run's folder `path`, where each rank's is kept until all of them are there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: dict[int, int] = {}  # of the ranks whose trace is complete
        self._problems: dict[str, list[int]] = {}
        self._arriving: set[int] = set()

    def take(self, part: TracePart) -> list[TraceSaved | Notice]:
        """Save a part of a rank's trace. Return what to report."""
        if part.problem:
            self._problems.setdefault(part.problem, []).append(part.rank)
            return []
        try:
            with self._of(part.rank).open("ab" if part.number else "wb") as file:
                file.write(part.data)
        except OSError as error:
            return [self._unsaved(part.time, error)]
        self._arriving.add(part.rank)
        if part.last:
            self._steps[part.rank] = part.steps
        return []

    def end(self, time: float) -> list[TraceSaved | Notice]:
        """Join the complete traces when the run is over. Return the summary, and which ranks have no trace, and why."""
        reports: list[TraceSaved | Notice] = []
        for problem, ranks in self._problems.items():
            has = "has" if len(ranks) == 1 else "have"
            reports.append(Notice(time, f"{rank_list(sorted(ranks))} {has} no trace: {problem}"))
        try:
            if self._steps:
                paths = {rank: self._of(rank) for rank in sorted(self._steps)}
                join(paths, self._path / NAME)
                size_bytes = (self._path / NAME).stat().st_size
                reports.append(TraceSaved(time, NAME, len(paths), max(self._steps.values()), size_bytes))
        except (OSError, ValueError) as error:
            reports.append(self._unsaved(time, error))
        for rank in self._arriving:
            with contextlib.suppress(OSError):
                self._of(rank).unlink()
        self._steps, self._problems, self._arriving = {}, {}, set()
        return reports

    def _of(self, rank: int) -> Path:
        return self._path / f"trace-{rank}.json.gz"

    def _unsaved(self, time: float, error: Exception) -> Notice:
        reason = getattr(error, "strerror", "") or error
        return Notice(time, f"cannot save the trace in {self._path}: {reason}. Free disk space, or set SPARKRING_HOME")


def join(paths: dict[int, Path], target: Path) -> None:
    """Write the traces of several ranks into one file. The processes are named and sorted by rank.

    The times of a trace are relative to its base time. The file's times are relative to that of the first trace.
    """
    base_ns: int | None = None
    with gzip.open(target, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        before = "\n"
        for rank, path in paths.items():
            with gzip.open(path, "rt", encoding="utf-8") as trace_file:
                trace = json.load(trace_file)
            own_ns = int(trace.get("baseTimeNanoseconds", 0))
            base_ns = own_ns if base_ns is None else base_ns
            for event in trace["traceEvents"]:
                if isinstance(event.get("pid"), int):  # others are about the profiler itself
                    file.write(before + json.dumps(_of_rank(event, rank, (own_ns - base_ns) / 1000)))
                    before = ",\n"
        file.write("\n]}\n")


def _of_rank(event: dict[str, Any], rank: int, shift_us: float) -> dict[str, Any]:
    event["pid"] = rank * _PIDS + event["pid"] % _PIDS
    if "ts" in event:
        event["ts"] += shift_us
    if event.get("ph") == "M" and event.get("name") == "process_name":
        event["args"] = {"name": f"rank {rank}: {event['args'].get('name', '')}"}
    if event.get("ph") == "M" and event.get("name") == "process_sort_index":
        event["args"] = {"sort_index": event["pid"]}
    return event
