"""Has a member forked from the spare process of the executor, which the first task that wants a member starts.

Executors need not have sparkring: the driver compiles this file's text and pickles its functions by value. So this file
uses only the standard library. The spare process has a folder below the folder that Spark has for the executor's files,
and removes when the executor exits:

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
import select
import socket
import stat
import subprocess
import sys
import time
from typing import Any

# The program of a spare process. The task starts a process that forks the spare process and exits at once, so the task
# need not wait for it. The order comes on stdin, because other processes could read the token in argv.
_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import json, os; "
    "order = json.loads(sys.stdin.buffer.readline()); os.fork() and os._exit(0); os.setsid(); "
    "sys.path[:0] = order['first']; from sparkring.worker.member.executor_spare import main; main(order)"
)
_LOOK_EVERY_S = 0.005
_ANSWER_S = 5.0  # a fork takes milliseconds; a spare process that has not answered after this time is given up


class ForkedMember:
    """A member that a spare process has forked, with the part of Popen's interface that a task needs.

    `pid` is the member's process id, and `stdin` is the writing end of its stdin. `ended` is a descriptor that becomes
    readable when the member has exited; `status` is a pipe on which the spare process reports the member's exit code.
    """

    def __init__(self, pid: int, stdin: int, ended: int, status: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", 0)
        self._ended, self._status = ended, status
        self._code: int | None = None

    def wait(self) -> int:
        """Return the exit code; 0 if the spare process was killed, and nobody knows the code."""
        if self._code is None:
            said = os.read(self._status, 16)
            if not said:
                select.select([self._ended], [], [])
            os.close(self._status)
            os.close(self._ended)
            self._code = int(said or b"0")
        return self._code


def forked(order: dict[str, Any], archive: bytes, root: str, ticket: dict[str, Any]) -> ForkedMember | None:
    """Return a member that has been forked for `ticket`; None if the task must start a new process.

    `order` is made by launchers/executor_spares.py, and `root` is Spark's folder for the executor's files.
    """
    try:
        return _forked(order, archive, os.path.join(os.path.abspath(root), f".sparkring-{order['key']}"), ticket)
    except (OSError, EOFError, ValueError):  # the spare process has just exited, or the folder cannot be used
        return None


def _forked(order: dict[str, Any], archive: bytes, folder: str, ticket: dict[str, Any]) -> ForkedMember | None:
    if not order["modules"]:  # spare processes have been turned off
        if os.path.isdir(folder):
            _dialled(folder, order, {"setting": ""}).close()
        return None
    # With GPUs, a spare process could not know which of them a rank will use. Where OMP_NUM_THREADS is not set, ranks
    # set it before they import anything, depending on their number.
    environment = _environment(order)
    if glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/kfd") or "OMP_NUM_THREADS" not in environment:
        return None
    first = ticket["first"]
    setting = _setting(order["modules"], environment, first, archive)
    wanted = {"setting": setting, "ticket": {**ticket, "first": []}, "task": os.getpid()}
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        return None
    with contextlib.suppress(ConnectionError, FileNotFoundError, EOFError):  # there is none, or it has another setting
        return _asked(_dialled(folder, order, wanted))
    deadline = time.monotonic() + order["import_s"]
    with _lock(folder, deadline) as lock:
        with contextlib.suppress(ConnectionError, FileNotFoundError, EOFError):  # another task may have started it
            return _asked(_dialled(folder, order, wanted))
        with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, "refused")) as file:
            if file.read() == setting:
                return None
        _start(order, archive, folder, environment, first, setting, lock.fileno())
    with _lock(folder, deadline):
        pass  # the spare process is ready, or has exited
    return _asked(_dialled(folder, order, wanted))


def _environment(order: dict[str, Any]) -> dict[str, str]:
    """Return the environment in which ranks import the modules; see rank.prepare()."""
    found: dict[str, str | None] = dict(os.environ)
    for changes in order["environments"]:
        found |= changes
    return {name: value for name, value in found.items() if value is not None}


def _setting(modules: list[str], environment: dict[str, str], first: list[str], archive: bytes) -> str:
    """Return a digest of what the imports of a process may depend on."""
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    inherited = [limits, sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)]
    folders = [path for path in map(str, sys.path) if path.endswith(("site-packages", "dist-packages"))]
    installed = [(path, os.stat(path).st_mtime_ns) for path in folders if os.path.isdir(path)]
    code = hashlib.sha256(archive).hexdigest()
    told = [code, sys.executable, modules, sorted(environment.items()), first, inherited, installed]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


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


def _start(
    order: dict[str, Any],
    archive: bytes,
    folder: str,
    environment: dict[str, str],
    first: list[str],
    setting: str,
    lock: int,
) -> None:
    """Start a spare process, which releases the lock when it can fork members or exits."""
    path = os.path.join(folder, "sparkring.zip")
    with open(path, "wb") as file:
        file.write(archive)
    # The parent of a task's process is Spark's daemon, which lives as long as the executor.
    told = {**order, "folder": folder, "lock": lock, "first": [path, *first], "setting": setting, "watch": os.getppid()}
    del told["environments"]
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        pass_fds=[lock],
    )
    process.communicate(json.dumps(told).encode() + b"\n")


def _dialled(folder: str, order: dict[str, Any], wanted: dict[str, Any]) -> socket.socket:
    """Connect to the spare process and send a request. Raise an OSError or EOFError if there is no spare process."""
    from multiprocessing import AuthenticationError
    from multiprocessing.connection import Client

    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        # The folder's own path may be too long for a socket.
        with Client(f"/proc/self/fd/{opened}/socket", "AF_UNIX", authkey=bytes.fromhex(order["token"])) as connection:
            connection.send_bytes(json.dumps(wanted).encode())
            return socket.socket(fileno=os.dup(connection.fileno()))
    except AuthenticationError as error:
        raise PermissionError(str(error)) from None
    finally:
        os.close(opened)


def _asked(connection: socket.socket) -> ForkedMember:
    """Send the descriptors that a member needs, and return the member. Raise an OSError if none is forked."""
    descriptors: list[int] = []
    with connection:
        connection.settimeout(_ANSWER_S)
        try:
            stdin, stdin_w = os.pipe()
            descriptors += [stdin, stdin_w]
            status, status_w = os.pipe()
            descriptors += [status, status_w, os.open(".", os.O_PATH | os.O_DIRECTORY)]
            socket.send_fds(connection, [b"f"], [stdin, status_w, descriptors[-1]])
            said, fds, _, _ = socket.recv_fds(connection, 16, 1, socket.MSG_CMSG_CLOEXEC)
            if not said:
                raise ConnectionResetError("the spare process has exited, or does not serve this task")
            for kept in (stdin_w, status):
                descriptors.remove(kept)
            return ForkedMember(int(said), stdin_w, fds[0], status)
        finally:
            for each in descriptors:
                os.close(each)
