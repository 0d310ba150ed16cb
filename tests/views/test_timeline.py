"""Tests what views show of Horovod's timeline."""

from __future__ import annotations

import io
import itertools
import re

from texts import mentions

from sparkring.history import describe
from sparkring.history.events import (
    AttemptStarted,
    Lateness,
    RunFinished,
    SpentAt,
    TensorTimes,
    TimelineSaved,
    TimeSpent,
    UserCall,
)
from sparkring.views import compare
from sparkring.views.html import PANEL_BYTES, bundle, panel
from sparkring.views.live import state_message
from sparkring.views.sections import timeline
from sparkring.views.terminal import TerminalView

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"


def saved(**changed) -> TimelineSaved:
    tensors = (TensorTimes("allreduce.grad", 40, 8.0, 0.0, 0.5, 3.0), TensorTimes(HOSTILE, 2, 0.5))
    late = (Lateness(1, 38, 6.0), Lateness(0, 2, 0.001))
    known = {
        "time": 1.0, "name": "timeline.json", "size_bytes": 123_456, "wall_s": 20.0, "negotiating_s": 8.0,
        "waiting_s": 0.0, "copying_s": 0.5, "reducing_s": 3.0, "elsewhere_s": 8.5, "operations": 42, "tensors": 2,
        "slowest": tensors, "late": late,
    }  # fmt: skip
    return TimelineSaved(**{**known, **changed})


def test_what_is_said_in_plain_words(replayed):
    """The section says how the time was spent, which rank the others waited for, and how to open the file."""
    record = replayed(saved())
    for form in ("tab", "final"):
        shown = timeline.html(record, 0.0, form)
        assert mentions(shown, "waited 6.0 s", "for rank 1", "38 times")
        assert "for rank 0" not in shown
        assert "waiting for ranks 8.0 s (40%)" in shown
        assert "/runs/a1b2/timeline.json (123 kB)" in shown
        assert "https://ui.perfetto.dev" in shown
        assert "allreduce.grad" in shown
        assert "waiting for data" not in re.sub(r"<[^>]*>", "", shown)  # because no time was spent on it
    assert timeline.html(record, 0.0, "stacked") == ""


def test_nothing_is_said_of_a_run_without_one(replayed):
    assert timeline.html(replayed(), 0.0, "tab") == ""


def test_hostile_names_are_text(replayed):
    """Markup, bidi codes and escape sequences in a tensor's name or in a problem do not reach the page."""
    shown = panel(replayed(saved(problem=HOSTILE), RunFinished(2.0, "finished")), now=3.0, final=True)
    assert "<script" not in shown
    assert "\u202e" not in shown
    assert "\x1b" not in shown
    assert "&lt;script&gt;" in shown


def test_the_bar_is_as_long_as_the_whole(replayed):
    """The bar's parts follow one another, and add up to the whole."""
    shown = timeline.html(replayed(saved()), 0.0, "tab").partition("how long")[0]
    rects = [(float(x), float(width)) for x, width in re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)"', shown)]
    for (x, width), (after, _) in itertools.pairwise(rects):
        assert abs(x + width - after) < 0.2
    assert abs(sum(width for _, width in rects) - 560) < 0.5


def test_large_ones_stay_small(replayed):
    """With long names, many ranks and many attempts, the panel stays within its size limit."""
    tensors = tuple(TensorTimes("x" * 200, 10**6, 1e5, 1e5, 1e5, 1e5) for _ in range(20))
    late = tuple(Lateness(rank, 10**6, 1e5 / (rank + 1)) for rank in range(64))
    many = [AttemptStarted(1.0, number, 100) for number in range(1, 21)]
    record = replayed(*many, *[saved(slowest=tensors, late=late, attempt=n) for n in range(1, 21)], size=100)
    assert len(timeline.html(record, 0.0, "tab")) < 60_000
    assert len(panel(record, now=3.0, final=True)) < PANEL_BYTES


def test_empty_and_broken_ones(replayed):
    """The section says if a timeline has no completed operation."""
    none = TimelineSaved(1.0, "timeline.json", 3, problem="it has no completed operation")
    assert "no completed operation" in timeline.html(replayed(none), 0.0, "tab")


def test_the_terminal_and_the_plain_text_name_it(replayed):
    """The line about the timeline says how the time was spent, which rank was late, and where the file is."""
    stream = io.StringIO()
    record = replayed(saved(), RunFinished(2.0, "finished"))
    TerminalView(stream).close(record)
    for said in (stream.getvalue(), bundle(record, now=3.0, final=True)["text/plain"]):
        (line,) = [line for line in said.splitlines() if "timeline:" in line]
        assert "42 operations on 2 tensors in 20 s" in line
        assert "42% outside Horovod, 40% waiting for ranks, 15% reducing" in line
        assert mentions(line, "waited 6.0 s", "for rank 1")
        assert "/runs/a1b2/timeline.json" in line


def spent(size=2, slow=1):
    """Return what ranks report each second for 12 s: they wait for the rank `slow`, which is in augment()."""
    reports = []
    for second in range(1, 13):
        for rank in range(size):
            phases = {"compute": 0.9 * second, HOSTILE: 0.1 * second}
            if rank != slow:
                phases = {"compute": 0.2 * second, "collective": 0.8 * second}
            places = [SpentAt(phase, "", (UserCall("augment", 12),), seconds) for phase, seconds in phases.items()]
            time = 1_700_000_001.0 + second
            reports.append(TimeSpent(12 * second, second, phases, tuple(places), time=time, rank=rank))
    return reports


def test_where_the_time_goes(replayed, unfolded):
    """A lane and a bar for each rank, and the verdict, in the tab and in what is saved; it is also in all texts."""
    record = replayed(*spent())
    words = describe.verdict_words(record)
    assert "rank 1" in words
    assert state_message(record, 60.0)["watch"] == (words, "timeline")
    ended = replayed(*spent(), RunFinished(1_700_000_013.0, "finished"))
    shown = panel(ended, now=60.0, final=True)
    TerminalView(printed := io.StringIO()).close(ended)
    for text in (timeline.html(record, 60.0, "tab"), shown, bundle(ended, now=60.0, final=True)["text/plain"]):
        assert words in text
    assert words in printed.getvalue()
    assert timeline.html(record, 60.0, "stacked") == ""
    for drawn in (timeline.html(record, 60.0, "tab"), unfolded(shown)):
        assert "rank 0: 80 % in collectives, 20 % computing" in drawn
        assert drawn.count("<path") == 4, "each rank has two phases in its lane"
    assert "<script" not in timeline.html(record, 60.0, "tab")
    assert "<script" not in re.sub(r' alt="[^"]*"', "", shown)
    assert ("verdict", words, "") in compare.facts([ended, replayed(RunFinished(1_700_000_013.0, "finished"))])


def test_the_picture_of_many_ranks_is_small(replayed):
    record = replayed(*spent(1_024, slow=700), size=1_024)
    drawn = timeline.html(record, 60.0, "tab")
    assert "rank 700" in drawn
    assert drawn.count("text-anchor") == timeline.LANES
    assert len(drawn) < 60_000
