"""Tests of how a member sends the file of a rank's timeline."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import pytest

from sparkring.worker.member import timeline
from sparkring.worker.member.timeline import TimelineFile


@pytest.fixture
def file(tmp_path):
    found = TimelineFile(str(tmp_path), wanted=True)
    yield found
    found.remove()
    assert os.listdir(tmp_path) == []


def unpacked(pieces) -> tuple[bytes, int]:
    """Return the content of the stream, and how many bytes were cut off."""
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return zlib.decompress(b"".join(piece.data for piece in pieces)), pieces[-1].cut


def test_what_was_written_comes_out_in_pieces(file):
    """The whole file is sent, in several pieces."""
    data = random.Random(1).randbytes(5 << 20)
    Path(file.path).write_bytes(data)
    pieces = list(file.pieces())
    assert len(pieces) > 3
    assert unpacked(pieces) == (data, 0)


@pytest.mark.parametrize("limit", ["MOST_BYTES", "MOST_SENT"])
def test_there_is_a_limit(file, monkeypatch, limit):
    """Bytes beyond the limit are counted, but not sent."""
    monkeypatch.setattr(timeline, limit, 2 << 20)
    data = random.Random(1).randbytes(5 << 20)
    Path(file.path).write_bytes(data)
    got, cut = unpacked(list(file.pieces()))
    assert data.startswith(got)
    assert 2 << 20 <= len(got) <= 4 << 20
    assert len(got) + cut == len(data)


def test_no_file_is_an_empty_stream(file):
    assert unpacked(list(file.pieces())) == (b"", 0)


def test_only_what_is_wanted_is_sent(tmp_path):
    found = TimelineFile(str(tmp_path), wanted=False)
    Path(found.path).write_bytes(b"[]")
    assert list(found.pieces()) == []
    found.remove()
