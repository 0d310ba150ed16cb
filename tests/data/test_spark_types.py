"""Columns of each type that Spark has: as arrays of shards() and predict(), as pandas DataFrames, and as keys."""

from __future__ import annotations

import datetime
import decimal
import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql.pandas import types

import sparkring
from sparkring import partitions, shards
from sparkring.data.parts import items_of
from sparkring.errors import DataError

if not hasattr(types, "_create_converter_to_pandas"):
    pytest.skip("Spark before 3.5 cannot convert columns as toPandas() does", allow_module_level=True)

DATE, TIME, DAY = datetime.date, datetime.datetime, datetime.timedelta(days=1)
# The expression of a value, and what arrays hold, as in array.tolist(). If toPandas() returns another value, or raises
# an error, the third part is what a pandas DataFrame holds. Rows and maps cannot be inputs of a model.
KINDS = {
    "boolean": ("true", True),
    "tinyint": ("1Y", 1),
    "bigint": ("9007199254740993", 9007199254740993),
    "float": ("cast(0.5 AS float)", 0.5),
    "decimal": ("cast(1.25 AS decimal(38, 2))", decimal.Decimal("1.25")),
    "string": ("'ä'", "ä"),
    "char": ("cast('a' AS char(3))", "a"),
    "binary": ("cast('ab' AS binary)", b"ab"),
    "date": ("date'2026-01-31'", DATE(2026, 1, 31)),
    "first date": ("date'0001-01-01'", DATE(1, 1, 1)),
    "Julian date": ("date'1582-10-04'", DATE(1582, 10, 4)),
    "last date": ("date'9999-12-31'", DATE(9999, 12, 31)),
    "timestamp": ("timestamp'2026-01-31 23:30:00'", TIME(2026, 1, 31, 23, 30)),
    "timestamp_ntz": ("timestamp_ntz'1700-01-31 23:30:00'", TIME(1700, 1, 31, 23, 30)),
    "interval": ("interval '1 02:03:04.5' day to second", 93_784_500_000),
    "void": ("NULL", None),
    "array": ("array(1, 2)", [1, 2]),
    "array of dates": ("array(date'1500-02-28', date'0001-01-01')", [DATE(1500, 2, 28), DATE(1, 1, 1)]),
    "array of ancient times": ("array(timestamp_ntz'0001-01-01 12:00:00')", [TIME(1, 1, 1, 12)]),
    "array of arrays": ("array(array(1), array(2))", [[1], [2]]),
    "array of text and null": ("array('a', NULL)", ["a", None]),
    "array of void": ("array(NULL)", [None]),
    "dense vector": ("dense", [1.0, 2.0]),
    "sparse vector": ("sparse", [0.0, 3.0, 0.0]),
    "array of vectors": ("array(dense, dense)", [[1.0, 2.0], [1.0, 2.0]]),
    "array of intervals": ("array(interval '-1' hour)", [-3_600_000_000]),
    "row": ("named_struct('day', date'0001-01-01', 'void', NULL)", (DATE(1, 1, 1), None)),
    "map": ("map(date'1500-01-01', NULL)", {DATE(1500, 1, 1): None}),
}
NESTED = ("row", "map")  # these types cannot be inputs of a model
NO_KEYS = ("array", "row", "map", "dense", "sparse", "interval")  # groups cannot have such keys, or they differ
KEYS = [name for name in KINDS if not name.startswith(NO_KEYS)]


@pytest.fixture(autouse=True)
def utc(spark):
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield
    spark.conf.unset("spark.sql.session.timeZone")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKRING_CACHE", str(tmp_path))


def frame_of(spark, kinds, nulls=False):
    """Return two rows with a column of each kind. With `nulls`, the first row has a null in each."""
    vectors = [("dense", Vectors.dense(1, 2)), ("sparse", Vectors.sparse(3, {1: 3.0}))]
    rows = spark.range(0, 2, 1, 1)
    for name, vector in vectors:
        rows = rows.withColumn(name, F.udf(lambda vector=vector: vector, VectorUDT())())
    made = [F.expr(f"IF(id = 0 AND {nulls}, NULL, {sql})").alias(name) for name, sql in kinds.items()]
    return rows.select("id", *made)


