"""Records interrupts (Stop, Ctrl-C), so that they do not raise an exception in the middle of an operation."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


def interrupted(what: str) -> KeyboardInterrupt:
    """Return a KeyboardInterrupt for the caller to raise. IPython shows it without sparkring's frames."""
    message = f"sparkring: interrupted, {what}"
    error = KeyboardInterrupt(message)
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]  # type: ignore[attr-defined]
    return error


class Interrupts:
    """A context manager. Inside its block, an interrupt sets `seen` to True and does not raise KeyboardInterrupt.

    Only the main thread of a Python process can handle interrupts. If the block runs in another thread, interrupts are
    handled as before, and only request() sets `seen`.
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
        """Restore the previous interrupt handler in this block, which runs the user's code."""
        if self._before is None:
            yield
            return
        signal.signal(signal.SIGINT, self._before)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def request(self) -> None:
        """Set `seen`, as an interrupt does. Stop buttons call this method, and any thread may call it."""
        self.seen = True

    def _note(self, number: int, frame: object) -> None:
        self.request()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold back an interrupt that arrives in the block, and raise it again after the block."""
    with Interrupts() as interrupts:
        yield
    if interrupts.seen:
        signal.raise_signal(signal.SIGINT)
