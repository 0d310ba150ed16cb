"""Describes a run in words. All views, errors and lists use these words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sparkring.history import metrics
from sparkring.history.events import CodeFrame, Failure, GpuUsed, SourceLine
from sparkring.history.item_records import ItemRecord
from sparkring.history.lines import folded, is_noise, plain, visible
from sparkring.history.metrics import Progress
from sparkring.history.record import LogLine, RankRecord, RunRecord, as_shown
from sparkring.history.stacks import (
    CELL_NAME,
    EARLIER_CELL,
    GRAPH,
    cell_line,
    collective,
    innermost,
    is_cell,
    waits_for_cell,
)

LAST_LINES = 20
CONTEXT_LINES = 2
_SHORT_LINES, _SHORT_CHARACTERS = 10, 200
_METRICS_NAMED = 6
_CODE_CHARACTERS = 100  # the length to which a line of code is cut if a sentence quotes it
_RANKS_CHARACTERS = 40
_STANDINGS_NAMED = 8
QUICK_S = 1.0
_FAILURES_NAMED, _ITEMS_NAMED = 8, 10  # how many causes are named when items fail, and how many items of each cause
_FOLLOWERS_NAMED = 3  # how many different secondary failures are named; the others become "…"

# ── Numbers ───────────────────────────────────────────────────────────────────


def duration(seconds: float) -> str:
    """A span of time as people say it: 40 ms, 3.2 s (3 s if `seconds` is an int), 3 min 12 s, 2 h 05 min."""
    if seconds < 0.0995 and isinstance(seconds, float):
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 9.95 and isinstance(seconds, float):
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def ago(seconds: float) -> str:
    """How long ago: `just now`, `12 s ago`, `3 min ago`, `5 h ago`, `12 days ago`."""
    if seconds < 1:
        return "just now"
    if seconds < 60:
        return f"{int(seconds)} s ago"
    if seconds < 3600:
        return f"{int(seconds / 60)} min ago"
    if seconds < 48 * 3600:
        return f"{int(seconds / 3600)} h ago"
    return f"{int(seconds / 86400):,} days ago"


def size(size_bytes: float | None) -> str:
    """A number of bytes in decimal units, with three digits: 999 B, 1.20 kB, 34.5 MB; nothing for None."""
    if size_bytes is None:
        return ""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size_bytes /= 1000
        if size_bytes < 999.5 or unit == "TB":
            break
    digits = 2 if size_bytes < 9.995 else 1 if size_bytes < 99.95 else 0
    return f"{size_bytes:.{digits}f} {unit}"


def number(value: float) -> str:
    """A metric's value with at most four significant digits."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return f"{value:.3g}"


def numbers(values: Sequence[float]) -> Callable[[float], str]:
    """Return a function that writes a column's numbers: with four decimals if that suits all, else as number() does."""
    plain_ones = all(value == 0 or 1e-3 <= abs(value) < 100 for value in values)
    if plain_ones and not all(value == int(value) for value in values):
        return lambda value: f"{value:.4f}"
    return number


def dotted(*parts: str) -> str:
    """`a · b`: the parts that are not empty."""
    return " · ".join(filter(None, parts))


def rank_list(ranks: Iterable[int]) -> str:
    """`rank 2`, or `ranks 0–3, 7`."""
    found = sorted(set(ranks))
    return f"{'rank' if len(found) == 1 else 'ranks'} {rank_numbers(found)}"


def rank_numbers(ranks: Iterable[int]) -> str:
    """`0–3, 7`: three or more consecutive numbers are written as a range."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts = []
    for span in spans:
        parts += [f"{span[0]}–{span[-1]}"] if len(span) > 2 else [str(rank) for rank in span]
    return ", ".join(parts)


def rank_count(count: int) -> str:
    """`1 rank`, `2 ranks`."""
    return counted(count, "rank")


def counted(count: int, what: str) -> str:
    """`1 line`, `4,812 lines`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def span(values: Sequence[float], write: Callable[[Any], str]) -> str:
    """The range of some values: `3–5`, or `3` if both ends are written the same."""
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low}–{high}"


