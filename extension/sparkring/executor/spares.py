"""Has a member forked from the spare process of the executor, which the first task that wants a member starts.

The spare process has a folder below the folder that Spark has for the executor's files, and removes when the executor
exits:

    .sparkring-<key>/
        lock           locked while a spare process is starting
        socket         the spare process listens on it, and answers only tasks that know the token
        sparkring.zip  sparkring's code
        refused        for which setting no process can be forked, because an import has failed or has started threads

`key` and the token belong to the notebook's process. An executor has one spare process. It serves only tasks with the
setting with which it was started: the environment, limits, cores and installed packages.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import resource
import socket
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any

from sparkring.executor.archive import unpacked
from sparkring.executor.boot import start_detached
from sparkring.executor.forks import ForkedMember, fork
from sparkring.executor.orders import ExecutorSpareOrder, Ticket, changed, encode

_LOOK_EVERY_S = 0.005
_ANSWER_S = 5.0  # a fork takes milliseconds; a spare process that has not answered after this time is given up


def forked(
    order: ExecutorSpareOrder, archive: bytes, root: str, ticket: Ticket, first: Sequence[str]
) -> ForkedMember | None:
    """Return a member that has been forked for `ticket`; None if the task must start a new process.

    `root` is Spark's folder for the executor's files. The member has `first` at the beginning of its sys.path.
    """
    try:
        return _forked(order, archive, os.path.join(root, f".sparkring-{order.key}"), ticket, first)
    except (OSError, EOFError, ValueError):  # the spare process has just exited, or the folder cannot be used
        return None


def _forked(
    order: ExecutorSpareOrder, archive: bytes, folder: str, ticket: Ticket, first: Sequence[str]
) -> ForkedMember | None:
    if not order.modules:  # spare processes have been turned off
        if os.path.isdir(folder):
            _dialled(folder, order, "").close()
        return None
    # With GPUs, a spare process could not know which of them a rank will use. Where OMP_NUM_THREADS is not set, ranks
    # set it before they import anything, depending on their number.
    environment = _environment(order)
    if glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/kfd") or "OMP_NUM_THREADS" not in environment:
        return None
    order = changed(order, folder=folder, setting=_setting(order.modules, environment, first, archive))

    def ask() -> ForkedMember:
        with _dialled(folder, order, order.setting) as connection:
            connection.settimeout(_ANSWER_S)
            return fork(connection, encode(ticket))

    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        return None
    with contextlib.suppress(ConnectionError, FileNotFoundError, EOFError):  # there is none, or it has another setting
        return ask()
    deadline = time.monotonic() + order.import_s
    with _lock(folder, deadline) as lock:
        with contextlib.suppress(ConnectionError, FileNotFoundError, EOFError):  # another task may have started it
            return ask()
        with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, "refused")) as file:
            if file.read() == order.setting:
                return None
        start_detached(  # it releases the lock when it can fork members, or exits
            "sparkring.worker.member.executor_spare",
            # The parent of a task's process is Spark's daemon, which lives as long as the executor.
            changed(order, lock=lock.fileno(), watch=os.getppid()),
            environment,
            None,
            first=[unpacked(archive, folder), *first],
            passed=[lock.fileno()],
        )
    with _lock(folder, deadline):
        pass  # the spare process is ready, or has exited
    return ask()


def _environment(order: ExecutorSpareOrder) -> dict[str, str]:
    """Return the environment in which ranks import the modules; see rank.prepare()."""
    variables: dict[str, str | None] = dict(os.environ)
    for changes in order.environments:
        variables |= changes
    return {name: value for name, value in variables.items() if value is not None}


def _setting(modules: Sequence[str], environment: dict[str, str], first: Sequence[str], archive: bytes) -> str:
    """Return a digest of what the imports of a process may depend on."""
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    inherited = [limits, sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)]
    folders = [path for path in map(str, sys.path) if path.endswith(("site-packages", "dist-packages"))]
    installed = [(path, os.stat(path).st_mtime_ns) for path in folders if os.path.isdir(path)]
    code = hashlib.sha256(archive).hexdigest()
    setting = [code, sys.executable, modules, sorted(environment.items()), first, inherited, installed]
    return hashlib.sha256(json.dumps(setting).encode()).hexdigest()


def _lock(folder: str, deadline: float) -> Any:
    """Return the locked file of the lock. Raise TimeoutError if it is still locked at the deadline."""
    lock = open(os.path.join(folder, "lock"), "ab")
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.close()
                raise TimeoutError("a spare process is still importing") from None
            time.sleep(_LOOK_EVERY_S)


def _dialled(folder: str, order: ExecutorSpareOrder, setting: str) -> socket.socket:
    """Connect to the spare process and send a request. Raise an OSError or EOFError if there is no spare process."""
    from multiprocessing import AuthenticationError
    from multiprocessing.connection import Client

    request = json.dumps({"setting": setting, "task": os.getpid()})
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        # The folder's own path may be too long for a socket.
        with Client(f"/proc/self/fd/{opened}/socket", "AF_UNIX", authkey=bytes.fromhex(order.token)) as connection:
            connection.send_bytes(request.encode())
            return socket.socket(fileno=os.dup(connection.fileno()))
    except AuthenticationError as error:
        raise PermissionError(str(error)) from None
    finally:
        os.close(opened)
