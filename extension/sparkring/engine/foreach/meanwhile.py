"""Keeps a pool going while the user's iterable computes the next item."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable


class Meanwhile:
    """A context manager. While its block runs, another thread calls `work()` every `every_s` seconds.

    The block must not use what work() uses. Outside the block, and once end() has been called, work() does not run.
    If work() raises an exception, the end of the block raises it, too, and work() is not called again.
    """

    def __init__(self, work: Callable[[], object], every_s: float) -> None:
        self._work = work
        self._every_s = every_s
        self._allowed = threading.Lock()  # the other thread holds this lock while it works, the pool outside the block
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None:
            self._allowed.acquire()
            # Jupyter finds the cell that output belongs to in the context.
            run = contextvars.copy_context().run
            self._thread = threading.Thread(target=run, args=(self._run,), name="sparkring-meanwhile", daemon=True)
            self._thread.start()
        self._allowed.release()

    def __exit__(self, *_: object) -> None:
        self._allowed.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """End the thread. Call this outside the block."""
        self._ended.set()
        if self._thread is not None:
            self._allowed.release()
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            with self._allowed:
                if self._ended.is_set():
                    return
                try:
                    self._work()
                except Exception as error:  # of any type: it is raised again in the other thread
                    self._error = error
                    return
