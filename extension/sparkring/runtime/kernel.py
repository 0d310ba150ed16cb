"""Tells whether this process is a notebook's kernel and which cell it is running, and prints text."""

from __future__ import annotations

import sys
from typing import TextIO


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, and so can show HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def current_cell() -> int | None:
    """Return the number of the cell that the notebook is running; None outside a notebook."""
    if not in_notebook():
        return None
    number: int = sys.modules["IPython"].get_ipython().execution_count
    return number


def can_ask() -> bool:
    """Return whether the kernel's input() can ask the user. Programs that execute a notebook do not allow it."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython() if ipython is not None else None, "kernel", None)
    return kernel is not None and bool(kernel._allow_stdin)


def tell(text: str) -> None:
    """Print a message that belongs to no run, for example from a thread of sparkring or before a run begins.

    In a notebook, the message appears below the cell that is running, or else below the cell that ran last.
    """
    if sys.stderr is not None and not getattr(sys.stderr, "closed", False):  # a service may have none
        sys.stderr.write(f"sparkring: {text}\n")
        sys.stderr.flush()


def tell_progress(text: str) -> None:
    """Print a message that something is under way, as tell() does. Notebooks show stderr in red, so it is not used."""
    if in_notebook():
        write(f"sparkring: {text}\n")
    else:
        tell(text)


def write(text: str, stream: TextIO | None = None) -> None:
    """Write `text` to `stream`, or to stdout. Characters that the stream cannot encode are written as `?`."""
    to = sys.stdout if stream is None else stream
    encoding = getattr(to, "encoding", None) or "utf-8"
    to.write(text.encode(encoding, "replace").decode(encoding))
