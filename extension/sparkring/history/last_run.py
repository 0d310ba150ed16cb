"""Finds the last run of the same cell among the saved runs, with which a run's metrics are compared."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from sparkring.history import metrics, run_store
from sparkring.history.curves import Curve, curve_axis, curves_of
from sparkring.history.events import AttemptStarted, Metrics
from sparkring.history.record import RunRecord, replay

SEARCHED = 30  # the newest runs before this one that are looked at
SAME_LINES = 0.5  # a cell that has kept at least this share of its lines is still the same cell
GHOST_POINTS = 200  # of each curve
LARGEST_BYTES = 20_000_000  # the events of a larger run take long to read


class LastRun(NamedTuple):
    """The curves of the last run by metric, on the horizontal axis `axis`. The run began at `started`."""

    axis: str
    curves: dict[str, Curve]
    started: float


def last_run(record: RunRecord) -> LastRun | None:
    """Return the last run of the same cell that finished and has curves; None if none is saved."""
    folder = Path(record.log_folder)
    if not record.metrics or record.items is not None or record.stream is not None or folder.parent != run_store.home():
        return None
    return _before(folder.name, record.code)


@metrics.remembered("log_folder", "metrics", "attempts", "checkpoints", "finished_ranks", "outcome")
def compared(record: RunRecord) -> dict[str, float]:
    """Return the value of the last run with which each metric is compared.

    This is its last value or, if this run has not finished, its value where this run is now.
    """
    if last_run(record) is None:
        return {}
    charts = with_last_run(record, curves_of(record, metrics.table(record)))
    return {curve.name: curve.before for curves in charts for curve in curves if curve.before is not None}


def with_last_run(record: RunRecord, charts: list[list[Curve]]) -> list[list[Curve]]:
    """Return the curves of the charts with the points of the last run. Their times count from this run's beginning."""
    last = last_run(record)
    if last is None or last.axis != curve_axis(record, metrics.table(record)):
        return charts
    return [[_with_ghost(record, curve, last) for curve in curves] for curves in charts]


def _with_ghost(record: RunRecord, curve: Curve, last: LastRun) -> Curve:
    ghost = last.curves.get(curve.name)
    if ghost is None:
        return curve
    later_s = record.started - last.started
    passed = [point.value.mean for point in ghost.points if point.x <= curve.points[-1].x]
    before = ghost.last if record.outcome == "finished" else passed[-1] if passed else None
    return curve._replace(ghost=tuple(p._replace(time=p.time + later_s) for p in ghost.points), before=before)


@functools.lru_cache(maxsize=4)
def _before(run_id: str, code: str) -> LastRun | None:
    earlier = [path for path in run_store.saved() if path.name < run_id][:SEARCHED]
    for path in earlier:
        try:
            started, ended = run_store.first(path), run_store.last(path)
            if ended is None or ended.outcome != "finished" or not _same_cell(started.code, code):
                continue
            if (path / run_store.EVENTS).stat().st_size > LARGEST_BYTES:
                return None
            attempts = run_store.events_of_kind(path, AttemptStarted)
            reports: list[AttemptStarted | Metrics] = [*attempts, *run_store.events_of_kind(path, Metrics)]
        except OSError:  # another kernel has removed the run
            continue
        known = replay(sorted(reports, key=lambda report: report.time), replay([started]))
        table = metrics.table(known)
        curves = {curve.name: curve for chart in curves_of(known, table, GHOST_POINTS) for curve in chart}
        if curves:
            return LastRun(curve_axis(known, table), curves, started.time)
    return None


def _same_cell(code: str, other: str) -> bool:
    mine, theirs = (Counter(text.strip().splitlines()) for text in (code, other))
    return (mine & theirs).total() >= SAME_LINES * max(mine.total(), theirs.total())
