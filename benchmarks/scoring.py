"""How fast models score a DataFrame, and how much memory that takes, compared with other ways in Spark."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reading
from harness import US, Effort, Goal, Measured, Row, Turns, say, script, spark_session

import sparkring

UDF = f"{US}'s predict_udf"
PEER, BY_HAND, ALONE = "predict_batch_udf", "mapInPandas", "PyTorch alone, one process"
ZEROS = "a pandas UDF of the same columns that returns zeros"
ZEROS_OF_ONE = "a pandas UDF of one integer that returns zeros"
ZEROS_OF_ARROW = "mapInArrow of one integer that returns zeros"
SCAN = "Spark reads the columns, without Python"
FLOORS = ZEROS, ZEROS_OF_ONE, ZEROS_OF_ARROW, SCAN
FASTER, NO_SLOWER = Goal(3, at_least=True, ratio=True), Goal(1, at_least=True, ratio=True)
SOON, ONE_MODEL = Goal(2), Goal(520)
MODEL_ALONE, AS_FAST = "the model alone, one process", Goal(0.98, at_least=True, ratio=True)
BATCH, LARGE_BATCH = 1024, 32
PIXELS = 32 * 32 * 3
LARGE, SMALL = 100_000_000, 1_000  # the parameters of the models whose memory is measured, of 4 bytes each
MOST_TURNS = 3
Case = Callable[[], Measured]


def small_net(effort: Effort) -> list[Row]:
    """Score rows of ten numbers, in ten columns or in arrays, and images, with 32 hidden units. Measure memory, too."""
    rows, images = (100_000, 2_000) if effort.quick else (1_000_000, 20_000)
    from pyspark.sql import functions

    found = []
    with reading.data_sets(rows, images) as folder:
        session = spark_session()
        frame = session.read.parquet(str(folder / "rows"))
        arrays = frame.selectExpr(f"array({', '.join(frame.columns)}) AS x")
        arrays.write.parquet(str(folder / "arrays"))
        numbers = f"{rows:,} rows × 10 numbers"
        for what, name, width in (
            (f"{numbers}, ten columns", "rows", 10),
            (f"{numbers}, a column of arrays", "arrays", 10),
            (f"{images:,} images of 3 kB", "images", PIXELS),
        ):
            each = session.read.parquet(str(folder / name))
            size = images if name == "images" else rows
            cases: dict[str, Case] = {
                US: functools.partial(_predicted, each, width, size, _scored(each, width)),
                UDF: functools.partial(_written, _with_udf(each, width, sparkring.predict_udf), size),
                ALONE: functools.partial(_alone, folder / name, width, size),
                SCAN: functools.partial(_written, each, size),
            }
            with _other_workers():
                number = each.select(functions.col("_metadata.row_index"))
                for peer, frame_of_peer in {
                    PEER: _with_udf(each, width, _peer()),
                    BY_HAND: _by_hand(each, width),
                    ZEROS: _zeros(each),
                    ZEROS_OF_ONE: _zeros(number),
                    ZEROS_OF_ARROW: _zeros_of_arrow(number),
                }.items():
                    cases[peer] = functools.partial(_written, frame_of_peer, size)
            for who, case in cases.items():  # in the first run, workers start and import what they need
                say(f"first run: {who} …")
                case()
            turns = Turns(min(effort.runs, MOST_TURNS), cases)
            found += [
                turns.row(f"{what}: a small net's predictions", "rows/s", "rate", PEER, goal=FASTER),
                *(turns.row(f"… compared with {peer}", "rows/s", "rate", peer) for peer in (BY_HAND, ALONE)),
                *(turns.row("… compared with what Spark needs", "rows/s", "rate", floor) for floor in FLOORS),
                turns.row("… with predict_udf()", "rows/s", "rate", PEER, us=UDF, goal=NO_SLOWER),
                turns.row("… predict() returns after", "s", "made", goal=SOON),
            ]
    cases = {US: functools.partial(_memory, "sparkring"), PEER: functools.partial(_memory, "peer")}
    told = "memory of all processes on 4 slots with a model of 400 MB, minus that with a small model"
    return [*found, Turns(1, cases).row(told, "MB", "grown", PEER, goal=ONE_MODEL)]


def large_net(effort: Effort) -> list[Row]:
    """Score images with a net of 11 million parameters in two tasks. Each contestant has two torch threads in all.

    The model process uses both threads for one batch at a time, and so does the model alone. Each task of the peer uses
    one thread.
    """
    import numpy
    import pyarrow
    import pyarrow.parquet
    import resnet
    from pyspark.sql.types import FloatType

    count = LARGE_BATCH * resnet.SLOTS * (1 if effort.quick else 8)
    pixels = numpy.random.default_rng(0).integers(0, 256, (count, *resnet.SHAPE), "uint8")
    with tempfile.TemporaryDirectory(prefix=".scoring-", dir=os.environ["SPARKRING_HOME"]) as folder:
        for number, images in enumerate(numpy.split(pixels, resnet.SLOTS)):
            table = pyarrow.table({"image": [image.tobytes() for image in images]})
            pyarrow.parquet.write_table(table, Path(folder, f"part-{number}.parquet"))
        frame = spark_session().read.parquet(folder)
        assert frame.rdd.getNumPartitions() == resnet.SLOTS
        scored = sparkring.predict(
            frame,
            resnet.net(),
            inputs={"x": ["image"]},
            raw={"image": ("uint8", resnet.SHAPE)},
            transform=resnet.as_floats,
            batch_size=LARGE_BATCH,
        )
        with _other_workers():
            udf = _peer()(resnet.make_predict, return_type=FloatType(), batch_size=LARGE_BATCH)
            by_peer = frame.select(udf("image"))
        cases: dict[str, Case] = {
            US: functools.partial(_written, scored.select("prediction"), count),
            PEER: functools.partial(_written, by_peer, count),
            MODEL_ALONE: functools.partial(_model_alone, resnet.net(), resnet.as_floats({"x": pixels})["x"]),
        }
        for who, case in cases.items():
            say(f"first run: {who} …")
            case()
        turns = Turns(min(effort.runs, MOST_TURNS), cases)
    what = f"{count} images of 3 × 64 × 64, a ResNet of 11 million parameters, 2 tasks, 2 torch threads in all"
    return [
        turns.row(what, "rows/s", "rate", PEER),
        turns.row("… compared with the model alone, rows in memory", "rows/s", "rate", MODEL_ALONE, goal=AS_FAST),
    ]


def _model_alone(model: Any, images: Any) -> Measured:
    """Score an array in this process."""
    import torch

    batches = torch.from_numpy(images).split(LARGE_BATCH)
    begun = time.perf_counter()
    with torch.inference_mode():
        done = sum(len(model(batch).numpy()) for batch in batches)
    return {"rate": done / (time.perf_counter() - begun)}


def _predicted(frame: Any, width: int, rows: int, scored: Any) -> Measured:
    """Time a call of predict(), and the writing of `scored`, whose model is in memory, as the peers' models are."""
    begun = time.perf_counter()
    _scored(frame, width)
    made = time.perf_counter() - begun
    return {"made": made, **_written(scored, rows)}


