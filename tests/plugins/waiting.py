"""Waiting for something that happens in another process or thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

DEADLINE_S = 180.0  # a wait that takes this long has failed; nothing is ever expected to be that slow


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until `condition()` is true, and return its value; fail at the deadline, naming `what`."""
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not reached after {deadline_s:.0f} s: {what}"
        time.sleep(0.02)
    return found


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    """`wait_until(condition, what)`: see until()."""
    return until
