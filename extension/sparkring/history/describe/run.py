"""Describes where and when a run takes place, the states of its ranks, and where its logs are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sparkring.history.describe.text import CODE_CHARACTERS, counted, first_line, rank_list, size
from sparkring.history.events import GpuUsed, InputRequested, RankUsed
from sparkring.history.lines import plain
from sparkring.history.memory import Growth
from sparkring.history.record import LARGE_FILE_BYTES, QUICK_S, RankRecord, RunRecord
from sparkring.runtime.kernel import in_notebook

_RANKS_CHARACTERS = 40
_PLACES = {"local": "this machine", "spark": "Spark"}  # a place from elsewhere is called by its name


def states(record: RunRecord) -> dict[str, int]:
    """Return the number of ranks in each state. The states are in the order in which a rank goes through them."""
    counts = Counter(rank.state for rank in record.taking_part)
    return {state: counts[state] for state in ("starting", "running", "finished", "failed", "stopped") if counts[state]}


def ranks(record: RunRecord) -> str:
    """Say which ranks the cell runs on: `4 ranks`, `ranks 0, 2 of 4`, or `22 of 64 ranks` if a list would be long."""
    if not record.part:
        return counted(record.size, "rank")
    named = rank_list(record.part)
    if len(named) > _RANKS_CHARACTERS:
        return f"{len(record.part):,} of {counted(record.size, 'rank')}"
    return f"{named} of {record.size:,}"


def facts(record: RunRecord) -> list[str]:
    """Say how many ranks there are, where they run, which framework connects them, and which attempt this is.

    The attempt is left out if it is the first, or if the run has ended. A warm gang is named, too.
    """
    place = f"on {_PLACES.get(record.where, record.where)}"
    if record.items is not None:
        ranks_each = record.items.ranks_each
        parts = [f"{record.items.at_once:,} at once {place}"]
        return parts + ([f"on {counted(ranks_each, 'rank')} each", record.framework] if ranks_each > 1 else [])
    hosts = len({rank.host for rank in record.taking_part if rank.host})
    parts = [f"{ranks(record)} {place}" + (f" ({counted(hosts, 'host')})" if hosts > 1 else ""), record.framework]
    return [*filter(None, parts), *(["warm gang"] if record.warm else []), *_attempt(record)]


def _attempt(record: RunRecord) -> list[str]:
    """Return the number of the current attempt, as in `attempt 2 of 4`; [] for the first attempt."""
    if len(record.attempts) < 2 or record.ended:
        return []
    number, most = record.attempts[-1].number, record.attempts[-1].most
    return [f"attempt {number}" + (f" of {most}" if most >= number else "")]


def after_restarts(record: RunRecord) -> str:
    """Say how often the run was restarted: ` after 2 restarts`; '' if never."""
    count = len(record.attempts) - 1
    return f" after {counted(count, 'restart')}" if count > 0 else ""


def quick(record: RunRecord) -> bool:
    """Return whether a run on a warm gang finished quickly and has nothing to show except its ranks' output."""
    took = record.ended - record.started
    reports = record.stream or record.metrics or record.checkpoints or any(rank.readings for rank in record.ranks)
    return record.warm and record.outcome == "finished" and took < QUICK_S and not reports


def elapsed_s(record: RunRecord, now: float) -> float:
    """Return how long the run took, or has taken so far."""
    return max(0.0, (record.ended or now) - record.started) if record.started else 0.0


def question(asked: InputRequested) -> str:
    """Return the last line of the prompt of a rank that waits for input. If the prompt is empty, return `input()`."""
    return first_line(plain(asked.prompt).strip().rpartition("\n")[2], 200) or "input()"


def last_known(record: RunRecord) -> float:
    """Return the time of the last event of the run, in Unix seconds."""
    return record.ended or max([record.started, *(rank.last_heard for rank in record.ranks)])


