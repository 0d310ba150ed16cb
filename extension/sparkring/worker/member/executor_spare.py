"""The spare process of an executor: imports frameworks, and then forks members for the tasks that ask for them.

    task ──┐ ticket, descriptors             ┌─▶ member ─▶ rank
    task ──┼──────────▶ socket ── fork ──────┼─▶ member ─▶ rank
                                             └─▶ …

executor/spares.py starts this process, and asks it for members. The process exits at once if the executor has
exited, and after its members if a task has another setting, if it has not been used for a while, or if memory runs
short. If it is killed, its members go on: they watch the processes of their tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple, NoReturn

from sparkring.executor.orders import ExecutorSpareOrder, decode
from sparkring.worker.member import member, process, spare

ANSWER_S = 2.0  # a task that does not send its request within this time gets no member
REFUSED = "refused"  # the name of the file that says for which setting no process can be forked


class _Asked(NamedTuple):
    """What a forked process needs to become a member. The member exits if `task`, the task's process, exits."""

    start: spare.Start
    task: int


def main(order: ExecutorSpareOrder) -> NoReturn:
    """Run a spare process until it exits. In each process that it forks, run a member.

    The order's `lock` stays locked until the process can fork members or has exited.
    """
    try:
        os.setsid()
        signal.alarm(int(order.import_s))  # ends this process if an import hangs
        executor = os.pidfd_open(order.watch)
        folder = os.open(order.folder, os.O_PATH | os.O_CLOEXEC)
        path = f"/proc/self/fd/{folder}/socket"  # the folder's own path may be too long for a socket
        if process.available_bytes() < order.start_bytes:
            os._exit(1)
        try:
            may_fork = spare.prepare(order.modules, in_background=False)
        except Exception:  # a module cannot be imported; the ranks will say so
            may_fork = False
        if not may_fork:
            with open(os.path.join(order.folder, REFUSED), "w") as file:
                file.write(order.setting)
            os._exit(1)
        signal.alarm(0)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # left by a process that was killed
        listener.bind(path)
        listener.listen(128)
        os.close(order.lock)
        asked = _serve(listener, path, executor, order)
        os.close(folder)
        os.close(executor)
    except BaseException:  # the executor has exited, or no process can be forked
        os._exit(1)
    spare.become_member(asked.start)
    member.main(asked.start.ticket, asked.task)
    raise AssertionError("main() of a member exits the process")


def _serve(listener: socket.socket, path: str, executor: int, order: ExecutorSpareOrder) -> _Asked:
    """Fork a process for each task that asks for a member. Return only in the forked processes."""
    children: dict[int, spare.Forked] = {}  # the keys are pidfds, which become readable when the process has exited
    used, serving = time.monotonic(), True
    while serving or children:
        events = select.poll()
        for fd in [executor, *children, *([listener.fileno()] if serving else [])]:
            events.register(fd, select.POLLIN)
        for fd, _ in events.poll(spare.TICK_S * 1000):
            if fd == executor:
                os._exit(0)
            used = time.monotonic()
            if fd in children:
                spare.report_end(fd, children.pop(fd))
                continue
            with contextlib.suppress(OSError, EOFError, ValueError, AuthenticationError):
                accepted, _ = listener.accept()
                with accepted:
                    task = _task(accepted, order)
                    if task is None:  # the task may start another spare process as soon as `accepted` is closed
                        serving = False
                        _stop_listening(listener, path)
                        continue
                    asked = _fork(accepted, children, task)
                if asked is not None:
                    listener.close()
                    return asked
        unused_s = time.monotonic() - used
        is_short = not children and process.available_bytes() < order.least_bytes
        if serving and not children and (unused_s > order.idle_s or is_short):
            serving = False
            _stop_listening(listener, path)
    os._exit(0)


def _stop_listening(listener: socket.socket, path: str) -> None:
    with contextlib.suppress(OSError):  # Spark may have removed the folder
        os.unlink(path)
    listener.close()


def _task(accepted: socket.socket, order: ExecutorSpareOrder) -> int | None:
    """Return the process id of a task that asks for a member.

    Return None if the task has another setting, so that this process is no longer needed.
    """
    seconds = int(ANSWER_S).to_bytes(8, "little") + bytes(8)  # a struct timeval
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        accepted.setsockopt(socket.SOL_SOCKET, option, seconds)
    connection: Any = Connection(os.dup(accepted.fileno()))
    with connection:
        token = bytes.fromhex(order.token)
        deliver_challenge(connection, token)
        answer_challenge(connection, token)
        request = json.loads(connection.recv_bytes())
    return int(request["task"]) if request["setting"] == order.setting else None


def _fork(accepted: socket.socket, children: dict[int, spare.Forked], task: int) -> _Asked | None:
    """Fork a process, and send the task its id and a pidfd. In the forked process, return what it needs."""
    line, fds, _, _ = socket.recv_fds(accepted, 1 << 16, 3, socket.MSG_CMSG_CLOEXEC)
    stdin, status, folder = fds
    pid = os.fork()
    if not pid:
        try:
            for other, forked in children.items():
                os.close(other)
                os.close(forked.status)
            os.close(status)
        except OSError:  # this process must not go on as a second spare process
            os._exit(1)
        return _Asked(spare.Start(decode(line), stdin, folder), task)
    ended = os.pidfd_open(pid)
    children[ended] = spare.Forked(pid, status)
    os.close(stdin)
    os.close(folder)
    socket.send_fds(accepted, [str(pid).encode()], [ended])
    return None
