"""A study's file in Optuna's journal format. optuna-dashboard can open it, even while the search is running.

Data is only appended to the file. Since not every storage can append to files, the file is in the run's folder, and the
checkpoint directory has a copy.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from sparkring.errors import CheckpointError
from sparkring.runtime.storage import Location

JOURNAL = "study.journal"
PAUSE_PER_COPY = 20  # pause 20 times as long as a copy took, so that copying takes at most 1/20 of the time


class Journal:
    """The journal at `path`. A thread copies the journal to `copy`, unless `copy` is None.

    If the copy exists, the journal begins with its content, unless `fresh` is set. Raises CheckpointError if the copy
    cannot be read.
    """

    def __init__(self, path: Path, copy: Location | None, *, fresh: bool = False) -> None:
        self.path = path
        self._copy = copy
        self._size = 0  # how many bytes of the journal to copy; later bytes may be a part of a trial
        self._changed, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if copy is not None and not fresh:
            with _in_words(copy):
                path.write_bytes(max(map(_read, _copies(copy)), key=len))

    def study(self, name: str, mode: str, pruner: Any) -> Any:
        """Return the study called `name`, which may be new. Raises CheckpointError if the journal is damaged."""
        import optuna

        level = optuna.logging.get_verbosity()
        with _in_words(self._copy), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # before Optuna 5, the journal counts as experimental
            try:
                optuna.logging.set_verbosity(optuna.logging.WARNING)  # otherwise, Optuna prints that it made a study
                return optuna.create_study(
                    storage=optuna.storages.JournalStorage(_backend(self.path)),
                    study_name=name,
                    direction="minimize" if mode == "min" else "maximize",
                    pruner=pruner,
                    load_if_exists=True,
                )
            finally:
                optuna.logging.set_verbosity(level)

    def changed(self) -> None:
        """Have the thread copy the journal in its current state, without waiting for the copy."""
        if self._copy is None:
            return
        self._size = self.path.stat().st_size
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="sparkring-study", daemon=True)
            self._thread.start()
        self._changed.set()

    def close(self) -> None:
        """Wait until all of the journal has been copied."""
        if self._thread is not None:
            self._closing.set()
            self._changed.set()
            self._thread.join()
            self._thread = None

    def _write(self) -> None:
        """Copy the journal whenever it has changed, until close() is called. Runs in a thread."""
        assert self._copy is not None
        made = False
        while not (self._closing.is_set() and not self._changed.is_set()):
            self._changed.wait()
            self._changed.clear()
            began = time.monotonic()
            with contextlib.suppress(
                Exception
            ):  # of any type: each kind of storage has errors of its own, which Kept reports
                if not made:
                    self._copy.fs.makedirs(self._copy.path.rpartition("/")[0], exist_ok=True)
                    made = True
                content = self.path.read_bytes()[: self._size]
                for target in _copies(self._copy):
                    target.fs.pipe_file(target.path, content)
            self._closing.wait(PAUSE_PER_COPY * (time.monotonic() - began))


def _backend(path: Path) -> Any:
    """Return Optuna's backend for a journal file, but without its lock and without waiting for the disk.

    With the lock and the waiting, a trial would take 20 ms longer. Neither is needed: only this process writes the
    file, one line at a time. If the machine crashes, the copy in the checkpoint directory may lack the last trials.
    """
    from optuna.storages.journal import JournalFileBackend

    class Appended(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            lines = "".join(f"{json.dumps(log, separators=(',', ':'))}\n" for log in logs)
            with path.open("ab", buffering=0) as file:
                file.write(lines.encode())

    return Appended(str(path))


def _copies(copy: Location) -> tuple[Location, Location]:
    """Return the two files of the copy, in the order in which they are written.

    There are two because some mounts cannot rename files: if the kernel is killed while it is writing one of the files,
    the other one is intact.
    """
    return copy._replace(path=f"{copy.path}.new", written=f"{copy.written}.new"), copy


def _read(file: Location) -> bytes:
    """Return the content of a journal file, without an incomplete last line."""
    try:
        journal: bytes = file.fs.cat_file(file.path)
    except FileNotFoundError:
        return b""
    return journal[: journal.rfind(b"\n") + 1]


@contextlib.contextmanager
def _in_words(copy: Location | None) -> Any:
    """Turn storage errors, and Optuna's errors about a damaged journal, into a CheckpointError."""
    try:
        yield
    except Exception as error:  # of any type: Optuna has no error of its own for a damaged journal
        if copy is None:
            raise
        raise CheckpointError(
            f"the study in {copy.written} cannot be read ({type(error).__name__}: {error}): remove the file to start "
            "a new search, or use another directory."
        ) from error
