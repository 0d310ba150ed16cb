"""Tests that `make test` leaves out, and `make test-all` runs: `@pytest.mark.extended(rule, why)`.

A test that runs on two launchers, and shows nothing more on one of them, is marked `extended_on(launcher, why)`. Its
part on the other launcher stays in `make test`.
"""

from __future__ import annotations

import pytest

# CONTRIBUTING.md explains the rules.
RULES = {
    "launcher": "the same on another launcher, on which it does not depend",
    "notebook": "a whole notebook beyond the quickstart",
    "repetition": "kills and long runs beyond one of each kind",
    "appearance": "a test in the browser that differs from another one only in the theme or the size",
    "library": "an estimator, a backend or a package beyond one of each kind",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"extended(rule, why): only make test-all runs it; rule is {', '.join(RULES)}")
    config.addinivalue_line("markers", "extended_on(launcher, why): only make test-all runs it on local or on spark")


def marks_on(launcher: str, definition: pytest.Item) -> list[pytest.MarkDecorator]:
    """Return the marks of the test's part on a launcher: `local` or `spark`, whether in local mode or on a cluster."""
    markers = [marker.args for marker in definition.iter_markers("extended_on")]
    return [pytest.mark.extended("launcher", why) for where, why in markers if where == launcher]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fail if a test is left out without a rule or a reason."""
    for item in items:
        for marker in item.iter_markers("extended"):
            if len(marker.args) != 2 or marker.args[0] not in RULES:
                raise pytest.UsageError(f"{item.nodeid}: extended needs one of the rules {', '.join(RULES)}, and why")
