"""Parts of a Spark DataFrame: partitions and groups, which become pandas DataFrames where they are unpickled."""

from __future__ import annotations

import datetime
import decimal
import pickle
import shutil
import warnings

import pandas as pd
import pytest
from pyspark.sql import functions
from pyspark.sql.pandas import types

from sparkring import partitions
from sparkring.capture.content import digest
from sparkring.data.parts import items_of
from sparkring.errors import DataError

# Columns of all kinds. Two of them have the same name, with a dot in it.
ROWS = """
    SELECT element_at(array('a/b', 'ä c', NULL), cast(id % 3 + 1 AS int)) AS store, id AS `a.b`, -id AS `a.b`,
           timestamp'2026-01-31 23:30:00.000600' + make_interval(0, 0, 0, cast(id AS int)) AS at,
           date'2026-01-01' + cast(id % 2 AS int) AS day, cast(id % 2 AS decimal(9, 2)) / 4 AS price,
           IF(id % 2 = 0, array(id, NULL), NULL) AS list, array(timestamp'2026-07-01 00:00:00') AS times,
           map('k', id) AS map, struct(id AS x, 'y' AS y) AS row, cast('ab' AS binary) AS bytes,
           IF(id % 4 = 0, NULL, id) AS whole, IF(id % 5 = 0, NULL, id % 2 = 0) AS yes, cast(id AS float) AS real
    FROM range(0, 12, 1, 3)
"""


if not hasattr(types, "_create_converter_to_pandas"):
    pytest.skip("Spark before 3.5 cannot convert columns as toPandas() does", allow_module_level=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder in which copies of DataFrames are kept."""
    monkeypatch.setenv("SPARKRING_CACHE", str(tmp_path))
    return tmp_path / "dataframes"


def to_pandas(frame):
    with warnings.catch_warnings():  # pyspark warns about this version of pandas
        warnings.simplefilter("ignore")
        return frame.toPandas()


def sent(part):
    """Return the part as an item gets it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pyspark 3 calls an old function of pandas
        return pickle.loads(pickle.dumps(part))


def assert_equal(found, expected):
    """Check that two DataFrames have equal values of equal types, in any order of rows."""
    found, expected = (
        frame.sort_values("real", ignore_index=True).map(lambda value: f"{type(value)} {value!r}")
        if len(frame)
        else frame
        for frame in (found, expected)
    )
    pd.testing.assert_frame_equal(found, expected)


def test_partitions(spark):
    """Partitions have the rows and values that toPandas() returns, and items can change them.

    Empty partitions still have the columns.
    """
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        frame = spark.sql(ROWS)
        found = partitions(frame.filter("`store` IS NOT NULL OR real < 6"))
        expected = to_pandas(frame.filter("`store` IS NOT NULL OR real < 6"))
        empty = partitions(frame.filter("real < 4"))
        assert [part.rows for part in empty] == [4, 0, 0]
        assert list(sent(empty[1]).columns) == list(frame.columns)
        assert_equal(sent(empty[0]), to_pandas(frame.filter("real < 4")))
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    assert [part.rows for part in found] == [4, 4, 2]
    assert repr(found) == "<3 partitions with 10 rows>"
    assert repr(found[1:][1]) == "2 rows"
    frames = sent(found)
    assert len(repr(frames)) > 100  # a rank can show them
    assert_equal(pd.concat(frames), expected)
    frames[0].iloc[0, 1] = 99
    assert frames[0].iloc[0, 1] == 99


def test_the_content_of_a_part_is_known_without_its_rows(spark, cache):
    """Equal DataFrames have equal parts, even if the copy is written again. Other partitions have other digests."""
    frame = spark.sql("SELECT * FROM VALUES (0, 0), (1, 1), (2, 2), (0, 3), (1, 4), (2, 5), (0, 6), (1, 7) AS _(k, x)")
    first = [digest(part) for part in partitions(frame.repartition(4, "k"))]
    shutil.rmtree(cache)
    assert [digest(part) for part in partitions(frame.repartition(4, "k"))] == first
    others = partitions(frame.repartition(4, "x"))
    assert sum(part.rows for part in others) == 8
    assert not {digest(part) for part in others} & set(first)
    groups = [digest(pair) for pair in items_of(frame.groupBy("k"))]
    assert len(set(groups)) == 3
    shutil.rmtree(cache)
    assert [digest(pair) for pair in items_of(frame.repartition(3).groupBy("k"))] == groups


def test_groups(spark):
    """The groups equal those of pandas, and keys have Python's types. Null is a key, too, and comes last."""
    frame = spark.sql(ROWS)
    expected = to_pandas(frame)
    by_store = items_of(frame.groupBy("store"))
    assert len(by_store) == 3
    assert [key for key, _ in by_store] == ["a/b", "ä c", None]
    for key, part in by_store:
        assert_equal(sent(part), expected[expected.store.isna() if key is None else expected.store == key])
    several = {key: sent(part).real.tolist() for key, part in items_of(frame.groupBy("STORE", frame.day, "price"))}
    days = [datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)]
    prices = [decimal.Decimal("0.000000"), decimal.Decimal("0.250000")]
    assert set(several) == {(store, *pair) for store in ("a/b", "ä c", None) for pair in zip(days, prices, strict=True)}
    assert sorted(number for numbers in several.values() for number in numbers) == list(range(12))
    assert [key for key, _ in items_of(frame.groupBy("at"))] == sorted(expected["at"])
    assert [key for key, _ in items_of(frame.groupBy("whole"))] == [1, 2, 3, 5, 6, 7, 9, 10, 11, None]
    assert list(items_of(frame.filter("real < 0").groupBy("store"))) == []


