"""Tables and views by their names, as Spark's catalogue has them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkring
from sparkring.data import tables
from sparkring.data.parts import items_of
from sparkring.data.preview import preview
from sparkring.errors import DataError, OptionsError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory. Copies of tables are in another folder."""
    monkeypatch.setenv("SPARKRING_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def sales(spark, tmp_path):
    """A table and a view of the same rows, in schemas of their own."""
    spark.sql(f"CREATE DATABASE by_name LOCATION '{tmp_path / 'warehouse'}'")
    rows = spark.range(6).selectExpr("id AS x", "cast(id % 2 AS int) AS store")
    rows.write.saveAsTable("by_name.sales")
    rows.createOrReplaceTempView("sales_seen")
    yield "by_name.sales"
    spark.catalog.dropTempView("sales_seen")
    spark.sql("DROP DATABASE by_name CASCADE")


def xs(data):
    return sorted(int(x) for batch in data.as_numpy("x") for x in batch)


def test_tables_and_views(spark, sales, folder):
    for name in (sales, "`by_name`.sales", "spark_catalog.by_name.sales", "sales_seen"):
        data = sparkring.shards(name, 2)
        assert (xs(data), data.dataset.name) == ([0, 1, 2, 3, 4, 5], name)
    assert [key for key, _ in items_of(sparkring.table(sales).groupBy("store"))] == [0, 1]
    scored = sparkring.predict("sales_seen", lambda batch: batch["x"] * 2.0, inputs=["x"])
    assert scored.columns == ["x", "store", "prediction"]
    assert preview("sales_seen", "sales_seen", 2).dataset.rows == 6
    with pytest.raises(DataError, match="for Delta tables"):
        sparkring.shards(sales, 2, version=3)


def test_a_path_is_preferred_to_a_table(sales, folder, capsys):
    pq.write_table(pa.table({"x": [7]}), folder / "sales_seen")
    assert xs(sparkring.shards("sales_seen", 1)) == [7]
    assert "sparkring.table('sales_seen')" in capsys.readouterr().err
    assert sparkring.table("sales_seen").count() == 6


def test_neither_a_path_nor_a_table(spark, sales, folder):
    """The error says where both were looked for."""
    (folder / "flights_t").mkdir()
    with pytest.raises(DataError, match=r"`flights`.*\./flights_t.*catalog\.schema\.table"):
        sparkring.shards("flights", 2)
    for call in (sparkring.shards, lambda name: sparkring.predict(name, len, inputs=["x"])):
        with pytest.raises(DataError, match=r"`by_name\.flights`.*catalog\.schema\.table"):
            call("by_name.flights")
    with pytest.raises(DataError, match=r"nothing\.flights"):
        sparkring.table("nothing.flights")
    with pytest.raises(OptionsError, match=r"flights: .*table"):
        preview("flights", "flights", 2)


def test_a_table_that_cannot_be_looked_up(folder, monkeypatch):
    """Without the permission, for example, it is not known whether the table exists."""
    monkeypatch.setattr(tables, "_session", object)
    monkeypatch.setattr(tables, "_described", lambda session, name: (None, "PERMISSION_DENIED"))
    with pytest.raises(DataError, match=r"look up `by_name\.secret`.*PERMISSION_DENIED"):
        sparkring.shards("by_name.secret", 2)


def test_without_a_session(folder, monkeypatch):
    monkeypatch.setattr(tables, "_session", lambda: None)
    with pytest.raises(DataError, match="no Spark session"):
        sparkring.shards("flights", 2)
    with pytest.raises(DataError, match="no Spark session"):
        sparkring.table("flights")


def test_a_delta_table_by_its_name(spark, sales, delta, folder, tmp_path):
    """Its files are read where they are, although this session has no package for Delta."""
    path = tmp_path / "delta"
    delta.write_deltalake(path, pa.table({"x": [1, 2, 3]}))
    delta.DeltaTable(path).delete("x = 2")
    spark.sql(f"CREATE TABLE by_name.changes (x bigint) USING parquet LOCATION '{path}'")
    catalog = spark._jsparkSession.sharedState().externalCatalog()
    described = catalog.getTable("by_name", "changes")
    fields = [described.productElement(number) for number in range(described.productArity())]
    fields[4] = spark._jvm.scala.Option.apply("delta")  # the provider
    catalog.dropTable("by_name", "changes", False, False)
    catalog.createTable(spark._jvm.org.apache.spark.sql.catalyst.catalog.CatalogTable(*fields), False)
    assert xs(sparkring.shards("by_name.changes", 1)) == [1, 3]
    older = sparkring.shards("by_name.changes", 1, version=0)
    assert (xs(older), older.dataset.name, older.dataset.table_version) == ([1, 2, 3], "by_name.changes", 0)
    written = sparkring.predict("by_name.changes", lambda batch: batch["x"] * 2.0, inputs=["x"], to="scored", np=-1)
    assert written.rows == 2
    with pytest.raises(DataError, match=r"by_name\.changes: "):
        sparkring.table("by_name.changes")
