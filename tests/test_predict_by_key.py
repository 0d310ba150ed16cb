"""predict() with the checkpoints of %%stream with --by: each row is scored by the model of its own key."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from waiting import until

import sparkring
from sparkring.checkpointing.store import checkpoints
from sparkring.engine.predictions.settings import Settings
from sparkring.errors import DataError, OptionsError
from sparkring.worker.model.outputs import PredictedColumn
from sparkring.worker.model.scorer import RowsError, Scorer

torch = pytest.importorskip("torch")
FACTORS = {"a": 1.0, "b": 10.0, "c": -3.0}
OUTPUT = PredictedColumn("prediction", pa.float32(), "float", False)


def make_model():
    return torch.nn.Linear(1, 1, bias=False)


def saved(folder, factors, by=("model_id",)):
    """Save what a rank saves: a model for each key, which multiplies by the key's factor."""
    states = {}
    for number, factor in enumerate(factors.values()):
        model = make_model()
        torch.nn.init.constant_(model.weight, factor)
        states[str(number)] = {"model": model, "seen": number}
    state = {"state": states, "by": list(by), "keys": list(factors), "first": {}, "position": ""}
    checkpoints(folder, sharded=True, background=False).save(3, state)
    return folder


def table(keys, **more):
    return pa.table({"x": np.arange(1, len(keys) + 1, dtype=np.float32), "model_id": keys, **more})


@pytest.fixture
def folder(tmp_path):
    return str(saved(tmp_path / "run", FACTORS))


def scorer(folder, **options):
    """Return the Scorer of predict() with these options, and the columns that it reads."""
    settings = Settings(folder, **{"inputs": {"x": ["x"]}, "make_model": make_model, "key": "model_id", **options})
    inputs, source = settings.described("the data"), settings.source()
    return Scorer(**settings.scorer(source, inputs, (OUTPUT,))), settings.used


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_each_row_by_its_own_model(folder, batch_size):
    """Rows keep their order, however the keys are mixed within a batch."""
    score, used = scorer(folder, batch_size=batch_size)
    keys = ["b", "a", "c", "c", "b", "a", "b"]
    assert used == ("x", "model_id")
    predictions = score.score(table(keys).select(used)).column(0).to_pylist()
    assert predictions == [FACTORS[key] * number for number, key in enumerate(keys, 1)]


def test_a_transform_does_not_get_the_keys(folder):
    def double(batch):
        assert batch.keys() == {"x"}
        return {"x": batch["x"] * 2}

    score, used = scorer(folder, transform=double)
    assert score.score(table(["a", "b"]).select(used)).column(0).to_pylist() == [2, 40]


def test_several_columns(tmp_path):
    """The columns of the data may have other names than those of the stream."""
    folder = saved(tmp_path / "run", {("a", 1): 2.0, ("a", 2): 5.0}, by=("store", "item"))
    score, used = scorer(str(folder), key=["shop", "number"])
    rows = pa.table({"x": np.ones(3, np.float32), "shop": ["a"] * 3, "number": pa.array([2, 1, 2], pa.int32())})
    assert score.score(rows.select(used)).column(0).to_pylist() == [5, 2, 5]


def test_a_key_without_a_state(folder):
    """The error names the row and the key; with on_error="null", only the rows of this key are null."""
    score, used = scorer(folder)
    with pytest.raises(RowsError, match=r"model_id = 'z': .*'a', 'b', 'c'") as caught:
        score.score(table(["a", "z"]).select(used))
    assert caught.value.row == 1
    score, used = scorer(folder, on_error="null")
    assert score.score(table(["b", "z", "a"]).select(used)).column(0).to_pylist() == [10, None, 3]


def test_what_key_means(folder, tmp_path):
    """With a model for each key, it names their columns; otherwise, it is the name of a value."""
    for key in (None, ["a", "b"]):
        with pytest.raises(OptionsError, match=r"each value of model_id\b.* key='model_id'"):
            _ = Settings(folder, ["x"], make_model, key=key).used
    checkpoints(tmp_path / "single", background=False).save(0, {"net": make_model(), "other": make_model()})
    settings = Settings(str(tmp_path / "single"), ["x"], make_model, key="net")
    assert (settings.used, settings.key_columns) == (("x",), ())
    assert isinstance(settings.source().load(), torch.nn.Linear)
    with pytest.raises(OptionsError, match="a single state"):
        _ = Settings(str(tmp_path / "single"), ["x"], make_model, key=["net"]).used


def test_files(folder, tmp_path):
    """A model process scores files; the first rows show a key without a state before it is started."""
    (tmp_path / "data").mkdir()
    pq.write_table(table(["a", "c"] * 8), tmp_path / "data" / "0.parquet")
    options = {"inputs": {"x": ["x"]}, "key": "model_id", "np": -1}
    done = sparkring.predict(tmp_path / "data", folder, make_model, to=tmp_path / "to", version="step", **options)
    rows = pq.read_table(done.path).to_pylist()
    assert [row["prediction"] for row in rows] == [FACTORS[row["model_id"]] * row["x"] for row in rows]
    assert {row["step"] for row in rows} == {3}
    pq.write_table(table(["a", "z"]), tmp_path / "data" / "0.parquet")
    with pytest.raises(DataError, match="model_id = 'z'"):
        sparkring.predict(tmp_path / "data", folder, make_model, to=tmp_path / "other", **options)
    until(lambda: not list(Path(tempfile.gettempdir()).glob("sparkring-model-*")), "no model process is left")


def test_a_dataframe(spark, folder):
    """So do Spark's tasks, whose rows have keys in a column that the model does not use."""
    pairs = [(float(n), key) for n, key in enumerate("abcab")]
    frame = spark.createDataFrame(pairs, "x float, model_id string").coalesce(1)
    scored = sparkring.predict(frame, folder, make_model, inputs={"x": ["x"]}, key="model_id", idle_s=0.3)
    rows = scored.collect()
    assert [row.prediction for row in rows] == [FACTORS[row.model_id] * row.x for row in rows]
    assert scored.columns == ["x", "model_id", "prediction"]
    until(lambda: not list(Path(tempfile.gettempdir()).glob("sparkring-model-*")), "no model process is left")
