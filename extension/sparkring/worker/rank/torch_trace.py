"""Records some steps of training with PyTorch's profiler, for `--profile torch`. The cell needs no additional line.

PyTorch calls a hook after each step of any optimizer. The first steps are left out, since they allocate and compile.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from typing import Any

from sparkring.runtime import report, world
from sparkring.wire.messages import TracePart
from sparkring.worker.rank.imports import when_imported

FIRST, STEPS = 3, 5  # the profiler runs from the end of this step on, for so many steps
MOST_RANKS = 64  # only the first ranks record
PIECE_BYTES, MOST_BYTES = 1 << 20, 64 << 20  # of the compressed trace

_trace: StepTrace | None = None
_is_hooked = False


def begin() -> None:
    """Record steps of the request that begins now."""
    global _trace
    if world.world().rank < MOST_RANKS:
        _trace = StepTrace()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise, the profiler writes lines to stderr
        when_imported("torch.optim.optimizer", _hook)


def finish() -> None:
    """Send what has been recorded, when the code of the request has ended."""
    global _trace
    if _trace is not None:
        _trace.end()
        _trace = None


def _hook(module: Any) -> None:
    global _is_hooked
    if not _is_hooked:
        _is_hooked = True
        module.register_optimizer_step_post_hook(_stepped)


def _stepped(*_: object) -> None:
    if _trace is not None:
        _trace.stepped()


class StepTrace:
    """Runs the profiler once. What goes wrong with it is reported, and does not disturb the training."""

    def __init__(self) -> None:
        self._steps = 0
        self._profiler: Any = None
        self._is_sent = False

    def stepped(self) -> None:
        """Count a step of an optimizer."""
        self._steps += 1
        if self._steps == FIRST:
            self._begin()
        elif self._steps == FIRST + STEPS:
            self._send()

    def end(self) -> None:
        """Send what has been recorded by now, if nothing has been sent before."""
        if not self._is_sent and self._profiler is None:
            self._fail(
                f"fewer than {FIRST + 1} optimizer steps were run, and the first {FIRST} are not recorded. Train for "
                f"at least {FIRST + STEPS} steps"
            )
        self._send()

    def _begin(self) -> None:
        profiler = importlib.import_module("torch.profiler")
        activities = [profiler.ProfilerActivity.CPU]
        if sys.modules["torch"].cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        try:
            self._profiler = profiler.profile(activities=activities)
            self._profiler.start()
        except Exception as error:  # for example, the cell uses the profiler itself
            self._fail(f"{type(error).__name__}: {error}")

    def _send(self) -> None:
        if self._is_sent:
            return
        try:
            self._profiler.stop()
            with tempfile.TemporaryDirectory(prefix="sparkring-") as folder:
                path = os.path.join(folder, "trace.json.gz")
                self._profiler.export_chrome_trace(path)
                with open(path, "rb") as file:
                    data = file.read(MOST_BYTES + 1)
        except Exception as error:  # for example, the disk is full; the training goes on
            self._fail(f"{type(error).__name__}: {error}")
            return
        if len(data) > MOST_BYTES:
            self._fail(
                f"the compressed trace is larger than {MOST_BYTES >> 20} MiB. Use torch.profiler in the cell, with a "
                "shorter schedule"
            )
            return
        self._is_sent = True
        steps = min(self._steps - FIRST, STEPS)
        for start in range(0, len(data), PIECE_BYTES):
            last = start + PIECE_BYTES >= len(data)
            report.tell(TracePart(data[start : start + PIECE_BYTES], start // PIECE_BYTES, last, steps))

    def _fail(self, problem: str) -> None:
        self._is_sent = True
        report.tell(TracePart(b"", 0, True, problem=problem))
