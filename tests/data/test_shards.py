"""shards(): the rows that a rank gets, in every format, and errors before and during reading."""

import ctypes
import datetime
import decimal
import gc
import itertools
import json
import logging
import multiprocessing
import pickle
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from unittest import mock

import cloudpickle
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_launcher import received
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import mentions
from waiting import DEADLINE_S, until

from sparkring import shards
from sparkring.capture.names import method_calls
from sparkring.data import dataset, layout, reader
from sparkring.data import shards as module
from sparkring.data.reader import Ahead
from sparkring.errors import DataError
from sparkring.gangs.reports import as_event
from sparkring.runtime import report
from sparkring.wire.messages import DataOpened, DataPlanned, DataRead


@pytest.fixture(scope="module", autouse=True)
def frameworks():
    """Use TensorFlow and torch before the first test, because they open a file and a socket that stay open."""
    import tensorflow as tf
    import torch

    tf.constant(1) + 1
    list(torch.utils.data.DataLoader(torch.zeros(2), num_workers=1))


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """1,000 rows in 3 files and row groups of 70: `x` counts up, `y` is twice `x`, and `v` has three numbers."""
    folder = tmp_path_factory.mktemp("numbered")
    for number, (begin, end) in enumerate(((0, 400), (400, 410), (410, 1000))):
        x = np.arange(begin, end)
        v = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(x, 3).astype("f4")), 3)
        table = pa.table({"x": x, "y": x * 2.0, "v": v, "s": [f"row {i}" for i in x]})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=70)
    return folder


def seen(data, size, **more):
    """Return the `x` of every rank in one epoch, batch by batch."""
    return [
        [batch["x"].tolist() for batch in shards(data, rank=rank, size=size, **more).as_numpy()] for rank in range(size)
    ]


