"""Lists all checkpoints in a directory for `%checkpoints`: sparkring's and those of other tools."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from sparkring.checkpointing.entries import Entry, Name, best, changed_at, newest
from sparkring.checkpointing.foreign import ListedFile, Other, recognised
from sparkring.errors import CheckpointError, OptionsError
from sparkring.runtime.storage import Location, locate

DEPTH = 3  # how many levels of folders to search: enough for BACKUP/chief/ckpt-1.index
FOLDERS = 200  # the most folders to search, so that a directory with many folders is listed quickly


class Inventory(NamedTuple):
    """The checkpoints in `directory` (as the user wrote it) at `time` (Unix seconds).

    `entries` are sparkring's checkpoints, newest first; `others` are those of other tools. `checked` says whether every
    byte of `entries` was read, and `exists` says whether the directory exists. `metric` ('' for none) and `mode`
    determine the best entry. If the newest entry has a state for each key of a stream, `keys` has the columns of --by,
    and the number of keys.
    """

    directory: str
    time: float
    entries: tuple[Entry, ...] = ()
    others: tuple[Other, ...] = ()
    checked: bool = False
    metric: str = ""
    mode: Literal["min", "max"] = "min"
    exists: bool = True
    keys: tuple[tuple[str, ...], int] | None = None

    @property
    def newest(self) -> Entry | None:
        """The checkpoint from which a run would continue."""
        return newest(self.entries)

    @property
    def best(self) -> Entry | None:
        """The checkpoint with the best value of the metric; None without a metric."""
        return best(self.entries, self.metric, self.mode) if self.metric else None


def directory_of(value: Any, name: str, magic: str = "%checkpoints") -> Location:
    """Return the directory that `value` names: `value` is a path, a URL, or the result of sparkring.checkpoints(…).

    `name` is what the user wrote after `magic`. Raises OptionsError if `value` names no directory, and PathError if its
    path or URL is invalid.
    """
    written = getattr(value, "directory", value)
    if not isinstance(written, str | os.PathLike):
        raise OptionsError(
            f"{magic} takes a path or the result of sparkring.checkpoints(…), but {name} is of type "
            f"{type(value).__name__}."
        )
    if value is name and name.isidentifier() and not os.path.exists(name):
        raise OptionsError(f"{magic} {name}: there is neither a variable nor a folder of that name.")
    return locate(written)


def names_directory(value: Any) -> bool:
    """Return whether to suggest a variable with this value as a directory. Strings are left out: most are not paths."""
    return isinstance(value, os.PathLike) or type(value).__name__ == "Store"


def inventory(
    location: Location,
    *,
    check: bool = False,
    metric: str = "",
    mode: Literal["min", "max"] = "min",
    say: Callable[[int, int, int, int], None] = lambda *_: None,
) -> Inventory:
    """Return the checkpoints in a directory. Runs may be writing to the directory at the same time.

    With `check`, all bytes are read and compared with their digests. Before each checkpoint and after the last, `say`
    is called with four numbers: checkpoints done, checkpoints in all, bytes done, bytes in all. Raises CheckpointError
    if the directory cannot be listed.
    """
    from sparkring.checkpointing.folder import listing
    from sparkring.checkpointing.store import keyed_counts

    entries = listing(location)
    if check:
        entries = _checked(location, entries, say)
    others = tuple(recognised(_files(location)))
    exists = bool(entries or others) or location.fs.exists(location.path)
    keys, last = None, newest(entries)
    if last is not None:
        with contextlib.suppress(CheckpointError):  # what cannot be read is not counted
            keys = keyed_counts(location, last)
    return Inventory(location.written, time.time(), tuple(entries), others, check, metric, mode, exists, keys)


def _checked(location: Location, entries: list[Entry], say: Callable[[int, int, int, int], None]) -> list[Entry]:
    """Read all bytes of the committed `entries`, and return `entries` with the damaged ones marked as "corrupt".

    A checkpoint that a run removes while it is being read looks damaged, so damaged checkpoints that no longer exist
    are left out.
    """
    from sparkring.checkpointing import folder

    sizes = {entry.name: entry.commit.size_bytes for entry in entries if entry.state == "committed" and entry.commit}
    read_bytes = 0
    damaged: dict[str, str] = {}
    for done, entry in enumerate(entry for entry in entries if entry.name in sizes):
        say(done, len(sizes), read_bytes, sum(sizes.values()))
        if reason := folder.check(location, entry):
            damaged[entry.name] = reason
        read_bytes += sizes[entry.name]
    say(len(sizes), len(sizes), read_bytes, read_bytes)
    if not damaged:
        return entries
    left = {entry.name for entry in folder.listing(location)}
    return [
        entry._replace(state="corrupt", reason=damaged[entry.name]) if entry.name in damaged else entry
        for entry in entries
        if entry.name not in damaged or entry.name in left
    ]


def _files(location: Location) -> list[ListedFile]:
    """Return the files in the directory and some levels below, except those of sparkring's checkpoints."""
    files: list[ListedFile] = []
    folders = [("", 1)]
    for below, depth in folders:  # the list grows during the loop
        for info in _listed(location, below):
            name = str(info["name"]).rstrip("/").rpartition("/")[2]
            path = f"{below}/{name}" if below else name
            if info["type"] != "directory":
                files.append(ListedFile(path, int(info.get("size") or 0), changed_at(info)))
            elif depth < DEPTH and len(folders) < FOLDERS and not Name.of(name):
                folders.append((path, depth + 1))
    return files


def _listed(location: Location, below: str) -> list[dict[str, Any]]:
    at = location / below if below else location
    try:
        location.fs.invalidate_cache(at.path)
        return list(at.entries())
    except OSError:  # it does not exist, or was removed after its parent was listed
        return []
