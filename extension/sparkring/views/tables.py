"""Tables that line magics show: HTML and text in a notebook, text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from sparkring.views import summary

if TYPE_CHECKING:
    from sparkring.capture import CapturedName


def show_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Show `rows` under `headers`, or the sentence `empty` if there are none."""
    from sparkring.views import in_notebook

    text = table_text(headers, rows) if rows else empty
    if not (rows and in_notebook()):
        sys.stdout.write(text + "\n")
        return
    from IPython.display import display

    display({"text/html": table_html(headers, rows), "text/plain": text}, raw=True)  # type: ignore[no-untyped-call]


def show_captured(names: Sequence[CapturedName]) -> None:
    """Show what of the notebook a cell would take to the ranks."""
    rows = [
        (name.name, name.type_name, summary.size(name.size_bytes), name.travels, name.problem or "") for name in names
    ]
    show_table(("name", "type", "size", "travels", ""), rows, empty="the cell takes nothing from the notebook")


def table_text(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`rows` in aligned columns; an empty last column is left out."""
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def table_html(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`rows` as an HTML table; every text is escaped."""
    head = "".join(f"<th style='text-align:left'>{escape(text)}</th>" for text in headers)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
