"""Makes small tables for magics, for example tables of saved runs, of slots, and of the names that a cell needs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from sparkring.history.describe import size
from sparkring.history.events import CapturedName
from sparkring.history.lines import plain
from sparkring.runtime.kernel import in_notebook, write
from sparkring.views.description import RIGHT, Table, column_texts, expanded
from sparkring.views.markup import enclosed, note, text, warning

_ONE = r"[\d.,]+( [a-zA-Z%]{1,3}( \d+ [a-z]{1,3})?)?"
_AMOUNT = re.compile(rf"{_ONE}(–{_ONE})?")
CELL_CHARACTERS = 300  # longer content is cut
METRICS_SHOWN = 4


def show_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Show `rows` under `headers`, or the sentence `empty` if there are no rows."""
    if rows:
        show(table_text(headers, rows), lambda: table_html(headers, rows))
    else:
        write(f"{plain(empty)}\n")


def show(words: str, html: Callable[[], str]) -> None:
    """Show the result of a magic: as HTML in a notebook, otherwise as the text `words`."""
    if not in_notebook():
        write(f"{words}\n")
        return
    from IPython.display import display

    display({"text/html": html(), "text/plain": words}, raw=True)  # type: ignore[no-untyped-call]


CAPTURED = ("name", "type", "size", "sent", "")


def show_captured(names: Iterable[CapturedName]) -> None:
    """Show the names that a cell needs."""
    show_table(CAPTURED, captured_rows(names), empty="the cell uses no names of the notebook")


def captured_rows(names: Iterable[CapturedName]) -> list[tuple[str, ...]]:
    """Return a row for each name that a cell needs: name, type, size, how it is sent, and why it cannot be sent."""
    rows: list[tuple[str, ...]] = []
    for name in names:
        shown = f"{name.name} (used by {name.via})" if name.via else name.name
        problem = ". ".join(part.rstrip(".") for part in (name.problem, name.advice) if part)
        rows.append((shown, name.type_name, size(name.size_bytes), name.travels, problem))
    return rows


def table_text(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return `rows` as text in aligned columns. Columns of numbers or sizes are aligned to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = _numeric(cells, len(headers))
    widths = [max(map(width_of, column)) for column in zip(headers, *cells, strict=True)]
    lines = []
    for row in [headers, ["─" * width for width in widths], *cells]:
        padded = [
            " " * (width - width_of(cell)) + cell if to_right else cell + " " * (width - width_of(cell))
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def table_html(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return `rows` as an HTML table with inline styles. All text is escaped."""
    return enclosed(bare_table(headers, rows))


def titled_html(
    title: str, alert: str, headers: Sequence[str], rows: Sequence[Sequence[str]], notes: Iterable[str] = ()
) -> str:
    """Return a table as HTML, with a title, a warning (unless `alert` is ''), and `notes` below the table."""
    below = "".join(map(note, notes))
    return enclosed(f"<div><b>{text(title)}</b></div>{warning(alert)}{bare_table(headers, rows)}{below}")


def bare_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], note: str = "", folded: Sequence[str] = ()
) -> str:
    """Return `rows` as an HTML table without styles, which enclosed() adds later. `note` is the caption.

    If there is `folded` HTML, one piece for each row, the last cell of the row opens and shows it.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    return _table(headers, cells, _numeric(cells, len(headers)), note, folded)


def described(table: Table, note: str = "") -> str:
    """Return a described table as bare_table() does, with the first METRICS_SHOWN metrics; '' if it has no rows."""
    if not table.rows:
        return ""
    shown = expanded(table, METRICS_SHOWN)
    columns = []
    for at, column in enumerate(shown.columns):
        cells = [row[at] for row in shown.rows]
        most = column.most or CELL_CHARACTERS
        columns.append([_cell(written, most) for written in column_texts(column, cells)])
    right = [column.kind in RIGHT for column in shown.columns]
    return _table([column.title for column in shown.columns], list(zip(*columns, strict=True)), right, note)


def _table(
    headers: Sequence[str],
    cells: Sequence[Sequence[str]],
    right: Sequence[bool],
    note: str,
    folded: Sequence[str] = (),
) -> str:
    marks = [' class="sr-n" align="right"' if number else ' align="left"' for number in right]

    def line(tag: str, row: Sequence[str]) -> str:
        # An empty cell of the header line becomes a <td>, since it does not name its column.
        tags = [tag if cell else "td" for cell in row]
        return "".join(f"<{tag}{mark}>{text(cell)}</{tag}>" for tag, cell, mark in zip(tags, row, marks, strict=False))

    def folding(row: Sequence[str], inside: str) -> str:
        summary = f"<summary>{text(row[-1]) or 'cell'}</summary>"
        return f"<tr>{line('td', row[:-1])}<td><details>{summary}{inside}</details></td></tr>"

    head, body = line("th", headers), "".join(f"<tr>{line('td', row)}</tr>" for row in cells)
    body = "".join(map(folding, cells, folded)) if folded else body
    caption = f"<caption><small>{text(note)}</small></caption>" if note else ""
    return f'<table class="sr-table">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(value: str, most: int = CELL_CHARACTERS) -> str:
    shown = " ".join(plain(part) for part in value.splitlines())
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _numeric(rows: Sequence[Sequence[str]], columns: int) -> list[bool]:
    """Return for each column whether it has only numbers, sizes or durations. Empty cells are ignored."""
    filled = [[row[column] for row in rows if row[column]] for column in range(columns)]
    return [bool(cells) and all(_AMOUNT.fullmatch(cell) for cell in cells) for cells in filled]


def width_of(shown: str) -> int:
    """Return the width of a string in columns of a terminal.

    A wide East Asian character takes two columns, and an accent takes none.
    """
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in shown
    )
