"""A DataFrame is written once. The copy is used again for the same rows, and never for other rows."""

from __future__ import annotations

import json
import os
import signal
import socket
import textwrap
import time

import numpy as np
import psutil
import pytest
from pyarrow import parquet
from texts import mentions

from sparkring import shards
from sparkring.data.frames import version_of
from sparkring.data.materialise import COMMIT, OWNER, USED, clean, materialise
from sparkring.errors import DataError
from sparkring.runtime.storage import locate


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def files(spark, tmp_path):
    """A function that makes a new DataFrame of the same Parquet files."""
    folder = str(tmp_path / "some rows")
    spark.range(0, 1_000, 1, 4).withColumnRenamed("id", "x").write.parquet(folder)
    return lambda: spark.read.parquet(folder)


def kept(cache):
    """Return the copies in a cache, complete or not."""
    return sorted(path for path in cache.glob("*/*"))


def rows_of(copy):
    return parquet.read_table(copy.location.path).to_pylist()


# ── The same rows, or others ──────────────────────────────────────────────────────────────────────────────────────────


def test_written_once(files, cache):
    """The copy is used again, even if the DataFrame is built again, and it has Spark's rows."""
    told = []
    build = lambda: files().filter("x >= 10").selectExpr("x", "cast(x AS float) AS y")  # noqa: E731
    first = materialise(build(), cache=cache, name="df", say=told.append)
    second = materialise(build(), cache=cache, name="df", say=told.append)
    assert (first.reused, second.reused, second.location.path) == (False, True, first.location.path)
    assert first.rows == 990
    assert sorted(row["x"] for row in rows_of(first)) == list(range(10, 1_000))
    assert any(line.startswith(f"writing `df` to {cache} once") for line in told)
    assert told[-1].startswith(f"reused {first.location.written}, written ")
    assert first.version.startswith("plan-")  # no row was read to compute it


def test_another_question_is_another_copy(files, cache):
    """Anything that changes the files, such as a filter or the size of row groups, makes another copy."""
    copies = [
        materialise(files(), cache=cache),
        materialise(files().filter("x > 3"), cache=cache),
        materialise(files().filter("x > 4"), cache=cache),
        materialise(files(), cache=cache, row_group_bytes=1_000),
    ]
    assert len({copy.location.path for copy in copies}) == 4


def test_changed_files(spark, files, cache, tmp_path):
    """A file that is overwritten counts as different data, even if it has as many rows."""
    source = tmp_path / "one.parquet"
    parquet.write_table(parquet.read_table(tmp_path / "some rows"), source)
    frame = spark.read.parquet(str(source))
    before = materialise(frame, cache=cache)
    source.unlink()
    table = parquet.read_table(tmp_path / "some rows")
    parquet.write_table(table.set_column(0, "x", [table["x"].to_numpy() + 1]), source)
    after = materialise(spark.read.parquet(str(source)), cache=cache)
    assert not after.reused
    assert sum(row["x"] for row in rows_of(after)) == sum(row["x"] for row in rows_of(before)) + 1_000
    assert version_of(frame) == after.version  # the earlier DataFrame has the new version, too


def test_many_columns_and_long_lists(spark, files):
    """Differences count even in parts of a plan that Spark leaves out of the plan's text."""
    from pyspark.sql import functions

    wide = lambda last: files().selectExpr(*(f"x + {last if i == 99 else i} AS c{i}" for i in range(100)))  # noqa: E731
    assert version_of(wide(1)) == version_of(wide(1)) != version_of(wide(2))
    assert version_of(wide(1)).startswith("plan-")  # the plan is enough for arithmetic
    listed = lambda last: files().filter(functions.col("x").isin(*range(200), last))  # noqa: E731
    assert version_of(listed(500)) == version_of(listed(500)) != version_of(listed(501))


def test_how_files_are_read(spark, tmp_path):
    """A CSV file that is read with another separator or null value counts as other data."""
    (tmp_path / "table.csv").write_text("1;2,3\n4;5,6\n")
    read = lambda **options: version_of(spark.read.csv(str(tmp_path / "table.csv"), "a string", **options))  # noqa: E731
    assert read(sep=",") == read(sep=",")
    assert len({read(sep=","), read(sep=";"), read(sep=",", nullValue="1;2")}) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("(1, NULL)", "(NULL, 1)"),
        ("(1, 2), (3, 4)", "(1, 2), (3, 5)"),
        ("(1, 2)", "(1, 2), (1, 2)"),
        ("(array(1, 2), array(3))", "(array(1), array(2, 3))"),
        ("(array(1, NULL), 0)", "(array(NULL, 1), 0)"),
        ("(map('a', 1), 0)", "(map('a', 2), 0)"),
        ("(named_struct('a', 1, 'b', NULL), 0)", "(named_struct('a', NULL, 'b', 1), 0)"),
        ("('a', 'bc')", "('ab', 'c')"),
        ("(array(array(1), array(2)), 0)", "(array(array(1, 2)), 0)"),
    ],
)
def test_rows_of_the_notebook(spark, one, other):
    """DataFrames with equal plans are distinguished by their rows, whatever the order of the rows."""
    versions = [version_of(spark.sql(f"SELECT * FROM VALUES {rows} AS t(a, b)")) for rows in (one, one, other)]
    assert versions[0] == versions[1] != versions[2]
    assert versions[0].startswith("rows-")


