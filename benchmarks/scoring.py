"""How fast a small model scores the rows of a DataFrame, compared with pyspark's predict_batch_udf()."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import reading
from harness import US, Effort, Goal, Measured, Row, Turns, spark_session

import sparkring

PEER, SPARK_ALONE = "predict_batch_udf", "Spark alone: a pandas UDF that returns zeros"
FASTER = Goal(3, at_least=True, ratio=True)


def small_net(effort: Effort) -> list[Row]:
    """A net of 32 hidden units and 1,000,000 rows of ten numbers, in ten columns and in a column of arrays."""
    rows = 100_000 if effort.quick else 1_000_000
    found = []
    with reading.data_sets(rows, 0) as folder:
        session = spark_session()
        frame = session.read.parquet(str(folder / "rows"))
        arrays = frame.selectExpr(f"array({', '.join(frame.columns)}) AS x")
        arrays.write.parquet(str(folder / "arrays"))
        frames = {"ten columns": frame, "a column of arrays": session.read.parquet(str(folder / "arrays"))}
        for name, each in frames.items():
            cases = {US: _ours(each), PEER: _theirs(each), SPARK_ALONE: _zeros(each)}
            turns = Turns(effort.runs, {who: functools.partial(_measured, case, rows) for who, case in cases.items()})
            told = f"{rows:,} rows × 10 numbers, {name}: a small net's predictions"
            found += [
                turns.row(told, "rows/s", "rate", PEER, goal=FASTER),
                turns.row("… compared with Spark alone", "rows/s", "rate", SPARK_ALONE),
            ]
    return found


def _measured(scored: Any, rows: int) -> Measured:
    begun = time.perf_counter()
    scored.write.format("noop").mode("overwrite").save()
    return {"rate": rows / (time.perf_counter() - begun)}


def _net() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).eval()


def _ours(frame: Any) -> Any:
    inputs = {"x": frame.columns}
    return sparkring.predict(frame, _net(), inputs=inputs).select("prediction")


def _theirs(frame: Any) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import functions
    from pyspark.sql.types import FloatType

    def make() -> Any:
        import numpy
        import torch

        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).eval()

        def predict(x: Any) -> Any:
            with torch.inference_mode():
                return net(torch.from_numpy(numpy.ascontiguousarray(x, dtype="float32"))).numpy()[:, 0]

        return predict

    udf = predict_batch_udf(make, return_type=FloatType(), batch_size=1024, input_tensor_shapes=[[10]])
    single = len(frame.columns) == 1
    return frame.select(udf(frame.columns[0] if single else functions.struct(*frame.columns)))


def _zeros(frame: Any) -> Any:
    import pandas
    from pyspark.sql.functions import pandas_udf

    def zeros(batches: Any) -> Any:
        import numpy
        import pandas

        for batch in batches:
            first = batch[0] if isinstance(batch, tuple) else batch
            yield pandas.Series(numpy.zeros(len(first), numpy.float32))

    zeros.__annotations__ = {"batches": Iterator[pandas.Series], "return": Iterator[pandas.Series]}
    return frame.select(pandas_udf(zeros, "float")(*frame.columns))
