"""Petastorm in a cell: Petastorm itself, and the functions of the same names in sparkring.data.petastorm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from leaks import Watch
from pyarrow import parquet
from rings import Ring, WarmRing, shared
from texts import mentions
from waiting import DEADLINE_S

from sparkring.data.petastorm import (
    SparkDatasetConverter,
    TransformSpec,
    check_transform,
    make_batch_reader,
    make_reader,
    make_spark_converter,
    row_group_shard,
)
from sparkring.data.petastorm.plan import plan_reader
from sparkring.errors import DataError, OptionsError, PathError, RunFailed

ROWS = (100, 90, 10)  # the rows of three files, in row groups of at most 40
GROUPS = (40, 40, 20, 40, 40, 10, 10)


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """A folder of three Parquet files, which Petastorm divides into 110 and 90 rows."""
    return write(tmp_path / "uneven", ROWS)


def write(folder: Path, rows: tuple[int, ...], row_group_size: int = 40) -> Path:
    """Write files with these numbers of rows. `x` counts the rows of all files."""
    folder.mkdir()
    first = 0
    for number, count in enumerate(rows):
        x = np.arange(first, first + count)
        table = pa.table({"x": x, "y": x.astype("float32") / 2, "v": pa.array([[float(i), 1.0] for i in x])})
        parquet.write_table(table, folder / f"part-{number}.parquet", row_group_size=row_group_size)
        first += count
    return folder


@pytest.fixture(scope="module")
def materialized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The folder of `things`, and its schema once it is written."""
    return {"folder": tmp_path_factory.mktemp("materialized") / "things"}


@pytest.fixture
def things(spark: Any, materialized: dict[str, Any]) -> dict[str, Any]:
    """A Petastorm data set of 12 rows in 4 row groups, written with Spark as Petastorm documents it."""
    if "schema" not in materialized:
        from petastorm.codecs import CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
        from petastorm.etl.dataset_metadata import materialize_dataset
        from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
        from pyspark.sql.types import IntegerType, StringType

        schema = Unischema("Things", [
            UnischemaField("id", np.int32, (), ScalarCodec(IntegerType()), False),
            UnischemaField("name", np.str_, (), ScalarCodec(StringType()), False),
            UnischemaField("image", np.uint8, (4, 3), NdarrayCodec(), False),
            UnischemaField("window", np.float32, (None, 2), CompressedNdarrayCodec(), False),
        ])  # fmt: skip

        def row(number: int) -> Any:
            image = np.full((4, 3), number, np.uint8)
            window = np.full((number + 1, 2), number, np.float32)
            return dict_to_spark_row(schema, {"id": number, "name": f"n{number}", "image": image, "window": window})

        url = f"file://{materialized['folder']}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing in sparkring hides Petastorm's warnings here
            with materialize_dataset(spark, url, schema):
                rows = spark.sparkContext.parallelize(range(12), 4).map(row)
                spark.createDataFrame(rows, schema.as_spark_schema()).write.parquet(url)
        materialized.update(schema=schema, url=url)
    return materialized


@pytest.fixture
def pair_of_tasks(tasks: Ring, watch: Watch, lasting_gangs: None) -> WarmRing:
    """Two ranks in Spark's tasks. They are warm, because importing TensorFlow and PyTorch takes seconds."""
    return shared(tasks.where, watch, 2)


# ── Petastorm itself ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_shards_are_what_petastorm_gives(pair, uneven):
    """row_group_shard predicts the rows of each rank, for every number of shards that Petastorm accepts."""
    cell = """
        from petastorm import make_batch_reader
        found = []
        for count in range(1, 8):
            rows = 0
            for shard in range(rank, count, size):
                with make_batch_reader(url, cur_shard=shard, shard_count=count) as reader:
                    found.append((count, shard, sum(len(batch.x) for batch in reader)))
        found
    """
    pair.notebook["url"] = f"file://{uneven}"
    result = pair.cell(cell)
    told = {(count, shard): rows for values in result.values for count, shard, rows in values}
    for count in range(1, 8):
        assert [told[count, shard] for shard in range(count)] == row_group_shard(GROUPS, count)
    assert row_group_shard(GROUPS, 2) == [110, 90]


def test_batch_reader_as_it_is(pair, uneven):
    """make_batch_reader works with TensorFlow, PyTorch and worker processes, and prints nothing to stderr."""
    pair.notebook["url"] = f"file://{uneven}"
    result = pair.cell("""
        import numpy as np
        from petastorm import TransformSpec, make_batch_reader
        from petastorm.pytorch import BatchedDataLoader, DataLoader
        from petastorm.tf_utils import make_petastorm_dataset

        mine = {"cur_shard": rank, "shard_count": size}

        def halve(rows):
            rows["half"] = rows.x.astype("float32") / 2
            return rows[["half", "x"]]

        spec = TransformSpec(halve, edit_fields=[("half", np.float32, (), False)], selected_fields=["half", "x"])
        with make_batch_reader(url, transform_spec=spec, **mine) as reader:
            under_tf = sorted(int(x) for rows in make_petastorm_dataset(reader) for x in rows.x)
        with DataLoader(make_batch_reader(url, transform_spec=spec, **mine), batch_size=16) as loader:
            under_torch = [batch["half"] for batch in loader]
        with BatchedDataLoader(make_batch_reader(url, reader_pool_type="process", workers_count=1, **mine)) as loader:
            in_a_process = sum(len(batch["v"]) for batch in loader)
        under_tf, float(sum(half.sum() for half in under_torch)), in_a_process
    """)
    assert sorted(x for found, _, _ in result.values for x in found) == list(range(200))
    assert sum(halves for _, halves, _ in result.values) == sum(range(200)) / 2
    assert [rows for _, _, rows in result.values] == [110, 90]
    assert [line for line in pair.view.record.recent if line.stream == "stderr"] == []


