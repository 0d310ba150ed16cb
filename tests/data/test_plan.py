"""Tests of plan(), which decides which rank reads which rows, with hundreds of layouts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.data.plan import Leg, Position, RowRange, Shard, begun, cut, epoch_order, even, plan, shuffled, stretch
from sparkring.errors import DataError

# Files may have no row groups, and row groups may have no rows, one row or many rows.
LAYOUTS = st.lists(st.lists(st.integers(0, 40), max_size=5), min_size=1, max_size=6).filter(
    lambda files: any(rows for file in files for rows in file)
)
SIZES = st.integers(1, 9)
BATCHES = st.integers(1, 12)
WINDOWS = st.sampled_from([0, 1, 4, 12, 100])


def rows_of(ranges):
    """Return every row as (file, row group, row)."""
    return [(each.file, each.row_group, row) for each in ranges for row in range(each.start, each.stop)]


def all_rows(counts):
    return {
        (file, group, row)
        for file, groups in enumerate(counts)
        for group, rows in enumerate(groups)
        for row in range(rows)
    }


def read(shard, rank, position, size, window, batch_size, *, rows=None):
    """Return the rows that one of `size` ranks gets, in order: the shuffled windows, then the padding."""
    own, out = rows_of(shard.ranges), []
    key = (position.seed, position.epoch, len(begun(position, size, window, batch_size)[0].legs), rank)
    for number, begin in enumerate(range(0, len(own), window or len(own) or 1)):
        part = own[begin : begin + (window or len(own))]
        out += [part[at] for at in shuffled(len(part), window, key, number)]
    out = (out + rows_of(shard.pad))[shard.read :]
    return out[: shard.steps * batch_size if rows is None else rows]


def on(position, size, window, batch_size, steps):
    """Return the position after each of `size` ranks has read `steps` more batches."""
    before, had = begun(position, size, window, batch_size)
    return before._replace(legs=(*before.legs, Leg(size, had + steps * batch_size, window)))


@given(LAYOUTS, SIZES, BATCHES, WINDOWS, st.integers(0, 3), st.integers(1, 4))
def test_each_row_lies_with_one_rank_and_ranks_differ_by_one_row(counts, size, batch_size, window, seed, epoch):
    """For any layout, number of ranks, seed and epoch, one rank reads each row, and ranks differ by at most one row."""
    found = plan(counts, size, batch_size, position=Position(epoch, seed), remainder="join", window=window)
    every = [row for shard in found for row in rows_of(shard.ranges)]
    assert len(found) == size
    assert len(every) == len(set(every))
    assert set(every) == all_rows(counts)
    assert max(shard.rows for shard in found) - min(shard.rows for shard in found) <= 1
    assert [shard.rows for shard in found] == even(len(every), size)


@given(LAYOUTS, SIZES, BATCHES, WINDOWS)
def test_steps_are_equal_where_they_are_said_to_be(counts, size, batch_size, window):
    """With "drop", all batches are full, and contain only a rank's own rows.

    With "pad", all batches are full, and no row is left out.
    """
    rows = len(all_rows(counts))
    dropped = plan(counts, size, batch_size, remainder="drop", window=window)
    assert {shard.steps for shard in dropped} == {rows // size // batch_size}
    assert not any(shard.pad for shard in dropped)
    padded = plan(counts, size, batch_size, remainder="pad", window=window)
    assert len({shard.steps for shard in padded}) == 1
    handed = [read(shard, rank, Position(), size, window, batch_size) for rank, shard in enumerate(padded)]
    assert {len(found) for found in handed} == {padded[0].steps * batch_size}
    assert {row for found in handed for row in found} == all_rows(counts)
    # A rank reads fewer than two batches of rows twice.
    assert all(0 <= shard.steps * batch_size - shard.rows < 2 * batch_size for shard in padded)
    joined = plan(counts, size, batch_size, remainder="join", window=window)
    assert [shard.steps for shard in joined] == [-(-shard.rows // batch_size) for shard in joined]


@given(
    LAYOUTS,
    st.lists(st.tuples(SIZES, WINDOWS, BATCHES, st.integers(0, 9)), max_size=3),
    st.tuples(SIZES, WINDOWS, BATCHES),
    st.integers(1, 3),
)
def test_an_epoch_goes_on_from_any_step_with_any_settings(counts, legs, last, epoch):
    """Every row of an epoch is read exactly once, even if ranks, window and batch size change at several stops."""
    position, seen = Position(epoch, 7), []
    for ranks, window, batch_size, steps in legs:
        shards = plan(counts, ranks, batch_size, position=position, remainder="drop", window=window)
        steps = min(steps, shards[0].steps)
        for rank, shard in enumerate(shards):
            seen += read(shard, rank, position, ranks, window, batch_size, rows=steps * batch_size)
        if steps:
            position = on(position, ranks, window, batch_size, steps)
    size, window, batch_size = last
    rest = plan(counts, size, batch_size, position=position, remainder="join", window=window)
    for rank, shard in enumerate(rest):
        seen += read(shard, rank, position, size, window, batch_size, rows=shard.rows)
    assert len(seen) == len(set(seen))
    assert set(seen) == all_rows(counts)
    assert max(shard.rows for shard in rest) - min(shard.rows for shard in rest) <= 1


@given(
    LAYOUTS, WINDOWS, BATCHES, SIZES, st.lists(st.integers(0, 5), max_size=4), st.sampled_from(["drop", "pad", "join"])
)
def test_as_many_ranks_go_on_as_if_nothing_had_been(counts, window, batch_size, size, stops, remainder):
    """Each rank is given the same rows in the same order, however often all ranks stop and continue."""
    options = {"remainder": remainder, "window": window}
    whole = plan(counts, size, batch_size, **options)
    position = Position()
    handed = [[] for _ in range(size)]
    for stop in [*stops, None]:
        shards = plan(counts, size, batch_size, position=position, **options)
        least = min(shard.steps for shard in shards)
        for rank, shard in enumerate(shards):
            steps = shard.steps if stop is None else min(stop, least)
            end = shard.rows - shard.read if remainder == "join" and stop is None else steps * batch_size
            handed[rank] += read(shard, rank, position, size, window, batch_size, rows=end)
        if stop is not None and min(stop, least):
            position = on(position, size, window, batch_size, min(stop, least))
    for rank, shard in enumerate(whole):
        rows = shard.rows if remainder == "join" else None
        assert handed[rank] == read(shard, rank, Position(), size, window, batch_size, rows=rows)


@pytest.mark.parametrize(("before", "after"), [((10, 20), (10, 0)), ((10, 0), (10, 20)), ((10, 0), (4, 0))])
def test_an_epoch_goes_on_with_another_batch_size_or_order(before, after):
    """If shuffling or the batch size has changed at the stop, the unread rows are divided again in whole batches."""
    counts, (batch_size, window), seen = [[30] * 4] * 3, before, []
    for rank, shard in enumerate(plan(counts, 2, batch_size, window=window)):
        seen += read(shard, rank, Position(), 2, window, batch_size, rows=3 * batch_size)
    position = on(Position(), 2, window, batch_size, 3)
    batch_size, window = after
    rest = plan(counts, 2, batch_size, position=position, remainder="join", window=window)
    assert {shard.read for shard in rest} == {0}
    for rank, shard in enumerate(rest):
        seen += read(shard, rank, position, 2, window, batch_size, rows=shard.rows)
    assert sorted(seen) == sorted(all_rows(counts))


def test_the_order_is_the_same_for_a_seed_and_new_in_every_epoch():
    """The order depends on the seed, even if it is 0, and changes with each epoch."""
    counts = [[10] * 8] * 4

    def order(epoch, seed):
        position = Position(epoch, seed)
        shard = plan(counts, 2, 5, position=position, window=20)[0]
        return read(shard, 0, position, 2, 20, 5)

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(epoch, seed)) for epoch in (1, 2, 3) for seed in (0, 1)}) == 6
    assert order(1, 0) != sorted(order(1, 0))


def test_row_groups_and_rows_are_each_shuffled_by_epoch():
    """Each epoch has new orders of row groups and of rows. The order of rows also depends on rank and buffer."""
    counts = [[10] * 8] * 4
    assert len({tuple(epoch_order(counts, 0, epoch)) for epoch in range(1, 6)}) == 5
    keys = [
        ((0, epoch, leg, rank), number) for epoch in (1, 2) for leg in (0, 1) for rank in (0, 1) for number in (0, 1)
    ]
    assert len({tuple(shuffled(20, 20, key, number)) for key, number in keys}) == len(keys)


def test_without_shuffling_ranks_read_on_in_the_order_of_the_files():
    """Ranks have consecutive stretches of rows, and read them in order. The next epoch is the same."""
    for epoch in (1, 2):
        found = plan([[3, 4], [], [5]], 3, 2, position=Position(epoch), remainder="join")
        assert found == (
            Shard((RowRange(0, 0, 0, 3), RowRange(0, 1, 0, 1)), 4, 2),
            Shard((RowRange(0, 1, 1, 4), RowRange(2, 0, 0, 1)), 4, 2),
            Shard((RowRange(2, 0, 1, 5),), 4, 2),
        )


def test_a_row_group_is_cut_at_most_where_ranks_meet():
    """A row group is divided only where one rank's rows end and the next rank's rows begin."""
    counts = [[1000] * 50]
    found = plan(counts, 7, 10, window=100)
    assert sum(len(shard.ranges) for shard in found) <= 50 + 7 - 1


def test_more_ranks_than_rows_leaves_some_without_and_pads_them_from_the_others():
    """With "pad", a rank without rows of its own reads other ranks' rows."""
    found = plan([[3]], 5, 2, remainder="pad")
    assert sorted(shard.rows for shard in found) == [0, 0, 1, 1, 1]
    assert all(len(rows_of([*shard.ranges, *shard.pad])) == 2 and shard.steps == 1 for shard in found)
    assert {shard.steps for shard in plan([[3]], 5, 2)} == {0}


