"""Tests of the package itself: its public names, and errors at import."""

from __future__ import annotations

import configparser
import datetime
import functools
import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from markdown_it import MarkdownIt
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
from sparkring.products import HOMES

ROOT = Path(__file__).parents[1]


def test_no_package_hides_a_public_name():
    """A package called `run` would replace the function sparkring.run() as soon as something imports it."""
    packages = {module.name for module in pkgutil.iter_modules(sparkring.__path__)}
    assert {"engine", "errors", "notebook"} <= packages
    assert not packages & {*sparkring.__all__, *HOMES}


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
    ("pyspark", "pip install 'sparkring\\[spark\\]'`, or use -n -2", lambda: session.find_cluster(2, print)),
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
    with pytest.raises(SparkringError, match=rf"needs {package}, .*not installed here: `{advice}"):
        use()


ALONE = """
import sparkring
from IPython.core.interactiveshell import InteractiveShell

assert sparkring.run(lambda: __import__("os").getpid(), np=-2, framework="plain").values
assert sparkring.foreach(lambda item: item + 1, [1, 2], np=-2, checkpoint_dir=DIRECTORY).values == [2, 3]
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "sparkring")
shell.run_line_magic("runs", "")
for use in ("sparkring.shards", "sparkring.predict", "sparkring.partitions", "%shards x", "%%stream x -n -2\\n1"):
    error = shell.run_cell(use).error_in_exec
    said = f"{use.split()[0]} needs pyarrow, which is not installed here: `pip install 'sparkring[data]'`."
    assert str(error) == said, error
"""


def test_what_is_installed_without_extras_is_enough_to_launch(tmp_path):
    """Packages that belong to extras are neither imported by a launch nor by its ranks."""
    for package in ("matplotlib", "pandas", "pyarrow", "pyspark", "scipy", "tensorflow", "torch"):
        absent = f'raise ModuleNotFoundError("No module named {package!r}", name="{package}")'
        (tmp_path / f"{package}.py").write_text(absent, encoding="utf-8")
    code = ALONE.replace("DIRECTORY", repr(str(tmp_path / "kept")))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")}
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


USER_CODE = """
import sparkring

def train(store: int) -> float:
    return store / 2

sparkring.foreach(train, [1, 2]).table.sort_values("loss")
best: float = sparkring.foreach(train, [1, 2], np=-2).values[0]
later: sparkring.BackgroundRun[sparkring.ForeachResult] = sparkring.foreach(train, [1], background=True)
plan: sparkring.Plan = sparkring.foreach(train, [1], plan=True)
losses: list[float] = sparkring.run(train, 3, np=-2).values
written: sparkring.Predictions = sparkring.predict("dbfs:/x", "dbfs:/m", inputs=["x"], to="dbfs:/y")
rank: int = sparkring.world().rank
for name in dir(sparkring.watch("in/*.parquet")):
    print(name, sparkring.shards("dbfs:/x", 32, columns={"x": ["a", "b"]}).size)
sparkring.foreach(train, [1, 2], cores=2)  # error: Unexpected keyword argument "cores"
sparkring.predict("dbfs:/x", "dbfs:/m", to="dbfs:/y")  # error: No overload variant of "predict"
result: sparkring.StreamResult = sparkring.last_result  # error: Incompatible types in assignment
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Build the sdist, from it the wheel, and install this into an environment of its own; return what was made."""
    folder = tmp_path_factory.mktemp("built")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    source = folder / "source"
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    build = "from setuptools.build_meta import *; import sys; print(getattr(sys.modules[__name__], {!r})({!r}))"
    python = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    python([sys.executable, "-c", build.format("build_sdist", str(folder))], cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    python([sys.executable, "-c", build.format("build_wheel", str(folder))], cwd=unpacked)
    (wheel,) = folder.glob("*.whl")

    venv.create(folder / "venv")
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)  # as pip does for a package without scripts
    # The packages that sparkring needs. An editable sparkring among them is not found, as it is known by a .pth file.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return SimpleNamespace(sdist=sdist, wheel=wheel, interpreter=folder / "venv/bin/python", packages=packages)


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_the_wheel_has_what_users_need(distributions, tmp_path):
    """The wheel that is built from the sdist is complete."""
    told = [distributions.interpreter, "-c", "import sparkring; print(sparkring.__file__)"]
    found = subprocess.run(told, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(distributions.packages)), found
    for needed in ("py.typed", "views/panel/panel.bundle.js", "views/panel/panel.bundle.css"):
        assert (distributions.packages / "sparkring" / needed).is_file(), needed
    if importlib.util.find_spec("twine"):
        twine = [sys.executable, "-m", "twine", "check", "--strict", distributions.sdist, distributions.wheel]
        subprocess.run(twine, capture_output=True, check=True)


