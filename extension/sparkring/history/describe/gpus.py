"""Says what has gone wrong with a GPU, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparkring.history.describe.text import size
from sparkring.history.events import GpuFault, GpuHolder, GpuTrouble

_HOLDERS_NAMED = 4
_OWN_DEVICE = "`torch.cuda.set_device(local_rank % torch.cuda.device_count())`"
_ANY_DEVICE = f"Select the rank's own GPU with {_OWN_DEVICE}."
_FIND_THE_LINE = "To find the line, run the cell with --env CUDA_LAUNCH_BLOCKING=1."
_WHAT = {
    "out of memory": "out of memory",
    "assert": "a check in code on the GPU failed (device-side assert)",
    "illegal access": "code on the GPU used memory that it may not use (illegal memory access)",
    "launch failure": "code on the GPU crashed (unspecified launch failure)",
    "hardware": "the GPU has an error that it could not correct",
    "lost": "the GPU is lost: it no longer answers",
    "no such device": "this process does not see a GPU with this number",
    "busy": "the GPU is busy or not available",
    "shared": "NCCL found two ranks on the same GPU",
    "timeout": "an NCCL collective did not end in time",
    "xid": "the driver of the GPU reported an error",
}
_ADVICE = {
    "assert": f"Usually an index or a label is out of range. {_FIND_THE_LINE}",
    "illegal access": f"Usually an index is out of range, or a CUDA extension has a bug. {_FIND_THE_LINE}",
    "launch failure": f"{_FIND_THE_LINE} dmesg shows what the driver has reported (Xid).",
    "hardware": "Reset the GPU (nvidia-smi --gpu-reset), and replace it if this happens again.",
    "lost": "Reset the GPU (nvidia-smi --gpu-reset) or restart the machine; dmesg shows why it was lost (Xid).",
    "no such device": f"Under MIG, a rank sees only its own device, `cuda:0`. {_ANY_DEVICE}",
    "busy": "Another process uses the GPU exclusively: nvidia-smi lists the processes and the compute mode.",
    "shared": f"{_ANY_DEVICE} For MIG instances of the same GPU, use Gloo instead of NCCL.",
    "timeout": "Another rank was late or did not call the collective: --timeout shows where each rank is. If the step "
    "takes that long, use init_process_group(timeout=…). With --env TORCH_NCCL_TRACE_BUFFER_SIZE=2000, this error "
    "names the collective.",
    "xid": "NVIDIA's list of Xid errors says what the number means.",
}
# NVIDIA's documentation calls these errors by numbers.
_XIDS = {
    13: "an error in code on the GPU",
    31: "code on the GPU has used an invalid address",
    43: "code on the GPU has been stopped",
    48: "a memory error that could not be corrected",
    63: "a row of memory has been replaced",
    64: "a row of memory could not be replaced",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    94: "a memory error that has affected one process",
    95: "a memory error that has affected several processes",
    119: "the GPU's own processor does not answer",
    120: "an error of the GPU's own processor",
}


def gpu_fault(fault: GpuFault, rank: int) -> str:
    """Say what has gone wrong with a GPU of a rank, as part of a sentence.

    For example `out of memory on GPU 1 (NVIDIA H100, 80.0 GB): 20.0 GB more were wanted, and 78.0 GB are in use (…)`.
    """
    text = _WHAT[fault.kind]
    if fault.address:
        facts = ", ".join(filter(None, (fault.name, size(fault.total_bytes))))
        text += f" on GPU {fault.address}" + (f" ({facts})" if facts else "")
    if fault.xid is not None:
        text += f" ({_xid(fault.xid)})"
    return text if fault.kind != "out of memory" else f"{text}{_shortage(fault, rank)}"


def gpu_advice(fault: GpuFault, rank: int) -> str:
    """Say what the user can do about it."""
    advice = _memory_advice(fault, rank) if fault.kind == "out of memory" else _ADVICE[fault.kind]
    return f"{advice} The rank's process can no longer use CUDA." if fault.is_final else advice


def gpu_trouble(trouble: GpuTrouble, rank: int) -> str:
    """Return a notice about a GPU that has reported an error or is lost."""
    state = "is lost: it no longer answers" if trouble.lost else f"has reported an error: {_xid(trouble.xid or 0)}"
    advice = f" {_ADVICE['lost']}" if trouble.lost else ""
    return f"GPU {trouble.address} (rank {rank}) {state}.{advice}"


def idle_gpus(gpus: Iterable[tuple[str, int]], seconds: float) -> str:
    """Return a notice about GPUs that are not used: pairs of the GPU's address and its rank."""
    named = [f"GPU {address} (rank {rank})" for address, rank in gpus]
    have = "has" if len(named) == 1 else "have"
    return f"{', '.join(named)} {have} been idle for {seconds:.0f} s"


def _xid(number: int) -> str:
    return f"Xid {number}" + (f", {_XIDS[number]}" if number in _XIDS else "")


def _shortage(fault: GpuFault, rank: int) -> str:
    parts = []
    if fault.wanted_bytes is not None:
        parts.append(f"{size(fault.wanted_bytes)} more were wanted")
    if fault.used_bytes is not None:
        held = _holders(fault.holders, rank)
        parts.append(f"{size(fault.used_bytes)} are in use" + (f" ({held})" if held else ""))
    return f": {', and '.join(parts)}" if parts else ""


def _holders(holders: Sequence[GpuHolder], rank: int) -> str:
    named = [f"{_holder(holder, rank)} {size(holder.used_bytes)}".rstrip() for holder in holders[:_HOLDERS_NAMED]]
    rest = len(holders) - len(named)
    return ", ".join(named + ([f"{rest} more"] if rest else []))


def _holder(holder: GpuHolder, rank: int) -> str:
    match holder.kind:
        case "rank":
            return "this rank" if holder.rank == rank else f"rank {holder.rank}"
        case "notebook":
            return "this notebook's kernel"
        case "other gang":
            return f"a rank of another run of this notebook (process {holder.pid})"
        case _:
            return f"{holder.name or 'another process'} (process {holder.pid})"


def _memory_advice(fault: GpuFault, rank: int) -> str:
    others = [holder for holder in fault.holders if (holder.kind, holder.rank) != ("rank", rank)]
    kinds = {holder.kind for holder in others}
    advice = []
    if "notebook" in kinds:
        advice.append("Free the kernel's memory: delete its models and call torch.cuda.empty_cache(), or restart it.")
    if "other gang" in kinds:
        advice.append("End the other run, for example with %gang stop.")
    if "rank" in kinds:
        advice.append(f"Several ranks use this GPU: {_ANY_DEVICE[0].lower()}{_ANY_DEVICE[1:]}")
    if "other" in kinds:
        pids = ", ".join(str(holder.pid) for holder in others if holder.kind == "other")
        advice.append(f"Another program uses the GPU (process {pids}): end it, or use another GPU.")
    advice.append("Use smaller batches, lower precision, or --gpus 2 and a model that is split between GPUs.")
    return " ".join(advice)
