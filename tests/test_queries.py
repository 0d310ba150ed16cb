"""Tests of the records of queries that use a column of predictions."""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np
import pytest
from texts import mentions
from waiting import until

import sparkring
from sparkring.cluster.base import Address, StageStatus
from sparkring.engine.predictions import queries
from sparkring.history import run_store
from sparkring.wire.channel import dial
from sparkring.wire.messages import GpuUsed, ModelUsed, TaskScored
from sparkring.worker.member import gpus
from sparkring.worker.model import reporter

ROWS = 3000


@pytest.fixture
def frame(spark):
    return spark.sql(f"SELECT id, cast(id AS double) AS x FROM range(0, {ROWS}, 1, 6)")


def ended(count):
    """Wait until the `count` runs of the test have ended, and return their records, oldest first."""

    def found():
        records = [run_store.load(path) for path in run_store.saved()]
        return records[::-1] if len(records) == count and all(each.outcome for each in records) else None

    return until(found, f"{count} queries have ended")


def rows_of(record):
    return sum(item.metrics["rows"] for item in record.items.known)


def test_a_query(frame, capsys, monkeypatch, tmp_path):
    """Each query that uses the column has its own record. Its items are the partitions. Scripts print no record.

    In local mode, Spark assigns no GPUs, so the tasks are spread over the GPUs of this machine.
    """
    monkeypatch.setattr(gpus, "visible", lambda: ["5", "7"])
    (tmp_path / "seen").mkdir()

    def model(batch):
        (tmp_path / "seen" / os.environ.get("CUDA_VISIBLE_DEVICES", "notebook")).touch()
        time.sleep(0.01)
        return batch["x"]

    scored = sparkring.predict(frame, model, inputs=["x"], batch_size=50, idle_s=0.1)
    assert not run_store.saved()  # nobody has used the column
    assert scored.selectExpr("sum(prediction)").first()[0] == ROWS * (ROWS - 1) / 2
    spread_over = {"5", "7"} if frame.sparkSession.sparkContext.master.startswith("local") else set()
    assert {path.name for path in (tmp_path / "seen").iterdir()} == {"notebook", *spread_over}
    assert len(scored.limit(5).collect()) == 5
    first, second = ended(2)
    assert (first.outcome, first.title) == ("finished", "predict a DataFrame with model")
    assert rows_of(first) == frame.count()
    assert (first.items.total, first.items.finished, first.items.again) == (6, 6, 0)
    assert [item.name for item in first.items.known] == [f"partition {number}" for number in range(6)]
    assert all(item.host and item.seconds(0) > 0 for item in first.items.known)
    assert "model loaded in" in first.message
    assert "slowest: partition" in first.message
    assert "rows/s" not in capsys.readouterr().out
    assert (second.outcome, second.items.total) == ("finished", 1)


def test_a_udf(spark, frame, tmp_path):
    """Each query that uses the UDF has a record, even in SQL. The micro-batches of a stream have none."""

    def load():
        return lambda x: x * 2.0

    def udf():
        return sparkring.predict_udf(load, return_type="double", batch_size=50, idle_s=1)

    spark.sql("SELECT cast(id AS double) AS x FROM range(0, 3, 1, 1)").write.parquet(str(tmp_path / "in"))
    double, unused = udf(), udf()
    assert frame.select(double("x").alias("p")).selectExpr("sum(p)").first()[0] == ROWS * (ROWS - 1)
    data = spark.readStream.schema("x double").parquet(str(tmp_path / "in")).select(unused(double("x")))
    stream = data.writeStream.format("memory").queryName("quadruple").trigger(availableNow=True).start()
    stream.awaitTermination()
    assert sorted(row[0] for row in spark.table("quadruple").collect()) == [0, 4, 8]
    spark.udf.register("double_of", double)
    assert spark.sql("SELECT double_of(id) FROM range(0, 2, 1, 1)").collect() == [(0,), (2,)]
    first, second = ended(2)
    assert {first.title, second.title} == {"predict_udf with load"}
    assert [rows_of(record) for record in (first, second)] == [ROWS, 2]


def test_rows_that_cannot_be_scored(frame):
    def model(batch):
        if (batch["x"] >= ROWS - 2).any():
            raise ValueError("too large")
        return batch["x"]

    nulls = sparkring.predict(frame, model, inputs=["x"], on_error="null", idle_s=0.1)
    assert nulls.where("prediction IS NULL").count() == 2
    (record,) = ended(1)
    assert "2 without a prediction" in record.message
    with pytest.raises(Exception, match="too large"):
        sparkring.predict(frame, model, inputs=["x"], idle_s=0.1).collect()
    failed = ended(2)[1]
    assert failed.outcome == "failed"
    assert "ValueError: too large" in failed.message
    assert "ValueError: too large" in failed.items.known[-1].failure.summary


def test_without_a_listener(frame, monkeypatch):
    """The predictions do not depend on the driver's listener."""
    scored = sparkring.predict(frame, lambda batch: batch["x"] + 1, inputs=["x"], idle_s=0.1)
    queries.close()
    assert scored.selectExpr("sum(prediction)").first()[0] == ROWS * (ROWS + 1) / 2
    monkeypatch.setattr(queries, "Listener", lambda *_, **__: (_ for _ in ()).throw(OSError))
    scored = sparkring.predict(frame, lambda batch: batch["x"] + 1, inputs=["x"], idle_s=0.1)
    assert scored.selectExpr("sum(prediction)").first()[0] == ROWS * (ROWS + 1) / 2
    assert not run_store.saved()


class Spark:
    """Stand in for a Cluster: `stages` has each stage by its id, and `active` has the running stages."""

    def __init__(self, stages):
        self.stages = stages
        self.active = set(stages)

    def address(self):
        return Address("127.0.0.1", "127.0.0.1", 0)

    def active_stages(self):
        return list(self.active)

    def stage(self, number):
        return self.stages[number]


