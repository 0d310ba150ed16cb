"""Describes a run of items or a search: its progress, and why items failed."""

from __future__ import annotations

import ast
import contextlib
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
    plural,
    rank_numbers,
)
from sparkring.history.events import CodeFrame, Failure
from sparkring.history.item_records import ItemRecord, ItemsRecord, SearchRecord
from sparkring.history.lines import plain
from sparkring.history.progress import PACE_S
from sparkring.history.record import RunRecord
from sparkring.history.stacks import CELL_NAME

# The pace is measured over the last _PACE_ITEMS items, if at least _PACE_S seconds or _PACE_ENDS ends are known.
_PACE_ITEMS, _PACE_S, _PACE_ENDS = 200, 1.0, 20
ROWS, ROWS_RATE = "rows", "rows/s"  # the metrics of items that score rows
_SCORING = ("partition", "part", "process")  # what such items are called
_SQUARES = 10  # how many squares show the slots of a pool
_FAILURES_NAMED, _ITEMS_NAMED = 8, 10  # how many causes of failure are named, and how many items for each cause


def items(record: RunRecord, *, over: bool = False) -> str:
    """Say how many items are done: `137 of 300 items · 2 failed`; after the run: `298 of 300 items finished · …`.

    After a search that has pruned trials: `36 trials: 6 finished · 30 pruned · …`.
    """
    items_record = record.items
    if items_record is None:
        return ""
    over = over or record.outcome is not None
    number = items_record.finished if over else items_record.done
    whole = items_record.over if over and items_record.total is None else items_record.total
    noun = items_record.noun
    words = counted(number, noun) if whole in (None, number) else f"{number:,} of {counted(whole or 0, noun)}"
    failed = f"{items_record.failed:,} failed" if items_record.failed else ""
    pruned = f"{items_record.pruned:,} pruned" if items_record.pruned else ""
    kept = f"{items_record.kept:,} kept from an earlier run" if items_record.kept else ""
    if over:
        # If an earlier run has finished the items, "0 of 40 items finished" would be wrong.
        words = f"{words} finished" if number or not items_record.kept else counted(whole or items_record.kept, noun)
        if items_record.pruned:
            words = f"{counted(whole or 0, noun)}: {number:,} finished"
    return dotted(words, failed, pruned, kept, _scored(items_record), best_trial(record))


def _scored(items_record: ItemsRecord) -> str:
    """Return how many rows have been scored; '' if the items do not score rows."""
    if items_record.noun not in _SCORING:
        return ""
    return counted(round(sum(item.metrics.get(ROWS, 0) for item in items_record.known if item.state != "kept")), "row")


def best_trial(record: RunRecord) -> str:
    """Return the best trial of a search so far: `best val_loss 0.031 (trial 17)`; '' if there is none."""
    search = None if record.items is None else record.items.search
    if search is None or search.best is None:
        return ""
    item, value = search.best
    return f"best {plain(search.metric)} {number(value)} (trial {item:,})"


def best_parameters(record: RunRecord) -> str:
    """Return the parameters of the best trial as Python code: `dict(lr=0.003, act='relu')`; '' if there is none."""
    items_record = record.items
    if items_record is None or items_record.search is None or items_record.search.best is None:
        return ""
    best = items_record.search.best[0]
    trial = next((item for item in reversed(items_record.ended) if item.item == best), None)
    return f"dict({', '.join(f'{name}={_code(value)}' for name, value in trial.parameters.items())})" if trial else ""


def _code(value: float | str) -> str:
    """Return a value as Python code. The record keeps values that are not numbers as texts."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            ast.literal_eval(value)
            return plain(value)
    return plain(repr(value))


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


def importance_basis(search: SearchRecord) -> str:
    """Say from how many trials the importance was estimated: `(from 34 finished trials)`; '' if this is not known."""
    return f"(from {counted(search.trials, 'finished trial')})" if search.trials else ""


def importances(search: SearchRecord) -> list[tuple[str, float, str]]:
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
    if items_record.noun in _SCORING:
        busy = f"{len(items_record.running):,} running" if items_record.running else ""
        known = items(record) if items_record.known else ""
        return dotted(_loading(items_record), known, busy, items_rate(record, now))
    if items_record.total is not None and items_record.done >= items_record.total and record.outcome is None:
        last = "estimating the importance of the parameters, and ending" if items_record.search else "ending"
        return dotted(items(record), f"{last} the ranks" if items_record.total else "")
    left = items_record.most
    number = f"{items_record.up:,} of {left:,}" if items_record.short and not record.outcome else f"{left:,}"
    running = f"{number} at once" if left == items_record.at_once else f"{number} running"
    return dotted(items(record), f"{_slots(items_record)} {running}", items_rate(record, now))


def _loading(items_record: ItemsRecord) -> str:
    """Say that the model is being loaded, or computes its first batch; '' after that."""
    if items_record.noun == "part" and items_record.running and not items_record.done:
        if not any(ROWS in item.metrics for item in items_record.running):
            return "the model is being loaded"
        if not any(item.metrics.get(ROWS) for item in items_record.running):
            return "the model is computing its first batch"
    return items_record.waits_for


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

    During the run, this is the current pace; after the run, the mean over the whole run. If the items score rows, this
    is the mean number of rows per second since the first row.
    """
    if record.items is not None and record.items.noun in _SCORING:
        return _scoring_rate(record.items, record.ended or now)
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
    nouns = plural(record.items.noun)
    return f"{rate:.1f} {nouns}/{unit}" if rate < 9.95 else f"{rate:,.0f} {nouns}/{unit}"


def _scoring_rate(items_record: ItemsRecord, now: float) -> str:
    with_rate = [item for item in items_record.known if item.metrics.get(ROWS) and item.metrics.get(ROWS_RATE)]
    scored = [item for item in with_rate if item.state != "kept"]
    if items_record.noun == "process":  # a stream has no end, so its current rate is shown
        rate = sum(item.metrics[ROWS_RATE] for item in items_record.running if item in scored)
        return f"{rate:,.0f} rows/s" if rate else ""
    if not scored:
        return ""
    # The rate of an item leaves out the time in which the model was loaded.
    began = min((item.ended or now) - item.metrics[ROWS] / item.metrics[ROWS_RATE] for item in scored)
    last = now if items_record.running else max(item.ended for item in scored)
    return f"{sum(item.metrics[ROWS] for item in scored) / max(last - began, 1e-6):,.0f} rows/s"


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
    parts = [f"{items_record.failed:,} of {counted(items_record.over, items_record.noun)} failed ({others}):"]
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
    noun = "item" if record.items is None else record.items.noun
    which = f"{plural(noun)} {rank_numbers(sorted(item.item for item in group)[:_ITEMS_NAMED])}"
    if len(group) == 1:
        which = f"{noun} {group[0].item} ({group[0].name})"
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
