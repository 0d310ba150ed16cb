"""The table of saved runs that `%runs` shows: as text, as HTML that a notebook keeps, and as a message for the page."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparkring.errors import DataError, OptionsError
from sparkring.history import describe, metrics, reading, run_store
from sparkring.history.curves import mode_of
from sparkring.history.events import RunFinished, RunStarted
from sparkring.history.lines import plain
from sparkring.history.record import RunRecord
from sparkring.runtime.kernel import write
from sparkring.views.compare import parameters
from sparkring.views.description import RIGHT, Column, Table, column_texts, expanded
from sparkring.views.markup import enclosed, text
from sparkring.views.sections.log import block
from sparkring.views.tables import METRICS_SHOWN, bare_table, show, table_text

COLUMNS = (
    Column("run", "run"),
    Column("name", "name", most=60),
    Column("began", "began"),
    Column("time", "time", "duration"),
    Column("ranks", "ranks"),
    Column("parameters", "", "numbers"),
    Column("metrics", "", "numbers"),
    Column("data", "data", needs=1),
    Column("outcome", "outcome"),
    Column("message", "", needs=1, most=100),
)
UNFINISHED = "running, or its kernel was killed"
CODE_LINES, CODE_CHARACTERS = 40, 100
_DROPPED = ("data", "parameters", "message", "ranks", "metrics")  # what a narrow terminal does not show, in this order


class ListedRun(NamedTuple):
    """What a list shows of a run. `metrics` are the last means over the ranks. `ended` is 0 if there is no end."""

    run_id: str
    started: RunStarted
    ended: float
    outcome: str
    message: str
    data: Sequence[str]
    metrics: Mapping[str, float]

    @property
    def short_id(self) -> str:
        """The end of the id, which names the run in `%runs`, too."""
        return self.run_id.rpartition("_")[2]


def listed(in_progress: Mapping[str, RunRecord], most: int | None = None) -> list[ListedRun]:
    """Return the newest saved runs, or all of them, newest first.

    `in_progress` are the records of this notebook's background runs, by id.
    """
    runs = []
    for path in run_store.saved()[:most]:
        try:
            started, finished, data = run_store.first(path), run_store.last(path), run_store.data(path)
        except OSError:  # the run has been removed in the meantime, to make room for newer runs
            continue
        record = in_progress.get(path.name)
        if finished is None and record is not None:
            message, measured = describe.stream(record), metrics.means(record)
            runs.append(ListedRun(path.name, started, time.time(), "running", message, data, measured))
        else:
            end = finished or RunFinished(0.0, "interrupted")
            outcome = finished.outcome if finished else UNFINISHED
            runs.append(ListedRun(path.name, started, end.time, outcome, end.message, data, dict(end.measured)))
    return runs


def table_of(runs: Sequence[ListedRun]) -> Table:
    """Return the table. Parameters are shown if they differ between the runs."""
    own = [parameters(run.started.captured) for run in runs]
    names = dict.fromkeys(name for known in own for name in known)
    differing = [name for name in names if len({known.get(name) for known in own}) > 1]
    return Table(
        COLUMNS,
        [
            (
                run.short_id,
                describe.first_line(run.started.title),
                began(run.started.time),
                run.ended - run.started.time if run.ended and run.started.time else None,
                _ranks(run.started),
                {plain(name): _finite(known[name]) for name in differing if name in known},
                {plain(name): _finite(value) for name, value in run.metrics.items()},
                reading.named_shortly(run.data),
                run.outcome,
                describe.first_line(run.message),
            )
            for run, known in zip(runs, own, strict=True)
        ],
    )


def began(at: float) -> str:
    """Return when a run began: the time of day, and the day if it is not today."""
    if not at:
        return ""
    moment, now = time.localtime(at), time.localtime()
    if moment[:3] == now[:3]:
        return time.strftime("%H:%M:%S", moment)
    return time.strftime("%b %d %H:%M" if moment[0] == now[0] else "%Y-%m-%d %H:%M", moment)


def _ranks(started: RunStarted) -> str:
    """Return how many ranks a run has, and where: `4 local`, or `2 of 4 local` if it runs on some ranks of a gang."""
    part = len(set(started.ranks))
    return f"{f'{part} of ' if 0 < part < started.size else ''}{started.size} {started.where}"


def _finite(value: float) -> float | str:
    return float(value) if math.isfinite(value) else describe.number(value)


# ── Sorting and filtering ─────────────────────────────────────────────────────


def chosen(runs: Sequence[ListedRun], where: str, sort: str, *, reverse: bool) -> list[ListedRun]:
    """Return the runs that pass the filter `where`, by the column `sort`. Runs without a value there come last.

    Of a metric whose name says which values are better, these come first, and of times, the latest. Raise OptionsError
    if there is no such column, or the filter cannot be read.
    """
    shown = expanded(table_of(runs), len(runs) * 1000)
    cells: dict[str, list[Any]] = {}
    for at, column in enumerate(shown.columns):
        if column.title not in cells or column.kind == "number":  # a metric counts more than a parameter of this name
            cells[column.title] = _keys(shown, at, runs)
    cells.pop("", None)
    kept = _passing(cells, where) if where else list(range(len(runs)))
    if sort and sort not in cells:
        raise OptionsError(f"%runs --sort {sort}: no such column. The columns are {', '.join(cells)}.")
    if sort:
        high_first = (sort == "began" or mode_of(sort) == "max") != reverse
        with_value = sorted((at for at in kept if cells[sort][at] is not None), key=cells[sort].__getitem__)
        kept = [*(with_value[::-1] if high_first else with_value), *(at for at in kept if cells[sort][at] is None)]
    return [runs[at] for at in (kept if sort or not reverse else kept[::-1])]


def _keys(shown: Table, at: int, runs: Sequence[ListedRun]) -> list[Any]:
    """Return the cells of a column for sorting: numbers, or texts; None for no value."""
    column = shown.columns[at]
    if column.name == "began":
        return [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started.time)) for run in runs]
    cells = [row[at] for row in shown.rows]
    if column.kind in RIGHT:
        return [cell if isinstance(cell, float) else None for cell in cells]
    return [cell or None for cell in cells]


def _passing(cells: Mapping[str, Sequence[Any]], where: str) -> list[int]:
    import pyarrow as pa

    from sparkring.data.where import compile_where

    columns = {
        name: pa.array(values, pa.float64() if any(isinstance(value, float) for value in values) else pa.string())
        for name, values in cells.items()
    }
    rows = pa.table(columns)
    try:
        condition, _ = compile_where(where, rows.schema)
    except DataError as error:
        raise OptionsError(f"%runs --where: {error}") from error
    numbered = rows.append_column("", pa.array(range(len(rows))))
    passing: list[int] = numbered.filter(condition)[""].to_pylist() if condition is not None else [*range(len(rows))]
    return passing


# ── Showing ───────────────────────────────────────────────────────────────────


def show_runs(runs: Sequence[ListedRun], empty: str) -> None:
    """Show the table, or the sentence `empty` if there are no runs."""
    from sparkring.views.front_end import shown

    if not runs:
        write(f"{plain(empty)}\n")
    elif shown() == "live":
        from sparkring.views.panel import show_listing

        show_listing([message(runs)], html(runs), words(runs, math.inf))
    else:
        show(words(runs, shutil.get_terminal_size().columns), lambda: html(runs))


def words(runs: Sequence[ListedRun], width: float) -> str:
    """Return the table as text. If it is wider than `width`, it has fewer columns."""
    table = table_of(runs)
    for left_out in range(len(_DROPPED) + 1):
        names = _DROPPED[:left_out]
        headers, rows = _texts(table, names)
        written = table_text(headers, rows)
        if max(map(len, written.splitlines())) <= width:
            break
    return written


def html(runs: Sequence[ListedRun]) -> str:
    """Return the table as HTML. The last cell of each row opens, and shows the cell of the run and its parameters."""
    headers, rows = _texts(table_of(runs))
    has_message = headers[-1] == ""
    headers, rows = (headers, rows) if has_message else ((*headers, ""), [(*row, "") for row in rows])
    return enclosed(bare_table(headers, rows, folded=[_whole(run) for run in runs]))


def _texts(table: Table, without: Sequence[str] = ()) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    kept = [at for at, column in enumerate(table.columns) if column.name not in without]
    rows = [tuple(row[at] for at in kept) for row in table.rows]
    shown = expanded(Table(tuple(table.columns[at] for at in kept), rows), METRICS_SHOWN)
    columns = [
        [cell if len(cell) <= (column.most or len(cell)) else f"{cell[: column.most - 1]}…" for cell in cells]
        for at, column in enumerate(shown.columns)
        for cells in [column_texts(column, [row[at] for row in shown.rows])]
    ]
    return tuple(column.title for column in shown.columns), list(zip(*columns, strict=True))


def _whole(run: ListedRun) -> str:
    """Return what the row of a run shows when it is opened."""
    started = run.started
    own = parameters(started.captured)
    lines = [line[:CODE_CHARACTERS] for line in started.code.rstrip().splitlines()]
    more = [f"… {describe.counted(len(lines) - CODE_LINES, 'more line')}"] if lines[CODE_LINES:] else []
    facts = [
        ("run", run.run_id),
        ("parameters", describe.dotted(*(f"{name} {describe.number(value)}" for name, value in own.items()))),
        ("metrics", describe.dotted(*(f"{name} {describe.number(value)}" for name, value in run.metrics.items()))),
        ("data", ", ".join(run.data)),
        ("checkpoints", started.checkpoint_dir),
        ("versions", describe.dotted(*(f"{name} {version}" for name, version in started.versions))),
    ]
    shown = "".join(
        f'<div class="sr-fact"><small>{name}</small> {text(value[:600])}</div>' for name, value in facts if value
    )
    return f'<div class="sr-whole">{shown}{block([*map(text, lines[:CODE_LINES]), *more], 0)}</div>'


def message(runs: Sequence[ListedRun]) -> dict[str, Any]:
    """Return the table for the page: for each column, the texts, and numbers or texts to sort by."""
    shown = expanded(table_of(runs), METRICS_SHOWN)
    columns = [
        {
            "title": column.title,
            "right": column.kind in RIGHT,
            "most": column.most,
            "texts": column_texts(column, [row[at] for row in shown.rows]),
            "keys": _keys(shown, at, runs),
        }
        for at, column in enumerate(shown.columns)
    ]
    return {"kind": "table", "runs": [run.run_id for run in runs], "columns": columns}