def flat(batches):
    return [x for batch in batches for x in batch]


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True, 64])
def test_every_row_is_read_once_and_evenly(numbered, size, shuffle):
    """Batches are full. `remainder` says what happens to the rows that are left over."""
    joined = seen(numbered, size, batch_size=16, shuffle=shuffle, remainder="join")
    assert sorted(x for rank in joined for x in flat(rank)) == list(range(1000))
    dropped = seen(numbered, size, batch_size=16, shuffle=shuffle)
    assert {len(rank) for rank in dropped} == {1000 // size // 16}
    assert {len(batch) for rank in dropped for batch in rank} == {16}
    every = [x for rank in dropped for x in flat(rank)]
    assert len(set(every)) == len(every)
    padded = seen(numbered, size, batch_size=16, shuffle=shuffle, remainder="pad")
    assert len({len(rank) for rank in padded}) == 1
    assert {len(batch) for rank in padded for batch in rank} == {16}
    assert {x for rank in padded for x in flat(rank)} == set(range(1000))


def test_the_order_is_the_files_or_new_in_every_epoch(numbered):
    """Row groups and rows are shuffled. For a given seed, the order is the same on every machine."""
    assert flat(seen(numbered, 1, batch_size=10, shuffle=False)[0]) == list(range(1000))
    data = shards(numbered, 10, seed=0)
    epochs = [flat(batch["x"].tolist() for batch in data.as_numpy()) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == list(range(1000)) for epoch in epochs)
    again = shards(numbered, 10, seed=0)
    assert flat(batch["x"].tolist() for batch in again.as_numpy()) == epochs[0]
    other = shards(numbered, 10, seed=1)
    assert flat(batch["x"].tolist() for batch in other.as_numpy()) != epochs[0]
    # Rows that are neighbours in the files are seldom neighbours in a batch.
    assert sum(abs(a - b) == 1 for a, b in zip(epochs[0], epochs[0][1:], strict=False)) < 100


def test_what_pandas_adds_is_no_column_of_the_data(tmp_path):
    """The index that pandas adds is left out, unless it is named in `columns`."""
    pd.DataFrame({"x": [1, 2, 3]}, index=[7, 8, 9]).to_parquet(tmp_path / "a.parquet")
    assert list(shards(tmp_path, 3).spec) == ["x"]
    assert shards(tmp_path, 3, columns=["__index_level_0__"], shuffle=False).as_numpy().__next__() == {
        "__index_level_0__": pytest.approx([7, 8, 9])
    }


def test_columns_rows_and_types(numbered):
    """A batch has the chosen columns by name, several columns as one array, and floats of the chosen dtype."""
    data = shards(
        numbered,
        8,
        columns={"in": ["x", "y", "v"], "out": "y", "name": "s"},
        dtype="float32",
        shuffle=False,
        where="x >= 996",
    )
    assert {name: (spec.shape, str(spec.dtype)) for name, spec in data.spec.items()} == {
        "in": ((5,), "float32"),
        "out": ((), "float32"),
        "name": ((), "object"),
    }
    data = shards(
        numbered, 2, columns={"in": ["y", "v"], "name": "s"}, dtype="float32", shuffle=False, where="x >= 996"
    )
    first, second = data.as_numpy("in", "name")
    np.testing.assert_array_equal(first[0], np.array([[1992, 996, 996, 996], [1994, 997, 997, 997]], np.float32))
    assert second[1].tolist() == ["row 998", "row 999"]
    assert [len(batch) for batch in data.as_numpy("in")] == [2, 2]
    assert [table.column_names for table in data.as_arrow()] == [["y", "v", "s"]] * 2


def test_arrow_tables_hold_the_same_rows_as_arrays(numbered):
    """Each table has the same rows as the batch of arrays, in the same order."""
    arrays = [batch["x"].tolist() for batch in shards(numbered, 32, seed=5).as_numpy()]
    tables = [table["x"].to_pylist() for table in shards(numbered, 32, seed=5).as_arrow()]
    assert arrays == tables


def test_a_filter_changes_what_is_shared_out(numbered):
    """The rows that pass are divided evenly. The columns of the filter need not be chosen."""
    found = seen(numbered, 4, batch_size=5, columns=["x"], where="y < 200 or x == 777", remainder="join")
    assert [len(flat(rank)) for rank in found] == [25, 25, 25, 26]
    assert sorted(x for rank in found for x in flat(rank)) == [*range(100), 777]


def test_partitions_are_columns(tmp_path):
    """Hive partitions are read from the path, even if no other column is chosen."""
    for year in (2025, 2026):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(pa.table({"x": [year] * 3}), tmp_path / f"year={year}" / "a.parquet")
    data = shards(tmp_path, 2, shuffle=False)
    assert [batch["year"].tolist() for batch in data.as_numpy()] == [[2025, 2025], [2025, 2026], [2026, 2026]]
    only = shards(tmp_path, 3, columns=["year"], where="year == 2026")
    assert [batch.tolist() for batch in only.as_numpy("year")] == [[2026] * 3]


def test_a_transform_works_on_batches(numbered):
    """A transform's result becomes the batch. The transform is first called once to find the shapes."""
    data = shards(
        numbered,
        100,
        transform=lambda b: {"sum": b["x"] + b["y"], "pair": np.stack([b["x"], b["y"]], 1)},
        shuffle=False,
    )
    assert data.spec["pair"].shape == (2,)
    found = list(data.as_numpy("pair", "sum"))
    assert [len(pair) for pair, _ in found] == [100] * 10
    np.testing.assert_array_equal(np.concatenate([total for _, total in found]), np.arange(1000) * 3.0)


def test_arrays_may_be_changed(numbered):
    """The arrays of a batch, and those that a transform gets, are no views of Arrow's read-only memory."""

    def doubled(batch):
        batch["x"] *= 2
        return batch

    for transform, wanted in ((None, 1000), (doubled, 2000)):
        data = shards(numbered, 100, columns=["x", "v"], shuffle=False, transform=transform)
        for x, v in data.as_numpy("x", "v"):
            assert v.flags.writeable
            x += wanted
        assert next(data.as_numpy("x"))[:3].tolist() == [0, wanted // 1000, 2 * wanted // 1000]


def test_a_transform_may_return_text_of_any_length(numbered):
    """NumPy's arrays of text become arrays of objects, whose type is the same in every batch."""
    data = shards(
        numbered,
        50,
        transform=lambda b: {"s": np.array(["x" * x for x in b["x"]]), "b": np.array([b"x"] * len(b["x"]))},
    )
    assert sorted(map(len, np.concatenate(list(data.as_numpy("s"))))) == list(range(1000))
    assert data.spec == {"s": ((), np.dtype(object)), "b": ((), np.dtype(object))}


def test_tensorflow_gets_static_shapes_and_all_rows(numbered):
    """Batches are dicts or tuples. Each further iteration reads the next epoch."""
    import tensorflow as tf

    data = shards(numbered, 64, remainder="pad")
    whole = data.as_tf()
    assert {name: (spec.shape.as_list(), spec.dtype.name) for name, spec in whole.element_spec.items()} == {
        "x": ([64], "int64"),
        "y": ([64], "float64"),
        "v": ([64, 3], "float32"),
        "s": ([64], "string"),
    }
    epochs = []
    for _ in range(2):
        rows = [batch["x"].numpy().tolist() for batch in whole]
        assert [len(batch) for batch in rows] == [64] * 16 == [64] * len(data)
        assert set(flat(rows)) == set(range(1000))
        epochs.append(flat(rows))
    assert epochs[0] != epochs[1]
    assert data.epoch == 3
    pairs = shards(numbered, 64, remainder="join", shuffle=False).as_tf("v", "s")
    assert [spec.shape.as_list() for spec in pairs.element_spec] == [[None, 3], [None]]
    batches = list(pairs)
    assert [len(v) for v, _ in batches] == [64] * 15 + [40]
    assert batches[-1][1][-1].numpy() == b"row 999"
    one = shards(numbered, 10).as_tf("y")
    assert isinstance(one.element_spec, tf.TensorSpec)


def test_an_epoch_is_over_with_its_last_batch(numbered):
    """The last batch ends the epoch, because code that counts its steps does not ask for another batch."""
    for read in (
        lambda data: data.as_numpy(),
        lambda data: data.as_arrow(),
        lambda data: iter(data.as_tf()),
        lambda data: iter(data.as_torch()),
        lambda data: iter(data.as_torch(workers=1)),
    ):
        data = shards(numbered, 100)
        batches = read(data)
        for step in range(1, 11):
            assert data.epoch == 1
            next(batches)
            assert data.position(step=step).legs[0].rows == 100 * step or step == 10
        assert data.epoch == 2
        assert data.position() == (2, 0, ())


def test_an_epoch_that_is_left_early_is_begun_anew(numbered):
    """An epoch that is left early starts over, so that a rank that looks only at a first batch does not get ahead."""
    for peek in (
        lambda data: next(iter(data.as_tf())),
        lambda data: next(iter(data.as_torch())),
        lambda data: next(data.as_numpy()),
        lambda data: next(data.as_arrow()),
    ):
        data = shards(numbered, 500)
        first = next(shards(numbered, 500).as_numpy())["x"].tolist()
        peek(data)
        assert data.epoch == 1
        assert next(data.as_numpy())["x"].tolist() == first


def test_keras_reads_an_epoch_after_another(numbered):
    """The number of steps need not be given, and validation data can also be passed."""
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = shards(numbered, 50, columns={"x": ["x", "y"], "y": "y"}, dtype="float32")
    told = model.fit(
        data.as_tf("x", "y"),
        epochs=3,
        verbose=0,
        validation_data=shards(numbered, 50, columns={"x": ["x", "y"], "y": "y"}).as_tf("x", "y"),
    )
    assert len(told.history["val_loss"]) == 3
    assert data.epoch == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_gets_the_same_batches_with_and_without_workers(numbered, workers):
    """The batches have tensors and lists of strings, in the order of the plan; len() is the number of steps."""
    import torch

    wanted = [batch["x"].tolist() for batch in shards(numbered, 30, seed=3, shuffle=90).as_numpy()]
    data = shards(numbered, 30, seed=3, shuffle=90, transform=lambda b: {**b, "z": b["x"] * 2.0} if workers else b)
    loader = data.as_torch(workers=workers)
    assert len(loader) == 33
    found = list(loader)
    assert [batch["x"].tolist() for batch in found] == wanted
    assert found[0]["v"].dtype == torch.float32
    assert list(found[0]["v"].shape) == [30, 3]
    assert found[0]["s"] == [f"row {x}" for x in wanted[0]]
    assert data.epoch == 2
    with pytest.raises(DataError, match=r"workers='2': expected .*number .*processes"):
        data.as_torch(workers="2")
    pair = next(iter(shards(numbered, 10).as_torch("x", "v")))
    assert isinstance(pair, tuple)
    assert len(pair) == 2


def test_torch_workers_are_forked(numbered):
    """The classes of a loader cannot be pickled, as the default start methods of macOS and Python 3.14 require."""
    import torch

    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("spawn", force=True)
    try:
        found = list(shards(numbered, 500).as_torch("x", workers=1))
    finally:
        torch.multiprocessing.set_start_method(before, force=True)
    assert sorted(torch.cat(found).tolist()) == list(range(1000))


def test_tensorflow_takes_empty_rows(tmp_path):
    """Tensors without values crash TensorFlow if it unbatches them."""
    pq.write_table(pa.table({"x": pa.array([[]] * 20, pa.list_(pa.int64()))}), tmp_path / "empty.parquet")
    assert [batch.shape for batch in shards(tmp_path, 10).as_tf("x")] == [(10, 0)] * 2


@pytest.fixture
def images(tmp_path):
    """40 images of 96 kB, in two files and row groups of 8."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 160, 200, 3), np.uint8)
    for number in range(2):
        rows = range(number * 20, number * 20 + 20)
        table = pa.table({"image": [pixels[row].tobytes() for row in rows], "n": rows})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=8)
    return tmp_path, pixels


def test_tensorflow_does_not_warn_without_source_code(numbered, monkeypatch, caplog):
    """On Spark, TensorFlow finds no source code of sparkring, and would warn that it cannot convert a function."""

    def no_source(*_):
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsourcelines", no_source)
    monkeypatch.setattr("inspect.findsource", no_source)
    logger = logging.getLogger("tensorflow")
    monkeypatch.setattr(logger, "propagate", True)
    shards(numbered, 50).as_tf("y")
    assert not caplog.text


@pytest.mark.parametrize("shuffle", [16, False])
def test_tensorflow_gets_large_batches_one_at_a_time(images, shuffle):
    """Rows are read once, with static shapes. The last batch ends an epoch. An epoch that is left early starts over."""
    folder, pixels = images
    data = shards(folder, 8, raw={"image": ("uint8", pixels.shape[1:])}, shuffle=shuffle)
    read = data.as_tf("image", "n")
    assert read.element_spec[0].shape == [8, *pixels.shape[1:]]
    assert len(read) == 5
    for epoch in (1, 2):
        next(iter(read))
        rows, batches = [], iter(read)
        for _ in range(5):
            assert data.epoch == epoch
            image, n = next(batches)
            np.testing.assert_array_equal(image, pixels[n.numpy()])
            rows += n.numpy().tolist()
        assert data.epoch == epoch + 1
        assert sorted(rows) == list(range(40))
        assert (rows == list(range(40))) is not bool(shuffle)
    odd = [len(image) for image in shards(folder, 12, raw=data.layout.making.raw, remainder="join").as_tf("image")]
    assert odd == [12, 12, 12, 4]


def test_tensorflow_takes_large_batches_over_without_a_copy(images, monkeypatch):
    """The tensors use the same memory into which the reader has put the rows."""
    folder, pixels = images
    made, empty = [], layout._empty
    monkeypatch.setattr(layout, "_empty", lambda *like: made.append(empty(*like)) or made[-1])
    for image in shards(folder, 8, raw={"image": ("uint8", pixels.shape[1:])}, shuffle=16).as_tf("image"):
        assert any(np.shares_memory(np.asarray(memoryview(image)), array) for array in made if array.dtype == np.uint8)


def test_what_a_large_batch_lacks_is_told(images):
    """TensorFlow's error has the reader's message, and the reader's thread ends."""
    import tensorflow as tf

    folder, pixels = images
    read = shards(folder, 8, raw={"image": ("uint8", pixels.shape[1:])}, shuffle=False).as_tf("image")
    batches = iter(read)
    next(batches)
    pq.write_table(pa.table({"image": [b"short"] * 8, "n": range(8)}), folder / "1.parquet", row_group_size=8)
    with pytest.raises(tf.errors.OpError, match="rewritten"):
        list(read)
    del batches
    until(lambda: not reader_threads(), "the threads of the reader have ended")


@pytest.mark.parametrize("most", [16, 1])
def test_files_stay_open_for_row_groups_to_come(images, monkeypatch, most):
    """At most OPEN_FILES files are open at a time, and all files are closed in the end."""
    files, open_file = [], dataset.open_file
    monkeypatch.setattr(reader, "OPEN_FILES", most)
    monkeypatch.setattr(reader, "open_file", lambda *which: files.append(open_file(*which)) or files[-1])
    data = shards(images[0], 4, columns=["n"], seed=1)
    turns = [number for number, _ in itertools.groupby(data.plan()[0].ranges, lambda each: each.file)]
    assert len(turns) > 2
    assert len(data.spec) == 1
    files.clear()
    assert sorted(n for batch in data.as_numpy("n") for n in batch.tolist()) == list(range(40))
    assert len(files) == (2 if most == 16 else len(turns))
    for file in files:
        with pytest.raises(ValueError, match="closed"):
            file.read()


def test_images_stand_in_binary_columns(tmp_path):
    """Images become arrays of their own dtype and shape, in every format."""
    images = np.random.default_rng(0).integers(0, 256, (12, 4, 5, 3), np.uint8)
    pq.write_table(pa.table({"image": [image.tobytes() for image in images], "n": range(12)}), tmp_path / "a.parquet")
    data = shards(tmp_path, 4, raw={"image": ("uint8", (4, 5, 3))})
    assert data.spec["image"] == ((4, 5, 3), np.uint8)
    for batch in data.as_numpy():
        np.testing.assert_array_equal(batch["image"], images[batch["n"]])
    for image, n in data.as_tf("image", "n"):
        assert image.shape == [4, 4, 5, 3]
        np.testing.assert_array_equal(image, images[n.numpy()])
    for image, n in data.as_torch("image", "n"):
        np.testing.assert_array_equal(image, images[n])


def test_times_are_int64_nanoseconds_for_tensors(tmp_path):
    """NumPy gets datetimes. Tensors get integers, because tensors have no type for times."""
    pq.write_table(
        pa.table({"t": np.array(["1970-01-01T00:00:01"] * 2, "M8[us]"), "d": pa.array([1, 1], pa.date32())}),
        tmp_path / "a.parquet",
    )
    data = shards(tmp_path, 2)
    assert next(data.as_numpy("t")).dtype == np.dtype("M8[us]")
    assert [t.tolist() for t in next(iter(data.as_torch("t", "d")))] == [[10**9] * 2, [86_400 * 10**9] * 2]
    assert [t.numpy().tolist() for t in next(iter(data.as_tf("t", "d")))] == [[10**9] * 2, [86_400 * 10**9] * 2]


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 30),
    st.integers(0, 12),
    st.integers(0, 5),
    st.sampled_from([False, True, 50]),
)
@settings(max_examples=40)
def test_an_epoch_is_resumed_on_another_number_of_ranks(numbered, before, after, batch_size, steps, seed, shuffle):
    """The batches before and after the stop contain every row exactly once."""
    options = {"batch_size": batch_size, "columns": ["x"], "shuffle": shuffle, "seed": seed}
    read, position = [], None
    for rank in range(before):
        data = shards(numbered, rank=rank, size=before, **options)
        batches = data.as_numpy("x")
        for _, batch in zip(range(min(steps, len(data) - 1)), batches, strict=False):
            read += batch.tolist()
        told = data.position()
        assert position in (None, told)
        assert told == data.position(step=min(steps, len(data) - 1))
        position = told
        batches.close()
    options["remainder"] = "join"
    for rank in range(after):
        data = shards(numbered, rank=rank, size=after, **options).resume(json.loads(json.dumps(position)))
        read += flat(batch.tolist() for batch in data.as_numpy("x"))
        assert data.epoch == 2
    assert sorted(read) == list(range(1000))


