"""What data is read, and how far each rank is in it."""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.record import RunRecord
from sparkring.views import reading
from sparkring.views.markup import AMBER, BLUE, GREEN, details, text
from sparkring.views.sections import Form
from sparkring.views.summary import counted

_RIGHT = ' class="sr-n" align="right"'


def html(record: RunRecord, now: float, form: Form) -> str:
    """What data is read, and how far each rank is in it; of many data sets the last ones."""
    found = reading.data_sets(record, now)
    parts = []
    if len(found) > reading.NAMED:
        parts.append(f"<div><small>{counted(len(found) - reading.NAMED, 'data set')} before these</small></div>")
    for each in found[-reading.NAMED :]:
        told = [line for line in reading.lines(each) if line.rows]
        table = _read_table(told) if told else ""
        said = f"<small>{'read' if form == 'final' else 'reads'} {text(reading.data_words(each))}</small>"
        notes = reading.notes(each)
        wrong = f'<div><b style="color:{AMBER}">⚠ {text(notes)}</b></div>' if notes else ""
        if form == "final" and table:  # what is wrong stays in the open, the rest is for those who look for it
            parts.append(f"<div>{said}</div>{wrong}{details('Reading by rank', table)}")
        else:  # below, so that the table stays where it is
            parts.append(f"<div>{said}</div>{table}{wrong}")
    return "".join(parts)


def _read_table(told: Sequence[reading.Line]) -> str:
    head = f'<th{_RIGHT}>rank</th><th{_RIGHT}>epoch</th><th align="left">read</th>'
    head += "".join(f"<th{_RIGHT}>{name}</th>" for name in ("rows", "rows/s", "per s", "waits for data"))
    where = any(line.place for line in told)
    head += f'<th align="left">{"at" if where else ""}</th>'
    body = "".join(map(_read_row, told))
    return f'<table class="sr-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _read_row(line: reading.Line) -> str:
    bar = ""
    if line.fraction is not None:
        part = f"{100 * line.fraction:.0f}%"
        colour = {"starves": AMBER, "early": GREEN, "": BLUE}[line.mark]
        bar = f'<div class="sr-bar sr-read" title="{part}"><div style="width:{part};background:{colour}"></div></div>'
    numbers = (line.rows, line.rows_per_s, line.bytes_per_s, line.waiting)
    sign = f'<b style="color:{AMBER}" title="{text(line.notes)}">⚠</b> ' if line.notes else ""
    return (
        f"<tr><td{_RIGHT}>{reading.label(line)}</td><td{_RIGHT}>{line.epoch}</td><td>{bar}</td>"
        + "".join(f"<td{_RIGHT}>{text(value)}</td>" for value in numbers)
        + f"<td>{sign}{text(line.place)}</td></tr>"
    )