def test_the_readme_of_a_release_stands_alone(tmp_path):
    """In a release, README's links and pictures lead to files in the repository, at the version's tag."""
    for name in ("README.md", "setup.cfg", "extension/sparkring/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    script = [sys.executable, ROOT / "docs/for_an_index.py", tmp_path]
    refused = subprocess.run([*script, "owner/sparkring"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "REPOSITORY=owner/sparkring" in refused.stderr
    subprocess.run([*script, "https://host/owner/sparkring"], check=True)

    page = MarkdownIt("commonmark").render((tmp_path / "README.md").read_text(encoding="utf-8"))
    targets = [target for target in re.findall(r'\b(?:href|src|srcset)="([^"#]+)', page) if "://host/" in target]
    tag = f"v{sparkring.__version__}"
    places = [re.fullmatch(rf"https://host/owner/sparkring/(blob|raw)/{tag}/(.+)", target) for target in targets]
    assert len(places) > 30
    assert all(place and (ROOT / place[2]).is_file() for place in places), targets
    assert {place[2] for place in places if place[1] == "raw"} == {
        f"docs/images/panel-{x}.webp" for x in ("dark", "light")
    }
    assert not re.findall(r'\b(?:href|src|srcset)="(?!https://|#)[^"]+"', page)
    config = configparser.ConfigParser(interpolation=None)
    config.read(tmp_path / "setup.cfg")
    assert f"Changelog = https://host/owner/sparkring/blob/{tag}/CHANGELOG.md" in config["metadata"]["project_urls"]


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
@pytest.mark.extended("library", "make check runs mypy on the package itself")
def test_the_wheel_has_what_type_checkers_need(distributions, tmp_path):
    """mypy checks a user's program, and finds its mistakes."""
    pytest.importorskip("mypy", reason="this set of versions has no mypy")
    # mypy would take a minute for these packages.
    config = "[mypy]\nstrict = True\n[mypy-pyspark.*,torch.*,tensorflow.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(config, encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(USER_CODE, encoding="utf-8")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", distributions.interpreter, program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    said = [line for line in checked.stdout.splitlines() if " error: " in line]
    wanted = [line.partition("# error: ") for line in USER_CODE.splitlines()]
    expected = {(number, text) for number, (_, mark, text) in enumerate(wanted, 1) if mark}
    assert {int(line.split(":")[1]) for line in said} == {number for number, _ in expected}, checked.stdout
    for number, text in expected:
        assert any(line.startswith(f"program.py:{number}:") and text in line for line in said), checked.stdout


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
    for name in ("data", "figures", "spark", "horovod", "tensorflow", "torch", "petastorm"):
        required += extras[name].split("\n")
    oldest = pins("constraints-oldest.txt")
    platform = {"python_version": "3.10", "sys_platform": "linux", "platform_machine": "x86_64"}
    for wanted in map(Requirement, filter(None, required)):
        bounds = [Version(each.version).release for each in wanted.specifier if each.operator == ">="]
        if wanted.name == "sparkring" or (wanted.marker is not None and not wanted.marker.evaluate(platform)):
            continue
        if bounds or "<" not in str(wanted.specifier):
            (bound,) = bounds
            assert Version(oldest[wanted.name]).release[: len(bound)] == bound, wanted


def test_the_changelog_and_the_citation_have_the_version():
    changelog, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    sections = re.findall(r"(?m)^## (\S+)", changelog)
    assert sections[:2] == ["Unreleased", sparkring.__version__]
    assert f"\nversion: {sparkring.__version__}\n" in citation
    (date,) = re.findall(rf"(?m)^## {re.escape(sparkring.__version__)} \((.+)\)$", changelog)
    assert f'date-released: "{date}"' in citation


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
    assert installed() == expected
    (tmp_path / "second/four-1.0.dist-info").mkdir()
    (tmp_path / "second/four-1.0.dist-info/top_level.txt").write_text("four")
    assert installed() == {**expected, "four": "1.0"}, "a package that was installed since then"


def test_versions_are_printed_in_one_line(capsys):
    sparkring.show_versions("numpy", "sklearn", "no_such_package")
    python = f"python {sys.version.split()[0]}"
    told = f"{python} · numpy {version('numpy')} · sklearn {version('scikit-learn')} · no_such_package not installed\n"
    assert capsys.readouterr().out == told
    sparkring.show_versions()
    assert f"{python} · sparkring {sparkring.__version__} · " in capsys.readouterr().out
