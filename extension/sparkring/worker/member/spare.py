"""A spare process: imports frameworks while the notebook is idle, and then forks members that need not import them.

The spare process exits at once if the driver has exited, if an import has opened a GPU, or if a framework has started a
thread, since a fork copies only the thread that calls fork(). If the driver has closed the connection, if no member has
been wanted for a while, or if memory runs short, the spare process exits after the members that it has forked. Until
then, it reports how each member exited. If the spare process is killed, its members go on: they watch the driver, not
the spare process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from sparkring.executor.orders import SPARE_READY, SpareOrder, Ticket, decode
from sparkring.worker.member import member, process, streams
from sparkring.worker.rank import preloads

TICK_S = 1.0
LOWEST = 19  # the priority during imports in the background
_JEMALLOC = "JE_ARROW_MALLOC_CONF"  # the settings of the allocator that pyarrow uses
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


class Forked(NamedTuple):
    """A member that this process has forked. When it has exited, its exit code is written to the pipe `status`."""

    pid: int
    status: int


class ForkedStart(NamedTuple):
    """What a forked process needs to become a member: a ticket, and descriptors of its stdin and working folder."""

    ticket: Ticket
    stdin: int
    folder: int


def main(order: SpareOrder) -> None:
    """Run a spare process until it exits. In each process that it forks, run a member.

    File descriptor 0 is the socket that connects the spare process to the driver.
    """
    try:
        channel = socket.socket(fileno=os.dup(0))
        driver = os.getppid()
        if not prepare(order.modules, in_background=not order.is_awaited):
            os._exit(1)
        channel.send(SPARE_READY + " ".join(preloads.imported()).encode())
        forked = _serve(channel, driver, order)
    except BaseException:  # a module cannot be imported, the driver has exited, or no process can be forked
        os._exit(1)
    become_member(forked)
    member.main(forked.ticket, driver)


def prepare(modules: Sequence[str], *, in_background: bool) -> bool:
    """Import the modules, and return whether forks of this process are as good as new processes.

    What the imports print is discarded. Raise an error if a module cannot be imported.
    """
    with streams.discarded():
        _import(modules, in_background=in_background)
        return _may_fork()


def _import(modules: Sequence[str], *, in_background: bool) -> None:
    """Import the modules as a rank would; with `in_background`, at a low priority."""
    from sparkring.capture import packing  # noqa: F401 - ranks import it, too
    from sparkring.worker.rank import imports, libraries, rank  # noqa: F401

    libraries.prepare()
    imports.note_order(preloads.FRAMEWORKS)
    preloads.ahead = tuple(modules)
    sys.argv = [""]
    gc.disable()  # imports make many objects and hardly any garbage
    is_set = _JEMALLOC in os.environ
    os.environ.setdefault(_JEMALLOC, "background_thread:false")  # forks would lack a background thread
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    if in_background:
        _lower_priority(priority)
    for module in modules:
        importlib.import_module(module)
    os.setpriority(os.PRIO_PROCESS, 0, priority)
    if not is_set:
        del os.environ[_JEMALLOC]
    gc.freeze()  # otherwise, a fork that collects garbage would copy the objects that it shares with this process
    gc.enable()


def _lower_priority(priority: int) -> None:
    """Lower the priority of this process, if the process is allowed to raise it to `priority` again later."""
    pid = os.fork()
    if not pid:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
            os.setpriority(os.PRIO_PROCESS, 0, priority)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1] == 0:
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)


def _may_fork() -> bool:
    """Return whether forks of this process are as good as new processes.

    A library that supports forks, such as OpenBLAS, ends its threads before a fork and starts them again when it needs
    them. So if this process has another thread after a fork, later forks would lack a thread that they need.
    """
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    if len(os.listdir("/proc/self/task")) > 1:
        return False
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith(_GPU_DEVICES):
                return False
    return True


def _serve(channel: socket.socket, driver: int, order: SpareOrder) -> ForkedStart:
    """Fork a process for each ticket that the driver sends. Return only in the forked processes."""
    children: dict[int, Forked] = {}  # the keys are pidfds, which become readable when the process has exited
    used = time.monotonic()
    serving = True
    while serving or children:
        events = select.poll()
        for fd in [*children, *([channel.fileno()] if serving else [])]:
            events.register(fd, select.POLLIN)
        for fd, _ in events.poll(TICK_S * 1000):
            if fd in children:
                report_end(fd, children.pop(fd))
                used = time.monotonic()
                continue
            line, fds, _, _ = socket.recv_fds(channel, 1 << 16, 3, socket.MSG_CMSG_CLOEXEC)
            if not line:
                serving = False
                continue
            stdin, status, folder = fds
            pid = os.fork()
            if not pid:
                # Without these copies: the driver would not see the end of the spare process or of other members.
                channel.close()
                for other, forked in children.items():
                    os.close(other)
                    os.close(forked.status)
                os.close(status)
                return ForkedStart(decode(line), stdin, folder)
            ended = os.pidfd_open(pid)
            children[ended] = Forked(pid, status)
            os.close(stdin)
            os.close(folder)
            socket.send_fds(channel, [str(pid).encode()], [ended])
            used = time.monotonic()
        if os.getppid() != driver:  # its members watch the driver themselves
            break
        if not children and (time.monotonic() - used > order.idle_s or process.available_bytes() < order.least_bytes):
            break
    os._exit(0)


def report_end(fd: int, forked: Forked) -> None:
    """Write the exit code of a forked process that has exited to its pipe. `fd` is its pidfd."""
    _, status = os.waitpid(forked.pid, 0)
    with contextlib.suppress(OSError):  # the driver no longer reads from the pipe
        os.write(forked.status, str(os.waitstatus_to_exitcode(status)).encode())
    os.close(forked.status)
    os.close(fd)


def become_member(start: ForkedStart) -> None:
    """In a forked process, take over stdin and the working folder, and seed the random numbers anew."""
    os.setsid()  # as for a new process: the launcher kills what is left of this session
    os.dup2(start.stdin, 0)
    os.close(start.stdin)
    os.fchdir(start.folder)
    os.close(start.folder)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