def in_pandas(frame):
    with warnings.catch_warnings():  # pyspark warns about this version of pandas
        warnings.simplefilter("ignore")
        return frame.toPandas() if hasattr(frame, "toPandas") else pickle.loads(pickle.dumps(frame))


def shown(batch):
    """Return the values of each row of a batch as text. As a model, this is a function that returns text."""
    arrays = {name: [repr(value) for value in array.tolist()] for name, array in batch.items()}
    return [repr(dict(zip(arrays, row, strict=True))) for row in zip(*arrays.values(), strict=True)]


def test_values_of_each_type(spark):
    """Values are those that toPandas() returns, also before 1582-10-15, in nested types, and with nulls beside them.

    Vectors and arrays become arrays. predict() gets the same arrays as shards(). Keys are Python values.
    """
    frame = frame_of(spark, {name: sql for name, (sql, _) in KINDS.items()})
    (batch,) = shards(frame, 2, shuffle=False).as_numpy()
    for name, (_, expected) in KINDS.items():
        assert [tuple(value) if name == "row" else value for value in batch[name].tolist()] == [expected] * 2, name
    (part,) = partitions(frame)
    ancient = "array of ancient times"  # toPandas() cannot convert their time zone
    assert repr(in_pandas(part).drop(columns=ancient).to_dict()) == repr(in_pandas(frame.drop(ancient)).to_dict())
    inputs = [name for name in KINDS if name not in NESTED]
    scored = sparkring.predict(frame, shown, inputs=inputs, returns="string", idle_s=0.3).select("prediction").collect()
    assert [row.prediction for row in scored] == shown({name: batch[name] for name in inputs})
    ((key, rows),) = items_of(frame.groupBy(*KEYS))
    assert (list(key), rows.rows) == ([KINDS[name][1] for name in KEYS], 2)
    nulls = frame_of(spark, {name: sql for name, (sql, _) in KINDS.items()}, nulls=True)
    columns = {name: name for name in KINDS if name not in inputs or name in KEYS}
    first = next(shards(nulls, 2, columns=columns, shuffle=False).as_numpy())
    assert all(pd.isna(array.tolist()[0]) for array in first.values())
    for at, values in enumerate(in_pandas(partitions(nulls)[0]).drop(columns="id").itertuples(index=False)):
        assert [bool(value is None or value != value) for value in values] == [
            not at or name == "void" for name in KINDS
        ]


