"""The progress and the speed of the ranks of a run, and the ranks that have fallen behind."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from sparkring.history.events import Metrics
from sparkring.history.metrics import first_epoch, placed, remembered, restarts_of
from sparkring.history.record import RunRecord

PACE_S = 10.0  # a rank's pace is measured over this time before its last report
# A rank that is fewer steps behind, or a smaller fraction of the steps, does not count as behind.
FEWEST_BEHIND, SHARE_BEHIND = 3, 0.05


class Progress(NamedTuple):
    """The progress of the slowest rank, `rank`.

    `epoch` is counted from 1, even if the user counts epochs from 0. `finished` of the `size` ranks have finished.
    """

    rank: int
    epoch: int | None
    epochs: int | None
    step: int | None
    steps: int | None
    fraction: float | None
    left_s: float | None
    finished: int = 0
    size: int = 0


class Pace(NamedTuple):
    """The progress and the speed of a rank. Values that are not known are None.

    `fraction` is the completed fraction of the run. `steps` counts the rank's steps in all epochs. Each epoch has
    `steps_each` steps. `rate` is the number of steps per second during the last PACE_S seconds before the last report.
    """

    fraction: float | None = None
    steps: int | None = None
    steps_each: int | None = None
    rate: float | None = None


class Lag(NamedTuple):
    """A rank that has fallen behind by `steps` steps.

    `ratio` is the rank's rate divided by the median of all ranks' rates. It is None if the rates are not known.
    """

    rank: int
    steps: int
    ratio: float | None


@dataclass
class _Course:
    """The oldest and the newest report of a rank in its current attempt and lap.

    `oldest_done` and `newest_done` are the fractions of the run that were complete at these reports. They are None if
    the totals are not known. `recent` holds the times of the last reports, and the number of steps in all epochs by
    then.
    """

    lap: int
    oldest: Metrics
    oldest_done: float | None
    newest: Metrics
    newest_done: float | None
    steps_each: int | None = None
    recent: deque[tuple[float, int]] = field(default_factory=deque)

    def reported(self, metrics: Metrics, first: int) -> None:
        """Note how many steps the rank had taken at a report."""
        self.steps_each = metrics.steps or self.steps_each
        steps = self.steps_each if metrics.ends_epoch else metrics.step
        before = 0 if metrics.epoch is None else metrics.epoch - first
        if steps is None or (before and self.steps_each is None):
            return
        self.recent.append((metrics.time, steps + before * (self.steps_each or 0)))
        while len(self.recent) > 2 and metrics.time - self.recent[1][0] > PACE_S:
            self.recent.popleft()

    @property
    def pace(self) -> Pace:
        if not self.recent:
            return Pace(self.newest_done)
        (began, before), (ended, steps) = self.recent[0], self.recent[-1]
        rate = (steps - before) / (ended - began) if ended > began else None
        return Pace(self.newest_done, steps, self.steps_each, rate)

    @property
    def place(self) -> tuple[int, float, float]:
        """The rank's position, for comparison with other ranks."""
        at = self.newest
        return self.lap, at.epoch or 0, math.inf if at.ends_epoch else at.step or 0


def slowest(record: RunRecord, now: float) -> Progress | None:
    """Return the progress of the slowest rank that reports epochs or steps; None if no rank reports any.

    Ranks that have finished are left out, unless all ranks that report epochs or steps have finished.
    """
    courses = _courses(record)
    if not courses:
        return None
    finished = [rank.rank for rank in record.taking_part if rank.state == "finished"]
    going = {rank: course for rank, course in courses.items() if rank not in finished}
    among = going or courses
    told = all(each.newest_done is not None for each in among.values())
    rank = min(among, key=lambda rank: (among[rank].lap, among[rank].newest_done or 0.0) if told else among[rank].place)
    course = among[rank]
    at = course.newest
    epoch = None if at.epoch is None else at.epoch + 1 - first_epoch(record)
    step = None if at.ends_epoch else at.step
    size = len(record.taking_part)
    fraction, left_s = course.newest_done, _left_s(course, now)
    if not going and len(finished) < size:  # the ranks that are still running have not reported anything
        fraction = left_s = None
    return Progress(rank, epoch, at.epochs, step, at.steps, fraction, left_s, len(finished), size)


