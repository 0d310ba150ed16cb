"""Build a Horovod wheel for the TensorFlow and PyTorch of this environment, once.

Horovod publishes no wheels, and its last release is compiled with an older C++ standard than current
frameworks need. This command downloads the source, edits it, builds it with Gloo (without MPI) and
keeps the wheel in the user's cache, in a folder named after the versions that it was built for.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs
from packaging.version import Version

from sparkring.errors import SparkringError
from sparkring.tools.pace import Pace
from sparkring.tools.watch import Progress, telling_lines, watch, why_failed

HOROVOD = "0.28.1"
# The recipe's number is part of a wheel's key, so that wheels of an older recipe are not used. Raise it when the edits
# to the source, or the build's environment variables, change. TensorFlow 2.16 and later need other edits, so their
# recipe has a number of its own.
RECIPE, RECIPE_WITH_KERAS_3 = 2, 3
FIRST_TENSORFLOW_WITH_KERAS_3 = Version("2.16")
# The names under which variants of the TensorFlow package are published.
TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tensorflow-rocm", "tensorflow-aarch64")
OLDEST_CMAKE, FIRST_REFUSED_CMAKE = Version("3.13"), Version("4")
# The first setuptools that can build a wheel when the package named `wheel` is not installed.
FIRST_SETUPTOOLS_WITH_WHEEL = Version("70.1")
# The first setuptools without pkg_resources.packaging, which PyTorch 2.1's build support imports.
FIRST_SETUPTOOLS_WITHOUT_PACKAGING = Version("70")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
AGAIN = "then run this command again."
_WITHOUT_CUDA = (
    "horovod.torch takes tensors in the CPU's memory only, since no CUDA toolkit with headers and libraries was found. "
    "For tensors on GPUs, install such a toolkit and build again with --force --install."
)


class BuildError(SparkringError):
    """Horovod cannot be built or does not load; the message says what to do next."""


@dataclass(frozen=True)
class Target:
    """What a wheel is built for. Equal targets can share a wheel."""

    python: str
    platform: str
    tensorflow: str | None
    torch: str | None
    cxx_standard: int

    @property
    def key(self) -> str:
        """The name of the cache folder that holds the wheel."""
        recipe = RECIPE_WITH_KERAS_3 if self.has_keras_3 else RECIPE
        built_for = [self.python, self.platform, *self._named("tf", "torch"), f"cxx{self.cxx_standard}"]
        return "-".join([f"horovod{HOROVOD}", *built_for, f"r{recipe}"])

    @property
    def has_keras_3(self) -> bool:
        """Whether this TensorFlow comes with Keras 3, that is, from 2.16 on."""
        return self.tensorflow is not None and Version(self.tensorflow) >= FIRST_TENSORFLOW_WITH_KERAS_3

    @property
    def frameworks(self) -> list[str]:
        """The names of the frameworks, which are also the names of Horovod's subpackages for them."""
        return [name for name in ("tensorflow", "torch") if getattr(self, name)]

    def _named(self, tensorflow: str, torch: str) -> list[str]:
        """Return the versions of the frameworks, each after the given name of its framework."""
        return [name + version for name, version in ((tensorflow, self.tensorflow), (torch, self.torch)) if version]

    def __str__(self) -> str:
        frameworks = " and ".join(self._named("TensorFlow ", "PyTorch "))
        return f"Horovod {HOROVOD} for {frameworks} on {self.python}, {self.platform}"


@dataclass(frozen=True)
class Edit:
    """One replacement in Horovod's source."""

    path: str
    old: str
    new: str


def detect() -> Target:
    """Return the target for the running environment. The frameworks are not imported."""
    tensorflow, torch = _installed(*TENSORFLOW_NAMES), _installed("torch")
    if not tensorflow and not torch:
        raise BuildError(
            f"Neither TensorFlow nor PyTorch is installed in {sys.prefix}, so there is nothing to build Horovod for: "
            f"install one of them with pip, {AGAIN}"
        )
    return Target(
        python=f"cp{sys.version_info.major}{sys.version_info.minor}",
        platform=sysconfig.get_platform().replace("-", "_").replace(".", "_"),
        tensorflow=tensorflow,
        torch=torch,
        cxx_standard=_cxx_standard(tensorflow, torch),
    )


