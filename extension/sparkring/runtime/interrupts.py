"""Interrupts (Stop, Ctrl-C) that are noted, and not raised in the middle of an operation."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


def interrupted(what: str) -> KeyboardInterrupt:
    """The KeyboardInterrupt to raise; IPython shows it without sparkring's frames."""
    message = f"sparkring: interrupted, {what}"
    error: Any = KeyboardInterrupt(message)
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]
    found: KeyboardInterrupt = error
    return found


class Interrupts:
    """While open, an interrupt only sets `seen`, and so does request().

    Python lets only the main thread handle interrupts. In any other thread, `seen` is set by request() alone, and
    interrupts remain the main thread's.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """For code of the user's: in this block, an interrupt does what it did before."""
        if self._before is None:
            yield
            return
        signal.signal(signal.SIGINT, self._before)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def request(self) -> None:
        """Interrupt, from any thread, as a Stop button does."""
        self.seen = True

    def _note(self, number: int, frame: object) -> None:
        self.request()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold an interrupt back until the end of the block, and then let it do what it would have done."""
    with Interrupts() as interrupts:
        yield
    if interrupts.seen:
        signal.raise_signal(signal.SIGINT)
