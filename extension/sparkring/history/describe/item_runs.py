"""Describes a run of items or a search: its progress, and why items failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sparkring.history.describe.run import code_line, elapsed_s, whole_log
from sparkring.history.describe.text import (
    CODE_CHARACTERS,
    METRICS_NAMED,
    counted,
    dotted,
    duration,
    first_line,
    number,
    plain_lines,
    rank_numbers,
)
from sparkring.history.events import CodeFrame, Failure
from sparkring.history.item_records import ItemRecord, ItemsRecord, Search
from sparkring.history.lines import plain
from sparkring.history.progress import PACE_S
from sparkring.history.record import RunRecord
from sparkring.history.stacks import CELL_NAME

# The pace is measured over the last _PACE_ITEMS items, if at least _PACE_S seconds or _PACE_ENDS ends are known.
_PACE_ITEMS, _PACE_S, _PACE_ENDS = 200, 1.0, 20
_SQUARES = 10  # how many squares show the slots of a pool
_FAILURES_NAMED, _ITEMS_NAMED = 8, 10  # how many causes of failure are named, and how many items for each cause


def items(record: RunRecord, *, over: bool = False) -> str:
    """Say how many items are done: `137 of 300 items · 2 failed`; after the run: `298 of 300 items finished · …`."""
    items_record = record.items
    if items_record is None:
        return ""
    over = over or record.outcome is not None
    number = items_record.finished if over else items_record.done
    whole = items_record.over if over and items_record.total is None else items_record.total
    words = counted(number, "item") if whole in (None, number) else f"{number:,} of {counted(whole or 0, 'item')}"
    failed = f"{items_record.failed:,} failed" if items_record.failed else ""
    pruned = f"{items_record.pruned:,} pruned" if items_record.pruned else ""
    kept = f"{items_record.kept:,} kept from an earlier run" if items_record.kept else ""
    if over:
        # If an earlier run has finished the items, "0 of 40 items finished" would be wrong.
        words = f"{words} finished" if number or not items_record.kept else counted(whole or items_record.kept, "item")
    return dotted(words, failed, pruned, kept, best_trial(record))


def best_trial(record: RunRecord) -> str:
    """Return the best trial of a search so far: `best val_loss 0.031 (item 17)`; '' if there is none."""
    search = None if record.items is None else record.items.search
    if search is None or search.best is None:
        return ""
    item, value = search.best
    return f"best {plain(search.metric)} {number(value)} (item {item:,})"


def importance(record: RunRecord) -> str:
    """Say how important each parameter of a search is: `importance: lr 72 %, width 20 % (from 34 finished trials)`.

    Return '' if this is not known.
    """
    search = None if record.items is None else record.items.search
    ranked = [] if search is None else importances(search)[:METRICS_NAMED]
    if search is None or not ranked:
        return ""
    return (
        f"importance: {', '.join(f'{name} {words}' for name, _, words in ranked)} {importance_basis(search)}".rstrip()
    )


def importance_basis(search: Search) -> str:
    """Say from how many trials the importance was estimated: `(from 34 finished trials)`; '' if this is not known."""
    return f"(from {counted(search.trials, 'finished trial')})" if search.trials else ""


def importances(search: Search) -> list[tuple[str, float, str]]:
    """Return the name of each parameter, its share of the importance, and the share in words; the largest first."""
    ranked = sorted(search.importance.items(), key=lambda pair: -pair[1])
    return [(plain(name), share, f"{100 * share:.0f} %") for name, share in ranked]


def items_progress(record: RunRecord, now: float) -> str:
    """Return the progress of a run of items: `137 of 300 items · 2 failed · ■■■□ 4 at once · 3.4 items/s`.

    Full squares stand for slots in use, and empty squares for idle slots. If the ranks of some slots are still waiting
    to start, the text says `2 of 4 at once` instead of `4 at once`.
    """
    items_record = record.items
    if items_record is None:
        return ""
    left = items_record.most
    number = f"{items_record.up:,} of {left:,}" if items_record.short and not record.outcome else f"{left:,}"
    running = f"{number} at once" if left == items_record.at_once else f"{number} running"
    return dotted(items(record), f"{_slots(items_record)} {running}", items_rate(record, now))


def _slots(items_record: ItemsRecord) -> str:
    """Draw a full square for each slot in use and an empty square for each idle slot.

    If the pool has more than _SQUARES slots, each square stands for several slots.
    """
    per_square = math.ceil(items_record.at_once / _SQUARES)
    squares, used = (
        math.ceil(items_record.at_once / per_square),
        math.ceil(min(len(items_record.running), items_record.at_once) / per_square),
    )
    return "■" * used + "□" * (squares - used)


class _Pace(NamedTuple):
    """How many items end per second, and when the last one ended."""

    per_s: float
    last: float
    is_current: bool


def _pace(items_record: ItemsRecord, now: float) -> _Pace | None:
    """Measure the pace from the times between two ends in the same slot; return None if it is too early to tell.

    What comes before the first end in a slot, such as loading a model, does not count. If no item has ended for much
    longer than usual, the pace is not current.
    """
    last, between_s = dict[int, float](), list[float]()
    for item in items_record.ended[-_PACE_ITEMS:]:
        if item.slot >= 0 and item.state != "stopped":
            if item.slot in last:
                between_s.append(item.ended - last[item.slot])
            last[item.slot] = item.ended
    if not between_s or (sum(between_s) < _PACE_S and len(between_s) < _PACE_ENDS):
        return None
    usual_s = max(sum(between_s) / len(between_s), 1e-6)
    slots = last.keys() | {item.slot for item in items_record.running}
    newest = max(last.values())
    return _Pace(len(slots) / usual_s, newest, now - newest <= max(PACE_S, 3 * usual_s))


def items_rate(record: RunRecord, now: float) -> str:
    """Return how many items end per second, minute or hour: `3.4 items/s`; '' if this is not known.

    During the run, this is the current pace; after the run, the mean over the whole run.
    """
    ran, seconds = (record.items.ran if record.items else 0), elapsed_s(record, now)
    if record.items is None or not ran or not seconds:
        return ""
    per_s = ran / seconds
    if record.outcome is None:
        pace = _pace(record.items, now)
        if pace is None:
            return ""
        per_s = pace.per_s if pace.is_current else per_s
    units = (("s", 1), ("min", 60), ("h", 3600))
    unit, unit_s = next((pair for pair in units if per_s * pair[1] >= 1), units[-1])
    rate = per_s * unit_s
    return f"{rate:.1f} items/{unit}" if rate < 9.95 else f"{rate:,.0f} items/{unit}"


def items_left(record: RunRecord, now: float) -> str:
    """Say how long the remaining items will take at the current rate: `4 min left`; return '' if it is not known."""
    items_record = record.items
    if items_record is None or items_record.total is None:
        return ""
    left, pace = items_record.total - items_record.done, _pace(items_record, now)
    if not left or pace is None or not pace.is_current:
        return ""
    return f"{duration(max(1, round(left / pace.per_s - (now - pace.last))))} left"


def explain_items(record: RunRecord, results: str) -> str:
    """Say how many items failed, and why. Items with the same error on the same line are listed together.

    `results` is a sentence that says where the results of the other items are.
    """
    assert record.items is not None
    failed = [item for item in record.items.known if item.state == "failed"]
    groups: dict[tuple[str, str, str], list[ItemRecord]] = {}
    for item in failed:
        assert item.failure is not None
        kind = item.failure.error or item.failure.signal or item.failure.summary
        groups.setdefault((item.failure.cause, kind, _failed_at(record, item.failure)), []).append(item)
    items_record = record.items
    others = f"{items_record.finished + items_record.kept:,} finished" + "".join(
        f", {count:,} {state}"
        for count, state in ((items_record.pruned, "pruned"), (items_record.stopped, "stopped"))
        if count
    )
    ranked = sorted(groups.values(), key=lambda group: -len(group))
    rest, where = sum(map(len, ranked[_FAILURES_NAMED:])), whole_log(record)
    parts = [f"{items_record.failed:,} of {counted(items_record.over, 'item')} failed ({others}):"]
    parts += [_alike(record, group) for group in ranked[:_FAILURES_NAMED]]
    parts += [f"  {rest:,} × other causes" if rest else "", results, f"Whole log: {where}" if where else ""]
    return plain_lines("\n".join(filter(None, parts)))


def item_value(item: ItemRecord) -> str:
    """Return an item's value as tables show it; '' for a pruned item, because its value only repeats its metric."""
    if item.state == "pruned":
        return ""
    try:
        return f"{float(item.value):.6g}" if "." in item.value else item.value
    except ValueError:
        return item.value


