"""Keeps the results of a run's items in the checkpoint directory. A later run of the cell runs only the other items."""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Mapping
from typing import Any

import cloudpickle

from sparkring.checkpointing.directory import Directory, open_directory
from sparkring.checkpointing.entries import Last
from sparkring.checkpointing.results import ITEMS, Result, Results, user_secret
from sparkring.engine.foreach.content import digest
from sparkring.engine.foreach.schedule import Item
from sparkring.engine.foreach.slot import Ended
from sparkring.history import run_store
from sparkring.history.item_records import ItemRecord
from sparkring.history.record import RunRecord
from sparkring.runtime.resume_point import Here
from sparkring.runtime.storage import Location, locate

KEY_CHARACTERS = 32


class Kept:
    """The items' results and checkpoints in the directory at `path`.

    `meaning` identifies the code that the items run, each on `size` ranks. With `fresh`, results and checkpoints of
    earlier runs are not used. Results are written in a thread. `news` holds notices for the user, which the pool takes
    out and records. When an earlier result is used for the first time, `told_if_used` is added to `news`. Raises
    PathError or CheckpointError if the directory cannot be read.
    """

    def __init__(self, path: str, meaning: str, size: int, *, fresh: bool = False) -> None:
        self.location: Location = locate(path)
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
        self._waiting: queue.SimpleQueue[tuple[str, Result] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="sparkring-results", daemon=True)
        self._started = self._used = self._failed = False

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
        """Have the thread write the result of an item, without waiting for it. `over` is the item's record."""
        if not self._started:
            self._started = True
            self._writer.start()
        told = ended.text, ended.metrics, ended.seconds, ended.pruned
        self._waiting.put((item.key, Result(ended.packed, item.name, *told, over.curves, over.by)))

    def close(self) -> None:
        """Wait until all results have been written."""
        if self._started:
            self._started = False
            self._waiting.put(None)
            self._writer.join()

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

    def _write(self) -> None:
        """Write one result after another until close() is called. Runs in a thread."""
        while (found := self._waiting.get()) is not None:
            try:
                self._results.write(*found)
            except Exception as error:  # of any type: each storage has its own errors
                if not self._failed:
                    self.news.append(f"{error} The run continues, but not all of its results are kept.")
                self._failed = True
