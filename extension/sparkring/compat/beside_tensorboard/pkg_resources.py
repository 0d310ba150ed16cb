"""Has the two functions of pkg_resources that TensorBoard calls, because setuptools 82 and later lack that module."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from packaging.version import Version
from packaging.version import parse as parse_version

__all__ = ["Version", "iter_entry_points", "parse_version"]


class _Resolving:
    """An entry point with the attributes that TensorBoard uses: `name`, `load()` and `resolve()`."""

    def __init__(self, found: EntryPoint) -> None:
        self.resolve = self.load = found.load
        self.name = found.name


def iter_entry_points(group: str, name: str | None = None) -> Iterator[_Resolving]:
    """The entry points of a group; if `name` is given, only those of that name."""
    return (_Resolving(found) for found in entry_points(group=group) if name in (None, found.name))
