"""Checks binder/ against repo2docker's rules, and the Dockerfile, as far as this is possible without building an image.

The rules are in repo2docker's documentation: https://repo2docker.readthedocs.io/en/latest/configuration/
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from sparkring.tools import build_horovod

ROOT = Path(__file__).parents[1]
BINDER = ROOT / "binder"
# The files that repo2docker reads for Python; it silently ignores files with other names.
READ = {"apt.txt", "environment.yml", "postBuild", "requirements.txt", "runtime.txt", "start"}
PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")  # Debian Policy 5.6.1


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """Return the words of postBuild's lines, without assignments before a command."""
    lines = (BINDER / "postBuild").read_text(encoding="utf-8").splitlines()
    found = [shlex.split(line, comments=True) for line in lines if "$(" not in line]
    return [words for words in found if words]


def options(words: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(words) if option == name]


def test_files_have_the_names_that_are_read() -> None:
    names = {path.name for path in BINDER.iterdir()}
    assert names <= READ
    assert "postBuild" in names
    # If there is an environment.yml, repo2docker uses conda's Python and ignores the other two files.
    assert not ("environment.yml" in names and names & {"requirements.txt", "runtime.txt"})


def test_python_is_the_one_that_the_constraints_are_for(setup: configparser.ConfigParser) -> None:
    name, _, version = (BINDER / "runtime.txt").read_text(encoding="utf-8").strip().partition("-")
    assert (name, version) == ("python", "3.11")
    assert version in SpecifierSet(setup["options"]["python_requires"])
    assert f"Python {version}" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_system_packages_are_plain_names() -> None:
    names = (BINDER / "apt.txt").read_text(encoding="utf-8").splitlines()
    assert names
    assert all(PACKAGE.fullmatch(name) for name in names)


def test_post_build_can_be_run() -> None:
    script = BINDER / "postBuild"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(script)], check=True)
    staged = subprocess.run(
        ["git", "ls-files", "--stage", str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not staged.stdout or staged.stdout.startswith("100755 ")  # the mode that the file has in a clone


def test_the_package_is_installed_with_the_constraints(
    commands: list[list[str]], setup: configparser.ConfigParser
) -> None:
    (install,) = (words for words in commands if words[:5] == ["python", "-m", "pip", "install", "--constraint"])
    (constraints,) = options(install, "--constraint")
    assert (ROOT / constraints).is_file()
    package, *others = install[6:]
    folder, extras = re.fullmatch(r"([./]+)\[(.+)\]", package).groups()  # type: ignore[union-attr]
    assert (ROOT / folder / "setup.cfg").is_file()
    assert set(extras.split(",")) <= set(setup["options.extras_require"])
    pinned = {
        Requirement(line).name.lower()
        for line in (ROOT / constraints).read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    assert {Requirement(other).name for other in others} <= pinned


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="asks the installed packages what they need, and Binder's are for 3.11"
)
def test_what_the_notebooks_import_is_installed(commands: list[list[str]], setup: configparser.ConfigParser) -> None:
    """Every package that a notebook imports is named by postBuild, or is required by a package that postBuild names."""
    named = [word for words in commands for word in words if "pip" in words and re.fullmatch(r"[a-z-]+", word)]
    brought = with_what_they_need({*required(setup, "all"), *named})
    check_brought(imported("*"), brought)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="asks the installed packages what they need")
def test_what_the_quickstart_imports_comes_with_the_demo(setup: configparser.ConfigParser) -> None:
    """`make demo` installs the extra `demo` and nothing else."""
    check_brought(imported("quickstart"), with_what_they_need(required(setup, "demo")))


def check_brought(modules: set[str], brought: set[str]) -> None:
    """Check that each module that does not come with Python or sparkring is in one of the distributions `brought`."""
    homes = metadata.packages_distributions()
    ours = {"sparkring", "sparkdl", "spark_tensorflow_distributor", "horovod"}  # sparkring provides or builds these
    for name in modules - ours - sys.stdlib_module_names:
        assert brought & {canonicalize_name(home) for home in homes[name]}, name


def required(setup: configparser.ConfigParser, *extras: str) -> set[str]:
    """Return the names of the distributions that sparkring requires with these extras."""
    lines = "\n".join(
        [setup["options"]["install_requires"], *(setup["options.extras_require"][name] for name in extras)]
    )
    needs = [Requirement(line) for line in lines.split("\n") if line]
    others = {extra for need in needs if need.name == "sparkring" for extra in need.extras}
    return {need.name for need in needs} | (required(setup, *others) if others else set())


def imported(notebooks: str) -> set[str]:
    """Return the packages that cells of the notebooks of this name import."""
    sources = [
        "".join(cell["source"])
        for path in (ROOT / "notebooks").glob(f"{notebooks}.ipynb")
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    return set(re.findall(r"^ *(?:from|import) (\w+)", "\n".join(sources), re.MULTILINE))


def with_what_they_need(names: set[str]) -> set[str]:
    """Return the distributions and everything that they require, as far as it is installed."""
    found: set[str] = set()
    waiting = {canonicalize_name(name) for name in names}
    while waiting:
        name = waiting.pop()
        found.add(name)
        try:
            needs = [Requirement(line) for line in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:  # for another platform
            continue
        needed = {
            canonicalize_name(need.name) for need in needs if not need.marker or need.marker.evaluate({"extra": ""})
        }
        waiting |= needed - found
    return found


def test_commands_exist(commands: list[list[str]], setup: configparser.ConfigParser) -> None:
    ours = {word for words in commands for word in words if word.startswith("sparkring-")}
    declared = dict(line.split(" = ") for line in setup["options.entry_points"]["console_scripts"].strip().splitlines())
    assert ours == {"sparkring-build-horovod"} <= set(declared)
    (build,) = (words for words in commands if ours & set(words))
    accepted = {option for action in build_horovod.parser()._actions for option in action.option_strings}
    assert {word for word in build if word.startswith("--")} - {"--cpu-list"} <= accepted  # an option of taskset


def test_the_dockerfile_names_what_is_there(setup: configparser.ConfigParser) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (python,) = re.findall(r"(?m)^FROM python:(.+)-slim$", text)
    assert (BINDER / "runtime.txt").read_text(encoding="utf-8").strip() == f"python-{python}"
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(re.findall(r"(?m)^RUN make (\S+)", text)) <= set(targets)
    (install,) = re.findall(r"(?m)^RUN \.venv/bin/python -m pip install (.+)", text)
    assert (ROOT / options(shlex.split(install), "--constraint")[0]).is_file()
    (extra,) = re.findall(r"'\.\[(\w+)\]'", install)
    assert extra in setup["options.extras_require"]
    (packages,) = re.findall(r"--no-install-recommends (.+?) &&", text)
    assert set(packages.split()) == set((BINDER / "apt.txt").read_text(encoding="utf-8").split())
