"""Rows that cannot be decoded or transformed: each is named, or left out without a change in the number of steps."""

from __future__ import annotations

import random
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_launcher import received

from sparkring import shards
from sparkring.errors import DataError
from sparkring.history import events
from sparkring.history.describe import first_line
from sparkring.history.reading import closing_words
from sparkring.history.record import replay
from sparkring.runtime import report
from sparkring.wire.messages import DataRead

ROWS, GROUP = 1_000, 70
RAW = {"image": ("uint8", (4,))}


@pytest.fixture
def images(tmp_path):
    """`images(bad)` writes rows with an image of 4 bytes in row groups of 70; a bad row's image is cut off."""

    def write(bad=()):
        image = [bytes([n % 251] * (3 if n in bad else 4)) for n in range(ROWS)]
        for name, begin, end in (("a", 0, 400), ("b", 400, ROWS)):
            table = pa.table({"x": np.arange(begin, end), "image": pa.array(image[begin:end], pa.binary())})
            pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=GROUP)
        return str(tmp_path)

    return write


def place(n):
    """Return what an error says of row `n`."""
    name, inside = ("a", n) if n < 400 else ("b", n - 400)
    return rf"/{name}\.parquet, row group {inside // GROUP}, row {inside % GROUP} \(counted from 0\)"


def fails_on(bad):
    """Return a transform that raises an error for these rows, as a decoder of images does."""

    def decode(batch):
        for x in batch["x"]:
            if x in bad:
                raise ValueError(f"no image {x}")
        return {"x": batch["x"], "double": batch["x"] * 2}

    return decode


@pytest.mark.parametrize("shuffle", [True, False, 96])
@pytest.mark.parametrize("bad", random.Random(3).sample(range(ROWS), 4))
def test_the_row_is_named(images, bad, shuffle):
    """An error of the transform, or of the conversion to an array, names file, row group and row."""
    folder = images({bad})
    data = shards(folder, 32, columns=["x"], transform=fails_on({bad}), shuffle=shuffle, remainder="join")
    with pytest.raises(DataError, match=rf"{place(bad)}: ValueError: no image {bad}\..*on_error=") as caught:
        list(data.as_numpy())
    assert any(entry.name == "decode" for entry in caught.traceback), "the user sees the line of the transform"
    with pytest.raises(DataError, match=rf"{place(bad)}: .*`image`.* 3\b"):
        list(shards(folder, 32, raw=RAW, shuffle=shuffle, remainder="join").as_numpy())


def test_a_row_behind_a_filter(images):
    """With a filter, rows are counted among those that pass it."""
    data = shards(images(), 8, where="x >= 10", transform=fails_on({82}), shuffle=False)
    with pytest.raises(DataError, match=r"row group 1, row 12 .*filter"):
        list(data.as_numpy())


@pytest.mark.parametrize("how", ["transform", "raw"])
@pytest.mark.parametrize("shuffle", [True, False, 96])
def test_rows_are_left_out(images, monkeypatch, capsys, how, shuffle):
    """All ranks take the same steps, bad rows are gone, each other row is there, and the bad ones are named."""
    told = []
    monkeypatch.setattr(report, "_tell", lambda message: told.append(received(message)))
    bad = set(random.Random(5).sample(range(16, ROWS), 18)) | {0, 3}
    options = {"columns": ["x"], "transform": fails_on(bad)} if how == "transform" else {"raw": RAW}
    folder, seen, steps = images(bad), [], []
    for rank in range(2):
        data = shards(folder, 25, shuffle=shuffle, on_error="skip", rank=rank, size=2, **options)
        batches = list(data.as_numpy())
        assert all(len(batch["x"]) == 25 for batch in batches)
        seen += [int(x) for batch in batches for x in batch["x"]]
        steps.append(len(batches))
    assert steps == [20, 20]
    assert set(seen) == set(range(ROWS)) - bad
    counts = [message.left_out for message in told if isinstance(message, DataRead) and message.done]
    assert sum(counts) == len(bad)
    named = capsys.readouterr().err
    places = re.findall(r"/[ab]\.parquet, row group \d+, row \d+", named)
    assert len(places) == sum(min(count, 10) for count in counts)
    assert any(re.search(place(n), named) for n in bad)


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_and_tensorflow(images, workers):
    """The numbers of steps are the same, also with torch's workers, which read in processes of their own."""
    folder, bad = images(), {5, 300, 999}
    data = shards(folder, 50, columns=["x"], transform=fails_on(bad), on_error="skip")
    seen = np.concatenate([np.asarray(x) for x in data.as_torch("x", workers=workers)]).tolist()
    assert (len(seen), set(seen)) == (ROWS, set(range(ROWS)) - bad)
    if not workers:
        assert sum(len(x) for x in data.as_tf("x")) == ROWS


def test_a_whole_batch(images):
    """If all rows of a batch are bad, a row of an earlier batch takes their places."""
    data = shards(images(), 10, columns=["x"], transform=fails_on({20, *range(30, 40)}), shuffle=False, on_error="skip")
    batches = list(data.as_numpy("x"))
    assert len(batches) == ROWS // 10
    assert set(batches[3]) <= set(batches[2])


def test_too_many(images):
    """Beyond `most`, it is an error that names the first row. A failure of all rows is no matter of bad rows."""
    data = shards(images(), 10, columns=["x"], transform=fails_on({20, 30, 40}), shuffle=False, on_error="skip", most=2)
    with pytest.raises(DataError, match=rf"3 rows .*most=2.*{place(20)}: ValueError"):
        list(data.as_numpy())
    for wrong in ({"on_error": "ignore"}, {"most": -1}):
        with pytest.raises(DataError, match=next(iter(wrong))):
            shards(images(), **wrong)
    data = shards(images(), 10, columns=["x"], transform=lambda batch: 1 / 0, on_error="skip")
    with pytest.raises(ZeroDivisionError):
        list(data.as_numpy())


def test_the_run_says_so():
    """The end of a run says how many rows were left out."""
    started = events.RunStarted(0.0, "run", "", "", 1, "local", "plain", "all", (0,), False)
    opened = events.DataOpened(0, "digits", "parquet", rows=100)
    read = DataRead(0, 1, 90, 9, 0, done=True, left_out=3)
    assert "3 rows left out" in first_line("".join(closing_words(replay([started, opened, read]), 1.0)), 500)
