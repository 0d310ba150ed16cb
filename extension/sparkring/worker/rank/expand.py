"""Variables in `!` and `%` lines: `{expression}` and `$name`, as IPython expands them."""

from __future__ import annotations

import re
from typing import Any

_PLACE = re.compile(r"\$\$|\{\{|\}\}|\$(?P<name>[A-Za-z_]\w*)|\{(?P<expression>[^{}]*)\}")


def expand(text: str, namespace: dict[str, Any]) -> str:
    """`text` with its variables replaced by their values. All else stays: `$HOME` is left to the shell."""

    def put_in(found: re.Match[str]) -> str:
        whole = found[0]
        if whole in ("$$", "{{", "}}"):
            return whole[0]
        if found["name"]:
            return str(namespace[found["name"]]) if found["name"] in namespace else whole
        try:
            return str(eval(found["expression"], namespace))
        except Exception:  # as in IPython: braces without an expression belong to the shell
            return whole

    return _PLACE.sub(put_in, text)
