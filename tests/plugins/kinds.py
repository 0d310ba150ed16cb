"""Gives each test a kind, which depends on what the test starts, and a group, which one worker of pytest-xdist runs.

The kinds are markers, so `-m "not browser"` leaves out the tests that need a browser. Since one worker runs all tests
of a group, the things that they share (a kernel, a Spark session, a JupyterLab) are started only once. Slow groups come
first, each followed by a group that mostly waits for ranks, so that the cores are busy and not overloaded.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

# The fixtures that determine a test's kind. If a test has fixtures of several kinds, the first kind counts.
KINDS = {
    "browser": {"browser", "chromium"},
    "kernel": {"run_demo", "kernels", "shared", "spark_kernel"},
    "cluster": {"brittle_cluster", "lonely_master", "gpu_cluster"},
    "spark": {"spark"},
    "driver": {"driver"},
    "ring": {"ring", "local", "local_gang", "shared_local_gang", "pair"},
}
# The kinds of tests that compute, and the kinds that mostly wait, in the order in which their groups begin.
COMPUTING = ("gpu", "spark", "browser", "kernel", "cluster", "driver")
WAITING = ("ring", "slow", None)
WHAT = {
    "browser": "starts JupyterLab and a browser",
    "kernel": "starts a Jupyter kernel, or runs a notebook in one",
    "cluster": "starts a Spark standalone cluster of its own",
    "spark": "uses the Spark session that the tests share",
    "driver": "starts a process that runs cells, some of them on Spark",
    "ring": "starts ranks on this machine",
    "standalone(why)": "runs on a Spark standalone cluster instead of local Spark, for the reason given",
    "any_launcher": "has the same result on every launcher: run on one, and with --standalone on the cluster",
    "pair": "runs in two warm ranks that tests of several files share: see the fixture",
    "forked(*modules)": "forks its ranks on this machine from a process that has imported the modules; env is the same",
    "versions(why)": "can differ with the versions of the named packages: see TEST_VERSIONS in the Makefile",
    "slow": "takes more than a few seconds",
}


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist defines the first marker, but it need not be installed to run the tests in one process.
    for name, what in {"xdist_group(name)": "runs in the same worker of pytest-xdist as the group", **WHAT}.items():
        config.addinivalue_line("markers", f"{name}: {what}")


def places(item: pytest.Item) -> set[str]:
    """Return the launchers with which the test uses the fixtures `ring` and `spark`."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return {params[name] for name in ("ring", "spark") if name in params}


def pair_at(item: pytest.Item) -> str:
    """Return the launcher of the pair of warm ranks that the test shares with other files; '' if it uses no pair."""
    if "pair" in getattr(item, "fixturenames", ()):
        return "local"
    return next(iter(places(item)), "") if item.get_closest_marker("pair") else ""


def kind_of(item: pytest.Item) -> str | None:
    """Return the first kind to which the test belongs; None if it starts nothing."""
    if item.get_closest_marker("gpu"):
        return "gpu"
    if places(item) & {"spark", "standalone"}:
        return "spark"
    fixtures = set(getattr(item, "fixturenames", ()))
    return next((kind for kind, telling in KINDS.items() if fixtures & telling), None)


def group_of(item: pytest.Item, kind: str | None) -> str:
    """Return the test's group: its file, unless tests of several files share something."""
    file = item.path.relative_to(Path(__file__).parents[1])
    if "standalone" in places(item):
        return "standalone"
    if kind in ("browser", "cluster", "gpu"):
        return kind
    if kind == "spark":
        # One group for all would take longer than all other tests together. Files outside a folder are about models.
        return f"spark-{file.parts[0] if len(file.parts) > 1 else 'models'}"
    if pair_at(item):
        return "pair"
    if "outputs" in getattr(item, "fixturenames", ()) or (kind is None and item.get_closest_marker("slow")):
        return item.nodeid  # it shares nothing
    return str(file)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its kind and group, and order them; with --standalone, leave out tests that use no cluster."""
    if config.getoption("--standalone"):
        gone = [item for item in items if "standalone" not in places(item) and kind_of(item) != "spark"]
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]
    kinds: dict[str, str | None] = {}
    groups: dict[pytest.Item, str] = {}
    for item in items:
        kind = kind_of(item)
        groups[item] = group = group_of(item, kind)
        begun = "slow" if kind is None and item.get_closest_marker("slow") else kind
        kinds[group] = min(kinds.get(group, begun), begun, key=(*COMPUTING, *WAITING).index)
        if kind is not None:
            item.add_marker(kind)
        if group != item.nodeid:
            item.add_marker(pytest.mark.xdist_group(group))
    order = {group: at for at, group in enumerate(_interleaved(kinds))}
    items.sort(key=lambda item: (order[groups[item]], not pair_at(item)))


def _interleaved(kinds: dict[str, str | None]) -> list[str]:
    """Return the groups in the order in which they begin, given their kinds."""
    computing, waiting = (
        sorted((group for group in kinds if kinds[group] in some), key=lambda group: some.index(kinds[group]))
        for some in (COMPUTING, WAITING)
    )
    both = itertools.zip_longest(computing, waiting)
    return [group for pair in both for group in pair if group is not None]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fails if tests are not grouped: pytest-xdist would start everything in every worker."""
    if getattr(session.config.option, "loadgroup", False) and not any("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist has not grouped the tests: install the versions in constraints.txt.")
