"""Lets a rank out of a collective that another one will never join.

A rank that waits in an allreduce waits in native code, where no Python exception reaches it. Ending the framework's
own communication from another thread ends the wait with an error; the rank lives on, and a later `init()` makes
a new ring.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def release() -> None:
    """End the communication of every framework that this process has set up; called on all ranks of the gang."""
    for name in ("horovod.tensorflow.mpi_ops", "horovod.torch.mpi_ops"):
        horovod: Any = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            _try(horovod.shutdown)
    torch: Any = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_initialized():
        _try(lambda: torch.group.WORLD.abort())
        _try(torch.destroy_process_group)


def _try(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:  # the state is broken already: whatever it raises tells nothing new
        print(f"sparkring: ending a collective: {type(error).__name__}: {error}", file=sys.stderr)
