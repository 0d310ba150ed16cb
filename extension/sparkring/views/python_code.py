"""Colours Python code: keywords, strings, comments, numbers and magics."""

from __future__ import annotations

import functools
import io
import keyword
import re
import tokenize
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sparkring.views.markup import RANK_COLOURS, text, tint

# The colours of the kinds of code, as indices of RANK_COLOURS. All other code has the colour of text.
_MAGIC, _KEYWORD = 0, 3
_KINDS = {"STRING": 1, "NUMBER": 2, "COMMENT": 5}
# From Python 3.12 on, a string with expressions in braces is several tokens.
_KINDS |= {f"{letter}STRING_{part}": _KINDS["STRING"] for letter in "FT" for part in ("START", "MIDDLE", "END")}
_MAGIC_LINE = re.compile(r" *(%%?\w|!)")


class _Token(NamedTuple):
    """A piece of code with a colour. `begin` and `end` are pairs of a line, counted from 0, and a position in it."""

    kind: int
    begin: tuple[int, int]
    end: tuple[int, int]


@functools.lru_cache(maxsize=8)
def coloured(code: str, *, inline: bool) -> tuple[str, ...]:
    """Return each line of a cell as HTML. With `inline`, the HTML needs no style sheet, but is longer.

    If the code has a syntax error, the lines after the error may have no colours.
    """
    lines = code.split("\n")
    # For each line: where a colour begins, where it ends, and its index.
    spans: list[list[tuple[int, int, int]]] = [[] for _ in lines]
    for kind, (first, begin), (last, end) in _tokens(lines):
        for at in range(first, last + 1):
            spans[at].append((begin if at == first else 0, end if at == last else len(lines[at]), kind))
    for own, line in zip(spans, lines, strict=True):
        if not own and _MAGIC_LINE.match(line):
            own.append((0, len(line), _MAGIC))
    return tuple(_line(line, own, inline=inline) for line, own in zip(lines, spans, strict=True))


def _tokens(lines: Sequence[str]) -> Iterator[_Token]:
    """Yield the tokens that have a colour.

    Lines that look like magics are not read, because magics are not Python. Such lines within a string are still part
    of the string's token.
    """
    python = "\n".join("" if _MAGIC_LINE.match(line) else line for line in lines)
    try:
        for kind, word, (first, begin), (last, end), _ in tokenize.generate_tokens(io.StringIO(python).readline):
            colour = _KEYWORD if keyword.iskeyword(word) else _KINDS.get(tokenize.tok_name[kind])
            if colour is not None:
                yield _Token(colour, (first - 1, begin), (last - 1, end))
    except (tokenize.TokenError, SyntaxError, ValueError):
        return


def _line(line: str, spans: Sequence[tuple[int, int, int]], *, inline: bool) -> str:
    parts, done = [], 0
    for begin, end, kind in spans:
        look = f'style="{tint(RANK_COLOURS[kind])}"' if inline else f'class="sr-c{kind}"'
        piece = text(line[max(done, begin) : end])
        parts.append(text(line[done:begin]) + (f"<span {look}>{piece}</span>" if piece else ""))
        done = max(done, end)
    return "".join(parts) + text(line[done:])
