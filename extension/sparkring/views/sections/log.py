"""The section on output: the last lines that the ranks printed, together and by rank."""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.history import describe, lines
from sparkring.history.describe import counted
from sparkring.history.lines import Shared
from sparkring.history.record import LogLine, RankRecord, RunRecord
from sparkring.views.markup import (
    BLUE,
    RANK_COLOURS,
    details,
    enclosed,
    log_text,
    scrolled,
    size_bytes,
    text,
    tint,
)
from sparkring.views.sections import Form

RANK_BYTES = 2_000  # if less space than this is left for the log of a rank, the log is left out
LOG_LINES, LOG_BYTES = 30, 90_000
LINE_CHARACTERS = 600
LINE_BYTES = 90  # an estimate of how many bytes of HTML block() adds to a line
_SIGNS = {
    "stdout": "│",
    "stderr": '<span title="stderr">┆</span>',
    "message": f'<b style="{tint(BLUE)}" title="message">»</b>',
}
_CHARACTER = 0.6  # the width of a fixed-width character in em; some sanitisers remove widths in the unit ch


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return the last lines that the ranks printed. During the run, these include incomplete lines."""
    final, seen = form == "final", lines.visible(record.recent, record.logs)
    some = seen[-LOG_LINES * max(10, record.size) :]  # each rank may have printed each line
    last = [line for line in some if not lines.is_noise(line)]
    shown = lines.folded(last)[-LOG_LINES:] + lines.folded([] if final else lines.pending(record))
    return box(fitting(shown, LOG_BYTES), final=final) + noise_html(seen)


def box(shown: str, *, final: bool) -> str:
    """Return lines in a box that is scrolled to the end; '' if there are no lines."""
    look = "sr-log sr-done" if final else "sr-log"
    box = f'<div class="{look}" role="log" tabindex="0" aria-label="output of the ranks">{shown}</div>'
    return box if shown else ""


def noise_html(seen: Sequence[LogLine]) -> str:
    """Return the start-up messages of TensorFlow among the lines `seen`, in a collapsed element."""
    noise = [line for line in seen if lines.is_noise(line)]
    title = f"TensorFlow's start-up ({counted(len(noise), 'line')})"
    return details(title, scrolled(pre(lines.folded(noise[-100:])), title))


def fitting(shown: Sequence[Shared], budget: int) -> str:
    """Return the last lines that fit into `budget` bytes, but at least one. Lines are dropped by halves. See pre()."""
    while size_bytes(body := pre(shown)) > budget and shown[1:]:
        shown = shown[(len(shown) + 1) // 2 :]
    return body


def pre(shared: Sequence[Shared]) -> str:
    """Return the lines, one below the other. Each line begins with the numbers of the ranks that printed it."""
    tags = [describe.rank_numbers(line.ranks) for line in shared]
    width = min(12, max(map(len, tags), default=0))
    shown = []
    for entry, tag in zip(shared, tags, strict=True):
        colour = RANK_COLOURS[min(entry.ranks) % len(RANK_COLOURS)]  # of the lowest rank, even if another printed first
        tagged = f'<span style="{tint(colour)};user-select:none">{tag.rjust(width)}</span> '
        shown.append(tagged + line_html(entry.line))
    return block(shown, width)


def block(shown: Sequence[str], width: int) -> str:
    """Return the lines, one below the other. Each line begins with a tag of `width` characters, for example a rank.

    If a line is too long for the page, its continuation is indented, so that it does not appear below the tags.
    """
    behind = f"{_CHARACTER * (width + 3):.1f}em"
    begin = f'<span style="display:block;padding-left:{behind};text-indent:-{behind}">'
    lines_in = "".join(f"{begin}{line}\n</span>" for line in shown)
    return f"<pre>{lines_in}</pre>" if shown else ""


def numbered(code_lines: Sequence[tuple[int, str]], marked: int = 0) -> str:
    """Return numbered lines of code. Each line is HTML, and the line with the number `marked` is highlighted."""
    width = max((len(str(number)) for number, _ in code_lines), default=1)
    shown = []
    for number, code in code_lines:
        marked_code = f"<mark>{code}</mark>" if number == marked else code
        shown.append(f'<small style="user-select:none">{number:>{width}}</small>  {marked_code}')
    return block(shown, width - 1)


def line_html(line: LogLine) -> str:
    """Return the HTML of a line, without a tag, in the form that block() needs."""
    shown = line.text if len(line.text) <= LINE_CHARACTERS else line.text[:LINE_CHARACTERS] + " …"
    return f"{_SIGNS[line.stream]} {log_text(shown)}"


def by_rank_html(record: RunRecord, budget: int) -> str:
    """Return the last lines of each rank, in at most `budget` bytes. Space is first given to the failed rank."""
    if record.logs == "all" and record.recent_count <= LOG_LINES and not any(map(lines.is_noise, record.recent)):
        return ""  # html(), which is shown above, already has all lines
    talkative = [rank for rank in record.ranks if rank.tail]
    talkative.sort(key=lambda rank: (rank.rank != record.failed_rank, rank.rank))
    left_out: list[int] = []
    parts: dict[int, str] = {}
    for count, rank in enumerate(talkative):
        fair = max(RANK_BYTES, budget // (len(talkative) - count) - LINE_CHARACTERS)
        part = _log_of(rank, fair) if budget > RANK_BYTES + LINE_CHARACTERS else ""
        taken = size_bytes(enclosed(part))  # the size with inline styles, as the notebook saves it
        if part and taken <= budget:
            budget -= taken
            parts[rank.rank] = part
        else:
            left_out.append(rank.rank)
    if not parts:
        return ""
    path = describe.log_path(record)
    notes = [f"not shown for lack of space: {describe.rank_list(left_out)}"] if left_out else []
    notes += [f"whole logs: {path}"] if path else []
    note = f"<small>{text('; '.join(notes))}</small>" if notes else ""
    return details("Logs by rank", note + "".join(part for _, part in sorted(parts.items())))


def _log_of(rank: RankRecord, budget: int) -> str:
    shown: list[str] = []
    for line in reversed(lines.in_lines(rank.tail)):
        shown.append(line_html(line))
        budget -= size_bytes(shown[-1]) + LINE_BYTES
        if budget < 0:
            break
    whole = counted(rank.line_count, "line")
    note = f"the last of {whole}" if len(shown) < rank.line_count else whole
    title = f"rank {rank.rank}: {note}"
    return details(title, scrolled(block(shown[::-1], -1), title))