@pytest.mark.extended("library", "test_batch_reader_as_it_is and test_transforms_of_rows")
def test_reader_as_it_is(pair_of_tasks, things):
    """make_reader works in Spark's tasks, with the notebook's Unischema and codecs, and a TransformSpec on rows."""
    pair_of_tasks.notebook["things"] = things
    result = pair_of_tasks.cell("""
        import numpy as np
        from petastorm import TransformSpec, make_reader
        from petastorm.pytorch import DataLoader
        from petastorm.tf_utils import make_petastorm_dataset

        def scale(row):
            row["image"] = row["image"].astype(np.float32) / 11
            del row["window"], row["name"]
            return row

        spec = TransformSpec(scale, [("image", np.float32, (4, 3), False)], removed_fields=["window", "name"])
        mine = {"cur_shard": rank, "shard_count": size}
        with make_reader(things["url"], schema_fields=[things["schema"].id, "na.*", "window"], **mine) as reader:
            rows = sorted((int(row.id), str(row.name), row.window.shape) for row in reader)
        with make_reader(things["url"], transform_spec=spec, **mine) as reader:
            images = [row.image.shape for row in make_petastorm_dataset(reader)]
        with DataLoader(make_reader(things["url"], transform_spec=spec, **mine), batch_size=4) as loader:
            most = max(float(batch["image"].max()) for batch in loader)
        rows, images, most
    """)
    rows = sorted(row for found, _, _ in result.values for row in found)
    assert rows == [(number, f"n{number}", (number + 1, 2)) for number in range(12)]
    assert all(image.as_list() == [4, 3] for _, images, _ in result.values for image in images)
    assert max(most for _, _, most in result.values) == 1.0
    assert [line for line in pair_of_tasks.view.record.recent if line.stream == "stderr"] == []


