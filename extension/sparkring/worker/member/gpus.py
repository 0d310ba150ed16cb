"""Finds this machine's NVIDIA GPUs, as reported by NVML, the library of NVIDIA's driver.

Where NVML is not installed, no GPUs are found. The address of a GPU is what CUDA_VISIBLE_DEVICES accepts: an index, a
UUID, or the beginning of a UUID. Indices follow the order of the PCI bus. NVML always uses this order; CUDA uses it
if CUDA_DEVICE_ORDER=PCI_BUS_ID is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sparkring.wire.messages import GpuUsed


def found(visible: str | None) -> list[GpuUsed]:
    """Return the GPUs that CUDA would find if CUDA_VISIBLE_DEVICES were `visible`, or all GPUs if `visible` is None.

    If `visible` names a GPU that does not exist, this GPU and all that follow are ignored, as in CUDA.
    """
    nvml = _open()
    if nvml is None:
        return []
    try:
        names = map(str, range(nvml.nvmlDeviceGetCount())) if visible is None else map(str.strip, visible.split(","))
        read = (_read(nvml, address) for address in dict.fromkeys(names))
        return list(iter(lambda: next(read, None), None))
    except nvml.NVMLError:  # NVIDIA's driver does not respond
        return []
    finally:
        nvml.nvmlShutdown()


def visible() -> list[str]:
    """Return the addresses of the GPUs that CUDA would find in this process."""
    return [gpu.address for gpu in found(os.environ.get("CUDA_VISIBLE_DEVICES"))]


class Meter:
    """Reads the same GPUs repeatedly. NVML is opened at the first reading, and stays open."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._addresses = tuple(addresses)
        self._nvml: Any = None
        self._last: dict[str, GpuUsed] = {}

    def changes(self) -> Iterator[GpuUsed]:
        """Yield the GPUs whose readings have changed since the last call."""
        if self._addresses and self._nvml is None:
            self._nvml = _open()
            if self._nvml is None:
                self._addresses = ()
        for address in self._addresses:
            gpu = _read(self._nvml, address)
            if gpu is not None and gpu != self._last.get(address):
                self._last[address] = gpu
                yield gpu


def _open() -> Any:
    """Import and initialise pynvml, and return the module; return None if that fails."""
    import ctypes

    try:
        # Without NVML, this line fails at once, which saves the 20 ms that importing pynvml would take.
        ctypes.CDLL("libnvidia-ml.so.1")
        import pynvml
    except (ImportError, OSError):
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _read(nvml: Any, address: str) -> GpuUsed | None:
    def told(question: Callable[[Any], Any]) -> Any:
        try:
            return question(handle)
        except nvml.NVMLError:
            return None  # some kinds of GPU do not report this value

    try:
        handle = _handle(nvml, address)
        name = nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError:
        return None
    memory = told(nvml.nvmlDeviceGetMemoryInfo)
    rates = told(nvml.nvmlDeviceGetUtilizationRates)
    return GpuUsed(
        address,
        name,
        used_bytes=None if memory is None else int(memory.used),
        total_bytes=None if memory is None else int(memory.total),
        busy_percent=None if rates is None else int(rates.gpu),
    )


def _handle(nvml: Any, address: str) -> Any:
    if address.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(address))
    if address.startswith("GPU-"):
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetUUID(handle).startswith(address):
                return handle
    return nvml.nvmlDeviceGetHandleByUUID(address)
