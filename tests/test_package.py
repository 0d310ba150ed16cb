"""Tests of the package itself: its public names, and errors at import."""

from __future__ import annotations

import configparser
import datetime
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from versions import SETS

import sparkring
import sparkring.ml
from sparkring.capture.versions import installed
from sparkring.checkpointing import tensorflow_state, torch_state
from sparkring.cluster import session
from sparkring.data import parts, tensorflow_dataset, torch_dataset
from sparkring.data.tfrecord import example
from sparkring.engine.foreach.result import ForeachResult
from sparkring.errors import SparkringError
from sparkring.history import tensorboard

ROOT = Path(__file__).parents[1]


def test_no_package_hides_a_public_name():
    """A package called `run` would replace the function sparkring.run() as soon as something imports it."""
    packages = {module.name for module in pkgutil.iter_modules(sparkring.__path__)}
    assert {"engine", "errors", "notebook"} <= packages
    assert not packages & {*sparkring.__all__, *sparkring._HOMES}


def test_on_windows_the_import_says_what_to_do():
    code = "import sys; sys.platform = 'win32'; import sparkring"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: sparkring runs on Linux and macOS: on Windows, install it in WSL2" in answer.stderr


def test_petastorm_is_refused_where_it_cannot_be_installed():
    """On Python 3.13, the error says that Petastorm cannot be installed; elsewhere, it says how to install it."""
    code = "import sys; sys.modules['petastorm'] = None; from sparkring.data.petastorm import make_reader"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = (
        "cannot be installed for Python 3.1" if sys.version_info >= (3, 13) else "Petastorm is not installed: run `pip"
    )
    assert "sparkring.errors.DataError: Petastorm" in answer.stderr
    assert said in answer.stderr


def grouped_by_time():
    from pyspark.sql.types import TimestampType

    return parts._keys(pa.chunked_array([[datetime.datetime(2024, 1, 1)]]), TimestampType())


OPTIONAL = [
    ("optuna", "pip install 'sparkring\\[search\\]'", lambda: sparkring.search(lr=[1], minimize="loss")),
    ("pyspark", "pip install 'sparkring\\[spark\\]'", lambda: sparkring.ml.KerasEstimator),
    ("pyspark", "pip install 'sparkring\\[spark\\]'`, or use -n -2", lambda: session.find_session(2, print)),
    ("pandas", "pip install pandas", lambda: ForeachResult(None, {}, {}, (), {}, {}).table),
    ("pandas", "pip install pandas", grouped_by_time),
    ("torch", "pip install torch", lambda: torch_dataset.as_torch(None, (), 0)),
    ("torch", "pip install torch", lambda: torch_state.tensor([1])),
    ("tensorflow", "pip install tensorflow", lambda: tensorflow_dataset.as_tf(None, ())),
    ("tensorflow", "pip install tensorflow", lambda: tensorflow_state.tensor([1])),
    ("tensorflow", "pip install tensorflow", example.tensorflow),
    ("tensorboard", "pip install tensorboard", lambda: tensorboard.write_event_files(None)),
]


@pytest.mark.parametrize(("package", "advice", "use"), OPTIONAL)
def test_what_needs_an_optional_package_says_so(monkeypatch, package, advice, use):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SparkringError, match=rf"needs {package}, which is not installed here: `{advice}"):
        use()


def pins(constraints):
    """Return the versions in a set of constraints, by package."""
    lines = (ROOT / constraints).read_text(encoding="utf-8").splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if line and not line.startswith("#"))


def test_lower_bounds_are_what_the_oldest_set_has():
    """Each dependency has a lower bound, which is the tested version or its first parts."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    required = setup["options"]["install_requires"].split("\n")
    for name in ("spark", "horovod", "tensorflow", "torch", "petastorm"):
        required += extras[name].split("\n")
    oldest = pins("constraints-oldest.txt")
    platform = {"python_version": "3.10", "sys_platform": "linux", "platform_machine": "x86_64"}
    for wanted in map(Requirement, filter(None, required)):
        bounds = [Version(each.version).release for each in wanted.specifier if each.operator == ">="]
        if wanted.marker is not None and not wanted.marker.evaluate(platform):
            continue
        if bounds or "<" not in str(wanted.specifier):
            (bound,) = bounds
            assert Version(oldest[wanted.name]).release[: len(bound)] == bound, wanted


def test_each_set_of_versions_says_for_which_python_it_is():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for constraints, needed in SETS.items():
        name, python = constraints.removeprefix("constraints").removesuffix(".txt"), ".".join(map(str, needed))
        assert f"Python {python}" in (ROOT / constraints).read_text(encoding="utf-8")
        assert re.search(rf"(?m)^PYTHON_OF{name} := {re.escape(python)}$", makefile)


def test_versions_of_the_installed_modules(tmp_path, monkeypatch):
    """Each module has the version of the first package with its name, however the package is described."""
    described = {
        "first/one_wheel-1.2.dist-info": {"RECORD": "one/__init__.py,,\none_file.py,,\n../../bin/one,,\n"},
        "first/two-2.0.dist-info": {"top_level.txt": "two\n_two\n", "RECORD": "other/x.py,,\n"},
        "second/two-3.0.dist-info": {"top_level.txt": "two\n"},
        "second/three.egg-info": {"top_level.txt": "three\n", "PKG-INFO": "Name: three\nVersion: 4.5\n"},
    }
    for folder, files in described.items():
        (tmp_path / folder).mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("first", "nowhere", "second")])
    expected = {"one": "1.2", "one_file": "1.2", "two": "2.0", "_two": "2.0", "three": "4.5"}
    assert installed.__wrapped__() == expected


def test_versions_are_printed_in_one_line(capsys):
    sparkring.show_versions("numpy", "sklearn", "no_such_package")
    python = f"python {sys.version.split()[0]}"
    told = f"{python} · numpy {version('numpy')} · sklearn {version('scikit-learn')} · no_such_package not installed\n"
    assert capsys.readouterr().out == told
    sparkring.show_versions()
    assert f"{python} · sparkring {sparkring.__version__} · " in capsys.readouterr().out
