"""Keeps the results of a run's items in the checkpoint directory. A later run of the cell runs only the other items."""

from __future__ import annotations

import collections
import secrets
import threading
import time
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from sparkring.capture.content import digest
from sparkring.capture.returning import unpack_value
from sparkring.checkpointing.compatibility import changed_words
from sparkring.checkpointing.directory import CheckpointDirectory, open_directory
from sparkring.checkpointing.entries import Last
from sparkring.checkpointing.results import ITEMS, KeptResult, KeptResults, RunCode, user_secret
from sparkring.engine.foreach.item_execution import Ended
from sparkring.engine.foreach.meaning import Meaning
from sparkring.engine.foreach.schedule import Item
from sparkring.history import describe, run_store
from sparkring.history.item_records import ItemRecord
from sparkring.history.record import RunRecord
from sparkring.runtime.resume_point import Here
from sparkring.runtime.storage import Location, locate

ITEM_CHARACTERS, CODE_CHARACTERS = 32, 16
WRITERS = 8  # how many results are written at the same time: on remote storage, each of them takes a while


class Kept:
    """The items' results and checkpoints in the directory at `path`.

    `meaning` identifies the code that the items run, each on `size` ranks. With `fresh`, results and checkpoints of
    earlier runs are not used. With `keep`, those of the last run of other code are used, too, now and in later runs of
    this code. Results are written in threads. `news` holds notices for the user, which the pool takes out and records.
    When an earlier result is used for the first time, `notice_if_used` is added to `news`. Raises PathError or
    CheckpointError if the directory cannot be read.
    """

    def __init__(self, path: str, meaning: Meaning, size: int, *, fresh: bool = False, keep: bool = False) -> None:
        self.location: Location = locate(path).anchored()
        self.news: collections.deque[str] = collections.deque()
        self._notices: set[str] = set()
        self.notice_if_used = f"items with a result in {self.location.written} do not run again (--fresh runs all)"
        self.fresh = fresh
        self._meaning = meaning
        self._size = size
        self._results = KeptResults(self.location, user_secret(run_store.home().parent))
        self._there = set() if fresh else self._results.keys()
        self._code = self._code_of(meaning, keep)
        self._code_is_written = False
        codes = self._code.key, *self._code.others
        self._dropped = {key.partition("-")[0] for key in self._there if key.partition("-")[2] not in codes}
        self._only_older = bool(self._there) and not any("-" in key for key in self._there)
        self._items = self._results.items()
        self._seen: collections.Counter[str] = collections.Counter()
        self._directories: dict[str, CheckpointDirectory] = {}
        self._writers = ThreadPoolExecutor(WRITERS, "sparkring-results")
        self._unwritten: set[Future[None]] = set()
        self._used = self._failed = False
        self._lock = threading.Lock()

    def key_of(self, values: Mapping[str, Any]) -> str:
        """Return the key of the next item, which has these values.

        The key depends on the values, on the code, and on how many items with these values came before. So two items
        with equal values have different keys, and each keeps a result of its own.
        """
        content = self._meaning.contents.digest(dict(sorted(values.items())))
        if content is None:
            names = " and ".join(f"`{name}`" for name in values)
            self._tell_once(f"the content of an item's {names} cannot be compared: such items run each time")
            content = secrets.token_hex(16)
        self._seen[content] += 1
        return f"{digest(content, self._seen[content])[:ITEM_CHARACTERS]}-{self._code.key}"

    def key_of_code(self, *more: Any) -> str:
        """Return a key that depends on the code and on `more`, but on no item."""
        return digest(self._code.study, *more)[:ITEM_CHARACTERS]

    def find(self, key: str) -> tuple[Any, KeptResult] | None:
        """Return the value and the result that an earlier run has kept under `key`; None if the item has to run."""
        result = self._results.read(self._own_or_other(key, self._there)) if self._there else None
        if result is None:
            if self._only_older or key.partition("-")[0] in self._dropped:
                self._tell_once(self._why_dropped())
                self._dropped.clear()
                self._only_older = False
            return None
        try:
            # Unpickling is safe: read() returns only results that are signed with this user's secret.
            value = unpack_value(result.parts[0], result.parts[1:]).value
        except Exception as error:  # of any type: rebuilding the value runs code of its class
            self.news.append(f"the kept value of {result.name} cannot be rebuilt here ({error}): the item runs again")
            return None
        if not self._used:
            self.news.append(self.notice_if_used)
        self._used = True
        return value, result

    def keep(self, item: Item, ended: Ended, over: ItemRecord) -> None:
        """Have a thread write the result of an item, without waiting for it. `over` is the item's record."""
        outcome = ended.text, ended.metrics, ended.seconds, ended.pruned
        result = KeptResult(ended.packed, item.name, *outcome, over.curves, over.by)
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
        left = [future for future in self._unwritten.copy() if future.cancel()]
        if left:
            self.news.append(f"{describe.counted(len(left), 'result')} could not be kept, because the run was stopped")
        self._writers.shutdown()

    def here(self, key: str, record: RunRecord) -> Here:
        """Return the item's own directory, and the checkpoint from which the ranks of its next attempt continue."""
        if key not in self._directories:
            name = self._own_or_other(key, self._items)
            location = self.location / ITEMS / name
            if name not in self._items:  # do not list a new directory: on remote storage, this takes time
                self._directories[key] = CheckpointDirectory(location, None, [])
                return self._directories[key].here(record, Last())
            self._directories[key] = open_directory(location.written, self._size, "", {}, fresh=self.fresh, resume=True)
        directory = self._directories[key]
        return directory.here(record, directory.last(record))

    def _own_or_other(self, key: str, there: Container[str]) -> str:
        """Return the first of the keys that are `there`: `key`, or the item's key under one of the other codes."""
        item = key.partition("-")[0]
        return next((name for name in (key, *(f"{item}-{code}" for code in self._code.others)) if name in there), key)

    def _code_of(self, meaning: Meaning, keep: bool) -> RunCode:
        """Return the code of this run. With `keep`, the results of all other codes count as its own."""
        key = meaning.key[:CODE_CHARACTERS]
        known = self._results.code(key) if self._there else None
        code = RunCode(key, meaning.parts, time.time(), known.others if known else (), known.study if known else key)
        codes = self._results.codes() if keep and self._there else []
        codes = [other for other in codes if other.key != key and other.key not in code.others]
        if codes:
            codes.sort(key=lambda other: other.time, reverse=True)
            code = code._replace(others=[*code.others, *(other.key for other in codes)])
            code = code._replace(study=codes[0].study if code.study == key else code.study)
            self._results.write_code(code)
            self.news.append(f"{self._count(codes)} used although {_why(codes[0], code)} since then (--keep-results)")
        return code

    def _why_dropped(self) -> str:
        """Say how many results are not used, and why."""
        codes = [other for other in self._results.codes() if other.key not in (self._code.key, *self._code.others)]
        if not codes:
            count = describe.counted(len(self._there), "result")
            return f"{count} in {self.location.written} cannot be used: an earlier version of sparkring kept them"
        last = max(codes, key=lambda other: other.time)
        return (
            f"{self._count(codes)} not used, because {_why(last, self._code)} since then: these items run again "
            "(--keep-results uses the results)"
        )

    def _count(self, codes: Sequence[RunCode]) -> str:
        keys = {code.key for code in codes}
        count = len({item for item, _, key in (name.partition("-") for name in self._there) if key in keys})
        return f"{describe.counted(count, 'result')} in {self.location.written} {'is' if count == 1 else 'are'}"

    def _tell_once(self, text: str) -> None:
        if text not in self._notices:
            self._notices.add(text)
            self.news.append(text)

    def _write(self, key: str, result: KeptResult) -> None:
        """Write a result. If this fails for the first time, tell the user. Runs in a thread."""
        try:
            with self._lock:
                if not self._code_is_written:
                    self._results.write_code(self._code)
                    self._code_is_written = True
            self._results.write(key, result)
        except Exception as error:  # of any type: each storage has its own errors
            with self._lock:
                if not self._failed:
                    self.news.append(f"{error} The run continues, but not all of its results are kept.")
                self._failed = True


def _why(before: RunCode, now: RunCode) -> str:
    return changed_words(before.parts, now.parts) or "the code has changed"
