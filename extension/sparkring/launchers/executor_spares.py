"""Decides which launches on Spark use the spare processes of the executors, and what these processes import.

A spare process stays on its executor after the ranks that it has forked, for the next launch of this notebook.
executor/spares.py says when it can serve a launch.
"""

from __future__ import annotations

import os
import secrets

from sparkring.executor.orders import ExecutorSpareOrder
from sparkring.launchers.base import Code
from sparkring.launchers.spare import IDLE_S, IMPORT_S, LEAST_BYTES, wanted_by
from sparkring.worker.member import process


class ExecutorSpares:
    """The spare processes that serve the launches of this notebook."""

    def __init__(self) -> None:
        self._key, self._token = secrets.token_hex(8), secrets.token_hex(32)
        self._asked = False  # whether there may be spare processes
        self._changes = False  # whether the code of the last launch changed an environment that imports depend on

    def order(self, code: Code | None, environment: dict[str, str]) -> ExecutorSpareOrder | None:
        """Return what tasks need to have members forked; None if they need new processes.

        `code` is what the ranks will run, and `environment` has the variables that the launch sets for members.
        """
        order = ExecutorSpareOrder(self._key, self._token)
        if not process.LINUX or os.environ.get("SPARKRING_SPARE") == "0":
            asked, self._asked = self._asked, False
            return order if asked else None  # it makes spare processes exit
        modules = () if code is None else wanted_by(code)
        if code is None or not modules or self._changes:
            return None
        self._asked = True
        return order._replace(
            modules=modules,
            environments=[environment, dict(code.notebook), dict(code.environment)],
            import_s=IMPORT_S,
            idle_s=IDLE_S,
            start_bytes=LEAST_BYTES,
            least_bytes=LEAST_BYTES // 2,
        )

    def note_changes(self, changes: bool) -> None:
        """Record whether the code of a launch has changed an environment on which imports depend."""
        self._changes = changes


spares = ExecutorSpares()
