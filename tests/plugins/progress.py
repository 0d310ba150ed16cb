"""Says, while workers of pytest-xdist run tests, how many there are, which ones run, and about how long they will take.

The time left is estimated from how long each test took when it was last run in this checkout.
"""

from __future__ import annotations

import time

import pytest

EVERY_S = 60.0  # between two lines
KEPT = "sparkring/seconds"  # in pytest's cache: by test, how long it took


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Progress:
    """Follows the tests of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._last: dict[str, float] = config.cache.get(KEPT, {}) if hasattr(config, "cache") else {}
        self._expected: dict[str, float] = {}  # for each test that has not ended
        self._whole = 0.0
        self._took: dict[str, float] = {}
        self._running: dict[str, float] = {}  # for each test that is running, when it began
        self._begun = self._told = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if self._expected:
            return  # all workers collect the same tests
        known = [self._last[name] for name in ids if name in self._last]
        # An estimate from a few of the tests would be far off.
        usual = sum(known) / len(known) if len(known) > len(ids) / 2 else None
        self._expected = {name: 0.0 if usual is None else self._last.get(name, usual) for name in ids}
        self._whole = sum(self._expected.values())
        self._begun = time.monotonic()
        workers = self._config.option.numprocesses
        about = f": about {minutes(self._whole / workers)}, as they took here before" if self._whole else ""
        self._tell(f"{len(ids):,} tests, {workers} workers{about}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.setdefault(nodeid, time.monotonic())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid] = self._took.get(report.nodeid, 0.0) + report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._expected.pop(nodeid, None)
        now = time.monotonic()
        if now - self._told < EVERY_S or not self._expected:
            return
        passed_s, left = now - self._begun, sum(self._expected.values())
        about = f", about {minutes(passed_s * left / (self._whole - left))}" if left < self._whole else ""
        running = ", ".join(f"{name.partition('@')[0]:.80} ({minutes(now - at)})" for name, at in self._running.items())
        self._tell(
            f"After {minutes(passed_s)}: {len(self._expected):,} tests left{about}. Running: {running or 'none'}"
        )

    def pytest_sessionfinish(self) -> None:
        if self._config.cache:
            self._config.cache.set(KEPT, {**self._last, **{name: round(took, 2) for name, took in self._took.items()}})

    def _tell(self, line: str) -> None:
        self._told = time.monotonic()
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\n{line}")
