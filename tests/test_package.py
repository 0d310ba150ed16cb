"""The package itself: its public names, and errors at import."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib.metadata import version

import sparkring


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


def test_versions_are_printed_in_one_line(capsys):
    sparkring.show_versions("numpy", "sklearn", "no_such_package")
    python = f"python {sys.version.split()[0]}"
    told = f"{python} · numpy {version('numpy')} · sklearn {version('scikit-learn')} · no_such_package not installed\n"
    assert capsys.readouterr().out == told
    sparkring.show_versions()
    assert f"{python} · sparkring {sparkring.__version__} · " in capsys.readouterr().out
