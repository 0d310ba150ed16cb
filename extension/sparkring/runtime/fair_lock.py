"""A lock that threads get in the order in which they have asked for it."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

_LOOK_EVERY_S = 0.1


class FairLock:
    """A lock that is given to the thread that has waited longest.

    With threading.Lock, a thread that releases the lock and asks for it again at once gets it before the threads that
    were already waiting.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[object] = collections.deque()  # the first one is the holder's, or the next
        self._held = False

    def acquire(self, given_up: Callable[[], object] = lambda: False) -> bool:
        """Wait for the lock. Return False, without the lock, if `given_up()` becomes true while waiting."""
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while self._held or self._waiting[0] is not me:
                    if given_up():
                        return False
                    self._changed.wait(_LOOK_EVERY_S)
                self._held = True
                return True
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
