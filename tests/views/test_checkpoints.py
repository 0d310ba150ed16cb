"""Tests how views show the checkpoints of a run and of a directory."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from texts import mentions

from sparkring.checkpointing.entries import Commit, Entry, File, Name
from sparkring.checkpointing.foreign import Other
from sparkring.checkpointing.inventory import Inventory
from sparkring.history.describe import ago
from sparkring.history.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointDamaged,
    CheckpointRemoved,
    CheckpointSaved,
    Failure,
    Output,
    RankFailed,
    RankStarted,
    RunFinished,
)
from sparkring.views import checkpoint_line as timeline
from sparkring.views import checkpoints as views
from sparkring.views.checkpoint_line import CheckpointMark, Series
from sparkring.views.checkpoints import CheckProgress
from sparkring.views.html import PANEL_BYTES, bundle, panel
from sparkring.views.terminal import TerminalView

T = 1_700_000_000.0
FOLDER = "dbfs:/ml/run1"
SHAPE = re.compile(r'<g transform="translate\(([\d.]+) ([\d.]+)\)(?: scale\(0.75\))?"><title>(.*?)</title>(.*?)</g>')


def entry(step, state="committed", *, stamp=1_795_294_802_123, number=None, reason="", **fields) -> Entry:
    """Return a checkpoint that sparkring saved `step` seconds after T."""
    commit = Commit(
        step, T + step, (File("rank-0.safetensors", 4_200_000, "x:0"),), {}, "line", "run-a1b2c3", 2, False, "", {}
    )
    name = str(Name(step, stamp, step if number is None else number))
    return Entry(name, state, None if state == "partial" else commit._replace(**fields), reason)


def directory(*entries: Entry, **fields) -> Inventory:
    """Return an inventory of these checkpoints, made one minute after step 300."""
    return Inventory(FOLDER, T + 360, tuple(sorted(entries, key=lambda e: e.parsed.age, reverse=True)), **fields)


THREE = directory(
    entry(100, metrics={"loss": 0.5, "acc": 0.9}),
    entry(200, metrics={"loss": 0.25, "acc": 0.8}),
    entry(300, metrics={"loss": 0.75, "acc": 0.7}, size=4, sharded=True),
    metric="loss",
)


def saved(time, step, *, name="", **fields):
    return CheckpointSaved(
        FOLDER, name or f"{step:08d}.1795294802123-{step}", step, 4_200_000, **fields, time=time, rank=0
    )


def removed(step):
    return CheckpointRemoved(FOLDER, f"{step:08d}.1795294802123-{step}", time=T + 99, rank=0)


def damaged(step, reason="cut"):
    return CheckpointDamaged(FOLDER, f"{step:08d}.1795294802123-{step}", step, reason, time=T + 99, rank=0)


# ── A directory ───────────────────────────────────────────────────────────────


def test_what_a_resume_takes_and_what_is_best():
    """The text and the table name the newest committed checkpoint and the best checkpoint."""
    assert views.folder_words(THREE) == [
        "3 checkpoints: 12.6 MB on disk.",
        "The resume point is step 300, saved 1 min ago by run run-a1b2c3 on 4 ranks.",
        "The best by loss (min) is step 200: 0.25.",
    ]
    headers, rows = views.table_rows(views.listed(THREE), THREE.time, 200)
    assert headers == ("step", "saved", "size", "loss", "acc", "run", "ranks", "state")
    assert rows == [
        ("300", "1 min ago", "4.20 MB", "0.75", "0.7", "run-a1b2c3", "4, sharded", "committed; the resume point"),
        ("200", "2 min ago", "4.20 MB", "0.25", "0.8", "run-a1b2c3", "2", "committed, best"),
        ("100", "4 min ago", "4.20 MB", "0.5", "0.9", "run-a1b2c3", "2", "committed"),
    ]
    assert views.advice(THREE) == []
    assert "step 300" in views.folder_words(THREE._replace(metric="acc", mode="max"))[1]
    assert "step 100: 0.9" in views.folder_words(THREE._replace(metric="acc", mode="max"))[2]


def test_a_later_attempt_is_newer_whatever_its_step():
    """After a restart, lower steps are saved again; the resume point is the checkpoint that was saved last."""
    found = directory(entry(300), entry(120, stamp=1_795_294_999_999, number=0))
    assert [mark.step for mark in views.listed(found).marks if mark.resumes] == [120]


def test_advice_is_about_what_is_not_whole():
    """The advice names a damaged checkpoint, a checkpoint that is being written, and an abandoned checkpoint."""
    found = directory(
        entry(100, "partial"),
        entry(200, "corrupt", reason="rank-0.safetensors is cut"),
        entry(300),
        entry(400, "partial"),
    )
    told = views.advice(found)
    assert mentions(told[0], "1 checkpoint", "damaged", "step 200 (rank-0.safetensors", "skips it")
    assert mentions(told[1], "Step 400", "no commit", "still saving")
    assert mentions(told[2], "Step 100", "never committed", "newer checkpoints")
    assert views.folder_words(found)[0] == "1 checkpoint, 1 damaged, 2 not committed: 8.40 MB on disk."


def test_no_checkpoint_is_whole():
    """The advice begins by saying that no checkpoint is complete, and there is no resume point."""
    found = directory(entry(100, "partial"), entry(200, "corrupt", reason="x"))
    assert mentions(views.advice(found)[0], "No checkpoint", "complete", "from the beginning")
    assert not any("The resume point" in line for line in views.folder_words(found))
    assert not any(mark.resumes for mark in views.listed(found).marks)


def test_a_metric_that_no_checkpoint_has():
    """The advice lists the metrics that the checkpoints have."""
    assert [
        mentions(text, "No checkpoint", "f1", "acc, loss") for text in views.advice(THREE._replace(metric="f1"))
    ] == [True]
    assert views.advice(directory(entry(1), metric="f1")) == [
        "No checkpoint has a value of f1: none was saved with metrics."
    ]


def test_two_trainings_in_one_directory():
    """The advice says that two training runs have saved to the same directory."""
    assert "2 training runs" in views.advice(directory(entry(1), entry(2, lineage="other")))[0]


def test_an_empty_directory_is_one_sentence():
    """For an empty or missing directory, only one sentence is shown."""
    assert views.empty_words(directory()) == f"{FOLDER} has no checkpoints."
    assert mentions(views.empty_words(directory(exists=False)), FOLDER, "not exist")


def test_what_others_have_written():
    """Checkpoints of other tools have a separate table, even if sparkring has saved none."""
    others = (Other("Keras model", "best.keras", 35_000_000, T), Other("torch", "x.pt", 1, 0.0))
    told = views.checkpoints_text(directory(others=others))
    assert re.search(r"best.keras +Keras model +6 min ago +35.0 MB\n", told)
    assert "may be incomplete" in told
    assert "<svg" not in views.checkpoints_html(directory(others=others))
    many = directory(others=others * 60)
    assert "the newest 50 of 120" in views.checkpoints_html(many)


def test_checked():
    """After a check, the text says that all bytes were read."""
    assert views.folder_words(THREE._replace(checked=True))[0] == (
        "3 checkpoints: 12.6 MB on disk; all 12.6 MB were read and match their digests."
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3, "just now"), (59.9, "59 s ago"), (61, "1 min ago"), (7200, "2 h ago"), (3 * 86400, "3 days ago")],
)
def test_ages(seconds, words):
    """Ages are given in one unit, rounded down."""
    assert ago(seconds) == words


# ── The picture ───────────────────────────────────────────────────────────────


def test_a_mark_for_each_as_high_as_its_metric():
    """Later marks are farther right, and greater values are higher. The best is a star; the resume point has a ring."""
    marks = SHAPE.findall(timeline.picture(views.listed(THREE), THREE.time))
    assert [float(x) for x, *_ in marks] == [60.0, 106.0, 152.0]
    heights = [float(y) for _, y, *_ in marks]
    assert heights[2] < heights[0] < heights[1], "0.75, 0.5, 0.25: y grows downwards"
    shapes = [shape for *_, shape in marks]
    assert timeline._SHAPES["best"] in shapes[1]
    assert timeline._RING in shapes[2]
    assert marks[1][2] == "step 200 · saved 2 min ago · committed, best · 4.20 MB · loss 0.25 · acc 0.8"


def test_states_differ_in_shape():
    """The marks of different states differ in shape, not only in colour."""
    outlines = {re.sub(r'(fill|stroke)="[^"]*"', "", shape) for shape in timeline._SHAPES.values()}
    assert len(outlines) == len(timeline._SHAPES)


def test_where_another_run_begins(unfolded):
    """The picture has a line between two runs, and the name of each run."""
    found = directory(
        *(entry(step) for step in (1, 2, 3)),
        *(entry(4, stamp=1_795_299_999_999, run_id="run-0fe77d") for _ in "x"),
    )
    page = unfolded(views.checkpoints_html(found))
    assert "run …a1b2c3" in page
    assert "run …0fe77d" in page
    assert page.count("stroke-dasharray") == 1


def test_sizes_stand_below_where_they_differ(unfolded):
    """Sizes are labelled in the picture only if they differ."""
    assert "4.20 MB</text>" not in unfolded(views.checkpoints_html(THREE))
    other = entry(400, files=(File("rank-0.safetensors", 9_100_000, "x:0"),))
    page = unfolded(views.checkpoints_html(THREE._replace(entries=(other, *THREE.entries))))
    assert page.count("4.20 MB</text>") == 1, "as far as there is room"
    assert page.count("9.10 MB</text>") == 1


def test_many_are_thinned_out(unfolded):
    """At most MARKS marks are drawn, including the important ones, and labels do not touch."""
    entries = [entry(step, metrics={"loss": 1 / (step + 1)}) for step in range(1000)]
    entries[400] = entries[400]._replace(state="corrupt")
    entries[500] = entry(500, metrics={"loss": 0.0001})
    found = directory(*entries, metric="loss")
    page = unfolded(views.checkpoints_html(found))
    marks = SHAPE.findall(timeline.picture(views.listed(found), found.time))
    assert len(marks) == timeline.MARKS
    told = "\n".join(title for _, _, title, _ in marks)
    assert "step 500 · " in told
    assert "step 400 · " in told
    assert "step 999 · " in told
    assert f"{timeline.MARKS} of 1,000 are shown" in page
    series = views.listed(found)
    xs = timeline.positions(series.marks)
    places = {at: (xs[at], 0.0) for at in timeline.chosen(series.marks, timeline.MARKS)}
    labels = timeline._labels(series, places, found.time)
    assert 8 < len(labels) < 30
    for (x, line), (other, beside) in itertools.pairwise(labels):
        assert other - x >= timeline._CHARACTER * (max(map(len, line)) + max(map(len, beside))) / 2
    assert "the newest 200 of 1,000 checkpoints" in page
    assert len(page) < 120_000


def test_removed_ones_do_not_crowd_out_those_that_are_there():
    """If a thousand checkpoints were removed, the three remaining ones still have enough room."""
    marks = [CheckpointMark(step, "removed") for step in range(1000)] + [
        CheckpointMark(1000 + step, "committed") for step in range(3)
    ]
    xs = timeline.positions(marks)
    assert xs[-1] <= timeline.WIDTH
    assert xs == sorted(xs)
    assert xs[1000] - xs[999] < 46.0 < timeline.WIDTH / 3
    assert xs[1002] - xs[1001] > 40
    assert len(timeline.chosen(marks, 80)) == 80
    assert {1000, 1001, 1002} <= set(timeline.chosen(marks, 80))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0, 1e300, -0.0])
def test_odd_values_can_be_drawn(value):
    """NaN and infinity are drawn at the bottom, and equal values at the same height."""
    marks = tuple(CheckpointMark(step, "committed", T, 5, {"x": value if step else 3.0}) for step in range(3))
    page = timeline.picture(Series("f", marks), T)
    assert not re.search(r"(nan|inf)[ ,)\"H]", re.sub("<title>.*?</title>|<figcaption>.*?</figcaption>", "", page))
    assert len(SHAPE.findall(page)) == 3


# ── A run ─────────────────────────────────────────────────────────────────────


def test_one_line_on_what_was_saved(replayed):
    """The line says when the last checkpoint was saved, its size, how long training waited, and the counts."""
    events = [saved(T + step, step, took_s=0.21, blocked_s=0.012, metrics={"loss": 0.5}) for step in (10, 20, 30)]
    record = replayed(*events, removed(10), damaged(20))
    (series,) = views.recorded(record)
    assert views.saved_words(record, series, T + 33) == (
        "saved step 30, 3 s ago · 4.20 MB in 0.2 s (training waited 12 ms) · loss 0.5 · "
        f"3 saved, 1 still there, 1 damaged · {FOLDER}"
    )
    assert [(mark.state, mark.resumes) for mark in series.marks] == [
        ("removed", False), ("damaged", False), ("committed", True)
    ]  # fmt: skip
    assert views.progress_words(record) == "saved step 30"
    assert views.progress_words(replayed()) == ""


def test_keras_own_checkpoints_are_a_series_of_their_own(replayed):
    """This series has the name and the unit of Keras, and none of its checkpoints is a resume point."""
    record = replayed(saved(T, 5), saved(T + 1, 2, kind="tensorflow", name="ckpt-2"))
    ours, theirs = views.recorded(record)
    assert (theirs.noun, theirs.kind, theirs.marks[0].resumes) == ("epoch", "BackupAndRestore", False)
    assert ours.marks[0].resumes
    assert views.saved_words(record, theirs, T + 1).endswith(f"1 saved, 1 still there · BackupAndRestore in {FOLDER}")
    assert views.progress_words(record) == "saved epoch 2"


def test_damage_found_in_an_earlier_runs_checkpoint(replayed):
    """A damaged checkpoint is named even if this run has saved nothing."""
    record = replayed(damaged(20, "cut <here>"))
    page = panel(record, now=T + 9, final=False)
    assert mentions(page, "1 checkpoint", "damaged", "step 20 (cut &lt;here&gt;)", "skips it")
    assert [mentions(text, "step 20", FOLDER, "damaged", "cut <here>") for text in views.news((), record)] == [True]
    assert views.news(record.checkpoints, record) == []


def test_a_save_adds_no_line_to_the_panel(replayed):
    """The live panel does not grow with the number of checkpoints. The final view has a table, folded away."""
    few = replayed(*(saved(T + step, step) for step in range(1, 4)))
    many = replayed(*(saved(T + step, step) for step in range(1, 40)))
    count = [len(re.findall("<div|<tr|<figure", panel(each, now=T + 50, final=False))) for each in (few, many)]
    assert count[0] == count[1]
    done = panel(many._replace(outcome="finished", ended=T + 41), now=T + 50, final=True)
    assert "the newest 12 of 39 checkpoints" in done
    assert mentions(done, "saved step 39", "2.0 s", "the end"), (
        "an age would be wrong when the notebook is opened later"
    )
    assert ">after 39 s</td>" in done
    assert " ago" not in done


def test_a_thousand_checkpoints_and_fifty_attempts_fit(replayed):
    """The size of the final view is limited, whatever ranks and users have written."""
    nasty = "<&>\u202e" * 400
    events: list = []
    for attempt in range(1, 51):
        events += [
            AttemptStarted(T, attempt, 2, nasty, attempt),
            RankStarted(T, 0, nasty, 1),
            RankStarted(T, 1, "h", 2),
        ]
        for number in range(20):
            step = attempt * 20 + number
            where = f"{nasty}{number % 5}"
            name = f"{step:08d}.1795294802123-{step}"
            events.append(
                CheckpointSaved(where, name, step, 9, metrics={nasty: 0.1 * step, f"x{nasty}": 1.0}, time=T, rank=0)
            )
            events += [CheckpointDamaged(where, name, step, nasty, time=T, rank=0)] if number % 3 else []
        events.append(Output("stdout", f"{nasty}\n".encode() * 40, time=T, rank=1))
        events.append(RankFailed(T + 5, 1, Failure("exception", nasty)))
        events.append(AttemptEnded(T + 5, attempt, nasty, 1))
    record = replayed(*events, RunFinished(T + 9, "failed", nasty), up=False, checkpoint_dir=nasty)
    assert len(record.checkpoints) == 1000
    page = panel(record, now=T + 9, final=True)
    assert len(page) < PANEL_BYTES
    assert "38 earlier attempts" in page
    assert "<&>" not in page
    assert "\u202e" not in page
    assert "\u202e" not in bundle(record, now=T, final=True)["text/plain"]
    assert len(panel(record._replace(outcome=None, ended=0.0), now=T, final=False)) < PANEL_BYTES


def test_the_panel_tells_the_story(replayed):
    """The panel has a line for each attempt, and the last lines of the rank that failed, folded away."""
    record = replayed(
        AttemptStarted(T, 1, 2), RankStarted(T, 0, "vm", 1), RankStarted(T, 1, "vm", 2), saved(T + 8, 120),
        Output("stdout", b"<last words>\n", time=T + 9, rank=1),
        RankFailed(T + 10, 1, Failure("signal", "killed by SIGKILL")),
        AttemptEnded(T + 10, 1, "?", 1), AttemptStarted(T + 11, 2, 2, "n", 120), up=False, checkpoint_dir=FOLDER,
    )  # fmt: skip
    for final in (False, True):
        page = panel(record, now=T + 12, final=final)
        assert mentions(page, "rank 1 on vm", "killed by SIGKILL", "step 120", "2.0 s earlier")
        assert mentions(page, "last lines", "rank 1</summary>")
        assert "&lt;last words&gt;" in page
        assert "continues from step 120" in page
    assert (
        "attempt 2 · 2 ranks · continues from step 120 · starting" in bundle(record, now=T, final=False)["text/plain"]
    )


def test_in_a_terminal(replayed):
    """The terminal shows one line for each end, each restart and each damaged checkpoint."""
    stream = io.StringIO()
    view = TerminalView(stream)
    events = [
        AttemptStarted(T, 1, 1), RankStarted(T, 0, "vm", 1), saved(T + 8, 120), damaged(120),
        RankFailed(T + 10, 0, Failure("exit", "exited with code 3")), AttemptEnded(T + 10, 1, "?", 0),
        AttemptStarted(T + 11, 2, 1), RunFinished(T + 20, "finished"),
    ]  # fmt: skip
    for count in range(len(events)):
        view.refresh(replayed(*events[:count], up=False, size=1))
    view.close(replayed(*events, up=False, size=1))
    skipped, end, restart, closing = stream.getvalue().splitlines()
    assert mentions(skipped, "step 120", FOLDER, "damaged", "cut")
    assert mentions(end, "attempt 1", "10 s", "rank 0 on vm", "code 3")
    assert mentions(restart, "attempt 2", "again", "1 rank")
    assert mentions(closing, "1 rank finished", "20 s", "1 restart", "/runs/a1b2/rank-N.log")


# ── A check's progress ────────────────────────────────────────────────────────


def test_a_check_says_how_far_it_is_when_it_takes_long():
    """Nothing is shown in the first two seconds. After that, a line is shown, which is cleared at the end."""
    now, stream = [0.0], io.StringIO()
    with CheckProgress(stream, lambda: now[0]) as progress:
        progress.tell(0, 3, 0, 6_000_000)
        assert stream.getvalue() == ""
        now[0] = 2.5
        progress.tell(1, 3, 2_000_000, 6_000_000)
        progress.tell(2, 3, 4_000_000, 6_000_000)
    said = "checked 1 of 3 checkpoints, 2.00 MB of 6.00 MB"
    assert stream.getvalue() == f"\r{said}\r{' ' * len(said)}\r"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.5, 1]), (0.3, 2.3, [0.5, 1, 1.5, 2]), (5, 5, [5]), (-1e-7, 1e-7, [-1e-7, -5e-8, 0, 5e-8, 1e-7])],
)
def test_ticks_are_round(low, high, ticks):
    assert timeline.nice_ticks(low, high) == pytest.approx(ticks)
