"""Tests what `%shards` shows: the picture, the table and the advice."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import fsspec
import pyarrow as pa
import pytest
from texts import mentions

from sparkring.data.dataset import DataFile, Dataset, RowGroup
from sparkring.data.epoch_plan import Outlook, outlook
from sparkring.views import shards
from sparkring.views.shards import (
    BAND,
    CELLS,
    LABEL,
    Stretch,
    advice,
    blocks,
    covered,
    epoch_words,
    request_words,
    shards_html,
    shards_text,
    table_rows,
)


@pytest.fixture
def seen() -> Callable[..., Outlook]:
    """`seen([[40, 40], [5]], 4)` returns the Outlook for 4 ranks and files with row groups of these numbers of rows."""

    def look(
        counts: Sequence[Sequence[int]],
        size: int,
        batch_size: int = 10,
        *,
        row_bytes: int = 8_000,
        protocol: str = "file",
        kept: float = 1.0,
        where: str = "",
        name: str = "digits",
        path: str = "/data",
        columns: Sequence[str] = ("a", "b"),
        **how,
    ) -> Outlook:
        @functools.cache
        def row_group(rows: int) -> RowGroup:
            return RowGroup(int(rows * kept), rows * row_bytes, 2 * rows * row_bytes, rows)

        files = tuple(
            DataFile(f"{path}/part-{number}.parquet", sum(groups) * row_bytes, tuple(map(row_group, groups)), "v")
            for number, groups in enumerate(counts)
        )
        stored = pa.schema([(each, pa.int64()) for each in ("a", "b")])
        schema = pa.schema([(each, pa.int64()) for each in columns])
        fs = fsspec.filesystem(protocol)
        data = Dataset(name, fs, files, schema, stored, tuple(columns), "3f2a", where)
        return outlook(data, size, batch_size, **how)

    return look


# ── Words ─────────────────────────────────────────────────────────────────────


def test_what_the_data_set_is(seen):
    """The text has the data set's counts and size, and the chosen columns and filter."""
    assert shards.data_words(seen([[1000, 1000], [5]], 2)) == (
        "2,005 rows in 2 files, 3 row groups, 16.0 MB · version 3f2a"
    )
    words = shards.data_words(seen([[100]], 2, columns=("a",), where="a > 3", kept=0.5))
    assert words == "50 rows in 1 file, 1 row group, 800 kB · columns a · where a > 3 · version 3f2a"


@pytest.mark.parametrize(
    ("remainder", "words"),
    [
        ("drop", "An epoch on 3 ranks: 2 steps of 3 rows on each; 5 rows left out so that all "
                 "ranks take the same number of steps (drop)."),
        ("pad", "An epoch on 3 ranks: 3 steps of 3 rows on each; 4 rows read twice so that all "
                "ranks take the same number of steps (pad)."),
        ("join", "An epoch on 3 ranks: 3 steps of 3 rows on each, but a rank's last step may be smaller; end each "
                 "epoch with hvd.join() (join)."),
    ],
)  # fmt: skip
def test_an_epoch_in_words(seen, remainder, words):
    """The sentence has the number of steps, and says what happens to rows that do not fill a batch."""
    assert epoch_words(seen([[20], [3]], 3, 3, remainder=remainder)) == words


@pytest.mark.slow
def test_requests_are_told_where_they_cost(seen):
    """For an object store, the text has the number and price of requests, and when a prefix is slowed down."""
    counts = [[4]] * 200_000
    assert request_words(seen(counts, 4, epochs=1000)) == []
    priced, slowed = request_words(seen(counts, 4, epochs=1000, protocol="memory", path="bucket/events"))
    assert priced == (
        "GET requests: 200,000 to open the data set and 200,000 per epoch; "
        "1,000 epochs: 80.08 USD at 0.0004 USD per 1,000."
    )
    assert mentions(slowed, "less than 36 s", "200,000 GETs", "bucket/events")
    assert len(request_words(seen([[4]] * 100, 4, protocol="memory"))) == 1


def test_good_files_need_no_advice(seen):
    """There is no advice if there are few files, and enough row groups that are even and not too large."""
    assert advice(seen([[1000, 1000]] * 4, 4)) == []