@pytest.mark.extended("library", "test_batch_reader_as_it_is, and test_steps_and_rows_of_a_converter")
def test_converter_as_it_is(spark, pair_of_tasks, tmp_path):
    """Petastorm's own converter can be made in the notebook, and used in a cell under Horovod."""
    from petastorm.spark import SparkDatasetConverter as Real
    from petastorm.spark import make_spark_converter as real

    spark.conf.set(Real.PARENT_CACHE_DIR_URL_CONF, f"file://{tmp_path}/cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converter = real(spark.range(64).repartition(4))
    pair_of_tasks.notebook["converter"] = converter
    result = pair_of_tasks.cell("""
        mine = {"cur_shard": rank, "shard_count": size, "num_epochs": 1}
        with converter.make_tf_dataset(batch_size=8, **mine) as dataset:
            under_tf = [int(x) for batch in dataset for x in batch.id]
        with converter.make_torch_dataloader(batch_size=8, **mine) as loader:
            under_torch = [int(x) for batch in loader for x in batch["id"]]
        under_tf, under_torch
    """, framework="horovod")  # fmt: skip
    for found in zip(*result.values, strict=True):
        assert sorted(x for each in found for x in each) == list(range(64))
    assert os.path.isdir(converter.cache_dir_url.removeprefix("file://")), "a rank has removed the files"
    assert [line for line in pair_of_tasks.view.record.recent if line.stream == "stderr"] == []
    converter.delete()


# ── Shards by default ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_reads_its_shard(local, uneven):
    """Without cur_shard, each rank reads its own rows. A given cur_shard takes precedence."""
    result = local.run("""
        from sparkring.data.petastorm import make_batch_reader
        def read(**options):
            with make_batch_reader(folder, **options) as reader:
                return sorted(int(x) for batch in reader for x in batch.x)
        read(), read(cur_shard=1, shard_count=3), read(seed=7, shuffle_row_groups=False)
    """, namespace={"folder": str(uneven)})  # fmt: skip
    mine, given, seeded = zip(*result.values, strict=True)
    assert sorted(mine[0] + mine[1]) == list(range(200))
    assert [len(each) for each in mine] == row_group_shard(GROUPS, 2)
    assert given[0] == given[1]
    assert len(given[0]) == row_group_shard(GROUPS, 3)[1]
    assert seeded == mine
    assert [line for line in local.view.record.recent if line.stream == "stderr"] == []


def test_the_notebook_reads_everything(uneven):
    """In the notebook, all rows are read unless cur_shard is given. Positional arguments are as in Petastorm."""
    with make_batch_reader(uneven, ["x"]) as reader:
        assert sum(len(batch.x) for batch in reader) == 200
        assert reader.schema.fields.keys() == {"x"}
    with make_batch_reader(str(uneven), cur_shard=1, shard_count=2) as reader:
        assert sum(len(batch.x) for batch in reader) == 90


@pytest.mark.parametrize("form", ["dbfs:/{}", "/dbfs/{}", "file:/dbfs/{}", "file://{root}/{}", "{root}/{}"])
def test_paths_as_users_type_them(uneven, monkeypatch, form):
    """DBFS paths in every form, URLs, bare paths and lists of files all work."""
    monkeypatch.setenv("SPARKRING_DBFS_ROOT", str(uneven.parent))
    path = form.format(uneven.name, root=uneven.parent)
    with make_batch_reader(path) as reader:
        assert sum(len(batch.x) for batch in reader) == 200
    with make_batch_reader([f"{path}/part-1.parquet", f"{path}/part-2.parquet"]) as reader:
        assert sum(len(batch.x) for batch in reader) == 100


def test_uneven_steps_are_told(local, uneven):
    """One rank warns once, with both numbers. No rank warns if all have equal steps, or if reading never ends."""
    local.run("""
        from sparkring.data.petastorm import make_batch_reader
        for options in ({"batch_size": 16}, {"batch_size": 200}, {"batch_size": 16, "num_epochs": None}, {}):
            reader = make_batch_reader(folder, **options)
            reader.stop()
            reader.join()
    """, namespace={"folder": str(uneven)})  # fmt: skip
    lines = [line for line in local.view.record.recent if line.stream == "stderr"]
    assert [line.rank for line in lines if "Warning" in line.text] == [0], lines
    assert mentions(lines[0].text, "<cell>:4: UserWarning", str(uneven), "rank 0", "7 steps of 16 rows", "rank 1", "6")


@pytest.mark.forked("torch")
def test_ranks_that_all_read_all_rows_are_told(local, uneven):
    """Petastorm's own reader without a shard is named at its first batch, unless an earlier reader had a shard."""
    cell = """
        import petastorm
        def read(**shard):
            with petastorm.make_batch_reader(folder, **shard) as reader:
                return sum(len(batch.x) for batch in reader)
        [read(**shard) for shard in shards]
    """
    part, everything = {"cur_shard": 1, "shard_count": 2}, {"cur_shard": 0, "shard_count": 1}
    for shards, rows, notices in (([{}, {}], [200, 200], 1), ([part, {}], [90, 200], 0), ([everything], [200], 0)):
        result = local.run(cell, namespace={"folder": f"file://{uneven}", "shards": shards}, framework="plain")
        assert result.values == [rows, rows]
        lines = [line for line in local.view.record.recent if mentions(line.text, "all rows", "cur_shard=")]
        assert [line.rank for line in lines] == [0] * notices
        assert all(mentions(line.text, f"{uneven}:", "2 ranks", "all rows") for line in lines)
        (reading, *_) = result.record.ranks[1].readings
        assert (reading.opened.kind, reading.opened.rows, reading.ended[0].rows) == ("petastorm", 200, rows[0])


@pytest.mark.forked("torch")
def test_transforms_under_petastorms_own_name(local, uneven):
    """A TransformSpec is checked before a worker starts, as with the functions of sparkring.data.petastorm."""
    cell = """
        import numpy as np
        from petastorm import TransformSpec, make_batch_reader
        def pairs(rows):
            rows["pair"] = rows.y.map(lambda y: np.zeros(3, np.float32))
            return rows[["x", "pair"]]
        spec = TransformSpec(pairs, [("pair", np.float32, (2,), False)], selected_fields=["x", "pair"])
        make_batch_reader(folder, transform_spec=spec, cur_shard=rank, shard_count=size)
    """
    with pytest.raises(RunFailed, match=r"DataError: .*transform.* 'pair' .*float32 .*\(3,\)"):
        local.run(cell, namespace={"folder": f"file://{uneven}"}, framework="plain")


def test_compressed_images():
    """The extra has what Petastorm's codec of images needs."""
    pytest.importorskip("cv2", reason="this environment was made before the extra had OpenCV")
    from petastorm.codecs import CompressedImageCodec
    from petastorm.unischema import UnischemaField

    field = UnischemaField("image", np.uint8, (4, 3, 3), CompressedImageCodec("png"), False)
    image = np.arange(36, dtype=np.uint8).reshape(4, 3, 3)
    assert (field.codec.decode(field, field.codec.encode(field, image)) == image).all()


@pytest.mark.extended("library", "test_ranks_that_all_read_all_rows_are_told")
def test_a_converter_under_petastorms_own_name(pair, spark, tmp_path):
    """The converter of petastorm.spark reads all rows on each rank. A notice says so, instead of a logging error."""
    from petastorm.spark import SparkDatasetConverter as Real
    from petastorm.spark import make_spark_converter as real

    spark.conf.set(Real.PARENT_CACHE_DIR_URL_CONF, f"file://{tmp_path}")
    converter = real(spark.range(64).repartition(4))
    try:
        pair.notebook["converter"] = converter
        result = pair.cell("""
            with converter.make_torch_dataloader(batch_size=8, num_epochs=1) as loader:
                rows = sum(len(batch["id"]) for batch in loader)
            rows
        """)
    finally:
        converter.delete()
    assert result.values == [64, 64]
    lines = [line.text for line in result.record.recent]
    assert len([line for line in lines if mentions(line, "2 ranks", "all rows", "cur_shard=")]) == 1
    assert not any("Logging error" in line or "hvd_rank" in line for line in lines)


def test_a_warning_shows_the_users_line(uneven, monkeypatch):
    """On Spark, sparkring is imported from a zip file, and its code has other file names than its modules."""
    monkeypatch.setattr("sparkring.data.petastorm.plan.__file__", "/tmp/sparkring.zip/sparkring/data/petastorm/plan.py")
    with pytest.warns(UserWarning, match="rank 0 gets 7 steps") as told:
        plan_reader("make_batch_reader", (uneven,), {"cur_shard": 0, "shard_count": 2}, 16)
    assert __file__ in [each.filename for each in told]


def test_too_few_row_groups(local, tmp_path):
    """With more ranks than row groups, the error gives both numbers and says what to do, before a worker starts."""
    folder = write(tmp_path / "few", (30,))
    with pytest.raises(RunFailed) as caught:
        local.run("from sparkring.data.petastorm import make_batch_reader\nmake_batch_reader(folder)",
                  namespace={"folder": str(folder)})  # fmt: skip
    assert mentions(str(caught.value), "DataError", str(folder), "1 row group", "1 file", "2 ranks")
    with pytest.raises(DataError, match=r"parquet_row_group_size_bytes=\d+\), or use sparkring.shards"):
        make_batch_reader(folder, cur_shard=0, shard_count=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cur_shard": 0}, "cur_shard and shard_count must be given together"),
        ({"cur_shard": 2, "shard_count": 2}, "cur_shard=2 is out of range for shard_count=2"),
        ({"cur_shard": 0.5, "shard_count": 2}, "cur_shard=0.5 and shard_count=2 must be whole numbers"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": "8"}, "batch_size is '8'"),
    ],
)
def test_arguments_that_cannot_be(uneven, options, said):
    """The error names the arguments, and no reader is made."""
    with pytest.raises(OptionsError, match=said):
        make_batch_reader(uneven, **options)


# ── Reports ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_record_knows_what_was_read(pair, uneven):
    """The record has the data set, columns, epochs, rows and steps, and the row group that was read last."""
    pair.notebook["folder"] = str(uneven)
    result = pair.cell("""
        from sparkring.data.petastorm import make_batch_reader
        with make_batch_reader(folder, ["x", "y"], num_epochs=3, workers_count=1, shuffle_row_groups=False) as reader:
            for batch in reader:
                pass
    """)
    for rank, rows, groups in ((0, 110, 4), (1, 90, 3)):
        (reading,) = result.record.ranks[rank].readings
        opened = reading.opened
        assert (opened.name, opened.kind, set(opened.columns)) == (str(uneven), "petastorm", {"x", "y"})
        assert (opened.files, opened.row_groups, opened.rows, opened.where) == (3, 7, 200, "")
        found = [(read.epoch, read.rows, read.rows_planned, read.steps, read.steps_planned) for read in reading.ended]
        assert found == [(epoch, rows, rows, groups, groups) for epoch in (1, 2, 3)]
        assert all(read.size_bytes == rows * 12 and read.done for read in reading.ended)
    pieces = [(0, 0, 40), (0, 1, 40), (0, 2, 20), (1, 0, 40), (1, 1, 40), (1, 2, 10), (2, 0, 10)]
    for rank in (0, 1):
        plan = result.record.ranks[rank].readings[0].plan
        assert ([piece[:3] for piece in plan.pieces], plan.epoch, plan.window) == (pieces[rank::2], 3, 0)
        assert dict(plan.names) == {file: f"part-{file}.parquet" for file, _, _ in pieces[rank::2]}
    places = [result.record.ranks[rank].readings[0].ended[0].place for rank in (0, 1)]
    assert places == ["part-2.parquet, row group 1 of 1", "part-1.parquet, row group 3 of 3"]
    versions = {rank.readings[0].opened.version for rank in result.record.ranks}
    assert len(versions) == 1


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({"workers_count": 1}, True),
        ({"workers_count": 2}, False),
        ({"reader_pool_type": "dummy"}, True),
        ({"workers_count": 1, "shuffle_row_groups": True}, False),
        ({"workers_count": 1, "seed": 0}, True),
        ({"workers_count": 1, "seed": 0, "cur_shard": 0, "shard_count": 1}, False),
    ],
)
def test_when_the_order_of_row_groups_is_known(tmp_path, options, known):
    """Several workers do not return row groups in order, and none is returned for a row group without rows."""
    folder = write(tmp_path / "data", (40, 0, 40))
    plan = plan_reader("make_batch_reader", (folder,), {"shuffle_row_groups": False, **options}, None)
    assert (plan.in_order, plan.groups) == (known, [0, 2])


