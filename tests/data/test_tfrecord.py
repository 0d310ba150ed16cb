"""TFRecord files of whole batches: the rows are read back as they were written, and each rank has an equal share."""

from __future__ import annotations

import collections
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from texts import mentions

from sparkring.data.shards import shards
from sparkring.data.tfrecord import Schema, read_schema, tfrecords, write_tfrecord
from sparkring.data.tfrecord.schema import SCHEMA, RecordColumn, RecordFile, share_out
from sparkring.errors import DataError, OptionsError, RunFailed
from sparkring.history import run_store


@pytest.fixture(autouse=True)
def tf(watch):
    """TensorFlow, which never closes the files that it opens when it is imported."""

    def use():
        import tensorflow

        list(tensorflow.data.Dataset.range(1))
        return tensorflow

    return watch.except_for(use)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "records"


def numbered(rows):
    return {"x": np.arange(rows), "y": np.arange(rows, dtype=np.float32)[:, None] * [1, 2]}


def seen(records):
    """Return the x of every row of an epoch, in the order of reading."""
    return [int(x) for batch in records for x in batch["x"]]


# ── Shares ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    records=st.integers(1, 200),
    files=st.integers(1, 20),
    ranks=st.integers(1, 24),
    short=st.integers(0, 6),
    remainder=st.sampled_from(["drop", "pad"]),
)
def test_shares(records, files, ranks, short, remainder):
    """Ranks have equal numbers of steps. With "drop", ranks share no record. With "pad", no record is left out."""
    batch = 7
    rows = [0] * files
    for index in range(records):
        rows[index % files] += batch
    rows[(records - 1) % files] -= short
    each = tuple(RecordFile(str(i), -(-n // batch), n, 0) for i, n in enumerate(rows))
    schema = Schema((RecordColumn("x", "int64"),), batch, sum(rows), each)
    usable = schema.rows // batch if remainder == "drop" else records
    if usable < ranks:
        with pytest.raises(DataError, match="too few"):
            share_out(schema, 0, ranks, remainder)
        return
    shares = [share_out(schema, rank, ranks, remainder) for rank in range(ranks)]
    assert {share.steps for share in shares} == {usable // ranks if remainder == "drop" else -(-usable // ranks)}
    read = collections.Counter(
        (part.file, index)
        for share in shares
        for part in share.parts
        for index in range(part.skip, part.skip + part.take)
    )
    assert len(read) == usable
    assert sum(read.values()) == (usable if remainder == "drop" else shares[0].steps * ranks)
    for share in shares:
        took = sum(part.take for part in share.parts)
        assert share.steps <= took <= share.steps + (remainder == "drop")


def test_whole_files_where_they_are_even():
    """If there are twice as many files as ranks, no file is opened by two ranks."""
    files = tuple(RecordFile(str(i), 10, 100, 0) for i in range(8))
    schema = Schema((RecordColumn("x", "int64"),), 10, 800, files)
    shares = [share_out(schema, rank, 4) for rank in range(4)]
    assert [sorted(part.file for part in share.parts) for share in shares] == [[r, r + 4] for r in range(4)]
    assert not any(share.split for share in shares)
    assert all(share_out(schema, rank, 3).split for rank in range(3))


# ── Writing and reading ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_every_type(folder, tf, compression):
    """Numbers of every width, arrays, images, text and bytes are read back unchanged, with static shapes."""
    random = np.random.default_rng(0)
    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
    rows = {name: random.integers(0, 2, (10, 3)).astype(name) for name in names.split()}
    rows["uint64"][0] = 2**64 - 1
    rows["big"] = np.arange(10, dtype=">i4")
    rows["image"] = random.integers(0, 256, (10, 4, 5, 3), np.uint8)
    rows["text"] = np.array([f"ö{i}" * i for i in range(10)], object)
    rows["lists"] = [["a", "b"], ["c", "d"]] * 5
    rows["nan"] = np.array([[1.5, float("nan")]] * 10)
    rows["flags"] = np.array([False, True] * 5, object)
    rows["raw"] = np.array([bytes([0, i, 0]) for i in range(10)], object)
    write_tfrecord(rows, folder, batch_size=5, files=2, compression=compression)
    records = tfrecords(folder, shuffle=False)
    spec = records.as_tf().element_spec
    assert (spec["image"].shape, spec["image"].dtype) == ((5, 4, 5, 3), tf.uint8)
    assert (spec["text"].shape, spec["text"].dtype) == ((5,), tf.string)
    batches = list(records)
    for name, written in rows.items():
        read = np.concatenate([batch[name] for batch in batches])
        if name in ("text", "lists"):
            written = np.char.encode(np.array(written, str)).astype(object)
        if name == "flags":
            written = written.astype(bool)
        assert read.dtype == written.dtype.newbyteorder("=")
        assert all(batch[name].flags.writeable for batch in batches)
        np.testing.assert_array_equal(read, written)


def test_rows_in_pieces(folder):
    """The batches that are passed in may have any size. The files differ by at most one record."""
    pieces = [numbered(60)["x"][start:stop] for start, stop in ((0, 1), (1, 1), (1, 40), (40, 60))]
    pieces.insert(0, [])
    schema = write_tfrecord(({"x": piece} for piece in pieces), folder, batch_size=4, files=4)
    assert [file.records for file in schema.files] == [4, 4, 4, 3]
    assert [file.size_bytes for file in schema.files] == [(folder / file.name).stat().st_size for file in schema.files]
    assert read_schema(folder) == schema
    assert seen(tfrecords(folder, shuffle=False)) == list(range(60))


def test_a_spark_frame(spark, folder, tmp_path):
    """A Spark DataFrame with lists, vectors and text is spread evenly over files, however it is partitioned."""
    from pyspark.ml.linalg import Vectors

    rows = [(i, [float(i), 0.5], Vectors.dense([i, 1.0, 2.0]), f"row {i}", bytearray([i]), True) for i in range(50)]
    frame = spark.createDataFrame(rows, ["x", "l", "v", "t", "b", "z"]).repartition(7)
    told = []
    schema = write_tfrecord(frame, folder, batch_size=8, ranks=2, cache=tmp_path / "cache", name="df", say=told.append)
    assert [file.records for file in schema.files] == [2, 2, 2, 1]
    assert schema.columns[:3] == (
        RecordColumn("x", "int64"),
        RecordColumn("l", "float64", (2,)),
        RecordColumn("v", "float64", (3,)),
    )
    found = sorted(
        (int(batch["x"][i]), *batch["l"][i], *batch["v"][i], batch["t"][i], batch["b"][i])
        for batch in tfrecords(folder, remainder="pad")
        for i in range(8)
    )
    assert sorted(set(found)) == [(i, i, 0.5, i, 1.0, 2.0, f"row {i}".encode(), bytes([i])) for i in range(50)]
    assert any(line.startswith("writing `df`") for line in told)
    assert told[-1].startswith("wrote 50 rows in 7 records and 4 files")


def test_shards_as_the_source(folder, tmp_path):
    """The rows are written as shards() selects, fills and transforms them, in batches of the same size."""
    table = pa.table({"a": pa.array([*range(20), None], pa.float32()), "b": np.arange(21), "c": np.zeros(21)})
    pq.write_table(table, tmp_path / "numbers.parquet")
    data = shards(
        tmp_path / "numbers.parquet",
        8,
        columns={"x": "b", "y": "a"},
        where="b > 1",
        fill={"a": -1},
        transform=lambda batch: {"x": batch["x"], "y": np.stack([batch["y"], batch["y"]], 1)},
        shuffle=False,
        remainder="join",
    )
    with pytest.raises(OptionsError, match="these shards have 8"):
        write_tfrecord(data, folder, batch_size=4)
    schema = write_tfrecord(data, folder, ranks=1)
    assert schema.columns == (RecordColumn("x", "int64"), RecordColumn("y", "float32", (2,)))
    assert (schema.batch_size, [file.rows for file in schema.files]) == (8, [11, 8])
    (second,) = tfrecords(folder, shuffle=False, rank=1, size=2)
    assert (second["x"].tolist(), second["y"].tolist()) == ([*range(10, 18)], [[i, i] for i in range(10, 18)])
    *_, last = tfrecords(folder, shuffle=False, remainder="pad")
    assert last["y"][:, 0].tolist() == [18, 19, -1, 18, 19, -1, 18, 19]


def test_prefixes(folder):
    """The files are spread evenly over folders whose names look like hashes."""
    schema = write_tfrecord(numbered(64), folder, batch_size=4, files=8, prefixes=4)
    spread = collections.Counter(file.name.partition("/")[0] for file in schema.files)
    assert sorted(spread.values()) == [2, 2, 2, 2]
    assert sorted(path.parent.name for path in folder.glob("*/*.tfrecord")) == sorted(spread.elements())
    assert sorted(seen(tfrecords(folder))) == list(range(64))


def test_another_file_system(folder):
    """Files can be written to other file systems. If TensorFlow cannot read them there, they are read without it."""
    import fsspec

    write_tfrecord(numbered(8), "memory://far/records", batch_size=4, files=2, prefixes=2)
    try:
        assert len(fsspec.filesystem("memory").glob("/far/records/*/*.tfrecord")) == 2
        assert read_schema("memory://far/records").rows == 8
        records = tfrecords("memory://far/records", shuffle=False)
        assert (len(records), sorted(seen(records.as_numpy()))) == (2, list(range(8)))
        assert records.as_tf("y").element_spec.shape == (4, 2)
    finally:
        fsspec.filesystem("memory").rm("/far", recursive=True)


# ── Order, columns, formats ───────────────────────────────────────────────────────────────────────────────────────────


def test_order(folder):
    """The order changes with each epoch, and the same seed gives the same order. 0 is a seed like any other."""
    write_tfrecord(numbered(512), folder, batch_size=4, files=8)

    def epochs(seed):
        records = tfrecords(folder, seed=seed)
        found = records.as_tf("x")
        return [[int(x) for batch in found for x in batch] for _ in range(3)]

    first, again, other = epochs(0), epochs(0), epochs(1)
    assert first == again != other
    assert len({tuple(order) for order in (*first, *other)}) == 6
    assert all(sorted(order) == list(range(512)) for order in (*first, *other))
    records = tfrecords(folder)
    assert len({tuple(seen(records)) for _ in range(3)}) == 3
    plain = tfrecords(folder, shuffle=False)
    assert seen(plain) == seen(plain) == list(range(512))


def test_remainder(folder, capsys):
    """Rows that do not fill a batch are left out, with a message, or are filled up with rows that were already read."""
    write_tfrecord(numbered(22), folder, batch_size=4, files=2)
    dropped = tfrecords(folder, shuffle=False)
    assert (len(dropped), dropped.dropped, seen(dropped)) == (5, 2, list(range(20)))
    assert mentions(capsys.readouterr().out, "2 of 22 rows", "left out", "each epoch")
    padded = tfrecords(folder, shuffle=False, remainder="pad")
    assert (len(padded), padded.dropped) == (6, 0)
    assert seen(padded) == [*range(22), 20, 21]
    assert padded.as_tf("x").element_spec.shape == (4,)


def test_what_is_asked_for(folder, tf):
    """as_tf() can return dicts, tuples of named columns, tensors, only some columns, or a transform's results."""
    write_tfrecord(numbered(8), folder, batch_size=4, files=2)
    records = tfrecords(folder, shuffle=False)
    assert set(records.as_tf().element_spec) == {"x", "y"}
    assert [spec.shape.as_list() for spec in records.as_tf("y", "x").element_spec] == [[4, 2], [4]]
    assert records.as_tf("x").element_spec.dtype == tf.int64
    assert set(tfrecords(folder, columns=["y"]).as_tf().element_spec) == {"y"}
    twice = tfrecords(folder, shuffle=False, transform=lambda batch: {"z": batch["x"] * 2})
    assert next(iter(twice.as_tf("z"))).numpy().tolist() == [0, 2, 4, 6]
    assert len(records.as_tf()) == records.steps == 2


def test_keras(folder, tf):
    """Keras' fit() accepts the data set unchanged, for several epochs."""
    write_tfrecord(numbered(64), folder, batch_size=8, files=4)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
    model.compile("sgd", "mse")
    history = model.fit(tfrecords(folder).as_tf("y", "x"), epochs=3, verbose=0)
    assert len(history.history["loss"]) == 3


# ── Ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

READ = """
    from sparkring.data.tfrecord import tfrecords

    records = tfrecords(path, seed=0)
    found = [[int(x) for batch in records.as_tf("x") for x in batch] for epoch in range(1)]
    len(records), found[0]
"""


@pytest.mark.parametrize("files", [6, 4, 1])
def test_ranks_read_their_shares(shared_local_gang, folder, files):
    """Three ranks have the same number of steps, read no row twice, and report their progress."""
    write_tfrecord(numbered(36 * 4), folder, batch_size=4, files=files)
    shared_local_gang.notebook["path"] = str(folder)
    result = shared_local_gang.cell(READ)
    steps, rows = zip(*result.values, strict=True)
    assert steps == (12, 12, 12)
    assert sorted(x for each in rows for x in each) == list(range(144))
    for rank in result.record.ranks:
        (reading,) = rank.readings
        (read,) = reading.ended
        told = (reading.opened.kind, reading.opened.rows, read.steps, read.rows, read.done)
        assert told == ("tfrecord", 144, 12, 48, True)
        taken = Counter({piece.file: piece.rows for piece in reading.plan.pieces})
        assert reading.plan.pieces[0].row_group == -1
        assert dict(reading.plan.names).keys() == taken.keys()
        everything = read_schema(folder).files
        assert all(name == everything[number].name for number, name in reading.plan.names)
        parts = share_out(read_schema(folder), rank.rank, 3).parts
        assert taken == Counter({part.file: 4 * part.take for part in parts})
    split = any("cannot be divided evenly among 3 ranks" in line.text for line in result.record.recent)
    assert split == (files != 6)


def test_made_in_the_notebook(shared_local_gang, local, folder):
    """In a cell, records from the notebook become the rank's own share, unless they were made for a given rank."""
    write_tfrecord(numbered(12 * 4 + 2), folder, batch_size=4, files=4)
    records, second = tfrecords(folder), tfrecords(folder, shuffle=False, rank=1, size=4)
    assert (len(records), records.dropped, len(second)) == (12, 2, 3)
    list(records)
    cell = "(repr(records), len(records), records.dropped, [int(x) for x in records.as_tf('x').unbatch()], len(second))"
    shared_local_gang.notebook |= {"records": records, "second": second}
    result = shared_local_gang.cell(cell)
    told, steps, dropped, rows, others = zip(*result.values, strict=True)
    assert told[0] == f"<tfrecords of {folder}: 50 rows in 4 files; 4 steps of 4 rows per epoch on each of 3 ranks>"
    assert (steps, dropped, others) == ((4, 4, 4), (2, 2, 2), (3, 3, 3))
    assert sorted(x for each in rows for x in each) == list(range(48))
    advice = [line.text for line in result.record.recent if "2 of 50 rows are left out" in line.text]
    assert len(advice) == 1
    with pytest.raises(RunFailed, match=r"4 rows .*13 ranks \(only 12\)"):
        local.run("tfrecords(path, rank=12, size=13)", 1, namespace={"tfrecords": tfrecords, "path": str(folder)})


def test_too_few_records(folder):
    """If there are more ranks than records, an error is raised before the first batch."""
    write_tfrecord(numbered(8), folder, batch_size=4, files=2)
    with pytest.raises(DataError, match=r"4 rows .*3 ranks \(only 2\)"):
        share_out(read_schema(folder), 0, 3)


# ── Bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": np.array([1, None], object)}, r"column `a` has nulls \(1 of 2"),
        ({"a": np.array(["x", float("nan")], object)}, r"column `a` has nulls \(1 of 2"),
        ({"a": ["x", float("nan")]}, r"column `a` has nulls \(1 of 2"),
        ({"a": np.array([1.5, float("nan")], object)}, r"column `a` has nulls \(1 of 2"),
        (pd.DataFrame({"a": pd.array([1, None], "Int64")}), r"column `a` has nulls \(1 of 2"),
        ({"a": pd.array([1.5, None], "Float64")}, r"column `a` has nulls \(1 of 2"),
        (pd.DataFrame({"a": pd.array(["x", None], "string")}), r"column `a` has nulls \(1 of 2"),
        ({"a": np.array([pd.Timestamp(0), pd.NaT], object)}, r"column `a` has nulls \(1 of 2"),
        ({"a": pd.Series([["x", "y"], ["z", float("nan")]])}, r"column `a` has nulls \(1 of 4"),
        ({"a": ["x", 3]}, "column `a` has both strings and other values"),
        ({"a": np.array([3, b"x"], object)}, "column `a` has both strings and other values"),
        ({"a": pd.Series([np.array(["x"]), np.array([3.0])])}, "column `a` has both strings and other values"),
        ({"a": np.ma.masked_array([1, 2], [False, True])}, "column `a` has masked values"),
        ({"a": [[1, 2], [3]]}, "column `a` is ragged"),
        ({"a": np.array([np.zeros(2), np.zeros(3)], object)}, "column `a` is ragged"),
        ({"a": np.array(["2020-01-01"], "M8[s]")}, r"column `a` is of type datetime64\[s\].*unix_micros"),
        ({"a": [Decimal(1)]}, "column `a` is of type Decimal, .* convert it to numbers"),
        ({"a": np.zeros(2), "b": np.zeros(3)}, "columns of a batch differ in length: `a` 2, `b` 3"),
        ({"a": np.zeros((2, 0))}, r"column `a` has the shape \[2, 0\]"),
        ({"a": 3.0}, r"column `a` has the shape \[\]"),
        ({"a": np.zeros(0)}, "the data has no rows"),
        (
            [{"a": np.zeros(2)}, {"b": np.zeros(2)}],
            r"column `a` is not there from row 2 on, but float64 of shape \[\] before",
        ),
        ([{"a": np.zeros(2)}, {"a": np.zeros(2, int)}], "column `a` is int64 of shape .* from row 2 on, but float64"),
        (
            [{"a": np.zeros((2, 3))}, {"a": np.zeros((2, 4))}],
            r"column `a` is float64 of shape \[4\] from row 2 on.* \[3\]",
        ),
        ([1, 2], "yields a `int`: a batch must be a dict"),
        ([], "the data has no rows"),
    ],
)
def test_what_cannot_be_stored(folder, rows, message):
    """The error is one sentence that names the column, and no file is left."""
    with pytest.raises(DataError, match=message):
        write_tfrecord(rows, folder, batch_size=4)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("if(id = 3, NULL, id)", "column `c` has nulls"),
        ("if(id = 3, array(1), array(1, 2))", "column `c` has rows of different lengths"),
        ("timestamp'2020-01-01 00:00:00'", r"column `c` is of type datetime64.*unix_micros"),
        ("map('a', id)", "column `c` is of type dict, which a TFRecord array cannot hold"),
    ],
)
def test_what_spark_has_and_records_cannot_hold(spark, folder, tmp_path, column, message):
    """If a Spark DataFrame has a column that TFRecord files cannot hold, the error says why."""
    with pytest.raises(DataError, match=message):
        write_tfrecord(spark.range(8).selectExpr("id", f"{column} AS c"), folder, batch_size=4, cache=tmp_path / "c")
    assert not folder.exists()


