"""Compares the predictions of `%shards` with counts by hand, and with Petastorm's real shards."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from versions import has_petastorm

from sparkring.data import epoch_plan
from sparkring.data.dataset import DataFile, Dataset, RowGroup, open_dataset
from sparkring.data.epoch_plan import outlook

ROW_BYTES = 8


def laid_out(counts: Sequence[Sequence[int]], *, protocol: str = "file", folders: int = 1) -> Dataset:
    """Return a data set without files. `counts` has the number of rows of each row group of each file."""
    files = tuple(
        DataFile(
            f"/data/{number % folders}/part-{number}.parquet",
            sum(groups) * ROW_BYTES,
            tuple(RowGroup(rows, rows * ROW_BYTES, 2 * rows * ROW_BYTES, rows) for rows in groups),
            f"v{number}",
        )
        for number, groups in enumerate(counts)
    )
    schema = pa.schema([("x", pa.float64())])
    return Dataset("data", fsspec.filesystem(protocol), files, schema, schema, ("x",), "v")


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """`written([[40, 40], [5]])` writes a Parquet file for each list, with a row group for each number of rows."""

    def write(counts: Sequence[Sequence[int]], columns: str = "abcd") -> Path:
        folder = tmp_path / "set"
        folder.mkdir()
        value = itertools.count()
        for number, groups in enumerate(counts):
            schema = pa.schema([(name, pa.int64()) for name in columns])
            with pq.ParquetWriter(folder / f"part-{number}.parquet", schema) as writer:
                for rows in groups:
                    values = pa.array([next(value) for _ in range(rows)])
                    writer.write_table(pa.table([values] * len(columns), schema=schema))
        return folder

    return write


def layouts(count: int) -> list[tuple[list[list[int]], int, int]]:
    """Return random layouts, numbers of ranks and batch sizes.

    In some layouts, files or row groups are empty, or there are more ranks than rows.
    """
    rnd = random.Random(5)
    found = []
    while len(found) < count:
        sizes = rnd.choice([(0, 1, 2), (1, 7, 100), (0, 64), (1000, 1001)])
        counts = [rnd.choices(sizes, k=rnd.randint(0, 6)) for _ in range(rnd.randint(1, 8))]
        if any(map(any, counts)):
            found.append((counts, rnd.choice([1, 2, 3, 5, 8, 40]), rnd.choice([1, 3, 32, 256])))
    return found


def by_hand(counts: Sequence[Sequence[int]], begin: int, end: int) -> tuple[int, int]:
    """Count the files and the row groups that contain rows from `begin` to `end`, row by row."""
    places = [
        (file, group) for file, groups in enumerate(counts) for group, rows in enumerate(groups) for _ in range(rows)
    ][begin:end]
    return len({file for file, _ in places}), len(set(places))


@pytest.fixture
def large(monkeypatch):
    """Files count as large, whatever their sizes."""
    monkeypatch.setattr(epoch_plan, "WHOLE_BYTES", -1)


def test_shares_are_what_counting_by_hand_gives(large):
    """Each rank's rows, bytes, files and row groups, and the requests, are right for hundreds of layouts."""
    for counts, size, batch_size in layouts(300):
        found = outlook(laid_out(counts), size, batch_size)
        rows = [share.rows for share in found.ours]
        whole = sum(map(sum, counts))
        assert sum(rows) == whole
        assert max(rows) - min(rows) <= 1
        assert [end - begin for begin, end in found.stretches] == rows
        assert (found.stretches[0][0], found.stretches[-1][1]) == (0, whole)
        touched = [by_hand(counts, *stretch) for stretch in found.stretches]
        assert [(share.files, share.row_groups) for share in found.ours] == touched
        assert [share.size_bytes for share in found.ours] == [count * ROW_BYTES for count in rows]
        assert found.requests.per_epoch == sum(groups for _, groups in touched)
        assert found.requests.opening == len(counts)
        in_turn: list[list[int]] = [[] for _ in range(size)]
        for number, group in enumerate(itertools.chain.from_iterable(counts)):
            in_turn[number % size].append(group)
        assert [(share.rows, share.row_groups) for share in found.petastorms] == [(sum(g), len(g)) for g in in_turn]
        assert [share.steps for share in found.petastorms] == [-(-sum(g) // batch_size) for g in in_turn]


@pytest.mark.parametrize(
    ("remainder", "steps", "unread", "twice"),
    [("drop", [2, 2, 2], 5, 0), ("pad", [3, 3, 3], 0, 4), ("join", [3, 3, 3], 0, 0)],
)
def test_steps_by_what_becomes_of_the_rest(remainder, steps, unread, twice):
    """Of 23 rows, three ranks have 7, 8 and 8 rows. No rank can fill three batches of 3."""
    found = outlook(laid_out([[20], [3]]), 3, 3, remainder=remainder)
    assert sorted(share.rows for share in found.ours) == [7, 8, 8]
    assert [share.steps for share in found.ours] == steps
    assert (found.rows_unread, found.rows_twice) == (unread, twice)


def test_under_join_one_rank_may_take_a_step_more():
    """Of 19 rows, two ranks have 9 and 10 rows, which make 3 and 4 batches of 3."""
    assert sorted(share.steps for share in outlook(laid_out([[19]]), 2, 3, remainder="join").ours) == [3, 4]


# ── Object stores ─────────────────────────────────────────────────────────────


def test_two_hundred_thousand_files_and_a_thousand_epochs():
    """One GET per file and epoch costs 80 USD at 0.0004 USD per 1,000. Opening the files costs eight cents more."""
    requests = outlook(laid_out([[4]] * 200_000, protocol="memory"), 4, 2).requests
    assert requests.per_epoch == 200_000
    assert requests.price_usd(1000) == pytest.approx(80.08)
    assert requests.throttled_below_s == pytest.approx(200_000 / 5_500)


def test_the_busiest_folder_is_the_one_that_is_throttled():
    """If files are in several folders, each folder gets fewer requests. The folder with the most requests counts."""
    requests = outlook(laid_out([[4]] * 10, folders=3), 2, 2).requests
    assert (requests.busiest, requests.folder) == (4, "/data/0")


@pytest.mark.parametrize(
    ("columns", "runs"), [(None, 1), (["a", "b"], 1), (["a", "c", "d"], 2), (["d", "b"], 2), (["c", "b"], 1)]
)
def test_columns_that_lie_apart_are_asked_for_apart(written, large, columns, runs):
    """One request fetches columns that lie side by side in the file, even if they are chosen in another order."""
    data = open_dataset(written([[10, 10], [5]]), columns)
    assert outlook(data, 1, 1).requests.per_epoch == 3 * runs


def test_a_small_file_is_asked_for_once_by_each_rank_that_reads_it(written):
    data = open_dataset(written([[10, 10], [5]]), ["a", "c"])
    assert outlook(data, 1, 1).requests.per_epoch == 2
    assert outlook(data, 5, 1).requests.per_epoch == 5
    assert outlook(data, 2, 1).requests.per_epoch == 3


def test_columns_that_the_path_gives_cost_nothing(tmp_path):
    """A Hive partition's column is in no file, so it needs no request."""
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"a": [1, 2], "b": [1, 2]}), tmp_path / f"day={day}" / "part.parquet")
    assert outlook(open_dataset(tmp_path, ["a", "day"]), 1, 1).requests.per_epoch == 2


