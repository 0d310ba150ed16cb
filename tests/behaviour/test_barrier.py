"""%%barrier runs a cell in the tasks of a Spark barrier stage, with Spark's own context and each task's rows."""

from __future__ import annotations

import datetime
import inspect
import itertools
import os
import signal
import sys

import psutil
import pytest
from rings import READY, ready
from texts import mentions
from waiting import DEADLINE_S

from sparkring.errors import LaunchError, OptionsError, RunFailed, RunTimeout, SlotsError
from sparkring.gangs import gang

WIDE = 2_000_000  # 16 MB of longs: far more than pipes and sockets can hold


@pytest.fixture
def barrier(tasks):
    """Runs a barrier cell on `frame`, on as many ranks as `frame` has partitions unless `n` says otherwise."""

    def run(source, frame=None, n=0, **options):
        in_arrow = getattr(type(frame), "mapInArrow", None)
        if in_arrow is not None and "barrier" not in inspect.signature(in_arrow).parameters:
            with pytest.raises(LaunchError, match=r"--data needs Spark 3\.5 or newer"):
                tasks.run(source, n, namespace={"digits": frame}, framework="barrier", data="digits", **options)
            pytest.skip("Spark before 3.5 has no barrier stages over DataFrames")
        namespace = {"digits": frame, **options.pop("namespace", {})}
        data = "digits" if frame is not None else ""
        return tasks.run(source, n, namespace=namespace, framework="barrier", data=data, **options)

    return run


def by_rank(*expressions: str) -> str:
    """Return a cell in which rank i computes the i-th expression, since each launch takes seconds of CPU time."""
    return "(" + "".join(f"lambda: ({expression}), " for expression in expressions) + ")[rank]()"


# ── The context ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.standalone("the addresses are the executors'")
def test_the_context_is_sparks(barrier):
    """BarrierTaskContext's methods work, however the cell gets the context, and rank i is task i."""
    values = barrier(
        """
        from pyspark import BarrierTaskContext, TaskContext

        assert BarrierTaskContext.get() is context and TaskContext.get() is context
        context.barrier()
        hosts = [info.address for info in context.getTaskInfos()]
        (rank, context.partitionId(), context.attemptNumber(), context.resources(), len(hosts), hosts[rank] != "",
         context.allGather(f"from {rank}"), size, list(rows))
        """,
        n=3,
    ).values
    gathered = ["from 0", "from 1", "from 2"]
    assert values == [(rank, rank, 0, {}, 3, True, gathered, 3, []) for rank in range(3)]


CONTEXT = """
import shipped_module
from pyspark import BarrierTaskContext, SparkFiles, TaskContext

task = TaskContext.get()
(task.partitionId(), task.attemptNumber(), task.stageId(), task.taskAttemptId(), task.cpus(), task.resources(),
 task.getLocalProperty("test.property"), BarrierTaskContext.get().allGather(str(task.partitionId())),
 open(SparkFiles.get("shipped.txt")).read(), shipped_module.value)
"""


@pytest.mark.standalone("the context belongs to the executors' tasks")
def test_every_rank_in_a_task_has_its_context(spark, tasks, spark_gang, tmp_path):
    """Whichever magic starts it, a rank has the values of its task, and the files that Spark ships to it."""
    (tmp_path / "shipped.txt").write_text("shipped")
    (tmp_path / "shipped_module.py").write_text("value = 7")
    spark.sparkContext.addFile(str(tmp_path / "shipped.txt"))
    spark.sparkContext.addPyFile(str(tmp_path / "shipped_module.py"))
    spark.sparkContext.setLocalProperty("test.property", "here")
    try:
        ring = tasks.run(CONTEXT, 2).values
        spark_gang.start(2).cell("0")
        warm = spark_gang.values(CONTEXT)
    finally:
        spark.sparkContext.setLocalProperty("test.property", None)
    for values in (ring, warm):
        partitions, attempts, stages, ids, *rest = zip(*values, strict=True)
        assert (partitions, attempts, len(set(stages)), len(set(ids))) == ((0, 1), (0, 0), 1, 2)
        assert rest == [(1, 1), ({}, {}), ("here",) * 2, (["0", "1"],) * 2, ("shipped",) * 2, (7, 7)]
    assert {stage for _, _, stage, *_ in ring}.isdisjoint(stage for _, _, stage, *_ in warm)


