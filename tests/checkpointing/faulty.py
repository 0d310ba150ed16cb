"""Disks whose power is cut, and mounts that refuse operations or lag, simulated below sparkring's own code.

For all files below one folder, Python's functions that open, change and list files are replaced. So the tests run
sparkring's real code, down to the system calls.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

CUT = "cut"  # the power is off: all later operations fail too
LOSSY = "lossy"  # the power is off, and data that was not synced may be lost
ONCE = "once"  # only this operation fails


class PowerCut(OSError):
    """Raised by an operation that was not carried out, or only in part."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the power is cut")


class _Below:
    """Replaces Python's functions on files: for paths below `root`, they call this object's methods."""

    _NAMES = (
        "open",
        "fsync",
        "fdatasync",
        "mkdir",
        "unlink",
        "remove",
        "rmdir",
        "rename",
        "replace",
        "link",
        "scandir",
        "listdir",
    )

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self._lock = threading.RLock()
        self._os = {name: getattr(os, name) for name in self._NAMES}
        self._open = builtins.open

    def __enter__(self) -> Any:
        builtins.open = self._opened  # type: ignore[assignment]
        for name in self._NAMES:
            setattr(os, name, self._led(name))
        return self

    def __exit__(self, *_: object) -> None:
        builtins.open = self._open
        for name, function in self._os.items():
            setattr(os, name, function)

    def _led(self, name: str) -> Any:
        real = self._os[name]
        mine = getattr(self, f"_{name}" if name != "open" else "_open_descriptor")

        def call(path: Any = ".", *rest: Any, **named: Any) -> Any:
            below = self._below(path, named.get("dir_fd"))
            return real(path, *rest, **named) if below is None else mine(below, path, *rest, **named)

        return call

    def _opened(self, path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        below = None if isinstance(path, int) else self._below(path)
        if below is None:
            return self._open(path, mode, *rest, **named)
        return self._open_file(below, path, mode)

    def _below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return the path relative to `root`; None if it is not below `root`."""
        if isinstance(path, int):
            full = os.readlink(f"/proc/self/fd/{path}")
        else:
            try:
                full = os.fspath(path)
            except TypeError:
                return None
            full = os.fsdecode(full)
            if dir_fd is not None:
                full = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), full)
            full = os.path.abspath(full)
        if full == self.root:
            return ""
        return full[len(self.root) + 1 :] if full.startswith(f"{self.root}/") else None

    def _remove(self, below: str, path: Any, **named: Any) -> None:
        self._unlink(below, path, **named)

    def _fdatasync(self, below: str, descriptor: Any) -> None:
        self._fsync(below, descriptor)

    def _replace(self, below: str, *rest: Any, **named: Any) -> None:
        self._rename(below, *rest, **named)

    def _link(self, below: str, *rest: Any, **named: Any) -> None:
        self._rename(below, *rest, **named)

    def _rename(self, below: str, *rest: Any, **named: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "sparkring must not rename files", below)

    def _scandir(self, below: str, path: Any) -> Any:
        return self._os["scandir"](path)

    def _listdir(self, below: str, path: Any) -> list[str]:
        with self._scandir(below, path) as found:
            return [entry.name for entry in found]

    def _open_descriptor(self, below: str, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EOPNOTSUPP, "sparkring must write files with open()", below)
        descriptor: int = self._os["open"](path, flags, *rest, **named)
        return descriptor


# ── A disk ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Disk(_Below):
    """The disk below `root`, whose operation number `at` (from 0) fails as `how` says.

    Opening, writing, closing, syncing, making and removing count as operations. At random, the failing operation is
    carried out completely, in part, or not at all. `done` lists the operations up to the failing one (with ONCE, all of
    them).
    """

    def __init__(self, root: Path, at: int | None, how: str, seed: int = 0) -> None:
        super().__init__(root)
        self.at = at
        self.how = how
        self.failed = False
        self.done: list[str] = []
        self.random = random.Random(f"{seed} {at}")
        # The bytes of files and the names in folders that are certainly on the disk.
        self._bytes: dict[str, bytes] = {}
        self._names: set[str] = set()
        self._removed: dict[str, bytes | None] = {}  # removed, but perhaps still on the disk; None for a folder

    def turn(self, what: str) -> bool:
        """Count an operation, and return whether it is the one that fails. After a power cut, raise PowerCut."""
        with self._lock:
            if self.failed and self.how != ONCE:
                raise PowerCut
            self.failed = self.failed or len(self.done) == self.at
            self.done.append(what)
            return self.failed and len(self.done) == (self.at or 0) + 1

    def after(self, folder: Path) -> Path:
        """Write to `folder` the files that are found when the power is back, and return `folder`."""
        rng = self.random
        live = {str(path.relative_to(self.root)): path for path in Path(self.root).rglob("*")}
        kept = {"."}
        for name in sorted({*live, *self._removed}):
            if os.path.dirname(name) not in kept | {""}:
                continue
            path = live.get(name)
            if self.how == LOSSY and (path is None or name not in self._names) and rng.random() < 0.5:
                continue
            if path is None and self.how != LOSSY:
                continue
            kept.add(name)
            if path.is_dir() if path else self._removed[name] is None:
                (folder / name).mkdir(parents=True)
                continue
            found = path.read_bytes() if path else self._removed[name]
            assert found is not None
            (folder / name).write_bytes(self._left_of(found, self._bytes.get(name, b"")))
        return folder

    def _left_of(self, live: bytes, synced: bytes) -> bytes:
        """Return what is left of a file if only `synced` is surely on the disk. The rest may be cut off or zeroed."""
        if self.how != LOSSY or live == synced:
            return live
        there = self.random.randint(len(synced) if live.startswith(synced) else 0, len(live))
        return live[:there] + (bytes(len(live) - there) if self.random.random() < 0.3 else b"")

    # ── operations ────────────────────────────────────────────────────────────

    def _half(self, what: str, do: Any) -> Any:
        """Carry out an operation. If the power fails, it is carried out completely or not at all."""
        if not self.turn(what):
            return do()
        if self.random.random() < 0.5:
            do()
        raise PowerCut

    def _open_file(self, below: str, path: Any, mode: str) -> Any:
        if "w" not in mode:
            if self.turn(f"open {below} to read"):
                raise PowerCut
            return self._open(path, mode)
        return io.BufferedWriter(_Written(self, below, path))

    def _fsync(self, below: str, descriptor: int) -> None:
        self._half(f"sync {below}", lambda: self._synced(below))

    def _synced(self, below: str) -> None:
        full = os.path.join(self.root, below)
        if os.path.isdir(full):
            there = {os.path.normpath(os.path.join(below, name)) for name in os.listdir(full)}
            self._names = {name for name in self._names if os.path.dirname(name) != below} | there
            self._removed = {name: held for name, held in self._removed.items() if os.path.dirname(name) != below}
        else:
            with self._open(full, "rb") as file:
                self._bytes[below] = file.read()

    def _mkdir(self, below: str, path: Any, *rest: Any, **named: Any) -> None:
        self._half(f"mkdir {below}", lambda: self._os["mkdir"](path, *rest, **named))

    def _unlink(self, below: str, path: Any, **named: Any) -> None:
        with self._open(os.path.join(self.root, below), "rb") as file:
            held = self._left_of(file.read(), self._bytes.get(below, b""))

        def remove() -> None:
            self._os["unlink"](path, **named)
            self._removed[below] = held
            self._bytes[below] = held

        self._half(f"remove {below}", remove)

    def _rmdir(self, below: str, path: Any, **named: Any) -> None:
        def remove() -> None:
            self._os["rmdir"](path, **named)
            self._removed[below] = None

        self._half(f"rmdir {below}", remove)


class _Written(io.FileIO):
    """A file on a disk that fails."""

    def __init__(self, disk: Disk, below: str, path: Any) -> None:
        self._disk, self._below = disk, below
        if disk.turn(f"open {below}"):
            if disk.random.random() < 0.5:
                super().__init__(path, "wb")
                super().close()
            raise PowerCut
        super().__init__(path, "wb")

    def write(self, data: Any) -> int:
        data = bytes(data)
        if self._disk.turn(f"write {self._below}"):
            super().write(data[: len(data) // 2])
            raise PowerCut
        return super().write(data)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._disk.turn(f"close {self._below}"):
            raise PowerCut


# ── A mount ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Mount(_Below):
    """An object store that looks like a folder, as DBFS does at /dbfs.

    A file is written once, from its beginning, up to `limit_bytes`, and exists when it is closed. Nothing can be
    renamed or linked. Listings lag `lag` changes behind, but access by name does not. `syncs` says whether fsync
    may be called.
    """

    def __init__(self, root: Path, lag: int = 0, limit_bytes: int = 2**31, syncs: bool = True) -> None:
        super().__init__(root)
        self.lag = lag
        self.limit_bytes = limit_bytes
        self.syncs = syncs
        self.changes: list[tuple[str, bool, bool]] = []  # name, whether it was added, whether it is a folder
        self.refused: list[str] = []
        self._uploads = tempfile.mkdtemp()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        shutil.rmtree(self._uploads)

    def there(self) -> list[str]:
        """Return the files that really exist, even if listings are stale."""
        found, folders = [], [""]
        while folders:
            below = folders.pop()
            with self._os["scandir"](os.path.join(self.root, below)) as entries:
                for entry in entries:
                    (folders if entry.is_dir() else found).append(os.path.join(below, entry.name))
        return sorted(found)

    def settle(self) -> None:
        """Bring listings up to date, as if time had passed."""
        self.changes.clear()

    def _below(self, path: Any, dir_fd: int | None = None) -> str | None:
        if isinstance(path, int) and os.readlink(f"/proc/self/fd/{path}").startswith(self._uploads):
            return "a file that is being uploaded"
        return super()._below(path, dir_fd)

    def refuse(self, what: str, below: str) -> OSError:
        self.refused.append(what)
        return OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), below)

    def _open_file(self, below: str, path: Any, mode: str) -> Any:
        if mode == "rb":
            return self._open(path, mode)
        if mode != "wb":
            raise self.refuse(f"open to {mode}", below)
        if not os.path.isdir(os.path.dirname(os.path.join(self.root, below))):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), below)
        return io.BufferedWriter(_Uploaded(self, below, os.path.join(self._uploads, str(len(self.changes)))))

    def appears(self, upload: str, below: str) -> None:
        with self._lock:
            there = os.path.exists(os.path.join(self.root, below))
            self._os["replace"](upload, os.path.join(self.root, below))
            if not there:
                self.changes.append((below, True, False))

    def _fsync(self, below: str, descriptor: int) -> None:
        if not self.syncs:
            raise self.refuse("fsync", below)

    def _rename(self, below: str, *rest: Any, **named: Any) -> None:
        raise self.refuse("rename", below)

    def _mkdir(self, below: str, path: Any, *rest: Any, **named: Any) -> None:
        self._os["mkdir"](path, *rest, **named)
        self.changes.append((below, True, True))

    def _unlink(self, below: str, path: Any, **named: Any) -> None:
        self._os["unlink"](path, **named)
        self.changes.append((below, False, False))

    def _rmdir(self, below: str, path: Any, **named: Any) -> None:
        self._os["rmdir"](path, **named)
        self.changes.append((below, False, True))

    def _scandir(self, below: str, path: Any) -> Any:
        with self._os["scandir"](path) as found:
            there: dict[str, Any] = {entry.name: entry for entry in found}
        for name, appeared, is_folder in reversed(self.changes[max(0, len(self.changes) - self.lag) :]):
            if os.path.dirname(name) != below:
                continue
            if appeared:
                there.pop(os.path.basename(name), None)
            else:
                there[os.path.basename(name)] = Ghost(os.path.join(self.root, name), is_folder)
        return _Listing(there.values())


class _Uploaded(io.FileIO):
    """A file on a mount that is being written."""

    def __init__(self, mount: Mount, below: str, upload: str) -> None:
        self._mount, self._below, self._upload = mount, below, upload
        self._size = 0
        super().__init__(upload, "wb")

    def write(self, data: Any) -> int:
        self._size += len(data)
        if self._size > self._mount.limit_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self._below)
        return super().write(data)

    def seek(self, *_: object) -> int:
        raise self._mount.refuse("seek", self._below)

    def truncate(self, *_: object) -> int:
        raise self._mount.refuse("truncate", self._below)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._mount.appears(self._upload, self._below)


class Ghost(os.PathLike):  # type: ignore[type-arg]
    """An entry in a stale listing for a file or folder that has been removed."""

    def __init__(self, path: str, is_folder: bool) -> None:
        self.path = path
        self.name = os.path.basename(path)
        self._is_folder = is_folder

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is_folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not self._is_folder

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path)


class _Listing(list[Any]):
    """A stand-in for what os.scandir() returns."""

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass
