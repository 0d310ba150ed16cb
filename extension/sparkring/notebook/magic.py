"""The class Magic, which describes a magic: its name, its help, and the functions that run and complete it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple


class Magic(NamedTuple):
    """One magic. The module that defines the magic lists it in MAGICS, and extension.py registers it.

    --help and `?` show `help`. `run` is called with the shell, the line and, for a cell magic, the cell. `complete` is
    called with the line up to the cursor, and returns what Tab offers. Unless the magic is `raw`, IPython first
    replaces `{name}` and `$name` in the line with the values of variables.
    """

    name: str
    kind: Literal["line", "cell"]
    help: str
    run: Callable[..., Any]
    complete: Callable[[str], list[str]] = lambda line: []
    raw: bool = False

    @property
    def title(self) -> str:
        """The name as users write it."""
        return f"{'%%' if self.kind == 'cell' else '%'}{self.name}"