def named(names: Sequence[str], most: int, characters: int = 40) -> str:
    """`a, b and 3 more`: the first `most` of these names, each cut to `characters`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(first_line(name, characters) for name in names[:most]) + more


# ── The state of a run ────────────────────────────────────────────────────────


def states(record: RunRecord) -> dict[str, int]:
    """The number of ranks in each state. The states are in the order in which a rank goes through them."""
    found = Counter(rank.state for rank in record.taking_part)
    return {state: found[state] for state in ("starting", "running", "finished", "failed", "stopped") if found[state]}


def ranks(record: RunRecord) -> str:
    """The ranks that the cell runs on: `4 ranks`, `ranks 0, 2 of 4`, or `22 of 64 ranks` if the list would be long."""
    if not record.part:
        return rank_count(record.size)
    named = rank_list(record.part)
    if len(named) > _RANKS_CHARACTERS:
        return f"{len(record.part):,} of {rank_count(record.size)}"
    return f"{named} of {record.size:,}"


def items(record: RunRecord, *, over: bool = False) -> str:
    """How many items are done: `137 of 300 items · 2 failed`; after the run, `298 of 300 items finished · 2 failed`."""
    found = record.items
    if found is None:
        return ""
    over = over or record.outcome is not None
    number = found.finished if over else found.done
    whole = found.done + found.stopped if over and found.total is None else found.total
    words = counted(number, "item") if whole in (None, number) else f"{number:,} of {counted(whole or 0, 'item')}"
    failed = f"{found.failed:,} failed" if found.failed else ""
    pruned = f"{found.pruned:,} pruned" if found.pruned else ""
    kept = f"{found.kept:,} kept from before" if found.kept else ""
    return dotted(f"{words} finished" if over else words, failed, pruned, kept, best_trial(record))


def best_trial(record: RunRecord) -> str:
    """The best trial of a search so far: `best val_loss 0.031 (item 17)`; '' if there is none."""
    search = None if record.items is None else record.items.search
    if search is None or search.best is None:
        return ""
    item, value = search.best
    return f"best {plain(search.metric)} {number(value)} (item {item:,})"


def importance(record: RunRecord) -> str:
    """How much the parameters of a search matter: `importance: lr 72 %, width 20 %`; '' if that is not known."""
    search = None if record.items is None else record.items.search
    if search is None or not search.importance:
        return ""
    ranked = sorted(search.importance.items(), key=lambda found: -found[1])[:_METRICS_NAMED]
    return f"importance: {', '.join(f'{plain(name)} {100 * share:.0f} %' for name, share in ranked)}"


def items_progress(record: RunRecord, now: float) -> str:
    """The progress of a run of items that has not ended: `137 of 300 items · 2 failed · 20 at once · 3.4 items/s`.

    If some of the 20 still wait until they can start, the text ends with `2 of 20 at once`.
    """
    found = record.items
    if found is None:
        return ""
    left = found.at_once if found.total is None else min(found.total - found.done, found.at_once)
    waits = found.up is not None and found.up < left and not record.outcome
    number = f"{found.up:,} of {left:,}" if waits else f"{left:,}"
    running = f"{number} at once" if left == found.at_once else f"{number} running"
    return dotted(items(record), running, items_rate(record, now))


def items_rate(record: RunRecord, now: float) -> str:
    """How many items have ended in a second, a minute or an hour: `3.4 items/s`; '' if none has run yet."""
    ran, seconds = (record.items.ran if record.items else 0), elapsed_s(record, now)
    if not ran or not seconds:
        return ""
    units = (("s", 1), ("min", 60), ("h", 3600))
    unit, unit_s = next((each for each in units if ran * each[1] >= seconds), units[-1])
    rate = ran * unit_s / seconds
    return f"{rate:.1f} items/{unit}" if rate < 9.95 else f"{rate:,.0f} items/{unit}"


def items_left(record: RunRecord, now: float) -> str:
    """How long the items that are left will take: `4 min left`; '' if that is not known.

    This assumes that they take as long as the items that have run so far.
    """
    found = record.items
    if found is None or found.total is None or not found.ran:
        return ""
    left = found.total - found.done
    return f"{duration(max(1, round(elapsed_s(record, now) / found.ran * left)))} left" if left else ""


def facts(record: RunRecord) -> list[str]:
    """How many ranks there are, where they run, with which framework, and whether the gang is warm."""
    if record.items is not None:
        each = f"on {rank_count(record.items.ranks_each)} each" if record.items.ranks_each > 1 else ""
        place = "Spark" if record.where == "spark" else "this machine"
        return [
            *filter(None, [f"{record.items.at_once:,} at once on {place}", each]),
            *([record.framework] if each else []),
        ]
    hosts = len({rank.host for rank in record.taking_part if rank.host})
    place = f"{ranks(record)} on {'Spark' if record.where == 'spark' else 'this machine'}"
    found = [place + (f" ({counted(hosts, 'host')})" if hosts > 1 else ""), record.framework]
    return [*filter(None, found), *(["warm gang"] if record.warm else [])]


def quick(record: RunRecord) -> bool:
    """Whether a warm run finished quickly and reported nothing, so that its ranks' output is all there is to show."""
    took = record.ended - record.started
    told = record.metrics or record.checkpoints or any(rank.readings for rank in record.ranks)
    return record.warm and record.outcome == "finished" and took < QUICK_S and not told


