"""Describes which line each rank is running, and what the rank is doing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparkring.history.describe.progress import outcome
from sparkring.history.describe.run import code_line, whole_log
from sparkring.history.describe.text import CODE_CHARACTERS, first_line, plain_lines, rank_list
from sparkring.history.lines import plain
from sparkring.history.record import RankRecord, RunRecord
from sparkring.history.stacks import GRAPH, collective, innermost, is_cell, waits_for_cell

_STANDINGS_NAMED = 8


class Standing(NamedTuple):
    """What a rank is doing, and where. Ranks that do the same thing on the same line have equal Standings."""

    state: str
    where: str = ""

    def of(self, ranks: Sequence[int]) -> str:
        """Say that the `ranks` have this standing: `rank 1 waits at cell line 7`, `ranks 0–2 wait at …`."""
        one, several = _VERBS.get(self.state, (f"is {self.state}", f"are {self.state}"))
        return f"{rank_list(ranks)} {one if len(ranks) == 1 else several}{self.where}"


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
    """Say in one sentence where the ranks are, according to their last stacks.

    ``rank 2 finished; ranks 0, 1, 3 wait in allreduce, cell line 14: `hvd.allreduce(x)` ``
    """
    if record.outcome is not None or not record.running_since:
        return outcome(record)
    # Ranks that have left the cell come first: the others may be waiting for them.
    groups = sorted(_standings(record), key=lambda group: group[0].state not in ("finished", "failed", "stopped"))
    phrases = [standing.of(ranks) for standing, ranks in groups[:_STANDINGS_NAMED]]
    rest = [rank for _, ranks in groups[_STANDINGS_NAMED:] for rank in ranks]
    if rest:
        phrases.append(f"{rank_list(rest)} {'is' if len(rest) == 1 else 'are'} elsewhere")
    return plain("; ".join(phrases))


def explain_timeout(record: RunRecord, head: str) -> str:
    """Say where each rank was when a time limit passed: `head` says which one."""
    if not record.running_since:
        return f"{head} before the ranks were up: {outcome(record)}"
    groups, log = _standings(record), whole_log(record)
    parts = [head, "\n".join(f"  {standing.of(ranks)}" for standing, ranks in groups)]
    if len(groups) > 1 and any(standing.state == "waiting" for standing, _ in groups):
        parts.append("A collective (allreduce, broadcast, a barrier) waits until every rank has called it.")
    parts += [f"Whole logs: {log}"] if log else []
    return plain_lines("\n\n".join(parts))


def stacks_table(record: RunRecord) -> list[tuple[str, ...]]:
    """Return the rows of a table that shows where each rank is. The titles of its columns are STACK_HEADERS."""
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
    code = first_line(code_line(record, line), CODE_CHARACTERS)
    at = f"cell line {line}" + (f": `{code}`" if code else "") if line else ""
    if _meets(rank) or not at:
        return Standing(state, (f" in {inside}" if inside else "") + (f", {at}" if at else ""))
    joint = " at " if state in ("running", "waiting") else ", "
    return Standing(state, f"{joint}{at}" + (f", in {inside}" if inside else ""))


def _state(rank: RankRecord) -> str:
    """Say in a word or two what a rank is doing."""
    if rank.state != "running":
        return rank.state
    if rank.stack is None:
        return "no answer"
    if waits_for_cell(rank.stack.text):
        return "idle"
    # Horovod for PyTorch waits for the other ranks in a loop, so the process of a waiting rank seems to be busy. In a
    # TensorFlow graph, a rank may really be busy.
    spins = rank.stack.state == "running" and _meets(rank) not in ("", GRAPH)
    return "waiting" if spins else rank.stack.state


def _meets(rank: RankRecord) -> str:
    return collective(rank.stack.text) if rank.stack is not None else ""


def _inside(rank: RankRecord) -> str:
    """Return the collective that a rank has called. If there is none, return the innermost function outside the cell.

    Return '' if the rank is in the cell's own code, or is idle.
    """
    inner = innermost(rank.stack.text) if rank.stack is not None else ""
    if _state(rank) == "idle":
        return ""
    return _meets(rank) or ("" if is_cell(inner.partition(":")[0]) else inner)
