"""Compares runs: outcomes, parameters, last metrics, curves, options and code."""

from __future__ import annotations

import difflib
import string
import time
from collections.abc import Sequence
from typing import Any

from sparkring.history import describe, metrics, reading
from sparkring.history.curves import Curve, curve_axis, curves_of, other_axes
from sparkring.history.events import CapturedName
from sparkring.history.lines import plain
from sparkring.history.record import RunRecord
from sparkring.views.charts import MOST, chart
from sparkring.views.figure import figures
from sparkring.views.markup import GREEN, RANK_COLOURS, RED, enclosed, paragraph, text, tint
from sparkring.views.sections.log import block
from sparkring.views.tables import bare_table, show, table_text

MOST_RUNS = len(RANK_COLOURS)  # each run has a colour of its own
NAMES = string.ascii_uppercase[:MOST_RUNS]
TIME = "time"  # the axis that all runs have, in seconds since the start
DIFF_LINES, CONTEXT_LINES = 200, 2
_OUTCOME_CHARACTERS = 120
_ALWAYS = ("run", "name", "outcome", "time")


def show_compared(records: Sequence[RunRecord]) -> None:
    """Show runs side by side: with their curves in a notebook, otherwise as text."""
    from sparkring.views.front_end import shown

    if shown() == "live":
        from sparkring.views.panel import show_listing

        show_listing([message(records)], html(records), words(records))
    else:
        show(words(records), lambda: html(records))


def facts(records: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Return rows that compare the runs: the run's id, name, outcome and time, and other facts only if they differ."""
    by_run = [_facts(record, describe.last_known(record)) for record in records]
    names = dict.fromkeys(name for known in by_run for name in known)
    rows = [(name, *(known.get(name, "") for known in by_run)) for name in names]
    return [row for row in rows if row[0] in _ALWAYS or len(set(row[1:])) > 1]


def _facts(record: RunRecord, now: float) -> dict[str, str]:
    line, _, _ = record.code.partition("\n")
    data = "; ".join(reading.data_words(data_set) for data_set in reading.data_sets(record, now))
    rows = {
        "run": record.run_id,
        "name": describe.first_line(record.title, _OUTCOME_CHARACTERS),
        "outcome": describe.first_line(describe.outcome(record), _OUTCOME_CHARACTERS),
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started)) if record.started else "",
        "time": describe.took(record, now),
        **{name: describe.number(value) for name, value in parameters(record.captured).items()},
        "time went": describe.share_words(rank.spent for rank in record.taking_part if rank.spent is not None),
        "verdict": describe.verdict_words(record),
        "where": describe.dotted(*describe.facts(record)),
        "line": line if line.startswith("%") else "",
        "data": data,
        "checkpoints": record.checkpoint_dir,
    }
    return rows | dict(record.versions)


def parameters(captured: Sequence[CapturedName]) -> dict[str, float]:
    """Return the numbers that a cell has read from the notebook: `lr`, or `config.lr` if it is in a dict."""
    return {
        f"{name.name}.{key}" if key else name.name: value
        for name in captured
        if not name.via
        for key, value in name.numbers
    }


