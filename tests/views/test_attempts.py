"""Tests the lines that views show for attempts."""

from __future__ import annotations

import re
from html import unescape

import pytest
from texts import mentions

from sparkring.history.describe import closing
from sparkring.history.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointRestored,
    CheckpointSaved,
    Failure,
    Metrics,
    Output,
    RankFailed,
    RankStarted,
    RunFinished,
)
from sparkring.views.attempt_line import picture
from sparkring.views.attempts import news, notices, story, why
from sparkring.views.live import state_message
from sparkring.views.sections import restarts

T = 1_700_000_000.0
FOLDER = "dbfs:/ml/run1"
KILLED = Failure("signal", "killed by SIGKILL")


def saved(time: float, step: int, **fields):
    return CheckpointSaved(FOLDER, f"{step:08d}.1795294802123-0", step, 4_200_000, **fields, time=time, rank=0)


FIRST = [
    AttemptStarted(T + 1, 1, 2),
    *(RankStarted(T + 2, rank, "vm", 40 + rank) for rank in (0, 1)),
    saved(T + 12, 120),
    Output("stderr", b"munmap_chunk()\n", time=T + 14, rank=1),
    RankFailed(T + 15, 1, KILLED),
    AttemptEnded(T + 15, 1, "rank 1 was killed", 1, 0.5),
]
SECOND = [AttemptStarted(T + 16, 2, 1, "00000120.1795294802123-0", 120), RankStarted(T + 16.5, 0, "vm", 50)]
BACK = [CheckpointRestored(FOLDER, "00000120.1795294802123-0", 120, time=T + 16.9, rank=0)]


@pytest.fixture
def told(replayed):
    """Return a function that takes events and returns the lines about a run's attempts after these events.

    The run has a checkpoint directory.
    """
    return lambda *events: [each.line for each in story(replayed(*events, up=False, checkpoint_dir=FOLDER))]


def steps(time: float, *numbers: int) -> list[Metrics]:
    return [Metrics({"loss": 0.5}, step=number, time=time, rank=0) for number in numbers]


@pytest.mark.parametrize(
    ("before", "since", "lost"),
    [
        (range(118, 125), [121], 4),
        (range(118, 125), [120], 5),  # steps are counted from 0
        (range(118, 121), [121], 0),
        (range(118, 125), [], None),
        (range(100, 150, 10), [130], None),  # not each step is reported
        (range(3900, 3950), [3800], None),  # the checkpoints count something else
    ],
)
def test_a_notice_names_the_last_restart(replayed, before, since, lost):
    """It counts the steps that were lost, if they are certain."""
    record = replayed(
        *FIRST[:3], *steps(T + 13, *before), *FIRST[3:], *SECOND, *BACK, *steps(T + 17, *since), up=False,
        checkpoint_dir=FOLDER,
    )  # fmt: skip
    [notice] = notices(record, 5)
    where = "attempt 1 ended: rank 1 on vm was killed by SIGKILL; continued from step 120"
    assert notice == where + ("" if lost is None else f", {lost} steps lost")
    assert notices(replayed(*FIRST[:3], up=False), 5) == []


def test_the_end_says_how_often_the_run_was_restarted(replayed):
    events = (*FIRST, *SECOND, *BACK)
    assert "attempt 2" in state_message(replayed(*events, up=False), T + 18)["facts"]
    over = state_message(replayed(*events, RunFinished(T + 21, "finished"), up=False), T + 22)
    assert "attempt 2" not in over["facts"]
    assert over["took"].endswith(" after 1 restart")


def test_a_rank_is_lost_and_the_run_goes_on(told):
    """The lines say what ended the attempt, what had been saved, and from which step the next attempt continued."""
    lost = "attempt 1 · 2 ranks · 14 s · ended: rank 1 on vm was killed by SIGKILL (step 120 was saved 3.0 s earlier)"
    assert told(*FIRST, *SECOND) == [lost, "attempt 2 · 1 rank instead of 2 · continues from step 120 · running"]
    assert told(*FIRST, *SECOND, *BACK) == [
        lost,
        "attempt 2 · 1 rank instead of 2 · continued from step 120 after 1.9 s · running",
    ]
    assert told(*FIRST, *SECOND, *BACK, RunFinished(T + 26, "finished"))[1] == (
        "attempt 2 · 1 rank instead of 2 · continued from step 120 after 1.9 s · finished after 10 s"
    )


def test_what_the_lost_rank_printed_last_is_kept(replayed):
    """The story has the last lines of the rank that failed."""
    first, second = story(replayed(*FIRST, *SECOND, up=False))
    assert (first.failed_rank, [line.text for line in first.last_lines]) == (1, ["munmap_chunk()"])
    assert (first.state, second.state, second.last_lines) == ("ended", "running", ())


def test_a_run_that_never_lost_a_rank_has_no_story(told):
    """There is no line about attempts, unless the run continues from an earlier run's checkpoint."""
    assert told() == []
    assert told(AttemptStarted(T, 1, 2)) == []
    assert told(AttemptStarted(T, 1, 2, "x", 40)) == ["attempt 1 · 2 ranks · continues from step 40 · starting"]


