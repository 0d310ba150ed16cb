"""Tests the section about reading: each rank's strip, and the text about the balance between ranks."""

from __future__ import annotations

import functools
import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.history import reading
from sparkring.history.events import DataOpened, DataPlanned, DataRead, Event, Piece, RunFinished
from sparkring.history.reading import RankReading, balance_words, data_sets, named_shortly, strip
from sparkring.views.html import panel
from sparkring.views.sections import shards

START = 1_700_000_000.0
NOW = START + 60


def opened(rank: int, reader: int = 0, **fields: Any) -> DataOpened:
    """Return the event of a rank that opens a data set with 40,000 rows in 4 MB."""
    known = {"name": "/data/digits", "kind": "parquet", "files": 8, "row_groups": 32, "rows": 40_000,
             "size_bytes": 4_000_000}  # fmt: skip
    return DataOpened(reader, **{**known, **fields}, time=START + 2, rank=rank)


@functools.cache  # thousands of plans have the same hundreds of pieces, and differ only in the rank
def pieces_and_names(rows: tuple[int, ...]) -> tuple[tuple[Piece, ...], tuple[tuple[int, str], ...]]:
    pieces = tuple(Piece(number // 2, number % 2, each) for number, each in enumerate(rows))
    names = tuple((number, f"part-{number}.parquet") for number in range((len(rows) + 1) // 2))
    return pieces, names


def planned(rank: int, rows: list[int], *, reader: int = 0, epoch: int = 1, **fields: Any) -> DataPlanned:
    """Return a rank's plan to read row groups with these numbers of rows, two row groups in each file."""
    pieces, names = pieces_and_names(tuple(rows))
    return DataPlanned(reader, epoch, **{"pieces": pieces, "names": names, **fields}, time=START + 3, rank=rank)


def read(rank: int, rows: int, of: int | None, *, reader: int = 0, epoch: int = 1, **fields: Any) -> DataRead:
    """Return the event of a rank that has read `rows` rows in 10 s."""
    known = {"elapsed_s": 10.0, "rows_planned": of, "place": f"part-{rank}.parquet, row group 1 of 4"}
    return DataRead(reader, epoch, rows, rows // 100, rows * 80, **{**known, **fields}, time=NOW - 5, rank=rank)


def states(plan: DataPlanned, now: DataRead | None, most: int = 100, **options: Any) -> str:
    """Return a letter for each block of a strip: R for read, N for being read, c for to come."""
    found = strip(RankReading(plan.rank, now, plan=plan), most, **options)
    assert found is not None
    return "".join({"read": "R", "reading": "N", "to come": "c"}[block.state] for block in found.blocks)


# ── States ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rows", "shown"),
    [(0, "Nccc"), (99, "Nccc"), (100, "RNcc"), (101, "RNcc"), (399, "RRRN"), (400, "RRRR")],
)
def test_in_order_one_row_group_is_being_read(rows, shown):
    """Row groups before the current one have been read, and row groups after it are still to come."""
    assert states(planned(0, [100] * 4), read(0, rows, 400)) == shown


@pytest.mark.parametrize(
    ("rows", "shown"),
    [(0, "NNNccc"), (249, "NNNccc"), (250, "RRNNNc"), (499, "RRNNNc"), (500, "RRRRRN"), (550, "RRRRRN")],
)
def test_shuffled_rows_come_of_several_row_groups_at_a_time(rows, shown):
    """All row groups in the buffer are being read, even a row group that continues in the next buffer."""
    assert states(planned(0, [100] * 6, window=250), read(0, rows, 600)) == shown


@pytest.mark.parametrize(
    ("rows", "window", "shares"),
    [
        (0, 600, [0] * 6),
        (300, 600, [0.5] * 6),
        (0, 250, [0] * 6),
        (100, 250, [0.4, 0.4, 0.2, 0, 0, 0]),
        (300, 250, [1, 1, 0.6, 0.2, 0.2, 0]),
        (150, 0, [1, 0.5, 0, 0, 0, 0]),
    ],
)
def test_a_box_is_filled_as_far_as_it_has_been_read(rows, window, shares):
    plan = planned(0, [100] * 6, window=window)
    found = strip(RankReading(0, read(0, rows, 600), plan=plan), 10)
    assert [block.share for block in found.blocks] == pytest.approx(shares)


def test_an_epoch_that_has_ended_is_read():
    """An ended epoch is shown as read even if its last rows filled no batch, or the number of rows was not known."""
    plan = planned(0, [100] * 4, window=250)
    assert states(plan, read(0, 390, 390, done=True)) == "RRRR"
    assert states(plan, read(0, 12, None, done=True)) == "RRRR"
    assert states(plan, read(0, 12, None)) == "NNNN"
    assert strip(RankReading(0, read(0, 12, None), plan=plan), 10).at is None


def test_an_epoch_that_goes_on_from_its_middle():
    """Rows that were read before the reader was made count as read."""
    plan = planned(0, [100] * 4, begun=150)
    assert states(plan, None) == "RNcc"
    found = strip(RankReading(0, read(0, 100, 250), plan=plan), 10)
    assert found.at == 250 / 400
    assert found.words == "rank 0, epoch 1: 2 row groups read, 1 being read, 1 to come"


def test_a_plan_is_of_its_epoch():
    """The next epoch begins with nothing read, and so does a repeated epoch. Without a plan, no strip is drawn."""
    assert states(planned(0, [100] * 4, epoch=2), read(0, 400, 400, done=True)) == "Nccc"
    again = DataRead(0, 1, 300, 3, 900, rows_planned=400, time=START + 1, rank=0)
    assert states(planned(0, [100] * 4), again) == "Nccc"
    assert strip(RankReading(0, read(0, 10, 400, epoch=2), plan=planned(0, [100] * 4)), 10) is None
    assert strip(RankReading(0, read(0, 10, 400)), 10) is None


def test_what_was_to_come_when_the_run_ended_was_not_read():
    """After a run, blocks are called "begun" and "not read"."""
    found = strip(RankReading(3, read(3, 150, 400), plan=planned(3, [100] * 4)), 10, over=True)
    assert found.words == "rank 3, epoch 1: 1 row group read, 1 begun, 2 not read"
    assert [block.words for block in found.blocks] == [
        "part-0.parquet, row group 1: 100 rows, read",
        "part-0.parquet, row group 2: 100 rows, begun: 50 %",
        "part-1.parquet, row group 1: 100 rows, not read",
        "part-1.parquet, row group 2: 100 rows, not read",
    ]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=80).filter(any),
    st.integers(0, 5000),
    st.integers(0, 300),
    st.integers(1, 30),
    st.booleans(),
)
def test_blocks_are_the_whole_epoch(rows, at, window, most, done):
    """There are about `most` blocks, without gaps and in the order of their states. Each row group counts once."""
    total = sum(rows)
    at = min(at, total)
    mine = RankReading(0, read(0, at, total, done=done), plan=planned(0, rows, window=window))
    found = strip(mine, most)
    assert (found.blocks[0].begin, found.blocks[-1].end) == (0, 1)
    assert [block.end for block in found.blocks[:-1]] == [block.begin for block in found.blocks[1:]]
    order = [("read", "reading", "to come").index(block.state) for block in found.blocks]
    assert order == sorted(order)
    assert len(found.blocks) <= most + 6
    if not done and at < total:
        now = [block for block in found.blocks if block.state == "reading"]
        assert now[0].begin * total <= at <= now[-1].end * total + 1e-6
    told = [int(number) for number in re.findall(r"[:,] (\d+) ", found.words.partition("epoch 1")[2])]
    assert sum(told) == len(rows)


def test_many_row_groups_are_drawn_as_few():
    """Neighbouring row groups in the same state share a block, which says how many they are."""
    plan = planned(0, [10] * 500)
    found = strip(RankReading(0, read(0, 2_505, 5_000), plan=plan), 20)
    assert len(found.blocks) <= 23
    assert found.blocks[0].words == "part-0.parquet, row group 1 and 24 more: 250 rows, read"
    few = DataPlanned(0, 1, (Piece(3, 1, 90, 9), Piece(99, -1, 10)), ((3, "a"),), time=START, rank=0)
    blocks = strip(RankReading(0, None, plan=few), 20).blocks
    assert [block.words for block in blocks] == [
        "a, row group 2 and 8 more: 90 rows, being read",
        "file 100: 10 rows, to come",
    ]


# ── Balance ───────────────────────────────────────────────────────────────────


def balance(replayed, *events: Event, size: int = 2) -> str:
    (found,) = data_sets(replayed(*events, size=size), NOW)
    return balance_words(found)


def test_who_has_more_rows(replayed):
    """The text says how many more rows a rank has, and compares only ranks that read the same epoch."""
    begun = [opened(rank) for rank in range(3)]
    plans = [planned(0, [1_000]), planned(1, [500, 560]), planned(2, [1_120])]
    assert balance(replayed, *begun, *plans, size=3) == "rank 2 has 12 % more rows than rank 0 (1,120 and 1,000)"
    assert balance(replayed, *begun, *[planned(r, [1_000 + r]) for r in range(3)], size=3) == (
        "each rank has 1,000 to 1,002 rows"
    )
    ahead = [planned(0, [1_000], epoch=2), planned(1, [500], begun=200), planned(2, [800], epoch=2)]
    assert balance(replayed, *begun, *ahead, size=3) == "rank 0 has 25 % more rows than rank 2 (1,000 and 800)"
    assert "more rows" not in balance(replayed, *begun, planned(0, [10]), planned(1, [20]), read(2, 5, None), size=3)
    idle = [planned(0, [1_000]), planned(1, [5], begun=5), planned(2, [10])]
    assert balance(replayed, *begun, *idle, size=3) == "rank 1 has nothing to read"


def test_who_is_slowest_and_how_much_is_read(replayed):
    """The slowest rank is compared with the median, and the bytes read are compared with the files' size, if known."""
    events = [opened(rank) for rank in range(3)] + [read(rank, 1_000 * (rank + 2), 10_000) for rank in range(3)]
    assert balance(replayed, *events, size=3) == (
        "each rank has 10,000 rows · slowest: rank 0, 200 rows/s; median 300 · "
        "about 900 kB of 4.00 MB read in this epoch"
    )
    events = [opened(0, size_bytes=0), read(0, 1_000, None)]
    assert balance(replayed, *events, size=1) == ""
    events = [opened(0), planned(0, [40_000], begun=10_000), read(0, 10_000, 30_000)]
    assert balance(replayed, *events, size=1) == "about 2.00 MB of 4.00 MB read in this epoch"


def test_data_in_a_list_of_runs():
    """The list has the last parts of the first paths, and the number of further paths."""
    assert named_shortly([]) == ""
    assert named_shortly(["dbfs:/data/flights/"]) == "flights"
    assert named_shortly(["/a/b", "c", "d", "e"]) == "b, c and 2 more"
    assert len(named_shortly(["x" * 500] * 2)) < 70


# ── The section ───────────────────────────────────────────────────────────────


class Page(HTMLParser):
    """Collects the strips of a page and the titles of their blocks. Checks that every tag is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.strips: list[str] = []
        self.titles: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if found.get("role") == "img":
            self.strips.append(found["aria-label"])
        self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] == ["title"]:
            self.titles.append(data)


def run(replayed, size: int, groups: int, *more: Event, sets: int = 1):
    """Return a run in which ranks are reading `groups` row groups. Rank 1 waits for data, and the last rank is slow."""
    events: list[Event] = []
    for rank in range(size):
        for reader in range(sets):
            total = 100 * groups
            events += [
                opened(rank, reader, name=f"/data/{reader}"),
                planned(rank, [100] * groups, reader=reader),
                read(rank, total // 2 - (rank == size - 1), total, reader=reader, waited_s=8.0 if rank == 1 else 0.1),
            ]
    return replayed(*events, *more, size=size)


def test_a_tab_shows_a_strip_for_each_rank(replayed):
    """A strip has a text for screen readers and a title for each row group. A legend explains the boxes."""
    page = shards.html(run(replayed, 3, 4), NOW, "tab")
    found = Page(page)
    middle, slow = "2 row groups read, 1 being read, 1 to come", "1 row group read, 1 being read, 2 to come"
    assert found.strips == [f"rank {rank}, epoch 1: {words}" for rank, words in enumerate([middle, middle, slow])]
    assert found.titles[:4] == [
        "part-0.parquet, row group 1: 100 rows, read",
        "part-0.parquet, row group 2: 100 rows, read",
        "part-1.parquet, row group 1: 100 rows, being read",
        "part-1.parquet, row group 2: 100 rows, to come",
    ]
    assert "being read</span>" in page
    assert "sr-read" not in page, "a strip takes the place of the bar"
    assert "each rank has 400 rows" in page


def test_states_differ_in_shape(replayed):
    """The boxes are filled, half filled and empty, which can be seen without colours."""
    page = shards.html(replayed(opened(0), planned(0, [100] * 4), read(0, 250, 400), size=1), NOW, "tab")
    full, empty = re.findall(r'<g fill="(#\w+|transparent)" stroke="#\w+">(.*?)</g>', page)[:2]
    assert (full[0], full[1].count("<path")) == ("#2f80d0", 2)
    assert (empty[0], empty[1].count("<path")) == ("transparent", 2)
    strip_ = page[page.index('role="img"') : page.index("</svg>")]
    halves = re.findall(r'</g><path d="([^"]*)" fill="#2f80d0" pointer-events="none"/>', strip_)
    assert [half.count("M") for half in halves] == [1]


def test_what_is_stacked_is_as_short_as_without_plans(replayed):
    """The form "stacked" has only bars, and no text about the balance."""
    page = shards.html(run(replayed, 2, 4), NOW, "stacked")
    assert "<svg" not in page
    assert page.count("sr-read") == 2
    assert "each rank" not in page


def test_what_stays_has_its_strips_below_the_fold(replayed):
    """The table with the strips is folded away, but the text about the balance is visible."""
    page = shards.html(run(replayed, 3, 4, RunFinished(NOW, "interrupted")), NOW, "final")
    outside = re.sub(r"<details>.*?</details>", "", page)
    assert "<svg" not in outside
    assert "each rank has 400 rows" in outside
    assert Page(page).strips[0] == "rank 0, epoch 1: 2 row groups read, 1 begun, 1 not read"


def test_where_it_is_not_known_what_a_rank_reads_there_is_a_bar(replayed):
    """A rank without a plan has a bar, whether others have strips or not."""
    events = [opened(0), opened(1), planned(0, [100] * 4), read(0, 100, 400), read(1, 100, 400)]
    page = shards.html(replayed(*events), NOW, "tab")
    assert (len(Page(page).strips), page.count("sr-read")) == (1, 1)
    page = shards.html(replayed(opened(0), read(0, 100, 400), size=1), NOW, "tab")
    assert "<svg" not in page
    assert "sr-legend" not in page


@pytest.mark.parametrize(
    ("size", "form", "strips", "most_bytes"),
    [
        (1, "tab", 1, 8_000),
        (64, "tab", 64, 95_000),
        (65, "tab", 24, 65_000),
        (1024, "tab", 24, 65_000),
        (1024, "final", 16, 45_000),
        (1024, "stacked", 0, 8_000),
    ],
)
def test_many_ranks_with_many_row_groups_fit(replayed, size, form, strips, most_bytes):
    """Each rank has a strip if there is room; otherwise, only some ranks have strips."""
    page = shards.html(run(replayed, size, 500), NOW, form)
    found = Page(page)
    assert len(found.strips) == strips
    assert len(page) < most_bytes
    if 0 < strips < size:
        shown = {int(re.match(r"rank (\d+)", words)[1]) for words in found.strips}
        assert {0, 1, size - 1} <= shown
        assert f"{strips} ranks of {size:,}" in page


def test_a_panel_of_several_data_sets_fits(replayed):
    """The section and the final view stay within their size limits."""
    record = run(replayed, 1024, 500, RunFinished(NOW, "interrupted"), sets=3)
    assert len(shards.html(record, NOW, "final")) < 60_000
    assert len(panel(record, now=NOW, final=True)) < 190_000


def test_files_names_are_text(replayed):
    """File names are escaped, whatever they are."""
    rnd = random.Random(5)
    parts = ["<script>evil()</script>", "\" onload='evil()'", "\x1b[2J", "</title><evil>", "\u202e", "&amp;", "\n", "'"]
    for form in ("tab", "final"):
        for _ in range(50):
            evil = "".join(rnd.choices(parts, k=4))
            plan = planned(0, [100] * 4, names=((0, evil), (1, evil)))
            page = shards.html(replayed(opened(0), plan, read(0, 150, 400), size=1), NOW, form)
            assert not re.search(r"<script|<evil|<[^>]*onload='", page)
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", page)
            Page(page)


def test_slow_and_starving_ranks_come_first(replayed):
    """If not all ranks fit, slow and starving ranks are chosen first. The chosen ranks are in numerical order."""
    (found,) = data_sets(run(replayed, 100, 4), NOW)
    assert [each.rank for each in reading.telling(found, 8)] == [0, 1, 2, 3, 4, 5, 6, 99]
    assert reading.telling(found, 100) == found.ranks
