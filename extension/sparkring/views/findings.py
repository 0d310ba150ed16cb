"""Shows what `%doctor` has found: a table for each section, and the number of problems above."""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.history.describe import counted
from sparkring.history.findings import Finding, Level, Section
from sparkring.history.lines import plain
from sparkring.views.markup import AMBER, GREEN, RED, enclosed, text, tint, warning
from sparkring.views.tables import show

MARKS: dict[Level, str] = {"ok": "✓", "note": "!", "problem": "✗"}
_WORDS: dict[Level, str] = {"ok": "OK", "note": "note", "problem": "problem"}  # what screen readers say
_COLOURS: dict[Level, str] = {"ok": GREEN, "note": AMBER, "problem": RED}


def show_findings(sections: Sequence[Section]) -> None:
    """Show the findings: as HTML in a notebook, as text elsewhere."""
    show(findings_text(sections), lambda: findings_html(sections))


def summary(sections: Sequence[Section]) -> str:
    """Say how many problems and notes there are: `1 problem, 2 notes`."""
    levels = [finding.level for section in sections for finding in section.findings]
    problems, notes = levels.count("problem"), levels.count("note")
    counts = [counted(problems, "problem")] * bool(problems) + [counted(notes, "note")] * bool(notes)
    return ", ".join(counts) or "no problems"


def findings_text(sections: Sequence[Section]) -> str:
    """Return the findings as text, with the advice below each of them."""
    lines = [summary(sections)]
    for section in sections:
        lines += ["", section.title]
        width = max((len(finding.topic) for finding in section.findings), default=0)
        for finding in section.findings:
            lines.append(f"  {MARKS[finding.level]} {plain(finding.topic).ljust(width)}  {plain(finding.what)}")
            if finding.advice:
                lines.append(f"    {' ' * width}  → {plain(finding.advice)}")
    return "\n".join(lines)


def findings_html(sections: Sequence[Section]) -> str:
    """Return the findings as HTML tables with inline styles. All text is escaped."""
    words = summary(sections)
    attention = any(finding.level != "ok" for section in sections for finding in section.findings)
    head = warning(words) if attention else f"<div><b>{text(words)}</b></div>"
    return enclosed(head + "".join(map(_table, sections)))


def _table(section: Section) -> str:
    rows = "".join(map(_row, section.findings))
    return f'<table class="sr-table"><caption><b>{text(section.title)}</b></caption><tbody>{rows}</tbody></table>'


def _row(finding: Finding) -> str:
    mark = f'<b role="img" aria-label="{_WORDS[finding.level]}" style="{tint(_COLOURS[finding.level])}">'
    advice = f"<br>→ {text(finding.advice)}" if finding.advice else ""
    return (
        f"<tr><td>{mark}{MARKS[finding.level]}</b></td><td>{text(finding.topic)}</td>"
        f"<td>{text(finding.what)}{advice}</td></tr>"
    )