def test_nothing_reads_on(folder, tmp_path):
    """The thread that reads ahead ends with the write, even if the error is kept, as notebooks keep the last error."""
    pq.write_table(pa.table({"a": np.arange(200)}), tmp_path / "numbers.parquet")
    data = shards(tmp_path / "numbers.parquet", 2, transform=lambda batch: {"t": batch["a"].astype("M8[s]")})
    with pytest.raises(DataError, match="datetime64") as kept:
        write_tfrecord(data, folder)
    assert kept.tb
    assert "sparkring-reader" not in {thread.name for thread in threading.enumerate()}


def test_a_folder_with_something_in_it(folder):
    """Existing files are not overwritten. An empty folder is used, and stays if writing fails."""
    folder.mkdir()
    with pytest.raises(DataError, match="no rows"):
        write_tfrecord([], folder, batch_size=4)
    assert list(folder.iterdir()) == []
    write_tfrecord(numbered(8), folder, batch_size=4)
    before = sorted(folder.rglob("*"))
    with pytest.raises(DataError, match=r"not .*empty"):
        write_tfrecord(numbered(4), folder, batch_size=4)
    assert sorted(folder.rglob("*")) == before


def test_a_write_that_is_stopped(folder):
    """An interrupt or an error of the source is passed on, and no file is left."""

    def stopped(error):
        yield numbered(100)
        raise error

    for error in (KeyboardInterrupt(), ZeroDivisionError("mine"), FileNotFoundError("mine, too")):
        with pytest.raises(type(error)):
            write_tfrecord(stopped(error), folder, batch_size=4)
        assert not folder.exists()


