"""The class with which the modules of this folder describe their magics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple


class Magic(NamedTuple):
    """One magic. Its module lists it in MAGICS, and extension.py registers it.

    `help` is shown by --help and `?`. `run` is called with the shell, the line and, for a cell magic, the cell.
    `complete` gives what Tab offers at the end of the line up to the cursor. Unless the magic is `raw`, IPython first
    fills in `{name}` and `$name` in the line.
    """

    name: str
    kind: Literal["line", "cell"]
    help: str
    run: Callable[..., Any]
    complete: Callable[[str], list[str]] = lambda line: []
    raw: bool = False