def elapsed_s(record: RunRecord, now: float) -> float:
    """How long the run took, or has taken so far."""
    return max(0.0, (record.ended or now) - record.started) if record.started else 0.0


def last_known(record: RunRecord) -> float:
    """The time of the last event of the run, in Unix seconds."""
    return record.ended or max([record.started, *(rank.last_heard for rank in record.ranks)])


def took(record: RunRecord, now: float) -> str:
    """How long the run took, or has taken so far, and whether it ended before its ranks were up.

    After a run of items, this includes how many items ended in a second: `42 s · 7.1 items/s`.
    """
    if not record.ended:
        return duration(int(elapsed_s(record, now)))
    began = record.running_since or len(record.attempts) > 1
    return dotted(
        duration(elapsed_s(record, now)) + ("" if began else ", before the ranks were up"), items_rate(record, now)
    )


def outcome(record: RunRecord) -> str:
    """The state or the outcome in one line: `2 ranks finished`, `rank 1 failed: ValueError: bad shape`."""
    if record.items is not None and record.outcome in (None, "finished"):
        return items(record)
    if record.outcome is None:
        if all(rank.state == "starting" for rank in record.taking_part):
            whole = rank_count(record.size)
            return f"{record.joined} of {whole} {'has' if record.size == 1 else 'have'} connected"
        return ", ".join(f"{count} {state}" for state, count in states(record).items())
    if record.outcome == "finished":
        return f"{ranks(record)} finished"
    if record.failed_rank is not None and record.failure is not None:
        return f"rank {record.failed_rank} failed: {first_line(record.failure.summary)}"
    if not record.message:
        return record.outcome
    return f"{record.outcome}: {first_line(record.message)}"


def closing(record: RunRecord, now: float) -> str:
    """How a run ended, how long it took, the last step that was saved and the last metrics, in one line."""
    took = duration(elapsed_s(record, now) if record.ended else int(elapsed_s(record, now)))
    if len(record.attempts) > 1:
        took += f" after {counted(len(record.attempts) - 1, 'restart')}"
    words = [f"{outcome(record)} in {took}"] if record.outcome == "finished" else [outcome(record), took]
    saved = [each.saved for each in record.checkpoints if each.state == "committed" and each.saved.kind == "sparkring"]
    words += [f"last saved step {saved[-1].step:,}"] if saved and record.items is None else []
    words += filter(None, [items_rate(record, now)])
    words += [f"{name} {number(value.mean)}" for name, value in list(metrics.last(record).items())[:_METRICS_NAMED]]
    return plain(" · ".join(words))


def short(record: RunRecord, now: float) -> str:
    """A run in a few lines of plain text: its state, and the last lines of its ranks."""
    return f"sparkring: {closing(record, now)}\n{last_lines(record)}".rstrip("\n")


def last_lines(record: RunRecord) -> str:
    """The last lines of the ranks, equal ones folded, as plain text."""
    seen = [line for line in visible(record.recent, record.logs) if not is_noise(line)]
    return "\n".join(
        f"[{rank_numbers(shared.ranks)}] {plain(shared.line.text)}"[:_SHORT_CHARACTERS]
        for shared in folded(seen)[-_SHORT_LINES:]
    )