def test_the_rest_of_a_window_is_read_in_one_pass(tmp_path, monkeypatch):
    """What is left of a half-read window are many short ranges, but its row group is decoded once."""
    pq.write_table(pa.table({"x": range(4000), "s": map(str, range(4000))}), tmp_path / "a.parquet")
    data = shards(tmp_path, 10, rank=0, size=1)
    read = [x for _, x in zip(range(100), data.as_numpy("x"), strict=False)]
    passes, iter_batches = [], pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *a, **k: passes.append(1) or iter_batches(*a, **k))
    monkeypatch.setattr(reader, "READ_ROWS", 700)
    for rank in range(2):
        rest = shards(tmp_path, 10, remainder="join", rank=rank, size=2).resume(data.position(step=100))
        assert rest.spec.keys() == {"x", "s"}
        assert len(rest.plan()[rank].ranges) > 100
        passes.clear()
        batches = list(rest.as_numpy())
        assert len(passes) == 1
        assert all(batch["s"].tolist() == [str(x) for x in batch["x"]] for batch in batches)
        read += [batch["x"] for batch in batches]
    assert sorted(np.concatenate(read)) == list(range(4000))


@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.sampled_from([False, True, 50, 7]),
    st.sampled_from(["drop", "pad", "join"]),
    st.sampled_from([0, 2]),
)
@settings(max_examples=40)
def test_as_many_ranks_read_on_in_the_same_order(numbered, size, batch_size, stops, shuffle, remainder, workers):
    """The ranks get the same batches as without the stops, even with several workers."""
    options = {"batch_size": batch_size, "columns": ["x"], "shuffle": shuffle, "remainder": remainder}
    for rank in range(size):
        data = shards(numbered, rank=rank, size=size, **options)
        if workers:
            whole = [batch.tolist() for batch in shards(numbered, rank=rank, size=size, **options).as_numpy("x")]
            step = min(stops[0], len(data) - 1)
            rest = data.resume(data.position(step=step))
            found = sorted(flat(chunk.data["x"].tolist() for worker in (0, 1) for chunk in rest.read(worker, 2)))
            assert found == sorted(flat(whole[step:]))
            continue
        whole = [batch.tolist() for batch in shards(numbered, rank=rank, size=size, **options).as_numpy("x")]
        handed = []
        for stop in stops:
            batches = data.as_numpy("x")
            for _, batch in zip(range(min(stop, len(data) - 1)), batches, strict=False):
                handed.append(batch.tolist())
            position = data.position()
            batches.close()
            data = data.resume(json.loads(json.dumps(position)))
        handed += [batch.tolist() for batch in data.as_numpy("x")]
        assert handed == whole