def test_order_of_rows(spark):
    """The notebook's rows count as the same rows in any order."""
    rows = [(i, f"row {i}") for i in range(50)]
    versions = {version_of(spark.createDataFrame(some, "a int, b string")) for some in (rows, rows[::-1])}
    assert len(versions) == 1


def test_functions_of_the_notebook(spark, files, cache):
    """If a Python function has the same name but another default value, another copy is made."""
    from pyspark.sql import functions

    copies = []
    for step in (1, 1, 2):

        def shift(x, step=step):
            return x + step

        copies.append(materialise(files().select(functions.udf(shift, "long")("x").alias("y")), cache=cache))
    assert [copy.reused for copy in copies] == [False, True, False]


def test_what_a_plan_does_not_tell(spark, files):
    """If the plan has the current date or a subquery, or the DataFrame is cached, the version depends on the rows."""
    cached = files().filter("x > 7").cache()
    try:
        untold = (cached, files().selectExpr("current_date()"), files().filter("x > (SELECT 3)"))
        assert all(version_of(frame).startswith("rows-") for frame in untold)
    finally:
        cached.unpersist(blocking=True)


@pytest.mark.extended(
    "repetition", "test_stop_and_a_killed_kernel uses a copy of another kernel; test_rows_of_the_notebook"
)
def test_a_later_kernel(spark, driver, cache, tmp_path):
    """Another process with its own Spark session finds the first one's copies, by plan and by rows.

    Once the session has ended, its DataFrames are refused in one sentence.
    """
    spark.range(100).write.parquet(str(tmp_path / "in"))
    build = f"""
        both = (session.read.parquet({str(tmp_path / "in")!r}).selectExpr("id", "id % 3 AS m"),
                session.createDataFrame([(1, "a")], "n int, s string"))
        reused = [materialise(frame, cache={str(cache)!r}).reused for frame in both]
    """
    first = {"session": spark, "materialise": materialise}
    exec(textwrap.dedent(build), first)
    assert first["reused"] == [False, False]
    text = driver(f"""
        from sparkring.data.materialise import materialise
        session = spark("local[2]")
        {build}
        session.stop()
        try:
            materialise(both[0], cache={str(cache)!r})
        except Exception as error:
            print(reused, type(error).__name__, error)
    """).wait()
    assert mentions(text, "[True, True] DataError", "SparkSession", "stopped")


# ── What is written ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_vectors_become_arrays(spark, cache):
    """MLlib's dense and sparse vectors become lists of doubles in the files. Odd names are kept."""
    from pyspark.ml.linalg import Vectors

    rows = [(0, Vectors.dense([1.0, 2.0])), (1, Vectors.sparse(2, [1], [3.0]))]
    copy = materialise(spark.createDataFrame(rows, ["id", "a.`v"]), cache=cache)
    assert sorted((row["id"], row["a.`v"]) for row in rows_of(copy)) == [(0, [1.0, 2.0]), (1, [0.0, 3.0])]


def test_values_are_those_of_to_pandas(spark, cache):
    """Times are in the session's time zone, so another zone makes another copy. Nulls and structs are kept."""
    frame = spark.sql("SELECT id, timestamp'2020-01-01 10:00:00' AS at, IF(id < 30, id, NULL) AS x, struct(id) AS r "
                      "FROM range(40)")  # fmt: skip
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    try:
        copy, times = materialise(frame, cache=cache), frame.toPandas()["at"]
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    assert version_of(frame) != copy.version
    data = shards(copy.location.written, 40, columns=["at"], shuffle=False)
    assert (next(data.as_numpy("at")) == times.to_numpy()).all()
    found = next(shards(frame, 40, cache=cache, columns=["x", "r"], shuffle=False).as_numpy())
    assert (found["x"].dtype, int(np.isnan(found["x"]).sum()), type(found["r"][0]).__name__) == (float, 10, "Row")
    shards(copy.location.written, 8, columns=["x"], fill={"x": 0}).__sparkring_validate__(2)


