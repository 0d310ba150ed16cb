"""Decides which checkpoints may be removed after a save. This module does not access storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from sparkring.checkpointing.entries import Entry, Name, best

ABANDONED_AFTER_S = 3600.0  # a save that has written nothing for this long is abandoned

Mode = Literal["min", "max"]


class Policy(NamedTuple):
    """Which checkpoints of one training run to keep: the newest `keep` (None for all), and the best by `metric`.

    Without a metric, `metric` is ''. `lineage` is the id that all these checkpoints share. `resume` names the
    checkpoint that other ranks may be restoring now, '' for none. `stamp` is the stamp of the attempt that is saving.
    `alone` says that no other run is writing to this directory.
    """

    keep: int | None
    metric: str
    mode: Mode
    lineage: str
    resume: str
    stamp: int
    alone: bool

    def best(self, entries: Sequence[Entry]) -> Entry | None:
        """Return the best checkpoint of this lineage; None without a metric, or if no checkpoint has a value for it."""
        return best(of_lineage(entries, self.lineage), self.metric, self.mode) if self.metric else None


def of_lineage(entries: Sequence[Entry], lineage: str) -> list[Entry]:
    """Return the entries of one training run. Entries without a commit are left out: their lineage is unknown."""
    return [entry for entry in entries if entry.commit is not None and entry.commit.lineage == lineage]


def expired(entries: Sequence[Entry], policy: Policy) -> list[Entry]:
    """Return the checkpoints of the policy's lineage that may be removed. The newest complete one is always kept.

    Checkpoints with NaN or infinity do not count, so that they replace no good one. The newest of them is kept, too,
    until it is older than the others that are kept.
    """
    ours = of_lineage(entries, policy.lineage)
    whole = sorted((entry for entry in ours if entry.state == "committed"), key=lambda entry: entry.parsed.age)
    if policy.keep is None or not whole:
        return []
    good = [entry for entry in whole if not entry.not_finite]
    odd = [entry for entry in whole if entry.not_finite]
    recent = good[-policy.keep :] or odd[-1:]
    kept = {entry.name for entry in recent}
    # Damaged checkpoints that are newer than `oldest` stay: they may look damaged only because a listing is stale.
    oldest = recent[0].parsed.age
    kept.update(entry.name for entry in odd[-1:] if entry.parsed.age > oldest)
    top = policy.best(entries)
    if top is not None:
        kept.add(top.name)
    resumed = Name.of(policy.resume)
    if resumed is not None and sum(entry.parsed.age > resumed.age for entry in whole) < 2:
        kept.add(policy.resume)
    return [entry for entry in ours if entry.name not in kept and (entry.parsed.age < oldest or entry.not_finite)]


def abandoned(entries: Sequence[Entry], policy: Policy, now: float) -> list[Entry]:
    """Return the partial checkpoints of earlier attempts that will not be completed.

    If no other run is writing to the directory, these are all partial checkpoints of earlier attempts. Otherwise, they
    are those that have not changed for an hour.
    """
    return [
        entry
        for entry in entries
        if entry.state == "partial" and entry.parsed.stamp < policy.stamp
        if policy.alone or (entry.changed and now - entry.changed > ABANDONED_AFTER_S)
    ]
