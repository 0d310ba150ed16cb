"""Lists, checks, commits and removes the checkpoints in a directory.

A folder is a checkpoint once it has a commit.json. That file is written last, in one go, with the digests of all files
and of its own content. It never changes, so it is cached once it has been read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sparkring.checkpointing import tensors
from sparkring.checkpointing.digests import ALGORITHM, digest_of
from sparkring.checkpointing.entries import COMMIT, TIMES, Commit, Entry, File, Name, changed_at
from sparkring.errors import CheckpointDamagedError, CheckpointError, CheckpointStorageError, SparkringError
from sparkring.runtime.storage import Location, protocols

LAYOUT = 1
_SEALED = re.compile(rb'\{"digest": "(' + ALGORITHM.encode() + rb':[0-9a-f]{32})", "content": (\{.*\})\}\n', re.DOTALL)
# Object stores: they need no folders, and makedirs() would create a bucket under a misspelt name.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
_DATA = re.compile(r"rank-\d+\.safetensors")

# The commit.json files that have been read, by directory and checkpoint name. Each is stored with the size, times and
# etag that it had: if these are still the same, the file need not be read again.
_remembered: dict[str, dict[str, tuple[tuple[str, ...], Commit]]] = {}


@dataclass
class Folder:
    """A checkpoint's folder as the storage lists it.

    `sizes` maps the names of its files to their sizes. `commit` holds the size, times and etag of commit.json, or is
    None if there is no commit.json. `changed` is the time at which something in the folder last changed, in Unix
    seconds; it is 0.0 if the storage does not say.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    commit: tuple[str, ...] | None = None
    changed: float = 0.0


def listing(directory: Location) -> list[Entry]:
    """Return the checkpoints in `directory`, newest first; [] if the directory is missing. Other files are skipped.

    A checkpoint counts as complete if its files have the sizes that its commit.json lists; check() also reads the
    files. On a mount, a file that another machine has just written may not be visible yet, so a complete checkpoint may
    not be listed as complete at first. Raises CheckpointError if the directory cannot be read.
    """
    key = directory.url
    known, now = _remembered.get(key, {}), {}
    entries = []
    for name, folder in folders(directory).items():
        if folder.commit is None:
            entries.append(Entry(name, "partial", changed=folder.changed))
            continue
        commit = known[name][1] if name in known and known[name][0] == folder.commit else None
        try:
            commit = commit or read_commit(directory, name)
        except FileNotFoundError:
            continue  # it has just been removed
        except CheckpointDamagedError as error:
            entries.append(Entry(name, "corrupt", None, str(error)))
            continue
        now[name] = folder.commit, commit
        reason = _mismatch(commit, folder.sizes)
        entries.append(Entry(name, "corrupt" if reason else "committed", commit, reason))
    _remembered[key] = now
    return sorted(entries, key=lambda entry: entry.parsed.age, reverse=True)


def folders(directory: Location) -> dict[str, Folder]:
    """Return the folders in `directory` that are named like checkpoints, by name; some may be incomplete."""
    by_name: dict[str, Folder] = {}
    with in_words(f"the checkpoints in {directory.written} cannot be read"):
        directory.fs.invalidate_cache()  # fsspec caches listings without a time limit
        for info in _listed(directory):
            path = info["name"].rstrip("/")
            parts = path[len(directory.path) :].strip("/").split("/")
            if Name.of(parts[0]) is None or len(parts) > 2:
                continue
            if len(parts) == 1 and info["type"] != "directory":
                continue  # this is a file, although it has the name of a checkpoint
            folder = by_name.setdefault(parts[0], Folder())
            folder.changed = max(folder.changed, changed_at(info))
            if len(parts) == 2 and info["type"] == "file":
                folder.sizes[parts[1]] = int(info["size"])
                if parts[1] == COMMIT:
                    folder.commit = tuple(str(info.get(name)) for name in ("size", *TIMES, "etag"))
    return by_name


def look(directory: Location, name: str) -> Entry | None:
    """Return the checkpoint `name`, even if a listing does not show it yet; None if it has no commit.json."""
    commit = None
    try:
        commit = read_commit(directory, name)
        with in_words(f"the checkpoint {name} in {directory.written} cannot be read"):
            for file in commit.files:
                tensors.check_size(directory / name / file.name, file)
    except FileNotFoundError:
        return None
    except CheckpointDamagedError as error:
        return Entry(name, "corrupt", commit, str(error))
    return Entry(name, "committed", commit)


