"""Decides what to build: for which frameworks, and whether with CUDA and NCCL. Says why something is left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparkring.tools.horovod_build import cuda
from sparkring.tools.horovod_build.cuda import Missing, Nccl, Toolkit
from sparkring.tools.horovod_build.errors import AGAIN, BuildError
from sparkring.tools.horovod_build.frameworks import TITLES, InstalledFramework, installed_frameworks
from sparkring.tools.horovod_build.options import ALL_GPU_OPERATIONS, VARIABLE_OF, BuildOptions, read_options
from sparkring.tools.horovod_build.target import Target, target_for


@dataclass(frozen=True)
class BuildPlan:
    """What to build. `toolkit` is None for a build without CUDA, and `nccl` for one without NCCL.

    `included` holds a line for each thing that was found, `left_out` one for each thing that is left out. Those that
    concern GPUs are in `left_out_of_gpu`. `asked` is whether the user has asked for GPU operations; otherwise, a build
    with CUDA that fails is followed by one without CUDA.
    """

    target: Target
    options: BuildOptions
    included: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    left_out_of_gpu: tuple[str, ...] = ()
    toolkit: Toolkit | None = None
    nccl: Nccl | None = None
    asked: bool = False

    @property
    def notes(self) -> list[str]:
        """All lines about what was found and what is left out."""
        return [*self.included, *(f"Left out: {line}" for line in self.left_out + self.left_out_of_gpu)]

    def without_cuda(self) -> BuildPlan:
        """Return the same plan without CUDA."""
        target = replace(self.target, cuda=None, nccl=None, nccl_in_packages=False)
        return replace(self, target=target, toolkit=None, nccl=None)


def detect(environ: Mapping[str, str] = os.environ) -> BuildPlan:
    """Return the plan for the running environment. The frameworks are not imported."""
    site_packages = [Path(folder) for folder in sys.path if folder and Path(folder, "nvidia").is_dir()]
    return make_plan(installed_frameworks(), environ, site_packages, linux=sys.platform == "linux")


def make_plan(
    installed: Mapping[str, InstalledFramework],
    environ: Mapping[str, str],
    site_packages: Sequence[Path],
    *,
    linux: bool,
) -> BuildPlan:
    """Return what to build for these frameworks. Raise BuildError if the user's variables ask for something else."""
    options = read_options(environ)
    frameworks, left_out = _chosen(installed, options)
    plan = BuildPlan(
        target_for(frameworks, options.digest),
        options,
        tuple(
            f"{framework}: {f'built for CUDA {framework.cuda}' if framework.cuda else 'without CUDA'}"
            for framework in frameworks.values()
        ),
        (*left_out, *([] if options.uses_mpi else ["MPI, unless HOROVOD_WITH_MPI is 1"])),
        asked=bool(options.operations) and not options.chooses_rocm,
    )
    if options.chooses_rocm:
        return plan
    if not plan.asked:
        if not linux or not any(framework.cuda for framework in frameworks.values()):
            return plan
        if options.refuses_gpu:
            return _leave_out(plan, "CUDA and NCCL", f"{ALL_GPU_OPERATIONS} is empty")
    return _with_cuda(plan, frameworks, environ, site_packages)


def _chosen(
    installed: Mapping[str, InstalledFramework], options: BuildOptions
) -> tuple[dict[str, InstalledFramework], list[str]]:
    """Return the frameworks to build for, and lines about those that the user's variables leave out."""
    frameworks, left_out = dict(installed), []
    for name, part in VARIABLE_OF.items():
        if options.has(f"HOROVOD_WITHOUT_{part}") and name in frameworks:
            left_out.append(f"{frameworks.pop(name)}, since HOROVOD_WITHOUT_{part} is 1")
        elif options.has(f"HOROVOD_WITH_{part}") and name not in frameworks:
            raise BuildError(
                f"HOROVOD_WITH_{part} is 1, but {TITLES[name]} is not installed in {sys.prefix}: install it with pip, "
                f"or unset this variable, {AGAIN}"
            )
    if not installed:
        raise BuildError(
            f"Neither TensorFlow nor PyTorch is installed in {sys.prefix}, so there is nothing to build Horovod for: "
            f"install one of them with pip, {AGAIN}"
        )
    if not frameworks:
        raise BuildError(f"The HOROVOD_WITHOUT_… variables leave out every installed framework: unset one, {AGAIN}")
    return frameworks, left_out