UNUSABLE = {
    "year": ("interval '1' year", "column `v` is interval year, which Arrow cannot represent"),
    "calendar": ("make_interval(1)", "column `v` of the DataFrame is interval, which pyspark cannot represent"),
    "far": ("date_add(date'9999-12-31', 1)", "column `v` has values that pandas cannot represent"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_values_that_pandas_cannot_hold(spark, kind):
    """The error names the column and is raised by partitions(), or where the rows are read. Others can be read."""
    sql, told = UNUSABLE[kind]
    frame = frame_of(spark, {"v": sql})
    with pytest.raises(DataError, match=told):
        in_pandas(partitions(frame)[0])
    with pytest.raises(DataError, match=told):
        [in_pandas(part) for _, part in items_of(frame.groupBy("v"))]
    if kind != "calendar":  # pyspark does not even know the types of such a DataFrame
        assert next(shards(frame, 2, columns=["id"], shuffle=False).as_numpy("id")).tolist() == [0, 1]
    if kind == "far":
        _cannot_be_sent(frame)


def _cannot_be_sent(frame):
    with pytest.raises(Exception, match=r"cannot represent dates .*times .* `v`"):
        sparkring.predict(frame, shown, inputs=["v"], returns="string", idle_s=0.3).collect()


@pytest.mark.parametrize(
    "sql", ["timestamp_ntz'0001-01-01 12:00:00'", "timestamp'2300-01-01 00:00:00'", "interval '200000' day"]
)
def test_values_beyond_nanoseconds(spark, sql):
    """In pandas DataFrames and keys, they are in microseconds, although toPandas() itself raises an error."""
    frame = frame_of(spark, {"v": sql}, nulls=True)
    value = frame.collect()[1].v
    (part,) = partitions(frame)
    assert in_pandas(part)["v"].tolist() == [pd.NaT, value]
    assert in_pandas(part)["v"].dtype.str[1:] in ("M8[us]", "m8[us]")
    (key, rows), (null, _) = items_of(frame.groupBy("v"))
    assert (key, null, in_pandas(rows)["v"].tolist()) == (value, None, [value])
    _cannot_be_sent(frame.dropna())


def test_names_that_differ_only_in_case(spark):
    """They are different columns if Spark distinguishes them. Otherwise, the error shows both."""
    frame = spark.range(0, 2, 1, 1).selectExpr("id AS k", "id + 1 AS K")
    for use in (lambda: shards(frame, 2), lambda: sparkring.predict(frame, shown, inputs=["k"])):
        with pytest.raises(DataError, match=r"columns called [`']k[`'] and [`']K[`']"):
            use()
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        (batch,) = shards(frame, 2, shuffle=False).as_numpy()
        scored = sparkring.predict(frame, shown, inputs=["k", "K"], idle_s=0.3).select("prediction").collect()
        assert [row.prediction for row in scored] == shown(batch) == ["{'k': '0', 'K': '1'}", "{'k': '1', 'K': '2'}"]
        names = frame.selectExpr("k", "named_struct('a', k, 'A', K) AS parts")
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    rows = items_of(names.groupBy("k"))[1][1]
    assert [tuple(row) for row in in_pandas(rows)["parts"]] == [(1, 2)]


@pytest.mark.parametrize(
    "sql",
    [
        "dense",
        pytest.param("sparse", marks=pytest.mark.extended("repetition", "dense; test_columns.py has both")),
        pytest.param(
            "IF(id = 0, array(1, NULL), array(1, 2))",
            marks=pytest.mark.extended("repetition", "dense; test_columns.py has nulls in lists"),
        ),
        pytest.param(
            "cast(1 AS int)",
            marks=pytest.mark.extended("repetition", "dense; test_columns.py has integers"),
        ),
    ],
)
def test_nulls_that_arrays_cannot_hold(spark, sql):
    """A null does not affect other columns. With fill=, where= and on_error="null", the other rows can be used."""
    frame = frame_of(spark, {"v": sql}, nulls="NULL" not in sql)
    assert next(shards(frame, 2, columns=["id"], shuffle=False).as_numpy("id")).tolist() == [0, 1]
    whole = "int" in sql
    if not whole:  # with nulls, a column of integers becomes one of floats
        with pytest.raises(
            DataError, match=r"`v` (has nulls.*fill={'v': \[…\]}|.*lists .*contain nulls.*fill={'v': 0})"
        ):
            next(shards(frame, 2, shuffle=False).as_numpy("v"))
    with pytest.raises(DataError, match=r"column `v` .*nulls.*fill={'v': "):
        sparkring.predict(frame, shown, inputs=["v"])
    value = {"dense": [7.0, 7.0], "sparse": [7.0, 7.0, 7.0]}.get(sql, 7)
    (filled,) = shards(frame, 2, fill={"v": value}, shuffle=False).as_numpy("v")
    assert filled[0].tolist() == ([1, 7] if "NULL" in sql else value)
    options = {"inputs": ["v"], "idle_s": 0.3}
    scored = sparkring.predict(frame, shown, fill={"v": value}, **options).select("prediction").collect()
    assert [row.prediction for row in scored] == shown({"v": filled})
    scored = sparkring.predict(frame, shown, on_error="null", **options).select("prediction").collect()
    assert [row.prediction for row in scored] == [None, *shown({"v": filled})[1:]]
    if "NULL" not in sql:
        (rest,) = shards(frame, 1, where="v is not None", shuffle=False).as_numpy("v")
        assert np.array_equal(rest, filled[1:])