def test_a_rank_on_this_machine_is_in_no_task(local):
    """As on a driver, there is no context, and pyspark itself says that there is no barrier stage."""
    cell = """
        import sys

        assert "pyspark" not in sys.modules
        from pyspark import BarrierTaskContext, TaskContext

        assert TaskContext.get() is None
        BarrierTaskContext.get()
    """
    with pytest.raises(RunFailed, match="barrier stage"):
        local.run(cell, 1)


def test_the_barrier_is_one(barrier):
    """No rank passes the barrier before the last one has reached it."""
    values = barrier(
        """
        import time
        time.sleep(1.0 if rank == 1 else 0.0)
        came = time.time()
        context.barrier()
        came, time.time()
        """,
        n=2,
    ).values
    assert min(left for _, left in values) >= max(came for came, _ in values)


def test_context_and_rows_are_the_ranks_own(barrier, spark):
    """The notebook's variables `context` and `rows` are ignored, even if they could not be sent to the ranks."""
    values = barrier("context.partitionId(), list(rows)", n=2, namespace={"context": spark, "rows": [1, 2]}).values
    assert values == [(0, []), (1, [])]


# ── Rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


FORMS = (
    "sum(1 for row in rows if row.id == row['id'] == row.asDict()['id'])",
    "sum(len(frame) for frame in rows.pandas())",
    "sum(batch.num_rows for batch in rows.arrow())",
    "len(rows.to_pandas())",
    "1 + sum(1 for row in rows) if next(rows) else 0",
)


@pytest.mark.parametrize("forms", [FORMS[:3], FORMS[3:]], ids=["pieces", "all, and with next()"])
def test_rows_in_every_form(barrier, spark, forms):
    """Each rank reads its rows in a different form."""
    count = by_rank(*forms)
    assert barrier(count, spark.range(0, 10_000 * len(forms), 1, len(forms))).values == [10_000] * len(forms)


@pytest.mark.standalone("the rows are on the executors")
def test_rank_i_has_partition_i(barrier, spark):
    values = barrier("[row.id for row in rows]", spark.range(0, 8, 1, 4)).values
    assert values == [[0, 1], [2, 3], [4, 5], [6, 7]]


RICH = """
    id, vector, sparse, point, matrix, named_struct('vector', vector, 'at', array(at)) AS both, at,
    cast(id AS tinyint) AS small, cast(id AS float) AS real, interval '2' hour AS took, NULL AS nothing,
    IF(id = 0, 3, NULL) AS count, IF(id = 0, true, NULL) AS yes, IF(id = 0, 'ö', NULL) AS s,
    IF(id = 0, cast(1.5 AS decimal(5, 2)), NULL) AS price, IF(id = 0, date'2020-01-02', NULL) AS day,
    IF(id = 0, timestamp_ntz'2020-01-01 10:00:00', NULL) AS clock, IF(id = 0, cast('ab' AS binary), NULL) AS bytes,
    IF(id = 0, array(1, NULL), NULL) AS list, IF(id = 0, struct(1 AS a, array(struct(2 AS b)) AS l), NULL) AS row,
    IF(id = 0, map('k', struct(3 AS c)), NULL) AS map
"""


def _point_class():
    """Return a class and its user-defined type. Both are defined as in a notebook, so ranks cannot import them."""
    from pyspark.sql.types import ArrayType, DoubleType, UserDefinedType

    class PointType(UserDefinedType):
        @classmethod
        def sqlType(cls):
            return ArrayType(DoubleType(), False)

        @classmethod
        def module(cls):
            return "__main__"

        def serialize(self, point):
            return [point.x, point.y]

        def deserialize(self, stored):
            return Point(*stored)

    class Point:
        __UDT__ = PointType()

        def __init__(self, x, y):
            self.x, self.y = x, y

        def __repr__(self):
            return f"Point({self.x}, {self.y})"

        def __eq__(self, other):
            return repr(self) == repr(other)

    return Point


