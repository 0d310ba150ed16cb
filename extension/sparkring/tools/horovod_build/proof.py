"""Loads Horovod, and checks that it has what it was built with. On a GPU, if there is one, it averages a tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkring.tools.horovod_build.errors import BuildError
from sparkring.tools.horovod_build.frameworks import TITLES
from sparkring.tools.horovod_build.target import Target
from sparkring.tools.watch import StepProgress

# How long a framework and Horovod may take to load and to average a tensor.
_TIMEOUT_S = 300
# Prints, as JSON on the last line, the same facts as `horovodrun --check-build`, and the name of the GPU on which an
# allreduce gave the right sum; null if the framework sees no GPU. The process is the only rank.
_COMMON = """
import json
import horovod.{framework} as hvd
facts = {{name: int(getattr(hvd, name + "_built")()) for name in ("gloo", "mpi", "nccl", "cuda", "rocm")}}
"""
_ON_A_GPU = {
    "torch": """
import torch
gpu = None
if (facts["cuda"] or facts["rocm"]) and torch.cuda.is_available():
    hvd.init()
    total = hvd.allreduce(torch.arange(4.0, device="cuda:0"), op=hvd.Sum)
    right = total.is_cuda and total.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert right, f"an allreduce on a GPU gave {total}"
    gpu = torch.cuda.get_device_name(0)
""",
    "tensorflow": """
import tensorflow as tf
gpu = None
gpus = tf.config.list_physical_devices("GPU")
if (facts["nccl"] or facts["rocm"]) and gpus:
    hvd.init()
    with tf.device("/GPU:0"):
        total = hvd.allreduce(tf.range(4.0), op=hvd.Sum)
    right = "GPU" in total.device and total.numpy().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert right, f"an allreduce on a GPU gave {total}"
    gpu = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "a GPU")
""",
}
_REPORT = "\nprint(json.dumps([facts, gpu]))\n"


class ModuleMissing(BuildError):
    """Horovod could not be loaded, since a Python package that it needs is not installed."""


@dataclass(frozen=True)
class Proof:
    """What a part of Horovod says about itself. `nccl` is NCCL's version, or 0.

    `gpu` is the name of the GPU on which an allreduce of one rank has worked; None if the framework sees no GPU, or if
    the part was built without support for GPUs.
    """

    framework: str
    gloo: bool
    mpi: bool
    nccl: int
    cuda: bool
    rocm: bool
    gpu: str | None

    def __str__(self) -> str:
        parts = {
            "Gloo": self.gloo,
            "MPI": self.mpi,
            f"NCCL {_nccl_version(self.nccl)}": bool(self.nccl),
            "CUDA": self.cuda,
            "ROCm": self.rocm,
        }
        has = ", ".join(name for name, is_built in parts.items() if is_built)
        if not (self.cuda or self.rocm):
            return f"horovod.{self.framework} loads; built with {has}."
        if self.gpu:
            return f"horovod.{self.framework} loads; built with {has}; an allreduce (of one rank) worked on {self.gpu}."
        seen = f"{TITLES[self.framework]} sees no GPU here, so no allreduce was tried on one"
        return f"horovod.{self.framework} loads; built with {has}. {seen}."


def prove(target: Target, progress: StepProgress, *, path: Path | None = None) -> list[Proof]:
    """Load each part of Horovod in a process of its own, and return what it says about itself.

    `path` is a folder with an unpacked wheel; without it, the installed Horovod is loaded. Raise BuildError if a part
    does not load, lacks what `target` names, or computes a wrong sum on a GPU; ModuleMissing if a package is missing.
    """
    proofs = []
    for framework in target.frameworks:
        progress.step(f"Importing horovod.{framework}")
        try:
            proof = _prove(framework, _environment(os.environ, path))
            _check(proof, target)
        except BuildError:
            progress.close()
            raise
        proofs.append(proof)
        progress.done()
    return proofs


def _prove(framework: str, env: Mapping[str, str]) -> Proof:
    code = _COMMON.format(framework=framework) + _ON_A_GPU[framework] + _REPORT
    again = "Build it again with --force --install."
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"horovod.{framework} did not load within {_TIMEOUT_S} s. {again}") from None
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        missing = reason.startswith("ModuleNotFoundError:") and "'horovod" not in reason
        raise (ModuleMissing if missing else BuildError)(f"horovod.{framework} does not load: {reason}\n  {again}")
    facts, gpu = json.loads(answer.stdout.splitlines()[-1])
    return Proof(
        framework,
        gloo=bool(facts["gloo"]),
        mpi=bool(facts["mpi"]),
        nccl=facts["nccl"],
        cuda=bool(facts["cuda"]),
        rocm=bool(facts["rocm"]),
        gpu=gpu,
    )


def _check(proof: Proof, target: Target) -> None:
    """Raise BuildError if a part of Horovod was built without something that `target` names."""
    for_cuda = target.torch_cuda if proof.framework == "torch" else target.tensorflow_cuda
    with_nccl = target.nccl is not None and for_cuda is not None
    # Without NCCL, only the part for PyTorch is built with CUDA.
    with_cuda = with_nccl or (target.cuda is not None and target.torch_cuda is not None and proof.framework == "torch")
    for name, is_wanted, is_built in (
        ("Gloo", True, proof.gloo),
        ("CUDA", with_cuda, proof.cuda),
        ("NCCL", with_nccl, bool(proof.nccl)),
    ):
        if is_wanted and not is_built:
            raise BuildError(
                f"horovod.{proof.framework} was built without {name}.\n  Build it again with --force --install."
            )


def _environment(environ: Mapping[str, str], path: Path | None) -> dict[str, str]:
    """Return an environment in which Horovod is the only rank: HOROVOD_… variables could describe a ring."""
    env = {name: value for name, value in environ.items() if not name.startswith("HOROVOD_")}
    env["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), environ.get("PYTHONPATH", "")]))
    return env


def _nccl_version(code: int) -> str:
    """Return the version that NCCL_VERSION_CODE stands for: 22907 is 2.29.7, and before 2.9, 2804 is 2.8.4."""
    major, rest = (code // 10000, code % 10000) if code >= 10000 else (code // 1000, code % 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
