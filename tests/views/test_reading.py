"""Tests how reading is shown: which data ranks read, which ranks wait for data, and which ranks end an epoch early."""

from __future__ import annotations

import io
import random
import re
from typing import Any

import pytest
from texts import mentions

from sparkring.history import describe, reading
from sparkring.history.events import DataOpened, DataRead, Event, RankFinished, RunFinished
from sparkring.history.progress import Lag
from sparkring.history.reading import closing_words, data_sets, lines, notes, progress_words
from sparkring.views.html import bundle, panel
from sparkring.views.terminal import TerminalView

START = 1_700_000_000.0
NOW = START + 60


def opened(rank: int, reader: int = 0, name: str = "/data/digits", **fields: Any) -> DataOpened:
    """Return the event of a rank that opens a data set, by default with a million rows."""
    known: dict[str, Any] = {
        "kind": "parquet", "columns": ("a", "b"), "version": "3f2a", "files": 8, "row_groups": 32, "rows": 1_000_000,
        "size_bytes": 40_100_000, "batch_size": 256,
    }  # fmt: skip
    return DataOpened(reader, name, **{**known, **fields}, time=START + 2, rank=rank)


def read(rank: int, rows: int, waited: float = 0.05, *, reader: int = 0, ago: float = 0.0, **fields: Any) -> DataRead:
    """Return the event of a rank that has read `rows` of 1,000 rows in 10 s, and waited for a fraction of this time."""
    known: dict[str, Any] = {
        "epoch": 1, "steps": rows // 10, "size_bytes": rows * 40, "rows_planned": 1_000, "elapsed_s": 10.0,
        "place": f"part-{rank}.parquet, row group 1 of 4",
    }  # fmt: skip
    return DataRead(reader, rows=rows, waited_s=waited * 10, **{**known, **fields}, time=NOW - ago, rank=rank)


def marks(record, now: float = NOW) -> list[str]:
    (found,) = data_sets(record, now)
    return [each.mark for each in found.ranks]


# ── Marks ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("waited", "marked"),
    [
        ([0.05, 0.05, 0.05], []),
        ([0.05, 0.05, 0.6], [2]),
        ([0.05, 0.05, 0.35], [2]),
        ([0.25, 0.28, 0.35], []),
        ([0.45, 0.48, 0.46], []),
        ([0.6, 0.7, 0.8], [0, 1, 2]),
        ([0.05, 0.4, 0.4, 0.05, 0.05], [1, 2]),
        ([0.4], []),
        ([0.6], [0]),
    ],
)
def test_a_rank_that_starves(replayed, waited, marked):
    """A rank starves if it waits for over half of its time, or for over 0.3 and clearly longer than the others."""
    events: list[Event] = []
    for rank, part in enumerate(waited):
        events += [opened(rank), read(rank, 500, part)]
    record = replayed(*events, size=len(waited))
    assert [rank for rank, mark in enumerate(marks(record)) if mark == "starves"] == marked


def test_the_first_batch_has_to_be_waited_for(replayed):
    """In an epoch's first second, no rank starves."""
    events = [opened(0), DataRead(0, 1, 10, 1, 400, waited_s=0.9, elapsed_s=0.95, time=NOW, rank=0)]
    assert marks(replayed(*events, size=1)) == [""]
    events.append(DataRead(0, 1, 20, 2, 800, waited_s=0.9, elapsed_s=1.05, time=NOW, rank=0))
    assert marks(replayed(*events, size=1)) == ["starves"]


@pytest.mark.parametrize(
    ("others", "ago", "marked"),
    [
        ([read(1, 600)], 7.0, True),
        ([read(1, 600)], 1.0, False),
        ([read(1, 1_000, done=True, ago=1)], 7.0, False),
        ([read(1, 100, epoch=2)], 7.0, False),
        ([read(1, 600), RankFinished(NOW, 1, "")], 7.0, False),
        ([], 7.0, False),
    ],
    ids=["others read", "just now", "all have", "others are ahead", "the other needs no more", "not begun"],
)
def test_a_rank_that_ends_its_epoch_early(replayed, others, ago, marked):
    """A rank is early if it ended an epoch some time ago and a rank that is still running has not ended this epoch."""
    events = [opened(0), opened(1), read(0, 1_000, done=True, ago=ago), *others]
    assert marks(replayed(*events)) == ["early" if marked else "", ""]