def test_steps_and_rows_of_a_converter(pair, uneven):
    """With a batch size, steps are batches. In endless reading, an epoch ends after as many rows as the shard has."""
    pair.notebook["converter"] = SparkDatasetConverter(
        f"file://{uneven}", tuple(f"file://{path}" for path in sorted(uneven.iterdir())), 200
    )
    result = pair.cell("""
        with converter.make_tf_dataset(batch_size=20) as dataset:
            for number, batch in zip(range(12), dataset):
                pass
        with converter.make_torch_dataloader(batch_size=20, num_epochs=1) as loader:
            batches = len(list(loader))
        batches
    """)
    assert result.values == [6, 5]
    for rank, rows, steps in ((0, 110, 6), (1, 90, 5)):
        endless, once = result.record.ranks[rank].readings
        assert endless.opened.batch_size == 20
        assert {(read.rows, read.steps, read.steps_planned) for read in endless.ended} == {(rows, steps, steps)}
        assert [read.epoch for read in endless.ended] == list(range(1, len(endless.ended) + 1))
        assert len(endless.ended) >= 2
        assert [(read.rows, read.steps) for read in once.ended] == [(rows, steps)]


@pytest.mark.extended("library", "test_batch_reader_as_it_is and test_transforms_of_rows")
def test_rows_of_a_petastorm_data_set(pair_of_tasks, things):
    """make_reader returns single rows. If the batch size is known, batches are counted as steps."""
    pair_of_tasks.notebook["url"] = things["url"]
    result = pair_of_tasks.cell("""
        from sparkring.data.petastorm import make_reader
        with make_reader(url, batch_size=4, num_epochs=2) as reader:
            sorted(int(row.id) for row in reader)
    """)
    for rank in result.record.ranks:
        (reading,) = rank.readings
        found = [(read.epoch, read.rows, read.rows_planned, read.steps, read.steps_planned) for read in reading.ended]
        assert found == [(1, 6, 6, 2, 2), (2, 6, 6, 2, 2)]
        assert [piece.rows for piece in reading.plan.pieces] == [3, 3]
        assert reading.plan.window == 6, "the order of the rows is not known"