@pytest.fixture
def rich(spark, monkeypatch):
    """A row with a value of every type and a row of nulls, in a session with a time zone of its own."""
    from pyspark.ml.linalg import Matrices, Vectors

    point = _point_class()
    monkeypatch.setattr(sys.modules["__main__"], "PointType", type(point.__UDT__), raising=False)  # as in a notebook
    rows = [
        (
            0,
            Vectors.dense([1.0, 2.0]),
            Vectors.sparse(3, [1], [4.0]),
            point(5.0, 6.0),
            Matrices.dense(1, 1, [7.0]),
        ),
        (1, None, None, None, None),
    ]
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    frame = spark.createDataFrame(rows[:1], ["id", "vector", "sparse", "point", "matrix"])
    frame = spark.createDataFrame(rows, frame.schema).repartition(1).sortWithinPartitions("id")
    at = "IF(id = 0, timestamp'2020-01-01 10:00:00', NULL) AS at"
    frame.selectExpr("*", at).createOrReplaceTempView("rich")
    yield spark.sql(f"SELECT {RICH} FROM rich")
    spark.catalog.dropTempView("rich")
    spark.conf.unset("spark.sql.session.timeZone")


@pytest.mark.standalone("the rows come through the executors' pyarrow")
@pytest.mark.versions("of pyspark, pyarrow and pandas")
def test_values_are_what_spark_gives(barrier, spark, rich):
    """Rows are as from collect(), and frames as from toPandas(): the same types, nulls, nested values and UDTs.

    Timestamps are the local times of the session's time zone.
    """
    rows, expected = barrier("list(rows)", rich).value, rich.collect()
    for row, known in zip(rows, expected, strict=True):
        for name, value, wanted in zip(known.__fields__, row, known, strict=True):
            if name not in ("at", "both"):  # collect() gives these in the machine's time zone
                assert (type(value).__name__, value) == (type(wanted).__name__, wanted), name
    at = datetime.datetime(2020, 1, 1, 10)
    assert (rows[0].at, rows[0].both.at, rows[0].both.vector) == (at, [at], expected[0].vector)
    for by_arrow in ("false", "true"):
        spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", by_arrow)
        try:
            # toPandas() cannot convert intervals with Arrow.
            known = rich if by_arrow == "false" else rich.drop("took")
            frame, expected = barrier("rows.to_pandas()", known).value, known.toPandas()
        finally:
            spark.conf.unset("spark.sql.execution.arrow.pyspark.enabled")
        assert list(frame.columns) == list(expected.columns)
        for name in frame.columns.drop("matrix"):  # Java has 0 where Python has False; the rows' values are equal
            assert repr(list(frame[name])) == repr(list(expected[name])), name
            if by_arrow == "false":
                assert frame[name].dtype == expected[name].dtype, name


def test_rows_can_be_read_once(barrier, spark):
    """A second pass over `rows` raises an error instead of finding no rows."""
    cell = """
        from sparkring.errors import DataError
        try:
            if rank:
                batches = rows.arrow()
                next(batches)
                rows.to_pandas()
            else:
                list(rows)
                list(rows)
        except DataError as error:
            said = str(error)
        said
    """
    by_row, by_batch = barrier(cell, spark.range(0, 4, 1, 2)).values
    assert mentions(by_row, "`rows`", "only once", "row by row")
    assert mentions(by_batch, "`rows`", "only once", "Arrow batches")


def test_empty_partitions(barrier, spark):
    """Frames of empty partitions still have the columns."""
    frame = spark.range(0, 6, 1, 3).filter("id > 3")
    names = "[(len(frame), *frame) for frame in [rows.to_pandas()]]"
    values = barrier(by_rank(names, "len(list(rows)), size", "len(list(rows)), size"), frame).values
    assert values == [[(0, "id")], (0, 3), (2, 3)]


def test_columns_with_any_names(barrier, spark):
    """A name may have a dot, and two columns of a join may have the same name."""
    frame = spark.range(0, 4, 1, 2).selectExpr(
        "id AS `a.b`", "id + 1 AS b", "id + 2 AS b", "named_struct('c.d', id) AS s"
    )
    names = "[(list(frame), frame.iloc[:, :3].values.tolist()) for frame in [rows.to_pandas()]]"
    values = barrier(by_rank(names, "[(row['a.b'], row[2], row.s['c.d']) for row in rows]"), frame).values
    assert values == [[(["a.b", "b", "b", "s"], [[0, 1, 2], [1, 2, 3]])], [(2, 4, 2), (3, 5, 3)]]