def test_marks_in_words(replayed):
    """The note on each mark gives the numbers."""
    events = [*map(opened, range(4)), read(0, 500), read(1, 100, 0.76), read(2, 500), read(3, 310, done=True, ago=7.5)]
    (found,) = data_sets(replayed(*events, size=4), NOW)
    assert notes(found) == (
        "rank 1 waits for data 76 % of the time (the others: 5 %); "
        "rank 3 ended its epoch 7 s ago, after 31 steps; ranks 0–2 have not"
    )
    record = replayed(*events, RunFinished(NOW + 3, "timed out"), size=4)
    (found,) = data_sets(record, NOW + 1_000)
    assert notes(found) == (
        "rank 1 waited for data 76 % of the time (the others: 5 %); "
        "rank 3 ended its epoch 10 s before the run ended, after 31 steps; ranks 0–2 had not"
    )


def test_why_a_rank_is_behind(replayed):
    """The cause is known only if the rank waits much longer than the others. The data set that was read last counts."""
    events = [*map(opened, range(4)), *(read(rank, 500, 0.62 if rank == 1 else 0.04) for rank in range(4))]
    causes = reading.causes(replayed(*events, size=4), NOW)
    assert [*causes] == [1]
    assert mentions(causes[1], "waits for data 62 %", "the others: 4 %")
    lag = Lag(1, 26, 0.33)
    words = "rank 1 is 26 steps behind, at 0.33× the median rate; it waits for data 62 % of the time (the others: 4 %)"
    assert describe.lag_words([lag], causes) == words
    assert describe.lag_words([lag._replace(rank=2)], causes).endswith("the median rate")
    everywhere = [*map(opened, range(4)), *(read(rank, 500, 0.7) for rank in range(4))]
    assert reading.causes(replayed(*everywhere, size=4), NOW) == {}
    other = [opened(1, 1, "/data/other"), read(1, 500, 0.01, reader=1, ago=-1)]
    assert reading.causes(replayed(*events, *other, size=4), NOW) == {}


def test_many_marks_are_told_together(replayed):
    """The notes on a hundred ranks are summed up."""
    events = [*map(opened, range(100)), *(read(rank, 100, 0.8) for rank in range(90))]
    (found,) = data_sets(replayed(*events, size=100), NOW)
    assert notes(found) == "ranks 0–89 waited a long time for data"
    events = [*map(opened, range(100)), *(read(rank, 100, 0.8 * (rank % 2)) for rank in range(100))]
    events[-1] = read(99, 1_000, done=True, ago=7)
    (found,) = data_sets(replayed(*events, size=100), NOW)
    assert notes(found) == "49 ranks waited a long time for data; rank 99 ended the epoch before others"


# ── Data sets ─────────────────────────────────────────────────────────────────


def test_readers_of_the_same_data_are_one_data_set(replayed):
    """Readers match by name, kind and filter, not by number. Of several such readers of a rank, the last one counts."""
    events = [
        opened(0), opened(0, 1, "/data/val"), opened(1, 0, "/data/val"), opened(1, 1), opened(0, 2, where="a > 3"),
        read(0, 100), read(0, 200, reader=1), read(1, 300), read(1, 400, reader=1),
        opened(0, 3), read(0, 7, reader=3), opened(0, 4, kind="petastorm"),
    ]  # fmt: skip
    found = data_sets(replayed(*events), NOW)
    assert [(each.opened.name, each.opened.kind, each.opened.where) for each in found] == [
        ("/data/digits", "parquet", ""),
        ("/data/val", "parquet", ""),
        ("/data/digits", "parquet", "a > 3"),
        ("/data/digits", "petastorm", ""),
    ]
    rows = [[None if rank.read is None else rank.read.rows for rank in each.ranks] for each in found]
    assert rows == [[7, 400], [200, 300], [None], [None]]


def test_what_data_it_was(replayed):
    """The text has the name, columns, filter, amount and version of the data, as far as they are known."""
    first, second, third = data_sets(
        replayed(
            opened(0, where="a > 3", columns=tuple("abcdefghij")),
            opened(0, 1, "records", kind="tfrecord", columns=(), version="", files=3, rows=0, size_bytes=0),
            opened(0, 2, "bare", kind="petastorm", columns=(), version="", files=0, rows=0, size_bytes=1_000),
            size=1,
        ),
        NOW,
    )
    assert reading.data_words(first) == (
        "/data/digits · columns a, b, c, d, e, f, g, h and 2 more · where a > 3 · 1,000,000 rows in 8 files, 40.1 MB · "
        "version 3f2a"
    )
    assert reading.data_words(second) == "records (tfrecord) · in 3 files"
    assert reading.data_words(third) == "bare (petastorm) · 1.00 kB"


