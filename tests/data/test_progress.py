"""The plan that a rank reports before it reads an epoch. Its size is limited, and it is reported only in a run."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
from fake_launcher import received
from hypothesis import given
from hypothesis import strategies as st

from sparkring.data import progress
from sparkring.data.progress import ReadProgress, Route, at_most, joined
from sparkring.history.events import Piece
from sparkring.runtime import report, world
from sparkring.wire.messages import DataPlanned

PIECES = st.lists(st.builds(Piece, st.integers(0, 3), st.integers(0, 2), st.integers(1, 9), st.just(1)), max_size=60)


@given(PIECES)
def test_neighbours_in_one_row_group_are_one_piece(pieces):
    """The rows stay the same, and no piece is in the same row group as the piece before it."""
    found = list(joined(pieces))
    rows = [(piece.file, piece.row_group) for piece in found for _ in range(piece.rows)]
    assert rows == [(piece.file, piece.row_group) for piece in pieces for _ in range(piece.rows)]
    assert all(one[:2] != other[:2] for one, other in itertools.pairwise(found))


@given(PIECES, st.integers(1, 20))
def test_of_many_pieces_neighbours_are_one(pieces, most):
    """There are at most `most` pieces, which have all rows. If there were no more to begin with, they are unchanged.

    A joined piece has the file and the row group of its first piece.
    """
    found = at_most(most, pieces)
    assert len(found) <= most
    assert (sum(piece.rows for piece in found), sum(piece.groups for piece in found)) == (
        sum(piece.rows for piece in pieces),
        len(pieces),
    )
    at = 0
    for piece in found:
        assert piece[:2] == pieces[at][:2]
        assert piece.rows == sum(each.rows for each in pieces[at : at + piece.groups])
        at += piece.groups
    if len(pieces) <= most:
        assert found == pieces


@pytest.fixture
def told(monkeypatch):
    """The plans that a rank has reported."""
    found = []

    def tell(message):
        if isinstance(message, DataPlanned):
            found.append(received(message))

    monkeypatch.setattr(report, "_tell", tell)
    return found


def test_what_a_plan_tells(told):
    """A plan has its pieces, the files' names without folders, and the number of rows already read."""
    data = ReadProgress(name="d", kind="parquet")
    route = Route([Piece(7, 1, 30), Piece(7, 1, 5), Piece(2, 0, 10)], lambda file: f"/data/part-{file}.parquet", 12, 20)
    data.begin(3, 33, 1, route)
    (plan,) = told
    assert (plan.epoch, plan.begun, plan.window) == (3, 12, 20)
    assert plan.pieces == ((7, 1, 35, 1), (2, 0, 10, 1))
    assert plan.names == ((7, "part-7.parquet"), (2, "part-2.parquet"))
    data.begin(4, 33, 1)
    assert len(told) == 1, "a plan was reported for an epoch without a route"


@pytest.mark.parametrize(("size", "most"), [(1, 500), (64, 500), (1024, 31), (100_000, 1)])
def test_a_plan_is_bounded(told, monkeypatch, size, most):
    """A plan's size is limited, however many row groups and ranks there are, and however long the files' names are."""
    monkeypatch.setattr(world, "world", lambda: mock.Mock(size=size))
    pieces = [Piece(number, 0, 10) for number in range(10_000)]
    ReadProgress(name="d", kind="parquet").begin(1, None, None, Route(pieces, lambda file: f"{file:05}-{'x' * 500}"))
    (plan,) = told
    assert most // 2 <= len(plan.pieces) <= most
    assert sum(piece.rows for piece in plan.pieces) == 100_000
    assert len(plan.names) <= min(most, progress.FILES_NAMED)
    assert {len(name) for _, name in plan.names} == {progress.NAME_CHARACTERS}


def test_where_nobody_hears_of_it_no_plan_is_made():
    """In the notebook's own process, the plan's pieces are not computed."""
    ReadProgress(name="d", kind="parquet").begin(1, None, None, Route((1 / 0 for _ in "x"), str))