def _scored(frame: Any, width: int) -> Any:
    inputs, raw = {"x": frame.columns}, {}
    if width == PIXELS:
        inputs, raw = {"x": ["image"]}, {"image": ("uint8", (PIXELS,))}
    scored = sparkring.predict(
        frame, _net(width), inputs=inputs, raw=raw, transform=_as_floats if raw else None, batch_size=BATCH
    )
    return scored.select("prediction")


def _as_floats(batch: Any) -> Any:
    return {"x": batch["x"].astype("float32")}


def _written(scored: Any, rows: int) -> Measured:
    begun = time.perf_counter()
    scored.write.format("noop").mode("overwrite").save()
    return {"rate": rows / (time.perf_counter() - begun)}


def _net(width: int) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).eval()


def _make_predict(width: int) -> Callable[[], Callable[[Any], Any]]:
    """Return a function that makes a function of an array, for all contestants except predict().

    The function contains everything that it needs, since Spark's workers cannot import this module.
    """

    def make() -> Any:
        import numpy
        import torch

        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).eval()

        def predict(x: Any) -> Any:
            if x.dtype == object:
                x = numpy.frombuffer(b"".join(x), "uint8").reshape(len(x), width)
            with torch.inference_mode():
                return net(torch.from_numpy(numpy.ascontiguousarray(x, dtype="float32"))).numpy()[:, 0]

        return predict

    return make