def test_where_nothing_can_be_written(tmp_path):
    """The error names the folder that cannot be made, and the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/below .*Not a directory"):
        write_tfrecord(numbered(4), tmp_path / "file" / "below", batch_size=4)


def test_a_full_disk(folder):
    """The error gives the reason, and no file is left. The test limits the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DataError, match=r"records .*written: .*File too large"):
            write_tfrecord({"x": np.random.default_rng(0).random(1_000_000)}, folder, batch_size=1_000, files=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not folder.exists()


@pytest.mark.parametrize("seat", [{"rank": 1}, {"size": 2}, {"rank": 2, "size": 2}])
def test_a_rank_that_there_is_not(folder, seat):
    """rank and size must be given together, and rank must be less than size."""
    write_tfrecord(numbered(8), folder, batch_size=4)
    with pytest.raises(DataError, match="rank from 0 to size - 1"):
        tfrecords(folder, **seat)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 0}, {"batch_size": None}, {"files": 0}, {"ranks": 0}, {"prefixes": -1}, {"compression": "ZIP"}],
)
def test_options(folder, options):
    with pytest.raises(OptionsError):
        write_tfrecord(numbered(4), folder, **{"batch_size": 4, **options})
    assert not folder.exists()


def test_what_is_no_whole_folder(folder):
    """A missing folder, a folder without a schema, and a schema that is cut off or of another version are errors."""
    with pytest.raises(DataError, match="does not exist"):
        tfrecords(folder)
    write_tfrecord(numbered(8), folder, batch_size=4)
    text = (folder / SCHEMA).read_text()
    (folder / SCHEMA).write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match=r"_schema.json is damaged"):
        tfrecords(folder)
    (folder / SCHEMA).write_text(json.dumps({**json.loads(text), "layout": 99}))
    with pytest.raises(DataError, match="another version"):
        tfrecords(folder)
    (folder / SCHEMA).unlink()
    with pytest.raises(DataError, match="has no _schema"):
        read_schema(folder)


