"""The parts of pkg_resources that TensorBoard uses. setuptools has lacked this module since version 82."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace

from packaging.version import Version
from packaging.version import parse as parse_version

__all__ = ["Version", "iter_entry_points", "parse_version"]


def iter_entry_points(group: str, name: str | None = None) -> Iterator[SimpleNamespace]:
    """Yield the entry points of a group, or only those called `name`, with the attributes that TensorBoard uses."""
    for entry_point in entry_points(group=group):
        if name in (None, entry_point.name):
            yield SimpleNamespace(name=entry_point.name, load=entry_point.load, resolve=entry_point.load)
