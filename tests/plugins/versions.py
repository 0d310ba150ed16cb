"""Sets of package versions: markers for tests that need certain versions, and the table of results in docs/versions.md.

`--write-versions` writes the counts of a run into the table, for each kind of test that the run included. The run must
include either all tests of a kind or none.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version


def _version(name: str) -> Version:
    """Return a package's version; 0 if it is not installed, as in the environment of `make test-gpu`."""
    try:
        return Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return Version("0")


KERAS, TORCH = _version("keras"), _version("torch")

keras_2 = pytest.mark.skipif(KERAS.major != 2, reason=f"needs Keras 2; Keras {KERAS} is installed")
keras_3 = pytest.mark.skipif(KERAS.major != 3, reason=f"needs Keras 3; Keras {KERAS} is installed")
has_petastorm = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="Petastorm needs pyarrow below 15, which has no builds for Python 3.13"
)

# The rows of the table, by the kind of their tests: see kinds.py.
ROWS = {
    None: "in one process",
    "ring": "in local ranks",
    "spark": "on Spark",
    "driver": "in a driver of their own",
    "cluster": "on a standalone cluster of their own",
    "kernel": "in a kernel, and notebooks",
    "browser": "in a browser",
}
TABLE = Path(__file__).parents[2] / "docs" / "versions.md"
# The columns of the table: for each set, its constraints and its Python. The Makefile also selects a set by its Python.
SETS = {"constraints.txt": (3, 11), "constraints-current.txt": (3, 13), "constraints-oldest.txt": (3, 10)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-versions", action="store_true", help="write what passed into docs/versions.md")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-versions") and not hasattr(config, "workerinput"):
        if sys.version_info[:2] not in SETS.values():
            raise pytest.UsageError("--write-versions: no set of versions is for this Python")
        config.pluginmanager.register(Outcomes())


class Outcomes:
    """Counts the tests of a run by kind and outcome, and writes them when it ends."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[str | None, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind = next((kind for kind in ROWS if kind in report.keywords), None)
        before = self.of.get(report.nodeid, (kind, "passed"))[1]
        self.of[report.nodeid] = kind, report.outcome if before == "passed" else before

    def pytest_sessionfinish(self) -> None:
        text = TABLE.read_text(encoding="utf-8")
        for kind, row in ROWS.items():
            counts = Counter(outcome for of, outcome in self.of.values() if of == kind)
            if counts:
                told = ", ".join(f"{counts[name]:,} {name}" for name in ("passed", "failed", "skipped") if counts[name])
                text = _with(text, row, told)
        TABLE.write_text(text, encoding="utf-8")


def _with(text: str, row: str, told: str) -> str:
    """Return the page with one cell of the table changed."""
    found = re.search(rf"(?m)^\| {re.escape(row)} \| (.*) \|$", text)
    assert found is not None, row
    cells = found[1].split(" | ")
    cells[list(SETS.values()).index(sys.version_info[:2])] = told
    return text.replace(found[0], f"| {row} | {' | '.join(cells)} |")