def gpu_words(used: Sequence[GpuUsed]) -> str:
    """Return what is known about the use of several GPUs; '' for no GPUs.

    For example `2 GPUs 87 %, 24.6 GB of 302 GB, 640 W, 71 °C`: the mean load, the sums of the memory and of the power,
    and the temperature of the hottest GPU.
    """
    if not used:
        return ""
    busy = [gpu.busy_percent for gpu in used if gpu.busy_percent is not None]
    words = [counted(len(used), "GPU") + (f" {sum(busy) / len(busy):.0f} %" if busy else "")]
    memory = [(gpu.used_bytes, gpu.total_bytes) for gpu in used if gpu.used_bytes is not None and gpu.total_bytes]
    if memory:
        words.append(f"{size(sum(part for part, _ in memory))} of {size(sum(whole for _, whole in memory))}")
    power = [gpu.power_w for gpu in used if gpu.power_w is not None]
    heat = [gpu.temperature_c for gpu in used if gpu.temperature_c is not None]
    words += [f"{sum(power):,} W"] if power else []
    words += [f"{max(heat)} °C"] if heat else []
    return ", ".join(words)


def usage_words(used: RankUsed | None) -> str:
    """Return what a rank uses of its machine: `CPU 240 % (8 cores), 1.21 GB of 16.0 GB`; '' if this is not known."""
    if used is None:
        return ""
    memory = f"{size(used.memory_bytes)} of {size(used.total_bytes)}"
    return f"CPU {used.cpu_percent:,} % ({counted(used.cores, 'core')}), {memory}"


def growth_words(growth: Growth) -> str:
    """Say whose memory grows: `the memory of rank 1 grows by 1.2 GB a minute: the 16 GB of vm are full in about …`.

    The time is rounded to minutes, since it is an estimate.
    """
    ranks, minutes = rank_list(growth.ranks), round(growth.full_in_s / 60)
    when = f"in about {counted(minutes, 'minute')}" if minutes else "in less than a minute"
    host = f" of {growth.host}" if growth.host else ""
    rate = f"{size(round(60 * growth.bytes_per_s))} a minute"
    return f"the memory of {ranks} grows by {rate}: the {size(growth.total_bytes)}{host} are full {when}"


def log_path(record: RunRecord, rank: int | None = None) -> str:
    """Return the path of the whole log of `rank`, and what has been left out of the logs; '' if the run is not saved.

    If `rank` is None, return a pattern for the paths of all ranks' logs. It is a pattern for a rank, too, if the log is
    so large that it may be compressed or have several files.
    """
    if not record.log_folder:
        return ""
    those = record.ranks if rank is None else record.ranks[rank : rank + 1]
    end = "*" if any(rank_record.size_bytes >= LARGE_FILE_BYTES for rank_record in those) else "log"
    path = f"{record.log_folder}/rank-{'N' if rank is None else rank}.{end}"
    if not record.left_out_bytes:
        return path
    return f"{path} ({size(record.left_out_bytes)}, {counted(record.left_out_lines, 'line')}, left out)"


def whole_log(record: RunRecord, rank: int | None = None) -> str:
    """Return what an error message says about the place of the whole log: a %logs line in a notebook, otherwise a path.

    An error in a notebook has no path, because JupyterLab would turn the path into a link that opens the debugger.
    """
    if not record.log_folder or not in_notebook():
        return log_path(record, rank)
    return f"%logs {record.run_id}" + ("" if rank is None else f" --rank {rank}")


def code_line(record: RunRecord, line: int) -> str:
    """Return the text of a line of the cell; '' if there is no such line. The magic is on line 1."""
    code = record.code.splitlines()
    return code[line - 1].strip() if 0 < line <= len(code) else ""


def line_words(record: RunRecord, rank: RankRecord) -> str:
    """Return the line of the cell that a rank is running: `line 14: loss.backward()`; '' if it is not known."""
    if rank.at is None or rank.state != "running":
        return ""
    code = first_line(code_line(record, rank.at.line), CODE_CHARACTERS)
    return f"line {rank.at.line}" + (f": {plain(code)}" if code else "")