@pytest.mark.extended("library", "test_batch_reader_as_it_is")
def test_windows_of_rows(pair_of_tasks, things):
    """An NGram is read as Petastorm would read it. The number of windows is not known in advance."""
    pair_of_tasks.notebook["url"] = things["url"]
    result = pair_of_tasks.cell("""
        from petastorm.ngram import NGram
        from sparkring.data.petastorm import make_reader
        pairs = NGram({0: ["id"], 1: ["id", "name"]}, delta_threshold=1, timestamp_field="id")
        with make_reader(url, schema_fields=pairs) as reader:
            found = sorted((int(window[0].id), int(window[1].id)) for window in reader)
        found
    """)
    within = [(number, number + 1) for number in range(12) if number % 3 < 2]  # no window goes beyond its row group
    assert sorted(pair for pairs in result.values for pair in pairs) == within
    for rank in result.record.ranks:
        (reading,) = rank.readings
        assert set(reading.opened.columns) == {"id", "name"}
        assert [(read.rows, read.rows_planned) for read in reading.ended] == [(4, None)]


def test_a_filter_leaves_rows_unplanned(pair, uneven):
    """With a predicate, the number of rows is not known in advance. The rows that were read are reported."""
    pair.notebook["folder"] = str(uneven)
    result = pair.cell("""
        from petastorm.predicates import in_lambda
        from sparkring.data.petastorm import make_batch_reader
        below = in_lambda(["x"], lambda x: x < 50)
        with make_batch_reader(folder, predicate=below) as reader:
            found = sum(len(batch.x) for batch in reader)
        found
    """)
    assert sum(result.values) == 50
    for rank, found in zip(result.record.ranks, result.values, strict=True):
        (reading,) = rank.readings
        assert reading.opened.where == "in_lambda"
        assert [(read.rows, read.rows_planned, read.done) for read in reading.ended] == [(found, None, True)]
        assert reading.plan is None, "the row groups to be read are not known either"


# ── The converter ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.extended("library", "test_batch_reader_as_it_is and test_transforms_of_rows")
def test_a_converter_travels(spark, pair_of_tasks, tmp_path, monkeypatch):
    """A converter made in the notebook works in Spark's tasks. delete() in the notebook removes its files."""
    from pyspark.ml.linalg import Vectors

    monkeypatch.setenv("SPARKRING_DBFS_ROOT", str(tmp_path))
    rows = [(number, float(number), Vectors.dense([number, 1.0])) for number in range(40)]
    frame = spark.createDataFrame(rows, ["id", "y", "features"]).repartition(4)
    converter = make_spark_converter(frame, parent_cache_dir_url="dbfs:/cache", compression_codec="gzip")
    folder = converter.cache_dir_url.removeprefix("file://")
    assert len(converter) == 40
    assert folder.startswith(f"{tmp_path}/cache/")
    assert spark.conf.get(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF) == f"file://{tmp_path}/cache"
    pair_of_tasks.notebook["converter"] = converter
    result = pair_of_tasks.cell("""
        with converter.make_tf_dataset(batch_size=8, num_epochs=1) as dataset:
            specs = dataset.element_spec._asdict().items()
            spec = {name: (each.dtype.name, each.shape.as_list()) for name, each in specs}
            batches = [(batch.id.numpy(), batch.features.numpy()) for batch in dataset]
        with converter.make_torch_dataloader(batch_size=8, num_epochs=1) as loader:
            under_torch = [int(number) for batch in loader for number in batch["id"]]
        spec, batches, under_torch
    """)
    assert result.values[0][0] == {
        "id": ("int64", [None]),
        "y": ("float32", [None]),
        "features": ("float32", [None, None]),
    }
    ids = [number for _, batches, _ in result.values for numbers, _ in batches for number in numbers]
    assert sorted(ids) == sorted(number for _, _, found in result.values for number in found) == list(range(40))
    assert all((features == [[number, 1.0] for number in numbers]).all()
               for _, batches, _ in result.values for numbers, features in batches)  # fmt: skip
    assert os.path.isdir(folder)
    with pytest.raises(RunFailed, match=r"OptionsError: delete\(\) .*rank .*remove files"):
        pair_of_tasks.cell("converter.delete()")
    assert os.path.isdir(folder)
    converter.delete()
    assert not os.path.exists(folder)
    with pytest.raises(DataError, match="nothing exists at"), converter.make_tf_dataset():
        pass


