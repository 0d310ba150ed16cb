"""Reads the state of this machine's NVIDIA GPUs through NVML, and judges it. CUDA is not initialised."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sparkring.engine.doctor.builds import Build, HorovodBuild
from sparkring.executor.processes import descendants
from sparkring.history.describe import counted, first_line, size
from sparkring.history.findings import Finding, note, ok, problem
from sparkring.worker.member import gpus as nvml_gpus

KERNEL_BYTES = 1 << 30  # if the notebook itself holds more of a GPU's memory than this, there is a problem
OTHERS_BYTES = 1 << 30
# NVML_P2P_CAPS_INDEX_READ; by a mistake in pynvml, its constant of this name is a tuple.
_READS = 0
_LINKS = 18  # the most NVLinks of a GPU
# NVML's bits for clocks that are lower because of heat or power, and what they mean.
_SLOWDOWNS = {
    0x08: "a hardware slowdown",
    0x20: "heat (software slowdown)",
    0x40: "heat (hardware slowdown)",
    0x80: "the power supply",
}


class GpuProcess(NamedTuple):
    """A process that uses a GPU. `used_bytes` is None if the driver does not report how much memory it holds.

    `mine` says whether it is this process ("notebook") or one that this process has started ("started").
    """

    pid: int
    name: str
    used_bytes: int | None
    mine: str = ""


class GpuState(NamedTuple):
    """The state of one GPU. A value is None if the GPU does not report it.

    total_bytes, free_bytes: its memory.
    instances: the number of its MIG instances if MIG mode is on, otherwise None.
    uncorrected: the number of uncorrected memory errors since the driver was loaded.
    slowdowns: why its clocks are lowered, apart from being idle and from its normal power limit.
    links: the number of active NVLinks.
    """

    address: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    instances: int | None = None
    persistent: bool | None = None
    uncorrected: int | None = None
    slowdowns: tuple[str, ...] = ()
    links: int = 0


class Gpus(NamedTuple):
    """NVIDIA's driver, the newest version of CUDA that it supports (None if unknown), and the GPUs.

    `apart` holds the pairs of addresses of GPUs that cannot access each other's memory.
    """

    driver: str
    cuda: tuple[int, int] | None
    gpus: tuple[GpuState, ...]
    apart: tuple[tuple[str, str], ...] = ()


# ── Reading ───────────────────────────────────────────────────────────────────


def read(addresses: Iterable[str] | None = None, *, health: bool = True) -> Gpus | None:
    """Return the state of the GPUs with these addresses (default: all); None if there is no NVIDIA driver.

    Without `health`, only the driver's versions, the names of the GPUs, their memory and their processes are read.
    """
    with nvml_gpus.opened() as nvml:
        if nvml is None:
            return None
        driver = nvml_gpus.asked(nvml, nvml.nvmlSystemGetDriverVersion)
        cuda = nvml_gpus.asked(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
        names = addresses
        if names is None:
            names = map(str, range(nvml_gpus.asked(nvml, nvml.nvmlDeviceGetCount) or 0))
        handles: dict[str, Any] = {}
        for name in names:
            with contextlib.suppress(nvml.NVMLError):
                handles[name] = nvml_gpus.handle_of(nvml, name)
        ours = {os.getpid(): "notebook", **dict.fromkeys(descendants(os.getpid()), "started")}
        gpus = tuple(_read(nvml, address, handle, ours, health) for address, handle in handles.items())
        apart = tuple(_apart(nvml, handles)) if health else ()
        return Gpus(driver or "", None if not cuda else (cuda // 1000, cuda % 1000 // 10), gpus, apart)


def _read(nvml: Any, address: str, handle: Any, ours: Mapping[int, str], health: bool) -> GpuState:
    def ask(question: str, *arguments: Any) -> Any:
        return nvml_gpus.asked(nvml, getattr(nvml, question), handle, *arguments)

    memory = ask("nvmlDeviceGetMemoryInfo")
    # Drivers before 510 know only the older of these functions.
    running = ask("nvmlDeviceGetComputeRunningProcesses_v3") or ask("nvmlDeviceGetComputeRunningProcesses_v2") or ()
    gpu = GpuState(
        address,
        ask("nvmlDeviceGetName") or "GPU",
        None if memory is None else int(memory.total),
        None if memory is None else int(memory.free),
        tuple(
            GpuProcess(info.pid, _name(nvml, info.pid), info.usedGpuMemory, ours.get(info.pid, "")) for info in running
        ),
    )
    if not health:
        return gpu
    mode, persistence = ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetPersistenceMode")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    return gpu._replace(
        instances=_instances(nvml, handle) if mode is not None and mode[0] else None,
        persistent=None if persistence is None else bool(persistence),
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        slowdowns=tuple(why for bit, why in _SLOWDOWNS.items() if reasons & bit),
        links=_links(nvml, handle),
    )


def _name(nvml: Any, pid: int) -> str:
    name = nvml_gpus.asked(nvml, nvml.nvmlSystemGetProcessName, pid)
    return first_line(str(name).rpartition("/")[2], 40) if name else "a process"


def _instances(nvml: Any, handle: Any) -> int:
    most = nvml_gpus.asked(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    instances = (
        nvml_gpus.asked(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index) for index in range(most)
    )
    return sum(instance is not None for instance in instances)


def _links(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(_LINKS):
        state = nvml_gpus.asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:  # the GPU has no further links
            break
        active += bool(state)
    return active


def _apart(nvml: Any, handles: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for one, other in itertools.combinations(handles, 2):
        status = nvml_gpus.asked(nvml, nvml.nvmlDeviceGetP2PStatus, handles[one], handles[other], _READS)
        if status is not None and status != nvml.NVML_P2P_STATUS_OK:
            yield one, other


# ── Judging ───────────────────────────────────────────────────────────────────


def judge(state: Gpus | None, builds: Sequence[Build], horovod: HorovodBuild | None) -> list[Finding]:
    """Judge the GPUs, and whether the driver suits the frameworks."""
    if state is None:
        return [ok("GPUs", "no NVIDIA GPU")]
    if not state.gpus:
        return [problem("GPUs", f"NVIDIA driver {state.driver}, but no GPU", "Run nvidia-smi, which says more.")]
    findings = [ok("driver", f"NVIDIA {state.driver}, for CUDA up to {_dotted(state.cuda)}")]
    findings += [finding for build in builds for finding in driver(state, build)]
    if horovod is not None:
        if horovod.cuda:
            findings += driver(state, Build("horovod", horovod.version, horovod.cuda))
        if horovod.without_nccl:
            named = " and ".join(f"horovod.{name}" for name in horovod.without_nccl)
            what = f"{named}: built without NCCL, so tensors on GPUs are averaged in the memory of the host"
            findings.append(note("horovod", what, "%%torchrun and %%tensorflow use NCCL."))
    for gpu in state.gpus:
        findings += _judge(gpu, state.gpus)
    findings += connections(state)
    findings += visible(os.environ.get("CUDA_VISIBLE_DEVICES"), state.gpus)
    interfaces = [name for _, name in socket.if_nameindex()]
    findings.append(nccl_interface(os.environ.get("NCCL_SOCKET_IFNAME"), interfaces))
    return findings


def driver(state: Gpus, build: Build) -> list[Finding]:
    """Judge whether the driver supports the version of CUDA for which a framework was built."""
    name = f"{build.package} {build.version}"
    if not build.cuda:
        return [note(build.package, f"{name} was built without CUDA, so it uses no GPU", "Install a build for CUDA.")]
    if state.cuda is None:
        return []
    major, minor = (*map(int, build.cuda.split(".")[:2]), 0)[:2]
    what = f"{name} was built for CUDA {build.cuda}"
    if major > state.cuda[0]:
        return [
            problem(
                build.package,
                f"{what}, but NVIDIA's driver {state.driver} supports CUDA {_dotted(state.cuda)} at most",
                f"Update the driver, or install a build of {build.package} for CUDA {state.cuda[0]}.",
            )
        ]
    if (major, minor) > state.cuda:
        what += f", and the driver supports CUDA {_dotted(state.cuda)}, which is compatible except for code in PTX"
        return [note(build.package, what, "If the GPU reports an unsupported toolchain, update the driver.")]
    return [ok(build.package, what)]


def _dotted(version: tuple[int, int] | None) -> str:
    return "an unknown version" if version is None else f"{version[0]}.{version[1]}"


def _named(address: str) -> str:
    """Return the name of a GPU in a sentence. A UUID, such as GPU-1a2b…, already shows that it names a GPU."""
    return f"GPU {address}" if address.isdecimal() else address


def _judge(gpu: GpuState, every: Sequence[GpuState]) -> Iterator[Finding]:
    topic = _named(gpu.address)
    free = f", {size(gpu.free_bytes)} of {size(gpu.total_bytes)} free" if gpu.total_bytes else ""
    yield ok(topic, f"{gpu.name}{free}")
    if own := held_by_notebook(gpu, every):
        yield own
    started = [user for user in gpu.processes if user.mine == "started"]
    if started:
        yield note(topic, f"{_held(started)} processes of this notebook's ranks", "%gang stop ends a warm gang.")
    others = [user for user in gpu.processes if not user.mine]
    if others:
        named = ", ".join(f"{user.name} (process {user.pid})" for user in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        large = sum(user.used_bytes or 0 for user in others) >= OTHERS_BYTES
        advice = "Set CUDA_VISIBLE_DEVICES to other GPUs, or end these processes."
        what = f"{_held(others)} {named}{more}"
        yield note(topic, what, advice) if large else ok(topic, what)
    if gpu.instances is not None:
        instances = f"MIG mode is on, with {counted(gpu.instances, 'instance')}"
        if gpu.instances:
            yield ok(topic, f"{instances}; each rank uses one instance")
        else:
            yield problem(topic, instances, "Make instances with `nvidia-smi mig -cgi …`, or switch MIG mode off.")
    if gpu.uncorrected:
        yield problem(
            topic,
            f"{counted(gpu.uncorrected, 'uncorrected memory error')} (ECC) since the driver was loaded",
            "Use other GPUs, and have this one reset or replaced: results may be wrong, and processes may be killed.",
        )
    if gpu.slowdowns:
        yield note(topic, f"the clocks are lowered by {' and '.join(gpu.slowdowns)}", "Check its cooling and power.")
    if gpu.persistent is False:
        advice = "`sudo nvidia-smi -pm 1` keeps the driver loaded."
        yield note(topic, "persistence mode is off, so launches on an idle machine take longer", advice)


def _held(processes: Sequence[GpuProcess]) -> str:
    known = [user.used_bytes for user in processes if user.used_bytes is not None]
    return f"{size(sum(known))} held by" if known else "memory (the driver does not say how much) is held by"


def held_by_notebook(gpu: GpuState, every: Sequence[GpuState]) -> Finding | None:
    """Judge how much of the GPU's memory this process holds; None if it holds none."""
    own = [user for user in gpu.processes if user.mine == "notebook"]
    if not own:
        return None
    known = [user.used_bytes for user in own if user.used_bytes is not None]
    held = size(sum(known)) if known else "an unknown amount of memory"
    what = f"this notebook holds {held} on {_named(gpu.address)}"
    advice = "Free it (delete the tensors and call torch.cuda.empty_cache(); with TensorFlow, restart the kernel)"
    others = [other.address for other in every if not any(user.mine for user in other.processes)]
    if others:
        advice += f", or use the other GPUs: --gpus 1 --env CUDA_VISIBLE_DEVICES={','.join(others)}"
    topic = _named(gpu.address)
    if sum(known) > KERNEL_BYTES:
        return problem(topic, what, f"{advice}.")
    return note(topic, what, f"{advice}.")


