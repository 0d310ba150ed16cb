"""Shows what ranks have displayed, in an output below the panel, during and after the run.

Styles are inline, so that the output looks the same if a front end removes style sheets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape

from sparkring.history import describe, run_store
from sparkring.history.events import Displayed
from sparkring.history.record import RunRecord
from sparkring.runtime.report import DISPLAY_BYTES, DISPLAYS_KEPT

PAUSE_S = 0.2
BYTES_PER_S = 500_000  # the largest rate at which bytes are sent to the browser
OUTPUT_BYTES = 4_000_000  # the largest size of all ranks' displays; Databricks keeps 10 MB of a cell's output

Bundle = dict[str, str]
_PLACE = {"text/html": '<div data-sparkring-displays=""></div>', "text/plain": ""}


@dataclass
class SharedDisplay:
    """A display, and the ranks that showed it or an identical one."""

    display: Displayed
    ranks: list[int]


class DisplaysView:
    """Draws the ranks' displays in one output below the panel, and redraws them when a new display arrives.

    `show(bundle, id, update)` creates or updates an output of the notebook. With `early`, an empty output is created at
    once. A run in the background needs this: when its first display arrives, the kernel may already be running another
    cell, and an output created only then would appear below that cell.
    """

    def __init__(self, show: Callable[[Bundle, str, bool], None], display_id: str, *, early: bool = False) -> None:
        self._show = show
        self._id = display_id
        self._early = early
        self._made = False
        self._drawn: RunRecord | None = None
        self._due = 0.0

    def refresh(self, record: RunRecord) -> None:
        """Draw new displays, unless the last drawing is too recent."""
        if time.monotonic() >= self._due:
            self.close(record)

    def close(self, record: RunRecord) -> None:
        """Draw new displays, even if the last drawing is recent."""
        output = bundle(record) if self._is_new(record) else None
        if output is None and self._early and not self._made:
            output = _PLACE
        if output is not None:
            self._show(output, self._id, self._made)
            self._made = True
            self._due = time.monotonic() + max(PAUSE_S, len(output["text/html"]) / BYTES_PER_S)

    def _is_new(self, record: RunRecord) -> bool:
        before, self._drawn = self._drawn, record
        return before is None or before.displays is not record.displays or left_out(before) != left_out(record)


def shown(record: RunRecord) -> list[SharedDisplay]:
    """Return the first displays of shared(): as many as fit into OUTPUT_BYTES as HTML."""
    fitting, size = [], 0
    for entry in shared(record):
        size += len(_html(entry))
        if size > OUTPUT_BYTES:
            break
        fitting.append(entry)
    return fitting


def body_html(display: Displayed) -> str:
    """Return a display as harmless HTML."""
    # Not imported at the top, because this import loads libraries that most runs do not need.
    from sparkring.views import foreign

    return foreign.body_html(display)


def words(display: Displayed) -> str:
    """Return a display as text."""
    from sparkring.views import foreign  # imported here for the reason given above

    return foreign.words(display)


def bundle(record: RunRecord) -> Bundle | None:
    """Return the output with all displays; None if there is nothing to show."""
    some = shown(record)
    parts = [_html(entry) for entry in some]
    texts = [f"[{_who(entry)}] {describe.first_line(words(entry.display), 200)}" for entry in some]
    notes = []
    if more := len(shared(record)) - len(some):
        notes.append(f"{describe.counted(more, 'more output')}: {folder(record)}")
    for rank, left in left_out(record).items():
        most = f"at most {DISPLAYS_KEPT} and {describe.size(DISPLAY_BYTES)} are saved for each rank"
        notes.append(f"{describe.counted(left, 'output')} of rank {rank} left out: {most}")
    if not parts and not notes:
        return None
    body = "".join(parts) + "".join(f"<div><small>{escape(note)}</small></div>" for note in notes)
    # The two classes keep MathJax from typesetting TeX in the displays. TeX can contain links, which are not checked.
    html = f'<div class="mathjax_ignore tex2jax_ignore" data-sparkring-displays="{escape(record.run_id)}">{body}</div>'
    return {"text/html": html, "text/plain": "\n".join(texts + notes)}


def shared(record: RunRecord) -> list[SharedDisplay]:
    """Return the displays that `--logs` selects, in the order in which each rank showed them.

    Identical displays from several ranks are merged. For a run of items, return all displays in the order of the items.
    """
    if record.items is not None:
        in_order = sorted(record.displays, key=lambda display: display.item or 0)
        return [SharedDisplay(display, [display.rank]) for display in in_order]
    by_rank: dict[int, list[Displayed]] = {}
    for display in record.displays:
        if _asked_for(record, display.rank):
            by_rank.setdefault(display.rank, []).append(display)
    entries: list[SharedDisplay] = []
    for rank in sorted(by_rank):
        before, own = [_seen(entry.display) for entry in entries], list(map(_seen, by_rank[rank]))
        merged: list[SharedDisplay] = []
        for what, low, high, begin, end in SequenceMatcher(None, before, own, autojunk=False).get_opcodes():
            merged += entries[low:high]
            if what == "equal":
                for entry in entries[low:high]:
                    entry.ranks.append(rank)
            else:
                merged += [SharedDisplay(display, [rank]) for display in by_rank[rank][begin:end]]
        entries = merged
    return entries


def _who(entry: SharedDisplay) -> str:
    """Return the ranks that showed the display or, in a run of items, the item that showed it."""
    return describe.rank_list(entry.ranks) if entry.display.item is None else f"item {entry.display.item}"


def _seen(display: Displayed) -> tuple[str, bytes]:
    return display.mime_type, display.data


def left_out(record: RunRecord) -> dict[int, int]:
    """Return the number of displays that were left out, by rank; ranks without such displays are not included."""
    counts = {rank.rank: rank.displays_left_out for rank in record.ranks if _asked_for(record, rank.rank)}
    return {rank: count for rank, count in counts.items() if count}


def folder(record: RunRecord) -> str:
    """Return the path of the folder with the files of the displays; '' if the run is not saved."""
    return f"{record.log_folder}/{run_store.DISPLAYS}" if record.log_folder else ""


def closing_words(record: RunRecord) -> list[str]:
    """Return a line for a terminal with the number of displays and their folder; [] if there are none."""
    entries = shared(record)
    return [f"{describe.counted(len(entries), 'output')}: {folder(record)}"] if entries and record.log_folder else []


def _asked_for(record: RunRecord, rank: int) -> bool:
    return record.logs == "all" or (record.logs == "rank0" and rank == 0)


def _html(entry: SharedDisplay) -> str:
    tag = f"<div><b>[{escape(_who(entry))}]</b></div>"
    return f'<div style="margin:0 0 12px">{tag}<div style="overflow-x:auto">{body_html(entry.display)}</div></div>'