def told_by(data):
    """Return the rows of an epoch, and the epoch's plan as the notebook gets it."""
    told = []
    with mock.patch.object(report, "_tell", lambda message: told.append(received(message))):
        rows = flat(batch.tolist() for batch in data.as_numpy("x"))
    (plan,) = (message for message in told if isinstance(message, DataPlanned))
    return rows, as_event(0.0, data.rank, plan)


def lies(x):
    """Return the file and the row group of `numbered` that contain a row."""
    file = (x >= 400) + (x >= 410)
    return int(file), int(x - (0, 400, 410)[file]) // 70


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(0, 12),
    st.sampled_from([False, True, 50, 150]),
)
@settings(max_examples=60)
def test_the_plan_that_is_told_is_what_is_read(numbered, before, after, batch_size, steps, shuffle):
    """Row groups are read in the plan's order, even in a resumed epoch. The order of rows in a buffer is free."""
    options = {"batch_size": batch_size, "columns": ["x"], "shuffle": shuffle, "remainder": "join"}
    for rank in range(after):
        first = shards(numbered, rank=rank % before, size=before, **options)
        steps = min(steps, *(shard.steps - 1 for shard in first.plan()))
        begun = list(itertools.islice(first.as_numpy("x"), steps))
        data = shards(numbered, rank=rank, size=after, **options).resume(first.position(step=steps))
        rest, plan = told_by(data)
        same = steps and before == after  # the rank continues in its own stretch
        rows = [*flat(batch.tolist() for batch in begun), *rest] if same else rest
        assert (plan.epoch, plan.begun, plan.rows) == (1, len(rows) - len(rest), len(rows))
        assert dict(plan.names) == {piece.file: f"part-{piece.file}.parquet" for piece in plan.pieces}
        planned = [(piece.file, piece.row_group) for piece in plan.pieces for _ in range(piece.rows)]
        length = plan.window or 1
        assert plan.window == data.window
        for begin in range(0, len(rows), length):
            read = Counter(map(lies, rows[begin : begin + length]))
            assert read == Counter(planned[begin : begin + length])


