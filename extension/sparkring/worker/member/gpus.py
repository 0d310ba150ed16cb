"""The NVIDIA GPUs of this machine, as reported by NVML, the library of NVIDIA's driver that nvidia-smi uses, too.

Without NVML, no GPUs are found. An address is what CUDA_VISIBLE_DEVICES accepts: an index in the order of the PCI bus,
as in NVML (and in CUDA under CUDA_DEVICE_ORDER=PCI_BUS_ID), or a UUID or its beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sparkring.wire.messages import GpuUsed


def found(visible: str | None) -> list[GpuUsed]:
    """The GPUs that CUDA finds here under CUDA_VISIBLE_DEVICES=`visible`: all of them if it is None.

    As with CUDA, the GPUs after an address that does not exist are ignored.
    """
    nvml = _open()
    if nvml is None:
        return []
    try:
        names = map(str, range(nvml.nvmlDeviceGetCount())) if visible is None else map(str.strip, visible.split(","))
        read = (_read(nvml, address) for address in dict.fromkeys(names))
        return [gpu for gpu in itertools.takewhile(lambda gpu: gpu is not None, read) if gpu is not None]
    except nvml.NVMLError:
        return []  # NVIDIA's driver does not answer, so there is no GPU to use
    finally:
        nvml.nvmlShutdown()


class Meter:
    """Reads the same GPUs again and again: NVML is opened at the first reading, and stays open."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._addresses = tuple(addresses)
        self._nvml: Any = None
        self._last: dict[str, GpuUsed] = {}

    def changes(self) -> Iterator[GpuUsed]:
        """The GPUs whose readings have changed since the last call."""
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
    """The module pynvml, after nvmlInit(); None where that is not possible."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # first, since most machines have no NVML, and importing pynvml takes 20 ms
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
            return None  # not every kind of GPU tells everything

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
