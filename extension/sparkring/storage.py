"""Paths as users type them: on this machine, on DBFS, or any URL that fsspec knows.

    dbfs:/x  dbfs:///x  /dbfs/x  file:/dbfs/x      one and the same, through the mount at /dbfs
    s3://bucket/x  abfss://…  gs://…  memory://x   with fsspec's package for it
    dbfs://x/y                                     a mistake: it means a host called x

Where there is no mount, SPARKRING_DBFS_ROOT can name a folder that stands for dbfs:/.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.errors import PathError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

DBFS_MOUNT = "/dbfs"
DBFS_ROOT = "SPARKRING_DBFS_ROOT"
# What Hadoop calls the schemes that fsspec's packages call otherwise.
_HADOOP = {"s3": "s3a", "gcs": "gs"}


class Location(NamedTuple):
    """A file or folder: the file system, its path there (without a slash at its end), and what the user wrote."""

    fs: AbstractFileSystem
    path: str
    written: str

    @property
    def local(self) -> bool:
        """Is it reached through this machine's file system (a mount counts)?"""
        return "file" in _protocols(self.fs)

    def __truediv__(self, name: str) -> Location:
        return Location(self.fs, f"{self.path.rstrip('/')}/{name}", f"{self.written.rstrip('/')}/{name}")

    def for_spark(self) -> str:
        """The URL by which Spark knows it."""
        if self.local:
            root = dbfs_root()
            if "DATABRICKS_RUNTIME_VERSION" in os.environ and _inside(self.path, root):
                return "dbfs:" + (self.path[len(root) :] or "/")
            return f"file://{self.path}"
        url = str(self.fs.unstrip_protocol(self.path))
        scheme, _, rest = url.partition("://")
        return f"{_HADOOP.get(scheme, scheme)}://{rest}"


def locate(path: str | os.PathLike[str]) -> Location:
    """Where `path` is. PathError says what is wrong with it; whether anything is there is not looked at."""
    written = os.fspath(path)
    if not written.strip():
        raise PathError("the path is empty.")
    mistaken = re.match(r"dbfs://([^/].*)", written)
    if mistaken:
        raise PathError(f"{written}: after dbfs: comes one slash or three, and here the first folder would be taken "
                        f"for a host. Write dbfs:/{mistaken[1]}")  # fmt: skip
    here = re.sub(r"^file:(//(?=/))?", "", written)
    if here.startswith("//") and written.startswith("file:"):
        raise PathError(f"{written}: after file: comes one slash or three. Write file:/{here.lstrip('/')}")
    on_dbfs = re.match(r"dbfs:/*(.*)", here) or re.match(rf"{DBFS_MOUNT}(?:/+(.*))?$", here)
    if on_dbfs:
        here = os.path.join(dbfs_root(), on_dbfs[1] or "")
        if not os.path.isdir(dbfs_root()):
            raise PathError(
                f"{written}: there is no DBFS on this machine (no folder {dbfs_root()}). Outside Databricks, set "
                f"{DBFS_ROOT} to a folder that stands for dbfs:/, or name a path that is there."
            )
    if "://" in here or here.startswith("memory:"):
        return _remote(here, written)
    import fsspec

    return Location(fsspec.filesystem("file"), os.path.abspath(os.path.expanduser(here)), written)


def dbfs_root() -> str:
    """The folder that stands for dbfs:/ on this machine."""
    return os.environ.get(DBFS_ROOT, DBFS_MOUNT).rstrip("/")


def _remote(url: str, written: str) -> Location:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:  # fsspec names the package
        raise PathError(f"{written}: {error}. Install it where the ranks run, too.") from error
    except ValueError as error:
        raise PathError(f"{written}: {error}.") from error
    return Location(fs, str(path).rstrip("/") or "/", written)


def _protocols(fs: Any) -> tuple[str, ...]:
    found = fs.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
