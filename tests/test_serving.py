"""Tests of predict(…, refresh_s=…): a streaming query takes up new checkpoints while it is running."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from texts import mentions
from waiting import until

import sparkring
from sparkring import checkpoints
from sparkring.checkpointing.store import Store
from sparkring.checkpointing.stream_state import StreamState
from sparkring.cluster.base import Address
from sparkring.data.columns import Making
from sparkring.data.layout import BatchLayout
from sparkring.engine.predictions import queries, serving
from sparkring.errors import CheckpointError, OptionsError
from sparkring.history import run_store
from sparkring.wire.channel import dial
from sparkring.wire.messages import CheckpointUsed, ModelUsed
from sparkring.worker.model.inputs import Described
from sparkring.worker.model.outputs import PredictedColumn
from sparkring.worker.model.saved import Followed, Saved
from sparkring.worker.model.scorer import Scorer


def make_model():
    import torch

    return torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)


def of_stream(weight, *, name="model"):
    """Return what %%stream saves for a model with this weight."""
    import torch

    model = make_model()
    torch.nn.init.constant_(model.weight, weight)
    variables = {name: model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "seen": 3}
    return {"state": variables, "position": "there"}


def save(store, step, weight, metrics=None):
    store.save(step, of_stream(weight), metrics)
    store.wait()


def damage(directory, step):
    (file,) = directory.glob(f"{step:08d}.*/rank-0.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")


class Heard:
    """What a Followed model does: (step of the new model, its weight), or a problem."""

    def __init__(self, model):
        self._model, self.found, self._new = model, [], None
        self._weight = model.load().weight.item()

    def look(self):
        self._model.look(self._use, self)
        found, self.found = self.found, []
        return found

    def _use(self, model, step):
        self._weight = model.weight.item()

    def swapped(self, step, seconds):
        assert seconds > 0
        self.found.append((step, self._weight))

    def kept(self, problem):
        self.found.append(problem)


def followed(store, which="latest"):
    return Followed(store, store.find(which), make_model, None, which, 1.0)


# ── Checkpoints of streams ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_state_of_a_stream():
    """The tests of this file save states as %%stream does."""
    state = StreamState(("model",), 3, sharded=False, saves=True, by=())
    state._namespace = {"model": 1}
    assert state._state("there") == {"state": {"model": 1}, "position": "there"}


@pytest.mark.parametrize("name", ["model", "net"])
def test_a_model_of_a_stream(tmp_path, name):
    """The only model is found beside an optimizer, whatever its name is."""
    store = checkpoints(tmp_path)
    store.save(1, of_stream(2, name=name))
    store.wait()
    model = make_model()
    store.load_model(model)
    assert model.weight.item() == 2
    assert Saved(store, store.find(), make_model, name).load().weight.item() == 2
    with pytest.raises(CheckpointError, match=r"no value 'seem'. Its values are '.*name the one"):
        store.load_model(model, key="seem")


def test_several_models(tmp_path):
    import torch

    store, state = checkpoints(tmp_path), of_stream(2, name="generator")
    state["state"]["critic"] = make_model()
    state["state"]["deep"] = torch.nn.Sequential(make_model())
    store.save(1, state)
    store.wait()
    with pytest.raises(
        CheckpointError,
        match=r"no `model`, .*not exactly .* `Linear`.*'generator', .*'critic', 'deep': name",
    ):
        store.load_model(make_model())
    model = make_model()
    store.load_model(model, key="generator")
    assert model.weight.item() == 2
    store.load_model(torch.nn.Sequential(make_model()))  # the only one of this class


def test_a_keras_model_of_a_stream(tmp_path):
    """A Keras model with its configuration needs no make_model."""
    import keras

    def make():
        return keras.Sequential([keras.layers.Dense(1, input_shape=(1,))])

    store = checkpoints(tmp_path)
    store.save(1, {"state": {"net": make(), "seen": 3}, "position": "there"})
    store.wait()
    assert Saved(store, store.find(), None, None).load().count_params() == 2
    store.save(2, {"state": {"a": make(), "b": make()}, "position": "there"})
    store.wait()
    with pytest.raises(OptionsError, match=r"has several models \('a', 'b'\): name .*key='a'"):
        Saved(store, store.find(), None, None).load()
    assert Saved(store, store.find(), None, "b").load().count_params() == 2


# ── Following ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_newer_checkpoints(tmp_path):
    store = checkpoints(tmp_path, keep=None)
    save(store, 5, 2.0)
    found = Heard(followed(store))
    assert found.look() == []
    save(store, 6, 3.0)
    save(store, 7, 4.0)
    assert found.look() == [(7, 4.0)]
    assert found.look() == []
    again = checkpoints(tmp_path, keep=None)  # the training has begun again
    again._stamp += 1000
    save(again, 1, 5.0)
    assert found.look() == [(1, 5.0)]
    # Neither a listing that is out of date nor the removal of the newest checkpoint leads back to older weights.
    shutil.rmtree(next(tmp_path.glob("00000001.*")))
    assert found.look() == []


def test_a_damaged_checkpoint(tmp_path):
    """The weights in use stay. The damage is told once, and the checkpoint is not read again."""
    store = checkpoints(tmp_path, keep=None)
    save(store, 1, 2.0)
    found = Heard(followed(store))
    save(store, 2, 3.0)
    damage(tmp_path, 2)
    (problem,) = found.look()
    assert "00000002" in problem
    assert "cannot be used" in problem
    assert found.look() == []
    save(store, 3, 4.0)
    shutil.rmtree(tmp_path)
    assert found.look() == []
    tmp_path.mkdir()
    save(store, 4, 5.0)
    assert found.look() == [(4, 5.0)]


def test_a_checkpoint_that_is_removed_before_it_is_loaded(tmp_path, monkeypatch):
    store = checkpoints(tmp_path, keep=1)
    save(store, 1, 2.0)
    model = followed(store)
    save(store, 2, 3.0)
    assert not list(tmp_path.glob("00000001.*"))
    found = Heard(model)  # when the model process begins, the checkpoint that predict() has found is gone
    assert found._weight == 3.0
    listed = Store.list

    def late(self):
        entries = listed(self)
        save(store, 4, 5.0)
        return entries

    save(store, 3, 4.0)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "list", late)
        (problem,) = found.look()
    assert "00000003" in problem
    assert found.look() == [(4, 5.0)]


def test_storage_that_cannot_be_reached(tmp_path, monkeypatch):
    """Problems are told once until there are new weights. If the storage has failed, the checkpoint is tried again."""
    store = checkpoints(tmp_path, keep=None)
    save(store, 1, 2.0)
    found = Heard(followed(store))
    save(store, 2, 3.0)
    with monkeypatch.context() as patch:
        patch.setattr("sparkring.checkpointing.tensors.read", lambda *_: (_ for _ in ()).throw(OSError("no network")))
        assert "no network" in found.look()[0]
        patch.setattr("sparkring.checkpointing.folder.folders", lambda *_: (_ for _ in ()).throw(OSError("no mount")))
        assert found.look() == []
    assert found.look() == [(2, 3.0)]


def test_better_checkpoints(tmp_path):
    store = checkpoints(tmp_path, keep=None, best="loss")
    save(store, 1, 2.0, {"loss": 0.5})
    found = Heard(followed(store, "best"))
    save(store, 2, 3.0, {"loss": 0.9})
    assert found.look() == []
    save(store, 3, 4.0, {"loss": 0.1})
    assert found.look() == [(3, 4.0)]


def test_rows_of_one_request_have_one_version(tmp_path):
    """A model that is swapped while a table is being scored is used from the next table on."""
    store = checkpoints(tmp_path)
    save(store, 1, 2.0)
    outputs = [
        PredictedColumn("prediction", pa.float64(), "double", True),
        PredictedColumn("version", pa.int64(), "bigint", True),
    ]
    swaps = iter([None, 10.0, None, None])

    def transform(batch):
        if weight := next(swaps):
            model = make_model()
            model.weight.data.fill_(weight)
            scorer.use(model, 9)
        return batch

    layout = BatchLayout("the DataFrame", {"x": "x"}, Making({}, {}), None, transform)
    source = Saved(store, store.find(), make_model, None)
    scorer = Scorer(source, Described(layout), outputs, by_name=False, batch_size=2, on_error="null", version="version")
    rows = pa.table({"x": [[1.0], [2.0], [3.0], [4.0]]})
    first = scorer.score(rows)
    assert first.column("prediction").to_pylist() == [2.0, 4.0, 6.0, 8.0]
    assert first.column("version").to_pylist() == [1] * 4
    assert scorer.score(rows.slice(0, 2)).to_pydict() == {"prediction": [10.0, 20.0], "version": [9, 9]}


# ── Queries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def streaming(spark, tmp_path, **options):
    """Run a query on the files of a folder. Yield a function that adds a file and returns its predictions."""
    folder = tmp_path / "in"
    folder.mkdir()
    frame = spark.readStream.schema("x array<double>, file long").parquet(str(folder))
    scored = sparkring.predict(
        frame, str(tmp_path / "ml"), make_model, inputs=["x"], returns="double", version="step", **options
    )
    query = scored.where("prediction > 0").writeStream.format("memory").queryName("served").start()
    files = iter(range(1_000))

    def add():
        number, path = next(files), tmp_path / "new.parquet"
        pq.write_table(pa.table({"x": [[1.0], [2.0]], "file": pa.array([number] * 2, pa.int64())}), path)
        path.rename(folder / f"{number}.parquet")
        query.processAllAvailable()
        rows = spark.sql(f"SELECT prediction, step FROM served WHERE file = {number} ORDER BY prediction").collect()
        return [tuple(row) for row in rows]

    try:
        yield add
    finally:
        query.stop()


def model_processes():
    return {path.read_text() for path in Path(tempfile.gettempdir()).glob("sparkring-model-*/pid")}


def ended():
    """Return the only record, or None if it has not ended."""
    records = [run_store.load(path) for path in run_store.saved()]
    return records[0] if len(records) == 1 and records[0].outcome == "finished" else None


def test_a_stream_takes_up_new_checkpoints(spark, tmp_path):
    """A query uses new weights without a restart, and keeps those that it has if there are no better ones."""
    store = checkpoints(tmp_path / "ml")
    save(store, 3, 10.0)
    with streaming(spark, tmp_path, refresh_s=0.05) as add:
        assert add() == [(10.0, 3), (20.0, 3)]
        process = model_processes()
        save(store, 4, 100.0)
        until(lambda: add() == [(100.0, 4), (200.0, 4)], "the new checkpoint is used")
        save(checkpoints(tmp_path / "other"), 5, 1000.0)
        damage(tmp_path / "other", 5)
        (checkpoint,) = (tmp_path / "other").glob("00000005.*")
        checkpoint.rename(tmp_path / "ml" / checkpoint.name)  # it must never be seen undamaged

        def is_noticed() -> bool:
            records = [run_store.load(path) for path in run_store.saved()]
            return any("still predicts with step 4" in notice.text for record in records for notice in record.notices)

        until(is_noticed, "the damaged checkpoint is noticed")
        shutil.rmtree(tmp_path / "ml")
        assert add() == [(100.0, 4), (200.0, 4)]
        assert len(process) == 1
        assert model_processes() == process
        (running,) = [run_store.load(path) for path in run_store.saved()]
        assert not running.outcome
    record = until(ended, "the record has ended")
    for pid in process:
        os.kill(int(pid), signal.SIGTERM)  # as if the executor exited
    until(lambda: not model_processes(), "the model process has ended")
    assert mentions(record.title, "DataFrame", f"{tmp_path / 'ml'}")
    told = [notice.text for notice in record.notices]
    assert [
        mentions(text, "now predicts", f"step {step}")
        for text, step in zip((text for text in told if "now predicts" in text), (3, 4), strict=True)
    ] == [True, True]
    assert sum(mentions(text, "still predicts", "step 4", "00000005") for text in told) == 1
    assert "1 newer checkpoint used" in record.message
    (item,) = record.items.known
    assert (item.state, item.name) == ("finished", f"process {process.pop()} on {item.host}")
    assert item.metrics["step"] == 4
    assert item.metrics["rows"] >= 6
    assert " rows scored" in record.message


def test_versions_of_a_batch(spark, tmp_path):
    """Queries that are not streams, and files, can have the column of versions, too."""
    store = checkpoints(tmp_path / "ml")
    save(store, 3, 10.0)
    frame = spark.sql("SELECT id, array(cast(id AS double)) AS x FROM range(0, 4, 1, 1)")
    scored = sparkring.predict(frame, store, make_model, inputs=["x"], version="step", idle_s=0.1)
    assert scored.schema.simpleString().endswith("prediction:double,step:bigint>")
    assert scored.select("prediction", "step").collect() == [(10.0 * number, 3) for number in range(4)]
    pq.write_table(pa.table({"x": [[1.0], [2.0]]}), tmp_path / "in.parquet")
    sparkring.predict(
        str(tmp_path / "in.parquet"), store, make_model, inputs=["x"], version="step", to=tmp_path / "out", np=-1
    )
    assert pq.read_table(tmp_path / "out").to_pydict() == {
        "x": [[1.0], [2.0]],
        "prediction": [10.0, 20.0],
        "step": [3, 3],
    }


@pytest.mark.parametrize(("options", "evaluations"), [({}, 2), ({"refresh_s": 5}, 1)])
def test_a_filter_sees_the_same_predictions(spark, tmp_path, capsys, options, evaluations):
    """With new checkpoints, a second evaluation of a prediction could have another result."""
    save(checkpoints(tmp_path), 3, 10.0)
    stream = spark.readStream.format("rate").load().selectExpr("array(cast(value AS double)) AS x")
    scored = sparkring.predict(stream, tmp_path, make_model, inputs=["x"], returns="double", **options)
    scored.where("prediction > 5").explain()
    assert capsys.readouterr().out.count("ArrowEvalPython") == evaluations


def test_arguments(spark, tmp_path):
    store = checkpoints(tmp_path / "ml")
    save(store, 3, 10.0)
    frame = spark.sql("SELECT id, array(cast(id AS double)) AS x FROM range(4)")
    stream = spark.readStream.format("rate").load().selectExpr("array(cast(value AS double)) AS x", "1 AS id")

    def predict(data=stream, model=store, make=make_model, **options):
        return sparkring.predict(data, model, make, **{"inputs": ["x"], "returns": "double", **options})

    for wrong in (0, -1, float("nan"), True, "5"):
        with pytest.raises(OptionsError, match=r"refresh_s=.*: expected .*number .*seconds"):
            predict(refresh_s=wrong)
    with pytest.raises(OptionsError, match=r"which=3 selects .*fixed .*leave .*two out"):
        predict(refresh_s=5, which=3)
    with pytest.raises(OptionsError, match=r"only .*streaming DataFrames: leave .*out"):
        predict(frame, refresh_s=5)
    with pytest.raises(OptionsError, match=r"only .*streaming DataFrames: leave .*out"):
        predict(str(tmp_path), refresh_s=5, to=str(tmp_path / "out"))
    with pytest.raises(CheckpointError, match=r"no metric .*set"):
        predict(refresh_s=5, which="best")
    for name, value in {"refresh_s": 5, "version": "step", "key": "net"}.items():
        with pytest.raises(OptionsError, match=rf"{name}=… .*only .*checkpoints.*pass the directory"):
            predict(model=np.sum, make=None, **{name: value})
    with pytest.raises(OptionsError, match=r"also .*name .*column .*predictions"):
        predict(version="Prediction")
    with pytest.raises(OptionsError, match=r"also .*name .*column .*predictions"):
        predict(frame, version="prediction", returns=None)
    with pytest.raises(OptionsError, match=r"already .*column `id`: give .*column .*versions .*'id_2'"):
        predict(version="id")
    with pytest.raises(OptionsError, match="version='': expected the name"):
        predict(version="")


class FakeCluster(SimpleNamespace):
    """A key of the clusters that cannot be reached, of which an earlier test may have left some."""

    __hash__ = object.__hash__


@contextlib.contextmanager
def following(streams):
    """Yield a function that reports as a model process does, while Spark is running the queries in `streams`."""
    session = SimpleNamespace(streams=SimpleNamespace(active=streams))
    cluster = FakeCluster(session=session, address=lambda: Address("127.0.0.1", "127.0.0.1", 0))
    order = queries.watch(cluster, "predict data", "predict(…)")
    with contextlib.closing(dial(order["host"], order["port"], bytes.fromhex(order["secret"]))) as connection:
        yield lambda used: connection.send(ModelUsed(order["column"], "here", 12, 0.5, (), used))


def test_the_record_of_a_stream_ends_with_its_query(monkeypatch):
    """A model process takes up checkpoints a while longer. If another query uses it, there is another record."""
    monkeypatch.setattr(queries, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(queries, "_LAST_REPORT_S", 0.01)
    streams = [SimpleNamespace(id="first")]
    with following(streams) as report:
        report(None)  # the model is being loaded
        report(CheckpointUsed(7, 0.2, 0, 10, 0, "", "first"))
        until(run_store.saved, "the query has a record")
        streams.clear()
        until(ended, "the record has ended")
        report(CheckpointUsed(8, 0.2, 1, 10, 0, "", "first"))
        streams.append(SimpleNamespace(id="second"))
        report(CheckpointUsed(9, 0.2, 2, 30, 0, "", "second"))
        until(lambda: len(run_store.saved()) == 2, "the second query has a record")
    until(lambda: all(run_store.load(path).outcome for path in run_store.saved()), "both records have ended")
    records = sorted(map(run_store.load, run_store.saved()), key=lambda record: record.started)
    for record, step in zip(records, (7, 9), strict=True):
        assert mentions(record.notices[0].text, "here", f"step {step}", "0.2 s", "process 12")


def test_notices_about_checkpoints(monkeypatch):
    """A record says which checkpoint each process uses, but not without a limit."""
    monkeypatch.setattr(serving, "_CHANGES_NOTED", 2)
    with following([]) as report:
        for earlier in range(4):
            problem = "gone" if earlier == 3 else ""
            used = CheckpointUsed(7 + earlier, 0.2, earlier, 10 * earlier, earlier, problem, "")
            report(used)
            report(used)
    record = until(ended, "the record has ended")
    first, second, last = (notice.text for notice in record.notices[:3])
    assert mentions(first, "here", "step 7", "0.2 s", "process 12")
    assert mentions(second, "here", "step 8", "0.2 s", "process 12")
    assert mentions(last, "here", "still", "step 10", "process 12", "gone")
    assert record.message.startswith("30 rows scored in ")
    assert "3 without a prediction" in record.message
    assert "3 newer checkpoints used" in record.message