@pytest.mark.parametrize(
    "read", [lambda data: data.as_numpy(), lambda data: data.as_tf(), lambda data: data.as_torch()]
)
def test_what_is_left_of_an_epoch_can_be_less_than_a_batch(numbered, read):
    """If the rest of an epoch does not fill a batch, it is skipped, and the next epoch is complete."""
    data = shards(numbered, 300)
    data = data.resume(data.position(step=3))
    assert (data.steps, data.epoch) == (0, 1)
    assert list(read(data)) == []
    assert (data.steps, data.epoch) == (3, 2)
    assert len(list(read(data))) == 3


@pytest.mark.parametrize(
    ("remainder", "read"),
    [
        ("join", lambda data: data.as_numpy()),
        ("join", lambda data: data.as_arrow()),
        ("pad", lambda data: data.as_numpy()),
        ("drop", lambda data: data.as_torch(workers=1)),
    ],
)
def test_nothing_is_left_at_the_end_of_an_epoch(numbered, monkeypatch, remainder, read):
    """A position after the last batch has no batches left, and the next epoch is complete."""
    data = shards(numbered, 64, columns=["x"], transform=dict, remainder=remainder, shuffle=False)
    steps, planned, begin = data.steps, [], module.ReadProgress.begin
    data = data.resume(data.position(step=steps))
    monkeypatch.setattr(module.ReadProgress, "begin", lambda *args: planned.append(args[2:4]) or begin(*args))
    assert list(read(data)) == []
    assert planned == [(), (0, 0)]
    assert (data.epoch, data.steps) == (2, steps)


def test_where_tensorflow_is_has_to_be_said(numbered):
    """TensorFlow reads ahead, so the number of batches that it has taken does not show the training's progress."""
    data = shards(numbered, 100)
    reading = iter(data.as_tf())
    next(reading)
    with pytest.raises(DataError, match=r"position\(step="):
        data.position()
    assert data.position(step=1).legs[0].rows == 100
    del reading


def test_what_is_told_is_what_was_handed_out(numbered, monkeypatch):
    """Rows that were only read ahead are not reported. The end of an epoch is reported with its last batch."""
    told = []
    monkeypatch.setattr(report, "_tell", lambda message: told.append(received(message)))
    for read in (
        lambda data: data.as_numpy(),
        lambda data: data.as_arrow(),
        lambda data: iter(data.as_torch()),
        lambda data: iter(data.as_torch(workers=1)),
    ):
        told.clear()
        data = shards(numbered, 100, rank=0, size=2)
        batches = read(data)
        next(batches)
        assert list(map(type, told)) == [DataOpened, DataPlanned, DataRead]
        assert told[0].rows == 1000
        assert sum(piece.rows for piece in told[1].pieces) == 500
        assert (told[2].rows, told[2].steps, told[2].rows_planned, told[2].done) == (100, 1, 500, False)
        assert 0 < told[2].size_bytes < 100 * 200
        for _ in range(4):
            next(batches)
        assert (told[-1].rows, told[-1].steps, told[-1].epoch, told[-1].done) == (500, 5, 1, True)
        assert told[-1].place.startswith("part-")
    told.clear()
    assert len(list(shards(numbered, 100, rank=0, size=2).as_tf())) == 5
    assert (told[-1].rows, told[-1].steps, told[-1].done) == (500, 5, True)


def test_shards_travel_to_ranks(numbered):
    """In a cell, the notebook's object keeps its position, and can be read as in the notebook."""
    data = shards(numbered, 10, where="x < 100", transform=lambda batch: batch, rank=0, size=1)
    list(data.as_numpy())
    copy = pickle.loads(cloudpickle.dumps(data))
    assert copy.epoch == 2
    assert [batch["x"].tolist() for batch in copy.as_numpy()] == [batch["x"].tolist() for batch in data.as_numpy()]


def test_it_says_what_it_is(numbered):
    """The repr is one line."""
    assert mentions(
        repr(shards(numbered, 64, rank=0, size=3)), "1,000 rows", "16 row", "3 files", "5 steps of 64 rows", "3 ranks>"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": "x"}, "batch_size='x'"),
        ({"batch_size": True}, "batch_size=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": None}, "seed=None"),
        ({"remainder": "keep"}, "one of 'drop', 'pad', 'join'"),
        ({"shuffle": -3}, "shuffle=-3"),
        ({"shuffle": "yes"}, "shuffle='yes'"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"dtype": "flaot32"}, "dtype='flaot32' is not a NumPy dtype"),
        ({"rank": 1}, "give both"),
        ({"rank": 2, "size": 2}, "rank from 0 to size - 1"),
        ({"rank": "0", "size": 2}, "rank='0', size=2: give both"),
        ({"columns": "x"}, r"write columns=\['x'\]"),
        ({"columns": ["z"]}, "no column `z`"),
        ({"columns": 3}, "columns=3: expected a list of names of columns"),
        ({"columns": {"a": ["x", 3]}}, "expected a list of names"),
        ({"columns": {"a": []}}, "`a` has no columns"),
        ({"columns": {"x", "y"}}, "expected a list of names"),
        ({"columns": [("x", "y")]}, "expected a list of names"),
        ({"fill": {"z": 0}}, "fill names `z`"),
        ({"raw": {"z": ("u1", (3,))}}, "raw names `z`"),
        ({"raw": {"x": "uint8"}}, "expected a dtype and a shape"),
        ({"raw": {"x": ("uint8", (0,))}}, "expected a dtype and a shape"),
        ({"raw": {"x": ("nonsense", (3,))}}, "expected a dtype and a shape"),
        ({"where": "z > 3"}, "the column `z` .*, which does not exist"),
        ({"where": [("z", ">", 3)]}, r"the filter \(z > 3\) cannot be evaluated: No match for FieldRef\.Name\(z\)"),
    ],
)
def test_a_wrong_argument_is_told_where_it_is_given(numbered, options, told):
    """The error is raised in the notebook, before any launch."""
    with pytest.raises(DataError, match=told):
        shards(numbered, **options)