def _with_cuda(
    plan: BuildPlan,
    frameworks: Mapping[str, InstalledFramework],
    environ: Mapping[str, str],
    site_packages: Sequence[Path],
) -> BuildPlan:
    """Return the plan with CUDA, and NCCL if possible; or without, if this cannot work and the user has not asked."""
    obstacle = _obstacle(frameworks)
    if obstacle:
        return _leave_out(plan, "CUDA and NCCL", obstacle.reason, obstacle.fix)
    for_cuda = next(framework for framework in frameworks.values() if framework.cuda)
    assert for_cuda.cuda is not None
    toolkit = cuda.find_toolkit(environ, site_packages, for_cuda.cuda)
    if isinstance(toolkit, Missing):
        return _leave_out(plan, "CUDA and NCCL", toolkit.reason, toolkit.fix)
    differs = toolkit.version.split(".")[0] != for_cuda.cuda.split(".")[0]
    warning = f" (but {for_cuda} is built for CUDA {for_cuda.cuda})" if differs else ""
    plan = replace(
        plan,
        toolkit=toolkit,
        target=replace(plan.target, cuda=toolkit.version),
        included=(*plan.included, f"CUDA {toolkit.version}: {toolkit.origin}{warning}"),
    )
    if plan.asked and "NCCL" not in plan.options.operations:
        return plan
    nccl = cuda.find_nccl(environ, site_packages, toolkit)
    if isinstance(nccl, Missing):
        # Without NCCL, horovod.torch takes tensors on GPUs, and averages them in the CPU's memory; horovod.tensorflow
        # has no use for CUDA.
        with_cuda = "torch" in frameworks and frameworks["torch"].cuda
        plan = plan if with_cuda else plan.without_cuda()
        return _leave_out(plan, "NCCL", nccl.reason, nccl.fix)
    return replace(
        plan,
        nccl=nccl,
        target=replace(plan.target, nccl=nccl.version, nccl_in_packages=nccl.in_packages),
        included=(*plan.included, f"NCCL {nccl.version}: {nccl.binary}"),
    )


def _obstacle(frameworks: Mapping[str, InstalledFramework]) -> Missing | None:
    """Return why Horovod cannot be built with CUDA for these frameworks; None if it can.

    Beside a framework that is built for CUDA, there may be one that is not. Its part of Horovod is built without CUDA.
    """
    versions = {framework.cuda.split(".")[0] for framework in frameworks.values() if framework.cuda}
    if not versions:
        without = " and ".join(map(str, frameworks.values()))
        return Missing(
            f"{without} {'is not a CUDA build' if len(frameworks) == 1 else 'are not CUDA builds'}",
            "install a CUDA build of a framework, or unset this variable",
        )
    if len(versions) > 1:
        built_for = " and ".join(f"{framework} is built for CUDA {framework.cuda}" for framework in frameworks.values())
        return Missing(built_for, "set HOROVOD_WITHOUT_TENSORFLOW=1 or HOROVOD_WITHOUT_PYTORCH=1")
    return None


def _leave_out(plan: BuildPlan, what: str, why: str, fix: str = "") -> BuildPlan:
    """Return the plan with one more line on what it leaves out. If the user has asked for it, raise BuildError."""
    if plan.asked:
        asked, value = next(
            variable for variable in plan.options.variables.items() if variable[0].startswith("HOROVOD_GPU_")
        )
        raise BuildError(f"{asked} is {value}, but {why}: {fix}, {AGAIN}")
    line = f"{what}, since {why}" + (f". To build with it, {fix}" if fix else "")
    return replace(plan, left_out_of_gpu=(*plan.left_out_of_gpu, line))
