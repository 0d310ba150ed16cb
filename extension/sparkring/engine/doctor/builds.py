"""Finds what the installed frameworks were built for, from their files: nothing is imported."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from sparkring.capture.versions import version_of


class Build(NamedTuple):
    """An installed framework, and the version of CUDA that it was built for; '' if it was built without CUDA."""

    package: str
    version: str
    cuda: str


class HorovodBuild(NamedTuple):
    """An installed Horovod.

    `built_for` holds the version of each framework that it was built for. `parts` are the communication libraries that
    every part of it was built with: of "Gloo", "MPI" and "NCCL". `cuda` is the version of the CUDA library that it
    loads; '' if it loads none. `without_nccl` are the frameworks whose part was built without NCCL.
    """

    version: str
    built_for: dict[str, str]
    parts: tuple[str, ...]
    cuda: str
    without_nccl: tuple[str, ...] = ()


def builds() -> list[Build]:
    """Return the installed frameworks that can use GPUs."""
    candidates = [
        ("torch", _text("torch", "version.py"), r"(?m)^cuda\b.*?=\s*['\"]([\d.]+)"),
        ("tensorflow", _text("tensorflow", "python/platform/build_info.py"), r"'cuda_version',\s*'([\d.]+)'"),
    ]
    installed = [
        Build(package, version, "" if (cuda := re.search(pattern, text)) is None else cuda[1])
        for package, text, pattern in candidates
        if (version := version_of(package))
    ]
    if version := version_of("jax"):
        installed.append(Build("jax", version, _cuda_of_jax()))
    return installed


def _cuda_of_jax() -> str:
    """Return the major version of CUDA that JAX's installed plugin was built for; '' without a plugin."""
    for major in ("13", "12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(f"jax-cuda{major}-plugin")
            return major
    return ""


# Horovod's library contains the names of these classes only if it was built with the communication library.
_CLASSES = {
    "Gloo": b"N7horovod6common14GlooControllerE",
    "MPI": b"N7horovod6common13MPIControllerE",
    "NCCL": b"N7horovod6common13NCCLAllreduceE",
}
_LIBRARIES = {"tensorflow": "tensorflow/mpi_lib*.so", "torch": "torch/mpi_lib*.so"}


def horovod() -> HorovodBuild | None:
    """Return how the installed Horovod was built; None if Horovod is not installed."""
    version, folder = version_of("horovod"), _folder("horovod")
    if not version or folder is None:
        return None
    try:
        built_for = json.loads(_text("horovod", "metadata.json"))
    except ValueError:
        built_for = {}
    names = {"tensorflow": "tensorflow", "pytorch": "torch"}
    inside = {name: _inside(path) for name, pattern in _LIBRARIES.items() for path in folder.glob(pattern)}
    return HorovodBuild(
        version,
        {names[name]: str(built_for[name]) for name in names if name in built_for},
        tuple(name for name in _CLASSES if inside and all(name in parts for parts, _ in inside.values())),
        max((cuda for _, cuda in inside.values()), default=""),
        tuple(name for name, (parts, _) in inside.items() if "NCCL" not in parts),
    )


def _inside(library: Path) -> tuple[set[str], str]:
    """Return the communication libraries that a part of Horovod has, and the version of CUDA that it loads."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        needed = re.search(rb"libcudart\.so\.([\d.]*\d)", content)
        parts = {name for name, mark in _CLASSES.items() if content.find(mark) >= 0}
        return parts, "" if needed is None else needed[1].decode()


def _folder(package: str) -> Path | None:
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            return Path(folder)
    return None


def _text(package: str, file: str) -> str:
    """Return the text of a file of an installed package; '' if there is no such file."""
    folder = _folder(package)
    with contextlib.suppress(OSError):
        return "" if folder is None else (folder / file).read_text(encoding="utf-8")
    return ""