def _installed(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None if none is."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _cxx_standard(tensorflow: str | None, torch: str | None) -> int:
    """Return the C++ standard for Gloo and for Horovod's PyTorch part. The TensorFlow part chooses its own standard."""
    standard = 17 if tensorflow and Version(tensorflow) >= FIRST_TENSORFLOW_WITH_KERAS_3 else 14
    if torch:
        # The compiler flags that PyTorch gives to extensions name the standard that its headers need.
        named = re.findall(r"-std=c\+\+(\d+)", _torchs_build_support())
        fallback = 17 if Version(torch) >= Version("2.1") else 14
        standard = max([standard, fallback, *map(int, named)])
    return standard


def _torchs_build_support() -> str:
    """Return the source of torch.utils.cpp_extension; '' if PyTorch has no such file."""
    file = Path(str(metadata.distribution("torch").locate_file("torch/utils/cpp_extension.py")))
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def edits(target: Target) -> list[Edit]:
    """Return the changes to Horovod's source that this target needs."""
    # Build without debug information, since generating it takes a third of the compiler's time.
    wanted = [Edit("setup.py", "'RelWithDebInfo'", "'Release'")]
    if target.cxx_standard != 14:
        # The first file sets the standard for Gloo, the second for the PyTorch part, and both must be the same. Gloo's
        # constants are inline in C++17 but not in C++14, so with two standards a constant would be defined twice, and
        # linking would fail.
        old, new = (f"set(CMAKE_CXX_STANDARD {standard})" for standard in (14, target.cxx_standard))
        wanted += [Edit("CMakeLists.txt", old, new), Edit("horovod/torch/CMakeLists.txt", old, new)]
    if target.torch:
        # PyTorch treats any nvcc, or the folder /usr/local/cuda, as a CUDA toolkit. With a toolkit that lacks the
        # runtime's headers or library, the build would fail, so such a toolkit is ignored. Horovod then averages
        # tensors in the CPU's memory.
        has_cuda = 'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
        complete = (
            "if(Pytorch_CUDA)\n    find_package(CUDAToolkit)\n    set(Pytorch_CUDA ${CUDAToolkit_FOUND})\nendif()\n"
        )
        wanted.append(Edit("cmake/Modules/FindPytorch.cmake", has_cuda, has_cuda + complete))
    if target.has_keras_3:
        # This file needs XLA headers that TensorFlow 2.16 and later do not ship. Only XLA-compiled collectives use it.
        line = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'
        wanted.append(Edit("horovod/tensorflow/CMakeLists.txt", line, ""))
        # Horovod must use the same Keras as tf.keras. From TensorFlow 2.16 on, the module `keras` is always Keras 3,
        # but tf.keras is Keras 2 (from the package tf-keras) if TF_USE_LEGACY_KERAS is set.
        imported = "from keras import backend as K"
        wanted += [
            Edit(f"horovod/tensorflow/keras/{name}.py", imported, "from tensorflow.keras import backend as K")
            for name in ("__init__", "callbacks")
        ]
    return wanted


def patch(source: Path, changes: Sequence[Edit]) -> None:
    """Apply `changes` to the files in `source`. Raise BuildError if a file lacks the text to replace."""
    for edit in changes:
        file = source / edit.path
        text = file.read_text(encoding="utf-8")
        if edit.old not in text:
            raise BuildError(
                f"Horovod's {edit.path} does not contain {edit.old.strip()!r}, so this is not the source of "
                f"{HOROVOD} that this command expects: run it again with --force to download the source again."
            )
        file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def find_cmake() -> Path:
    """Return a cmake of a usable version: the environment's own or, failing that, the one on PATH."""
    fix = f"run `{sys.executable} -m pip install 'cmake<4'`, {AGAIN}"
    refused = None
    for folder in (sysconfig.get_path("scripts"), None):
        cmake = shutil.which("cmake", path=folder)
        if cmake is None:
            continue
        answer = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"cmake version (\d+(?:\.\d+)+)", answer.stdout)
        if version is not None and OLDEST_CMAKE <= Version(version[1]) < FIRST_REFUSED_CMAKE:
            return Path(cmake)
        refused = refused or (version and f"cmake {version[1]} at {cmake}")
    if refused:
        raise BuildError(f"{refused} cannot configure Horovod, because Gloo needs cmake 3.13 or later, below 4: {fix}")
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
    if _installed("pip") is None:
        raise BuildError(
            f"{sys.prefix} has no pip, which builds the wheel: run `{sys.executable} -m ensurepip`, {AGAIN}"
        )
    _check_setuptools(target.torch)
    return cmake


