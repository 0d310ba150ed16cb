"""Finds this machine's NVIDIA GPUs, as reported by NVML, the library of NVIDIA's driver.

Where NVML is not installed, no GPUs are found. The address of a GPU is what CUDA_VISIBLE_DEVICES accepts: an index, a
UUID, or the beginning of a UUID. Indices follow the order of the PCI bus. NVML always uses this order; CUDA uses it
if CUDA_DEVICE_ORDER=PCI_BUS_ID is set.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sparkring.wire.messages import GpuUsed


def found(visible: str | None) -> list[GpuUsed]:
    """Return the GPUs that CUDA would find if CUDA_VISIBLE_DEVICES were `visible`, or all GPUs if `visible` is None.

    If `visible` names a GPU that does not exist, this GPU and all that follow are ignored, as in CUDA.
    """
    with opened() as nvml:
        if nvml is None:
            return []
        try:
            names = (
                map(str, range(nvml.nvmlDeviceGetCount())) if visible is None else map(str.strip, visible.split(","))
            )
            read = (_read(nvml, address) for address in dict.fromkeys(names))
            return list(iter(lambda: next(read, None), None))
        except nvml.NVMLError:  # NVIDIA's driver does not respond
            return []


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


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """Open NVML for this block, which gets the module pynvml; the block gets None if there is no NVIDIA driver."""
    nvml = _open()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


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
    try:
        handle = handle_of(nvml, address)
        name = nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError:
        return None
    memory = asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    rates = asked(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return GpuUsed(
        address,
        name,
        used_bytes=None if memory is None else int(memory.used),
        total_bytes=None if memory is None else int(memory.total),
        busy_percent=None if rates is None else int(rates.gpu),
    )


def asked(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer to a question; None if this driver, or this kind of GPU, does not answer it."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def handle_of(nvml: Any, address: str) -> Any:
    """Return NVML's handle of the GPU with this address. Raise NVMLError if there is no such GPU."""
    if address.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(address))
    if address.startswith("GPU-"):
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetUUID(handle).startswith(address):
                return handle
    return nvml.nvmlDeviceGetHandleByUUID(address)
