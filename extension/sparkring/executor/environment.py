"""Unpacks the notebook's environment on an executor's machine, where all members of all executors share it.

The folder `sparkring-environments-<user>` in the folder for temporary files has

    <lock>/           an environment for each lock, which its archive is named after; it is renamed when it is complete
    <lock>.lock       locked by those who use the environment, and by the one who unpacks or removes it
    <lock>.partial/   an environment that is being unpacked, or whose process was killed
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import sys
import sysconfig
import tarfile
import tempfile
from typing import Any, NamedTuple

_ATTEMPTS = 10
_KEPT = 3  # this many environments that are not in use are kept: those that were used last


class EnvironmentOrder(NamedTuple):
    """The environment whose Python a member runs.

    `archive` is an Artifact: a compressed tar archive of the files of site-packages. `platform` is what these files are
    for. `size_bytes` is how much the files need.
    """

    archive: Any
    lock: str
    platform: str
    size_bytes: int


def unpacked_environment(order: EnvironmentOrder) -> tuple[str, int]:
    """Return the path of an environment's Python, and an open file, which keeps the environment until it is closed.

    Raise RuntimeError if the environment cannot be used on this machine.
    """
    here = sysconfig.get_platform()
    if here != order.platform:
        raise RuntimeError(
            f"sparkring: the notebook's environment is for {order.platform}, but the executor on "
            f"{socket.gethostname()} is {here}: leave --env-pack out, and install the packages there."
        )
    root = _root()
    folder = os.path.join(root, order.lock)
    python = os.path.join(folder, "bin", "python")
    for _ in range(_ATTEMPTS):
        lock = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.path.exists(python) and _is_current(lock, folder):
            os.utime(folder)
            return python, lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            # Another process may have unpacked it, or may have removed the lock.
            if _is_current(lock, folder) and not os.path.exists(python):
                _unpack(order, folder)
        finally:
            os.close(lock)
        _remove_old(root, order.lock)
    raise RuntimeError(f"sparkring: {python} on {socket.gethostname()} does not exist, or is removed again and again.")


def _unpack(order: EnvironmentOrder, folder: str) -> None:
    partial = f"{folder}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # it has no Python any more
    free_bytes = shutil.disk_usage(os.path.dirname(folder)).free
    host, root = socket.gethostname(), os.path.dirname(folder)
    if free_bytes < order.size_bytes:
        raise RuntimeError(
            f"sparkring: the notebook's environment needs {order.size_bytes / 1e9:.1f} GB in {root} on {host}, where "
            f"{free_bytes / 1e9:.1f} GB are free: set spark.executorEnv.TMPDIR to another folder, or remove files."
        )
    base = getattr(sys, "_base_executable", "") or sys.executable
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    packages = os.path.join(partial, "lib", f"python{version}", "site-packages")
    try:
        os.makedirs(packages)
        os.mkdir(os.path.join(partial, "bin"))
        # As the module venv does, which some systems lack.
        for name in ("python", "python3", f"python{version}"):
            os.symlink(base, os.path.join(partial, "bin", name))
        with open(os.path.join(partial, "pyvenv.cfg"), "w") as file:
            file.write(f"home = {os.path.dirname(base)}\ninclude-system-site-packages = false\nversion = {version}\n")
        with tarfile.open(order.archive.path) as archive:
            # The archive comes from the driver, whose code runs here anyway.
            keywords: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(packages, **keywords)
        os.rename(partial, folder)
    except (OSError, tarfile.TarError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RuntimeError(
            f"sparkring: the notebook's environment cannot be unpacked to {root} on {host}: {error}."
        ) from error


def _remove_old(root: str, newest: str) -> None:
    """Remove the environments that nobody uses, except for the newest ones, and what killed processes have left."""
    names = [entry.name for entry in os.scandir(root) if entry.is_dir()]
    whole = [name for name in names if "." not in name]
    whole.sort(key=lambda name: (name == newest, os.stat(os.path.join(root, name)).st_mtime), reverse=True)
    for name in [*whole[_KEPT:], *(name.partition(".")[0] for name in names if "." in name)]:
        with contextlib.suppress(OSError):
            folder = os.path.join(root, name)
            lock = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if name in whole[_KEPT:]:
                    shutil.rmtree(folder)
                shutil.rmtree(f"{folder}.partial", ignore_errors=True)
                if not os.path.exists(folder):
                    os.unlink(f"{folder}.lock")
            finally:
                os.close(lock)


def _is_current(lock: int, folder: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(lock), os.stat(f"{folder}.lock"))
    return False


def _root() -> str:
    """Return the folder of the environments, which only this user can enter."""
    root = os.path.join(tempfile.gettempdir(), f"sparkring-environments-{os.geteuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(root, 0o700)
        status = os.lstat(root)
    except OSError as error:
        raise RuntimeError(
            f"sparkring: the notebook's environment cannot be unpacked on {socket.gethostname()}: {error}. Set "
            "spark.executorEnv.TMPDIR to a folder in which the executors can write."
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise RuntimeError(f"sparkring: {root} belongs to another user, or others can enter it: remove the folder.")
    return root
