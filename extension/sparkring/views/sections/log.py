"""What the ranks printed last, together and by rank."""

from __future__ import annotations

from collections.abc import Sequence

from sparkring.record import LogLine, RankRecord, RunRecord
from sparkring.views import lines, summary
from sparkring.views.lines import Shared
from sparkring.views.markup import RANK_COLOURS, details, log_text, text
from sparkring.views.sections import Form
from sparkring.views.summary import counted

RANK_BYTES = 2_000  # less of a rank's log is not worth the room
LOG_LINES = 30
LINE_CHARACTERS = 600
_STREAM_SIGNS = {"stdout": ("", "│"), "stderr": ("e", "!"), "message": ("m", "»")}


def html(record: RunRecord, now: float, form: Form) -> str:
    """The last lines; while it runs, those too that have not ended yet."""
    final, seen = form == "final", lines.visible(record.recent, record.logs)
    last = [line for line in seen[-LOG_LINES * 20 :] if not lines.is_noise(line)]
    found = lines.folded(last)[-LOG_LINES:] + lines.folded([] if final else lines.pending(record))
    if not found:
        return noise_html(seen)
    return f'<div class="sr-log{" sr-done" if final else ""}">{pre(found)}</div>{noise_html(seen)}'


def noise_html(seen: Sequence[LogLine]) -> str:
    """What TensorFlow greets everybody with, folded away."""
    noise = [line for line in seen if lines.is_noise(line)]
    return details(f"TensorFlow's start-up ({counted(len(noise), 'line')})", pre(lines.folded(noise[-100:])))


def pre(found: Sequence[Shared]) -> str:
    """Lines below each other, each with the ranks that printed it."""
    tags = [summary.rank_numbers(line.ranks) for line in found]
    width = min(12, max(map(len, tags), default=0))
    return block([line_html(shared.line, tag.rjust(width)) for shared, tag in zip(found, tags, strict=True)], width)


def block(shown: Sequence[str], width: int) -> str:
    """Lines below each other; what does not fit on one goes on behind the tags, `width` characters in."""
    return f'<pre style="--sr-tag:{width + 3}ch">{"".join(shown)}</pre>' if shown else ""


def line_html(line: LogLine, tag: str) -> str:
    """One line for block(), behind a tag if there is one."""
    name, sign = _STREAM_SIGNS[line.stream]
    colour = RANK_COLOURS[line.rank % len(RANK_COLOURS)]
    said = line.text if len(line.text) <= LINE_CHARACTERS else line.text[:LINE_CHARACTERS] + " …"
    shape = f' class="{name}" title="{line.stream}"' if name else ""
    tagged = f'<b style="color:{colour}">{tag}</b> ' if tag else ""
    return f"<span>{tagged}<b{shape}>{sign}</b> {log_text(said)}\n</span>"


def by_rank_html(record: RunRecord, budget: int) -> str:
    """The last lines of each rank, as many as fit, those of the rank that failed before others."""
    if record.logs == "all" and record.recent_count <= LOG_LINES and not any(map(lines.is_noise, record.recent)):
        return ""  # the log above has them all
    talkative = [rank for rank in record.ranks if rank.tail]
    talkative.sort(key=lambda rank: (rank.rank != record.failed_rank, rank.rank))
    left_out: list[int] = []
    parts = []
    for count, rank in enumerate(talkative):
        fair = max(RANK_BYTES, budget // (len(talkative) - count) - LINE_CHARACTERS)
        part = _log_of(rank, fair) if budget > RANK_BYTES + LINE_CHARACTERS else ""
        if not part or len(part) > budget:
            left_out.append(rank.rank)
            continue
        budget -= len(part)
        parts.append((rank.rank, part))
    if not parts:
        return ""
    path = summary.log_path(record)
    notes = [f"no room here for {summary.rank_list(left_out)}"] if left_out else []
    notes += [f"whole: {path}"] if path else []
    note = f"<small>{text('; '.join(notes))}</small>" if notes else ""
    return details("Logs by rank", note + "".join(part for _, part in sorted(parts)))


def _log_of(rank: RankRecord, budget: int) -> str:
    shown: list[str] = []
    for line in reversed(lines.in_lines(rank.tail)):
        shown.append(line_html(line, ""))
        budget -= len(shown[-1])
        if budget < 0:
            break
    whole = counted(rank.line_count, "line")
    note = f"the last of {whole}" if len(shown) < rank.line_count else whole
    return details(f"rank {rank.rank}: {note}", block(shown[::-1], -1))
