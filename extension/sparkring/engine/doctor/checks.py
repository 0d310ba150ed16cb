"""Runs checks that may take long or hang, with a time limit, and so that an interrupt ends them at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import TypeVar

from sparkring.history.describe import duration
from sparkring.runtime.interrupts import held_back

Answer = TypeVar("Answer")
Tell = Callable[[str], None]  # is called repeatedly with what is being checked, and for how long

_POLL_S = 0.1
_INTERRUPTED_S = 0.7  # after an interrupt, a check has this long to release what it holds


class TooSlow(Exception):
    """A check has not ended within its time limit."""


def answer(doing: str, check: Callable[[threading.Event], Answer], tell: Tell, limit_s: float) -> Answer:
    """Return the result of `check(cancelled)`, which runs in a thread.

    Meanwhile, `tell` is called with `doing` and the elapsed time. If the check is interrupted or takes longer than
    `limit_s`, `cancelled` is set, and KeyboardInterrupt or TooSlow is raised. The thread of a check that ignores
    `cancelled`, for example because a network drive hangs, is left behind.
    """
    cancelled, future = threading.Event(), Future[Answer]()

    def run() -> None:
        try:
            future.set_result(check(cancelled))
        except BaseException as error:  # raised again by result()
            future.set_exception(error)

    thread = threading.Thread(target=run, name="sparkring-doctor", daemon=True)
    started = time.monotonic()
    try:
        with held_back():  # an interrupt inside start() would leave a thread that cannot be joined
            thread.start()
        while True:
            try:
                return future.result(_POLL_S)
            except NotYet:
                if future.done():  # the check itself raised a TimeoutError
                    raise
            elapsed_s = time.monotonic() - started
            tell(f"{doing}: {duration(int(elapsed_s))}")
            if elapsed_s > limit_s:
                raise TooSlow(f"no answer within {duration(int(limit_s))}")
    finally:
        cancelled.set()
        thread.join(_INTERRUPTED_S)
