"""The folder to which predictions are written. A reader of the folder finds either all files or none.

    preds/
        _run1.unfinished/       exists during the run, and afterwards if the run did not finish
            _sparkring.json     digests of the data, the model and the settings, and the process that writes the parts
            model               the model that the ranks load
            parts/              the files of the parts; also files from attempts whose process died
            results/            a file for each part that is complete
        run1/                   `parts`, which is renamed at the end, with _sparkring.json and _SUCCESS

A local file system renames `parts` in one step. In object stores and some mounts, which cannot do this, the files are
copied, and _SUCCESS is written last. If a run ends before that, a later run copies all files again.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from sparkring.checkpointing.results import RESULTS
from sparkring.data.folders import entries, has_ended, read_json, storage_errors, this_process, write_json
from sparkring.errors import DataError, OptionsError
from sparkring.runtime.storage import Location, locate

Mode = Literal["error", "overwrite"]
STATE, SUCCESS = "_sparkring.json", "_SUCCESS"
PARTS, REPLACED, MODEL = "parts", "replaced", "model"
LAYOUT = 1


class Destination:
    """The folder `to`, and the unfinished folder beside it."""

    def __init__(self, to: str | os.PathLike[str], mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise OptionsError(f'mode={mode!r}: expected "error" or "overwrite".')
        self.folder, self._mode = locate(to), mode
        parent, name = posixpath.split(self.folder.path)
        if not name:
            raise OptionsError(f"to={self.folder.written!r}: name a folder, as in 'dbfs:/preds/run1'.")
        written = posixpath.join(posixpath.dirname(self.folder.written.rstrip("/")), f"_{name}.unfinished")
        self.unfinished = Location(self.folder.fs, f"{parent.rstrip('/')}/_{name}.unfinished", written)

    def open(self, belongs: Mapping[str, str]) -> None:
        """Prepare the unfinished folder. Parts of an earlier run are kept if they do not have to be written again.

        `belongs` contains digests of everything that the predictions depend on. Its keys, such as "data" and "model",
        are used in errors. If a digest differs from that of an earlier run, mode "overwrite" removes the parts of
        that run, and mode "error" raises DataError. Also raise DataError if the destination already has files that are
        not to be replaced, if another process is writing to the destination, or if it cannot be written.
        """
        with self._usable():
            state = read_json(self.unfinished / STATE, LAYOUT)
            there = self._names(self.folder)
            is_partial = bool(state.get("copying")) and SUCCESS not in there
            if there and not is_partial:
                if SUCCESS in there and state and not self._has_parts():
                    self._remove(self.unfinished)  # the run finished, but was killed before it could remove this folder
                self._check_replaceable(there)
            owner = state.get("owner")
            if owner and owner != this_process() and has_ended(owner) is False:
                raise DataError(
                    f"{self.folder.written}: process {owner['pid']} on {owner['host']} is writing predictions to this "
                    "folder: wait for it, or use another folder."
                )
            goes_on = self._goes_on(state, belongs)
            if not goes_on:
                if there:  # perhaps files that the earlier run has copied
                    self._check_replaceable(there)
                self._remove(self.unfinished)
            self.folder.fs.makedirs((self.unfinished / PARTS).path, exist_ok=True)
            self._write_state(belongs, copying=is_partial and goes_on)

    def _write_state(self, belongs: Mapping[str, Any], *, copying: bool) -> None:
        content = {"owner": this_process(), "belongs": belongs, "copying": copying}
        write_json(self.unfinished / STATE, LAYOUT, content)

    def _check_replaceable(self, names: Mapping[str, str]) -> None:
        """Raise DataError unless the mode is "overwrite" and the destination has only Parquet files."""
        if self._mode == "error":
            raise DataError(
                f'{self.folder.written} exists already: use mode="overwrite" to replace it, or name another folder.'
            )
        other = next((name for name, kind in names.items() if not _is_ours(name, kind)), None)
        if other is not None:
            raise DataError(
                f'{self.folder.written} has `{other}`, which predict() has not written, so mode="overwrite" does not '
                f"replace the folder: remove `{other}`, or name another folder."
            )

    def _goes_on(self, state: Mapping[str, Any], belongs: Mapping[str, str]) -> bool:
        if not state or not self._has_parts():
            return False
        before = state["belongs"]
        changed = [what for what, digest in belongs.items() if before.get(what) != digest]
        if changed and self._mode == "error":
            other = ", ".join(changed) if len(changed) > 2 else " and ".join(changed)
            raise DataError(
                f"{self.unfinished.written} has parts of an unfinished run with different {other}: use "
                'mode="overwrite" to remove these parts, or name another folder.'
            )
        return not changed

    def _has_parts(self) -> bool:
        """Return whether at least one part is complete."""
        return bool(self._names(self.unfinished / PARTS) and self._names(self.unfinished / RESULTS))

    def release(self) -> None:
        """Record in the folder that this process no longer writes to it. If no part is complete, remove the folder."""
        with contextlib.suppress(Exception):  # the run has ended; its own error, if any, must not be replaced
            state = read_json(self.unfinished / STATE, LAYOUT)
            if state and self._has_parts():
                write_json(self.unfinished / STATE, LAYOUT, {**state, "owner": None})
            elif state:
                self._remove(self.unfinished)

    def commit(self, files: Mapping[str, int], about: Mapping[str, Any]) -> None:
        """Make the parts visible. `files` holds the size of each file in bytes, by its name.

        The facts in `about` are written to a file beside the parts.

        Raise DataError if a file is missing, if the storage fails, or if the destination now has files that are not to
        be replaced.
        """
        parts = self.unfinished / PARTS
        with self._usable():
            there = self._names(self.folder)
            if there and not read_json(self.unfinished / STATE, LAYOUT).get("copying"):
                self._check_replaceable(there)
            sizes = {name: int(entry["size"]) for name, entry in entries(parts).items() if entry["type"] == "file"}
            for name, size_bytes in files.items():
                if sizes.get(name) != size_bytes:
                    self._remove(self.unfinished)
                    raise DataError(
                        f"{name} in {parts.written} was changed or removed, so the predictions are not complete. "
                        "All parts of this run have been removed: run the cell again."
                    )
            for name in sizes.keys() - files.keys():
                parts.fs.rm_file((parts / name).path)
            write_json(parts / STATE, LAYOUT, {"created": time.time(), **about})
            if not (self.folder.local and self._renamed(parts)):
                self._copy(parts, [*files, STATE])
            self._remove(self.unfinished)

    def _renamed(self, parts: Location) -> bool:
        """Rename `parts`, and return whether the storage can do this."""
        parts.fs.pipe_file((parts / SUCCESS).path, b"")
        try:
            if parts.fs.exists(self.folder.path):
                os.rename(self.folder.path, (self.unfinished / REPLACED).path)
            os.rename(parts.path, self.folder.path)
        except OSError:
            return False
        return True

    def _copy(self, parts: Location, names: Sequence[str]) -> None:
        state = read_json(self.unfinished / STATE, LAYOUT)
        if not state.get("copying"):
            self._remove(self.folder)
            self._write_state(state.get("belongs", {}), copying=True)
        self.folder.fs.makedirs(self.folder.path, exist_ok=True)
        for name in names:
            self.folder.fs.cp_file((parts / name).path, (self.folder / name).path)
        self.folder.fs.pipe_file((self.folder / SUCCESS).path, b"")

    def _names(self, folder: Location) -> dict[str, str]:
        """Return the kind of each entry of a folder by name, or {} if the folder does not exist."""
        folder.fs.invalidate_cache()
        if folder.fs.isfile(folder.path):
            raise DataError(f"{folder.written} is a file: name a folder.")
        try:
            return {name: entry["type"] for name, entry in entries(folder).items()}
        except FileNotFoundError:
            return {}

    def _remove(self, folder: Location) -> None:
        with contextlib.suppress(FileNotFoundError):
            folder.fs.rm(folder.path, recursive=True)

    def _usable(self) -> contextlib.AbstractContextManager[None]:
        return storage_errors(f"predictions cannot be written to {self.folder.written}")


def _is_ours(name: str, kind: str) -> bool:
    """Return whether predict() or Spark writes a file of this name to a folder of Parquet files."""
    notes = (".", "_committed_", "_started_")
    return kind != "directory" and (name.endswith(".parquet") or name in (STATE, SUCCESS) or name.startswith(notes))
