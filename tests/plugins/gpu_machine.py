"""Whether a machine has a GPU, and the variables that tell the checks in tests/with_gpu how to run.

`make test-gpu` uses this module before anything is installed, so it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os

# 1: run the checks on CPUs, as a trial of the checks themselves. Such a run says nothing about GPUs.
ON_CPU = "SPARKRING_GPU_CHECKS_ON_CPU"
# A folder with wheels. pip then uses nothing else, so no network is needed.
WHEELS = "SPARKRING_WHEELS"
# How many seconds all of `make test-gpu` may take.
LIMIT = "SPARKRING_GPU_LIMIT_S"
LIMIT_S = 480.0
# Unix seconds at which the checks must have ended. A check that has not begun by then fails.
UNTIL = "SPARKRING_GPU_UNTIL"
# How the build of Horovod ended: "built", "left out: WHY" (the machine lacks what the build needs) or "failed: WHY".
HOROVOD = "SPARKRING_GPU_HOROVOD"

NO_GPU = (
    "No NVIDIA GPU was found (NVML, the library of NVIDIA's driver, reports none): run this on a machine on which "
    "nvidia-smi lists a GPU."
)


def on_cpu() -> bool:
    """Return whether this is a trial of the checks on CPUs."""
    return os.environ.get(ON_CPU) == "1"


def gpu_count() -> int:
    """Return the number of GPUs that NVML reports; 0 if there is no NVML, or if it does not respond."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInitWithFlags(0):
        return 0
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()