def test_a_writer_that_is_killed(folder):
    """What it leaves is not read as if others had written it."""
    code = "import os, signal, numpy as np; from sparkring.data.tfrecord import write_tfrecord\n"
    code += "def rows():\n yield {'x': np.arange(8)}\n os.kill(os.getpid(), signal.SIGKILL)\n"
    code += f"write_tfrecord(rows(), {str(folder)!r}, batch_size=4)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert list(folder.glob("*.tfrecord"))
    with pytest.raises(DataError, match="writing was interrupted"):
        tfrecords(folder)


def test_damaged_files(folder):
    """The error names a file that is missing, was cut off, or has a changed bit."""
    write_tfrecord(numbered(80), folder, batch_size=4, files=2)
    part = folder / "part-00001.tfrecord"
    content = part.read_bytes()
    middle = len(content) // 2
    part.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    records = tfrecords(folder)  # the file still has the right size
    with pytest.raises(DataError, match=r"part-00001\.tfrecord .*record \d+ \(corrupted"):
        list(records)
    os.truncate(part, middle)
    with pytest.raises(DataError, match=r"part-00001\.tfrecord has [\d,]+ bytes"):
        tfrecords(folder)
    part.unlink()
    with pytest.raises(DataError, match=r"part-00001.tfrecord is missing"):
        tfrecords(folder)