def test_groups_of_expressions(spark):
    """The items have the DataFrame's own columns. Expressions may be fields and Python functions."""
    frame = spark.sql(ROWS)
    odd = functions.udf(lambda number: number % 2 == 1, "boolean")(frame.row.x)
    pairs = items_of(frame.groupBy((frame.real % 3).alias("store"), "day", odd))
    expected = to_pandas(frame)
    days = [datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)]
    assert [key for key, _ in pairs] == [(real, day, day == days[1]) for real in (0.0, 1.0, 2.0) for day in days]
    for key, part in pairs:
        rows = sent(part)
        assert list(rows.columns) == list(expected.columns)
        assert sorted(rows.real) == expected.real[(expected.real % 3 == key[0]) & (expected.day == key[1])].tolist()
    assert [key for key, _ in items_of(frame.filter("real < 3").groupBy("row.x"))] == [0, 1, 2]


def test_groups_in_many_row_groups(spark, monkeypatch):
    """All rows of a group are found, even if they are in several row groups and files."""
    monkeypatch.setattr("sparkring.data.parts._GROUP_BYTES", 20_000)
    spark.conf.set("spark.sql.files.maxRecordsPerFile", "7000")
    try:
        groups = items_of(spark.range(0, 30_000, 1, 2).selectExpr("id % 7 AS k", "rand(3) AS x", "id").groupBy("k"))
        sizes = {key: sent(part) for key, part in groups}
    finally:
        spark.conf.unset("spark.sql.files.maxRecordsPerFile")
    for key, frame in sizes.items():
        assert sorted(frame["id"]) == list(range(key, 30_000, 7))


def test_what_has_no_items(spark):
    """Anything that cannot be divided into items is refused, and the error gives the reason."""
    frame = spark.sql(ROWS)
    stream = spark.readStream.format("rate").load()
    for found, reason in (
        (frame, r"a Spark DataFrame has no items: use df\.groupBy"),
        (frame.rollup("store"), r"the groups of rollup\(\)"),
        (frame.cube("store"), r"the groups of cube\(\)"),
        (frame.groupBy("store").pivot("day"), r"the groups of pivot\(\)"),
        (frame.groupBy(), "makes one group of all rows"),
        (frame.groupBy("row"), r"groups by `row`, which is struct<"),
        (frame.groupBy(functions.rand()), r"groups by an expression whose values are random"),
        (frame.groupBy("list"), r"groups by `list`, which is array<bigint>"),
        (stream.groupBy("value"), "the DataFrame is a stream"),
    ):
        with pytest.raises(DataError, match=reason):
            items_of(found)
    with pytest.raises(DataError, match=r"DataFrame .*stream"):
        partitions(stream)
    with pytest.raises(DataError, match=r"a `list`, not .*Spark DataFrame"):
        partitions([1])


def test_removed_files(spark, cache):
    """If the copy is removed before an item reads its rows, the error says so."""
    (part,) = partitions(spark.range(0, 4, 1, 1))
    shutil.rmtree(cache)
    with pytest.raises(DataError, match=r"removed since .*run began"):
        part.to_pandas()
