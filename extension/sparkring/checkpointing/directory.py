"""A run's directory of checkpoints, as the driver sees it. The driver chooses the checkpoint to continue from."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence

from sparkring.checkpointing import folder
from sparkring.checkpointing.compatibility import changes, saved_words, step_words
from sparkring.checkpointing.entries import Entry, Last, Name, newest, passed_over, stamp_after
from sparkring.errors import CheckpointError
from sparkring.history.record import RunRecord
from sparkring.runtime.resume_point import Here
from sparkring.runtime.storage import Location, locate


class CheckpointDirectory:
    """A run's directory of checkpoints, and the checkpoint that the run continues from.

    `first` is the checkpoint to continue from, or None. `skipped` are the newer checkpoints, which are damaged or not
    finite, newest first. `lineage` is an id that is the same in all checkpoints of one training run, even if it has
    been restarted or continued. No other training run may use the directory at the same time. `uses` has digests of
    what the code uses.
    """

    def __init__(
        self,
        location: Location,
        first: Entry | None,
        stamps: list[int],
        skipped: Sequence[Entry] = (),
        uses: Mapping[str, str] = {},
    ) -> None:
        self.location = location.anchored()  # ranks may change their working directory before they use it
        self.first = first
        self.skipped = skipped
        self.uses = uses
        self._stamps = stamps
        commit = first.commit if first is not None else None
        self.lineage = commit.lineage if commit is not None else f"{stamp_after(stamps)}"

    def last(self, record: RunRecord) -> Last:
        """Return the newest complete checkpoint of this training run whose weights are finite.

        A checkpoint is complete if a listing of the directory says so, or if the ranks reported it and the run has not
        since removed it or found it damaged.
        """
        gone = {checkpoint.saved.name for checkpoint in record.checkpoints if checkpoint.state != "committed"}
        known = {
            checkpoint.saved.name
            for checkpoint in record.checkpoints
            if checkpoint.attempt
            and checkpoint.saved.kind == "sparkring"
            and checkpoint.saved.folder == self.location.written
        }
        if self.first is not None:
            known.add(self.first.name)
        entries: dict[str, Entry] = {}
        # Without a listing, only the known checkpoints count. If the ranks cannot read the directory either, they raise
        # an error of their own.
        with contextlib.suppress(OSError, CheckpointError):
            entries = {entry.name: entry for entry in folder.listing(self.location)}
        there = tuple(sorted({*known, *entries} - gone))
        ours = known | {name for name, entry in entries.items() if self._ours(entry)}
        odd = {checkpoint.saved.name for checkpoint in record.checkpoints if checkpoint.saved.not_finite}
        odd |= {name for name, entry in entries.items() if entry.not_finite}
        names = [name for name in map(Name.of, ours - gone - odd) if name is not None]
        last = max(names, key=lambda name: name.age, default=None)
        if last is None:
            return Last(there=there)
        entry = entries.get(str(last))
        return Last(str(last), last.step, there, None if entry is None else entry.commit)

    def passed_over(self, record: RunRecord, last: Last) -> str:
        """Say which checkpoints of this run are newer than `last`, but not finite; return '' if there are none."""
        since = Name.of(last.name)
        odd = {
            checkpoint.saved.step: checkpoint.saved.not_finite
            for checkpoint in record.checkpoints
            if checkpoint.saved.not_finite and checkpoint.state == "committed" and checkpoint.saved.kind == "sparkring"
            if (name := Name.of(checkpoint.saved.name)) and (since is None or name.age > since.age)
        }
        return f"{passed_over(odd)} in {self.location.written}" if odd else ""

    def here(self, record: RunRecord, last: Last) -> Here:
        """Return what the driver tells the ranks about checkpoints when a new attempt begins."""
        self._stamps.append(stamp_after(self._stamps))
        return Here(
            self.location.written,
            self._stamps[-1],
            last.name,
            self.lineage,
            record.code,
            record.run_id,
            last.there,
            None if last.commit is None else folder.content_of(last.commit),
            self.uses,
        )

    def words(self, now: float) -> str:
        """Return what a run shows about the checkpoint from which it continues, and about those that it has skipped.

        Return '' if there is nothing to show. If no checkpoint is usable, the run gets none.
        """
        odd = {entry.step: entry.not_finite for entry in self.skipped if entry.not_finite}
        notes = [f"{passed_over(odd)} in {self.location.written}"] if odd else []
        if damaged := [entry for entry in self.skipped if not entry.not_finite]:
            entry, *others = damaged
            which = f"the damaged checkpoint of {step_words(entry)} in {self.location.written}"
            if others:
                many = f"{len(damaged)} damaged checkpoints in {self.location.written}"
                which = f"{many}, the newest of {step_words(entry)}"
            notes.append(f"skipped {which}: {entry.reason}")
        if self.first is not None:
            saved = saved_words(self.first, now)
            notes.append(f"continues from {saved} in {self.location.written} (--fresh starts over)")
        elif self.skipped:
            notes.append("the cell runs without a checkpoint, because none is usable")
        return "; ".join(notes)

    def _ours(self, entry: Entry) -> bool:
        return entry.state == "committed" and entry.commit is not None and entry.commit.lineage == self.lineage


def open_directory(
    path: str,
    size: int | None,
    code: str,
    data: Mapping[str, str],
    uses: Mapping[str, str] = {},
    *,
    fresh: bool = False,
    resume: bool = False,
) -> CheckpointDirectory:
    """Return the directory at `path`, for a run of `size` ranks. `data` maps the cell's data sets to their versions.

    `uses` maps the names of the values and functions that the code uses to their digests.

    The run continues from the newest checkpoint; with `fresh`, from none. If `size` is None, the run can continue from
    the shards of any number of ranks.

    Raises CheckpointError if the directory cannot be read, if the newest checkpoint has shards for another number of
    ranks, or if the cell, its data or what it uses have changed since the checkpoint was saved. `resume` allows such
    changes. Raises PathError if `path` is invalid.
    """
    location = locate(path)
    if location.local and os.path.isfile(location.path):
        raise CheckpointError(f"{path} is a file, not a directory of checkpoints: use another path.")
    try:
        entries = folder.listing(location)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint directory {path} cannot be read: {error.strerror or error}. "
            "Use a directory that this kernel and the ranks can read and write."
        ) from error
    stamps = [entry.parsed.stamp for entry in entries]
    first = None if fresh else newest(entries)
    age = (0, 0) if first is None else first.parsed.age
    newer = [entry for entry in entries if entry.parsed.age > age and not fresh]
    skipped = [entry for entry in newer if entry.state == "corrupt" or entry.not_finite]
    if first is None:
        return CheckpointDirectory(location, None, stamps, skipped, uses)
    commit = first.commit
    assert commit is not None
    saved = f"{path} has a checkpoint of {saved_words(first, time.time())}"
    if commit.sharded and size is not None and commit.size != size:
        raise CheckpointError(
            f"{saved}, in {commit.size} shards: {size} ranks cannot continue from it. "
            f"Run the cell with {commit.size} ranks, or with --fresh to start over."
        )
    if not resume and (changed := changes(first, code, data, uses)):
        raise CheckpointError(
            f"{saved}, and {changed}\nRun the cell with --resume to continue from it anyway, or with --fresh to start "
            "over (existing checkpoints are kept)."
        )
    return CheckpointDirectory(location, first, stamps, skipped, uses)