def test_what_is_no_source_is_told():
    """If the source is neither a path nor a Spark DataFrame, the error names its type, with the module."""
    for source, kind in ((5, "int"), (b"/data", "bytes"), (["/data", None], "NoneType")):
        with pytest.raises(DataError, match=f"not a `{kind}`"):
            shards(source)
    import pandas

    with pytest.raises(DataError, match=r"path .*Spark DataFrame, not .* `pandas\.(core\.frame\.)?DataFrame`"):
        shards(pandas.DataFrame({"x": [1]}))


def test_fewer_rows_than_the_ranks_batches_need(numbered):
    """The error is raised before anything is read, and says what to do."""
    few = shards(numbered, 300, rank=0, size=4)
    for use in (len, repr, lambda data: next(data.as_numpy())):
        with pytest.raises(DataError, match=r'With size=4, a rank has 250, .*not fill .*batch .* 300.*remainder="pad"'):
            use(few)
    assert len(shards(numbered, 300, rank=0, size=4, remainder="pad")) == 1
    more = shards(numbered, 2, rank=0, size=8, where="x < 3", remainder="pad")
    assert next(more.as_numpy("x")).shape == (2,)


def test_columns_that_cannot_stand_side_by_side(numbered):
    """Only columns of numbers can be combined in one array."""
    with pytest.raises(DataError, match=r"only columns .*numbers"):
        shards(numbered, 8, columns={"in": ["x", "s"]}).spec  # noqa: B018
    with pytest.raises(DataError, match="no column `q`"):
        shards(numbered, 8).as_numpy("q")


def changing(batch):
    """Transform a batch. From row 500 on, the result has another shape."""
    return {"z": np.zeros((len(batch["x"]), 3 if batch["x"].max() < 500 else 4))}


@pytest.mark.parametrize(
    ("transform", "told"),
    [
        (
            changing,
            r"`z` is float64 of shape \[4\] in step 26 \(read up to part-2.parquet, .*\), but .* \[3\] in",
        ),
        (
            lambda b: {"z": b["x"] if b["x"].max() < 500 else b["x"] * 0.5},
            "is float64 in .* but int64 in the first rows",
        ),
        (
            lambda b: {"z": b["x"][: max(16, len(b["x"]) - 1)]},
            r"transform returned 19 rows of `z` for 20 rows of step 1 ",
        ),
        (lambda b: {"z": b["x"]} if b["x"].max() < 500 else {"w": b["x"]}, "no column `w` for the first rows"),
        (lambda b: b["x"] if b["x"].max() > 500 else {"z": b["x"]}, "transform returned a ndarray"),
    ],
)
def test_a_transform_that_changes_its_mind_is_named(numbered, transform, told):
    """The error says where the shape, type or columns changed, in every format."""
    data = shards(numbered, 20, transform=transform, shuffle=False)
    with pytest.raises(DataError, match=told):
        list(data.as_numpy())
    import tensorflow as tf

    with pytest.raises((DataError, tf.errors.OpError), match="transform"):
        list(shards(numbered, 20, transform=transform, shuffle=False).as_tf())


def test_a_transform_that_changes_its_mind_in_a_worker_is_named(numbered):
    """Torch passes on the worker's error unchanged."""
    with pytest.raises(DataError, match="the transform's `z`"):
        list(shards(numbered, 20, transform=changing, shuffle=False).as_torch(workers=1))
    gc.collect()  # the traceback holds the iterator, which ends the worker only when it is deleted
    for worker in multiprocessing.active_children():  # PyTorch 2.1 does not wait for it
        worker.join(DEADLINE_S)