def gpu_words(used: Sequence[GpuUsed]) -> str:
    """How much several GPUs are used, as far as is known: `2 GPUs 87 %, 24.6 GB of 302 GB`; '' if there are none."""
    if not used:
        return ""
    busy = [gpu.busy_percent for gpu in used if gpu.busy_percent is not None]
    words = [counted(len(used), "GPU") + (f" {sum(busy) / len(busy):.0f} %" if busy else "")]
    memory = [(gpu.used_bytes, gpu.total_bytes) for gpu in used if gpu.used_bytes is not None and gpu.total_bytes]
    if memory:
        words.append(f"{size(sum(part for part, _ in memory))} of {size(sum(whole for _, whole in memory))}")
    return ", ".join(words)


def progress_words(found: Progress, *, running: bool = True) -> str:
    """The progress of the slowest rank: `1 of 2 ranks finished · epoch 2 of 3 · step 45 of 118 · 34 % · 12 s left`."""
    words = []
    if 0 < found.finished < found.size:
        words.append(f"{found.finished:,} of {rank_count(found.size)} finished")
    for what, at, total in (("epoch", found.epoch, found.epochs), ("step", found.step, found.steps)):
        if at is not None:
            words.append(f"{what} {at:,}" + (f" of {total:,}" if total and total >= at else ""))
    if found.fraction is not None:
        words.append(f"{100 * found.fraction:.0f} %")
    words += [left_words(found)] if left_words(found) and running else []
    return ("" if running else "progress: ") + " · ".join(words)


def left_words(found: Progress) -> str:
    """`12 s left`; '' if that is not known."""
    return "" if found.left_s is None else f"{duration(max(1, round(found.left_s)))} left"


def first_line(text: str, most: int = 300) -> str:
    """The first line of `text` as plain() shows it, cut to `most` characters."""
    line = plain(text.strip().partition("\n")[0])
    return line if len(line) <= most else line[: most - 1] + "…"


def log_path(record: RunRecord, rank: int | None = None) -> str:
    """The path of the whole log of `rank`. If `rank` is None, this is a pattern for the paths of all ranks' logs."""
    name = "rank-N.log" if rank is None else f"rank-{rank}.log"
    return f"{record.log_folder}/{name}" if record.log_folder else ""


def whole_log(record: RunRecord, rank: int | None = None) -> str:
    """How an error names the whole log: as a %logs line in a notebook, else as the path of the file.

    A notebook gets no path because JupyterLab turns a path in an error into a link that opens the debugger.
    """
    from sparkring.runtime.kernel import in_notebook

    if not record.log_folder or not in_notebook():
        return log_path(record, rank)
    return f"%logs {record.run_id}" + ("" if rank is None else f" --rank {rank}")


# ── Why it failed ─────────────────────────────────────────────────────────────


def explain_failure(record: RunRecord) -> str:
    """What ended the run: rank, host, the line of the cell, advice, the rank's last lines, and secondary failures."""
    if record.failed_rank is None or record.failure is None:
        return outcome(record)
    rank, failure = record.ranks[record.failed_rank], record.failure
    where = f" on {rank.host}" if rank.host else ""
    parts = [f"rank {rank.rank}{where} failed: {failure.summary}", _in_the_cell(record, rank, failure)]
    if failure.advice:
        parts.append(failure.advice)
    parts += [_followers(record), _last_lines(rank, failure)]
    where = whole_log(record, rank.rank)
    if where:
        parts.append(f"Whole log: {where}")
    return _plain_lines("\n\n".join(part for part in parts if part))


def _plain_lines(told: str) -> str:
    return "\n".join(plain(line) for line in told.split("\n"))


def failed_line(record: RunRecord) -> int:
    """The line of the cell that was being run when it failed; 0 if that is not known."""
    if record.failed_rank is None or record.failure is None:
        return 0
    numbers = [frame.line for frame in record.failure.frames if frame.filename == CELL_NAME]
    return numbers[-1] if numbers else _line_of_crash(record.ranks[record.failed_rank])


