"""Starts processes that run sparkring's code, on this machine and on executors.

Each process gets its order on stdin. Other processes could read it in argv or in an environment, and it may contain a
secret.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sparkring.executor.orders import encode

HERE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))  # the folder with the package sparkring
# A socket in a folder of a folder for temporary files can have a path of at most 104 characters on macOS.
SHORT = 53
# The program of each process; its argument is the module that carries out the order. Before `json` is imported, ''
# (the working folder) is removed from sys.path, because otherwise a json.py in that folder would be imported instead.
# A detached process says its id, and then writes everything to stderr.
_BOOT = """\
import sys
sys.path[:] = [path for path in sys.path if path]
import importlib, json, os
line = sys.stdin.buffer.readline()
start = json.loads(line)
if start["detached"]:
    pid = os.fork()
    if pid:
        os.write(1, str(pid).encode())
        os._exit(0)
    os.dup2(2, 1)
sys.path[:0] = start["first"]
sys.path += [path for path in start["last"] if path not in sys.path]
from sparkring.executor.orders import decode
importlib.import_module(sys.argv.pop()).main(decode(line))
"""


def command(python: str, module: str) -> list[str]:
    """Return the command of a process that reads an order from stdin, and calls main(order) of a module."""
    return [python, "-c", _BOOT, module]


def use_temporary_folder() -> None:
    """If Python finds no folder for temporary files that it can write to, use one of Spark's.

    On Kubernetes, the executors' file systems may be read-only, except for Spark's folders. The setting applies to the
    processes that this one starts, too.
    """
    with contextlib.suppress(FileNotFoundError):
        tempfile.gettempdir()
        return
    for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(","):  # Spark sets it for its Python workers everywhere
        if os.access(folder, os.W_OK | os.X_OK):
            while len(folder) > SHORT and os.access(above := os.path.dirname(folder), os.W_OK | os.X_OK):
                folder = above
            tempfile.tempdir = os.environ["TMPDIR"] = folder
            return


def start(
    module: str,
    order: Any,
    environment: Mapping[str, str],
    *,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    passed: Collection[int] = (),
    python: str = "",
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own. It inherits the descriptors `passed`, and its stdin stays open.

    It runs `python`, by default this process's Python.
    """
    process = subprocess.Popen(
        command(python or sys.executable, module),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        pass_fds=passed,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # the process has exited at once; its exit code will say so
        process.stdin.write(encode(order, first=first, last=last))
        process.stdin.flush()
    return process


def start_detached(
    module: str,
    order: Any,
    environment: Mapping[str, str],
    log: Any,
    *,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    passed: Collection[int] = (),
) -> int:
    """Start a process that stays when this process exits. Return its id; 0 if it could not be started.

    It stays in the process group of this process. It writes to the file `log`.
    """
    process = subprocess.Popen(
        command(sys.executable, module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        pass_fds=passed,
    )
    pid, _ = process.communicate(encode(order, first=first, last=last, detached=True))
    return int(pid or 0)