@pytest.mark.parametrize(
    ("counts", "size", "how", "words"),
    [
        ([[5_000, 120_000]], 2, {"row_bytes": 8_000},
         "One row group has 1.92 GB (part-0.parquet, row group 2 of 2). A reader of whole row groups, such as "
         "Petastorm's, holds it in memory once for each worker. Write row groups of 64.0 MB"),
        ([[20_000]] * 4, 4, {"row_bytes": 8_000}, "(4 are larger than 256 MB)"),
        ([[50, 50], [50]], 5, {}, "3 row groups for 5 ranks: Petastorm assigns whole row groups, so ranks 3, 4 "
                                  "would get none, and Petastorm raises NoDataAvailableError."),
        ([[50]], 3, {}, "ranks 1, 2 would get none, and Petastorm raises"),
        ([[100]] * 1000, 4, {"row_bytes": 80}, "1,000 files of 8.00 kB on average"),
        ([[100]] * 1000, 4, {"row_bytes": 8_000}, "Write 6 files: df.repartition(6)."),
        ([[7, 7]], 2, {"batch_size": 10},
         "7 rows per rank cannot fill a batch of 10, so an epoch has no steps: use --batch-size 7 or less, "
         "fewer ranks, or --remainder pad."),
        ([[1, 1]], 4, {}, "2 rows for 4 ranks: ranks 0, 2 would have no rows. Use at most 2 ranks."),
        ([[150], [100], [100]], 3, {},
         "Petastorm's shards are uneven: rank 0 gets 150 rows, 1.5 times as many as rank 1, which gets 100: 15 steps "
         "instead of 10, so an allreduce in step 11 waits for ranks that have no batches left."),
        ([[1000], [1000], [1009]], 3, {"batch_size": 1001}, "1.01 times as many as rank 0, which gets 1,000: 2 steps "
         "instead of 1"),
        ([[1000, 1000]], 2, {"where": "a > 3", "kept": 0.1},
         "The filter keeps 200 rows of 2,000, but 2,000 must be read to find them."),
    ],
)  # fmt: skip
def test_advice_has_the_numbers(seen, counts, size, how, words):
    """Each problem is reported with the relevant numbers, and with what to do about it."""
    told = "\n".join(advice(seen(counts, size, **how)))
    assert words in told, told


@pytest.mark.parametrize("remainder", ["pad", "join"])
def test_a_batch_that_is_not_filled_matters_only_where_it_is_dropped(seen, remainder):
    """With padding or joining, an epoch has a step even if no batch is full."""
    assert not any("fill a batch" in line for line in advice(seen([[7, 7]], 2, remainder=remainder)))


def test_a_filter_that_empties_a_petastorm_shard(seen):
    """The advice names ranks whose row groups have no matching rows."""
    found = seen([[1], [0]], 2, 1)
    assert any(mentions(text, "Petastorm", "rank 1", "without matching rows") for text in advice(found))


# ── The table ─────────────────────────────────────────────────────────────────


def test_a_row_for_each_rank(seen):
    """A row has the numbers for shards() on the left, and the numbers for Petastorm on the right."""
    assert table_rows(seen([[40, 40], [20]], 2)) == [
        ("0", "50", "400 kB", "1", "2", "5", "60", "2", "6"),
        ("1", "50", "400 kB", "2", "2", "5", "40", "1", "4"),
    ]


def test_many_ranks_in_blocks(seen):
    """With more than 32 ranks, neighbouring ranks share a row, which has ranges of numbers."""
    assert [len(blocks(count)) for count in (1, 32, 33, 64, 1024)] == [1, 32, 17, 32, 32]
    assert [rank for block in blocks(1000) for rank in block] == list(range(1000))
    rows = table_rows(seen([[100]] * 48, 64))
    assert len(rows) == 32
    assert rows[0][:2] == ("0, 1", "75")
    assert rows[23][6] == "100"
    assert rows[24][6] == "0"
    assert table_rows(seen([[100]] * 49, 64))[24][6] == "0–100"


# ── The picture ───────────────────────────────────────────────────────────────


def drawn(page: str, split: int) -> list[list[tuple[float, float]]]:
    """Return the bands of a split's picture: for each rank, pairs (left, width) as fractions of the whole band."""
    figure = re.findall(r"<figure>.*?</figure>", page)[split]
    bands = re.findall(r'<path d="([^"]*)" fill="#', figure)
    return [
        [
            ((float(left) - LABEL) / BAND, float(width) / BAND)
            for left, width in re.findall(r"M([\d.]+) \d+h([\d.]+)", d)
        ]
        for d in bands
    ]


