"""The progress and the speed of the ranks of a run, and the ranks that have fallen behind."""

from __future__ import annotations

import bisect
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
    This time begins at `began` and ends at `ended`. There were `between` steps between the last two reports. `lap` is
    the lap that the rank is in, as in metrics.Row.
    """

    fraction: float | None = None
    steps: int | None = None
    steps_each: int | None = None
    rate: float | None = None
    began: float = 0.0
    ended: float = 0.0
    between: int = 0
    lap: int = 1

    def rate_until(self, time: float) -> float | None:
        """Return the rank's rate at `time`, if the rank has reported nothing new since `ended`."""
        measured = self.ended - self.began
        if self.rate is None or time - self.ended <= max(PACE_S, measured):
            return self.rate
        return self.rate * measured / (time - self.began)


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
    the totals are not known. The rank reached `newest_done` at the time `since`, after it had advanced `advances`
    times. `recent` holds the times of the last reports, and the number of steps by then: in all epochs if `in_all`,
    otherwise in the epoch `counted_in`, because it is not known how many steps the earlier epochs had. `detailed` says
    whether the rank has reported steps together with epochs.
    """

    lap: int
    oldest: Metrics
    oldest_done: float | None
    newest: Metrics
    newest_done: float | None
    since: float
    advances: int = 0
    detailed: bool = False
    steps_each: int | None = None
    in_all: bool = True
    counted_in: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=deque)

    def adds(self, metrics: Metrics) -> bool:
        """Return whether a report in the same lap says where the rank is. Some only give more values for a place."""
        at = self.newest
        if metrics.ends_epoch or not self.detailed:
            return True
        if metrics.epoch is None or (metrics.epoch == at.epoch and metrics.step is None):
            return False
        if metrics.step is None or metrics.epoch != at.epoch:
            return True
        # The user's own reports may count steps from 0, or over all epochs.
        is_same = at.step is not None and at.step - 1 <= metrics.step < at.step
        return not is_same and not (metrics.steps is None and at.steps is not None and metrics.step > at.steps)

    def completed(self, metrics: Metrics) -> Metrics:
        """Return a report in the same lap with the totals of the newest report, if it has none of its own.

        The newest report's epoch is added, too, if the rank reports epochs and steps separately.
        """
        at = self.newest
        return metrics._replace(
            epoch=at.epoch if metrics.epoch is None else metrics.epoch,
            epochs=at.epochs if metrics.epochs is None else metrics.epochs,
            steps=at.steps if metrics.steps is None else metrics.steps,
            iterations=at.iterations if metrics.iterations is None else metrics.iterations,
        )

    def advanced(self, metrics: Metrics, done: float | None) -> None:
        """Note a report of the same lap. `done` is the completed fraction of the run at this report."""
        if self.oldest_done is None and done is not None:  # the first report with totals
            self.oldest, self.oldest_done, self.since, self.advances = metrics, done, metrics.time, 0
        elif done != self.newest_done:
            self.since, self.advances = metrics.time, self.advances + 1
        self.newest, self.newest_done = metrics, done

    def reported(self, metrics: Metrics, first: int) -> None:
        """Note how many steps the rank had taken at a report."""
        self.detailed = self.detailed or (metrics.epoch is not None and metrics.step is not None)
        self.steps_each = metrics.steps or self.steps_each
        steps = self.steps_each if metrics.ends_epoch else metrics.step
        if steps is None:
            self.in_all = self.in_all and not metrics.ends_epoch
            return
        before = 0 if metrics.epoch is None else metrics.epoch - first
        in_all = not before or self.steps_each is not None
        if not in_all and self.in_all and self.recent:  # steps that keep growing are counted over all epochs
            in_all = before == self.counted_in or steps > self.recent[-1][1]
        steps += before * (self.steps_each or 0)
        is_another = not in_all and before != self.counted_in
        if in_all != self.in_all or is_another or (self.recent and steps < self.recent[-1][1]):
            self.recent.clear()
        self.in_all, self.counted_in = in_all, before
        self.recent.append((metrics.time, steps))
        while len(self.recent) > 2 and metrics.time - self.recent[1][0] > PACE_S:
            self.recent.popleft()

    @property
    def pace(self) -> Pace:
        if not self.recent:
            return Pace(self.newest_done, lap=self.lap)
        (began, before), (ended, steps) = self.recent[0], self.recent[-1]
        rate = (steps - before) / (ended - began) if ended > began else None
        between = steps - self.recent[-2][1] if len(self.recent) > 1 else 0
        taken = steps if self.in_all else None
        return Pace(self.newest_done, taken, self.steps_each, rate, began, ended, between, self.lap)

    @property
    def place(self) -> tuple[int, float, float]:
        """The rank's position, for comparison with other ranks."""
        at = self.newest
        return self.lap, at.epoch or 0, math.inf if at.ends_epoch else at.step or 0