def test_cutting_a_line_of_rows():
    """cut() takes a begin and an end, like a slice. stretch() gives each rank its part."""
    line = [RowRange(0, 0, 5, 9), RowRange(1, 0, 0, 3)]
    for begin in range(8):
        for end in range(8):
            assert rows_of(cut(line, begin, end)) == rows_of(line)[begin:end]
    assert [rows_of(part) for part in stretch(line, 7)] == [[row] for row in rows_of(line)]


def test_a_position_survives_json_and_what_is_none_is_refused():
    """The lists that JSON makes of tuples become tuples again. A value that is not a position raises an error."""
    import json

    position = Position(3, 1, (Leg(4, 128, 1024), Leg(2, 32, 0)))
    assert Position.of(json.loads(json.dumps(position))) == position
    for wrong in ([1, 2], [1, 2, 3], ["a", 0, []], [1, 0, [[1, 2]]], 5):
        with pytest.raises(DataError, match="not a position"):
            Position.of(wrong)


def test_the_plan_of_many_row_groups_is_made_quickly_enough_to_be_made_anew():
    """200,000 row groups are planned for 64 ranks. Few row groups are divided between ranks."""
    counts = [[random.Random(file).randint(1, 9) for _ in range(10)] for file in range(20_000)]
    found = plan(counts, 64, 8, window=64)
    assert sum(shard.rows for shard in found) == sum(map(sum, counts))
    assert sum(len(shard.ranges) for shard in found) <= 200_000 + 63