def item_error(record: RunRecord, failure: Failure) -> str:
    """Say in one line why an item failed, and where: ``KeyError: 'price' (cell line 3: `row["price"]`)``."""
    place = _failed_at(record, failure)
    return first_line(failure.summary) + (f" ({place})" if place else "")


def _alike(record: RunRecord, group: Sequence[ItemRecord]) -> str:
    """Say which items failed in the same way, and quote the error of the first item."""
    failure = group[0].failure
    assert failure is not None
    which = f"items {rank_numbers(sorted(item.item for item in group)[:_ITEMS_NAMED])}"
    if len(group) == 1:
        which = f"item {group[0].item} ({group[0].name})"
    more = f" and {len(group) - _ITEMS_NAMED:,} more" if len(group) > _ITEMS_NAMED else ""
    advice = f"\n    {failure.advice}" if failure.advice else ""
    return f"  {len(group):,} × {item_error(record, failure)}: {which}{more}{advice}"


def _failed_at(record: RunRecord, failure: Failure) -> str:
    """Return the line on which an item failed: ``cell line 3: `1 / 0` ``.

    If the cell runs a script or notebook, the line may be in that script or notebook. If foreach() calls a function,
    the line is in the function's file or cell.
    """
    frames = failure.frames
    if not frames:
        return ""
    at = max((at for at, frame in enumerate(frames) if frame.filename == CELL_NAME), default=-1)
    called = frames[at + 1 :]
    if at >= 0 and (not called or called[0].function != "<module>"):
        where, code = f"cell line {frames[at].line}", code_line(record, frames[at].line)
    else:  # a script that the cell runs, or the function of foreach()
        frame = next(other for other in reversed(called) if _file(other) == _file(called[0]))
        place = "line {} of a notebook cell" if frame.in_cell else f"{frame.filename.rpartition('/')[2]} line {{}}"
        where = place.format(frame.line)
        code = next((line.text for line in frame.source if line.number == frame.line), "")
    code = first_line(code.strip(), CODE_CHARACTERS)
    return f"{where}: `{code}`" if code else where


def _file(frame: CodeFrame) -> str:
    return frame.filename.partition(".ipynb cell ")[0]
