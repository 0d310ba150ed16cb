"""Which versions a run ran with, as they are installed beside the notebook."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

import sparkring

# What is imported under the first name comes from one of these.
_PACKAGES = (
    ("horovod", "horovod"),
    ("tensorflow", "tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tf-nightly"),
    ("torch", "torch"),
    ("pyspark", "pyspark"),
    ("numpy", "numpy"),
    ("petastorm", "petastorm"),
    ("pyarrow", "pyarrow"),
)


@functools.cache  # looking takes some milliseconds, and a cell on a warm gang not many more
def versions() -> tuple[tuple[str, str], ...]:
    """Names and versions of Python, of sparkring and of the frameworks that are installed; none is imported."""
    found = [(name, next(filter(None, map(_version, packages)), "")) for name, *packages in _PACKAGES]
    ours = ("python", platform.python_version()), ("sparkring", sparkring.__version__)
    return (*ours, *((name, version) for name, version in found if version))


def _version(package: str) -> str:
    try:
        return metadata.version(package) or ""  # a broken installation has none
    except metadata.PackageNotFoundError:
        return ""
