"""Predictions: a model scores the rows of a Spark DataFrame or of Parquet files, in one process per machine or GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkring.products import offer

if TYPE_CHECKING:
    from sparkring.engine.predictions.api import Predictions as Predictions
    from sparkring.engine.predictions.api import predict as predict
    from sparkring.engine.predictions.udf import predict_udf as predict_udf

offer(
    __name__,
    {
        "engine.predictions.api": "Predictions predict",
        "engine.predictions.udf": "predict_udf",
    },
)
