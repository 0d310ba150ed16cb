"""shards() in a cell: each rank reads its own rows, locally and on Spark, and the record says which data was read."""

import decimal
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkring
from sparkring import shards, world
from sparkring.errors import DataError, RunFailed, RunTimeout
from sparkring.history import reading, run_store


@pytest.fixture
def numbered(tmp_path):
    """1,001 rows in 2 files and row groups of 90; one row more than 2 ranks can share evenly."""
    folder = tmp_path / "numbered"
    folder.mkdir()
    for number, x in enumerate(np.array_split(np.arange(1001), 2)):
        pq.write_table(pa.table({"x": x, "y": x * 2.0}), folder / f"part-{number}.parquet", row_group_size=90)
    return str(folder)


@pytest.mark.standalone("the plan is made where the data are not")
def test_data_that_was_made_in_the_notebook_is_shared_out_on_the_ranks(ring, numbered):
    """Each rank reads its own shard of the notebook's data; every row is read once per epoch."""
    data = shards(numbered, 50, remainder="join")
    result = ring.run("""
        epochs = [[x for batch in data.as_numpy("x") for x in batch.tolist()] for _ in range(2)]
        epochs, len(data), data.epoch
    """, namespace={"data": data})  # fmt: skip
    for epoch in (0, 1):
        read = [value[0][epoch] for value in result.values]
        assert sorted(map(len, read)) == [500, 501]
        assert sorted(x for rows in read for x in rows) == list(range(1001))
    assert sorted(value[1] for value in result.values) == [10, 11]
    assert {value[2] for value in result.values} == {3}
    assert data.epoch == 1


@pytest.mark.any_launcher
def test_data_that_is_made_in_the_cell(ring, numbered):
    """The rows are shared out in the same way if shards() is called in the cell."""
    result = ring.run("""
        from sparkring import shards
        sorted(x for batch in shards(path, 10, columns=["x"], where="y < 400").as_numpy("x") for x in batch.tolist())
    """, namespace={"path": numbered})  # fmt: skip
    assert sorted(result.values[0] + result.values[1]) == list(range(200))


@pytest.mark.any_launcher
def test_the_record_tells_what_was_read_and_how_far(ring, numbered):
    """The live and saved records have the data's path, columns, filter, version, counts, and each rank's progress."""
    data = shards(numbered, 50, columns=["x"], where="x < 1000")
    result = ring.run("""
        for _ in range(2):
            for batch in data.as_numpy("x"): pass
    """, namespace={"data": data})  # fmt: skip
    for record in (result.record, run_store.load(run_store.home() / result.record.run_id)):
        for rank in record.ranks:
            (reading,) = rank.readings
            opened = reading.opened
            assert (opened.name, opened.kind, opened.columns, opened.where) == (numbered, "parquet", ("x",), "x < 1000")
            assert opened.version == data.dataset.version
            assert (opened.files, opened.row_groups, opened.rows, opened.batch_size) == (2, 12, 1000, 50)
            assert [(read.epoch, read.rows, read.rows_planned, read.steps, read.done) for read in reading.ended] == [
                (1, 500, 500, 10, True),
                (2, 500, 500, 10, True),
            ]
            assert reading.now is not None
            assert "row group" in reading.now.place
            assert reading.now.size_bytes > 0


@pytest.mark.forked("pandas", "pyarrow.dataset")
def test_ranks_read_the_version_of_a_delta_table_that_the_notebook_has_chosen(local, delta, tmp_path):
    """The ranks need no package for Delta, a later version changes nothing, and the record has the number."""
    path = tmp_path / "sales"
    for x in ([1, 2, 3, 4], [5, 6]):
        delta.write_deltalake(path, pa.table({"x": x}), mode="overwrite")
    data = shards(path, 1, version=0)
    delta.DeltaTable(path).delete("x = 5")
    result = local.run("""
        import sys
        [x for batch in data.as_numpy("x") for x in batch.tolist()], "deltalake" in sys.modules
    """, namespace={"data": data})  # fmt: skip
    assert sorted(x for read, _ in result.values for x in read) == [1, 2, 3, 4]
    assert not any(is_imported for _, is_imported in result.values)
    for record in (result.record, run_store.load(run_store.home() / result.record.run_id)):
        assert {rank.readings[0].opened.version for rank in record.ranks} == {f"0 ({data.dataset.version})"}