def measured(records: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Return a row for each metric: the last mean in each run and, of two runs, the difference."""
    by_run = [metrics.means(record) for record in records]
    rows = []
    for name in dict.fromkeys(name for means in by_run for name in means):
        values = [means.get(name) for means in by_run]
        texts = ["" if value is None else describe.number(value) for value in values]
        if len(values) == 2:
            first, second = values
            texts.append("" if first is None or second is None else f"{second - first:+.4g}")
        rows.append((plain(name), *texts))
    return rows


def difference(first: RunRecord, second: RunRecord) -> list[str]:
    """Return the lines of the cells that differ, as a unified diff; [] if the cells are the same."""
    before, after = (record.code.rstrip().splitlines() for record in (first, second))
    lines = difflib.unified_diff(before, after, lineterm="", n=CONTEXT_LINES)
    return list(lines)[2:][:DIFF_LINES]  # the first two lines name files


def curves(records: Sequence[RunRecord]) -> dict[str, list[tuple[str, list[Curve]]]]:
    """Return the curves of the metrics that at least two runs have, by what the horizontal axis counts.

    The axes are those that all runs with curves share, and TIME. The curves are means over the ranks.
    """
    axes: list[dict[str, tuple[float, float]]] = []
    by_run: list[tuple[str, float, dict[str, Curve]]] = []
    for run, record in zip(NAMES, records, strict=False):
        table = metrics.table(record)
        if drawn := {curve.name: curve for together in curves_of(record, table) for curve in together}:
            axes.append({curve_axis(record, table): (0.0, 1.0), **other_axes(record, table)})
            by_run.append((run, record.started, drawn))
    names = dict.fromkeys(name for *_, drawn in by_run for name in drawn)
    common = [name for name in names if sum(name in drawn for *_, drawn in by_run) > 1][:MOST]
    if not common:
        return {}

    def along(axis: str, at: int, name: str) -> Curve:
        run, started, drawn = by_run[at]
        offset, factor = axes[at].get(axis, (0.0, 1.0))
        times = [point.time - started for point in drawn[name].points]
        xs = times if axis == TIME else [offset + factor * point.x for point in drawn[name].points]
        points = tuple(point._replace(x=x) for point, x in zip(drawn[name].points, xs, strict=True))
        by_x = {point.x: x for point, x in zip(drawn[name].points, xs, strict=True)}
        best = drawn[name].best
        best = None if best is None or best[0] not in by_x else (by_x[best[0]], best[1])
        return Curve(f"{run} {name}", points, drawn[name].last, best=best)

    shared = [axis for axis in axes[0] if all(axis in own for own in axes)]
    runs = range(len(by_run))
    return {
        axis: [(name, [along(axis, at, name) for at in runs if name in by_run[at][2]]) for name in common]
        for axis in (*shared, TIME)
    }


def message(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the comparison for the page: HTML, and for each axis the curves, in the form of charts.charts()."""
    charts = {}
    for axis, drawn in curves(records).items():
        made = [chart(together, axis, 0.0) for _, together in drawn]
        # Runs reach the same step at different times, so a chart has times only if they are its axis.
        made = [{**one, "time": one["x"] if axis == TIME else None} for one in made]
        charts[axis] = {"axis": axis, "axes": {}, "legend": "", "restarts": [], "checkpoints": [], "charts": made}
    return {"kind": "compared", "html": enclosed(_tables(records) + _code(records)), "charts": charts}


def words(records: Sequence[RunRecord]) -> str:
    """Return the comparison as text for a terminal."""
    names = NAMES[: len(records)]
    parts = [table_text(("", *names), facts(records))]
    if rows := measured(records):
        parts.append(table_text(_measured_headers(records), rows))
    for name, lines in _differences(records):
        head = [f"The cell of {name}, compared with that of A:"] if name and names[2:] else []
        parts.append("\n".join([*head, *map(plain, lines)]))
    return "\n\n".join(parts)


def html(records: Sequence[RunRecord]) -> str:
    """Return the comparison as HTML that a notebook keeps, with the curves as pictures."""
    return enclosed(_tables(records) + _pictures(records) + _code(records))


def _measured_headers(records: Sequence[RunRecord]) -> tuple[str, ...]:
    return ("metric", *NAMES[: len(records)], *(["B − A"] if len(records) == 2 else []))


def _tables(records: Sequence[RunRecord]) -> str:
    rows = measured(records)
    return bare_table(("", *NAMES[: len(records)]), facts(records)) + (
        bare_table(_measured_headers(records), rows) if rows else ""
    )


def _pictures(records: Sequence[RunRecord]) -> str:
    by_axis = curves(records)
    if not by_axis:
        return ""
    axis, drawn = next(iter(by_axis.items()))
    label = "seconds" if axis == TIME else axis
    pictures = "".join(f"<div><b>{text(name)}</b>{figures([together], label)}</div>" for name, together in drawn)
    return f'<div class="sr-charts">{pictures}</div>'


def _differences(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the name of each run whose cell differs from that of run A, and the diff, or a line that there is none."""
    diffs = [(name, difference(records[0], record)) for name, record in zip(NAMES[1:], records[1:], strict=False)]
    same = "The cells are the same." if len(records) == 2 else "All cells are the same."
    return [(name, lines) for name, lines in diffs if lines] or [("", [same])]


def _code(records: Sequence[RunRecord]) -> str:
    parts = []
    looks = {"-": tint(RED), "+": tint(GREEN), "@": "opacity:.7"}
    for name, lines in _differences(records):
        if not name:
            return paragraph(lines[0])
        shown = (
            f'<span style="{looks[line[0]]}">{text(line)}</span>' if line[0] in looks else text(line) for line in lines
        )
        caption = f"The cell: lines of A in red, lines of {name} in green"
        parts.append(f"<div><small>{caption}</small></div>{block([*shown], 0)}")
    return "".join(parts)
