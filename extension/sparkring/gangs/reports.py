"""Translates the messages of members and ranks into events of the run, and says how a rank exited."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from sparkring.history import describe, stacks
from sparkring.history.events import Event, Failure, GpuFault, GpuHolder, GpuTrouble, StackTaken
from sparkring.wire.messages import Exited, Kept, Stack


def as_event(time: float, rank: int, report: Kept | Stack) -> Event:
    """Return the event that is recorded for `report`; `time` is when the driver received the report."""
    if isinstance(report, Stack):
        return StackTaken(time, rank, report.state, stacks.cell_line(report.text), report.text)
    return report._replace(time=time, rank=rank)


def exit_failure(exited: Exited) -> Failure:
    """Return the Failure of a rank whose process exited before the cell had ended."""
    peak = f"its memory peaked at {exited.peak_memory_bytes / 1e6:,.0f} MB"
    if exited.signal is None:
        advice = "The process exited by itself: the cell called os._exit(), or a library called exit()."
        summary = f"exited with code {exited.code} before the cell ended"
        return Failure("exit", summary, advice=advice, exit_code=exited.code)
    try:
        name = signal.Signals(exited.signal).name
    except ValueError:
        name = f"signal {exited.signal}"
    if exited.out_of_memory and exited.signal == signal.SIGKILL:  # the kernel kills with this signal
        advice = "Use fewer ranks per machine, smaller batches, or a shard of the data."
        return Failure("out of memory", f"out of memory: killed by {name}; {peak}", advice=advice, signal=name)
    advice = {
        "SIGSEGV": "Native code crashed; its stack is among the last lines of the rank.",
        "SIGTERM": "Something asked the process to end: a scheduler, a spot market, Spark, or a user.",
        "SIGABRT": "Native code called abort(); the last lines of the rank may say why.",
        "SIGKILL": f"Another process or the kernel killed the rank; {peak}. dmesg shows whether the machine ran out "
        "of memory.",
    }.get(name, "")
    return Failure("signal", f"killed by {name}", advice=advice, signal=name, gpu=exited.gpu)


def with_gpu_explained(
    rank: int, failure: Failure, troubles: Sequence[GpuTrouble], owners: Mapping[int, GpuHolder]
) -> Failure:
    """Return the failure with a summary and advice that say what went wrong with the rank's GPU, if anything did.

    `troubles` are what the rank's GPUs have reported, and `owners` are the known processes on the rank's host, by pid.
    """
    fault = failure.gpu
    if fault is None and troubles and failure.cause in ("exception", "signal"):
        last = troubles[-1]
        fault = GpuFault("lost" if last.lost else "xid", last.address, last.name)
    if fault is None:
        return failure
    xids = [one.xid for one in troubles if one.xid is not None and fault.address in ("", one.address)]
    holders = (owners.get(one.pid, one)._replace(used_bytes=one.used_bytes) for one in fault.holders)
    fault = fault._replace(holders=tuple(holders), xid=xids[-1] if xids else None)
    cause = describe.gpu_fault(fault, rank)
    if failure.gpu is None:
        # The rank's own error does not mention the GPU, so it is kept.
        return failure._replace(
            gpu=fault, advice=" ".join(filter(None, (f"{cause}.", describe.gpu_advice(fault, rank))))
        )
    kind = failure.error.rpartition(".")[2] or failure.summary
    advice = " ".join(filter(None, (fault.detail, describe.gpu_advice(fault, rank))))
    return failure._replace(gpu=fault, summary=f"{kind}: {cause}", advice=advice)
