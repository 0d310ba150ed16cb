"""Colours Python code: keywords, strings, comments, numbers and magics."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import ClassVar

from pygments.lexer import inherit
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Number, Operator, String

from sparkring.views.markup import RANK_COLOURS, text, tint

# The colours of the kinds of code, as indices of RANK_COLOURS. All other code has the colour of text.
_MAGIC, _STRING, _NUMBER, _KEYWORD, _COMMENT = 0, 1, 2, 3, 5
_KINDS = (
    (Comment.Preproc, _MAGIC),
    (Comment, _COMMENT),
    (String, _STRING),
    (Number, _NUMBER),
    (Keyword, _KEYWORD),
    (Operator.Word, _KEYWORD),
)


class _CellLexer(PythonLexer):  # type: ignore[misc]
    tokens: ClassVar = {"root": [(r"^ *(%%?\w|!).*", Comment.Preproc), inherit]}


@functools.lru_cache(maxsize=8)
def coloured(code: str, *, inline: bool) -> tuple[str, ...]:
    """Return each line of a cell as HTML. With `inline`, the HTML needs no style sheet, but is longer."""
    found: list[list[tuple[int | None, str]]] = [[]]
    for token, said in _CellLexer(stripnl=False, ensurenl=False).get_tokens(code):
        kind = next((kind for name, kind in _KINDS if token in name), None)
        first, *more = said.split("\n")
        found[-1].append((kind, first))
        found.extend([(kind, piece)] for piece in more)
    return tuple(_line(pieces, inline=inline) for pieces in found)


def _line(pieces: Iterable[tuple[int | None, str]], *, inline: bool) -> str:
    parts = []
    for kind, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
        said = text("".join(piece for _, piece in group))
        if kind is not None and said:
            look = f'style="{tint(RANK_COLOURS[kind])}"' if inline else f'class="sr-c{kind}"'
            said = f"<span {look}>{said}</span>"
        parts.append(said)
    return "".join(parts)