@pytest.mark.forked("pandas", "pyarrow.dataset")
@pytest.mark.slow
@pytest.mark.any_launcher
def test_the_record_tells_which_row_groups_each_rank_reads(ring, numbered):
    """The live and the saved record have the plan of the current epoch, even if it was resumed in the middle."""
    data = shards(numbered, 50, columns=["x"], shuffle=100)
    cell = """
        read = [x for batch in data.as_numpy("x") for x in batch.tolist()]
        read
    """
    half = data.plan(2)[0].steps // 2
    begun = ring.run("""
        batches = data.as_numpy("x")
        read = [x for _ in range(half) for x in next(batches).tolist()]
        batches.close()
        data.position(), read
    """, namespace={"data": data, "half": half})  # fmt: skip
    (position, _), _ = begun.values
    for start, before in ((data, [[], []]), (data.resume(position), [value[1] for value in begun.values])):
        result = ring.run(cell, namespace={"data": start})
        shares = start.plan(2)
        for record in (result.record, run_store.load(run_store.home() / result.record.run_id)):
            for rank, share, first in zip(record.ranks, shares, before, strict=True):
                (reading,) = rank.readings
                plan = reading.plan
                assert [(piece.file, piece.row_group, piece.rows) for piece in plan.pieces] == [
                    (each.file, each.row_group, each.rows) for each in share.ranges
                ]
                assert dict(plan.names) == {piece.file: f"part-{piece.file}.parquet" for piece in plan.pieces}
                assert (plan.epoch, plan.begun, plan.window) == (1, len(first), 100)
                lay = {(int(x >= 501), (x - 501 * (x >= 501)) // 90) for x in [*first, *result.values[rank.rank]]}
                assert lay <= {(piece.file, piece.row_group) for piece in plan.pieces}


@pytest.mark.slow
@pytest.mark.pair
@pytest.mark.any_launcher
def test_horovod_trains_on_shards_with_keras(ring, numbered):
    """Ranks have the same number of steps, each with an allreduce, so that no rank waits for another at the end."""
    data = shards(numbered, 32, columns={"x": ["x", "y"], "y": "y"}, dtype="float32")
    result = ring.run("""
        import horovod.tensorflow.keras as hvd
        import tensorflow as tf
        hvd.init()
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1e-9)), "mse")
        told = model.fit(data.as_tf("x", "y"), epochs=2, verbose=0)
        hvd.shutdown()
        data.epoch, model.optimizer.iterations.numpy()
    """, namespace={"data": data})  # fmt: skip
    assert {tuple(map(int, value)) for value in result.values} == {(3, 30)}


@pytest.mark.slow
@pytest.mark.pair
@pytest.mark.standalone("the shards are read on the executors")
@pytest.mark.versions("of PyTorch and pyarrow")
@pytest.mark.extended_on("spark", "the test of data that was made in the notebook reads on executors")
def test_torch_trains_on_shards(ring, numbered):
    """All ranks take part in the same number of collectives, which the cell itself calls."""
    data = shards(numbered, 32, columns={"x": ["x", "y"], "y": "y"}, dtype="float32")
    result = ring.run("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        steps = 0
        for x, y in data.as_torch("x", "y"):
            total = x.sum()
            dist.all_reduce(total)
            steps += 1
        dist.barrier()  # PyTorch 2.1 can hang in the next line while Gloo's thread still drops a tensor
        dist.destroy_process_group()
        steps, float(total)
    """, framework="torch", namespace={"data": data})  # fmt: skip
    assert result.values[0] == result.values[1]
    assert result.values[0][0] == 15


@pytest.mark.extended_on("spark", "a rank starts its worker processes by itself, whatever has started the rank")
@pytest.mark.slow
@pytest.mark.pair
def test_torchs_workers_read_on_ranks(ring, numbered):
    """A rank's worker processes read all rows of its shard, the rank reports them, and no process is left."""
    data = shards(numbered, 50, columns=["x"], shuffle=100, remainder="join")
    result = ring.run("""
        sorted(x for batch in data.as_torch("x", workers=2) for x in batch.tolist())
    """, namespace={"data": data})  # fmt: skip
    assert sorted(result.values[0] + result.values[1]) == list(range(1001))
    for rank in result.record.ranks:
        assert [(read.rows, read.done) for read in rank.readings[0].ended] == [(len(result.values[rank.rank]), True)]


def test_a_timeout_says_who_has_read_all_and_who_has_not(local, numbered, limit):
    """The message says which rank has read all its data, because the others may be waiting for that rank."""

    def seen(record):
        return any(map(reading.notes, reading.data_sets(record, time.time())))

    data = shards(numbered, 50)
    with pytest.raises(RunTimeout, match=r"Reading: rank 0 ended its epoch .* after 10 steps; rank 1 has not"):
        local.run("""
            import time
            batches = data.as_numpy()
            for step in range(10 if rank == 0 else 3): next(batches)
            while True:
                print("still here", flush=True)
                time.sleep(0.2)
        """, namespace={"data": data}, timeout_s=limit(local, seen))  # fmt: skip


@pytest.mark.any_launcher
def test_a_data_error_on_a_rank_is_one_sentence(ring, numbered):
    """The error names the path, and shows the line of the cell."""
    with pytest.raises(RunFailed, match=r"DataError: .*/nowhere .*not exist") as caught:
        ring.run("from sparkring import shards\nshards(path + '/nowhere')", namespace={"path": numbered})
    assert "cell line 3" in str(caught.value)


def test_what_is_wrong_for_so_many_ranks_is_told_before_they_start(numbered, local, tmp_path):
    """The launch is refused if there are too few rows, or if no tensor can hold a column that is read.

    It is also refused if a transform returns too few rows, but not if the transform raises an exception in the driver.
    """
    few = shards(numbered, 500)
    ragged = shards(numbered, 5, transform=lambda batch: {"x": batch["x"][:1]})

    def only_on_ranks(batch):
        if world().size == 1:
            raise RuntimeError("this is no rank")
        return batch

    later = shards(numbered, 50, transform=only_on_ranks)
    before = run_store.saved()
    with pytest.raises(DataError, match=r"With size=3, a rank has 333, .*not fill .*batch .* 500"):
        local.run("next(few.as_numpy())", n=3, namespace={"few": few})
    with pytest.raises(DataError, match="transform returned 1 rows of `x` for 16"):
        local.run("next(ragged.as_numpy())", namespace={"ragged": ragged})
    pq.write_table(pa.table({"x": range(100), "price": [decimal.Decimal("1.5")] * 100}), tmp_path / "priced.parquet")
    priced = shards(tmp_path / "priced.parquet", 5)
    for call in ("as_tf('x', 'price')", "as_torch()"):
        with pytest.raises(
            DataError, match=r"column `price` is decimal128\(2, 1\), which no tensor.*cast\(\"double\"\)"
        ):
            local.run(f"next(iter(priced.{call}))", namespace={"priced": priced})
    with pytest.raises(DataError, match="With size=3, a rank has 333"):
        sparkring.run(lambda data: next(data.as_numpy()), few, np=-3, framework="plain")
    assert run_store.saved() == before
    result = local.run("len(next(later.as_numpy('x')))", namespace={"later": later})
    assert result.values == [50, 50]


COLUMNS = """
    id, cast(id AS decimal(7, 2)) AS all_there, named_struct('v', vector, 'id', id) AS holder,
    vector, array(id, 1) AS list, IF(odd, NULL, cast(id AS decimal(7, 2))) AS price,
    IF(odd, NULL, date_add(date'2020-01-01', cast(id AS int))) AS day,
    IF(odd, NULL, timestamp'2020-01-01 10:00:00' + make_interval(0, 0, 0, 0, cast(id AS int))) AS at,
    IF(odd, NULL, struct(id AS a, struct(cast('x' AS binary) AS b, array(timestamp'2020-01-01 10:00:00') AS t) AS c))
    AS row,
    IF(odd, NULL, map(id, struct(id AS b))) AS map, IF(odd, NULL, array(struct(id AS a))) AS rows,
    map(timestamp'2020-01-01 10:00:00', cast(id AS decimal(5, 1))) AS times,
    IF(late, NULL, id) AS count, IF(late, NULL, cast(id AS tinyint)) AS small, IF(late, NULL, id % 2 = 0) AS yes,
    IF(late, NULL, concat('s', id)) AS s, IF(late, NULL, cast(id AS float)) AS real,
    cast(NULL AS int) AS no_int, cast(NULL AS boolean) AS no_bool, cast(NULL AS string) AS no_string,
    cast(NULL AS double) AS no_double, cast(NULL AS decimal(4, 1)) AS no_decimal, cast(NULL AS struct<a: int>) AS no_row
"""


def test_a_dataframes_columns_arrive_as_to_pandas_gives_them(tasks, spark, tmp_path):
    """Dtypes are equal in every batch of every rank and epoch, though only one of the two files has `late` rows.

    Some columns differ from toPandas(): vectors and lists are rows of an array, and times are datetime64 as stored.
    """
    from pyspark.ml.functions import array_to_vector

    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", "false")  # with Arrow, toPandas() gives rows as dicts
    try:
        frame = spark.range(0, 40, 1, 2).selectExpr(
            "id", "id % 3 = 0 AS odd", "id >= 30 AS late", "array(id, 0.5D) AS raw"
        )
        frame.withColumn("vector", array_to_vector("raw")).createOrReplaceTempView("mixed")
        frame = spark.sql(f"SELECT {COLUMNS} FROM mixed")
        data, expected = shards(frame, 7, cache=tmp_path / "cache", remainder="join"), frame.toPandas()
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
        spark.conf.unset("spark.sql.execution.arrow.pyspark.enabled")
        spark.catalog.dropTempView("mixed")
    result = tasks.run("""
        import numpy
        epochs = [list(data.as_numpy()) for _ in range(2)]
        kinds = {(name, str(array.dtype)) for epoch in epochs for batch in epoch for name, array in batch.items()}
        kinds, {name: numpy.concatenate([batch[name] for batch in epochs[1]]) for name in data.spec}
    """, namespace={"data": data})  # fmt: skip
    (kinds, first), (others, second) = result.values
    assert kinds == others
    assert len(kinds) == len(expected.columns) == len(first)
    found = {name: np.concatenate([first[name], second[name]]) for name in first}
    order = np.argsort(found["id"])
    for name in expected.columns:
        array, wanted = found[name][order], expected[name]
        if name in ("vector", "list"):
            np.testing.assert_array_equal(array, np.stack([np.asarray(value) for value in wanted]), name)
        elif name in ("day", "at"):
            assert array.dtype == {"day": "M8[D]", "at": "M8[us]"}[name]
            np.testing.assert_array_equal(array, wanted.to_numpy("M8[ns]"), name)
        else:
            if wanted.dtype == "str":  # pandas' own type for strings, since version 3, with NaN for nulls
                wanted = wanted.astype(object).where(wanted.notna(), None)
            assert (array.dtype, repr(array.tolist())) == (wanted.dtype, repr(wanted.tolist())), name
