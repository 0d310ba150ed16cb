"""Saves checkpoints in the background while training continues. A rank waits for these saves at the end of its cell."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable

_unfinished: dict[PendingSave, None] = {}  # oldest first; a failed save stays here until its error is raised


class PendingSave:
    """A save in its own thread. If the save fails, wait() raises the error.

    The thread is created in advance, not by start(), because a new thread takes the GIL and delays the training.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._pid = os.getpid()
        self._save: Callable[[], None] | None = None
        self._may_run = threading.Lock()  # the thread can acquire it once the save may run
        # Before Python 3.13, a thread counts as ended once its join() has been interrupted. So wait() uses this lock.
        self._ended = threading.Lock()
        for lock in (self._may_run, self._ended):
            lock.acquire()
        threading.Thread(target=self._run, name="sparkring-checkpoint", daemon=True).start()

    def start(self, save: Callable[[], None]) -> None:
        """Begin to run `save`."""
        self._save = save
        _unfinished[self] = None
        self._may_run.release()

    def cancel(self) -> None:
        """Let the thread end without a save, unless start() was called."""
        if self._may_run.locked():
            self._may_run.release()

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if self._save is not None:
                self._save()
        except Exception as error:  # wait() raises it in the training's own thread
            self.error = error
        else:
            _unfinished.pop(self, None)
        finally:
            self._ended.release()

    def wait(self) -> None:
        """Wait until the save is done, and raise its error unless it was raised before."""
        if self._pid != os.getpid():
            return  # a forked child has a copy of its parent's memory, but not the parent's threads
        with self._ended:
            pass
        _unfinished.pop(self, None)
        error, self.error = self.error, None
        if error is not None:
            raise error


def finish() -> None:
    """At the end of a cell, wait for the saves of all stores, and raise the first error not reported yet."""
    errors = []
    for save in list(_unfinished):
        try:
            save.wait()
        except Exception as error:  # the other saves must still be waited for
            errors.append(error)
    if errors:
        raise errors[0]


@atexit.register
def _at_exit() -> None:
    with contextlib.suppress(Exception):  # the save has already reported its error, and no code could handle it at exit
        finish()
