"""Checks that the tools that Horovod's build needs are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from packaging.version import Version

from sparkring.tools.horovod_build.errors import AGAIN, BuildError
from sparkring.tools.horovod_build.frameworks import installed_version, torchs_build_support
from sparkring.tools.horovod_build.target import Target

OLDEST_CMAKE, FIRST_REFUSED_CMAKE = Version("3.13"), Version("4")
# The first setuptools that can build a wheel when the package named `wheel` is not installed.
FIRST_SETUPTOOLS_WITH_WHEEL = Version("70.1")
# The first setuptools without pkg_resources.packaging, which PyTorch 2.1's build support imports.
FIRST_SETUPTOOLS_WITHOUT_PACKAGING = Version("70")


def find_cmake() -> Path:
    """Return a cmake of a usable version: HOROVOD_CMAKE, else the environment's own, else the one on PATH."""
    fix = f"run `{sys.executable} -m pip install 'cmake<4'`, {AGAIN}"
    chosen = os.environ.get("HOROVOD_CMAKE")
    candidates = (
        [chosen] if chosen else [shutil.which("cmake", path=path) for path in (sysconfig.get_path("scripts"), None)]
    )
    refused = None
    for cmake in candidates:
        if cmake is None or shutil.which(cmake) is None:
            continue
        answer = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"cmake version (\d+(?:\.\d+)+)", answer.stdout)
        if version is not None and OLDEST_CMAKE <= Version(version[1]) < FIRST_REFUSED_CMAKE:
            return Path(cmake)
        refused = refused or (version and f"cmake {version[1]} at {cmake}")
    if refused:
        raise BuildError(f"{refused} cannot configure Horovod, because Gloo needs cmake 3.13 or later, below 4: {fix}")
    if chosen:
        raise BuildError(f"HOROVOD_CMAKE is {chosen}, which is not a cmake: correct this variable or unset it, {AGAIN}")
    raise BuildError(f"No cmake was found in {sysconfig.get_path('scripts')} or on PATH: {fix}")


def check_tools(target: Target) -> Path:
    """Check that all tools that the build needs are installed; return the cmake to use."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None or shutil.which(compiler) is None:
        raise BuildError(
            f"No C++ compiler was found ({compiler or 'c++, g++ or clang++ on PATH'}): install one "
            f"(Debian and Ubuntu: `apt-get install g++`; macOS: `xcode-select --install`), {AGAIN}"
        )
    probe = [compiler, f"-std=c++{target.cxx_standard}", "-x", "c++", "-fsyntax-only", os.devnull]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        raise BuildError(
            f"The C++ compiler {compiler} does not support C++{target.cxx_standard}, which the installed frameworks "
            f"need: install g++ 10 or later, set the variable CXX to it, {AGAIN}"
        )
    cmake = find_cmake()
    if shutil.which("make") is None:
        raise BuildError(f"No make was found on PATH: install it (Debian and Ubuntu: `apt-get install make`), {AGAIN}")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise BuildError(
            f"Python's headers are missing ({header}): install them (Debian and Ubuntu: `apt-get install {package}`), "
            f"{AGAIN}"
        )
    if installed_version("pip") is None:
        raise BuildError(
            f"{sys.prefix} has no pip, which builds the wheel: run `{sys.executable} -m ensurepip`, {AGAIN}"
        )
    _check_setuptools(target.torch)
    return cmake


def _check_setuptools(torch: str | None) -> None:
    setuptools = installed_version("setuptools")
    if setuptools is None or (Version(setuptools) < FIRST_SETUPTOOLS_WITH_WHEEL and installed_version("wheel") is None):
        raise BuildError(
            f"Building a wheel needs setuptools {FIRST_SETUPTOOLS_WITH_WHEEL} or later, but {sys.prefix} has "
            f"{setuptools or 'none'}: run `{sys.executable} -m pip install --upgrade setuptools`, {AGAIN}"
        )
    wants_packaging = torch is not None and "from pkg_resources import packaging" in torchs_build_support()
    if wants_packaging and Version(setuptools) >= FIRST_SETUPTOOLS_WITHOUT_PACKAGING:
        raise BuildError(
            f"Horovod cannot be built for PyTorch {torch} with setuptools {setuptools}: run `{sys.executable} -m pip "
            f"install 'setuptools<{FIRST_SETUPTOOLS_WITHOUT_PACKAGING}' wheel`, {AGAIN}"
        )
