"""Explains why a run failed, and why it was not restarted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from sparkring.history.describe.progress import outcome
from sparkring.history.describe.run import code_line, whole_log
from sparkring.history.describe.text import first_line, plain_lines, rank_list, rank_numbers
from sparkring.history.events import CodeFrame, Failure, SourceLine
from sparkring.history.lines import is_noise
from sparkring.history.record import LogLine, RankRecord, RunRecord, as_shown
from sparkring.history.stacks import CELL_NAME, EARLIER_CELL, cell_line

LAST_LINES = 20
CONTEXT_LINES = 2
_FOLLOWERS_NAMED = 3  # at most this many different secondary failures are named; "…" stands for the others


class Explanation(NamedTuple):
    """What ended a run, in parts. A part that does not apply is '' or ().

    `summary` names the rank and its host, and says what happened. `place` is the line that was running, in the cell or
    in a script that the cell runs. `source` holds this line and the lines around it, and `line` is its number.
    `callers` lists the places from which the line was called. `followers` names the ranks that failed afterwards.
    `last_lines` holds the last lines that the rank printed, without its traceback. `log` says where its whole log is.
    """

    rank: int
    summary: str
    place: str = ""
    source: tuple[SourceLine, ...] = ()
    line: int = 0
    callers: tuple[str, ...] = ()
    advice: str = ""
    followers: str = ""
    last_lines: tuple[str, ...] = ()
    log: str = ""


def explanation(record: RunRecord) -> Explanation | None:
    """Explain what ended the run. Return None if the run did not end because a rank failed."""
    if record.failed_rank is None or record.failure is None:
        return None
    rank, failure = record.ranks[record.failed_rank], record.failure
    host = f" on {rank.host}" if rank.host else ""
    details = Explanation(rank.rank, f"rank {rank.rank}{host} failed: {failure.summary}")._replace(
        advice=failure.advice,
        followers=_followers(record),
        last_lines=tuple(_last_lines(rank, failure)),
        log=whole_log(record, rank.rank),
    )
    return _in_the_cell(details, record, rank, failure)


def explain_failure(record: RunRecord, *, brief: bool = False) -> str:
    """Explain the failure that ended the run. If no rank failed, return outcome().

    The text names the rank and its host, quotes the line of the cell, gives advice, and names secondary failures. It
    ends with the rank's last lines and the path of its log. With `brief`, it leaves out what the panel shows, too: the
    code, the callers, secondary failures and lines.
    """
    details = explanation(record)
    if details is None:
        return outcome(record)
    if brief:
        details = details._replace(source=(), callers=(), followers="", last_lines=())
    width = max((len(str(line.number)) for line in details.source), default=1)
    code = [
        f"{'→' if line.number == details.line else ' '} {line.number:>{width}}  {line.text}".rstrip()
        for line in details.source
    ]
    where = [f"{details.place}:" if code or details.callers else details.place] if details.place else []
    last = [f"Last lines of rank {details.rank}:", *(f"  {line}".rstrip() for line in details.last_lines)]
    parts = [
        details.summary,
        "\n".join([*where, *code, *(f"  {caller}" for caller in details.callers)]),
        details.advice,
        details.followers,
        "\n".join(last) if details.last_lines else "",
        f"Whole log: {details.log}" if details.log else "",
    ]
    return plain_lines("\n\n".join(filter(None, parts)))


def failed_line(record: RunRecord) -> int:
    """Return the number of the line on which the cell failed; 0 if the line is not known."""
    if record.failed_rank is None or record.failure is None:
        return 0
    numbers = [frame.line for frame in record.failure.frames if frame.filename == CELL_NAME]
    return numbers[-1] if numbers else _line_of_crash(record.ranks[record.failed_rank])


def _in_the_cell(details: Explanation, record: RunRecord, rank: RankRecord, failure: Failure) -> Explanation:
    """Add the innermost line that was running in the cell, or in a script that the cell runs, and its callers.

    If there is no such line, name only the innermost frame of the failure, if the failure has frames.
    """
    in_cell = [frame for frame in failure.frames if frame.in_cell or frame.source]
    if not in_cell:
        line = _line_of_crash(rank)
        if not line:
            return details._replace(place=_place(failure.frames[-1])) if failure.frames else details
        in_cell = [CodeFrame(CELL_NAME, line, "", in_cell=True)]
    frame = in_cell[-1]
    callers = []
    if failure.frames and failure.frames[-1] is not frame:
        callers.append(f"raised in {_place(failure.frames[-1])}")
    for caller in reversed(in_cell[:-1][-5:]):
        text = _line_text(record, caller).strip()
        callers.append(f"called from {_place(caller)}" + (f": {text}" if text else ""))
    source = _source(record, frame)
    return details._replace(place=_place(frame), source=source, line=frame.line, callers=tuple(callers))


def _place(frame: CodeFrame) -> str:
    function = f", in {frame.function}" if frame.function not in ("", "<module>") else ""
    if frame.filename == CELL_NAME:
        return f"cell line {frame.line}{function}"
    if frame.in_cell:
        # Frames of earlier cells have the file name EARLIER_CELL. Other frames may belong to the cell that calls run().
        which = "an earlier" if frame.filename == EARLIER_CELL else "a notebook"
        return f"line {frame.line} of {which} cell{function}"
    return f"{'/'.join(frame.filename.rsplit('/', 3)[-3:])}:{frame.line}{function}"


def _source(record: RunRecord, frame: CodeFrame) -> tuple[SourceLine, ...]:
    if frame.source or frame.filename != CELL_NAME:
        return frame.source
    code = record.code.splitlines()
    near = range(max(1, frame.line - CONTEXT_LINES), min(len(code), frame.line + CONTEXT_LINES) + 1)
    return tuple(SourceLine(line, code[line - 1]) for line in near)


def _line_text(record: RunRecord, frame: CodeFrame) -> str:
    # Prefer the text of the cell as the user wrote it. In the rank's copy, IPython has already translated the lines
    # that begin with `%` or `!` to Python.
    if frame.filename == CELL_NAME and (text := code_line(record, frame.line)):
        return text
    return next((line.text for line in frame.source if line.number == frame.line), "")


def _line_of_crash(rank: RankRecord) -> int:
    """Return the line of the cell in the stack that Python printed to stderr when it crashed; 0 if there is none."""
    texts = [line.text for line in rank.tail if line.stream == "stderr"]
    begin = max((at for at, text in enumerate(texts) if text.startswith("Fatal Python error")), default=len(texts))
    return cell_line("\n".join(texts[begin:]))


def _followers(record: RunRecord) -> str:
    """Return one line about the other ranks that failed, besides the rank that ended the run; '' if there are none."""
    by_summary: dict[str, list[int]] = {}
    for rank in record.ranks:
        if rank.failure is not None and rank.rank != record.failed_rank:
            by_summary.setdefault(first_line(rank.failure.summary, 100), []).append(rank.rank)
    if not by_summary:
        return ""
    kinds = sorted(by_summary.items(), key=lambda kind: -len(kind[1]))
    if len(kinds) == 1:
        return f"{rank_list(kinds[0][1])} then failed too: {kinds[0][0]}"
    every = [rank for ranks in by_summary.values() for rank in ranks]
    named = "; ".join(f"{summary} ({rank_numbers(ranks)})" for summary, ranks in kinds[:_FOLLOWERS_NAMED])
    return f"{rank_list(every)} then failed too: {named}{'; …' if len(kinds) > _FOLLOWERS_NAMED else ''}"


def _last_lines(rank: RankRecord, failure: Failure) -> list[str]:
    lines = [line.text for line in without_traceback(rank.lines_with_partial(), failure) if not is_noise(line)]
    return lines[-LAST_LINES:] if any(line.strip() for line in lines) else []


def without_traceback(lines: Sequence[LogLine], failure: Failure) -> list[LogLine]:
    """Return `lines` without the traceback of `failure`, if the rank has printed this traceback."""
    wanted = [as_shown(line.encode("utf-8", "backslashreplace")) for line in failure.traceback.splitlines()]
    at = [index for index, line in enumerate(lines) if line.stream == "stderr"]
    # Compare from the end of the traceback, because its beginning may be missing. Other lines may follow the traceback.
    for end in range(len(at) - 1, -1, -1):
        if wanted and lines[at[end]].text == wanted[-1]:
            length = 0
            while length < min(len(wanted), end + 1) and lines[at[end - length]].text == wanted[-1 - length]:
                length += 1
            dropped = set(at[end - length + 1 : end + 1])
            return [line for index, line in enumerate(lines) if index not in dropped]
    return list(lines)


class NoRestart(NamedTuple):
    """Why a failed run was not restarted. The run made `attempts` attempts; `max_restarts` + 1 were allowed.

    `error` is the class of the exception that another attempt would raise again. `size` is the number of ranks.
    """

    why: Literal["not asked for", "used up", "twice the same", "code", "before the first step"]
    attempts: int = 1
    max_restarts: int = 0
    error: str = ""
    size: int = 0


def no_restart(verdict: NoRestart) -> str:
    """Say in one sentence why a run was not restarted; return '' if no restart was requested."""
    match verdict.why:
        case "not asked for":
            return ""
        case "used up":
            limit = f"--max-restarts {verdict.max_restarts}"
            return f"This was attempt {verdict.attempts}: all restarts are used up ({limit})."
        case "twice the same":
            return "The run failed twice in the same way, and saved no checkpoint in between: a restart would not help."
        case "code":
            return (
                f"The run was not restarted: another attempt would raise the same {verdict.error.rpartition('.')[2]}."
            )
        case "before the first step":
            who = "all ranks failed in the same way" if verdict.size > 1 else "the rank failed"
            return f"The run was not restarted: {who} before the first step."
