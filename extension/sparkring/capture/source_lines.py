"""Sends the source lines of a notebook's code to the ranks, which have no file with these lines.

The lines are sent with the code to the rank's `linecache`, under the file name that the code was compiled with. So
`inspect.getsource`, AutoGraph and `torch.jit.script` find them, and tracebacks show them.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable
from typing import Any

MOST_CHARS = 1_000_000  # a longer cell probably holds data; its lines are not sent
# If an earlier cell of the notebook has this import, sparkring puts this line in place of the magic's line.
FUTURE_LINE = "from __future__ import annotations"


def source_text(filename: str) -> str:
    """Return the source that code with this file name was compiled from; '' if it is not known, or too long."""
    linecache.checkcache(filename)  # a script may have changed on disk
    text = "".join(linecache.getlines(filename))
    return text if len(text) <= MOST_CHARS else ""


def keep_lines(filename: str, text: str) -> None:
    """Put the lines of `filename` into linecache."""
    # With a modification time, linecache.checkcache() would look for the file, and drop the entry.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


def code_with_lines(lines: None, make: Callable[..., types.CodeType], parts: tuple[Any, ...]) -> types.CodeType:
    """Make a code object with `make(*parts)`, after pickle has put its source lines into linecache.

    `lines` is packed as a stand-in for a call of keep_lines(). Pickle unpacks this argument before it calls
    code_with_lines().
    """
    return make(*parts)
