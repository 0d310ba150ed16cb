"""The cache folders of converters: their owners, and those that killed kernels have left.

Petastorm removes a converter's folder when the process that made it ends normally. Each folder names its owner in a
file that Spark and Petastorm ignore, so that the next process can remove the folders of killed ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any

from sparkring.data import owners
from sparkring.runtime.storage import Location, locate

OWNER = "_sparkring_owner.json"
_NAME = re.compile(r"\d{14}-appid-.+")  # as Petastorm calls them


def claim(cache_dir_url: str) -> None:
    """Say in the folder that this process has made it. Where that cannot be written, it is not said."""
    with contextlib.suppress(Exception):  # each of fsspec's packages has its own errors
        folder = locate(cache_dir_url)
        folder.fs.pipe_file((folder / OWNER).path, json.dumps(owners.me()).encode())


def remove_abandoned(parent_url: str) -> list[str]:
    """Remove the folders in there whose owner ran on this host and has ended. Returns their paths."""
    gone = []
    with contextlib.suppress(Exception):  # nothing depends on it; as above
        parent = locate(parent_url)
        for path in parent.fs.ls(parent.path, detail=False):
            folder = parent / os.path.basename(path.rstrip("/"))
            if _NAME.fullmatch(os.path.basename(folder.path)) and _abandoned(folder):
                folder.fs.rm(folder.path, recursive=True)
                gone.append(folder.path)
    return gone


def _abandoned(folder: Location) -> bool:
    owner = _owner(folder)
    return bool(owner) and owners.has_ended(owner) is True


def _owner(folder: Location) -> dict[str, Any]:
    try:
        return dict(json.loads(folder.fs.cat_file((folder / OWNER).path)))
    except (OSError, ValueError):  # Petastorm's own, or half-written: not ours to remove
        return {}
