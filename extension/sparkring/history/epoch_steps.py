"""Converts steps that are counted over all epochs to steps within the epoch.

Training loops often count their steps over all epochs. The record has steps within the epoch, whatever the user counts,
so that progress and curves are right in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.history.events import Metrics


def with_report(reports: Sequence[Metrics], report: Metrics) -> tuple[Metrics, ...]:
    """Return the reports of all ranks, which this function has returned before, with a new report at the end."""
    new_report = _within_epoch(reports, report)
    if new_report.steps != report.steps:  # earlier reports may still have the total of all epochs
        reports = [
            earlier._replace(steps=new_report.steps) if earlier.steps == report.steps else earlier
            for earlier in reports
        ]
    return (*reports, new_report)


def _within_epoch(reports: Sequence[Metrics], report: Metrics) -> Metrics:
    """Return the report with its step and its number of steps within the epoch."""
    step, steps, epoch, epochs = report.step, report.steps, report.epoch, report.epochs
    if not (step and steps and epoch):  # in an epoch with number 0, steps are the same either way
        return report
    first = next((other.epoch for other in reports if other.epoch is not None), None)
    # How many epochs come before this one. If the run continues in a later epoch, users may count from 0 or from 1.
    earlier = (epoch - first,) if first in (0, 1) else (epoch - 1, epoch)
    of_epoch = steps // epochs if epochs and steps % epochs == 0 else steps
    for length in (steps, of_epoch):  # users may give the number of steps in an epoch, or that of all epochs
        for done in earlier:
            within = step - done * length
            if done and 0 <= within <= length and (step > steps or _counts_all(reports, report, length, done)):
                return report._replace(step=within, steps=length)
    return report


def _counts_all(reports: Sequence[Metrics], report: Metrics, length: int, done: int) -> bool:
    """Whether the rank's previous report shows that the step in `report` is counted over all epochs.

    There would be `done` earlier epochs of `length` steps. A step that is counted within the epoch can have the same
    number. In that case, the last step of the previous epoch is larger than it would be otherwise.
    """
    before = next((it for it in reversed(reports) if it.rank == report.rank and (it.steps or it.ends_epoch)), None)
    if before is None or before.ends_epoch:  # a callback of a framework reports ends, and counts within the epoch
        return False
    if before.steps == length != report.steps:
        return True
    last, since = before.step or 0, (report.epoch or 0) - (before.epoch or 0)
    return since > 0 and last < (report.step or 0) and 0 <= last - (done - since) * length <= length