def slowest(record: RunRecord, now: float) -> Progress | None:
    """Return the progress of the slowest rank that reports epochs or steps; None if no rank reports any.

    Ranks that have finished are left out, unless all ranks that report epochs or steps have finished. After a restart,
    the progress is not known until all ranks that reported some before it have done so again.
    """
    courses = _courses(record)
    awaited = _reported_before(record) - courses.keys()
    if any(rank.rank in awaited and rank.state == "running" for rank in record.taking_part):
        return None
    if not courses:
        return _in_loop(record, now)
    finished = [rank.rank for rank in record.taking_part if rank.state == "finished"]
    going = {rank: course for rank, course in courses.items() if rank not in finished}
    among = going or courses
    all_known = all(other.newest_done is not None for other in among.values())
    rank = min(
        among, key=lambda rank: (among[rank].lap, among[rank].newest_done or 0.0) if all_known else among[rank].place
    )
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
    counting = [m for m in record.metrics if m.epoch is not None or m.step is not None or m.iterations is not None]
    by = "epoch" if any(m.epoch is not None for m in counting) else "step"
    first, restarts = first_epoch(record), restarts_of(record)
    courses: dict[int, _Course] = {}
    for (attempt, lap, _), metrics in placed(counting, restarts, by):
        if attempt != len(restarts):
            continue
        course = courses.get(metrics.rank)
        if course is not None and course.lap == lap:
            if not course.adds(metrics):
                continue
            metrics = course.completed(metrics)
        done = _done(metrics, first)
        if course is not None and course.lap == lap and (course.newest_done or 0.0) <= (done or 0.0):
            course.advanced(metrics, done)
        else:
            course = courses[metrics.rank] = _Course(lap, metrics, done, metrics, done, metrics.time)
        course.reported(metrics, first)
    return courses


@remembered("metrics", "attempts")
def _reported_before(record: RunRecord) -> set[int]:
    """Return the ranks that reported epochs or steps before the last restart."""
    restarted = max(restarts_of(record), default=-math.inf)
    return {m.rank for m in record.metrics if m.time < restarted and (m.epoch is not None or m.step is not None)}


@remembered("metrics", "attempts")
def steps_lost(record: RunRecord) -> int | None:
    """Return how many steps before the last restart were not saved; None if this is not known.

    It is known only if the ranks report each step, numbered like the checkpoints, and no epochs.
    """
    restarts = restarts_of(record)
    if not restarts or any(m.epoch is not None for m in record.metrics):
        return None
    attempts: tuple[set[int], ...] = tuple(set() for _ in record.attempts)
    for m in record.metrics:
        if m.step is not None:
            attempts[bisect.bisect_right(restarts, m.time)].add(m.step)
    before, since = attempts[-2:]
    if not before or not since:
        return None
    saved, first, last = record.attempts[-1].step, min(since), max(before)
    is_known = saved <= first <= saved + 1 and first - 1 <= last and before.issuperset(range(first, last + 1))
    return last - first + 1 if is_known else None


def places(record: RunRecord) -> dict[int, Metrics]:
    """Return, for each rank that reports epochs or steps, the report that says where the rank is now."""
    return {rank: course.newest for rank, course in _courses(record).items()}


def moved_at(record: RunRecord) -> float:
    """Return when a rank last made a step or ended an epoch, as far as it is known; 0 before the first one."""
    reported = max((course.newest.time for course in _courses(record).values()), default=0.0)
    return max([reported, *(rank.looped for rank in record.taking_part)])


def paces(record: RunRecord) -> dict[int, Pace]:
    """Return the Pace of each rank that reports epochs or steps in the newest attempt."""
    return _in_loops(record) | {rank: course.pace for rank, course in _courses(record).items()}