def _in_the_cell(record: RunRecord, rank: RankRecord, failure: Failure) -> str:
    """Quote the innermost line that was running in the cell, or in a script that the cell runs, with its callers."""
    in_cell = [frame for frame in failure.frames if frame.in_cell or frame.source]
    if not in_cell:
        line = _line_of_crash(rank)
        if not line:
            return _place(failure.frames[-1]) if failure.frames else ""
        in_cell = [CodeFrame(CELL_NAME, line, "", in_cell=True)]
    frame = in_cell[-1]
    shown = [f"{_place(frame)}:", *_source(record, frame)]
    if failure.frames and failure.frames[-1] is not frame:
        shown.append(f"  raised in {_place(failure.frames[-1])}")
    for caller in reversed(in_cell[:-1][-5:]):
        text = _line_text(record, caller).strip()
        shown.append(f"  called from {_place(caller)}" + (f": {text}" if text else ""))
    return "\n".join(shown)


def _place(frame: CodeFrame) -> str:
    function = f", in {frame.function}" if frame.function not in ("", "<module>") else ""
    if frame.filename == CELL_NAME:
        return f"cell line {frame.line}{function}"
    if frame.in_cell:
        # Frames of earlier cells have the name EARLIER_CELL. Other frames may be of the cell that calls run().
        which = "an earlier" if frame.filename == EARLIER_CELL else "a notebook"
        return f"line {frame.line} of {which} cell{function}"
    return f"{'/'.join(frame.filename.rsplit('/', 3)[-3:])}:{frame.line}{function}"


def _source(record: RunRecord, frame: CodeFrame) -> list[str]:
    lines = frame.source
    if not lines and frame.filename == CELL_NAME:
        code = record.code.splitlines()
        near = range(max(1, frame.line - CONTEXT_LINES), min(len(code), frame.line + CONTEXT_LINES) + 1)
        lines = tuple(SourceLine(line, code[line - 1]) for line in near)
    width = max((len(str(line.number)) for line in lines), default=1)
    return [
        f"{'→' if line.number == frame.line else ' '} {line.number:>{width}}  {line.text}".rstrip() for line in lines
    ]


def _line_text(record: RunRecord, frame: CodeFrame) -> str:
    # Prefer the text of the cell itself to the text that comes from the rank, because on ranks, IPython has replaced
    # the cell's `%` and `!` lines by Python.
    if frame.filename == CELL_NAME and (text := code_line(record, frame.line)):
        return text
    return next((line.text for line in frame.source if line.number == frame.line), "")


def code_line(record: RunRecord, line: int) -> str:
    """The text of line `line` of the cell. The magic is on line 1."""
    code = record.code.splitlines()
    return code[line - 1].strip() if 0 < line <= len(code) else ""


def _line_of_crash(rank: RankRecord) -> int:
    """The line of the cell in the stack that Python printed on stderr when it crashed; 0 if there is no such line."""
    texts = [line.text for line in rank.tail if line.stream == "stderr"]
    begin = max((at for at, text in enumerate(texts) if text.startswith("Fatal Python error")), default=len(texts))
    return cell_line("\n".join(texts[begin:]))


def _followers(record: RunRecord) -> str:
    """One line about the ranks that failed in addition to the one that ended the run; '' if there are none."""
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


def _last_lines(rank: RankRecord, failure: Failure) -> str:
    lines = [line for line in without_traceback(rank.lines_with_partial(), failure) if not is_noise(line)]
    if not any(line.text.strip() for line in lines):
        return ""
    last = [f"  {line.text}".rstrip() for line in lines[-LAST_LINES:]]
    return "\n".join([f"Last lines of rank {rank.rank}:", *last])


def without_traceback(lines: Sequence[LogLine], failure: Failure) -> list[LogLine]:
    """Return `lines` without those in which the rank printed the traceback of `failure`."""
    wanted = [as_shown(line.encode("utf-8", "backslashreplace")) for line in failure.traceback.splitlines()]
    at = [index for index, line in enumerate(lines) if line.stream == "stderr"]
    # Compare from the end of the traceback: its beginning may no longer be in the tail, and other lines may follow it.
    for end in range(len(at) - 1, -1, -1):
        if wanted and lines[at[end]].text == wanted[-1]:
            length = 0
            while length < min(len(wanted), end + 1) and lines[at[end - length]].text == wanted[-1 - length]:
                length += 1
            dropped = set(at[end - length + 1 : end + 1])
            return [line for index, line in enumerate(lines) if index not in dropped]
    return list(lines)


