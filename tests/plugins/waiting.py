"""Waiting for something that happens in another process or thread. All limits scale with the pace of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

_STARTS_IN_S = 0.3  # how long a process that imports NumPy takes to start on two idle cores; there, the pace is 1


def _pace() -> float:
    """Return how many times longer than there such a process takes here, with all that is running: from 1 to 10."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import numpy"], check=False, capture_output=True)
    return min(max(1.0, (time.monotonic() - begun) / _STARTS_IN_S), 10.0)


# It is measured once; the workers of pytest-xdist inherit it. On a machine whose load varies, set it by hand.
PACE = float(os.environ.get("TESTS_PACE") or _pace())
os.environ["TESTS_PACE"] = f"{PACE:.1f}"
DEADLINE_S = 180.0 * PACE  # a wait that takes this long has failed; nothing is ever expected to be that slow


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
