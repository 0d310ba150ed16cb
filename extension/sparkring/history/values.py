"""Turns the values of the ranks' last expressions into the text that a notebook shows.

Text that several ranks share is shown once, with a list of these ranks.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from sparkring.history.describe import rank_list
from sparkring.history.lines import plain

ENTRIES = 20
CHARACTERS = 4_000  # the text of a longer value is cut

Write = Callable[[object], str]


def told(values: Mapping[int, object], write: Write = repr) -> str:
    """Return the values of the ranks as entries such as `ranks 0–3: 0.9731`; '' if all values are None.

    `write` turns a value into text. Ranks whose values have the same text share an entry. Text with several lines
    begins on a line of its own, so that its columns stay aligned.
    """
    by_text: dict[str, list[int]] = {}
    for rank in sorted(values):
        if values[rank] is not None:
            by_text.setdefault(_written(values[rank], write), []).append(rank)
    entries = list(by_text.items())
    shown = [rank_list(ranks) + (":\n" if "\n" in text else ": ") + text for text, ranks in entries[:ENTRIES]]
    rest = [rank for _, ranks in entries[ENTRIES:] for rank in ranks]
    if rest:
        shown.append(f"… and {len(entries) - ENTRIES:,} more values ({rank_list(rest)})")
    return "\n".join(shown)


def like(printer: Any) -> Write:
    """Return a function that writes a value as `printer`, a RepresentationPrinter of IPython, would write it."""

    def write(value: object) -> str:
        stream = io.StringIO()
        writers = printer.singleton_pprinters, printer.type_pprinters, printer.deferred_pprinters
        looks = printer.verbose, printer.max_width, printer.newline
        inner = type(printer)(stream, *looks, *writers, printer.max_seq_length)
        inner.pretty(value)
        inner.flush()
        return stream.getvalue()

    return write


def _written(value: object, write: Write) -> str:
    """Return the value's text as plain() shows it, cut if it is long. If `write` raises an error, name its type."""
    try:
        text = write(value)
    except Exception as error:  # a class's repr() may raise anything
        kind = type(value)
        return f"<{kind.__module__}.{kind.__qualname__}, whose repr() raises {type(error).__name__}>"
    cut = f"… ({len(text):,} characters)" if len(text) > CHARACTERS else ""
    return "\n".join(plain(line) for line in text[:CHARACTERS].split("\n")) + cut