@contextlib.contextmanager
def connected(spark):
    """Return a function that reports tasks over a connection to the listener."""
    order = queries.watch(spark, "predict data with model", "predict(…)")
    with contextlib.closing(dial(order["host"], order["port"], bytes.fromhex(order["secret"]))) as connection:

        def report(*tasks, host="here", load_s=0.5, gpus=()):
            for gpu in gpus:
                connection.send(gpu)
            connection.send(ModelUsed(order["column"], host, 1, load_s, tasks))

        yield report


def scored(connection, task, partition, state="running", *, stage=0, query="0", rows=10, seconds=1.0, error=""):
    return TaskScored(connection, task, query, stage, partition, rows, 0, seconds, state, error)


def test_attempts_of_tasks():
    """If a task fails, its partition is tried again. Partitions whose rows are not all needed count as finished."""
    spark = Spark({0: StageStatus("scored", 3, 0, 0)})
    with connected(spark) as report:
        report(load_s=None)
        report(scored(0, 0, 0), scored(1, 1, 1))
        report(scored(0, 0, 0, "failed", error="no"), scored(1, 1, 1, "closed", rows=30, seconds=5.0))
        report(scored(4, 0, 0, "failed", rows=0, error="no"))  # the query computes its column twice
        report(scored(2, 2, 0), scored(3, 3, 2))
        report(scored(2, 2, 0, "finished"), scored(3, 3, 2, "finished"))
        spark.stages[0] = StageStatus("scored", 3, 0, 3)
        spark.active.clear()
    (record,) = ended(1)
    assert (record.items.total, record.items.finished, record.items.failed, record.items.again) == (3, 3, 0, 1)
    assert [item.attempt for item in record.items.known] == [2, 1, 1]
    assert "60 rows scored" in record.message  # including the rows of the attempt that failed
    assert "slowest: partition 1 (5.0 s)" in record.message


def test_a_query_that_is_stopped():
    """A killed process does not report the end of its tasks, but the record ends."""
    spark = Spark({0: StageStatus("scored", 4, 0, 0)})
    with connected(spark) as report:
        report(scored(0, 0, 0), scored(1, 1, 1))
        report(scored(0, 0, 0, "finished"))
        spark.stages[0] = StageStatus("scored", 4, 0, 1)
        spark.active.clear()
    (record,) = ended(1)
    assert record.outcome == "interrupted"
    assert [item.state for item in record.items.known] == ["finished", "stopped"]


class Seen:
    """A view that keeps the records that it is asked to show."""

    def __init__(self):
        self.records = []

    def refresh(self, record):
        self.records.append(record)

    close = again = refresh


def test_what_a_view_shows_of_a_query(monkeypatch):
    """The first frame says where the model is loaded, and knows of no ranks. The query ends with Spark's last stage.

    The model process stays connected, because another query may follow.
    """
    view = Seen()
    monkeypatch.setattr(queries, "background_view", lambda: view)
    spark = Spark({0: StageStatus("scored", 1, 0, 0)})
    with connected(spark) as report:
        report(load_s=None)
        until(lambda: view.records, "the loading is shown")
        assert view.records[0].items.noun == "partition"
        assert view.records[0].items.waits_for.endswith("on 1 machine")
        report(scored(0, 0, 0))
        report(scored(0, 0, 0, "finished", rows=60))
        time.sleep(2 * queries._IDLE_S)
        assert not [record for record in view.records if record.outcome], "Spark is still running the stage"
        spark.stages[0] = StageStatus("scored", 1, 0, 1)
        spark.active.clear()
        (record,) = ended(1)
    assert not record.items.waits_for
    assert "60 rows scored" in record.message
    assert "60 rows/s" in record.message


def test_gpus():
    """The record of each query has the last use of the model processes' GPUs, even if nothing has changed meanwhile."""
    spark = Spark({0: StageStatus("scored", 1, 0, 0), 1: StageStatus("scored", 1, 0, 0)})
    used = [GpuUsed("1", "NVIDIA", amount, 9, 50) for amount in (4, 5)]
    with connected(spark) as report:
        report(load_s=None, gpus=used[:1])
        report(scored(0, 0, 0), gpus=used[1:])
        report(scored(0, 0, 0, "finished"))
        spark.stages[0] = StageStatus("scored", 1, 0, 1)
        spark.active.remove(0)
        report(scored(1, 1, 0, "finished", stage=1, query="1"))
        spark.stages[1] = StageStatus("scored", 1, 0, 1)
        spark.active.clear()
    first, second = ended(2)
    assert any(mentions(notice.text, "here", "loaded", "0.5 s", "process 1, GPU 1") for notice in first.notices)
    assert "model loaded in 0.5 s" in first.message
    assert "model loaded" not in second.message, "the process had the model"
    for record in (first, second):
        assert [(each.host, each.pid, each.gpu) for each in record.model_gpus] == [("here", 1, used[1])]


def test_only_those_who_know_the_secret():
    order = queries.watch(Spark({}), "", "")
    with pytest.raises(ConnectionError):
        dial(order["host"], order["port"], np.random.bytes(32))
    with contextlib.closing(dial(order["host"], order["port"], bytes.fromhex(order["secret"]))) as connection:
        connection.send(ModelUsed("another", "here", 1, None, ()))
        with pytest.raises(ConnectionError):
            connection.receive()
    assert not run_store.saved()


def test_the_reporter_gives_up_without_a_driver():
    order = queries.watch(Spark({}), "", "")
    queries.close()
    found = reporter.Reporter(order)
    until(lambda: found._order is None, "the thread has noticed")
    task = found.task()
    task.ended()
    found.loaded(1.0)