def connections(state: Gpus) -> list[Finding]:
    """Judge whether the GPUs can access each other's memory, and through how many NVLinks they are connected."""
    if len(state.gpus) < 2:
        return []
    links = {gpu.links for gpu in state.gpus}
    linked = f"{min(links)}" if len(links) == 1 else f"{min(links)}–{max(links)}"
    nvlink = f"{linked} NVLinks each" if max(links) else "no NVLink"
    if not state.apart:
        return [ok("connections", f"the GPUs can access each other's memory; {nvlink}")]
    pairs = ", ".join(f"{one} and {other}" for one, other in state.apart[:3])
    more = f" and {len(state.apart) - 3} more pairs" if len(state.apart) > 3 else ""
    what = f"GPUs {pairs}{more} cannot access each other's memory, so NCCL copies through the host; {nvlink}"
    return [note("connections", what, "`nvidia-smi topo -p2p r` says why.")]


def visible(setting: str | None, gpus: Sequence[GpuState]) -> list[Finding]:
    """Judge CUDA_VISIBLE_DEVICES, which limits the GPUs of local ranks."""
    if setting is None:
        return []
    names = [name.strip() for name in setting.split(",") if name.strip()]
    what = f"CUDA_VISIBLE_DEVICES={setting!r}: local ranks get {len(names)} of {counted(len(gpus), 'GPU')}"
    wrong = [name for name in names if name.isdecimal() and int(name) >= len(gpus)]
    if wrong:
        advice = "Name only GPUs that exist: CUDA ignores this name and all that follow."
        return [problem("visible", f"CUDA_VISIBLE_DEVICES={setting!r}: there is no GPU {wrong[0]}", advice)]
    return [ok("visible", what) if names else note("visible", what, "Unset it to use GPUs.")]


def nccl_interface(setting: str | None, interfaces: Sequence[str]) -> Finding:
    """Judge NCCL_SOCKET_IFNAME, a list of prefixes: ^ in front excludes them, and = asks for exact names."""
    if not setting:
        return ok("NCCL", "NCCL_SOCKET_IFNAME is not set; sparkring sets it to the interface that leads to the driver")
    excludes, names = setting.startswith("^"), setting.lstrip("^=").split(",")
    exact = setting.lstrip("^").startswith("=")
    named = [
        interface
        for interface in interfaces
        if any(interface == name if exact else interface.startswith(name) for name in names)
    ]
    left = [interface for interface in interfaces if interface not in named] if excludes else named
    if not left:
        what = f"NCCL_SOCKET_IFNAME={setting} leaves no network interface of this machine: {', '.join(interfaces)}"
        return problem("NCCL", what, "Unset the variable, or set it to one of them, before the kernel starts.")
    return ok("NCCL", f"NCCL_SOCKET_IFNAME={setting}: {', '.join(left)}")
