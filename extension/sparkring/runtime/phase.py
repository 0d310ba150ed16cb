"""Names what the user's code does, for the profile of a rank: `with sparkring.phase("augment"):`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

NAME_CHARACTERS = 40  # longer names are cut off

_names: list[str] = []  # of the blocks that the main thread is in, innermost last


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Call the time in this block `name` in the profile of the run: `with sparkring.phase("augment"):`.

    Blocks can be nested; the innermost one counts. While a rank waits in a collective, this counts as waiting, also in
    a block. `@sparkring.phase("augment")` names all calls of a function. Only the main thread of a rank is profiled, so
    in other threads, in other processes, and in the notebook, phase() does nothing. Raises TypeError if `name` is not a
    string.
    """
    if not isinstance(name, str):
        raise TypeError(f"phase() takes a name, not {type(name).__name__}")
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _names.append(name[:NAME_CHARACTERS])
    try:
        yield
    finally:
        _names.pop()


def innermost() -> str:
    """Return the name of the innermost block that the main thread is in; '' if it is in none."""
    try:
        return _names[-1]
    except IndexError:
        return ""