@pytest.mark.versions("of Spark, whose messages differ")
def test_rows_that_spark_cannot_compute(barrier, spark):
    """The error gives Spark's error class, or the exception of a Python function, and not a line of the query.

    Spark may fail before or after the ranks have connected.
    """
    ansi = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", "true")
    try:
        divided = spark.range(0, 4, 1, 2).selectExpr("1 / (id - 2) AS x")
        with pytest.raises((LaunchError, RunFailed), match=r"ended .*barrier stage: \[DIVIDE_BY_ZERO\] Division by"):
            barrier("len(list(rows))", divided)
    finally:
        spark.conf.set("spark.sql.ansi.enabled", ansi)

    from pyspark.sql import functions

    @functions.udf("int")
    def raises(x):
        raise ValueError("first line\nsecond line")

    with pytest.raises((LaunchError, RunFailed), match=r"(?m)barrier stage.*: first line$"):
        barrier("len(list(rows))", spark.range(0, 4, 1, 2).select(raises("id")))


def test_other_numbers_of_ranks_than_partitions(barrier, spark):
    """The rows are repartitioned, so that each row goes to exactly one rank."""
    values = barrier("[row.id for row in rows]", spark.range(0, 90, 1, 2), n=3).values
    assert sorted(itertools.chain(*values)) == list(range(90))
    assert all(values)


def test_a_frame_that_comes_from_a_shuffle(barrier, spark):
    """Spark chooses the number of partitions only when it computes the frame."""
    frame = spark.range(1000).selectExpr("id % 7 AS k").groupBy("k").count()
    for n in (0, 2):
        assert sum(barrier("len(rows.to_pandas())", frame, n=n).values) == 7


# ── Ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_that_nobody_reads(barrier, spark):
    """A rank that stops reading ends normally, however many rows are left, and its slot is free for the next cell."""
    reads = by_rank("rank", "(next(rows), rank)[1]", "next(rows.arrow()) and rank", "rank")
    assert barrier(reads, spark.range(0, WIDE, 1, 4)).values == [0, 1, 2, 3]
    assert barrier("sum(batch.num_rows for batch in rows.arrow())", spark.range(0, 8, 1, 4)).values == [2] * 4


def test_rows_wait_for_the_rank(barrier, spark):
    """A rank that starts to read late loses no rows."""
    values = barrier(
        "import time\ntime.sleep(1)\nsum(len(f) for f in rows.pandas())", spark.range(0, WIDE, 1, 2)
    ).values
    assert values == [WIDE // 2] * 2


ENDS = {
    "1 / 0": "ZeroDivisionError",
    "import os; os._exit(3)": "exited with code 3",
    "import os; os.kill(os.getpid(), 9)": "SIGKILL",
}


def test_a_rank_that_ends_in_the_middle_of_its_rows(barrier, spark):
    """The failure is reported as usual, and the other ranks, which are waiting at a barrier, are ended, too."""
    for end, said in ENDS.items():
        with pytest.raises(RunFailed, match=rf"rank 1 .*{said}"):
            barrier(f"next(rows)\nif rank == 1:\n    {end}\ncontext.barrier()", spark.range(0, WIDE, 1, 2))
    assert barrier("rank", spark.range(0, 4, 1, 4)).values == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "reads",
    [
        pytest.param("sum(1 for _ in rows)", marks=pytest.mark.extended("repetition", "the rank that goes on")),
        "import time\nfor row in rows: pass\ntime.sleep(1000)",
    ],
)
def test_rows_that_spark_cannot_make(barrier, spark, reads, monkeypatch):
    """A rank never mistakes a part of its partition for all of it: the run fails with Spark's message."""
    monkeypatch.setattr(gang, "LOST_WAIT_S", DEADLINE_S)  # however long Spark takes to report the error
    frame = spark.range(0, WIDE, 1, 2).selectExpr("IF(id = 900000, raise_error('bad sector'), id) AS x")
    with pytest.raises(RunFailed, match="bad sector"):
        barrier(reads, frame)


@pytest.mark.standalone("the executor says that its worker has died")
def test_a_killed_worker_takes_its_rank_along(barrier, spark):
    """If Spark's worker is killed, its rank does not mistake the end of the pipe for the end of the rows."""
    with pytest.raises(RunFailed):
        barrier(
            """
            import psutil, signal, time
            next(rows)
            if rank == 1:
                psutil.Process().parent().parent().send_signal(signal.SIGKILL)
            sum(1 for _ in rows)
            time.sleep(1000)  # not context.barrier(): Spark ends an executor if it cancels a task that waits in it
            """,
            spark.range(0, WIDE, 1, 2),
        )