def check(directory: Location, entry: Entry) -> str:
    """Read every byte of a checkpoint, and return what is wrong with the checkpoint, or ''.

    Raises CheckpointError if the checkpoint cannot be read.
    """
    if entry.state == "partial":
        return f"it was not completed: it has no {COMMIT}"
    try:
        for file in read_commit(directory, entry.name).files:
            path = directory / entry.name / file.name
            tensors.check_size(path, file)
            with in_words(f"{path.written} cannot be read"):
                tensors.check_digest(path, file)
    except FileNotFoundError:
        return f"its {COMMIT} has been removed"
    except CheckpointDamagedError as error:
        return str(error)
    return ""


def read_commit(directory: Location, name: str) -> Commit:
    """Return the contents of commit.json.

    Raises FileNotFoundError if there is no commit.json, and CheckpointDamagedError if it is damaged.
    """
    with in_words(f"the checkpoint {name} in {directory.written} cannot be read"):
        content = _unsealed(directory.fs.cat_file((directory / name / COMMIT).path))
        if content is None:
            raise CheckpointDamagedError(f"{COMMIT} does not match its digest")
        if content.get("layout") != LAYOUT:
            raise CheckpointDamagedError(f"{COMMIT} was written by another version of sparkring")
        try:
            return commit_of(content)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointDamagedError(f"{COMMIT} cannot be parsed ({error!r})") from error


def make(directory: Location, name: str) -> None:
    """Make the folder of a checkpoint, and the directory if it does not exist. Raises OSError."""
    new = directory
    missing = []
    while directory.local and not new.fs.exists(new.path):
        new = new._replace(path=os.path.dirname(new.path))
        missing.append(new)
    if not _WITHOUT_FOLDERS.intersection(protocols(directory.fs)):
        directory.fs.makedirs((directory / name).path, exist_ok=True)
    for parent in missing:  # a crash of the machine would lose the checkpoint if these folders were not on the disk
        sync_folder(parent)


def write_commit(directory: Location, name: str, commit: Commit) -> None:
    """Turn a folder whose files are all written and closed into a checkpoint. Raises OSError."""
    folder = directory / name
    sync_folder(folder)  # the files' names must be on the disk before the commit that lists them
    _write_sealed(folder / COMMIT, content_of(commit))
    sync_folder(folder)
    sync_folder(directory)


def write_part(directory: Location, name: str, rank: int, file: File, not_finite: str) -> None:
    """Tell rank 0 that this rank's file is written and closed, and what in it is not finite. Raises OSError."""
    sync_folder(directory / name)
    content = {"layout": LAYOUT, "file": list(file), "not_finite": not_finite}
    _write_sealed(directory / name / part(rank), content)


def read_part(directory: Location, name: str, rank: int) -> tuple[File, str] | None:
    """Return what a rank has reported with write_part(); None if it is missing or incomplete. Raises OSError."""
    path = (directory / name / part(rank)).path
    directory.fs.invalidate_cache(path)
    if not directory.fs.exists(path):
        return None
    try:
        content = _unsealed(directory.fs.cat_file(path))
    except FileNotFoundError:
        return None
    if not content or content.get("layout") != LAYOUT:
        return None
    return File(*content["file"]), content.get("not_finite", "")


def data(rank: int) -> str:
    """Return the name of the file with a rank's arrays."""
    return f"rank-{rank}.safetensors"


def part(rank: int) -> str:
    """Return the name of the file with which a rank reports that its data has been written."""
    return f"rank-{rank}.json"


def remove(directory: Location, entry: Entry) -> None:
    """Remove a checkpoint, its commit first: a folder without a commit is not a checkpoint. Raises OSError."""
    folder = directory / entry.name
    files = [file.name for file in entry.commit.files] if entry.commit else [data(0)]
    parts = [part(rank) for rank in range(1, len(files))]
    # Remove each file separately: rm() of the folder would stop at a file that a stale listing still shows.
    for name in (COMMIT, *files, *parts):
        with contextlib.suppress(FileNotFoundError):
            folder.fs.rm_file((folder / name).path)
    if folder.local:
        with contextlib.suppress(OSError):  # rmdir() fails if the folder contains something else
            os.rmdir(folder.path)
            return
    with contextlib.suppress(FileNotFoundError):
        folder.fs.rm(folder.path, recursive=True)


