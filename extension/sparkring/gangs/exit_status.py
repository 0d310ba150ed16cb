"""How ranks end: what a process's exit means, and which of several failures is the cause of the others."""

from __future__ import annotations

import signal
from typing import Any

from sparkring.history.events import Failure


def echo_order(failure: Failure) -> int:
    """0 for what no other rank's end can bring about, 2 for what looks like its echo, 1 in between."""
    if failure.follows:
        return 2
    return 0 if failure.kind == "lost" or "SIGKILL" in failure.summary else 1


def exit_failure(fields: dict[str, Any]) -> Failure:
    """A rank's process ended before the cell did."""
    peak = f"; its memory peaked at {fields['peak_memory_bytes'] / 1e6:,.0f} MB"
    if fields["signal"] is None:
        advice = "The process ended itself: os._exit(), or a library that calls exit()."
        return Failure("exit", f"exited with code {fields['code']} before the cell ended", advice=advice)
    try:
        name = signal.Signals(fields["signal"]).name
    except ValueError:
        name = f"signal {fields['signal']}"
    if fields["out_of_memory"]:
        return Failure(
            "signal",
            f"out of memory: killed by {name}{peak}",
            advice="Use fewer ranks per machine, smaller batches, or a shard of the data.",
        )
    advice = {
        "SIGSEGV": "A crash in native code; the stack that it left is among its last lines.",
        "SIGABRT": "Native code gave up (abort); its last lines say why.",
        "SIGKILL": f"Something outside killed it; where memory is short, that is the kernel (dmesg tells){peak}.",
    }.get(name, "")
    return Failure("signal", f"killed by {name}", advice=advice)
