"""Reads which TensorFlow and PyTorch are installed, and which CUDA they are built for. Neither is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# The names under which variants of the TensorFlow package are published.
TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tensorflow-rocm", "tensorflow-aarch64")


@dataclass(frozen=True)
class InstalledFramework:
    """A framework that is installed.

    `name` is also the name of Horovod's subpackage for it. `cuda` is the version of CUDA that the framework is built
    for, such as "13.0"; None if it is not built for CUDA.
    """

    name: str
    version: str
    cuda: str | None = None

    def __str__(self) -> str:
        return f"{TITLES[self.name]} {self.version}"


TITLES = {"tensorflow": "TensorFlow", "torch": "PyTorch"}


def installed_frameworks() -> dict[str, InstalledFramework]:
    """Return the frameworks that are installed, by name; TensorFlow comes first."""
    frameworks = {}
    for name, distributions in (("tensorflow", TENSORFLOW_NAMES), ("torch", ("torch",))):
        distribution = next(filter(installed_version, distributions), None)
        if distribution:
            version = installed_version(distribution)
            assert version is not None
            frameworks[name] = InstalledFramework(name, version, _CUDA_OF[name](distribution))
    return frameworks


def installed_version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None if none is."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def torchs_build_support() -> str:
    """Return the source of torch.utils.cpp_extension; '' if PyTorch has no such file."""
    return _source("torch", "torch/utils/cpp_extension.py")


def _cuda_of_torch(distribution: str) -> str | None:
    named = re.search(
        r"^cuda\b[^=\n]*=\s*['\"](\d+(?:\.\d+)?)", _source(distribution, "torch/version.py"), re.MULTILINE
    )
    return named and named[1]


def _cuda_of_tensorflow(distribution: str) -> str | None:
    info = _source(distribution, "tensorflow/python/platform/build_info.py")
    named = re.search(r"['\"]cuda_version['\"], ['\"](\d+(?:\.\d+)?)", info)
    return named[1] if named and re.search(r"['\"]is_cuda_build['\"], True", info) else None


_CUDA_OF = {"tensorflow": _cuda_of_tensorflow, "torch": _cuda_of_torch}


def _source(distribution: str, path: str) -> str:
    """Return the text of an installed file; '' if there is no such file."""
    file = Path(str(metadata.distribution(distribution).locate_file(path)))
    return file.read_text(encoding="utf-8") if file.is_file() else ""
