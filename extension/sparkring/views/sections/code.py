"""The section on the code: the cell, its options, its environment, and the names that were sent with it."""

from __future__ import annotations

from sparkring.history import describe, reading
from sparkring.history.describe import first_line
from sparkring.history.events import CAPTURED_KEPT
from sparkring.history.record import RunRecord
from sparkring.views.markup import details, scrolled, text
from sparkring.views.python_code import coloured
from sparkring.views.sections import Form
from sparkring.views.sections.log import LINE_CHARACTERS, numbered
from sparkring.views.tables import CAPTURED, bare_table, captured_rows

CODE_LINES = 400
COLOURS_BYTES = 16_000  # in the saved view, a cell whose colours need more space than this has no colours
NAMES_FINAL = 30


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return the cell, the captured names, and facts about the run.

    The lines of the cell are numbered, and the line that failed is marked.
    """
    cell, rest = _cell(record, form), _captured(record, form) + _facts(record, now, form)
    if form != "tab":
        return details("The cell", scrolled(cell, "the cell")) + details("Options and environment", rest)
    return f'<div class="sr-cell">{cell}</div>{rest}' if cell or rest else ""


def _cell(record: RunRecord, form: Form) -> str:
    code = [line[:LINE_CHARACTERS] for line in record.code.rstrip().splitlines()[:CODE_LINES]]
    failed, plain = describe.failed_line(record), list(map(text, code))
    lines = list(coloured("\n".join(code), inline=form != "tab"))
    if len(lines) != len(code) or (form != "tab" and len("".join(lines)) - len("".join(plain)) > COLOURS_BYTES):
        lines = plain
    if 0 < failed <= len(lines):
        lines[failed - 1] = plain[failed - 1]  # colours would be hard to read on the background that marks the line
    return numbered([*enumerate(lines, 1)], failed)


def _captured(record: RunRecord, form: Form) -> str:
    names = record.captured[: NAMES_FINAL if form == "final" else CAPTURED_KEPT]
    if not names:
        return ""
    some = len(names) < len(record.captured) or len(names) == CAPTURED_KEPT
    note = "sent from the notebook" + (f": the first {len(names)}" if some else "")
    note += "; names that the ranks already had were not sent again" if record.warm else ""
    return bare_table(CAPTURED, captured_rows(names), note)


def _facts(record: RunRecord, now: float, form: Form) -> str:
    """Return a line for each fact. The form "final" does not list data sets, because the section `shards` does."""
    sets = reading.data_sets(record, now)[-reading.NAMED :] if form == "tab" else []
    facts = [("data", text(first_line(reading.data_words(data_set), 600))) for data_set in sets]
    versions = " · ".join(f"{name} {version}" for name, version in record.versions)
    facts += [("versions", text(first_line(versions, 600))), ("logs", text(first_line(record.log_folder, 600)))]
    if record.metrics and record.run_id:
        facts.append(("TensorBoard", f"<code>%runs {text(record.run_id)} --tensorboard</code>"))
    return "".join(f'<div class="sr-fact"><small>{name}</small> {words}</div>' for name, words in facts if words)
