"""The speed in images per second of a training on GPUs, as a cell and under torchrun and horovodrun.

This benchmark is not among those that run by default. It needs an NVIDIA GPU, a CUDA build of PyTorch and Horovod with
NCCL, but neither TensorFlow nor Spark: .venv-gpu/bin/python benchmarks/run.py --only gpu, after make test-gpu.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path

from harness import US, Effort, Goal, Measured, Row, Turns, cell, run, said_by_horovodrun, script, speed_in

from sparkring.views import Quiet

GOAL = Goal(0.98, at_least=True, ratio=True)


def training(effort: Effort) -> list[Row]:
    """Measure a rank on each GPU. Exit with one sentence if PyTorch cannot use any."""
    return measured(effort, _gpus(), "cuda")


def measured(effort: Effort, ranks: int, device: str) -> list[Row]:
    seconds = "3" if effort.quick else "20"
    env = {"BENCHMARK_SECONDS": seconds, "BENCHMARK_DEVICE": device}
    rows = []
    for ring, peer, theirs in (("torch", "torchrun", _torchrun), ("horovod", "horovodrun", _horovodrun)):
        of_ring = {**env, "BENCHMARK_RING": ring}
        cases = {
            US: functools.partial(_ours, ring, ranks, of_ring),
            peer: functools.partial(theirs, ranks, of_ring),
        }
        what = (
            f"PyTorch with {ring} on {ranks} {'GPUs' if device == 'cuda' else 'local ranks'}, {seconds} s of training"
        )
        rows.append(Turns(min(effort.runs, 3), cases).row(what, "images/s", "speed", peer, goal=GOAL))
    return rows


def _gpus() -> int:
    """Return how many GPUs PyTorch can use."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        import torch

        found = torch.cuda.device_count()
    except (ImportError, OSError):
        found = 0
    if not found:
        raise SystemExit("The benchmark gpu needs an NVIDIA GPU that PyTorch can use, and there is none here.")
    return found


def _ours(ring: str, ranks: int, env: dict[str, str]) -> Measured:
    return speed_in(run(cell("gpu_training"), -ranks, Quiet(), framework=ring, env=env).logs(0))


def _torchrun(ranks: int, env: dict[str, str]) -> Measured:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(script("gpu_training"))],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return speed_in(done.stdout)


def _horovodrun(ranks: int, env: dict[str, str]) -> Measured:
    if not Path(sys.executable).with_name("horovodrun").exists():
        raise RuntimeError("horovodrun is not installed")
    return speed_in(said_by_horovodrun(script("gpu_training"), ranks=ranks, env=env))
