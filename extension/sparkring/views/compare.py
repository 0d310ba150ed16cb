"""Compares two runs: outcomes, last metrics, curves, options and code."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from sparkring.history import describe, metrics, reading
from sparkring.history.curves import Curve, curve_axis, curves_of
from sparkring.history.lines import plain
from sparkring.history.record import RunRecord
from sparkring.views.charts import MOST
from sparkring.views.figure import figures
from sparkring.views.markup import GREEN, RED, enclosed, paragraph, text, tint
from sparkring.views.sections.log import block
from sparkring.views.tables import bare_table, show, table_text

NAMES = ("A", "B")
DIFF_LINES, CONTEXT_LINES = 200, 2
_OUTCOME_CHARACTERS = 120


def show_compared(first: RunRecord, second: RunRecord) -> None:
    """Show two runs side by side: with their curves in a notebook, otherwise as text."""
    show(_text(first, second), lambda: _html(first, second))


def facts(first: RunRecord, second: RunRecord) -> list[tuple[str, str, str]]:
    """Return rows that compare the runs: the run's name, outcome and time, and other facts only if they differ."""
    now = [describe.last_known(record) for record in (first, second)]
    both = [_facts(record, at) for record, at in zip((first, second), now, strict=True)]
    names = dict.fromkeys([*both[0], *both[1]])
    always = ("run", "outcome", "time")
    rows = [(name, both[0].get(name, ""), both[1].get(name, "")) for name in names]
    return [row for row in rows if row[0] in always or row[1] != row[2]]


def _facts(record: RunRecord, now: float) -> dict[str, str]:
    line, _, _ = record.code.partition("\n")
    data = "; ".join(reading.data_words(data_set) for data_set in reading.data_sets(record, now))
    rows = {
        "run": record.run_id,
        "title": record.title,
        "outcome": describe.first_line(describe.outcome(record), _OUTCOME_CHARACTERS),
        "time": describe.took(record, now),
        "where": describe.dotted(*describe.facts(record)),
        "line": line if line.startswith("%") else "",
        "data": data,
        "checkpoints": record.checkpoint_dir,
    }
    return rows | dict(record.versions)


def measured(first: RunRecord, second: RunRecord) -> list[tuple[str, str, str, str]]:
    """Return a row for each metric: the last mean in both runs, and the difference."""
    both = [metrics.table(record).last() for record in (first, second)]
    rows = []
    for name in dict.fromkeys([*both[0], *both[1]]):
        values = [last[name].mean if name in last else None for last in both]
        texts = ["" if value is None else describe.number(value) for value in values]
        change = "" if None in values else f"{values[1] - values[0]:+.4g}"  # type: ignore[operator] # neither is None
        rows.append((plain(name), texts[0], texts[1], change))
    return rows


def difference(first: RunRecord, second: RunRecord) -> list[str]:
    """Return the lines of the cells that differ, as a unified diff; [] if the cells are the same."""
    before, after = (record.code.rstrip().splitlines() for record in (first, second))
    lines = difflib.unified_diff(before, after, lineterm="", n=CONTEXT_LINES)
    return list(lines)[2:][:DIFF_LINES]  # the first two lines name files


def curves(first: RunRecord, second: RunRecord) -> list[tuple[str, list[Curve]]]:
    """Return the metrics for which both runs have curves, with both curves. The curves are means over the ranks."""
    both = []
    for record in (first, second):
        charts = curves_of(record, metrics.table(record))
        both.append({curve.name: curve for chart in charts for curve in chart})
    common = [name for name in both[0] if name in both[1]][:MOST]
    return [
        (name, [both[at][name]._replace(name=run, ranks={}, undone=()) for at, run in enumerate(NAMES)])
        for name in common
    ]


def _text(first: RunRecord, second: RunRecord) -> str:
    parts = [table_text(("", *NAMES), facts(first, second))]
    if rows := measured(first, second):
        parts.append(table_text(("metric", *NAMES, "B − A"), rows))
    parts.append("\n".join(map(plain, difference(first, second))) or "The cells are the same.")
    return "\n\n".join(parts)


def _html(first: RunRecord, second: RunRecord) -> str:
    rows = measured(first, second)
    parts = [
        bare_table(("", *NAMES), facts(first, second)),
        bare_table(("metric", *NAMES, "B − A"), rows) if rows else "",
        _pictures(first, second),
        _code(difference(first, second)),
    ]
    return enclosed("".join(parts))


def _pictures(first: RunRecord, second: RunRecord) -> str:
    pairs = curves(first, second)
    if not pairs:
        return ""
    axis, other = (curve_axis(record, metrics.table(record)) for record in (first, second))
    if axis != other:
        return paragraph(f"The curves are not drawn, because A has curves by {axis}, and B has curves by {other}.")
    drawn = "".join(f"<div><b>{text(name)}</b>{figures([both], axis)}</div>" for name, both in pairs)
    return f'<div class="sr-charts">{drawn}</div>'


def _code(lines: Sequence[str]) -> str:
    if not lines:
        return paragraph("The cells are the same.")
    looks = {"-": tint(RED), "+": tint(GREEN), "@": "opacity:.7"}
    shown = (
        f'<span style="{looks[line[0]]}">{text(line)}</span>' if line[0] in looks else text(line) for line in lines
    )
    return f"<div><small>The cell: lines of A in red, lines of B in green</small></div>{block([*shown], 0)}"