def test_nothing_was_saved(told):
    """The line says that no checkpoint was saved, and that the next attempt runs the cell again."""
    lines = told(*(each for each in FIRST if not isinstance(each, CheckpointSaved)), AttemptStarted(T + 16, 2, 2))
    assert mentions(lines[0], "killed by SIGKILL", "checkpoints()", "saved nothing")
    assert mentions(lines[1], "attempt 2 · 2 ranks", "again", "starting")


def test_a_ring_that_grows_has_no_failed_rank(told):
    """The line quotes the driver's reason for ending the attempt."""
    events = [AttemptStarted(T, 1, 1), AttemptEnded(T + 9, 1, "2 slots are free"), AttemptStarted(T + 9, 2, 2, "x", 9)]
    lines = told(*events, RunFinished(T + 12, "failed", "no"))
    assert lines[0] == "attempt 1 · 1 rank · 9.0 s · ended: 2 slots are free (checkpoints() saved nothing)"
    assert mentions(lines[1], "attempt 2", "2 ranks", "1", "step 9", "failed", "3.0 s")


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Failure("exception", "ValueError: bad\nshape"), "rank 1 on vm failed: ValueError: bad"),
        (Failure("exit", "exited with code 3"), "rank 1 on vm exited with code 3"),
        (Failure("lost", "lost: no sign of life for 20 s"), "rank 1 on vm was lost: no sign of life for 20 s"),
        (
            Failure("out of memory", "out of memory: killed by SIGKILL"),
            "rank 1 on vm failed: out of memory: killed by SIGKILL",
        ),
    ],
)
def test_why_it_ended(replayed, failure, words):
    """Every kind of failure is described in one clause."""
    record = replayed(*FIRST[:3], RankFailed(T + 9, 1, failure), AttemptEnded(T + 9, 1, "?", 1), up=False)
    assert why(record.attempts[0]) == words


def test_news_is_told_once(replayed):
    """There is one line for each start and each end of an attempt, and no line appears twice."""
    seen: tuple = ()
    lines = []
    events = [*FIRST, *SECOND, *BACK]
    for count in range(len(events) + 1):
        record = replayed(*events[:count], up=False, checkpoint_dir=FOLDER)
        lines += news(seen, record)
        seen = record.attempts
    assert lines == [
        "attempt 1 ended after 14 s: rank 1 on vm was killed by SIGKILL (step 120 was saved 3.0 s earlier)",
        "attempt 2 continues from step 120 on 1 rank instead of 2",
    ]
    assert news((), replayed(*events, up=False, checkpoint_dir=FOLDER)) == lines, "the news of one record is in order"


def test_the_closing_line(replayed):
    """The closing line says how often the run was restarted, and what was saved last."""
    record = replayed(*FIRST, *SECOND, RunFinished(T + 40, "finished"), up=False)
    assert closing(record, 0.0) == "1 rank finished in 40 s after 1 restart · last saved step 120"


# ── The picture ───────────────────────────────────────────────────────────────


def drawn(record, now=T + 21):
    """Return the texts of the picture, and the places and widths of its bars."""
    page = picture(record, now, story(record))
    bars = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', page)
    return re.findall(r"<text[^>]*>([^<]*)</text>", page), [tuple(map(float, bar)) for bar in bars]


def test_attempts_are_bars_over_time_with_the_cause_of_each_end(replayed):
    record = replayed(*FIRST, *SECOND, *BACK, RunFinished(T + 26, "finished"), up=False, checkpoint_dir=FOLDER)
    texts, (first, second) = drawn(record)
    assert texts[:2] == ["attempt 1", "attempt 2"]
    assert {"1: rank 1 on vm was killed by SIGKILL", "2: finished", "0 s", "5 s", "25 s"} <= set(texts)
    assert sum(first) < second[0], "between the attempts, nothing ran"
    page = restarts.html(record, T + 26, "tab")
    assert "green ticks: 1 checkpoint" in page
    assert page.index("<svg") < page.index("attempt 1 · 2 ranks")


def test_while_the_run_goes_on_the_picture_does_not_change_all_the_time(replayed):
    record = replayed(*FIRST, *SECOND, up=False)
    assert len({picture(record, T + 121 + tenth / 10, story(record)) for tenth in range(50)}) <= 2
    assert picture(replayed(), T, []) == ""


def test_texts_overlap_nothing_and_attempts_that_fail_at_once_are_seen(replayed):
    """Of many attempts, those that ended last are named."""
    events = []
    for number in range(1, 13):
        began = T + 50 * number
        events += [AttemptStarted(began, number, 2), AttemptEnded(began, number, f"<b>{number}" + "x" * 90)]
    record = replayed(*events, RunFinished(T + 900, "failed", "no <i>"), up=False)
    texts, bars = drawn(record, T + 900)
    assert len(bars) == 12
    assert min(width for _, width in bars) == 2
    named = [text for text in texts if re.match(r"\d+: ", text)]
    assert named[0].startswith("12: &lt;b&gt;12x")
    assert 4 <= len(named) < 12
    assert all(len(unescape(text)) <= 64 for text in named)
