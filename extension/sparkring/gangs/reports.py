"""Translates the messages of members and ranks into events of the run, and says how a rank exited."""

from __future__ import annotations

import signal

from sparkring.history import stacks
from sparkring.history.events import Event, Failure, StackTaken
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
    if exited.out_of_memory:
        advice = "Use fewer ranks per machine, smaller batches, or a shard of the data."
        return Failure("out of memory", f"out of memory: killed by {name}; {peak}", advice=advice, signal=name)
    advice = {
        "SIGSEGV": "Native code crashed; its stack is among the last lines of the rank.",
        "SIGABRT": "Native code called abort(); the last lines of the rank may say why.",
        "SIGKILL": f"Another process or the kernel killed the rank; {peak}. dmesg shows whether the machine ran out "
        "of memory.",
    }.get(name, "")
    return Failure("signal", f"killed by {name}", advice=advice, signal=name)
