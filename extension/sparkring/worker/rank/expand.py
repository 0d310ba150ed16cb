"""Replaces `{expression}` and `$name` in `!` and `%` lines with their values, as IPython does."""

from __future__ import annotations

import ast
import contextlib
import re
from typing import Any

_PLACE = re.compile(r"\$\$|\{\{|\}\}|\$(?P<name>[A-Za-z_]\w*)|\{(?P<expression>[^{}]*)\}")


def names_in(text: str) -> set[str]:
    """Return the names that expand() would look up in `text`."""
    found: set[str] = set()
    for place in _PLACE.finditer(text):
        with contextlib.suppress(SyntaxError):
            tree = ast.parse(place["name"] or place["expression"] or "", mode="eval")
            found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found


def expand(text: str, namespace: dict[str, Any]) -> str:
    """Return `text` with each `{expression}` and each `$name` of a variable replaced with its value.

    `$$`, `{{` and `}}` become `$`, `{` and `}`. Everything else stays unchanged, for example `$HOME` if the cell has no
    variable `HOME`.
    """

    def put_in(found: re.Match[str]) -> str:
        whole = found[0]
        if whole in ("$$", "{{", "}}"):
            return whole[0]
        if found["name"]:
            return str(namespace[found["name"]]) if found["name"] in namespace else whole
        try:
            return str(eval(found["expression"], namespace))
        except Exception:  # as in IPython, the braces are left to the shell
            return whole

    return _PLACE.sub(put_in, text)