def test_a_damaged_file_under_keras(local, folder):
    """TensorFlow does not say which file is damaged, so the error says how to find out."""
    write_tfrecord(numbered(80), folder, batch_size=4, files=1)
    part = folder / "part-00000.tfrecord"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    cell = """
        import tensorflow as tf

        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
        model.compile("sgd", "mse")
        model.fit(records.as_tf("y", "x"), verbose=0)
    """
    with pytest.raises(RunFailed, match=r"`.*batch .*tfrecords\(…\): pass`"):
        local.run(cell, 1, namespace={"records": tfrecords(folder)})


def test_columns_that_are_not_there(folder):
    """The error suggests a similar name."""
    write_tfrecord({"label": np.zeros(4), "image": np.zeros(4)}, folder, batch_size=4)
    with pytest.raises(DataError, match=r"`lable`.*`label`"):
        tfrecords(folder, columns=["lable"])
    with pytest.raises(DataError, match=r"`imag`.*`image`"):
        tfrecords(folder).as_tf("imag")
    with pytest.raises(DataError, match=r"batch .*no column `q`: .* `p`"):
        tfrecords(folder, transform=lambda batch: {"p": batch["label"]}).as_tf("q")


def test_too_few_records_for_the_ranks_are_told_before_they_start(local, tmp_path):
    """In the notebook, the records suffice for one rank. Before a run, they are checked for all of the run's ranks."""
    (tmp_path / "few").mkdir()
    write_tfrecord({"x": np.arange(8)}, tmp_path / "few", batch_size=4, files=1)
    few = tfrecords(tmp_path / "few")
    before = run_store.saved()
    with pytest.raises(DataError, match=r"4 rows .*3 ranks \(only 2\)"):
        local.run("len(few)", n=3, namespace={"few": few})
    assert run_store.saved() == before
    assert local.run("len(few)", namespace={"few": few}).values == [1, 1]
