"""How fast checkpoints are saved and restored, compared with the disk alone and with NumPy and PyTorch.

Also, how soon a run resumes after a rank is killed, and how much checkpoints slow down a run.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import US, Effort, Goal, Measured, Row, Turns, cell, script

from sparkring.engine.run.api import run_spec
from sparkring.engine.run.options import Options
from sparkring.engine.run.result import RunResult
from sparkring.engine.run.spec import Cell, RunSpec
from sparkring.views import Quiet

DISK, NUMPY, TORCH = "the disk alone", "np.save, then copied", "torch.save, then copied"
WITHOUT, DIRECTORY = "without checkpoints", f"{US}, none saved"
NEAR_DISK, LITTLE = Goal(0.8, at_least=True, ratio=True), Goal(10)
SOON, CHEAP = Goal(3), Goal(1.02, ratio=True)


def files(effort: Effort) -> list[Row]:
    """Write a gigabyte to the disk in one process, and read it from the page cache."""
    megabytes = 100 if effort.quick else 1000
    go = functools.partial(_in_process, megabytes=megabytes)
    turns = Turns(
        effort.runs,
        {
            US: lambda: go("sparkring"),
            DISK: lambda: go("disk"),
            NUMPY: lambda: go("numpy"),
            TORCH: lambda: go("torch"),
        },
    )
    blocking = Turns(effort.runs, {US: lambda: _in_process("blocking", megabytes=100)})
    told = f"checkpoint of {megabytes:,} MB in 16 arrays"
    return [
        turns.row(f"{told}: save", "MB/s", "save", DISK, goal=NEAR_DISK),
        turns.row("… compared with NumPy", "MB/s", "save", NUMPY),
        turns.row("… compared with PyTorch", "MB/s", "save", TORCH),
        turns.row(f"{told}: restore, from the cache", "MB/s", "restore", DISK, goal=NEAR_DISK),
        turns.row("… compared with NumPy", "MB/s", "restore", NUMPY),
        turns.row("… compared with PyTorch", "MB/s", "restore", TORCH),
        blocking.row("checkpoint of 100 MB in the background: save() returns after", "ms", "blocked"),
        blocking.row("… as a share of a save in the foreground", "%", "share", goal=LITTLE),
    ]


def runs(effort: Effort) -> list[Row]:
    """Measure a run in which a rank is killed, and runs in which no rank is killed."""
    back = Turns(effort.runs, {US: _comes_back})
    steps, every = (60, 30) if effort.quick else (800, 400)  # about four seconds from one checkpoint to the next
    whole = Turns(
        effort.runs,
        {
            US: lambda: _steps(steps, every),
            DIRECTORY: lambda: _steps(steps, 0, directory=True),
            WITHOUT: lambda: _steps(steps, 0),
        },
    )
    return [
        back.row("SIGKILL of one of 2 local ranks: time to the next step after the last checkpoint", "s", "back"),
        back.row("… minus the time of a cold start", "s", "beyond", goal=SOON),
        whole.row(f"{steps} steps of 2 local ranks, 10 MB saved every {every} steps", "s", "loop", WITHOUT, goal=CHEAP),
        whole.row("… with --checkpoint-dir, none saved", "s", "loop", WITHOUT, us=DIRECTORY, goal=CHEAP),
    ]


def _in_process(contestant: str, *, megabytes: int) -> Measured:
    """Run a contestant in a process of its own, so that it does not profit from memory that another has touched."""
    with tempfile.TemporaryDirectory(prefix=".checkpoints-", dir=os.environ["SPARKRING_HOME"]) as folder:
        command = [sys.executable, str(script("checkpoints")), contestant, folder, str(megabytes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{contestant}: {done.stderr[-2000:]}")
    figures: Measured = json.loads(done.stdout.splitlines()[-1])
    return figures


def _comes_back() -> Measured:
    with tempfile.TemporaryDirectory(prefix=".checkpoints-", dir=os.environ["SPARKRING_HOME"]) as folder:
        note = Path(folder, "at")
        began = time.time()
        result = _run("comes_back", f"{folder}/run", max_restarts=1, BENCHMARK_NOTE=str(note))
        first, died, again = (float(note.with_suffix(f".{name}").read_text()) for name in ("first", "died", "again"))
    assert result.values == [(50, 50.0)] * 2
    return {"back": again - died, "beyond": (again - died) - (first - began)}


def _steps(steps: int, every: int, *, directory: bool = False) -> Measured:
    with tempfile.TemporaryDirectory(prefix=".checkpoints-", dir=os.environ["SPARKRING_HOME"]) as folder:
        there = f"{folder}/run" if every or directory else ""
        result = _run("steps", there, BENCHMARK_STEPS=str(steps), BENCHMARK_EVERY=str(every))
    return {"loop": max(result.values)}


def _run(name: str, directory: str, *, max_restarts: int = 0, **env: str) -> RunResult:
    source = cell(name)
    options = Options(np=-2, checkpoint_dir=directory, max_restarts=max_restarts, env=tuple(env.items()))
    return run_spec(RunSpec(Cell(source, {}), options, "plain", "benchmark", source), Quiet())