class NoRestart(NamedTuple):
    """Why a failed run was not restarted. It made `attempts` attempts; `max_restarts` + 1 were allowed.

    `error` is the class of the exception that another attempt would raise again. `size` is the number of ranks.
    """

    why: Literal["not asked for", "used up", "twice the same", "code", "before the first step"]
    attempts: int = 1
    max_restarts: int = 0
    error: str = ""
    size: int = 0


def no_restart(found: NoRestart) -> str:
    """Why a run was not restarted, in one sentence; '' if no restart was requested."""
    match found.why:
        case "not asked for":
            return ""
        case "used up":
            limit = f"--max-restarts {found.max_restarts}"
            return f"This was attempt {found.attempts}: all restarts are used up ({limit})."
        case "twice the same":
            return (
                "The run failed twice in the same way, and saved no checkpoint in between: another restart would not "
                "help."
            )
        case "code":
            return f"The run was not restarted: another attempt would raise the same {found.error.rpartition('.')[2]}."
        case "before the first step":
            who = "all ranks failed in the same way" if found.size > 1 else "the rank failed"
            return f"The run was not restarted: {who} before the first step."


# ── What the engine says of a gang ────────────────────────────────────────────


def waiting_for_ranks(joined: int, size: int, reason: str) -> str:
    """What a slow start waits for. `reason` says why the start is slow; it is '' if that is not known."""
    return f"waiting for ranks to start: {joined} of {size} have connected" + (reason and f" ({reason})")


def waiting_for_imports(ranks: Sequence[int]) -> str:
    """What the end of a cell on a warm gang waits for, and how the user can end it at once."""
    return f"waiting for {rank_list(ranks)} to finish importing a package; interrupt again to end the gang instead"


def interrupted(running: int, left: str, *, warm: bool) -> str:
    """How an interrupt ended a run: `2 ranks ended`. `left` is a sentence about what is left of a warm gang."""
    ended = f"{rank_count(running)} {'stopped' if warm else 'ended'}" if running else "before the ranks were up"
    return f"{ended}. {left}" if left else ended


def gang_kept(*, released: bool) -> str:
    """Say that a warm gang stays up after a run. `released`: whether its ranks' collectives were ended."""
    kept = "The gang stays up: its ranks keep the variables of the cells."
    if released:
        kept += " The collectives in which ranks waited were ended, so call hvd.init() or init_process_group() again."
    return kept


def gang_gone(dead: Sequence[int], stuck: Sequence[int]) -> str:
    """Say that a warm gang was closed because ranks died or did not respond, and what that means."""
    if dead:
        why = f"{rank_list(dead)} died"
    else:
        why = f"{rank_list(stuck)} did not respond" if stuck else "it could not continue"
    return f"The gang has ended, and the variables of its cells are lost ({why}). The next cell starts a new one."


def deaths(failures: Mapping[int, Failure]) -> str:
    """Which ranks of a warm gang have died, and of what."""
    by_summary: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        said = failure.summary + (f" ({failure.advice})" if failure.cause == "lost" and failure.advice else "")
        by_summary.setdefault(said, []).append(rank)
    return "; ".join(f"{rank_list(ranks)}: {said}" for said, ranks in by_summary.items())


def large_value(name: str, size_bytes: int) -> str:
    """A notice about a value that is sent to every rank."""
    return f"`{name}` ({size(size_bytes)}) is sent to every rank; if possible, load or create large data on the ranks"


def unread_change(name: str) -> str:
    """A notice about a value that the cell of each item changes, but does not read."""
    return (
        f"`{name}` is changed in the items' processes, and not in the notebook: end the cell with the value that you "
        "want back"
    )


# ── Why items failed ──────────────────────────────────────────────────────────