def _peer() -> Any:
    from pyspark.ml.functions import predict_batch_udf

    return predict_batch_udf


def _with_udf(frame: Any, width: int, udf: Any) -> Any:
    from pyspark.sql import functions
    from pyspark.sql.types import FloatType

    shapes = {} if width == PIXELS else {"input_tensor_shapes": [[width]]}
    made = udf(_make_predict(width), return_type=FloatType(), batch_size=BATCH, **shapes)
    columns = [name for name in frame.columns if name != "label"]
    return frame.select(made(columns[0] if len(columns) == 1 else functions.struct(*columns)))


def _by_hand(frame: Any, width: int) -> Any:
    make, batch_size = _make_predict(width), BATCH

    def score(batches: Any) -> Any:
        import numpy
        import pandas

        predict = make()
        for batch in batches:
            found = []
            for begin in range(0, len(batch), batch_size):
                part = batch.iloc[begin : begin + batch_size]
                column = part.iloc[:, 0].to_numpy()
                lists = part.shape[1] == 1 and not isinstance(column[0], bytes | bytearray)
                found.append(
                    predict(numpy.stack(column) if lists else column if part.shape[1] == 1 else part.to_numpy())
                )
            yield pandas.DataFrame({"prediction": numpy.concatenate(found)})

    return frame.mapInPandas(score, "prediction float")


def _alone(folder: Path, width: int, rows: int) -> Measured:
    """Score the same files in this process. The time includes decoding them."""
    import numpy as np
    import pyarrow.dataset as ds

    predict = _make_predict(width)()
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    begun, done = time.perf_counter(), 0
    for batch in ds.dataset(folder, format="parquet").to_batches(batch_size=BATCH):
        column = batch.column(0)
        if width == PIXELS:
            x = column.to_numpy(zero_copy_only=False)
        elif batch.num_columns == 1:
            x = column.flatten().to_numpy(zero_copy_only=False).reshape(len(batch), width)
        else:
            x = np.stack([each.to_numpy() for each in batch.columns], axis=1)
        done += len(predict(x)) if len(batch) else 0
    assert done == rows, done
    return {"rate": rows / (time.perf_counter() - begun)}


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


def _zeros_of_arrow(frame: Any) -> Any:
    def zeros(batches: Any) -> Any:
        import numpy
        import pyarrow

        for batch in batches:
            made = pyarrow.array(numpy.zeros(len(batch), numpy.float32))
            yield pyarrow.RecordBatch.from_arrays([made], names=["prediction"])

    return frame.mapInArrow(zeros, "prediction float")


@contextlib.contextmanager
def _other_workers() -> Iterator[None]:
    """A context whose UDFs run in Python workers that sparkring does not use, because it lets tasks begin sooner there.

    Spark has separate workers for each environment.
    """
    environment = spark_session().sparkContext.environment
    environment["CONTESTANT"] = "peer"
    try:
        yield
    finally:
        del environment["CONTESTANT"]


def _memory(contestant: str) -> Measured:
    """Score with a large and a small model, each in a Spark of its own, so that no other model is in memory."""
    large, small = (_memory_mb(contestant, size) for size in (LARGE, SMALL))
    return {"grown": large - small}


def _memory_mb(contestant: str, size: int) -> float:
    command = [sys.executable, str(script("scoring_memory")), contestant, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{contestant}: {done.stderr[-2000:]}")
    found: float = json.loads(done.stdout.splitlines()[-1])
    return found
