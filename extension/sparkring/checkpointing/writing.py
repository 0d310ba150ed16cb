"""Carries out a save: writes the files and the commit, then removes old checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sparkring.checkpointing import folder, retention, tensors
from sparkring.checkpointing.entries import Commit, Entry, File
from sparkring.checkpointing.finite import Check, Watched
from sparkring.checkpointing.retention import Policy
from sparkring.checkpointing.tensors import FileLayout
from sparkring.errors import CheckpointError, CheckpointStorageError
from sparkring.runtime import report
from sparkring.runtime.kernel import tell
from sparkring.runtime.storage import Location
from sparkring.wire.messages import CheckpointDamaged, CheckpointFailed, CheckpointRemoved, CheckpointSaved

OTHERS_LIMIT_S = 600.0  # how long to wait for the next file of another rank
_LOOK_FIRST_S, _LOOK_LAST_S = 0.02, 1.0  # the first and the longest pause between two checks for these files

_complained: set[str] = set()


class CheckpointDraft(NamedTuple):
    """A checkpoint that is to be written. `commit` has no files yet.

    `began` is the time at which save() was called (time.monotonic()). `blocked_s` is how long a save in the background
    held up the training, or None if the training waits for the whole save.
    """

    directory: Location
    name: str
    rank: int
    layout: FileLayout
    metadata: Mapping[str, Any]
    commit: Commit
    policy: Policy
    began: float
    blocked_s: float | None
    watch: Mapping[str, Watched]  # the arrays that must be finite


def carry_out(save: CheckpointDraft, buffers: Iterable[memoryview]) -> None:
    """Write this rank's file; rank 0 then commits, reports, and removes old checkpoints. Raises CheckpointError."""
    try:
        written = _written(save, buffers)
        if written is None:
            return
        files, odd = written
        # Listing the directory takes time, so it is listed before the commit, which can then be reported at once.
        others = _others(save)
        not_finite = save.commit.not_finite or odd
        commit = save.commit._replace(files=files, time=time.time(), not_finite=not_finite)
        folder.write_commit(save.directory, save.name, commit)
    except BaseException as error:  # interrupts, too: remove the files that have been written
        if not save.commit.sharded:
            with contextlib.suppress(Exception):  # the error of the save is raised instead
                folder.remove(save.directory, Entry(save.name, "partial"))
        if not isinstance(error, Exception):
            raise
        reason = folder.described(error)
        where = save.directory.written
        report.tell(CheckpointFailed(where, save.commit.step, reason))
        message = f"the checkpoint of step {save.commit.step:,} could not be saved in {where}: {reason}"
        if not report.connected():
            tell(message)
        of_the_state = isinstance(error, CheckpointError) and not isinstance(error, CheckpointStorageError)
        raise (CheckpointError if of_the_state else CheckpointStorageError)(message) from error
    _committed(save, commit, others)


def tell_damaged(directory: Location, entry: Entry, reason: str) -> None:
    """Tell the driver that a checkpoint is damaged."""
    report.tell(CheckpointDamaged(directory.written, entry.name, entry.step, reason))


def _written(save: CheckpointDraft, buffers: Iterable[memoryview]) -> tuple[tuple[File, ...], str] | None:
    """Write this rank's file, and return the files of all ranks once they exist, with what in them is not finite.

    Return None on ranks that do not commit.
    """
    place = save.directory / save.name
    folder.make(save.directory, save.name)
    check = Check(save.layout, save.watch)
    file = tensors.write(place / folder.data(save.rank), save.layout, save.metadata, check.pieces(buffers))
    if not save.commit.sharded:
        return (file,), check.words
    if save.rank:
        folder.write_part(save.directory, save.name, save.rank, file, check.words)
        return None
    parts = {0: (file, check.words), **_of_others(save)}
    odd = (f"{words} (rank {rank})" for rank, (_, words) in parts.items() if words)
    return tuple(part for part, _ in parts.values()), next(odd, "")


def _of_others(save: CheckpointDraft) -> dict[int, tuple[File, str]]:
    """Wait until all ranks except 0 have reported their files, and return these reports in the order of the ranks.

    The reports are looked up by name, because a listing may be stale.
    """
    reports: dict[int, tuple[File, str]] = {}
    heard, pause_s = time.monotonic(), _LOOK_FIRST_S
    missing = list(range(1, save.commit.size))
    while True:
        for rank in missing:
            part = folder.read_part(save.directory, save.name, rank)
            if part is not None:
                reports[rank], heard = part, time.monotonic()
        missing = [rank for rank in missing if rank not in reports]
        if not missing:
            return dict(sorted(reports.items()))
        if time.monotonic() - heard > OTHERS_LIMIT_S:
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise CheckpointStorageError(
                f"no state was received from {ranks} within {OTHERS_LIMIT_S:,.0f} s. With sharded=True every rank must "
                "call save() for the same steps, in a directory that all ranks can reach."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_LAST_S)


def _others(save: CheckpointDraft) -> list[Entry]:
    """Return the directory's other checkpoints."""
    try:
        return [entry for entry in folder.listing(save.directory) if entry.name != save.name]
    except (CheckpointError, OSError) as error:
        _complain(save.directory, error)
        return []


def _committed(save: CheckpointDraft, commit: Commit, others: list[Entry]) -> None:
    """Report the new checkpoint, and remove those that need not be kept. The save succeeds even if a removal fails."""
    entries = [Entry(save.name, "committed", commit), *others]
    top = save.policy.best(entries)
    took_s = time.monotonic() - save.began
    report.tell(
        CheckpointSaved(
            save.directory.written,
            save.name,
            commit.step,
            commit.size_bytes,
            took_s,
            took_s if save.blocked_s is None else save.blocked_s,
            commit.metrics,
            best=top is not None and top.name == save.name,
            not_finite=commit.not_finite,
        )
    )
    for entry in retention.expired(entries, save.policy):
        if _removed(save.directory, entry):
            report.tell(CheckpointRemoved(save.directory.written, entry.name))
    for entry in retention.abandoned(others, save.policy, time.time()):
        if _has_no_commit(save.directory, entry.name):
            _removed(save.directory, entry)


def _has_no_commit(directory: Location, name: str) -> bool:
    """Return whether a checkpoint really has no commit. It is looked up by name, because a listing may be stale."""
    try:
        return folder.look(directory, name) is None
    except CheckpointError:
        return False


def _removed(directory: Location, entry: Entry) -> bool:
    try:
        folder.remove(directory, entry)
    except Exception as error:  # each of fsspec's packages raises its own errors
        _complain(directory, error)
        return False
    return True


def _complain(directory: Location, error: Exception) -> None:
    """Say that old checkpoints cannot be removed, but only once for each directory."""
    if directory.written not in _complained:
        _complained.add(directory.written)
        reason = folder.described(error)
        tell(f"old checkpoints in {directory.written} cannot be removed, so the directory grows: {reason}")