def test_ranks_that_found_different_files_are_told(replayed):
    """The text says whether ranks found different files, since a path may hold different data on different hosts."""
    (found,) = data_sets(replayed(opened(0), opened(1, version="77aa"), opened(2), size=3), NOW)
    assert "ranks found different files: version 3f2a on ranks 0, 2, 77aa on rank 1" in reading.data_words(found)


# ── Lines ─────────────────────────────────────────────────────────────────────


def test_a_line_for_each_rank(replayed):
    """A line has the rows read and planned, the rates, the waiting time, and the position in the data."""
    record = replayed(opened(0), opened(1), read(0, 500), read(1, 7, rows_planned=None, steps=2, steps_planned=8))
    (found,) = data_sets(record, NOW)
    first, second = lines(found)
    assert first[:8] == (
        (0,), "1", 0.5, "500 of 1,000", "50", "2.00 kB", "5 %", "part-0.parquet, row group 1 of 4"
    )  # fmt: skip
    assert (second.fraction, second.rows, second.rows_per_s) == (0.25, "7", "0.7")


def test_many_ranks_in_blocks(replayed):
    """More than 32 ranks are shown in blocks of neighbours, with sums. Ranks with marks are named."""
    events = [*map(opened, range(70)), *(read(rank, 500, 0.9 if rank == 33 else 0.05) for rank in range(70))]
    (found,) = data_sets(replayed(*events, size=70), NOW)
    told = lines(found)
    assert len(told) <= reading.BLOCKS
    assert [rank for line in told for rank in line.ranks] == list(range(70))
    assert told[0][:8] == ((0, 1, 2, 3, 4), "1", 0.5, "2,500 of 5,000", "250", "10.0 kB", "5 %", "")
    (marked,) = [line for line in told if line.mark]
    assert 33 in marked.ranks
    assert marked.waiting == "5–90 %"
    assert marked.notes.startswith("rank 33 waits")


# ── Panel and terminal ────────────────────────────────────────────────────────


@pytest.fixture
def run(replayed):
    """`run(n)` returns a run of n ranks that read two data sets. Rank 1 starves, and rank 2 ended the epoch early."""

    def make(size: int, *more: Event, **fields: Any):
        events: list[Event] = []
        for rank in range(size):
            events += [opened(rank), opened(rank, 1, "/data/val", kind="petastorm")]
            events.append(read(rank, 310 if rank == 2 else 500, 0.8 if rank == 1 else 0.05, done=rank == 2, ago=7.0))
        return replayed(*events, *more, size=size, **fields)

    return make


def test_the_panel_while_it_reads(run):
    """The panel has bars in the marks' colours, and says what the marks mean."""
    page = panel(run(4), now=NOW, final=False)
    assert re.findall(r'sr-read" title="(\d+)%"[^>]*><div style="[^"]*width: ?(\d+)%;background: ?(#\w+)"', page) == [
        ("50", "50", "#2f80d0"),
        ("50", "50", "#b97a10"),
        ("31", "31", "#23935a"),
        ("50", "50", "#2f80d0"),
    ]
    early = "rank 2 ended its epoch 7 s ago, after 31 steps; ranks 0, 1, 3 have not"
    assert f"⚠ rank 1 waits for data 80 % of the time (the others: 5 %); {early}</b></div>" in page
    assert "reads /data/digits · columns a, b · 1,000,000 rows in 8 files" in page
    assert "reads /data/val (petastorm)" in page
    assert page.count("<table") == 1, "what has not been read yet needs no table"


def test_the_panel_that_stays(run, unfolded):
    """The HTML and the plain text show the data and the marks. The ranks' table is folded away."""
    found = bundle(run(4, RunFinished(NOW, "timed out")), now=NOW + 9, final=True)
    page, text = unfolded(found["text/html"]), found["text/plain"]
    assert "read /data/digits · columns a, b" in page
    outside = re.sub(r"<details>.*?</details>", "", page)
    assert "rank 1 waited for data 80 % of the time" in outside
    assert "Reading by rank" in page
    assert "500 of 1,000" in page
    assert "500 of 1,000" not in outside
    assert "sparkring: read /data/digits · columns a, b" in text
    assert "rank 1 waited" in text