def test_row_groups(spark, cache):
    """Row groups are about as large as requested."""
    copy = materialise(
        spark.range(0, 200_000, 1, 1).selectExpr("id", "rand(7) AS r"), cache=cache, row_group_bytes=400_000
    )
    (file,) = copy.location.fs.glob(f"{copy.location.path}/*.parquet")
    assert 4 <= parquet.read_metadata(file).num_row_groups <= 16


def test_the_commit_file_tells_all(files, cache):
    """The commit names every file with its rows and bytes, and is written last."""
    copy = materialise(files(), cache=cache)
    folder = cache.joinpath(*copy.location.path.split("/")[-2:])
    told = json.loads((folder / COMMIT).read_text())
    assert {file["name"]: file["size_bytes"] for file in told["files"]} == {
        path.name: path.stat().st_size for path in folder.glob("*.parquet")
    }
    assert told["rows"] == sum(file["rows"] for file in told["files"]) == 1_000
    assert (folder / COMMIT).stat().st_mtime_ns == max(path.stat().st_mtime_ns for path in folder.iterdir())


# ── Damage, and what killed kernels leave ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("damage", ["cut", "gone", "no commit", "half a commit"])
def test_a_damaged_copy(files, cache, damage):
    """A damaged copy is not used, and another one is made."""
    first = materialise(files(), cache=cache)
    (folder,) = kept(cache)
    part, commit = sorted(folder.glob("part-*"))[1], folder / COMMIT
    if damage == "cut":
        os.truncate(part, part.stat().st_size - 1)
    elif damage == "gone":
        part.unlink()
    elif damage == "no commit":
        commit.unlink()
    else:
        commit.write_bytes(commit.read_bytes()[:-3])
    second = materialise(files(), cache=cache)
    assert not second.reused
    assert second.location.path != first.location.path
    assert materialise(files(), cache=cache).location.path == second.location.path


SLOW = """
    from sparkring.data.materialise import materialise

    def wait(batches):
        import time
        for batch in batches:
            yield batch
            time.sleep(600)

    session = spark("local[2]")
    frame = session.range(0, 4, 1, 2)
    materialise(frame, cache={cache!r})
    import sparkring.data.materialise as module
    module.version_of = lambda frame: "rows-0"  # computing the version from the rows would wait, too
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ipykernel's handler, not pyspark's
    while True:
        print("writing", flush=True)
        try:
            materialise(session.range(0, 8, 1, 4).mapInArrow(wait, "id long"), cache={cache!r})
        except KeyboardInterrupt as error:
            print(error)
            print("left:", len(os.listdir({cache!r})), flush=True)
"""


def test_stop_and_a_killed_kernel(spark, driver, files, cache, wait_until):
    """Stop ends Spark's job and leaves nothing half-written. A copy that was written before is used by other kernels.

    The next write removes an incomplete copy if its kernel has been killed, but not while its kernel is running.
    """

    def unfinished():
        return [path for path in kept(cache) if not (path / COMMIT).exists()]

    process = driver(SLOW.format(cache=str(cache)))
    process.until_said("^writing")
    wait_until(lambda: list(cache.glob("*/*/_temporary/**/part-*")), "Spark writes")
    (stopped,) = unfinished()
    process.process.send_signal(signal.SIGINT)
    process.until_said("^left: 1$")  # the copy that was written before
    assert mentions(process.text, "interrupted", "incomplete files", "removed")
    assert not stopped.exists()
    process.until_said("(?s)^left: 1$.*^writing")
    wait_until(lambda: list(cache.glob("*/*/_temporary/**/part-*")), "Spark writes again")
    (half,) = unfinished()
    assert str(half) not in clean(locate(cache))
    assert half.exists()
    process.process.kill()
    process.process.wait()
    wait_until(lambda: not process.family(), "its JVM has ended")
    told = []
    materialise(files(), cache=cache, say=told.append)
    assert not half.exists()
    assert materialise(spark.range(0, 4, 1, 2), cache=cache).reused
    assert any(mentions(line, "removed 1", "unfinished") for line in told)


def test_another_hosts_beginnings(files, cache):
    """An incomplete copy of another machine is left alone for a day."""
    materialise(files(), cache=cache)
    (folder,) = kept(cache)
    (folder / COMMIT).unlink()
    owner = json.loads((folder / OWNER).read_text())
    (folder / OWNER).write_text(json.dumps({**owner, "host": "elsewhere", "pid": 1}))
    assert clean(locate(cache)) == []
    assert folder.exists()
    (folder / OWNER).write_text(json.dumps({**owner, "host": "elsewhere", "created": time.time() - 90_000}))
    assert clean(locate(cache)) == [str(folder)]
    assert not folder.exists()
    assert owner["host"] == socket.gethostname()
    assert owner["pid"] == os.getpid()


