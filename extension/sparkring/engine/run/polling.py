"""Waits for a condition by polling."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.1


def poll_until(
    condition: Callable[[], object],
    deadline: float,
    poll: Callable[[float], object] = time.sleep,
    *,
    every_s: float = POLL_S,
) -> bool:
    """Call `poll(seconds)` again and again until `condition()` is true.

    `seconds` is how long the call may take: `every_s`, or less if the deadline is nearer.

    Returns True, or False if the `deadline` (a time.monotonic() time, or math.inf) passes first.
    """
    while not condition():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        poll(min(every_s, left_s))
    return True
