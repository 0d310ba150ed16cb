"""Tests of KerasEstimator and TorchEstimator, which are stages of Spark pipelines that train on ranks."""

from __future__ import annotations

import functools
import json
import os
import signal
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions
from rings import shared
from waiting import until

from sparkring.errors import DataError, OptionsError
from sparkring.ml import KerasEstimator, TorchEstimator
from sparkring.ml import model as fitted_models
from sparkring.ml.torch import _Loop

ROWS = """
    SELECT id, (id % 20) / 20D AS a, (id % 7) / 7D AS b, 2 * a - b AS y, id % 5 = 0 AS held, 1 + id % 2 AS weight
    FROM range(0, 400, 1, 2)
"""
COLUMNS = {"feature_cols": ["x"], "label_cols": ["y"], "random_seed": 1}


@pytest.fixture
def frame(spark, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKRING_CACHE", str(tmp_path / "cache"))
    # The processes that hold the models must not outlive the test.
    monkeypatch.setattr(fitted_models, "predict_frame", functools.partial(fitted_models.predict_frame, idle_s=0.3))
    yield spark.sql(ROWS)
    until(lambda: not list(Path(tempfile.gettempdir()).glob("sparkring-model-*")), "no model process is left")


@pytest.fixture
def pair(watch):
    """Start two warm ranks for all fits in this file. PyTorch is imported once for both ranks."""
    return shared("local", watch, 2, imports=("torch",))


def torch_estimator(**params):
    import torch

    def make():
        return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    settings = {"model": make, "optimizer": lambda parameters: torch.optim.Adam(parameters, 0.02), "loss": "mse_loss"}
    return TorchEstimator(**{"np": -2, "batch_size": 16, "epochs": 3, **COLUMNS, **settings, **params})


def keras_estimator():
    import tensorflow as tf

    layers = [tf.keras.layers.Dense(8, "tanh"), tf.keras.layers.Dense(1)]
    return KerasEstimator(
        np=-2, model=tf.keras.Sequential([tf.keras.Input((2,)), *layers]), optimizer=tf.keras.optimizers.Adam(0.02),
        loss="mse", metrics=["mae"], batch_size=16, epochs=3, validation="held", sample_weight_col="weight",
        callbacks=[tf.keras.callbacks.EarlyStopping("val_loss", min_delta=1e9)], **COLUMNS,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.versions("of Keras, PyTorch and pyspark.ml")
@pytest.mark.parametrize(
    "name", ["torch", pytest.param("keras", marks=pytest.mark.extended("library", "the same with torch"))]
)
def test_pipelines(frame, pair, driver, tmp_path, monkeypatch, capfd, name):
    """Each estimator trains on warm ranks. A saved pipeline gives the same predictions in a new process."""
    import torch

    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="x")
    rows = frame.where("id < 3").toPandas()[["a", "b"]].to_numpy(np.float32)
    stage = (
        keras_estimator() if name == "keras" else torch_estimator(validation=0.2, metrics=[torch.nn.functional.l1_loss])
    )
    fitted = Pipeline(stages=[assembler, stage]).fit(frame)
    fitted.save(str(tmp_path / name))
    model, history = fitted.stages[1].getModel(), fitted.stages[1].history
    assert history["loss"][-1] < history["loss"][0]
    said = capfd.readouterr().err
    if name == "keras":
        assert history.keys() >= {"loss", "mae", "val_loss", "val_mae"}
        assert len(history["loss"]) == 2, "stopped early"
        expected = model.predict_on_batch(rows)[:, 0]
        assert "saved with cloudpickle" not in said
    else:
        assert history.keys() == {"loss", "l1_loss", "val_loss", "val_l1_loss"}
        expected = model(torch.from_numpy(rows)).detach().numpy()[:, 0]
        assert said.count("saved with cloudpickle") == 1, "the function of the torch module"
        again = stage.copy({stage.epochs: 1}).fit(assembler.transform(frame))
        assert len(again.getHistory()["loss"]) == 1
        said = capfd.readouterr().err
        assert "reused" in said
        assert "writing the DataFrame" not in said
    torch_estimator(model=torch.nn.Linear(2, 1)).write().save(str(tmp_path / "estimator"))
    # The new Python process uses the Java process of this one, so it need not start another.
    gateway = frame.sparkSession.sparkContext._gateway.gateway_parameters
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", str(gateway.port))
    monkeypatch.setenv("PYSPARK_GATEWAY_SECRET", gateway.auth_token)
    other = driver(f"""
        import functools, json
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway
        from pyspark.ml import PipelineModel
        from pyspark.sql import SparkSession
        from sparkring.ml import TorchEstimator, model

        java = launch_gateway()
        context = java.jvm.JavaSparkContext.fromSparkContext(java.jvm.org.apache.spark.SparkContext.getOrCreate())
        SparkContext(gateway=java, jsc=context, conf=SparkConf(_jconf=context.getConf()))
        model.predict_frame = functools.partial(model.predict_frame, idle_s=0.3)
        frame = SparkSession.builder.getOrCreate().sql({ROWS!r}).where("id < 3")
        scored = PipelineModel.load({str(tmp_path / name)!r}).transform(frame)
        print("found", json.dumps([row.y__output for row in scored.collect()]), flush=True)
        loaded = TorchEstimator.load({str(tmp_path / "estimator")!r})
        print("loaded", loaded.getEpochs(), loaded.getModel().weight.shape[1])
    """)
    text = other.wait()
    found = json.loads(text.partition("found ")[2].partition("\n")[0])
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert "loaded 3 2" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search_with", "options", "metrics"),
    [
        (TrainValidationSplit, {"trainRatio": 0.7}, "validationMetrics"),
        pytest.param(
            CrossValidator,
            {"numFolds": 2},
            "avgMetrics",
            marks=pytest.mark.extended("library", "TrainValidationSplit fits in threads, too"),
        ),
    ],
)
def test_cross_validation(frame, pair, search_with, options, metrics):
    """Fits in several threads run one after another on the warm ranks."""
    rows = VectorAssembler(inputCols=["a", "b"], outputCol="x").transform(frame)
    estimator = torch_estimator(batch_size=8)
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 6]).build()
    evaluator = RegressionEvaluator(predictionCol="y__output", labelCol="y")
    search = search_with(
        estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, parallelism=2, seed=1, **options
    )
    found = search.fit(rows)
    one_epoch, six_epochs = getattr(found, metrics)
    assert six_epochs < one_epoch
    assert len(found.bestModel.history["loss"]) == 6