def _check_setuptools(torch: str | None) -> None:
    setuptools = _installed("setuptools")
    if setuptools is None or (Version(setuptools) < FIRST_SETUPTOOLS_WITH_WHEEL and _installed("wheel") is None):
        raise BuildError(
            f"Building a wheel needs setuptools {FIRST_SETUPTOOLS_WITH_WHEEL} or later, but {sys.prefix} has "
            f"{setuptools or 'none'}: run `{sys.executable} -m pip install --upgrade setuptools`, {AGAIN}"
        )
    wants_packaging = torch is not None and "from pkg_resources import packaging" in _torchs_build_support()
    if wants_packaging and Version(setuptools) >= FIRST_SETUPTOOLS_WITHOUT_PACKAGING:
        raise BuildError(
            f"Horovod cannot be built for PyTorch {torch} with setuptools {setuptools}: run `{sys.executable} -m pip "
            f"install 'setuptools<{FIRST_SETUPTOOLS_WITHOUT_PACKAGING}' wheel`, {AGAIN}"
        )


def build_environment(target: Target, cmake: Path) -> dict[str, str]:
    """Return the build's environment variables.

    They are the user's variables and Horovod's build options. Variables with which the user could change the wheel are
    left out: the wheel's key does not include them, so builds with different values would share one wheel.
    """
    dropped = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_") and name not in dropped}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = {"TENSORFLOW": target.tensorflow, "PYTORCH": target.torch}
    return {
        **env,
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        **{f"HOROVOD_WITH{'' if version else 'OUT'}_{name}": "1" for name, version in chosen.items()},
        "HOROVOD_CMAKE": str(cmake),
        "MAKEFLAGS": f"-j{cores}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def build(target: Target, cache: Path, progress: Progress, *, force: bool = False, verbose: bool = False) -> Path:
    """Return the path of the cache's wheel for `target`; build the wheel if it is missing, or if `force` is set."""
    shelf = cache / target.key
    kept = sorted(shelf.glob(f"horovod-{HOROVOD}-*.whl"))
    if kept and not force:
        return kept[0]
    cmake = check_tools(target)
    shelf.mkdir(parents=True, exist_ok=True)
    log = shelf / "build.log"
    log.write_text("")
    # Without isolation, because the build needs the frameworks that are installed in this environment.
    plain = ["--no-deps", "--no-build-isolation"]

    def run(step: str, command: Sequence[str], failure: str, **more: Any) -> None:
        progress.step(step)
        if watch(command, build_environment(target, cmake), log, progress, verbose=verbose, **more):
            progress.close()
            raise BuildError(why_failed(failure, log))
        progress.done()

    with tempfile.TemporaryDirectory(prefix="sparkring-horovod-") as name:
        work = Path(name)
        sdist = cache / f"horovod-{HOROVOD}.tar.gz"
        if force or not sdist.is_file():
            fetch = [*PIP, "download", "--no-binary", ":all:", *plain, "--dest", str(work), f"horovod=={HOROVOD}"]
            failure = "Horovod's source could not be downloaded. Check pip's index, then run this command again:"
            run(f"Downloading Horovod {HOROVOD}'s source", fetch, failure)
            _keep(work / sdist.name, sdist)
        with tarfile.open(sdist) as archive:
            # Python 3.10 before 3.10.12, and 3.11 before 3.11.4, have no tarfile.data_filter, so no filter is used.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            archive.extractall(work)
        source = work / f"horovod-{HOROVOD}"
        patch(source, edits(target))
        # Without --verbose, pip would not pass on the percentages that make prints.
        make = [*PIP, "wheel", "--verbose", *plain, "--wheel-dir", str(work / "out"), str(source)]
        failure = f"{target} could not be built. Correct these errors, then run this command again:"
        pace = Pace(cache / "pace.json")
        run(f"Building {target}", make, failure, share_of=pace.read)
        pace.keep()
        wheel = next((work / "out").glob("*.whl"))
        return _keep(wheel, shelf / wheel.name)


def _keep(made: Path, place: Path) -> Path:
    """Put a file into the cache atomically, even if another build writes there at the same time."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=".incoming-")
    os.close(handle)
    try:
        shutil.copy(made, name)
        os.replace(name, place)
    finally:
        Path(name).unlink(missing_ok=True)
    return place


def install(wheel: Path, target: Target, progress: Progress) -> str:
    """Install the wheel and its dependencies, and import Horovod. Return a sentence on Horovod's limits, or ''."""
    limits = ""
    pip = [*PIP, "install", "--quiet"]
    if not _is_installed(wheel):
        progress.step("Installing the wheel")
        # Install the wheel first, and then its dependencies. A single call would either skip the wheel, if a Horovod of
        # the same version is installed, or reinstall everything.
        for options in (["--force-reinstall", "--no-deps"], []):
            answer = subprocess.run([*pip, *options, str(wheel)], capture_output=True, text=True, check=False)
            if answer.returncode:
                progress.close()
                raise BuildError("\n  ".join([f"pip could not install {wheel}:", *telling_lines(answer.stderr)]))
        progress.done()
    for framework in target.frameworks:
        progress.step(f"Importing horovod.{framework}")
        code = f"import horovod.{framework} as hvd; assert hvd.gloo_built(), 'built without Gloo'"
        if framework == "torch":
            code += "; import torch; print(torch.version.cuda is not None and not hvd.cuda_built())"
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
        if answer.returncode:
            progress.close()
            reason = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
            raise BuildError(f"horovod.{framework} does not load: {reason}\n  Build it again with --force --install.")
        if answer.stdout.endswith("True\n"):
            limits = _WITHOUT_CUDA
        progress.done()
    return limits


def _is_installed(wheel: Path) -> bool:
    """Return whether the installed Horovod came from this wheel. pip records the digest of each wheel it installs."""
    try:
        noted = metadata.distribution("horovod").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    return noted is not None and hashlib.sha256(wheel.read_bytes()).hexdigest() in noted


def parser() -> argparse.ArgumentParser:
    """Return the parser for the command line."""
    cli = argparse.ArgumentParser(
        prog="sparkring-build-horovod",
        description=f"Build a wheel of Horovod {HOROVOD} (with Gloo, without MPI) for the TensorFlow and PyTorch that "
        "are installed in this environment. The wheel is cached, and used again the next time.",
    )
    cli.add_argument("--install", action="store_true", help="install the wheel into this environment and load it")
    cli.add_argument("--force", action="store_true", help="download and build even if the cache has the wheel")
    cli.add_argument("--cache", type=Path, metavar="DIR", help="the folder for wheels; default: the user's cache")
    cli.add_argument("--verbose", action="store_true", help="show the whole build log during the build")
    cli.add_argument("--print-path", action="store_true", help="print only the wheel's path to standard output")
    return cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console command, and return its exit status."""
    options = parser().parse_args(arguments)
    cache: Path = options.cache or platformdirs.user_cache_path("sparkring") / "horovod"
    progress = Progress(sys.stderr)
    limits = ""
    try:
        target = detect()
        wheel = build(target, cache.resolve(), progress, force=options.force, verbose=options.verbose)
        if options.install:
            limits = install(wheel, target, progress)
    except BuildError as error:
        print(f"sparkring-build-horovod: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.close()
        print("sparkring-build-horovod: interrupted; no wheel was saved.", file=sys.stderr)
        return 130
    if options.print_path:
        print(wheel)
    else:
        print(f"{target}: {'installed' if options.install else 'built'} from\n  {wheel}")
        if limits:
            print(f"  {limits}")
        if not options.install:
            print(f"  To use it: {sys.executable} -m pip install {wheel}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