def test_clean(files, cache):
    """Copies that have not been used for a month are removed. Other copies and files stay."""
    old, young = (materialise(files().filter(f"x > {n}"), cache=cache).location.path for n in (1, 2))
    (cache / "mine").mkdir()
    (cache / "mine" / "precious.parquet").write_text("x")
    month = 31 * 24 * 3600
    with open(f"{old}/{USED}", "w") as file:
        file.write(str(time.time() - month))
    commit = json.loads(open(f"{young}/{COMMIT}").read())
    with open(f"{young}/{COMMIT}", "w") as file:
        json.dump({**commit, "created": time.time() - month}, file)
    assert materialise(files().filter("x > 2"), cache=cache).reused  # this counts as use
    assert clean(locate(cache)) == [old]
    assert not os.path.exists(os.path.dirname(old))
    assert os.path.exists(young)
    assert (cache / "mine" / "precious.parquet").exists()
    assert clean(locate(cache / "nowhere")) == []


# ── Bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_rows(files, cache):
    """An empty DataFrame is an error, and no copy is left."""
    with pytest.raises(DataError, match="`df` has no rows"):
        materialise(files().filter("x < 0"), cache=cache, name="df")
    assert kept(cache) == []


def test_what_spark_cannot_compute(files, cache):
    """The error is one line with the Python function's exception, not a page of Java. No copy is left."""
    from pyspark.sql import functions

    def burst(x):
        raise ValueError(f"no {x} today")

    with pytest.raises(DataError, match=r"not compute .*write `df`: ValueError: no \d+ today$"):
        materialise(files().select(functions.udf(burst, "long")("x")), cache=cache, name="df")
    assert kept(cache) == []


def test_a_full_disk(spark, cache):
    """The error gives Spark's reason and says what to do, and no copy is left. The test limits the size of files."""
    if not spark.sparkContext.master.startswith("local"):
        pytest.skip("the executors are other processes")
    jvm = psutil.Process(spark._jvm.java.lang.ProcessHandle.current().pid())
    before = jvm.rlimit(psutil.RLIMIT_FSIZE)
    jvm.rlimit(psutil.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(DataError, match=r"not compute .*write .*File too large.*another folder"):
            materialise(spark.range(0, 2_000_000, 1, 2).selectExpr("rand(1)"), cache=cache)
    finally:
        jvm.rlimit(psutil.RLIMIT_FSIZE, before)
    assert kept(cache) == []


def test_where_spark_cannot_write(spark, files):
    """If Spark does not know the file system, the error gives Spark's reason, and no copy is left."""
    import fsspec

    with pytest.raises(DataError, match=r'No FileSystem .*scheme "memory"'):
        materialise(files(), cache="memory://cache")
    assert not fsspec.filesystem("memory").glob("/cache/*/*")


def test_columns_of_one_name(spark, cache):
    """Several columns with one name raise an error before anything is computed."""
    with pytest.raises(DataError, match="several columns called 'a'"):
        materialise(spark.sql("SELECT 1 AS a, 2 AS A"), cache=cache)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(files, tmp_path):
    """The error names the folder that cannot be used, gives the reason, and says what to set."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/below cannot .*used: .*SPARKRING_CACHE"):
        materialise(files(), cache=tmp_path / "file" / "below")
    with pytest.raises(DataError, match=r"/proc/none cannot .*used"):
        materialise(files(), cache="/proc/none")


def test_no_usable_frame(files, cache):
    """If something other than a DataFrame is passed, the error names its type."""
    with pytest.raises(DataError, match="`df` is a `list`"):
        materialise([1, 2], cache=cache, name="df")


def test_where_copies_are_kept(monkeypatch, tmp_path):
    """The cache is the given folder, or SPARKRING_CACHE, or the user's folder, which is on DBFS on Databricks."""
    from sparkring.data.materialise import cache_folder

    monkeypatch.setenv("SPARKRING_DBFS_ROOT", str(tmp_path))
    assert cache_folder("dbfs:/x").path == str(tmp_path / "x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert cache_folder().path == str(tmp_path / "home" / "sparkring" / "dataframes")
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")
    assert cache_folder().written.startswith("dbfs:/tmp/sparkring/")
    monkeypatch.setenv("SPARKRING_CACHE", str(tmp_path / "other"))
    assert cache_folder().path == str(tmp_path / "other" / "dataframes")