@pytest.mark.slow
@pytest.mark.extended("repetition", "test_the_next_attempt_goes_on, and test_pipelines ends early by a callback")
def test_a_fit_goes_on_after_a_rank_is_lost(frame, tmp_path, capfd):
    """On Spark, rank 1 is killed in the second epoch, and later a callback ends the training."""
    rows = VectorAssembler(inputCols=["a", "b"], outputCol="x").transform(frame)
    killed = tmp_path / "killed"

    def callback(epoch, metrics):
        from sparkring import world

        if epoch == 2 and world().rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return epoch == 4

    estimator = torch_estimator(np=2, epochs=9, callbacks=[callback], checkpoint_dir=str(tmp_path / "saved"))
    fitted = estimator.fit(rows)
    assert killed.exists()
    assert len(fitted.history["loss"]) == 4
    folder, mark = sorted((tmp_path / "saved").iterdir())
    assert mark.name == f"{folder.name}.finished", "so that the next fit begins anew"
    assert "restart" in capfd.readouterr().out


REFUSED = [
    ({"np": 0}, OptionsError, "num_proc=0"),
    ({"loss": []}, OptionsError, "loss is missing"),
    ({"loss": "mse"}, OptionsError, "loss='mse': expected a function.*such as 'mse_loss'"),
    ({"optimizer": "adam"}, OptionsError, "optimizer='adam': expected an optimizer"),
    ({"validation": 1.5}, OptionsError, "validation=1.5: expected a fraction"),
    ({"output_cols": ["p", "q"]}, OptionsError, "output_cols has 2 entries, but needs 1: one for each of y"),
    ({"feature_cols": ["c"]}, DataError, "feature_cols: the DataFrame has no column `c`: the columns are `id`, `a`"),
    ({"label_cols": ["z"]}, DataError, "label_cols: the DataFrame has no column `z`"),
    ({"validation": "text"}, DataError, "validation: column `text` is string"),
    ({"feature_cols": ["text"]}, DataError, "feature_cols: column `text` is string.*needs numbers, arrays"),
    ({"feature_cols": ["gaps", "lists"]}, DataError, "column `gaps` has 100 nulls or empty arrays .*dropna"),
    (
        {"feature_cols": ["lists"]},
        DataError,
        "column `lists` has 100 nulls or empty arrays.*size\\(`lists`\\) > 0 AND forall",
    ),
    ({"feature_cols": ["vector"]}, DataError, "column `vector` has 100 nulls or empty arrays"),
    ({"batch_size": 500}, DataError, "for training: 400. With 2 ranks, each rank gets 200 of them, which do not fill"),
    ({"validation": "none"}, DataError, "validation='none' leaves 0 rows for validation"),
    ({"input_shapes": [[-1, 3]]}, DataError, r"a row of `x` has the shape \[2\], which cannot become \[3\]"),
    ({"rows": "y > 100"}, DataError, "has no rows"),
]


