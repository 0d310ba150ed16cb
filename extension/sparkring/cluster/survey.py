"""Asks every executor what it runs, what it can reach, and whether it can use a directory, in one Spark job."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.cluster.jobs import interruptibly
from sparkring.executor.handshake import prove
from sparkring.executor.tasks import task_for

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster


class Directory(NamedTuple):
    """A directory, and a file in it that the driver has written.

    If `local`, the `path` is in the file system of each machine; otherwise, it is a URL, which fsspec opens.
    """

    path: str
    local: bool
    file: str
    content: bytes


class Questions(NamedTuple):
    """What a task should find out.

    address: the host and the port at which the driver listens. A peer that knows `secret` gets the driver's time.
    packages: for each module, the names of the packages that may provide it.
    directory: the directory to write to, if any.
    """

    address: tuple[str, int] | None
    secret: bytes
    packages: Mapping[str, tuple[str, ...]]
    directory: Directory | None = None


class TaskReport(NamedTuple):
    """What one task has found out. `executor` is the id of the executor's process on `host`; 0 if unknown.

    packages: the versions of the installed packages, by module.
    java: the version of the executor's Java; '' if unknown.
    reached_s: how long a connection to the driver took; None if it failed, and `unreached` says why.
    clock_s: by how much the driver's clock is ahead of the executor's; None if unknown.
    directory: the words for what does not work in the directory; '' if all works, None if there is no directory.
    shared_bytes: the size of /dev/shm; None if there is none.
    """

    host: str
    executor: int
    python: str
    executable: str
    packages: Mapping[str, str]
    java: str
    reached_s: float | None = None
    unreached: str = ""
    clock_s: float | None = None
    directory: str | None = None
    shared_bytes: float | None = None


def survey(
    cluster: Cluster, tasks: int, questions: Questions, say: Callable[[str], None], limit_s: float
) -> list[TaskReport]:
    """Run a job of `tasks` tasks, and return their reports.

    Raise TimeoutError if the job takes longer than `limit_s`, KeyboardInterrupt if it is interrupted, and Spark's own
    error if it fails. In each of these cases, the job is cancelled.
    """

    def ask() -> list[dict[str, Any]]:
        return cluster.collect(tasks, task_for(answer, questions))

    return [TaskReport(**fields) for fields in interruptibly(cluster, "checking the executors", ask, say, limit_s)]


def answer(questions: Questions, rows: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield the fields of the TaskReport of a task. This function is sent to executors by value."""
    executor, java = _java()
    yield TaskReport(
        host=socket.gethostname(),
        executor=executor,
        python=platform.python_version(),
        executable=sys.executable,
        packages=_versions(questions.packages),
        java=java,
        directory=None if questions.directory is None else _use(questions.directory),
        shared_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,  # macOS has none
        **({} if questions.address is None else _reach(questions.address, questions.secret)),
    )._asdict()


def _versions(packages: Mapping[str, Sequence[str]]) -> dict[str, str]:
    versions = {}
    for module, names in packages.items():
        for name in names:
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
            if version:
                versions[module] = version
                break
        else:  # Spark's own pyspark is in a zip
            if (version := getattr(sys.modules.get(module), "__version__", "")) and isinstance(version, str):
                versions[module] = version
    return versions


def _java() -> tuple[int, str]:
    """Return the process id and the version of the Java process that has started this one."""
    pid = os.getppid()
    while pid > 1:
        try:
            program = os.readlink(f"/proc/{pid}/exe")
            if os.path.basename(program) == "java":
                with open(os.path.join(os.path.dirname(os.path.dirname(program)), "release")) as file:
                    version = re.search(r'(?m)^JAVA_VERSION="?([^"\n]*)', file.read())
                return pid, version[1] if version else ""
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:  # there is no /proc, the process belongs to another user, or Java has no such file
            return pid, ""
    return 0, ""


def _reach(address: tuple[str, int], secret: bytes) -> dict[str, Any]:
    began = time.monotonic()
    try:
        with socket.create_connection(address, 5.0) as connection:
            sent = time.time()
            prove(connection, secret)
            received = b""
            while part := connection.recv(64):
                received += part
            now = time.time()
        driver = float(received)
    except (OSError, ValueError) as error:
        why = "another program answered" if isinstance(error, ValueError) else error.strerror or f"it {error}"
        return {"unreached": why or type(error).__name__}
    return {"reached_s": time.monotonic() - began, "clock_s": driver - (sent + now) / 2}


def _use(directory: Directory) -> str:
    """Return the words for what does not work in the directory; '' if all works."""
    path, known, content = directory.path, directory.file, directory.content
    name = f".sparkring-doctor-{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"
    join = f"{path.rstrip('/')}/{{}}".format
    doing = "be opened"
    try:
        if directory.local:
            if not os.path.isdir(path):
                return "does not exist there, so it is not shared with the driver"
            opened: Any = open
            listed: Any = os.listdir
            remove: Any = os.remove
        else:
            import fsspec

            fs, root = fsspec.core.url_to_fs(path)
            join = f"{root.rstrip('/')}/{{}}".format
            opened, remove = fs.open, fs.rm_file
            fs.invalidate_cache()

            def listed(_: str) -> list[str]:
                return [str(entry).rstrip("/").rpartition("/")[2] for entry in fs.ls(root, detail=False)]

        doing = "be read"
        if known not in listed(path):
            return "does not show the driver's file, so it is not shared with the driver"
        with opened(join(known), "rb") as file:
            if file.read() != content:
                return "has another file in place of the driver's"
        doing = "be written"
        with opened(join(name), "wb") as file:
            file.write(content)
        doing = "be read"
        with opened(join(name), "rb") as file:
            if file.read() != content:
                return "returned other contents than were written"
        doing = "have files deleted"
        remove(join(name))
    except Exception as error:  # file systems raise errors of their own, and packages may be missing
        return f"cannot {doing}: {type(error).__name__}: {getattr(error, 'strerror', None) or error}"
    return ""