# ── A filter ──────────────────────────────────────────────────────────────────


def test_a_filter_that_empties_a_file(written):
    """Only rows that pass the filter are counted, in Petastorm's shards, too. A file without such rows is not read."""
    found = outlook(open_dataset(written([[10], [10], [10]]), where="a >= 20"), 2, 2)
    assert [(share.rows, share.files, share.row_groups, share.steps) for share in found.ours] == [(5, 1, 1, 2)] * 2
    assert [(share.rows, share.row_groups) for share in found.petastorms] == [(10, 2), (0, 1)]
    assert found.requests.per_epoch == 2


# ── Petastorm itself ──────────────────────────────────────────────────────────


def rows_of(folder: Path, shard: int, count: int) -> int:
    """Return how many rows Petastorm gives a shard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from petastorm import make_batch_reader

        with make_batch_reader(
            f"file://{folder}", cur_shard=shard, shard_count=count, reader_pool_type="dummy", num_epochs=1
        ) as reader:
            return sum(len(batch.a) for batch in reader)


@has_petastorm
def test_petastorm_gives_each_shard_what_was_foretold(written):
    """The predictions hold for uneven data. With more shards than row groups, Petastorm raises the predicted error."""
    folder = written([[40, 8], [8, 8, 1], [100]])
    data = open_dataset(folder)
    for size in (1, 2, 4, 6):
        found = outlook(data, size, 4)
        assert [share.rows for share in found.petastorms] == [rows_of(folder, rank, size) for rank in range(size)]
    assert outlook(data, 7, 4).petastorms[6].row_groups == 0
    with pytest.raises(Exception, match=r"row.?group|shard") as caught:
        rows_of(folder, 6, 7)
    assert type(caught.value).__name__ == "NoDataAvailableError"