def test_a_quick_cell_that_reads_keeps_its_panel(run):
    """The panel of a quick run is kept if the run has read data."""
    record = run(2, RunFinished(START + 0.5, "finished"), warm=True)
    assert "read /data/digits" in bundle(record, now=NOW, final=True)["text/html"]


def test_hundreds_of_ranks_that_read_fit(run):
    """With several data sets on each rank and with long names, the panel stays within its size limit."""
    more = [
        event
        for reader in range(2, 5)
        for rank in range(300)
        for event in (
            opened(rank, reader, f"/data/{'x' * 500}/{reader}", where="y" * 500, columns=("z" * 100,) * 50),
            read(rank, 500, 0.9, reader=reader, place="p" * 500),
        )
    ]
    record = run(300, *more)
    assert len(panel(record, now=NOW, final=False)) < 150_000
    assert "earlier data sets" in panel(record, now=NOW, final=False)
    assert len(panel(run(300, *more, RunFinished(NOW, "timed out")), now=NOW, final=True)) < 200_000
    (short,) = [each for each in [progress_words(record, NOW)] if each]
    assert len(short) < 400


def test_what_ranks_call_their_data_is_text(replayed):
    """Names, columns, filters, versions and places are escaped."""
    rnd = random.Random(3)
    parts = ["<script>evil()</script>", "\" onload='evil()'", "\x1b[2J", "</td><evil>", "\u202e", "&amp;", "\n"]
    for final in (False, True):
        for _ in range(50):
            evil = "".join(rnd.choices(parts, k=4))
            events = [
                opened(rank, name=evil, where=evil, columns=(evil,), version=f"{evil}{rank}", kind=evil)
                for rank in (0, 1)
            ]
            events += [read(rank, 500, 0.9, place=evil) for rank in (0, 1)]
            end = [RunFinished(NOW, "timed out")] if final else []
            page = panel(replayed(*events, *end), now=NOW, final=final)
            assert not re.search(r"<script|<evil|<[^>]*onload='", page)
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", page)


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_in_a_terminal(run, monkeypatch):
    """The progress line says how much has been read and which ranks have marks. The last lines say what was read."""
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    view = TerminalView(stream)
    record = run(4)
    view.refresh(record)
    assert "45 % of digits read, 181 rows/s, rank 1 waits for data" in stream.getvalue()
    view.close(run(4, RunFinished(NOW, "finished")))
    said = stream.getvalue()
    assert "sparkring: read /data/digits · columns a, b · 1,000,000 rows in 8 files, 40.1 MB · version 3f2a" in said
    assert closing_words(record, NOW)[1] == (
        "read /data/val (petastorm) · columns a, b · 1,000,000 rows in 8 files, 40.1 MB · version 3f2a"
    )


def test_of_runs_that_read_nothing_nothing_is_said(replayed):
    """A run that reads no data has no line and no table about reading."""
    record = replayed(RunFinished(NOW, "finished"))
    assert "read" not in panel(record, now=NOW, final=True)
    assert closing_words(record, NOW) == []
    assert progress_words(record, NOW) == ""


# ── Real ranks ────────────────────────────────────────────────────────────────


def test_real_ranks_tell_what_they_read(local, tmp_path):
    """Two ranks read real files. The record has the data set, each rank's rows, and the completed epochs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        pq.write_table(pa.table({"x": range(100)}), folder / f"part-{number}.parquet")
    record = local.run(
        "from sparkring import shards\n"
        f"data = shards({str(folder)!r}, 10, where='x >= 40')\n"
        "sum(len(batch['x']) for epoch in range(2) for batch in data.as_numpy())"
    ).record
    (found,) = data_sets(record, record.ended)
    assert [rank.read.rows for rank in found.ranks] == [90, 90]
    assert [(rank.read.epoch, rank.read.done, rank.mark) for rank in found.ranks] == [(2, True, "")] * 2
    words = reading.data_words(found)
    assert words.startswith(f"{folder} · columns x · where x >= 40 · 180 rows in 3 files")
    assert "version" in words
    assert "Reading by rank" in panel(record, now=record.ended, final=True)
