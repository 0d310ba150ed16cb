"""Recognises checkpoints of other tools by the names of their files. They may be incomplete or damaged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["Keras model", "Keras weights", "HDF5", "SavedModel", "TensorFlow", "BackupAndRestore", "torch"]

_SUFFIXES: tuple[tuple[str, Kind], ...] = (
    (".weights.h5", "Keras weights"),
    (".keras", "Keras model"),
    (".h5", "HDF5"),
    (".hdf5", "HDF5"),
    (".pt", "torch"),
    (".pth", "torch"),
    (".pt.tar", "torch"),
    (".pth.tar", "torch"),
)
_SHARD = re.compile(r"(.+)\.data-(\d{5})-of-(\d{5})")
_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt")
# Keras' BackupAndRestore saves its checkpoints in the user's folder, for example as chief/ckpt-1 or worker_0/ckpt-1.
_BACKUP = re.compile(r"(?:(.*)/)?(?:chief|worker_\d+)/ckpt-\d+")


class ListedFile(NamedTuple):
    """A file: its path below the directory, with slashes, and when it was changed (Unix seconds, 0 for unknown)."""

    path: str
    size_bytes: int
    time: float = 0.0


class Other(NamedTuple):
    """A checkpoint of another tool. `name` is a file, a folder, or the common prefix of several files.

    `note` says what is missing, as far as the names of the files show it.
    """

    kind: Kind
    name: str
    size_bytes: int
    time: float = 0.0
    note: str = ""


def recognised(files: Iterable[ListedFile]) -> list[Other]:
    """Return the checkpoints among `files`, newest first. Files in a SavedModel's folder belong to the SavedModel."""
    every = list(files)
    models = {file.path.rpartition("/")[0] for file in every if file.path.rpartition("/")[2] in _SAVED_MODEL}
    others: list[Other] = []
    for folder in models:
        inside = [file for file in every if not folder or file.path.startswith(f"{folder}/")]
        others.append(_together("SavedModel", f"{folder}/" if folder else "./", inside))
    rest = [file for file in every if not any(not model or file.path.startswith(f"{model}/") for model in models)]
    prefixes: dict[str, list[ListedFile]] = {}
    for file in rest:
        shard = _SHARD.fullmatch(file.path)
        if shard or file.path.endswith(".index"):
            prefixes.setdefault(shard[1] if shard else file.path.removesuffix(".index"), []).append(file)
            continue
        kind = next((kind for suffix, kind in _SUFFIXES if file.path.lower().endswith(suffix)), None)
        if kind is not None:
            others.append(Other(kind, file.path, file.size_bytes, file.time))
    others += [checkpoint for prefix, parts in prefixes.items() if (checkpoint := _prefix(prefix, parts))]
    return sorted(others, key=lambda other: (-other.time, other.name))


def _prefix(prefix: str, parts: list[ListedFile]) -> Other | None:
    """Return the TensorFlow checkpoint whose files, `parts`, begin with `prefix`; None if there is only an .index."""
    shards = [shard for part in parts if (shard := _SHARD.fullmatch(part.path))]
    if not shards:
        return None
    missing = int(shards[0][3]) - len(shards)
    note = f"{missing} of {int(shards[0][3])} .data files are missing" if missing > 0 else ""
    if len(shards) == len(parts):
        note = "its .index file is missing"
    return _together("BackupAndRestore" if _BACKUP.fullmatch(prefix) else "TensorFlow", prefix, parts, note)


def _together(kind: Kind, name: str, files: list[ListedFile], note: str = "") -> Other:
    return Other(kind, name, sum(file.size_bytes for file in files), max(file.time for file in files), note)