@contextlib.contextmanager
def in_words(what: str) -> Iterator[None]:
    """Turn file system errors into a CheckpointStorageError that has `what`, the reason and advice.

    A FileNotFoundError is raised unchanged.
    """
    try:
        yield
    except (SparkringError, FileNotFoundError):
        raise
    except Exception as error:  # each of fsspec's packages raises its own errors
        raise CheckpointStorageError(f"{what}: {described(error)}") from error


def described(error: Exception) -> str:
    """Describe a file system error in a sentence, followed by advice. Return the text of a CheckpointError as it is."""
    if isinstance(error, CheckpointError):
        return str(error)
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "Free up some space, keep fewer checkpoints, or use another directory."
    elif number == errno.EROFS or isinstance(error, PermissionError):
        advice = "Use a directory that this user can read and write."
    elif isinstance(error, FileNotFoundError):
        advice = "Check the name of the bucket, container or mount."
    else:
        advice = "Check the storage, or use another directory."
    return f"{reason.rstrip('.')}. {advice}"


def sync_folder(folder: Location) -> None:
    """Flush a local folder to the disk (fsync), so that its new files are not lost in a power cut."""
    if not folder.local:
        return
    try:
        descriptor = os.open(folder.path, os.O_RDONLY)
    except OSError:  # not every mount can open folders
        return
    try:
        tensors.sync(descriptor)
    finally:
        os.close(descriptor)


def _listed(directory: Location) -> Iterator[dict[str, Any]]:
    fs = directory.fs
    with contextlib.suppress(FileNotFoundError):
        if not directory.local:  # an object store lists everything below a path in one call
            yield from fs.find(directory.path, withdirs=True, detail=True).values()
            return
        for info in directory.entries():
            yield info
            if info["type"] == "directory" and Name.of(info["name"].rpartition("/")[2]):
                with contextlib.suppress(FileNotFoundError):  # it has just been removed
                    yield from directory._replace(path=info["name"]).entries()


def _write_sealed(file: Location, content: dict[str, Any]) -> None:
    text = json.dumps(content, separators=(",", ":")).encode()
    with tensors.open_synced(file) as out:
        out.write(b'{"digest": "%s", "content": %s}\n' % (digest_of(text).encode(), text))


def _unsealed(sealed: bytes) -> dict[str, Any] | None:
    """Return the content that _write_sealed() wrote; None if it does not match its digest."""
    match = _SEALED.fullmatch(sealed)
    if match is None or digest_of(match[2]).encode() != match[1]:
        return None
    content: dict[str, Any] = json.loads(match[2])
    return content


def content_of(commit: Commit) -> dict[str, Any]:
    """Return a commit as plain values for JSON."""
    return {
        **commit._asdict(),
        "layout": LAYOUT,
        "files": [list(file) for file in commit.files],
        "uses": dict(commit.uses),
        # JSON has no NaN or infinity: write them as text
        "metrics": {key: value if math.isfinite(value) else str(value) for key, value in commit.metrics.items()},
    }


def commit_of(content: dict[str, Any]) -> Commit:
    """Return the commit from which content_of() made `content`. Raises KeyError, TypeError or ValueError."""
    files = tuple(File(str(name), int(size), str(digest)) for name, size, digest in content["files"])
    for file in files:
        if not _DATA.fullmatch(file.name) or not file.digest.startswith(f"{ALGORITHM}:"):
            raise ValueError(file.name)
    known = {name: content[name] for name in Commit._fields if name in content or name not in Commit._field_defaults}
    metrics = {str(name): float(value) for name, value in content["metrics"].items()}
    return Commit(**{**known, "files": files, "metrics": metrics})


def _mismatch(commit: Commit, sizes: dict[str, int]) -> str:
    """Describe the first file of `commit` that is missing in `sizes` or has a different size; '' if all files match."""
    for file in commit.files:
        if file.name not in sizes:
            return f"{file.name} is missing"
        if sizes[file.name] != file.size_bytes:
            return tensors.size_mismatch(file, sizes[file.name])
    return ""