def _in_loops(record: RunRecord) -> dict[int, Pace]:
    """Return the progress of the ranks whose cell runs a loop of known length."""
    known = {rank.rank: rank.at.iterations for rank in record.taking_part if rank.at and rank.at.iterations}
    return {rank: Pace(done / total) for rank, (done, total) in known.items()}


def _in_loop(record: RunRecord, now: float) -> Progress | None:
    """Return the progress of the slowest rank that runs a loop, if no rank reports epochs or steps."""
    fractions = {rank: pace.fraction or 0.0 for rank, pace in _in_loops(record).items()}
    if not fractions or record.metrics:
        return None
    finished, size = len(record.finished_ranks), len(record.taking_part)
    going = [rank for rank in fractions if record.ranks[rank].state == "running"]
    rank = min(going or fractions, key=lambda rank: fractions[rank])
    first, at = record.ranks[rank].loop, record.ranks[rank].at
    left_s = None
    if going and first is not None and at is not None and first.iterations:
        took, made = at.time - first.time, fractions[rank] - first.iterations[0] / first.iterations[1]
        waited = now - at.time
        if took >= 1 and made > 0 and waited <= max(PACE_S, took):
            left_s = max(0.0, took / made * (1 - fractions[rank]) - waited) or None
    return Progress(rank, None, None, None, None, fractions[rank], left_s, finished, size)


def lags(record: RunRecord) -> list[Lag]:
    """Return the running ranks that are clearly behind the others. The rank that is furthest behind comes first.

    Each rank is compared with the median of the ranks that are running or have finished. Small differences do not
    count, because some ranks are always a step ahead.
    """
    states = {rank.rank: rank.state for rank in record.ranks}
    by_rank = {rank: pace for rank, pace in paces(record).items() if states[rank] in ("running", "finished")}
    laps = sorted(pace.lap for pace in by_rank.values())
    # The number of steps in earlier laps is not known, so only ranks in the same lap are compared.
    by_rank = {rank: pace for rank, pace in by_rank.items() if pace.lap == laps[len(laps) // 2]}
    known = {rank: pace.steps for rank, pace in by_rank.items() if pace.steps is not None}
    if len(known) < 2:
        return []
    middle = sorted(known.values())[len(known) // 2]
    # If the ranks' epochs have different numbers of steps, a rank with fewer steps may be as far as the others.
    of_epochs = {rank: steps / (by_rank[rank].steps_each or 1) for rank, steps in known.items()}
    middle_epochs = sorted(of_epochs.values())[len(known) // 2]
    newest = max(pace.ended for pace in by_rank.values())
    rates = {
        rank: pace.rate_until(newest if states[rank] == "running" else pace.ended) for rank, pace in by_rank.items()
    }
    typical = statistics.median([rate for rate in rates.values() if rate is not None] or [0.0])
    # The other ranks may be ahead by only one report, which this rank is about to make.
    between = statistics.median_high(by_rank[rank].between for rank in known)
    behind = []
    for rank, steps in known.items():
        epoch_steps, rate = by_rank[rank].steps_each, rates[rank]
        least = max(FEWEST_BEHIND, SHARE_BEHIND * min(middle, epoch_steps or middle), between, by_rank[rank].between)
        missing = min(middle - steps, round((middle_epochs - of_epochs[rank]) * (epoch_steps or 1)))
        if missing > least and states[rank] == "running":
            behind.append(Lag(rank, missing, rate / typical if rate is not None and typical else None))
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
    if metrics.iterations is not None:
        return metrics.iterations[0] / metrics.iterations[1]
    return None


def _left_s(course: _Course, now: float) -> float | None:
    if course.newest_done is None or course.oldest_done is None or course.newest_done >= 1:
        return None
    took, made, waited = course.since - course.oldest.time, course.newest_done - course.oldest_done, now - course.since
    if took < 1 or made <= 0:
        return None  # too early to tell
    if waited > max(PACE_S, 2 * took / course.advances):
        return None  # the rank has become slower, or hangs
    left = took / made * (1 - course.newest_done) - waited
    return left if left > 0 else None  # if the estimated end has passed, the rank has become slower
