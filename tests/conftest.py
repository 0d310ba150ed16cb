"""Loads the plugins in tests/plugins, and defines the fixtures that are too small for a plugin."""

from __future__ import annotations

import builtins
import gc
import importlib.util
import linecache
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# With this variable, each of thousands of ranks would compile sparkring, and each test worker would compile all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# While three workers share two cores, threads of OpenMP that wait for one another by spinning take CPU time from the
# threads that they wait for: a training in PyTorch then takes up to four times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests that are not about spare processes must neither find one nor be slowed down by one.
os.environ["SPARKRING_SPARE"] = "0"
# By default, gc runs after every 700 new objects, and visits all objects of TensorFlow and PyTorch again and again.
# This would take a tenth of the time of the tests in this process. The leak watch collects garbage when it needs to.
gc.set_threshold(100_000, 50, 100)
# No test depends on the machine's speed. By default, Hypothesis fails a test whose example takes more than 200 ms.
_ANY_SPEED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("quick", max_examples=40, **_ANY_SPEED)
settings.register_profile("thorough", max_examples=300, **_ANY_SPEED)  # for make test-all
settings.load_profile("quick")

pytest_plugins = (
    "kinds",
    "extended",
    "versions",
    "waiting",
    "leaks",
    "clusters",
    "spares",
    "rings",
    "drivers",
    "connect",
    "pools",
    "fake_nvml",
    "gpu_checks",
    "progress",
    "tables",
)  # in tests/plugins; each plugin may use the plugins before it


# Petastorm needs pyarrow below 15 and NumPy below 2, which have no builds for Python 3.13.
collect_ignore = ["data/test_petastorm.py"] if sys.version_info >= (3, 13) else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--standalone", action="store_true", help="run the behaviour suite on a real Spark standalone cluster"
    )
    parser.addoption(
        "--pictures",
        action="store_true",
        help="show panels in the dark theme, too, with screenshots in build/browser; train the quickstart's whole nets",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Use a separate temporary folder, because other programs may leave files in the machine's folder.
    folder = tempfile.mkdtemp(prefix="tests-of-")
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture
def notebook_cell(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a cell as ipykernel does, in a namespace with `values`, and returns the namespace.

    The cell's lines are only in linecache, not in a file.
    """

    def run(source: str, filename: str = "/tmp/ipykernel_1/2.py", **values: Any) -> dict[str, Any]:
        source = textwrap.dedent(source)
        lines = source.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, filename, (len(source), None, lines, filename))
        namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins, **values}
        exec(compile(source, filename, "exec", dont_inherit=True), namespace)
        return namespace

    return run


@pytest.fixture(scope="session")
def run_demo() -> Any:
    """Return the module notebooks/run_demo.py, which `make demo` runs. It can execute any of the notebooks."""
    path = Path(__file__).parents[1] / "notebooks" / "run_demo.py"
    spec = importlib.util.spec_from_file_location("run_demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