def test_a_transform_that_is_wrong_from_the_first_row_on(numbered):
    """The error is raised when the shapes are needed, which is before the first batch."""
    with pytest.raises(DataError, match=r"transform returned .*single value .* `z` for 16 rows"):
        shards(numbered, 20, transform=lambda b: {"z": b["x"].sum()}).spec  # noqa: B018
    with pytest.raises(DataError, match="no columns"):
        shards(numbered, 20, transform=lambda b: {}).spec  # noqa: B018
    with pytest.raises(ZeroDivisionError):  # the user's own mistake is shown as it is
        shards(numbered, 20, transform=lambda b: {"z": 1 // 0}).spec  # noqa: B018


def test_rows_that_change_their_shape_are_named(tmp_path):
    """If the lists in one file have another length than the lists in another file, an error is raised."""
    for length in (2, 3):
        pq.write_table(pa.table({"v": [[1.0] * length] * 5}), tmp_path / f"part-{length}.parquet")
    with pytest.raises(DataError, match=r"different lengths|of shape"):
        list(shards(tmp_path, 2, shuffle=False).as_numpy())


def test_a_row_group_that_is_broken_is_named(numbered, tmp_path):
    """The footer is intact, so the damage is found only when the rows are read. Then the error names the row group."""
    path = tmp_path / "part-1.parquet"
    rng = np.random.default_rng(0)
    pq.write_table(pa.table({"x": rng.random(4000)}), path, row_group_size=1000, use_dictionary=False)
    whole = bytearray(path.read_bytes())
    begin = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    whole[begin : begin + 4000] = bytes(4000)
    path.write_bytes(whole)
    told = r"part-1\.parquet, row group 2 \(counted from 0\) cannot be read: "
    with pytest.raises(DataError, match=told):
        list(shards(tmp_path, 50).as_numpy())
    with pytest.raises(DataError, match=told):
        list(shards(tmp_path, 50).as_torch())


def test_files_that_have_changed_since(tmp_path):
    """The error says that a file has been removed or rewritten."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": range(10)}), path)
    data = shards(tmp_path, 2)
    pq.write_table(pa.table({"x": range(20)}), path)
    with pytest.raises(DataError, match="rewritten"):
        list(data.as_numpy())
    path.unlink()
    with pytest.raises(DataError, match="removed"):
        list(data.as_numpy())


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "sparkring-reader"]


def test_leaving_early_ends_the_thread(numbered):
    """If reading is left early, the reader's thread ends, in any format."""
    for leave in (
        lambda: next(shards(numbered, 10).as_numpy()),
        lambda: next(shards(numbered, 10).as_arrow()),
        lambda: next(iter(shards(numbered, 10).as_torch())),
        lambda: next(iter(shards(numbered, 10).as_tf())),
    ):
        leave()
        until(lambda: not reader_threads(), "the threads of the reader have ended")


@pytest.mark.parametrize("turn", range(20))
def test_a_reader_that_is_killed_is_told_and_nobody_waits(numbered, turn):
    """If the reader's thread is ended from outside, at any point, the rank gets an error and does not hang."""

    def slow(batch):
        time.sleep(0.001 * turn)
        return batch

    batches = shards(numbered, 5, transform=slow, prefetch=1).as_numpy()
    next(batches)
    (thread,) = reader_threads()
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1
    with pytest.raises(DataError, match=r"thread .*reads .*rank's shard"):
        list(batches)


def test_a_reader_that_is_gone_without_a_word_is_told(numbered, monkeypatch):
    """If the reader ends without an error, the rank still gets an error, and does not wait forever."""
    monkeypatch.setattr(Ahead, "_read", lambda self, make: None)
    with pytest.raises(DataError, match=r"ended without .*error"):
        next(shards(numbered, 5).as_numpy())


KILLS_A_WORKER = """
import os, signal, sys, time

import psutil
from sparkring import shards

data = shards(sys.argv[1], 5, shuffle=20, transform=lambda batch: time.sleep(0.01) or batch)
loader = iter(data.as_torch(workers=1))
next(loader)
(child,) = psutil.Process().children()
os.kill(child.pid, signal.SIGKILL)
list(loader)
"""


def test_a_worker_that_is_killed_is_told(numbered):
    """Torch itself reports a killed worker at once.

    Its error can be raised at any time while a child of the process ends, so this runs in a process of its own.
    """
    ended = subprocess.run([sys.executable, "-c", KILLS_A_WORKER, numbered], capture_output=True, text=True)
    assert ended.returncode == 1
    assert re.search(r"RuntimeError: .*(worker .* exited unexpectedly|killed by signal)", ended.stderr), ended.stderr


def test_memory_is_bounded_by_the_buffers(tmp_path, monkeypatch):
    """One row group of many rows is decoded in pieces, and only a little is read ahead."""
    pq.write_table(pa.table({"x": np.arange(4_000_000)}), tmp_path / "a.parquet", row_group_size=4_000_000)
    monkeypatch.setattr(reader, "READ_BYTES", 80_000)
    monkeypatch.setattr(module, "SHUFFLED_BYTES", 80_000)
    data = shards(tmp_path, 1000)
    assert 5_000 < data.window <= 10_000
    before = pa.total_allocated_bytes()
    most = 0
    for _ in data.as_numpy():
        most = max(most, pa.total_allocated_bytes() - before)
    # Some stored pages and some buffers are in memory. All of the data would be 32 MB.
    assert most < 8_000_000


@pytest.mark.parametrize("whole_bytes", [0, reader.WHOLE_BYTES])
def test_data_elsewhere_is_read_like_data_here(numbered, monkeypatch, whole_bytes):
    """Remote data is read through fsspec. Small files are fetched whole; footers of others are not read each epoch."""
    memory = fsspec.filesystem("memory")
    dataset._remote_footer.cache_clear()
    monkeypatch.setattr(reader, "WHOLE_BYTES", whole_bytes)
    try:
        for path in numbered.iterdir():
            memory.pipe(f"/numbered/{path.name}", path.read_bytes())
        data = shards("memory://numbered", 100, columns=["x"])
        for _ in range(2):
            assert sorted(x for batch in data.as_numpy("x") for x in batch.tolist()) == list(range(1000))
        assert dataset._remote_footer.cache_info().misses == (0 if whole_bytes else 3)
    finally:
        memory.rm("/numbered", recursive=True)


@pytest.mark.parametrize(("shuffle", "most"), [(True, 3 * 32 + 16), (False, 3 + 16)])
def test_requests_before_the_first_batch_do_not_grow_with_the_files(monkeypatch, shuffle, most):
    """A rank asks for no listing, size or footer, and for few files: those of the buffers that it reads ahead."""
    memory = fsspec.filesystem("memory")
    try:
        for number in range(400):
            sink = pa.BufferOutputStream()
            pq.write_table(pa.table({"x": range(number * 10, number * 10 + 10)}), sink)
            memory.pipe(f"/many/{number}.parquet", sink.getvalue().to_pybytes())
        data = shards("memory://many", 10, shuffle=shuffle, prefetch=1, rank=0, size=1)
        data.spec  # noqa: B018 - as before a launch
        data = pickle.loads(pickle.dumps(data))
        fetched = []
        fetch = type(memory).cat_file
        monkeypatch.setattr(
            type(memory), "cat_file", lambda fs, path, **given: fetched.append(path) or fetch(fs, path, **given)
        )
        for name in ("_open", "info", "ls", "find"):
            monkeypatch.setattr(type(memory), name, None)
        batches = data.as_numpy("x")
        read = [next(batches)]
        assert 0 < len(fetched) <= most
        monkeypatch.undo()
        assert sorted(np.concatenate([*read, *batches]).tolist()) == list(range(4000))
    finally:
        memory.rm("/many", recursive=True)


def test_ranks_that_read_all_footers_are_told(numbered, monkeypatch, capsys):
    """The first rank says it, if there are many files in an object store."""
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(module, "MANY_FOOTERS", 12)
    try:
        for path in numbered.iterdir():
            memory.pipe(f"/numbered/{path.name}", path.read_bytes())
        for here, size, is_told in (("memory://numbered", 4, 1), ("memory://numbered", 3, 0), (numbered, 4, 0)):
            monkeypatch.setattr(module.world, "_current", module.world.World(0, size))
            shards(here, 10)
            assert capsys.readouterr().err.count("shards()") == is_told
    finally:
        memory.rm("/numbered", recursive=True)


def test_a_remote_file_that_was_rewritten(numbered):
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe("/rewritten.parquet", next(numbered.iterdir()).read_bytes())
        data = shards("memory://rewritten.parquet", 10)
        memory.pipe("/rewritten.parquet", b"PAR1" * 9000)
        with pytest.raises(DataError, match="rewritten since"):
            next(data.as_numpy())
    finally:
        memory.rm("/rewritten.parquet")


@pytest.fixture
def holes(tmp_path):
    """40 rows in 2 files with 4 row groups in all. Only the last row group has nulls, in most columns."""
    rows = [
        {"x": x, "n": x, "b": x % 2 == 0, "s": f"s{x}", "d": datetime.date(2026, 1, 1 + x % 31), "r": {"a": x}}
        for x in range(40)
    ]
    rows[35:] = [{"x": row["x"]} for row in rows[35:]]
    kind = pa.struct([("a", pa.int64())])
    schema = pa.schema(
        {"x": pa.int64(), "n": pa.int32(), "b": pa.bool_(), "s": pa.string(), "d": pa.date32(), "r": kind}
    )
    for number in range(2):
        table = pa.Table.from_pylist(rows[number * 20 : number * 20 + 20], schema)
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=10)
    return tmp_path


def test_a_dtype_is_the_same_wherever_the_nulls_lie(holes):
    """A dtype depends on all row groups that are read, not on a batch. A filter or fill= may remove the nulls."""

    def dtypes(**more):
        found = [shards(holes, 5, rank=rank, size=2, **more) for rank in range(2)]
        seen = [batch for data in found for _ in range(2) for batch in data.as_numpy()]
        (kinds,) = {tuple((name, str(array.dtype)) for name, array in batch.items()) for batch in seen}
        assert {name: str(spec.dtype) for name, spec in found[0].spec.items()} == dict(kinds)
        return dict(kinds)

    held = {"x": "int64", "n": "float64", "b": "object", "s": "object", "d": "datetime64[D]", "r": "object"}
    assert dtypes() == held
    assert dtypes(shuffle=False, where="x >= 10") == held
    assert dtypes(where="n is not None and x < 38") == {**held, "n": "int32", "b": "bool"}
    assert dtypes(where="x < 35") == {**held, "n": "int32", "b": "bool"}
    assert dtypes(fill={"n": -1, "b": False}) == {**held, "n": "int32", "b": "bool"}
    assert dtypes(dtype="float32")["n"] == "float32"
    (last,) = shards(holes, 40, shuffle=False).as_numpy("n", "b", "s", "d", "r")
    assert [array[[0, 39]].tolist() for array in last[1:3]] == [[True, None], ["s0", None]]
    assert [np.isnan(last[0][39]), np.isnat(last[3][39]), *last[4][[3, 39]]] == [True, True, {"a": 3}, None]


def test_nulls_that_no_footer_tells(tmp_path):
    """Nulls that no footer counts are an error, because they would change the dtype. Paths show partitions' nulls."""
    pq.write_table(pa.table({"x": [*range(30), None]}), tmp_path / "0.parquet", write_statistics=False)
    with pytest.raises(DataError, match=r"`x` has nulls \(1 in 31 rows\), .*footers .*files .*not count"):
        list(shards(tmp_path, 31).as_numpy())
    for name in ("year=1", "year=__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / "years" / name).mkdir(parents=True)
        pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "years" / name / "0.parquet")
    data = shards(tmp_path / "years", 2, shuffle=False)
    assert [batch["year"].dtype for batch in data.as_numpy()] == [np.float64] * 2


def test_what_is_no_tensor_is_told_with_what_to_do(holes):
    """as_tf() and as_torch() raise an error that says what to do, and so does the launch of a cell that calls them.

    If only the rows show that a tensor cannot hold them, reading raises the error.
    """
    data = shards(holes, 5)
    assert next(iter(data.as_tf("x", "n")))[1].dtype == "float64"
    assert len(data.as_torch("n")) == 8
    for name, said in (
        ("b", r"is bool with nulls.*fill=\{'b': False\}"),
        ("s", r"is string with nulls.*fill=\{'s': ''\}"),
        ("d", r"is date32\[day\] with nulls.*fill=\{'d': datetime.date\(1970, 1, 1\)\}"),
        ("r", r"is struct<a: int64>, which.*columns=\["),
    ):
        for call in (data.as_tf, data.as_torch):
            with pytest.raises(DataError, match=f"column `{name}` {said}"):
                call("x", name)
        with pytest.raises(DataError, match=f"column `{name}` {said}"):
            data.__sparkring_validate__(2, method_calls(f"for x in data.as_torch({name!r}): pass", "data"))
        rest = shards(holes, 5, where="x >= 0", shuffle=False)
        if name in "sd":
            with pytest.raises(DataError, match=rf"column `{name}` .*nulls, .*no tensor .*hold.*fill="):
                list(rest.as_torch(name))
    early = shards(holes, 5, transform=lambda batch: {"d": (batch["x"] - 3_000_000).astype("M8[D]")})
    with pytest.raises(
        DataError, match=r"`d` has times from -.* int64 nanoseconds, .*range .* 1677-09-22 to 2262-04-11"
    ):
        list(early.as_torch("d"))
    for cell in ("data.as_tf('x')", "data = open(); data.as_tf('b')", "data.as_tf(*names)", "data.as_numpy()"):
        data.__sparkring_validate__(2, method_calls(cell, "data"))
    made = shards(holes, 5, transform=lambda batch: {"x": batch["x"], "r": batch["r"]})
    assert len(made.as_torch("x")) == 8
    with pytest.raises(DataError, match=r"transform returned `r` as `dict` objects, .*no tensor .*hold"):
        made.as_tf()


def test_decimals_train_as_floats_where_a_dtype_says_so(tmp_path):
    """Decimals combined with other numbers become floats, too. Other decimals stay decimals, which no tensor holds."""
    price = [decimal.Decimal(x) / 4 for x in range(8)]
    pq.write_table(pa.table({"x": np.arange(8, dtype="f4"), "price": price}), tmp_path / "0.parquet")
    assert next(shards(tmp_path, 8, shuffle=False).as_numpy("price")).tolist() == price
    with pytest.raises(DataError, match=r'`price` is decimal128\(3, 2\), which no tensor .*dtype="float32" or.*cast'):
        shards(tmp_path, 8).as_tf("price")
    for more, dtype in (({"dtype": "float32"}, "float32"), ({"columns": {"price": ["x", "price"]}}, "float64")):
        (found,) = shards(tmp_path, 8, shuffle=False, **more).as_tf("price")
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.numpy().reshape(8, -1)[:, -1], [float(each) for each in price])
