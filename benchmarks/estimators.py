"""How long a Keras estimator takes to fit on a Spark DataFrame, and to fit on it again, compared with horovod.spark."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reading
from harness import US, Ear, Effort, Goal, Measured, Row, Turns, spark_session
from peers import horovod_estimator, printing_to

import sparkring.ml

PEER = "horovod.spark, with an adapted store"  # see horovod_estimator()
HALF, ALREADY_WRITTEN = Goal(0.5, ratio=True), Goal(0.3, ratio=True)
EPOCHS = 2
MOST_TURNS = 3


def keras(effort: Effort) -> list[Row]:
    """Fit a small dense network on a column of vectors, with two Spark tasks. Each turn has data of its own."""
    rows = 2_000 if effort.quick else 20_000
    spark_session()
    turns = Turns(
        min(effort.runs, MOST_TURNS),
        {US: functools.partial(_fits, _ours, rows), PEER: functools.partial(_fits, horovod_estimator, rows)},
    )
    what = f"KerasEstimator, {rows:,} rows × 10 numbers, {EPOCHS} epochs on 2 Spark tasks"
    return [
        turns.row(f"{what}: first fit", "s", "first", PEER, goal=HALF),
        turns.row("… second fit on the same data", "s", "second", PEER, goal=ALREADY_WRITTEN),
    ]


def _fits(make_estimator: Callable[..., Any], rows: int) -> Measured:
    """Fit twice, with a new model each time. `make_estimator` gets a folder for the data and the parameters."""
    import tensorflow as tf
    from pyspark.ml.feature import VectorAssembler
    from pyspark.sql import functions

    took = []
    with reading.data_sets(rows, 0) as folder, printing_to(Ear("nothing")):
        read = spark_session().read.parquet(str(folder / "rows"))
        label = sum((functions.col(name) for name in read.columns), functions.lit(0)).cast("float")
        frame = VectorAssembler(inputCols=read.columns, outputCol="x").transform(read).select("x", label.alias("y"))
        for _ in range(2):
            layers = [tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(1)]
            estimator = make_estimator(
                folder,
                model=tf.keras.Sequential([tf.keras.Input((10,)), *layers]),
                optimizer=tf.keras.optimizers.Adam(),
                loss="mse",
                feature_cols=["x"],
                label_cols=["y"],
                batch_size=100,
                epochs=EPOCHS,
                verbose=0,
            )
            begun = time.perf_counter()
            fitted = estimator.fit(frame)
            took.append(time.perf_counter() - begun)
            losses = fitted.getHistory()["loss"]
            assert len(losses) == EPOCHS, losses
    first, second = took
    return {"first": first, "second": second}


def _ours(folder: Path, **settings: Any) -> Any:
    return sparkring.ml.KerasEstimator(np=2, **settings)  # writes the data to SPARKRING_CACHE
