"""Shows a run as HTML in a notebook: a panel that is redrawn in place, and its final form, which is saved.

The HTML has no scripts, loads nothing from other hosts, and stays readable if a page removes styles.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from sparkring.history import describe, lines, reading
from sparkring.history.record import RunRecord
from sparkring.views import attempts, timelines
from sparkring.views.displays import Bundle, DisplaysView
from sparkring.views.markup import enclosed, note, size_bytes
from sparkring.views.sections import (
    Form,
    checkpoints,
    code,
    failure,
    items,
    log,
    metrics,
    ranks,
    restarts,
    search,
    shards,
    state,
    stream,
    timeline,
)

PAUSE_S = 0.2
# On a warm gang, the panel is first drawn after this time. Most cells end earlier, so only their output is shown.
WARM_PAUSE_S = 0.1
PAUSE_PER_WORK = 10  # drawing takes at most a tenth of the time, because the ranks may need the processor
BYTES_PER_S = 500_000  # the largest rate at which bytes are sent to the browser
PANEL_BYTES, SPARE_BYTES = 190_000, 100
# The parts that are left out if a panel would be too large, the least important first. The cell comes first, since the
# notebook has it, too.
LEFT_OUT = ("the cell and its options", "metrics by rank", "timeline", "data", "checkpoints", "attempts", "GPUs",
            "lines", "metrics", "items")  # fmt: skip
QUICK_LINES, QUICK_BYTES = 200, 120_000  # the most lines and bytes of a quick run's output that are shown


class HtmlView:
    """Draws the panel in place, at most a few times a second, and once more when the run has ended.

    After a quick run on a warm gang, only the output of the ranks is shown, if they have printed anything. Displays of
    the ranks appear in another output below the panel. With `early`, both outputs are created at once, because a run in
    the background can create no outputs after its cell has returned.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        show: Callable[[Bundle, str, bool], None] | None = None,
        after_s: float = 0.0,
        pause_s: float = PAUSE_S,
        early: bool = False,
    ) -> None:
        self._after_s = after_s
        self._pause_s = pause_s
        self._early = early
        self._clock = clock
        self._show = show or _display
        self._id = f"sparkring-{secrets.token_hex(8)}"
        self._due: float | None = None
        self._shown: Bundle | None = None
        self._displays = DisplaysView(self._show, f"{self._id}-displays", early=early)

    def refresh(self, record: RunRecord) -> None:
        """Draw the run, unless the last drawing is too recent."""
        began = self._clock()
        if self._due is None:
            warm_pause_s = WARM_PAUSE_S if record.warm and not self._early else 0.0
            self._due = began + max(self._after_s, warm_pause_s)
        if began >= self._due or (record.displays and self._shown is None):  # the panel must come before the displays
            drawn = self._draw(record, final=False)
            took = self._clock() - began
            self._due = began + max(self._pause_s, PAUSE_PER_WORK * took, drawn / BYTES_PER_S)
        self._displays.refresh(record)

    def close(self, record: RunRecord) -> None:
        """Draw the final form, which stays in the notebook."""
        if self._shown is not None or record.recent_count or record.notices or not describe.quick(record):
            self._draw(record, final=True)
        self._displays.close(record)

    def again(self, record: RunRecord) -> None:
        """Draw the panel in the current cell, too. From then on, both panels are updated."""
        self._shown = bundle(record, now=time.time(), final=record.outcome is not None)
        self._show(self._shown, self._id, False)

    def _draw(self, record: RunRecord, *, final: bool) -> int:
        output = bundle(record, now=time.time(), final=final)
        if output != self._shown:
            self._show(output, self._id, self._shown is not None)
            self._shown = output
        return len(output["text/html"])


def _display(output: Bundle, display_id: str, update: bool) -> None:
    from IPython.display import display

    display(output, raw=True, display_id=display_id, update=update)  # type: ignore[no-untyped-call]


