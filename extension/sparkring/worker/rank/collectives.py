"""Interrupts a collective that another rank will never join.

A rank that waits in an allreduce waits in native code, where no Python exception reaches it. Ending the framework's
own communication from another thread ends the wait with an error. The rank stays up, and a later `init()` makes
a new ring.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable
from typing import Any


def release() -> None:
    """End the communication of every framework that this process has set up; called on all ranks of the gang."""
    for name in ("horovod.tensorflow.mpi_ops", "horovod.torch.mpi_ops"):
        horovod: Any = sys.modules.get(name)
        if _initialized(horovod):
            _try(horovod.shutdown)
    torch: Any = sys.modules.get("torch.distributed")
    if _initialized(torch):
        _try(lambda: torch.group.WORLD.abort())  # enough for NCCL, but it does nothing for Gloo
        _try(_cut_accepted)
        _try(torch.destroy_process_group)


def _initialized(framework: Any) -> bool:
    """Whether the module is there and in use; one that is just being imported may not have the function yet."""
    return hasattr(framework, "is_initialized") and bool(framework.is_initialized())


def _cut_accepted() -> None:
    """Cut the connections that this process has accepted. If every rank does so, all Gloo connections are cut.

    Connections that this process has made itself (to a database, a store) are left alone. Destroying the process group
    is not enough as long as something refers to it, as a DistributedDataParallel model does.
    """
    listening, established = set(), []
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        with sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                continue
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(sock.getsockname()[1])
            else:
                established.append(sock.dup())
    for sock in established:
        with sock:
            if sock.getsockname()[1] in listening:
                _try(lambda sock=sock: sock.shutdown(socket.SHUT_RDWR))  # type: ignore[misc]


def _try(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:  # the state is broken already, so an error changes nothing
        print(f"sparkring: ending a collective: {type(error).__name__}: {error}", file=sys.stderr)
