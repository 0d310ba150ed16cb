"""Finds values and completions for arguments of magics that can be a variable of the notebook, a path or a URL."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython

PATHS_OFFERED = 200


def value_of(shell: Any, name: str) -> Any:
    """Return the value of the notebook's variable `name`. If there is no such variable, return `name` itself."""
    return shell.user_ns.get(name, name) if name.isidentifier() else name


def suggest_sources(current: str, fits: Callable[[Any], bool], *, folders_only: bool = False) -> list[str]:
    """Return the words that begin with `current`: names of the notebook's variables, then files and folders.

    A variable is offered only if `fits(value)` is true. With `folders_only`, files are not offered. If `current` is
    empty, no paths are offered, and variables whose names begin with an underscore are not offered either.
    """
    shell = get_ipython()
    variables = {} if shell is None else shell.user_ns
    names = [name for name, value in variables.items() if name.startswith(current or name.lstrip("_")) and fits(value)]
    paths = sorted(glob.glob(f"{glob.escape(current)}*"))[:PATHS_OFFERED] if current else []
    paths = [f"{path}/" if os.path.isdir(path) else path for path in paths if " " not in path]
    return names + [path for path in paths if path.endswith("/") or not folders_only]


def suggest_checkpoint_directories(current: str) -> list[str]:
    """Return the words that begin with `current` and may name a directory of checkpoints, as suggest_sources() does."""
    from sparkring.checkpointing.inventory import names_directory

    return suggest_sources(current, names_directory, folders_only=True)
