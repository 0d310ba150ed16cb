"""Resolves paths as users type them: on this machine, on DBFS, or any URL that fsspec knows.

    dbfs:/x  dbfs:///x  /dbfs/x  file:/dbfs/x      the same path, which is below the mount /dbfs
    s3://bucket/x  abfss://…  gs://…  memory://x   opened by fsspec, with the package that it needs for the scheme
    dbfs://x/y                                     an error, because x would be read as a host

If SPARKRING_DBFS_ROOT names a folder, dbfs:/ stands for this folder, even if there is a mount. If there is neither this
variable nor a mount, dbfs:/ stands for `sparkring/dbfs` in the user's data folder. A path that begins at dbfs:/ but
leads out of the folder for dbfs:/ is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sparkring.errors import PathError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

DBFS_MOUNT = "/dbfs"
DBFS_ROOT = "SPARKRING_DBFS_ROOT"
_MOUNTED = re.compile(rf"{DBFS_MOUNT}(?:/+(.*))?$", re.DOTALL)
# Hadoop's names for schemes that have other names in fsspec.
_HADOOP = {"s3": "s3a", "gcs": "gs"}


class Location(NamedTuple):
    """A file or folder.

    `path` is its path in the file system `fs`, without a slash at the end. `written` is the path as the user wrote it.
    """

    fs: AbstractFileSystem
    path: str
    written: str

    @property
    def local(self) -> bool:
        """Whether the file or folder is in this machine's file system, which includes mounts."""
        return "file" in protocols(self.fs)

    def __truediv__(self, name: str) -> Location:
        return Location(self.fs, f"{self.path.rstrip('/')}/{name}", f"{self.written.rstrip('/')}/{name}")

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield fsspec's information on each entry of this folder. Raises FileNotFoundError if there is no folder."""
        if not self.local:
            yield from self.fs.ls(self.path, detail=True)
            return
        # Ask about each entry separately: fsspec before 2024.12 listed nothing if an entry was removed meanwhile.
        for name in self.fs.ls(self.path, detail=False):
            with contextlib.suppress(FileNotFoundError):
                yield self.fs.info(name)

    @property
    def url(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def anchored(self) -> Location:
        """Return this location, written in such a way that it does not depend on the working directory."""
        written = self.written.removeprefix("file:")
        if not self.local or written.startswith(("/", "dbfs:")) or "://" in written:
            return self
        return self._replace(written=self.path)

    def for_spark(self) -> str:
        if self.local:
            root = dbfs_root()
            if "DATABRICKS_RUNTIME_VERSION" in os.environ and _inside(self.path, root):
                return "dbfs:" + (self.path[len(root) :] or "/")
            return f"file://{self.path}"
        scheme, _, rest = self.url.partition("://")
        return f"{_HADOOP.get(scheme, scheme)}://{rest}"


def locate(path: str | os.PathLike[str]) -> Location:
    """Return the Location of `path`, which need not exist. Raises PathError if the path cannot be used."""
    written = os.fspath(path)
    if not written.strip():
        raise PathError("the path is empty.")
    if "\0" in written:
        raise PathError(f"{written!r}: a path cannot contain the character NUL.")
    if mistaken := re.match(r"dbfs://([^/].*)", written):
        raise PathError(
            f"{written}: dbfs: must be followed by one slash or three; here, the first folder would be read as a host. "
            f"Write dbfs:/{mistaken[1]}"
        )
    here = re.sub(r"^file:(//(?=/))?", "", written)
    if here.startswith("//") and written.startswith("file:"):
        raise PathError(f"{written}: file: must be followed by one slash or three. Write file:/{here.lstrip('/')}")
    on_dbfs = re.match(r"dbfs:/*(.*)", here, re.DOTALL) or _MOUNTED.match(here)
    if not on_dbfs and ("://" in here or here.startswith("memory:")):
        return _remote(here, written)
    import fsspec

    if not on_dbfs:
        here = os.path.abspath(os.path.expanduser(here))
        on_dbfs = _MOUNTED.match(here)
    return Location(fsspec.filesystem("file"), _on_dbfs(on_dbfs[1] or "", written) if on_dbfs else here, written)


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the path in this machine's file system of `path`, for functions that do not know dbfs:/.

        torch.save(model.state_dict(), sparkring.local_path("dbfs:/ml/x/1.pt"))

    path: a path as users type it: dbfs:/ml/x, /dbfs/ml/x, file:/x or any other path. It need not exist, but the folder
    that it is in is made. On Databricks, dbfs:/ml/x is /dbfs/ml/x. Elsewhere, it is in the folder that stands for
    dbfs:/, which is the same in the notebook and on its ranks.

    Raises PathError if the path cannot be used, or if it is a URL of another file system.
    """
    location = locate(path)
    if not location.local:
        raise PathError(f"{location.written} is not on this machine's file system: open it with fsspec.open().")
    try:
        os.makedirs(os.path.dirname(location.path), exist_ok=True)
    except OSError as error:
        raise PathError(f"{location.written}: its folder cannot be made ({error.strerror or error}).") from error
    return location.path


def for_this_user_only(path: str, flags: int) -> int:
    """Open a file that others may neither read nor write. This is an `opener` for open()."""
    return os.open(path, flags, 0o600)


def dbfs_root() -> str:
    """Return the folder that dbfs:/ stands for on this machine."""
    named = os.environ.get(DBFS_ROOT)
    if named:
        return os.path.abspath(os.path.expanduser(named))
    if os.path.isdir(DBFS_MOUNT):
        return DBFS_MOUNT
    return str(user_folder("data") / "dbfs")


def user_folder(kind: Literal["data", "cache"]) -> Path:
    """Return the user's folder for sparkring's data or caches. Raise PathError if this user has no home folder."""
    import platformdirs  # not at the top: executors import this module too, and may lack platformdirs

    choose = platformdirs.user_data_dir if kind == "data" else platformdirs.user_cache_dir
    try:
        path = Path(choose("sparkring", appauthor=False))
    except RuntimeError:
        path = Path("~")  # which older versions of platformdirs leave in the path
    if not path.is_absolute():
        raise PathError(
            "HOME is not set, and this user has no entry in passwd, as in some containers: set HOME to a writable "
            "folder before the kernel starts."
        )
    return path


def root_for_ranks() -> dict[str, str]:
    """Return the environment variables that make dbfs:/ stand for the same folder on ranks as in this process."""
    try:
        root = dbfs_root()
    except PathError:  # there is no folder for dbfs:/, and perhaps no rank needs one
        return {}
    return {} if root == DBFS_MOUNT else {DBFS_ROOT: root}


def _on_dbfs(rest: str, written: str) -> str:
    """Return the path of `rest` in the folder for dbfs:/.

    Raises PathError if the path leads out of the folder, or if the folder cannot be made.
    """
    for part in rest.split("/"):
        if _decoded(part) in ("..", "."):
            raise PathError(f"{written}: write the path without `{part}`, which DBFS does not resolve.")
    root = dbfs_root()
    if root != DBFS_MOUNT:
        try:
            os.makedirs(root, exist_ok=True)
        except OSError as error:
            raise PathError(
                f"{written}: {root}, the folder for dbfs:/ here, cannot be created ({error.strerror or error}). Set "
                f"{DBFS_ROOT} to another folder."
            ) from error
    path = os.path.normpath(os.path.join(root, rest.lstrip("/")))
    real, real_root = os.path.realpath(path), os.path.realpath(root)
    if not _inside(path, root) or not _inside(real, real_root):
        raise PathError(f"{written}: this path leads out of {root}, the folder for dbfs:/ here: it leads to {real}.")
    return path


def _decoded(part: str) -> str:
    """Return a part of a path without percent-encoding. Code that treats the path as a URL reads `%2e%2e` as `..`."""
    from urllib.parse import unquote

    while (again := unquote(part)) != part:
        part = again
    return part.strip()


def _remote(url: str, written: str) -> Location:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:  # its message names the missing package
        raise PathError(f"{written}: {error}. Install it where the ranks run, too.") from error
    except ValueError as error:
        # fsspec learns the scheme from adlfs itself.
        advice = " Install adlfs, also where the ranks run." if url.startswith("abfss:") else ""
        raise PathError(f"{written}: {error}.{advice}") from error
    return Location(fs, str(path).rstrip("/") or "/", written)


def protocols(fs: Any) -> tuple[str, ...]:
    """Return the names by which fsspec knows a file system, such as 'file' or 's3'."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")