def show(record: RunRecord) -> None:
    """Show the run of `record`. The output lacks the run's id, because a live panel hides outputs that have the id."""
    output = bundle(record._replace(run_id=""), now=describe.last_known(record), final=record.outcome is not None)
    _display(output, f"sparkring-{secrets.token_hex(8)}", False)


def bundle(record: RunRecord, *, now: float, final: bool) -> Bundle:
    """Return the run in all formats that a notebook keeps: HTML and plain text."""
    if final and describe.quick(record):
        return {"text/html": _quick(record), "text/plain": describe.last_lines(record) or describe.closing(record, now)}
    story = [chapter.line for chapter in attempts.story(record)[-restarts.ATTEMPTS_SHOWN :]]
    lines_of_text = [
        *story,
        *describe.not_finite_words(record),
        *reading.closing_words(record, now),
        *timelines.closing_words(record),
        *filter(None, [describe.verdict_words(record)]),
    ]
    lines_of_text += [] if record.ended else [state.as_of(now)]
    plain = "\n".join([describe.short(record, now), *(f"sparkring: {line}" for line in lines_of_text)])
    return {"text/html": panel(record, now=now, final=final), "text/plain": plain}


def _quick(record: RunRecord) -> str:
    """Return what the ranks of a quick run printed, as HTML. If they printed nothing, say how the run ended."""
    seen = lines.visible(record.recent, record.logs)
    every = lines.folded([line for line in seen if not lines.is_noise(line)])
    last = every[-QUICK_LINES:]
    while size_bytes(shown := log.pre(last)) > QUICK_BYTES:
        last = last[len(last) // 2 :]
    cut = len(last) < len(every) or len(record.recent) < record.recent_count
    parts = [
        note(f"earlier lines: {describe.log_path(record)}") if cut else "",
        log.box(shown, final=True),
        state.notices_html(record, "final"),
        log.noise_html(seen),
    ]
    return enclosed("".join(parts) or note(describe.closing(record, record.ended)), record.run_id)


def panel(record: RunRecord, *, now: float, final: bool) -> str:
    """Return the run as one block of HTML of at most PANEL_BYTES. The order is that of the live panel and its tabs."""
    form: Form = "final" if final else "stacked"
    parts = {
        "head": state.head_html(record, now),
        "progress": state.progress_html(record, now),
        "failure": failure.html(record, now, form),
        "ranks": ranks.html(record, now, form),
        "waiting": state.waiting_html(record),
        "notices": state.notices_html(record, form),
        "stream": stream.html(record, now, form),
        "search": search.html(record, now, form),
        "items": items.html(record, now, form),
        "metrics": metrics.html(record, now, form),
        "lines": log.html(record, now, form),
        "data": shards.html(record, now, form),
        "checkpoints": checkpoints.html(record, now, form),
        "attempts": restarts.html(record, now, form),
        "timeline": timeline.html(record, now, form),
        "GPUs": ranks.gpus_html(record),
    }
    if final:
        parts |= {
            "metrics by rank": metrics.by_rank_html(record),
            "the cell and its options": code.html(record, now, form),
        }
    page = _bounded(parts, record.run_id)
    if final and (logs := log.by_rank_html(record, PANEL_BYTES - SPARE_BYTES - size_bytes(page))):
        page = enclosed("".join(parts.values()) + logs, record.run_id)
    return page


def _bounded(parts: dict[str, str], run_id: str) -> str:
    """Return the page with the `parts`. If it would be too large, replace parts with a note, the least important first.

    The parts are changed in place.
    """
    left_out: list[str] = []
    candidates = [name for name in LEFT_OUT if parts.get(name)]
    while size_bytes(page := enclosed("".join(parts.values()), run_id)) > PANEL_BYTES - SPARE_BYTES and candidates:
        left_out.append(candidates.pop(0))
        parts[left_out[-1]] = ""
        parts["left out"] = note(f"not shown for lack of space: {', '.join(left_out)}")
    return page
