"""Finds this machine's NVIDIA GPUs, as reported by NVML, the library of NVIDIA's driver.

Where NVML is not installed, no GPUs are found. The address of a GPU is what CUDA_VISIBLE_DEVICES accepts: an index, a
UUID, or the beginning of a UUID. Indices follow the order of the PCI bus, and count only GPUs that this process can
open. CUDA uses the same order if CUDA_DEVICE_ORDER=PCI_BUS_ID is set.

If MIG divides a GPU, its instances take the GPU's place, each with its UUID as its address. A CUDA process can use only
one of them, and no whole GPU beside it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sparkring.runtime.world import is_mig
from sparkring.wire.messages import GpuHolder, GpuTrouble, GpuUsed
from sparkring.worker.member import process

DEVICES = "/dev"  # the folder of the GPUs' device files
EVENTS_AT_ONCE = 16
_NO_INSTANCE = 0xFFFFFFFF  # an event with this number is not about a MIG instance


class Gpu(NamedTuple):
    """A device that a CUDA process can use: a whole GPU, or an instance of a GPU that MIG divides.

    `uuid` is the whole UUID, even if `address` is only its beginning; '' if it is not known.
    """

    address: str
    uuid: str
    used: GpuUsed

    @property
    def is_mig(self) -> bool:
        """Whether this is an instance of a GPU that MIG divides."""
        return is_mig(self.address)


def find(visible: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA could use if CUDA_VISIBLE_DEVICES were `visible`, or all GPUs if `visible` is None.

    The instances of a GPU that MIG divides count as GPUs, although a single process cannot use several of them. If
    `visible` names a GPU that does not exist, this GPU and all that follow are ignored, as in CUDA. Without `visible`,
    whole GPUs come first, and successive instances are on different GPUs, as far as possible.
    """
    with opened() as nvml:
        if nvml is None:
            return []
        devices = _Devices(nvml)
        selected = devices.all() if visible is None else devices.named(visible.split(","))
        return [Gpu(device.address, device.uuid, _used(nvml, device)) for device in selected]


def found(visible: str | None) -> list[GpuUsed]:
    """Return how the GPUs that find() returns are used."""
    return [gpu.used for gpu in find(visible)]


def visible() -> list[str]:
    """Return the addresses of the GPUs that CUDA could use in this process."""
    return [gpu.address for gpu in find(os.environ.get("CUDA_VISIBLE_DEVICES"))]


