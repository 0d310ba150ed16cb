"""Finds the versions of the notebook's packages, and compares them with those in the ranks' Python."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import re
import sys
import types
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import sparkring

MODULES = ("horovod", "tensorflow", "keras", "torch", "jax", "pyspark", "numpy", "petastorm", "pyarrow")
# The packages to look for if the package of a module may have a different name from the module.
_PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tf-nightly"),
    "sklearn": ("scikit-learn",),
}

# sparkring and cloudpickle are sent with the task.
_ALWAYS_THERE = frozenset({"__main__", "sparkring", "cloudpickle", *sys.stdlib_module_names})


def package_names(module: str) -> tuple[str, ...]:
    """Return the names of the packages that may provide a top-level module."""
    return _PACKAGES.get(module, (module,))


@functools.cache  # the search takes some milliseconds, which would slow a short cell on a warm gang
def versions() -> tuple[tuple[str, str], ...]:
    """Return the names and versions of Python, sparkring and the installed packages for `MODULES`."""
    packages = ((name, version_of(name)) for name in MODULES)
    ours = ("python", platform.python_version()), ("sparkring", sparkring.__version__)
    return (*ours, *((name, version) for name, version in packages if version))


def show_versions(*modules: str) -> None:
    """Print one line with the versions of Python and of `modules`, such as "tensorflow". The modules are not imported.

    Without arguments, print what the record of a run contains: the versions of Python and sparkring, and of the
    installed packages for frameworks, Spark and data formats.
    """
    pairs = versions()
    if modules:
        pairs = (
            ("python", platform.python_version()),
            *((name, version_of(name) or (installed().get(name, "") if find_spec(name) else "")) for name in modules),
        )
    print(" · ".join(f"{name} {version or 'not installed'}" for name, version in pairs))  # noqa: T201  meant to print


class Difference(NamedTuple):
    """A module whose package has different versions `here` and `there`; '' stands for a missing package."""

    module: str
    here: str
    there: str


def modules_of(values: Iterable[object]) -> frozenset[str]:
    """Return the modules, outside the standard library, that ranks import to rebuild `values`, and their packages."""
    homes = {_home(value) for value in values}
    homes = {home for home in homes if home.partition(".")[0] not in _ALWAYS_THERE}
    return frozenset(name for home in homes for name in itertools.accumulate(home.split("."), "{}.{}".format))


def _home(value: object) -> str:
    if isinstance(value, types.ModuleType):
        return str(value.__name__)
    named = isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
    return str((value if named else type(value)).__module__)


def installed() -> dict[str, str]:
    """Return a dict from each installed top-level module to the version of the package that has it."""
    entries: list[Any] = sys.path  # may hold entries that are not strings, which Python ignores
    folders, times = tuple(entry for entry in entries if isinstance(entry, str)), []
    for folder in folders:
        with contextlib.suppress(OSError):
            times.append(os.stat(folder).st_mtime_ns)  # changes when pip changes a package
    return _installed(folders, tuple(times))


@functools.lru_cache(maxsize=2)  # because it searches all installed packages
def _installed(path: tuple[str, ...], times: tuple[int, ...]) -> dict[str, str]:
    # metadata.packages_distributions() takes ten times as long, and on Spark, every member needs this dict.
    by_module: dict[str, str] = {}
    packages: set[str] = set()
    for folder in map(Path, path):
        with contextlib.suppress(OSError):  # a zip, or a folder that does not exist
            for name in os.listdir(folder):
                package, _, version = name.removesuffix(".dist-info").partition("-")
                if name.endswith((".dist-info", ".egg-info")) and package not in packages:
                    packages.add(package)
                    modules = _modules_of_wheel(folder / name) if version and name.endswith(".dist-info") else None
                    if modules is None:
                        modules, version = _described(metadata.PathDistribution(folder / name))
                    for module in modules:
                        by_module.setdefault(module, version)
    return by_module


def _modules_of_wheel(folder: Path) -> list[str] | None:
    """Return the top-level modules of the package whose .dist-info is `folder`, or None if it does not list them."""
    with contextlib.suppress(OSError):
        return (folder / "top_level.txt").read_text(encoding="utf-8").split()
    with contextlib.suppress(OSError):
        return re.findall(r"(?m)^(\w+)(?=[/.])", (folder / "RECORD").read_text(encoding="utf-8"))
    return None


def _described(package: metadata.Distribution) -> tuple[list[str], str]:
    """Return the top-level modules and the version of a package, from its metadata."""
    named = package.read_text("top_level.txt")
    modules = named.split() if named else [file.parts[0].partition(".")[0] for file in package.files or ()]
    return modules, package.version or ""


def modules_of_distribution(package: metadata.Distribution) -> list[str]:
    """Return the top-level modules of an installed package."""
    return [name for name in _described(package)[0] if name.isidentifier()]


def difference(modules: Iterable[str], there: Mapping[str, str]) -> Difference | None:
    """Return the first of `modules` that is installed here, but is missing or has another minor version `there`."""
    here = installed()
    for module in sorted(modules):
        if here.get(module) and minor(here[module]) != minor(there.get(module, "")):
            return Difference(module, here[module], there.get(module, ""))
    return None


def minor(version: str) -> list[str]:
    """Return the first two numbers of a version."""
    return re.findall(r"\d+", version)[:2]


def version_of(module: str) -> str:
    """Return the version of the installed package that provides `module`, or '' if none is installed."""
    for package in package_names(module):
        with contextlib.suppress(metadata.PackageNotFoundError):
            if version := metadata.version(package):  # None if the package's metadata is broken
                return version
    return ""
