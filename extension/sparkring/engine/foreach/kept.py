"""Keeps the results of a run's items in the checkpoint directory. A later run of the cell runs only the other items."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import cloudpickle

from sparkring.checkpointing.directory import Directory, open_directory
from sparkring.checkpointing.entries import Last
from sparkring.checkpointing.results import ITEMS, Result, Results, user_secret
from sparkring.engine.foreach.content import digest
from sparkring.engine.foreach.schedule import Item
from sparkring.engine.foreach.slot import Ended
from sparkring.history import describe, run_store
from sparkring.history.item_records import ItemRecord
from sparkring.history.record import RunRecord
from sparkring.runtime.resume_point import Here
from sparkring.runtime.storage import Location, locate

KEY_CHARACTERS = 32
WRITERS = 8  # how many results are written at the same time: on remote storage, each of them takes a while


class Kept:
    """The items' results and checkpoints in the directory at `path`.

    `meaning` identifies the code that the items run, each on `size` ranks. With `fresh`, results and checkpoints of
    earlier runs are not used. Results are written in threads. `news` holds notices for the user, which the pool takes
    out and records. When an earlier result is used for the first time, `told_if_used` is added to `news`. Raises
    PathError or CheckpointError if the directory cannot be read.
    """

    def __init__(self, path: str, meaning: str, size: int, *, fresh: bool = False) -> None:
        self.location: Location = locate(path).anchored()
        self.news: collections.deque[str] = collections.deque()
        self.told_if_used = f"items with a result in {self.location.written} do not run again (--fresh runs all)"
        self.fresh = fresh
        self._meaning = meaning
        self._size = size
        self._results = Results(self.location, user_secret(run_store.home().parent))
        self._there = set() if fresh else self._results.keys()
        self._items = self._results.items()
        self._seen: collections.Counter[str] = collections.Counter()
        self._directories: dict[str, Directory] = {}
        self._writers = ThreadPoolExecutor(WRITERS, "sparkring-results")
        self._unwritten: set[Future[None]] = set()
        self._used = self._failed = False
        self._lock = threading.Lock()

    def key_of(self, values: Mapping[str, Any]) -> str:
        """Return the key of the next item, which has these values.

        The key depends on the values, on the code, and on how many items with these values came before. So two items
        with equal values have different keys, and each keeps a result of its own.
        """
        found = digest(self._meaning, dict(values))
        self._seen[found] += 1
        return digest(found, self._seen[found])[:KEY_CHARACTERS]

    def key_of_code(self, *more: Any) -> str:
        """Return a key that depends on the code and on `more`, but on no item."""
        return digest(self._meaning, *more)[:KEY_CHARACTERS]

    def find(self, key: str) -> tuple[Any, Result] | None:
        """Return the value and the result that an earlier run has kept under `key`; None if the item has to run."""
        found = self._results.read(key) if key in self._there else None
        if found is None:
            return None
        try:
            # Unpickling is safe: read() returns only results that are signed with this user's secret.
            value = cloudpickle.loads(found.parts[0], buffers=found.parts[1:])
        except Exception as error:  # of any type: rebuilding the value runs code of its class
            self.news.append(f"the kept value of {found.name} cannot be rebuilt here ({error}): the item runs again")
            return None
        if not self._used:
            self.news.append(self.told_if_used)
        self._used = True
        return value, found

    def keep(self, item: Item, ended: Ended, over: ItemRecord) -> None:
        """Have a thread write the result of an item, without waiting for it. `over` is the item's record."""
        told = ended.text, ended.metrics, ended.seconds, ended.pruned
        result = Result(ended.packed, item.name, *told, over.curves, over.by)
        written = self._writers.submit(self._write, item.key, result)
        self._unwritten.add(written)
        written.add_done_callback(self._unwritten.discard)

    def written(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`. Return whether all results have been written."""
        return not wait(self._unwritten.copy(), timeout_s).not_done

    @property
    def unwritten(self) -> int:
        """How many results have not been written yet."""
        return len(self._unwritten)

    def close(self) -> None:
        """Wait until the results that threads are writing have been written. The other results are not kept."""
        left = [each for each in self._unwritten.copy() if each.cancel()]
        if left:
            self.news.append(f"{describe.counted(len(left), 'result')} could not be kept, because the run was stopped")
        self._writers.shutdown()

    def here(self, key: str, record: RunRecord) -> Here:
        """Return the item's own directory, and the checkpoint from which the ranks of its next attempt continue."""
        if key not in self._directories:
            location = self.location / ITEMS / key
            if key not in self._items:  # do not list a new directory: on remote storage, this takes time
                self._directories[key] = Directory(location, None, [])
                return self._directories[key].here(record, Last())
            self._directories[key] = open_directory(location.written, self._size, "", {}, fresh=self.fresh, resume=True)
        directory = self._directories[key]
        return directory.here(record, directory.last(record))

    def _write(self, key: str, result: Result) -> None:
        """Write a result. If this fails for the first time, tell the user. Runs in a thread."""
        try:
            self._results.write(key, result)
        except Exception as error:  # of any type: each storage has its own errors
            with self._lock:
                if not self._failed:
                    self.news.append(f"{error} The run continues, but not all of its results are kept.")
                self._failed = True