@pytest.mark.standalone("cancelling the job would end an executor")
def test_interrupt(barrier, tasks, spark):
    """An interrupt ends both a rank that is computing and a rank that is waiting at a barrier.

    If the job were cancelled instead, Spark would end an executor, and the next test would fail.
    """

    def interrupt(record):
        if ready(2)(record):
            os.kill(os.getpid(), signal.SIGINT)

    tasks.view.on_refresh = interrupt
    with pytest.raises(KeyboardInterrupt, match="2 ranks ended"):
        barrier(
            f"import threading\nnext(rows)\n{READY}\nif rank == 1: context.barrier()\nwhile True: pass",
            spark.range(9, WIDE, 1, 2),
        )


def test_timeout(barrier, tasks, spark, limit):
    cell = f"import threading, time; {READY}\ncontext.barrier() if rank else time.sleep(1000)"
    with pytest.raises(RunTimeout, match=r"rank 1 waits .*barrier, cell line 3"):
        barrier(cell, spark.range(0, 9, 1, 2), timeout_s=limit(tasks, ready(2)))


@pytest.mark.standalone("the executors' workers are used again")
def test_sparks_workers_stay_clean(barrier, tasks, spark):
    """The cell runs in a process of its own, which ends with the task."""
    first = barrier("import os\nos.environ['DIRTY'] = '1'\nos.getpid()", n=2).values
    assert barrier("import os\nos.environ.get('DIRTY')", n=2).values == [None, None]
    assert not any(map(psutil.pid_exists, first))


# ── What cannot be run ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([1], "`digits` is a `list`, not a Spark DataFrame"),
        ("pandas", r"`digits` is a pandas DataFrame.*spark.createDataFrame\(digits\)"),
    ],
)
def test_data_that_is_no_spark_dataframe(barrier, found, said):
    if found == "pandas":
        found = pytest.importorskip("pandas").DataFrame({"a": [1]})
    with pytest.raises(OptionsError, match=said):
        barrier("rank", found)


def test_data_that_is_not_there(tasks):
    with pytest.raises(OptionsError, match=r"notebook .*no variable `digit`"):
        tasks.run("rank", 0, framework="barrier", data="digit")


@pytest.mark.standalone("the slots are counted on the cluster")
def test_more_partitions_than_slots(barrier, spark):
    with pytest.raises(SlotsError, match=r"9 partitions of `digits` need 9 task slots, .* 4 in all.* -n 4"):
        barrier("rank", spark.range(0, 9, 1, 9))


def test_too_few_slots_point_to_no_local_processes(barrier):
    with pytest.raises(SlotsError, match=r"needs 99 task slots, .* 4 in all") as caught:
        barrier("rank", n=99)
    assert "-n -99" not in str(caught.value)


def test_frames_for_which_spark_has_no_barrier_stage(barrier, spark):
    """After a union or a coalesce, Spark refuses one. The tasks are ordinary ones, and `context` works as usual."""
    digits = spark.range(0, 4, 1, 2)
    cell = "[row.id for row in rows], context.allGather(str(context.partitionId())), len(context.getTaskInfos())"
    for frame, numbers in ((digits.union(digits), [0, 0, 1, 1, 2, 2, 3, 3]), (digits.coalesce(1), [0, 1, 2, 3])):
        values = barrier(cell, frame).values
        assert sorted(number for numbers, _, _ in values for number in numbers) == numbers
        assert [tasks for _, *tasks in values] == [[list(map(str, range(len(values)))), len(values)]] * len(values)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda frame: frame.selectExpr("interval '1' year AS i"), "`i` is interval year, which Arrow cannot"),
        (lambda frame: frame.limit(0), "is empty"),
    ],
    ids=["column", "empty"],
)
def test_frames_that_spark_refuses(barrier, spark, make, said):
    """The error is a single line, and says what to do, if that is known."""
    frame = make(spark.range(0, 4, 1, 2))
    with pytest.raises((LaunchError, OptionsError), match=said) as caught:
        barrier("rank", frame)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
