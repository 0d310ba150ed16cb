"""Interrupts a collective that another rank will never join.

A rank that is waiting in an allreduce is in native code, where no Python exception reaches it. So another thread of the
rank ends the communication of the framework (Horovod or torch), and the allreduce raises an error. The rank's process
goes on, and a later `init()` makes a new ring.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable
from typing import Any


def release(tell: Callable[[], object] = lambda: None) -> None:
    """End the communication of each framework that this process has initialised. All ranks of the gang call this.

    If there is such a framework, `tell` is called first.
    """
    names = ("horovod.tensorflow.mpi_ops", "horovod.torch.mpi_ops", "torch.distributed")
    frameworks: dict[str, Any] = {name: sys.modules[name] for name in names if _initialized(sys.modules.get(name))}
    if frameworks:
        tell()
    torch = frameworks.pop("torch.distributed", None)
    for horovod in frameworks.values():
        _try(horovod.shutdown)
    if torch is not None:
        _try(lambda: _abort_groups(torch))
        _try(_cut_accepted)
        _try(torch.destroy_process_group)


def _initialized(framework: Any) -> bool:
    """Return whether `framework`, a module or None, has been initialised. The module's import may be incomplete."""
    return hasattr(framework, "is_initialized") and bool(framework.is_initialized())


def _abort_groups(torch: Any) -> None:
    """Abort all process groups, the newest first. This is enough for NCCL, but does nothing for Gloo.

    As in PyTorch's own `_abort_process_group()`, NCCL's groups are aborted together, since aborting one of them could
    otherwise wait for another. That function also forgets the groups, so that they could not be destroyed afterwards.
    """
    if not hasattr(torch.group.WORLD, "abort"):  # PyTorch 2.1 does not have it
        return
    try:
        backend = torch.group.WORLD._get_backend(sys.modules["torch"].device("cuda"))
    except RuntimeError:  # no group uses NCCL
        backend = None
    numbers = torch.distributed_c10d._world.pg_names
    groups = sorted(numbers, key=lambda group: numbers[group], reverse=True)
    together = hasattr(backend, "_group_start")
    if together:
        backend._group_start()
    for group in groups:
        _try(group.abort)
    if together:
        backend._group_end()


def _cut_accepted() -> None:
    """Cut the connections that this process has accepted, but not those that it has made (for example to a database).

    Each of Gloo's connections was accepted by one of its two ranks. So if every rank calls this function, all of Gloo's
    connections are cut. torch.destroy_process_group() alone is not enough: the connections stay open as long as an
    object refers to the group, as a DistributedDataParallel model does.
    """
    listening, established = set(), []
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # the descriptor has been closed in the meantime
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
    except Exception as error:  # the communication ends in any case, so an error is only printed
        print(f"sparkring: ending a collective: {type(error).__name__}: {error}", file=sys.stderr)