def explain_items(record: RunRecord, results: str) -> str:
    """Say how many items failed, and why. Items with the same error on the same line are listed together.

    `results` says where the results of the other items are.
    """
    assert record.items is not None
    failed = [each for each in record.items.known if each.state == "failed"]
    groups: dict[tuple[str, str, str], list[ItemRecord]] = {}
    for each in failed:
        assert each.failure is not None
        kind = each.failure.error or each.failure.signal or each.failure.summary
        groups.setdefault((each.failure.cause, kind, _failed_at(record, each.failure)), []).append(each)
    found = record.items
    others = f"{found.finished + found.kept:,} finished" + "".join(
        f", {count:,} {state}" for count, state in ((found.pruned, "pruned"), (found.stopped, "stopped")) if count
    )
    parts = [f"{found.failed:,} of {counted(found.done + found.stopped, 'item')} failed ({others}):"]
    ranked = sorted(groups.values(), key=lambda group: -len(group))
    parts += [_alike(record, group) for group in ranked[:_FAILURES_NAMED]]
    rest = sum(map(len, ranked[_FAILURES_NAMED:]))
    parts += [f"  {rest:,} × other causes"] if rest else []
    parts.append(results)
    where = whole_log(record)
    return _plain_lines("\n".join([*parts, *([f"Whole log: {where}"] if where else [])]))


def item_failure(record: RunRecord, failure: Failure) -> str:
    """Say where an item failed, and what to do about it, in a line each; '' if neither is known."""
    return _plain_lines("\n".join(filter(None, [_failed_at(record, failure), failure.advice])))


def _alike(record: RunRecord, group: Sequence[ItemRecord]) -> str:
    """Say which items failed in the same way, and give the error of the first of them."""
    failure = group[0].failure
    assert failure is not None
    place = _failed_at(record, failure)
    numbers = sorted(each.item for each in group)
    which = (
        f"item {numbers[0]} ({group[0].name})" if len(group) == 1 else f"items {rank_numbers(numbers[:_ITEMS_NAMED])}"
    )
    more = f" and {len(group) - _ITEMS_NAMED:,} more" if len(group) > _ITEMS_NAMED else ""
    advice = f"\n    {failure.advice}" if failure.advice else ""
    return f"  {len(group):,} × {first_line(failure.summary)}{f' ({place})' if place else ''}: {which}{more}{advice}"


def _failed_at(record: RunRecord, failure: Failure) -> str:
    """Return the line of the cell, or of the script or notebook that the cell runs: ``cell line 3: `1 / 0` ``."""
    frames = failure.frames
    found = next((number for number in reversed(range(len(frames))) if frames[number].filename == CELL_NAME), None)
    if found is None:
        return ""
    frame, inner = frames[found], frames[found + 1 : found + 2]
    if not inner or inner[0].function != "<module>":
        code = code_line(record, frame.line)
        where = f"cell line {frame.line}"
    else:
        path = inner[0].filename.partition(".ipynb cell ")[0]
        frame = next(each for each in reversed(frames) if each.filename.partition(".ipynb cell ")[0] == path)
        code = next((line.text for line in frame.source if line.number == frame.line), "")
        where = f"{frame.filename.rpartition('/')[2]} line {frame.line}"
    code = first_line(code.strip(), _CODE_CHARACTERS)
    return f"{where}: `{code}`" if code else where


# ── Where every rank is ───────────────────────────────────────────────────────


class Standing(NamedTuple):
    """What a rank does, and where. Ranks that do the same at the same place have equal Standings."""

    state: str
    where: str = ""

    def of(self, found: Sequence[int]) -> str:
        """`rank 1 waits at cell line 7`, `ranks 0–2 wait at cell line 7`."""
        one, several = _VERBS.get(self.state, (f"is {self.state}", f"are {self.state}"))
        return f"{rank_list(found)} {one if len(found) == 1 else several}{self.where}"


_VERBS = {
    "finished": ("finished", "finished"),
    "failed": ("failed", "failed"),
    "stopped": ("was stopped", "were stopped"),
    "no answer": ("does not respond", "do not respond"),
    "running": ("runs", "run"),
    "waiting": ("waits", "wait"),
    "waiting for a device": ("is waiting for a device", "are waiting for a device"),
}
STACK_HEADERS = ("rank", "host", "state", "cell line", "where", "last line")


