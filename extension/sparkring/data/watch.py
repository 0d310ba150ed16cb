"""`watch("folder/*.parquet")`: the files of a folder, as they arrive."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from sparkring.errors import OptionsError
from sparkring.runtime.kernel import tell
from sparkring.runtime.storage import Location, locate

# At most so many files' rows are counted between two batches: each file may take a while on remote storage.
FOOTERS = 10
_MAGIC = (b"PAR1", b"PARE")  # the end of each Parquet file; the second one if the footer is encrypted
FORGET_AFTER_S = 600.0  # a file that has been yielded is forgotten when it has been missing for this long


class Watch:
    """Yields the paths of files that match a pattern, the oldest first, and waits for more. Made by watch().

    given() returns the files that have been yielded and still exist, and resume() sets them, so that they are not
    yielded again. backlog_rows() returns the number of rows in the Parquet files that are waiting. If many files are
    waiting, their number of rows is estimated from those of some of them.
    """

    def __init__(self, folder: Location, pattern: str, every_s: float, timeout_s: float | None) -> None:
        self._folder, self._pattern = folder, pattern
        self._every_s, self._timeout_s = every_s, timeout_s
        self._stopped = threading.Event()
        self._given: set[str] = set()
        self._sizes: dict[str, int] = {}  # the last known sizes of the files that have not been yielded
        self._incomplete: set[str] = set()  # Parquet files whose size does not change, but that have no footer
        self._rows: dict[str, int] = {}
        self._missing: dict[str, float] = {}  # files that have been yielded, and since when they have been missing

    def __repr__(self) -> str:
        return f"watch({(self._folder / self._pattern).written!r})"

    def __iter__(self) -> Iterator[str]:
        return self.files()

    def files(self, *, available_now: bool = False) -> Iterator[str]:
        """Yield the files. With `available_now`, end when no file is waiting."""
        self._stopped.clear()
        waited_since = time.monotonic()
        while True:
            found_one = False
            for name in self._ready():
                if not self._is_complete(name):
                    continue
                found_one = True
                self._given.add(name)
                self._rows.pop(name, None)
                yield (self._folder / name).written
                waited_since = time.monotonic()
            if available_now and not self._sizes.keys() - self._given - self._incomplete:
                return
            if not found_one and self._timeout_s is not None and time.monotonic() - waited_since > self._timeout_s:
                return
            if self._stopped.wait(self._every_s):
                return

    def stop(self) -> None:
        """End the iteration that is waiting for files. A later iteration goes on with the files that follow."""
        self._stopped.set()

    def given(self) -> list[str]:
        return sorted(self._given)

    def resume(self, given: Iterable[str]) -> None:
        self._given = set(given)

    def backlog_rows(self) -> int | None:
        import pyarrow.parquet as pq

        waiting = self._matching_files().keys() - self._given - self._incomplete
        for name in sorted(waiting - self._rows.keys())[:FOOTERS]:
            file = self._folder / name
            try:
                with file.fs.open(file.path, "rb") as opened:
                    self._rows[name] = pq.read_metadata(opened).num_rows
            except Exception:  # the file is not complete yet, or has been removed; fsspec's packages raise any error
                return None
        known = [self._rows[name] for name in waiting if name in self._rows]
        return round(sum(known) / len(known) * len(waiting)) if known else 0

    def _matching_files(self) -> dict[str, tuple[float, int]]:
        """Return the modification time and the size of each file that matches the pattern."""
        import fnmatch

        files = {}
        try:
            for entry in self._folder.entries():
                name = os.path.basename(str(entry["name"]).rstrip("/"))
                hidden = name.startswith((".", "_"))
                if entry["type"] == "file" and not hidden and fnmatch.fnmatch(name, self._pattern):
                    changed = entry.get("mtime") or entry.get("LastModified") or entry.get("created") or 0.0
                    files[name] = (_seconds(changed), int(entry["size"] or 0))
        except FileNotFoundError:
            pass  # the folder may be made later
        return files

    def _ready(self) -> list[str]:
        """Return the new files whose size has not changed since the last look. The others may be incomplete."""
        files = self._matching_files()
        self._forget(files)
        new = {name: stamp for name, stamp in files.items() if name not in self._given}
        ready = [name for name, (_, size) in new.items() if self._sizes.get(name) == size]
        self._incomplete.intersection_update(ready)  # the size of the others has changed
        self._sizes = {name: size for name, (_, size) in new.items()}
        return sorted(ready, key=lambda name: (new[name][0], name))

    def _is_complete(self, name: str) -> bool:
        """Return whether a file has all its bytes, as far as this can be seen: a Parquet file ends with its footer."""
        file = self._folder / name
        if name.endswith(".parquet"):
            try:
                complete = file.fs.tail(file.path, len(_MAGIC[0])) in _MAGIC
            except FileNotFoundError:
                return False
            except Exception:  # each kind of storage has its own errors; reading the file will tell the problem
                complete = True
            if not complete:
                if name not in self._incomplete:
                    tell(f"{file.written} has no Parquet footer: the stream uses this file when it is complete")
                self._incomplete.add(name)
                return False
        self._incomplete.discard(name)
        return True

    def _forget(self, names: Iterable[str]) -> None:
        """Forget files that have been missing for a while. A listing may be stale, so one listing is not enough."""
        now = time.monotonic()
        self._missing = {name: self._missing.get(name, now) for name in self._given.difference(names)}
        self._given -= {name for name, since in self._missing.items() if now - since > FORGET_AFTER_S}


def _seconds(changed: Any) -> float:
    """Return a modification time in seconds, from a number or a datetime."""
    return float(changed.timestamp() if hasattr(changed, "timestamp") else changed)


def watch(pattern: str | os.PathLike[str], *, every_s: float = 0.5, timeout_s: float | None = None) -> Watch:
    """Return the Parquet files that match `pattern`, as they arrive, for %%stream.

        %%stream sparkring.watch("dbfs:/incoming/*.parquet") --checkpoint-dir dbfs:/ml/live
        loss = train(batch["x"], batch["y"])

    `pattern` is a path (dbfs:, any URL that fsspec supports) whose last part may have `*`, `?` and `[…]`. The folder is
    looked at every `every_s` seconds. A file is used when its size has not changed between two looks, and a file called
    *.parquet only when it has its footer. The oldest file is used first. Files whose names begin with `_` or `.` are
    left out. The stream ends when no file has arrived for `timeout_s` seconds; None means never.

    Raises OptionsError if the pattern or a time is invalid.
    """
    written = os.fspath(pattern)
    folder, _, name = written.rpartition("/")
    if not name or any(letter in folder for letter in "*?["):
        raise OptionsError(
            f"watch({written!r}): only the last part of the path can be a pattern, as in 'in/*.parquet'."
        )
    if every_s <= 0 or (timeout_s is not None and timeout_s < 0):
        raise OptionsError("watch(): every_s must be more than 0, and timeout_s must not be negative.")
    return Watch(locate(folder or "."), name, every_s, timeout_s)
