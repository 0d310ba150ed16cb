"""The kernel that Python runs in: whether there is one, which cell it runs, and text that belongs to no run."""

from __future__ import annotations

import sys


def in_notebook() -> bool:
    """Is this the kernel of a notebook, which can show HTML?"""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def current_cell() -> int | None:
    """The number of the cell that the notebook runs now; None where there is no notebook."""
    if not in_notebook():
        return None
    number: int = sys.modules["IPython"].get_ipython().execution_count
    return number


def tell(text: str) -> None:
    """Say something that no run is there to show: from a thread of ours, or before a run begins.

    In a notebook it stands below the cell that runs now, or ran last.
    """
    sys.stderr.write(f"sparkring: {text}\n")
    sys.stderr.flush()
