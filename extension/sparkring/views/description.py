"""What a tab shows, as plain data, so that it is described only once.

A section (views/sections) makes the description from a run's record. tables.py and figure.py draw it as HTML that a
notebook saves. live.py sends its values to the page, where the panel's script draws it. The page knows the columns and
colours from panel/src/constants.js (page_constants.py). column_texts() has its twin, writer(), in panel/src/words.js.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkring.history import describe

# The kinds of cells: `whole` is a duration in whole seconds, `percent` a fraction, `counted` a number of things,
# `state` a state with its sign, `check` a mark or nothing. `numbers` and `values` map names to numbers, or to
# numbers and texts, which get a column each.
Kind = Literal[
    "text", "count", "number", "numbers", "values", "duration", "whole", "percent", "counted", "state", "check"
]
RIGHT = ("count", "number", "numbers", "duration", "whole")  # the kinds of cells that are aligned to the right
# None is a missing value. Numbers that are not finite are texts, since JSON has none: nan, inf, -inf.
Cell = str | int | float | bool | None | Mapping[str, "float | str"]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    The column is shown if it has at least `needs` different values. `width` is its least width in pixels in the page,
    and `share` its share of the width that remains. HTML shows at most `most` characters of a cell; 0 means all.
    `signs` are those of the states, and `noun` is what is counted.
    """

    name: str
    title: str
    kind: Kind = "text"
    needs: int = 0
    width: int = 80
    share: float = 0
    most: int = 0
    signs: Mapping[str, str] = field(default_factory=dict)
    noun: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells, one cell for each column."""

    columns: tuple[Column, ...]
    rows: Sequence[tuple[Cell, ...]]

    def column(self, name: str) -> list[Any]:
        """Return the cells of a column."""
        at = [column.name for column in self.columns].index(name)
        return [row[at] for row in self.rows]


@dataclass(frozen=True)
class Moment:
    """A point in time, in Unix seconds, which is shown as the time since then: `12 s ago`."""

    time: float


Figures = tuple[tuple[str, "str | Moment"], ...]  # names and values


@dataclass(frozen=True)
class BarPart:
    """A part of each bar, which a chart shows if `shown`.

    `all_s` is the sum over all bars that there have been, in seconds, and `share` is its share of the whole.
    """

    name: str
    colour: str
    shown: bool
    share: str
    all_s: float


@dataclass(frozen=True)
class Bars:
    """Stacked bars, one for each row of `table`, with a column for each part. The first column names the bars.

    There is room for at least `slots` bars, so that few bars are narrow. `marked` is the name of a column, and the cell
    of the rows whose bars are marked, as `legend` explains.
    """

    title: str
    table: Table
    parts: tuple[BarPart, ...]
    slots: int
    marked: tuple[str, Cell]
    legend: str


def bars_top(heights: Sequence[float]) -> float:
    """Return the height of a chart of these bars. If a few bars are far higher than the others, they are cut.

    Their heights are written on them.
    """
    ordered = sorted(heights)
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    return 1.5 * usual if 0 < 3 * usual < ordered[-1] else ordered[-1]


def worded(column: Column, cell: Any, number: Callable[[float], str] = describe.number) -> str:
    """Return a cell of a column as text. `number` writes the numbers of the column."""
    if cell is None:
        return ""
    match column.kind:
        case "count":
            return f"{cell:,}"
        case "number":
            return number(float(cell))
        case "duration":
            return describe.duration(float(cell))
        case "whole":
            return describe.duration(int(cell))
        case "percent":
            return describe.percent(cell)
        case "counted":
            return describe.counted(cell, column.noun)
        case "state":
            return f"{column.signs[cell]} {cell}"
        case "check":
            return "✓" if cell else ""
    return str(cell)


def column_texts(column: Column, cells: Sequence[Any]) -> list[str]:
    """Return the cells of a column as texts. All its numbers have the same form."""
    known = [float(cell) for cell in cells if cell is not None] if column.kind == "number" else []
    number = describe.numbers(known)
    return [worded(column, cell, number) for cell in cells]


def fact(column: Column, cell: Cell, noun: str = "step") -> str:
    """Return one cell in words, for places without a table: the column's title with the cell in it; '' for no cell.

    The title may contain `{noun}` or `{nouns}`, which become what a step is called.
    """
    written = worded(column, cell)
    title = column.title.replace("{noun}", noun).replace("{nouns}", describe.plural(noun))
    return title.replace("{}", written) if written else ""


def expanded(table: Table, most: int) -> Table:
    """Return the table as it is shown: without columns that say nothing, and with at most `most` columns of numbers."""
    columns: list[Column] = []
    cells: list[Sequence[Cell]] = []
    for at, column in enumerate(table.columns):
        values = [row[at] for row in table.rows]
        if column.kind in ("numbers", "values"):
            mappings = [value if isinstance(value, Mapping) else {} for value in values]
            names = list(dict.fromkeys(name for mapping in mappings for name in mapping))
            for name in names[:most] if column.kind == "numbers" else names:
                some = [mapping.get(name) for mapping in mappings]
                is_text = column.kind == "values" and any(isinstance(value, str) for value in some)
                columns.append(Column(name, name, "text" if is_text else "number"))
                cells.append(some)
        elif (
            len({value for value in values if value != "" and value is not None and value is not False}) >= column.needs
        ):
            columns.append(column)
            cells.append(values)
    return Table(tuple(columns), list(zip(*cells, strict=True)))