def test_the_picture_is_to_scale(seen, unfolded):
    """The bands show the positions of the rows to scale, except for a gap of one pixel between neighbours."""
    page = unfolded(shards_html(seen([[100, 300], [400]], 2)))
    gap = pytest.approx
    even, in_turn = drawn(page, 0), drawn(page, 1)
    assert [left for ((left, _),) in even] == [gap(0.0, abs=0.01), gap(0.5, abs=0.01)]
    assert [width for ((_, width),) in even] == [gap(0.5, abs=0.01)] * 2
    assert [[left for left, _ in band] for band in in_turn] == [
        [gap(0, abs=0.01), gap(0.5, abs=0.01)],
        [gap(1 / 8, abs=0.01)],
    ]
    assert [[width for _, width in band] for band in in_turn] == [
        [gap(1 / 8, abs=0.01), gap(0.5, abs=0.01)],
        [gap(3 / 8, abs=0.01)],
    ]


def test_a_rank_with_nothing_stands_out(seen, unfolded):
    """The picture and its description say that a rank has nothing to read."""
    page = unfolded(shards_html(seen([[100]], 2)))
    assert page.count(">nothing</text>") == 1
    assert mentions(page, "Petastorm", "row groups", "rank 0 100 rows", "rank 1 0 rows")


def test_coverage_is_exact():
    """The fractions of cells that stretches cover are exact, even if a stretch ends within a cell."""
    assert covered([Stretch(0, 5), Stretch(10, 20)], 20, 4) == [1.0, 0.0, 1.0, 1.0]
    assert covered([Stretch(0, 3)], 4, 2) == [1.0, 0.5]
    assert covered([Stretch(1, 2)], 3, 1) == [pytest.approx(1 / 3)]
    assert sum(covered([Stretch(7, 93)], 100, 13)) == pytest.approx(13 * 0.86)


@pytest.mark.parametrize(
    ("counts", "size"),
    [
        pytest.param(
            [[20] * 20] * 5_000,
            4,
            id="100,000 row groups",
            marks=pytest.mark.extended("repetition", "the page of 1,024 ranks is larger"),
        ),
        pytest.param([[20] * 20] * 5_000, 1024, id="100,000 row groups and 1,024 ranks"),
        pytest.param([[1]], 1024, id="one row"),
        pytest.param([[1, 0, 0], [], [5]], 3, id="empty ones"),
        pytest.param([[10**9] * 3], 33, id="large"),
    ],
)
def test_the_page_stays_small_and_is_only_what_we_put_there(seen, counts, size):
    """For any data set, the page is small, has no scripts and no ids, and loads nothing."""
    found = seen(counts, size)
    page = shards_html(found)
    assert len(page) < 150_000
    assert not re.search(r"<script|\bid=|https?:|url\(|@import|nan|inf\b", page)
    tags = set(re.findall(r"<([a-z]+)", page))
    assert tags <= {"div", "span", "small", "b", "figure", "figcaption", "img", "table",
                    "thead", "tbody", "tr", "th", "td", "ul", "li"}  # fmt: skip
    assert len(shards_text(found)) < 20_000


def test_names_are_text(seen):
    """Paths, columns and filters are escaped, and control characters are removed."""
    evil = "<script>evil()</script>\x1b[2J\" onload='evil()'"
    found = seen([[5, 5]], 3, name=evil, path=evil, where=evil, protocol="memory", columns=(evil, "a"))
    page = shards_html(found)
    assert "<script" not in page
    assert "\x1b" not in page + shards_text(found)
    assert "&lt;script&gt;evil()" in page
    assert not re.search(r"<[^>]*onload='", page)


def test_in_a_terminal(seen):
    """The text has bands of characters, the table, and the advice."""
    text = shards_text(seen([[100, 300], [400]], 2, remainder="pad")).splitlines()
    assert text[0].startswith("digits: 800 rows in 2 files")
    even, in_turn = ((line[-2 * CELLS - 2 : -CELLS - 2], line[-CELLS:]) for line in text[6:8])
    assert text[6].split() == ["rank", "0", "█" * 16 + "·" * 16, "████" + "·" * 12 + "█" * 16]
    assert text[7].split() == ["rank", "1", "·" * 16 + "█" * 16, "····" + "█" * 12 + "·" * 16]
    assert even[0] != in_turn[0]
    assert mentions(text[-1], "→ Petastorm", "uneven", "rank 0", "500 rows", "1.7 times", "rank 1")


def test_it_is_printed_where_no_notebook_is(seen, capsys):
    """Outside a notebook, %shards prints."""
    found = seen([[10]], 1)
    shards.show_shards(found)
    assert capsys.readouterr().out == shards_text(found) + "\n"
