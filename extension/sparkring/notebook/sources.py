"""Arguments that are variables of the notebook, paths or URLs: their values, and what Tab offers for them."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython

PATHS_OFFERED = 200


def value_of(shell: Any, name: str) -> Any:
    """The value of the notebook's variable of that name; if there is none, the name itself, which may be a path."""
    return shell.user_ns.get(name, name) if name.isidentifier() else name


def suggest_sources(current: str, fits: Callable[[Any], bool], *, folders_only: bool = False) -> list[str]:
    """What begins with `current`: the notebook's variables whose value `fits`, then files and folders.

    If `current` is empty, paths and variables with a leading underscore are not offered.
    """
    shell = get_ipython()
    variables = {} if shell is None else shell.user_ns
    names = [name for name, value in variables.items() if name.startswith(current or name.lstrip("_")) and fits(value)]
    paths = sorted(glob.glob(f"{glob.escape(current)}*"))[:PATHS_OFFERED] if current else []
    paths = [f"{path}/" if os.path.isdir(path) else path for path in paths if " " not in path]
    return names + [path for path in paths if path.endswith("/") or not folders_only]
