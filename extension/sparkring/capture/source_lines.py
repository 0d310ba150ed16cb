"""Sends the source lines of a notebook's code to its ranks, where no file holds them.

The lines are sent with the code to the rank's `linecache`, under the file name that the code was compiled with. So
`inspect.getsource`, AutoGraph and `torch.jit.script` find them, and tracebacks show them.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable
from typing import Any

MOST_CHARS = 1_000_000  # a longer cell holds data, and travels without its lines


def source_text(filename: str) -> str:
    """Return the lines that code with this file name was compiled from; '' if they are not known, or too long."""
    linecache.checkcache(filename)  # a script may have changed on disk
    text = "".join(linecache.getlines(filename))
    return text if len(text) <= MOST_CHARS else ""


def keep_lines(filename: str, text: str) -> None:
    """Put the lines of `filename` into linecache. linecache keeps entries that have no modification time."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


def code_with_lines(lines: None, make: Callable[..., types.CodeType], parts: tuple[Any, ...]) -> types.CodeType:
    """Make a code object; `lines` come first in the pickle, so they are loaded before it."""
    return make(*parts)