def resolved(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the `addresses`, with a GPU that MIG divides replaced by its instances.

    If an index could name two different GPUs, it is replaced by a UUID. Addresses of unknown GPUs do not change.
    """
    if all(map(is_mig, addresses)):
        return tuple(addresses)
    with opened() as nvml:
        if nvml is None:
            return tuple(addresses)
        devices = _Devices(nvml)
        parts = ([device.address for device in devices.named([address])] or [address] for address in addresses)
        return tuple(dict.fromkeys(address for part in parts for address in part))


def holders(address: str) -> tuple[GpuUsed, tuple[GpuHolder, ...]] | None:
    """Return how a GPU is used, and the processes that hold its memory, the largest first; None if it is unknown."""
    with opened() as nvml:
        devices = [] if nvml is None else _Devices(nvml).named([address])
        if len(devices) != 1:
            return None
        (device,) = devices
        running = asked(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, device.handle) or ()
        known = [GpuHolder(one.pid, process.program(one.pid), one.usedGpuMemory) for one in running]
        return _used(nvml, device), tuple(sorted(known, key=lambda holder: -(holder.used_bytes or 0)))


class GpuMeter:
    """Reads the same GPUs repeatedly. NVML is opened at the first reading, and stays open."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._addresses = tuple(addresses)
        self._nvml: Any = None
        self._devices: list[_Device] = []
        self._last: dict[str, GpuUsed] = {}
        self._xids: dict[str, Any] = {}  # NVML's sets of events, by the address of the GPU
        self._told: set[GpuTrouble] = set()

    def changes(self) -> Iterator[GpuUsed]:
        """Yield the GPUs whose readings have changed since the last call."""
        self._open()
        for device in self._devices:
            used = _used(self._nvml, device)
            if used != self._last.get(device.address):
                self._last[device.address] = used
                yield used

    def troubles(self) -> Iterator[GpuTrouble]:
        """Yield what has gone wrong with the GPUs since the last call. Nothing is reported twice."""
        self._open()
        for device in self._devices:
            trouble = GpuTrouble(device.address, device.name)
            troubles = {trouble._replace(xid=xid) for xid in self._new_xids(device)}
            if _is_lost(self._nvml, device):
                troubles.add(trouble._replace(lost=True))
            yield from troubles - self._told
            self._told |= troubles

    def _new_xids(self, device: _Device) -> Iterator[int]:
        """Yield the numbers of the errors that the device has reported. Errors of other instances are left out."""
        nvml, events = self._nvml, self._xids.get(device.address)
        is_whole = device.handle is device.whole
        instance = None if is_whole else asked(nvml, nvml.nvmlDeviceGetGpuInstanceId, device.handle)
        for _ in range(EVENTS_AT_ONCE if events is not None else 0):
            event = asked(nvml, nvml.nvmlEventSetWait_v2, events, 0)
            if event is None:
                return
            if instance is None or event.gpuInstanceId in (instance, _NO_INSTANCE):
                yield int(event.eventData)

    def _open(self) -> None:
        addresses, self._addresses = self._addresses, ()
        if not addresses:
            return
        self._nvml = _open()
        if self._nvml is not None:
            devices = _Devices(self._nvml)
            for address in addresses:
                self._devices += (device._replace(address=address) for device in devices.named([address])[:1])
            for device in self._devices:
                self._listen(device)

    def _listen(self, device: _Device) -> None:
        nvml = self._nvml
        events = asked(nvml, nvml.nvmlEventSetCreate)
        if events is not None:
            try:
                nvml.nvmlDeviceRegisterEvents(device.whole, nvml.nvmlEventTypeXidCriticalError, events)
                self._xids[device.address] = events
            except nvml.NVMLError:  # this kind of GPU reports no events
                pass


class _Device(NamedTuple):
    """A GPU or an instance, as NVML knows it. `whole` is the handle of the GPU that has the instance."""

    address: str
    uuid: str
    handle: Any
    whole: Any
    name: str


class _Whole(NamedTuple):
    """A GPU that this process can open. `instances` is None if MIG does not divide it."""

    device: _Device
    instances: list[_Device] | None

    @property
    def parts(self) -> list[_Device]:
        return [self.device] if self.instances is None else self.instances


class _Devices:
    """The GPUs of this machine that this process can open."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        count = asked(nvml, nvml.nvmlDeviceGetCount) or 0
        self._wholes = [whole for index in range(count) if (whole := self._whole(index)) is not None]
        divided = any(whole.instances is not None for whole in self._wholes)
        if divided or len(self._wholes) < count:
            # CUDA and other tools may number these GPUs differently, so they have UUIDs as addresses.
            for at, whole in enumerate(self._wholes):
                address = whole.device.uuid or str(at)
                self._wholes[at] = whole._replace(device=whole.device._replace(address=address))

    def all(self) -> list[_Device]:
        """Return all devices: whole GPUs first, then the first instance of each divided GPU, then the second, …"""
        divided = [whole.instances for whole in self._wholes if whole.instances is not None]
        deepest = max(map(len, divided), default=0)
        instances = [parts[at] for at in range(deepest) for parts in divided if at < len(parts)]
        return [whole.device for whole in self._wholes if whole.instances is None] + instances

    def named(self, addresses: Iterable[str]) -> list[_Device]:
        """Return the devices with these addresses, each of them once. The first unknown address ends the list."""
        selected: dict[Any, _Device] = {}
        for address in map(str.strip, addresses):
            devices = self._named(address)
            if devices is None:
                break
            for device in devices:
                selected.setdefault(device.uuid or device.address, device)
        return list(selected.values())

    def _named(self, address: str) -> list[_Device] | None:
        """Return the device with this address, or the instances of a divided GPU; None if there is no such device."""
        if address.isdecimal():
            at = int(address)
            return self._wholes[at].parts if at < len(self._wholes) else None
        if address.startswith("GPU-"):
            named = [whole for whole in self._wholes if whole.device.uuid.startswith(address)]
            if len(named) != 1:
                return None  # CUDA refuses a beginning that several GPUs have
            (whole,) = named
            return [whole.device._replace(address=address)] if whole.instances is None else whole.instances
        if is_mig(address):
            instances = [instance for whole in self._wholes for instance in whole.instances or ()]
            matching = [instance for instance in instances if instance.uuid.startswith(address)]
            if len(matching) == 1:
                return [matching[0]._replace(address=address)]
        return None

    def _whole(self, index: int) -> _Whole | None:
        """Return the GPU with this index in NVML; None if this process cannot open it, or if it has failed."""
        nvml = self._nvml
        handle = asked(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
        name = None if handle is None else asked(nvml, nvml.nvmlDeviceGetName, handle)
        if name is None or not self._can_open(handle):
            return None
        uuid = asked(nvml, nvml.nvmlDeviceGetUUID, handle) or ""
        mode = asked(nvml, nvml.nvmlDeviceGetMigMode, handle)  # the current mode, and the mode after the next reset
        instances = self._instances(handle) if mode is not None and mode[0] else None
        return _Whole(_Device(str(index), uuid, handle, handle, name), instances)

    def _instances(self, whole: Any) -> list[_Device]:
        nvml = self._nvml
        instances = []
        for at in range(asked(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, whole) or 0):
            handle = asked(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, whole, at)
            uuid = None if handle is None else asked(nvml, nvml.nvmlDeviceGetUUID, handle)
            if uuid is not None:
                name = asked(nvml, nvml.nvmlDeviceGetName, handle) or "MIG"
                instances.append(_Device(uuid, uuid, handle, whole, name))
        return instances

    def _can_open(self, handle: Any) -> bool:
        """Return whether this process may use the GPU. NVML lists GPUs even if a cgroup denies the use of their files.

        Without /dev/nvidiactl, as on WSL, the driver has no such files.
        """
        minor = asked(self._nvml, self._nvml.nvmlDeviceGetMinorNumber, handle)
        if minor is None or not os.path.exists(os.path.join(DEVICES, "nvidiactl")):
            return True
        return os.access(os.path.join(DEVICES, f"nvidia{minor}"), os.R_OK | os.W_OK)


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


def _is_lost(nvml: Any, device: _Device) -> bool:
    try:
        nvml.nvmlDeviceGetMemoryInfo(device.handle)
    except nvml.NVMLError as error:
        return bool(error.value == nvml.NVML_ERROR_GPU_IS_LOST)
    return False


def _used(nvml: Any, device: _Device) -> GpuUsed:
    memory = asked(nvml, nvml.nvmlDeviceGetMemoryInfo, device.handle)
    rates = asked(nvml, nvml.nvmlDeviceGetUtilizationRates, device.handle)
    power = asked(nvml, nvml.nvmlDeviceGetPowerUsage, device.whole)  # in milliwatts
    return GpuUsed(
        device.address,
        device.name,
        used_bytes=None if memory is None else int(memory.used),
        total_bytes=None if memory is None else int(memory.total),
        busy_percent=None if rates is None else int(rates.gpu),
        power_w=None if power is None else round(power / 1000),
        temperature_c=asked(nvml, nvml.nvmlDeviceGetTemperature, device.whole, nvml.NVML_TEMPERATURE_GPU),
    )


def asked(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer to a question; None if this driver, or this kind of GPU, does not answer it."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def handle_of(nvml: Any, address: str) -> Any:
    """Return NVML's handle for the GPU with this address. Raise NVMLError if there is no such GPU."""
    if address.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(address))
    if address.startswith("GPU-"):
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetUUID(handle).startswith(address):
                return handle
    return nvml.nvmlDeviceGetHandleByUUID(address)
