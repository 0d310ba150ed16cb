"""The list of lines that a rank's `x = !command` returns. It has the same attributes as IPython's SList."""

from __future__ import annotations

import re
from collections.abc import Callable


class SList(list[str]):
    """Lines of output: a list, with the text as `.n` (lines) and `.s` (words), and methods that choose lines."""

    @property
    def n(self) -> str:
        return "\n".join(self)

    nlstr = n

    @property
    def s(self) -> str:
        return " ".join(self)

    spstr = s

    @property
    def p(self) -> list[object]:
        """The lines that are paths of existing files, as Paths."""
        from pathlib import Path

        return [Path(line) for line in self if line and Path(line).exists()]

    paths = p

    def grep(self, pattern: str | Callable[[str], object], prune: bool = False, field: int | None = None) -> SList:
        """Return the lines, or with `prune` the other lines, in which `pattern` is found, or for which it is true.

        With `field`, look only at this column.
        """

        def matches(line: str) -> bool:
            words = line.split()
            text = line if field is None else words[field] if -len(words) <= field < len(words) else ""
            return bool(re.search(pattern, text, re.IGNORECASE) if isinstance(pattern, str) else pattern(text))

        return SList(line for line in self if matches(line) != prune)

    def fields(self, *fields: int) -> SList | list[list[str]]:
        """Return the columns with these numbers, joined by spaces; without numbers, return the words of each line."""
        rows = [line.split() for line in self]
        if not fields:
            return rows
        chosen = ([row[field] for field in fields if -len(row) <= field < len(row)] for row in rows)
        return SList(" ".join(words) for words in chosen if words)

    @property
    def l(self) -> SList:  # noqa: E743 - IPython's name
        return self

    list = l  # last, since the annotations above use the builtin