@remembered("metrics", "attempts")
def _courses(record: RunRecord) -> dict[int, _Course]:
    """Return the _Course of each rank that reports epochs or steps in the newest attempt."""
    counting = [m for m in record.metrics if m.epoch is not None or m.step is not None]
    by = "epoch" if any(m.epoch is not None for m in counting) else "step"
    first, restarts = first_epoch(record), restarts_of(record)
    found: dict[int, _Course] = {}
    for (attempt, lap, _), metrics in placed(counting, restarts, by):
        if attempt != len(restarts):
            continue
        course = found.get(metrics.rank)
        if course is not None and course.lap == lap:
            metrics = _completed(metrics, course.newest)
        done = _done(metrics, first)
        if course is not None and course.lap == lap and (course.newest_done or 0.0) <= (done or 0.0):
            course.newest, course.newest_done = metrics, done
        else:
            course = found[metrics.rank] = _Course(lap, metrics, done, metrics, done)
        course.reported(metrics, first)
    return found


def _completed(metrics: Metrics, before: Metrics) -> Metrics:
    """Return a report with the totals and the step that the rank has left out, taken from its report `before`.

    Users often report a validation metric with only the epoch or step. Otherwise, the time left would be lost.
    """
    if metrics.step is None and not metrics.ends_epoch and metrics.epoch == before.epoch:
        metrics = metrics._replace(step=before.step, ends_epoch=before.ends_epoch)
    return metrics._replace(epochs=metrics.epochs or before.epochs, steps=metrics.steps or before.steps)


def paces(record: RunRecord) -> dict[int, Pace]:
    """Return the Pace of each rank that reports epochs or steps in the newest attempt."""
    return {rank: course.pace for rank, course in _courses(record).items()}


def lags(record: RunRecord) -> list[Lag]:
    """Return the running ranks that are clearly behind the others. The rank that is furthest behind comes first.

    Each rank is compared with the median of the running ranks. Small differences do not count, because some ranks are
    always a step ahead.
    """
    found = {rank: pace for rank, pace in paces(record).items() if record.ranks[rank].state == "running"}
    places = sorted(pace.steps for pace in found.values() if pace.steps is not None)
    rates = [pace.rate for pace in found.values() if pace.rate is not None]
    if len(places) < 2:
        return []
    middle, typical = places[len(places) // 2], statistics.median(rates) if rates else 0.0
    behind = []
    for rank, pace in found.items():
        if pace.steps is None:
            continue
        least = max(FEWEST_BEHIND, SHARE_BEHIND * min(middle, pace.steps_each or middle))
        if middle - pace.steps > least:
            ratio = pace.rate / typical if pace.rate is not None and typical else None
            behind.append(Lag(rank, middle - pace.steps, ratio))
    return sorted(behind, key=lambda lag: -lag.steps)


def _done(metrics: Metrics, first: int) -> float | None:
    """Return the completed fraction of the run; None if the totals are not known."""
    within = 0.0
    if metrics.ends_epoch:
        within = 1.0
    elif metrics.step and metrics.steps:
        within = min(1.0, metrics.step / metrics.steps)
    if metrics.epoch is not None and metrics.epochs:
        return min(1.0, max(0.0, (metrics.epoch - first + within) / metrics.epochs))
    if metrics.epoch is None and metrics.steps and metrics.step is not None:
        return within
    return None


def _left_s(course: _Course, now: float) -> float | None:
    if course.newest_done is None or course.oldest_done is None or course.newest_done >= 1:
        return None
    took, made = course.newest.time - course.oldest.time, course.newest_done - course.oldest_done
    if took < 1 or made <= 0:
        return None  # too early to tell
    left = took / made * (1 - course.newest_done) - (now - course.newest.time)
    return left if left > 0 else None  # if the estimated end has passed, the rank has become slower