def test_what_is_refused_before_the_launch(frame):
    some = "IF(id % 4 = 0, NULL, a)"
    rows = frame.selectExpr(
        "*", "array(a, b) AS x", "'t' AS text", "false AS none", f"{some} AS gaps", f"array(a, {some}) AS lists"
    )
    rows = rows.withColumn("vector", functions.when(rows.gaps.isNotNull(), array_to_vector("x")))
    for params, error, message in REFUSED:
        estimator = torch_estimator(**{name: value for name, value in params.items() if name != "rows"})
        with pytest.raises(error, match=message):
            estimator.fit(rows.where(params.get("rows", "true")))


def test_numbers_for_a_model_that_needs_columns():
    """If a model cannot use an array [rows], the error says how it gets one of shape [rows, 1]."""
    import torch

    loop = SimpleNamespace(_training=SimpleNamespace(feature_cols=["x", "image"]), _device="cpu", _dtype=torch.float32)
    batch = {"x": torch.zeros(4), "image": torch.zeros(4, 8, 8)}
    with pytest.raises(OptionsError, match=r"mat1 and mat2.*set input_shapes=\[\[-1, 1\], \[-1, 8, 8\]\]"):
        _Loop._measured(loop, lambda x, image: torch.nn.Linear(1, 1)(x), batch)


def test_parameters():
    """Parameters have the same names as in horovod.spark, and the methods of pyspark's Params."""
    estimator = KerasEstimator(num_proc=4, batch_size=8, label_cols="y")
    assert (estimator.getNumProc(), estimator.getBatchSize(), estimator.getLabelCols()) == (4, 8, ["y"])
    assert estimator.setEpochs(7) is estimator
    assert "epochs: the number of epochs (default: 1, current: 7)" in estimator.explainParams()
    assert estimator.copy({estimator.epochs: 2}).getEpochs() == 2
    with pytest.raises(TypeError, match="batch_size"):
        estimator.setBatchSize("many")


