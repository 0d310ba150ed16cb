"""Builds a wheel of Horovod, and keeps it in the cache."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkring.runtime import limits
from sparkring.tools.horovod_build.cuda import lay_out
from sparkring.tools.horovod_build.edits import edits, patch
from sparkring.tools.horovod_build.errors import BuildError
from sparkring.tools.horovod_build.options import ALL_GPU_OPERATIONS
from sparkring.tools.horovod_build.plan import BuildPlan
from sparkring.tools.horovod_build.proof import ModuleMissing, prove
from sparkring.tools.horovod_build.requirements import check_tools
from sparkring.tools.horovod_build.target import HOROVOD
from sparkring.tools.pace import BuildPace
from sparkring.tools.watch import StepProgress, watch, why_failed

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# The file beside a wheel's log that says why a build with CUDA has failed.
_FAILED = "failed.txt"


@dataclass(frozen=True)
class Built:
    """A wheel in the cache. `plan` is the one that it was built for.

    If the build with CUDA has failed, this is the plan without CUDA, and `failure` says why.
    """

    wheel: Path
    plan: BuildPlan
    failure: str = ""


def build(plan: BuildPlan, cache: Path, progress: StepProgress, *, force: bool = False, verbose: bool = False) -> Built:
    """Return the cache's wheel for `plan`; build the wheel if it is missing, or if `force` is set.

    If a build with CUDA fails and the user has not asked for GPU operations, build without CUDA. This failure is noted
    in the cache, so that the build with CUDA is not tried again, unless `force` is set.
    """
    if plan.toolkit is None or plan.asked:
        return Built(_build(plan, cache, progress, force=force, verbose=verbose), plan)
    noted = cache / plan.target.key / _FAILED
    if noted.is_file() and not force:
        failure = noted.read_text(encoding="utf-8")
    else:
        try:
            return Built(_build(plan, cache, progress, force=force, verbose=verbose), plan)
        except CudaBuildFailed as error:
            failure = str(error)
            noted.write_text(failure, encoding="utf-8")
            progress.note(f"WARNING: {failure}\n  Horovod is now built without CUDA and NCCL.")
    plain = plan.without_cuda()
    return Built(_build(plain, cache, progress, force=force, verbose=verbose), plain, failure)


class CudaBuildFailed(BuildError):
    """A build with CUDA has failed after all tools were found; without CUDA, it may succeed."""


def build_environment(
    plan: BuildPlan, cmake: Path, cuda_home: Path | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the build's environment variables: the user's, and Horovod's build options.

    The user's HOROVOD_… variables are those of `plan`. All others only have an effect when Horovod runs. `cuda_home` is
    the folder of the toolkit, or None for a build without CUDA.
    """
    dropped = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    env = {name: value for name, value in environ.items() if not name.startswith("HOROVOD_") and name not in dropped}
    cores = limits.cores()
    target, options = plan.target, plan.options
    chosen = {"TENSORFLOW": target.tensorflow, "PYTORCH": target.torch}
    env |= {
        "HOROVOD_WITH_GLOO": "1",
        **({} if options.uses_mpi else {"HOROVOD_WITHOUT_MPI": "1"}),
        **({} if options.has("HOROVOD_WITH_MXNET") else {"HOROVOD_WITHOUT_MXNET": "1"}),
        **options.variables,
        **{f"HOROVOD_WITH{'' if version else 'OUT'}_{name}": "1" for name, version in chosen.items()},
        "HOROVOD_CMAKE": str(cmake),
        "MAKEFLAGS": f"-j{cores}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if cuda_home is not None:
        # Horovod's scripts, CMake and PyTorch look for the toolkit in different variables.
        env |= {name: str(cuda_home) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT")}
        env |= {"CUDACXX": f"{cuda_home}/bin/nvcc", "PATH": f"{cuda_home}/bin{os.pathsep}{env.get('PATH', '')}"}
    if plan.nccl is not None:
        if not options.operations:
            env[ALL_GPU_OPERATIONS] = "NCCL"
        env |= {"HOROVOD_NCCL_INCLUDE": str(plan.nccl.include), "HOROVOD_NCCL_LIB": str(plan.nccl.binary.parent)}
        if plan.nccl.in_packages:
            env.setdefault("HOROVOD_NCCL_LINK", "SHARED")
    return env


def _build(plan: BuildPlan, cache: Path, progress: StepProgress, *, force: bool, verbose: bool) -> Path:
    target = plan.target
    shelf = cache / target.key
    kept = sorted(shelf.glob(f"horovod-{HOROVOD}*.whl"))
    if kept and not force:
        return kept[0]
    cmake = check_tools(target)
    progress.note(*plan.notes)
    shelf.mkdir(parents=True, exist_ok=True)
    log = shelf / "build.log"
    log.write_text("".join(f"{line}\n" for line in plan.notes), encoding="utf-8")
    (shelf / _FAILED).unlink(missing_ok=True)
    # The libraries that the linker finds in this folder are also looked for there when Horovod is imported, so it is
    # in the user's cache, and not in a temporary folder, whose name others could use later.
    home = lay_out(plan.toolkit, shelf / "cuda") if plan.toolkit else None
    env = build_environment(plan, cmake, home, os.environ)
    # Without isolation, because the build needs the frameworks that are installed in this environment.
    plain = ["--no-deps", "--no-build-isolation"]

    def run(step: str, command: Sequence[str], failure: str, error: type[BuildError], **more: Any) -> None:
        progress.step(step)
        if watch(command, env, log, progress, verbose=verbose, **more):
            progress.close()
            raise error(why_failed(failure, log))
        progress.done()

    with tempfile.TemporaryDirectory(prefix="sparkring-horovod-") as name:
        work = Path(name)
        sdist = cache / f"horovod-{HOROVOD}.tar.gz"
        if force or not sdist.is_file():
            fetch = [*PIP, "download", "--no-binary", ":all:", *plain, "--dest", str(work), f"horovod=={HOROVOD}"]
            failure = "Horovod's source could not be downloaded. Check pip's index, then run this command again:"
            run(f"Downloading Horovod {HOROVOD}'s source", fetch, failure, BuildError)
            keep(work / sdist.name, sdist)
        with tarfile.open(sdist) as archive:
            # Python 3.10 before 3.10.12, and 3.11 before 3.11.4, have no tarfile.data_filter, so no filter is used.
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            archive.extractall(work)
        source = work / f"horovod-{HOROVOD}"
        patch(source, edits(target))
        # Without --verbose, pip would hide the percentages that `make` prints.
        make = [*PIP, "wheel", "--verbose", *plain, "--wheel-dir", str(work / "out"), str(source)]
        pace = BuildPace(cache / "pace.json")
        run(f"Building {target}", make, _failure(plan), CudaBuildFailed if home else BuildError, share_of=pace.read)
        pace.keep()
        wheel = next((work / "out").glob("*.whl"))
        if home:
            _prove_unpacked(wheel, plan, work / "unpacked", progress)
        return keep(wheel, shelf / wheel.name)


def _failure(plan: BuildPlan) -> str:
    """Return the sentence that introduces the errors of a build that has failed."""
    if plan.toolkit and plan.asked:
        return (
            f"{plan.target} could not be built. Correct these errors, or build without CUDA "
            f"({ALL_GPU_OPERATIONS}=''), then run this command again:"
        )
    if plan.toolkit:
        return f"{plan.target} could not be built:"
    return f"{plan.target} could not be built. Correct these errors, then run this command again:"


def _prove_unpacked(wheel: Path, plan: BuildPlan, folder: Path, progress: StepProgress) -> None:
    """Check that a wheel with CUDA loads, before it is kept. Raise CudaBuildFailed if it does not."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    try:
        prove(plan.target, progress, path=folder)
    except ModuleMissing:
        pass  # Horovod needs packages that pip installs with the wheel; the wheel is checked when it is installed
    except BuildError as error:
        raise CudaBuildFailed(str(error)) from None


def keep(made: Path, place: Path) -> Path:
    """Put a file into the cache atomically, even if another build writes there at the same time."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=".incoming-")
    os.close(handle)
    try:
        shutil.copy(made, name)
        os.replace(name, place)
    finally:
        Path(name).unlink(missing_ok=True)
    return place
