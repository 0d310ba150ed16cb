"""How ranks end: what a process's exit means, and which of several failures is the cause of the others."""

from __future__ import annotations

import signal

from sparkring.history.events import Failure
from sparkring.wire.messages import Exited


def cause_priority(failure: Failure) -> int:
    """Which of several failures is the cause, lowest first.

    0 for a failure that another rank's end cannot cause, 2 for one that looks like its consequence, 1 otherwise.
    """
    if failure.cause == "echo":
        return 2
    return 0 if failure.cause == "lost" or failure.signal == "SIGKILL" else 1


def exit_failure(exited: Exited) -> Failure:
    """A rank's process ended before the cell did."""
    peak = f"; its memory peaked at {exited.peak_memory_bytes / 1e6:,.0f} MB"
    if exited.signal is None:
        advice = "The process ended itself, with os._exit() or in a library that calls exit()."
        summary = f"exited with code {exited.code} before the cell ended"
        return Failure("exit", summary, advice=advice, exit_code=exited.code)
    try:
        name = signal.Signals(exited.signal).name
    except ValueError:
        name = f"signal {exited.signal}"
    if exited.out_of_memory:
        return Failure(
            "out of memory",
            f"out of memory: killed by {name}{peak}",
            advice="Use fewer ranks per machine, smaller batches, or a shard of the data.",
            signal=name,
        )
    advice = {
        "SIGSEGV": "Native code crashed; its stack is among the last lines of the rank.",
        "SIGABRT": "Native code called abort(); the last lines of the rank may say why.",
        "SIGKILL": f"Another process or the kernel killed it; dmesg shows whether memory was short{peak}.",
    }.get(name, "")
    return Failure("signal", f"killed by {name}", advice=advice, signal=name)
