"""Replaces `{expression}` and `$name` in `!` and `%` lines with their values, as IPython does."""

from __future__ import annotations

import ast
import contextlib
import re
from typing import Any

_PLACE = re.compile(r"\$\$|\{\{|\}\}|\$(?P<name>[A-Za-z_]\w*)|\{(?P<expression>[^{}]*)\}")


def names_in(text: str) -> set[str]:
    """Return the names that expand() would look up in `text`."""
    names: set[str] = set()
    for place in _PLACE.finditer(text):
        with contextlib.suppress(SyntaxError):
            tree = ast.parse(place["name"] or place["expression"] or "", mode="eval")
            names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names


def expand(text: str, namespace: dict[str, Any]) -> str:
    """Return `text` with each `{expression}` and each `$name` of a variable replaced with its value.

    `$$`, `{{` and `}}` become `$`, `{` and `}`. Everything else stays unchanged, for example `$HOME` if the cell has no
    variable `HOME`.
    """

    def put_in(place: re.Match[str]) -> str:
        whole = place[0]
        if whole in ("$$", "{{", "}}"):
            return whole[0]
        if place["name"]:
            return str(namespace[place["name"]]) if place["name"] in namespace else whole
        try:
            return str(eval(place["expression"], namespace))
        except Exception:  # as in IPython, the braces are left to the shell
            return whole

    return _PLACE.sub(put_in, text)
