"""Build a Horovod wheel for the TensorFlow and PyTorch of this environment, once.

Horovod publishes no wheels, and its last release is compiled with an older C++ standard than current
frameworks need. This command downloads the source, edits it, builds it with Gloo (with NCCL, if there is a CUDA build
of a framework and what the build needs) and keeps the wheel in the user's cache, in a folder named after what it was
built for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from sparkring.tools.horovod_build.errors import BuildError
from sparkring.tools.horovod_build.installation import install
from sparkring.tools.horovod_build.plan import BuildPlan, detect
from sparkring.tools.horovod_build.target import HOROVOD
from sparkring.tools.horovod_build.wheel import build
from sparkring.tools.watch import StepProgress

_DESCRIPTION = f"""\
Build a wheel of Horovod {HOROVOD} for the TensorFlow and PyTorch that are installed in this environment. The wheel is
cached, and used again the next time.
"""
_VARIABLES = """\
Horovod is built with Gloo. If a framework is built for CUDA, it is also built with CUDA and NCCL, provided that both
are found: a CUDA toolkit in CUDA_HOME or CUDA_PATH, that of the nvcc on PATH, /usr/local/cuda, or pip's (`pip install
'cuda-toolkit[nvcc,cccl]==13.0.*'`, with the version of CUDA that the framework is built for); NCCL from pip, which
PyTorch installs, or from the system. No GPU is needed for the build.

The environment variables of Horovod's installation guide are honoured, except for HOROVOD_WITHOUT_GLOO, which is
refused. Some of them:
  HOROVOD_GPU_OPERATIONS=NCCL    it is an error if NCCL or CUDA is not found, or the build fails (by default, Horovod
                                 is then built without CUDA)
  HOROVOD_GPU_OPERATIONS=        build without CUDA and NCCL
  HOROVOD_CUDA_HOME=DIR          the CUDA toolkit
  HOROVOD_NCCL_HOME=DIR          NCCL
  HOROVOD_WITHOUT_TENSORFLOW=1   leave out TensorFlow; HOROVOD_WITHOUT_PYTORCH=1 leaves out PyTorch
  HOROVOD_WITH_MPI=1             build with MPI, too
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser for the command line."""
    cli = argparse.ArgumentParser(
        prog="sparkring-build-horovod",
        description=_DESCRIPTION,
        epilog=_VARIABLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--install", action="store_true", help="install the wheel into this environment and load it")
    cli.add_argument("--force", action="store_true", help="download and build even if the wheel is in the cache")
    cli.add_argument("--cache", type=Path, metavar="DIR", help="the folder for wheels; default: the user's cache")
    cli.add_argument("--verbose", action="store_true", help="show the whole build log during the build")
    cli.add_argument("--print-path", action="store_true", help="print only the wheel's path to standard output")
    return cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console command, and return its exit status."""
    options = parser().parse_args(arguments)
    cache: Path = options.cache or platformdirs.user_cache_path("sparkring") / "horovod"
    progress = StepProgress(sys.stderr)
    try:
        built = build(detect(), cache.resolve(), progress, force=options.force, verbose=options.verbose)
        proofs = install(built.wheel, built.plan.target, progress) if options.install else []
    except BuildError as error:
        print(f"sparkring-build-horovod: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.close()
        print("sparkring-build-horovod: interrupted; no wheel was saved.", file=sys.stderr)
        return 130
    if options.print_path:
        print(built.wheel)
        return 0
    print(f"{built.plan.target}: {'installed' if options.install else 'built'} from\n  {built.wheel}")
    for line in [*map(str, proofs), *gpu_limits(built.plan, built.failure)]:
        print(f"  {line}")
    if not options.install:
        print(f"  To use it: {sys.executable} -m pip install {built.wheel}")
    return 0


def gpu_limits(plan: BuildPlan, failure: str) -> list[str]:
    """Return what Horovod cannot do with GPUs although a framework is built for CUDA, and why."""
    target = plan.target
    if target.nccl or plan.asked or not (target.torch_cuda or target.tensorflow_cuda):
        return []
    limits = []
    if target.cuda:
        limits.append("horovod.torch takes tensors on GPUs, but averages them in the CPU's memory.")
    elif target.torch_cuda:
        limits.append("horovod.torch takes tensors in the CPU's memory only.")
    if target.tensorflow_cuda:
        limits.append("horovod.tensorflow averages tensors in the CPU's memory.")
    if failure:
        limits.append(f"WARNING: {failure}\n  To try again, run this command with --force --install.")
    return [*limits, *(f"Left out: {line}." for line in plan.left_out_of_gpu)]


if __name__ == "__main__":
    sys.exit(main())