def test_parameters_of_horovod_spark(capsys):
    """What only says how to read or store is not used, and is named once. What changes the training is refused."""
    backend = SimpleNamespace(num_processes=lambda: 4)
    estimator = KerasEstimator(backend=backend, store=object(), partitions_per_process=10, train_steps_per_epoch=3)
    assert (estimator.getNumProc(), estimator.getTrainStepsPerEpoch()) == (4, 3)
    [line] = capsys.readouterr().err.splitlines()
    assert all(name in line for name in ("KerasEstimator", "store", "partitions_per_process", "checkpoint_dir"))
    assert "train_steps_per_epoch" not in line
    TorchEstimator(backward_passes_per_step=1)
    with pytest.raises(OptionsError, match=r"TorchEstimator.*backward_passes_per_step"):
        TorchEstimator(backward_passes_per_step=2)
    for make in (KerasEstimator, KerasEstimator().setParams):
        with pytest.raises(TypeError, match=r"KerasEstimator.*'batches'"):
            make(batches=3)


def test_rows_are_changed_before_training():
    from sparkring.ml.training import TransformRows

    batch = {"x": np.ones((3, 2), np.float32), "y": np.arange(3.0)}
    changed = TransformRows(lambda row: {**row, "x": row["x"][:1], "y": -row["y"], "more": 1}, None, "KerasEstimator")
    assert {name: values.tolist() for name, values in changed(batch).items()} == {
        "x": [[1.0]] * 3,
        "y": [0.0, -1.0, -2.0],
    }
    for wrong in (lambda row: None, lambda row: {"x": row["x"]}):
        with pytest.raises(OptionsError, match="KerasEstimator"):
            TransformRows(wrong, None, "KerasEstimator")(batch)


def test_some_steps_of_changed_rows(frame, pair, tmp_path):
    """The estimator trains on two batches of an epoch only, and on labels that are 9."""
    import torch

    steps = tmp_path / "steps"

    def make_optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=0.0)

        def count(*_):
            with steps.open("a") as file:
                file.write("x")

        made.register_step_post_hook(count)
        return made

    fitted = torch_estimator(
        epochs=2,
        optimizer=make_optimizer,
        train_steps_per_epoch=2,
        transformation_fn=lambda row: {"x": 0 * row["x"], "y": 0 * row["y"] + 9},
    ).fit(frame.selectExpr("array(a, b) AS x", "y"))
    assert len(steps.read_text()) == 2 * 2 * 2, "two steps of two ranks in two epochs"
    assert fitted.history["loss"][0] > 50, "9² is 81, and the labels themselves are below 2"


KEYS = """
    import tensorflow as tf
    import torch
    from sparkring.ml import KerasEstimator, TorchEstimator
    from sparkring.ml.estimator import _meaning

    def net(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(2, 1)

    def stopping(*args, **options):
        return KerasEstimator(callbacks=[tf.keras.callbacks.EarlyStopping(*args, **options)], optimizer="adam")

    def with_loss(loss):
        return TorchEstimator(model=net(1), loss=loss)

    estimators = [
        with_loss(torch.nn.CrossEntropyLoss()), with_loss(torch.nn.CrossEntropyLoss(label_smoothing=0.2)),
        with_loss(torch.nn.HuberLoss()), with_loss([torch.nn.HuberLoss(delta=5.0)]),
        TorchEstimator(model=net(2), loss=torch.nn.HuberLoss()),
        stopping("val_loss", patience=3), stopping("loss", patience=30), stopping("loss", patience=3),
    ]
    for estimator in estimators:
        print("KEY", _meaning(estimator), flush=True)
"""


def test_keys_of_fits(driver, capsys, watch):
    """Losses, callbacks and weights that differ make a different fit. The same fit has the same key in each kernel."""
    other = driver(KEYS)
    watch.except_for(lambda: exec(textwrap.dedent(KEYS), {"__name__": "__main__"}))  # TensorFlow leaves a file open
    keys = [line for line in capsys.readouterr().out.splitlines() if line.startswith("KEY")]
    assert len(keys) == len(set(keys)) == 8
    assert keys == [line for line in other.wait().splitlines() if line.startswith("KEY")]