def test_options_of_a_converter(spark, tmp_path, capfd):
    """dtype, codec and row group size work as in Petastorm, and nothing is printed about them."""
    frame = spark.range(10_000).selectExpr("id", "cast(id as double) as y").coalesce(1)
    with Deleted(frame, parent_cache_dir_url=tmp_path) as converter:
        (path,) = converter.file_urls
        plain = parquet.ParquetFile(path.removeprefix("file://"))
        assert str(plain.schema_arrow.field("y").type) == "float"
    with Deleted(frame, parquet_row_group_size_bytes=20_000, compression_codec="snappy", dtype="float64") as converter:
        (path,) = converter.file_urls
        small = parquet.ParquetFile(path.removeprefix("file://"))
        assert str(small.schema_arrow.field("y").type) == "double"
        assert small.metadata.num_row_groups > plain.metadata.num_row_groups
        assert small.metadata.row_group(0).column(0).compression == "SNAPPY"
    assert capfd.readouterr().err == ""


class Deleted:
    """A converter that is deleted at the end of a `with` block."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.converter = make_spark_converter(*arguments, **options)

    def __enter__(self) -> SparkDatasetConverter:
        return self.converter

    def __exit__(self, *_: object) -> None:
        self.converter.delete()


def test_a_converter_without_a_folder(spark):
    """The error says what to write: a parent folder that Spark and Petastorm can use, and a Spark DataFrame."""
    spark.conf.unset(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF)
    with pytest.raises(OptionsError, match="parent_cache_dir_url='dbfs:/tmp/petastorm'"):
        make_spark_converter(spark.range(3))
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, "dbfs://tmp/x")
    with pytest.raises(PathError, match="Write dbfs:/tmp/x"):
        make_spark_converter(spark.range(3))
    with pytest.raises(PathError, match=r"Write dbfs:/tmp/x"):
        make_spark_converter(spark.range(3), parent_cache_dir_url="dbfs://tmp/x")
    with pytest.raises(PathError, match=r"/tmp/.*b: .*Petastorm .*' '"):
        make_spark_converter(spark.range(3), parent_cache_dir_url="/tmp/a b")
    with pytest.raises(DataError, match=r"takes .*Spark DataFrame, not .* `list`"):
        make_spark_converter([3], parent_cache_dir_url="/tmp/x")


@pytest.mark.extended("repetition", "test_stop_and_a_killed_kernel of test_materialise.py")
def test_what_a_killed_kernel_leaves(driver, tmp_path):
    """The next kernel removes the folder of a killed kernel, and no other folder. Neither kernel prints warnings."""
    script = """
        import sys
        from sparkring.data.petastorm import make_spark_converter
        frame = spark("local[1]").range(100).repartition(2)
        converter = make_spark_converter(frame, parent_cache_dir_url="{parent}")
        print("made", converter.cache_dir_url, flush=True)
        with converter.make_torch_dataloader(num_epochs=1) as loader:
            print("read", sum(len(batch["id"]) for batch in loader), flush=True)
        {then}
    """
    parent = tmp_path / "cache"
    first = driver(script.format(parent=parent, then="time.sleep(600)"))
    first.until_said("^read 100$")
    killed = Path(re.search(r"^made file://(.+)$", first.text, re.MULTILINE)[1])
    stranger = parent / "20200101000000-appid-local-1-of-somebody-else"
    stranger.mkdir()
    first.process.kill()
    first.wait()
    assert killed.is_dir()
    second = driver(script.format(parent=parent, then=""))
    of_spark = re.compile(r"\d\d/\d\d/\d\d |Setting |To adjust")
    said = [line for line in second.wait().splitlines() if not of_spark.match(line)]
    assert [line.split()[0] for line in said] == ["made", "read"]
    assert os.listdir(parent) == [stranger.name]


# ── Data that cannot be read ──────────────────────────────────────────────────────────────────────────────────────────


def broken(folder: Path) -> str:
    write(folder, (10, 10))
    (folder / "part-1.parquet").write_bytes(b"PAR1 and then nothing")
    return f"{folder}/part-1.parquet cannot be read as Parquet"


def hollow(folder: Path) -> str:
    write(folder, (0, 0))
    return f"{folder} has no rows: 2 files, all empty"


def bare(folder: Path) -> str:
    folder.mkdir()
    return f"{folder} has no Parquet files"


def missing(folder: Path) -> str:
    return f"{folder}: nothing exists at {folder}"


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
@pytest.mark.parametrize("spoil", [broken, hollow, bare, missing])
def test_data_that_cannot_be_read(tmp_path, spoil, make):
    """Before a worker starts, a one-sentence error names the file or folder."""
    said = spoil(tmp_path / "data")
    threads = set(threading.enumerate())
    with pytest.raises(DataError, match=re.escape(said)):
        make(tmp_path / "data")
    assert set(threading.enumerate()) == threads


def test_shards_without_rows(tmp_path):
    """An endless reader would look for a row forever."""
    folder = write(tmp_path / "data", (40, 0, 40, 10))
    with pytest.raises(DataError, match=r"shard 1 of 4 .*row groups"):
        make_batch_reader(folder, cur_shard=0, shard_count=4)
    with pytest.raises(DataError, match=r"no Parquet files .*pass filters=\[\('x', '=', 1\)\]"):
        make_batch_reader(Path(shutil.move(folder, tmp_path / "x=0")).parent, filters=[("x", "=", 1)])


def test_paths_that_cannot_be(uneven):
    """Paths that cannot be used, data that Petastorm has not written, and an unknown column are errors."""
    with pytest.raises(DataError, match=r"list .*paths .*empty"):
        make_batch_reader([])
    with pytest.raises(PathError, match=r"Write dbfs:/data/x"):
        make_batch_reader("dbfs://data/x")
    with pytest.raises(PathError, match=r"Petastorm ignores .*part .*path after .* \? or #"):
        make_batch_reader("/data/what?")
    with pytest.raises(DataError, match=r"not written .*Petastorm.s materialize_dataset.*make_batch_reader"):
        make_reader(uneven)
    with pytest.raises(DataError, match=r"no column\b.* x, y, v\b"):
        make_batch_reader(uneven, schema_fields=["z"])


# ── Transforms ────────────────────────────────────────────────────────────────────────────────────────────────────────

Y_AS_PAIR = ("pair", np.float32, (2,), False)
Y_AS_TABLE = ("pair", np.float32, (2, 3), False)


def pairs(of: Any) -> Any:
    """Return a transform that adds the column `pair`, which is of(y)."""

    def transform(rows: Any) -> Any:
        rows["pair"] = [of(y) for y in rows.y]
        return rows[["x", "pair"]]

    return transform


def fails(rows: Any) -> Any:
    return rows.assign(z=1 / 0)


WRONG = [
    (TransformSpec(pairs(lambda y: np.zeros(3, np.float32)), [Y_AS_PAIR], selected_fields=["x", "pair"]),
     r"field 'pair' is float32 of shape \(3,\).*declares float32 of shape \(2,\)"),
    (TransformSpec(pairs(lambda y: np.zeros(2)), [Y_AS_PAIR], selected_fields=["x", "pair"]),
     r"field 'pair' is float64 of shape \(2,\).*declares float32 of shape \(2,\)"),
    (TransformSpec(pairs(lambda y: np.zeros((3, 2), np.float32).T), [Y_AS_TABLE], selected_fields=["x", "pair"]),
     r"field 'pair' are not in row-major order.*np\.ascontiguousarray"),
    (TransformSpec(pairs(lambda y: np.zeros((2, 3), np.float32)), [("pair", np.float32, (None, 3), False)],
                   selected_fields=["x", "pair"]),
     r"declares float32 of shape \(None, 3\) for field 'pair'.*the same shape in all rows"),
    (TransformSpec(pairs(lambda y: None), [Y_AS_PAIR], selected_fields=["x", "pair"]),
     r"field 'pair' is None; expected float32 of shape \(2,\), not nullable"),
    (TransformSpec(pairs(lambda y: y), [("pair", np.int64, (), False)], selected_fields=["x", "pair"]),
     r"field 'pair' is float64.*declares int64"),
    (TransformSpec(pairs(lambda y: y), [("pair", np.float32, (), False)], selected_fields=["x"]),
     r"the field 'pair', which its TransformSpec does not declare"),
    (TransformSpec(pairs(lambda y: y), [("other", np.float32, (), False)], removed_fields=["y", "v"]),
     r"did not return the field 'other'.*Got: x, pair"),
    (TransformSpec(None, selected_fields=["x", "yy"]), r"selected_fields names 'yy'.*Columns: v, x, y"),
    (TransformSpec(lambda rows: None), r"the transform returned NoneType\. With make_batch_reader"),
    (TransformSpec(fails), r"failed on the first rows: ZeroDivisionError: division by zero \(in fails, line \d+\)"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "said"), WRONG)
def test_transforms_that_do_not_keep_their_word(uneven, spec, said):
    """The error gives the field, its declaration, and the returned value. Readers check this before workers start."""
    with pytest.raises(DataError, match=said):
        check_transform(spec, uneven)
    threads = set(threading.enumerate())
    with pytest.raises(DataError, match=said):
        make_batch_reader(uneven, transform_spec=spec)
    converter = SparkDatasetConverter(f"file://{uneven}", (f"file://{uneven}/part-0.parquet",), 100)
    with pytest.raises(DataError, match=said), converter.make_torch_dataloader(transform_spec=spec):
        pass
    assert set(threading.enumerate()) == threads


def test_transforms_that_keep_their_word(uneven):
    """A reader returns the declared fields. A transform may drop rows."""
    spec = TransformSpec(pairs(lambda y: np.array([y, 1], np.float32)), [Y_AS_PAIR], selected_fields=["pair", "x"])
    check_transform(spec, uneven)
    with make_batch_reader(uneven, transform_spec=spec) as reader:
        batch = next(reader)
    assert batch._fields == ("pair", "x")
    assert batch.pair.shape == (len(batch.x), 2)
    check_transform(TransformSpec(removed_fields=["v"]), uneven, schema_fields=["x", "v"])
    check_transform(TransformSpec(lambda rows: rows[rows.x > 3]), uneven)


def test_partitions(tmp_path):
    """Columns from folder names are read as in Petastorm, and a transform gets them even when it is checked."""
    rows = pa.table({"kind": ["a", "a", "b"], "x": [1, 2, 3]})
    parquet.write_to_dataset(rows, str(tmp_path / "data"), partition_cols=["kind"])
    seen = []

    def label(rows: Any) -> Any:
        seen.append(sorted(rows.kind.astype(str)))
        return rows.assign(label=rows.kind.astype(str) + "!")[["x", "label"]]

    spec = TransformSpec(label, [("label", np.str_, (), False)], selected_fields=["x", "label"])
    check_transform(spec, tmp_path / "data")
    assert seen == [["a", "a"]]
    with make_batch_reader(tmp_path / "data", transform_spec=spec) as reader:
        assert sorted(label for batch in reader for label in batch.label) == ["a!", "a!", "b!"]
    with make_batch_reader(tmp_path / "data", filters=[("kind", "=", "b")]) as reader:
        assert [batch.x.tolist() for batch in reader] == [[3]]


def test_a_change_that_is_not_declared(uneven):
    """TensorFlow would truncate integers that become fractions, so this is an error there and in check_transform()."""
    spec = TransformSpec(lambda rows: rows.assign(x=rows.x / 255))
    said = r"changes field 'x' from int64 to float64, which its TransformSpec does not declare"
    with pytest.raises(DataError, match=said):
        check_transform(spec, uneven)
    converter = SparkDatasetConverter(f"file://{uneven}", (f"file://{uneven}/part-0.parquet",), 100)
    with pytest.raises(DataError, match=said), converter.make_tf_dataset(transform_spec=spec):
        pass
    with make_batch_reader(uneven, transform_spec=spec) as reader:
        assert next(reader).x.dtype == np.float64


def test_transforms_of_rows(things):
    """With make_reader, the function gets one decoded row as a dict."""
    got = []

    def look(row: Any) -> Any:
        got.append({name: np.shape(value) for name, value in row.items()})
        return {"id": row["id"], "image": row["image"][:2]}

    edited = [("image", np.uint8, (2, 3), False)]
    check_transform(TransformSpec(look, edited, selected_fields=["id", "image"]), things["url"])
    assert got == [{"id": (), "name": (), "image": (4, 3), "window": (1, 2)}]
    with make_reader(things["url"], transform_spec=TransformSpec(look, edited, ["name", "window"])) as reader:
        assert next(reader).image.shape == (2, 3)
    with pytest.raises(DataError, match=r"field 'image' is uint8 of shape \(2, 3\).*declares uint8 of shape \(3, 2\)"):
        make_reader(things["url"], transform_spec=TransformSpec(look, [("image", np.uint8, (3, 2), False)],
                                                                selected_fields=["id", "image"]))  # fmt: skip


# ── Workers that die ──────────────────────────────────────────────────────────────────────────────────────────────────

DEATHS = {
    "sys.exit() in a thread": ("""
        def leave(rows):
            if threading.current_thread() is not threading.main_thread():
                sys.exit(3)
            return rows
        reader = make_batch_reader(folder, transform_spec=TransformSpec(leave), workers_count=2)
        list(reader)
    """, r"DataError: .*: \d of the 2 workers of Petastorm's reader ended without a result \(a thread;"),
    "a killed process": ("""
        reader = make_batch_reader(folder, reader_pool_type="process", workers_count=2, num_epochs=None)
        next(reader)
        os.kill(reader._workers_pool._workers[0].pid, signal.SIGKILL)
        for batch in reader:
            pass
    """, r"DataError: .*: 1 of the 2 workers of Petastorm's reader ended without a result \(a process, killed by sig"),
    "sys.exit() in a thread, under TensorFlow": ("""
        from petastorm.tf_utils import make_petastorm_dataset
        def leave(rows):
            if threading.current_thread() is not threading.main_thread():
                sys.exit(3)
            return rows
        for rows in make_petastorm_dataset(make_batch_reader(folder, transform_spec=TransformSpec(leave))):
            pass
    """, r"DataError: .* workers of Petastorm's reader ended without a result \(a thread;"),
    "an error, and then another try": ("""
        def fail(rows):
            if threading.current_thread() is not threading.main_thread():
                raise KeyError("later")
            return rows
        reader = make_batch_reader(folder, transform_spec=TransformSpec(fail))
        try:
            next(reader)
        except KeyError:
            while True:
                next(reader)
    """, r"DataError: the reader has already failed: KeyError: 'later'"),
}  # fmt: skip


@pytest.mark.parametrize(
    "death",
    [
        "a killed process",
        *(
            pytest.param(death, marks=pytest.mark.extended("repetition", "a killed process"))
            for death in DEATHS
            if death != "a killed process"
        ),
    ],
)
def test_workers_that_die(local, uneven, death):
    """Petastorm's own reader would wait forever, but ours raises an error."""
    cell, said = DEATHS[death]
    imports = """
        import os, signal, sys, threading
        from sparkring.data.petastorm import TransformSpec, make_batch_reader
    """
    with pytest.raises(RunFailed, match=said):
        local.run(imports + cell, n=1, namespace={"folder": str(uneven)})


def test_the_notebooks_process_is_quiet_too(uneven):
    """After %load_ext, Petastorm itself prints no warnings about deprecated functions."""
    code = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "sparkring")
from petastorm import make_batch_reader
with make_batch_reader("file://{uneven}", num_epochs=1) as reader:
    print(sum(len(batch.x) for batch in reader))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert (done.stdout, done.stderr) == ("200\n", "")