def explain_where(record: RunRecord) -> str:
    """Where the ranks are, in one sentence, according to their last stacks.

    ``rank 2 finished; ranks 0, 1, 3 wait in allreduce, cell line 14: `hvd.allreduce(x)` ``
    """
    if record.outcome is not None or not record.running_since:
        return outcome(record)
    # Ranks that have left the cell come first: the others may be waiting for them.
    groups = sorted(_standings(record), key=lambda group: group[0].state not in ("finished", "failed", "stopped"))
    told = [standing.of(found) for standing, found in groups[:_STANDINGS_NAMED]]
    rest = [rank for _, found in groups[_STANDINGS_NAMED:] for rank in found]
    if rest:
        told.append(f"{rank_list(rest)} {'is' if len(rest) == 1 else 'are'} elsewhere")
    return plain("; ".join(told))


def explain_timeout(record: RunRecord, timeout_s: float) -> str:
    """Where each rank was when the time limit passed."""
    head = f"the time limit of {duration(timeout_s)} passed"
    if not record.running_since:
        return f"{head} before the ranks were up: {outcome(record)}"
    groups = _standings(record)
    parts = [head, "\n".join(f"  {standing.of(found)}" for standing, found in groups)]
    if len(groups) > 1 and any(standing.state == "waiting" for standing, _ in groups):
        parts.append("A collective (allreduce, broadcast, a barrier) waits until every rank has called it.")
    where = whole_log(record)
    if where:
        parts.append(f"Whole logs: {where}")
    return _plain_lines("\n\n".join(parts))


def stacks_table(record: RunRecord) -> list[tuple[str, ...]]:
    """Where each rank is: a table for show_table(), with one row for each rank and the columns STACK_HEADERS."""
    rows: list[tuple[str, ...]] = []
    for rank in record.ranks:
        line = rank.stack.cell_line if rank.stack is not None else 0
        code = f"{line}: {code_line(record, line)}" if line else ""
        last = next((line.text for line in reversed(rank.lines_with_partial()) if line.text.strip()), "")
        rows.append((str(rank.rank), rank.host, _state(rank), code, _inside(rank), last))
    return rows


def _standings(record: RunRecord) -> list[tuple[Standing, list[int]]]:
    groups: dict[Standing, list[int]] = {}
    for rank in record.taking_part:
        groups.setdefault(_standing(record, rank), []).append(rank.rank)
    return list(groups.items())


def _standing(record: RunRecord, rank: RankRecord) -> Standing:
    state = _state(rank)
    if rank.failure is not None:
        return Standing("failed", f": {first_line(rank.failure.summary)}")
    if rank.state != "running" or rank.stack is None:
        return Standing(state)
    line, inside = rank.stack.cell_line, _inside(rank)
    code = first_line(code_line(record, line), _CODE_CHARACTERS)
    at = f"cell line {line}" + (f": `{code}`" if code else "") if line else ""
    if _meets(rank) or not at:
        return Standing(state, (f" in {inside}" if inside else "") + (f", {at}" if at else ""))
    joint = " at " if state in ("running", "waiting") else ", "
    return Standing(state, f"{joint}{at}" + (f", in {inside}" if inside else ""))


def _state(rank: RankRecord) -> str:
    """What a rank does, in a word."""
    if rank.state != "running":
        return rank.state
    if rank.stack is None:
        return "no answer"
    if waits_for_cell(rank.stack.text):
        return "idle"
    # In Horovod for PyTorch, a rank waits for the others in a loop, so its process looks as if it worked. In a graph of
    # TensorFlow, a rank may really work.
    spins = rank.stack.state == "running" and _meets(rank) not in ("", GRAPH)
    return "waiting" if spins else rank.stack.state


def _meets(rank: RankRecord) -> str:
    return collective(rank.stack.text) if rank.stack is not None else ""


def _inside(rank: RankRecord) -> str:
    """The collective that a rank has called, or else the function that it is in, if that is outside the cell."""
    inner = innermost(rank.stack.text) if rank.stack is not None else ""
    if _state(rank) == "idle":
        return ""
    return _meets(rank) or ("" if is_cell(inner.partition(":")[0]) else inner)
