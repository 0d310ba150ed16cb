"""What a micro-batch of a stream costs beyond the step itself, how many rows a stream trains on, and how it grows.

The peers run in foreachBatch(): TorchDistributor starts two processes for each micro-batch, and a plain loop trains on
the driver. The time of the step itself is measured in a loop of its own, on the same ranks or on the driver.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import US, Case, Ear, Effort, Goal, Measured, Row, Turns, cell, notebook, run_cell, spark_session
from peers import printing_to

WIDE, SAVED, SPARK, SPARK_SAVED = f"{US}, wide", f"{US}, saved", f"{US}, Spark", f"{US}, Spark, saved"
DRIVER, DISTRIBUTOR = "on the driver", "TorchDistributor, local"
BEYOND = Goal(50)
ROWS, COLUMNS = 64, 3
SKIPPED = 10  # the first micro-batches, in which Java compiles its code
TURNS = 3
STEPS = 300  # of the loop that measures the step itself
MANY_ROWS, MANY_COLUMNS = 100_000, 10
TINY, WIDTH = 16, 256  # of the model
SMALL_GROWTH = Goal(10)

TRAIN = """
times.append(time.perf_counter())
loss = step(model, optimizer, batch["x"], batch["y"])
"""
ALONE = f"""
began = time.perf_counter()
for _ in range({STEPS}):
    step(model, optimizer, x, y)
(time.perf_counter() - began) / {STEPS}
"""

Rows = dict[str, Any]


# ── Small micro-batches ───────────────────────────────────────────────────────


def small(effort: Effort) -> list[Row]:
    """Measure the time per micro-batch minus the time of the step alone."""
    from_spark, from_iterator = (SKIPPED + 10, 50) if effort.quick else (SKIPPED + 40, 500)
    spark_session()
    with tempfile.TemporaryDirectory(prefix=".streams-", dir=os.environ["SPARKRING_HOME"]) as home:
        files = Path(home, "files")
        _write_files(files, from_spark, ROWS, COLUMNS)
        _write_files(Path(home, "few"), 4, ROWS, COLUMNS)
        of_iterator, of_spark = functools.partial(_items, from_iterator), functools.partial(_from_files, files)
        saving = functools.partial(_saving, Path(home))
        cases: dict[str, Case] = {
            US: lambda: _beyond(of_iterator(), from_iterator),
            SAVED: lambda: _beyond(of_iterator(), from_iterator, saving()),
            SPARK: lambda: _beyond(of_spark(), from_spark),
            SPARK_SAVED: lambda: _beyond(of_spark(), from_spark, saving()),
            DRIVER: lambda: _driver_beyond(of_spark()),
            DISTRIBUTOR: lambda: _distributor_beyond(_from_files(Path(home, "few")), Path(home)),
        }
        with _gang(COLUMNS, ROWS):
            turns = Turns(min(effort.runs, TURNS), cases)
    what = f"micro-batch of {ROWS} rows × {COLUMNS} float32, 2 warm ranks, {{}}: time beyond the step itself"
    return [
        turns.row(what.format("from an iterator"), "ms", "beyond", DISTRIBUTOR, goal=BEYOND),
        turns.row("… with --checkpoint-dir", "ms", "beyond", DISTRIBUTOR, us=SAVED, goal=BEYOND),
        turns.row(what.format("from Spark"), "ms", "beyond", DISTRIBUTOR, us=SPARK, goal=BEYOND),
        turns.row("… compared with foreachBatch() that trains on the driver", "ms", "beyond", DRIVER, us=SPARK),
        turns.row("… with --checkpoint-dir", "ms", "beyond", DRIVER, us=SPARK_SAVED, goal=BEYOND),
        turns.row("… within the function of foreachBatch(), all micro-batches: collecting the rows, the cell", "ms",
                  "ours", us=SPARK),
        turns.row("… the same with --checkpoint-dir: also saving the state", "ms", "ours", us=SPARK_SAVED),
    ]  # fmt: skip


def _beyond(stream: Any, count: int, options: str = "") -> Measured:
    """Train on `count` micro-batches. Return the milliseconds per micro-batch beyond the step.

    `ours` leaves out the time between two calls of the function that Spark calls for each micro-batch. It includes the
    Spark job that computes the rows, and the first micro-batches.
    """
    alone = run_cell(f"%%torchrun\ntimes = []\n{ALONE}").value
    record = _trained(stream, count, options)
    times = run_cell("%%ranks 0\ntimes").value
    assert len(times) == count
    stream_record = record.stream
    busy_s = stream_record.busy_s / stream_record.batches
    return {"beyond": 1000 * (_each(times) - alone), "ours": 1000 * (busy_s - alone)}


def _trained(stream: Any, count: int, options: str = "", meanwhile: Callable[[Any], None] | None = None) -> Any:
    """Train on the first `count` micro-batches of a stream, end the stream, and return its record."""
    notebook().user_ns["stream"] = stream
    run = run_cell(f"%%stream stream --quiet {options}\n{TRAIN}")
    while not run.done and (run.record.stream is None or run.record.stream.batches < count):
        if meanwhile is not None:
            meanwhile(run.record)
        time.sleep(0.05)
    run.stop()
    return run.result().record


def _driver_beyond(stream: Any) -> Measured:
    """Train on the driver, with what toPandas() returns."""
    names = _names()
    model, optimizer = names["make"](COLUMNS)
    times: list[float] = []

    def train(batch: Any, batch_id: int) -> None:
        times.append(time.perf_counter())
        names["step"](model, optimizer, *_arrays(batch))

    _foreach_batch(stream, train)
    x, y = _rows(0, ROWS, COLUMNS).values()
    began = time.perf_counter()
    for _ in range(STEPS):
        names["step"](model, optimizer, x, y)
    return {"beyond": 1000 * (_each(times) - (time.perf_counter() - began) / STEPS)}


def _distributor_beyond(stream: Any, home: Path) -> Measured:
    """Start two processes for each micro-batch. The model is in a file, since the processes end with the batch."""
    import torch
    from pyspark.ml.torch.distributor import TorchDistributor

    names, saved = _names(), str(home / "model.pt")
    torch.save(names["make"](COLUMNS)[0].state_dict(), saved)
    times: list[float] = []
    alone: list[float] = []

    def train(batch: Any, batch_id: int) -> None:
        times.append(time.perf_counter())
        distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
        alone.append(distributor.run(names["step_of_new_ranks"], saved, *_arrays(batch)))

    with printing_to(Ear("nothing")):
        _foreach_batch(stream, train)
    each = (times[-1] - times[0]) / (len(times) - 1)
    return {"beyond": 1000 * (each - sum(alone) / len(alone))}


def _foreach_batch(stream: Any, train: Callable[[Any, int], None]) -> None:
    """Call `train` for all micro-batches of a stream, in a query."""
    query = stream.writeStream.foreachBatch(train).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()


def _each(times: list[float]) -> float:
    return (times[-1] - times[SKIPPED]) / (len(times) - 1 - SKIPPED)


# ── Large micro-batches ───────────────────────────────────────────────────────


def large(effort: Effort) -> list[Row]:
    """Measure the rows per second, with a tiny model and with one whose step takes longer than sending the rows."""
    count, from_spark = (30, SKIPPED + 5) if effort.quick else (200, SKIPPED + 20)
    fewer = SKIPPED + (5 if effort.quick else 30)
    spark_session()
    with tempfile.TemporaryDirectory(prefix=".streams-", dir=os.environ["SPARKRING_HOME"]) as home:
        files = Path(home, "files")
        _write_files(files, from_spark, MANY_ROWS, MANY_COLUMNS)
        of_spark = functools.partial(_from_files, files)
        cases: dict[str, Case] = {
            US: lambda: _speed(_items(count, MANY_ROWS, MANY_COLUMNS), count),
            DRIVER: lambda: _driver_speed(_items(count, MANY_ROWS, MANY_COLUMNS)),
            WIDE: lambda: _speed(_items(fewer, MANY_ROWS, MANY_COLUMNS), fewer, WIDTH),
            f"{DRIVER}, wide": lambda: _driver_speed(_items(fewer, MANY_ROWS, MANY_COLUMNS), WIDTH),
            SPARK: lambda: _speed(of_spark(), from_spark),
            f"{DRIVER}, Spark": lambda: _driver_speed_from_spark(of_spark()),
        }
        with _gang(MANY_COLUMNS, MANY_ROWS):
            turns = Turns(min(effort.runs, TURNS), cases)
    what = f"micro-batches of {MANY_ROWS:,} rows × {MANY_COLUMNS} float32, 2 warm ranks, from"
    return [
        turns.row(f"{what} an iterator", "rows/s", "speed", goal=Goal(1_000_000, at_least=True)),
        turns.row("… compared with a loop on the driver", "rows/s", "speed", DRIVER,
                  goal=Goal(1, at_least=True, ratio=True)),
        turns.row(
            f"… with {WIDTH} units in place of {TINY}",
            "rows/s",
            "speed",
            f"{DRIVER}, wide",
            us=WIDE,
        ),
        turns.row(f"{what} Parquet files that Spark reads", "rows/s", "speed", f"{DRIVER}, Spark", us=SPARK),
    ]  # fmt: skip


def _speed(stream: Any, count: int, width: int = TINY) -> Measured:
    run_cell(f"%%torchrun\ntimes = []\nmodel, optimizer = make({MANY_COLUMNS}, {width})")
    _trained(stream, count)
    return {"speed": MANY_ROWS / _each(run_cell("%%ranks 0\ntimes").value)}


def _driver_speed(items: Iterator[Rows], width: int = TINY) -> Measured:
    names = _names()
    model, optimizer = names["make"](MANY_COLUMNS, width)
    times = []
    for batch in items:
        times.append(time.perf_counter())
        names["step"](model, optimizer, batch["x"], batch["y"])
    return {"speed": MANY_ROWS / _each(times)}


def _driver_speed_from_spark(stream: Any) -> Measured:
    names = _names()
    model, optimizer = names["make"](MANY_COLUMNS)
    times: list[float] = []

    def train(batch: Any, batch_id: int) -> None:
        times.append(time.perf_counter())
        names["step"](model, optimizer, *_arrays(batch))

    _foreach_batch(stream, train)
    return {"speed": MANY_ROWS / _each(times)}


# ── A long stream ─────────────────────────────────────────────────────────────


def long(effort: Effort) -> list[Row]:
    """Measure by how much memory grows from a tenth of the stream to its end, and the size of the run's folder."""
    count = 1_000 if effort.quick else 5_000
    with _gang(COLUMNS, ROWS):
        turns = Turns(1, {US: lambda: _growth(count)})
    what = f"stream of {count:,} micro-batches, from the {count // 10:,}th to the last:"
    return [
        turns.row(f"{what} the driver's memory grows by", "MB", "driver", goal=SMALL_GROWTH),
        turns.row("… a rank's memory grows by", "MB", "rank", goal=SMALL_GROWTH),
        turns.row("… the size of the run's folder at the end", "MB", "folder"),
        turns.row("… micro-batches per second", "/s", "rate"),
    ]


def _growth(count: int) -> Measured:
    early: dict[int, int] = {}

    def look(record: Any) -> None:
        if not early and record.stream is not None and record.stream.batches >= count // 10:
            early.update(_resident(record))

    run_cell("%%torchrun\ntimes = collections.deque(maxlen=10)")
    began = time.perf_counter()
    record = _trained(_items(count), count, meanwhile=look)
    seconds = time.perf_counter() - began
    late = _resident(record)
    grown = {pid: (late[pid] - early[pid]) / 1e6 for pid in early}
    own = grown.pop(os.getpid())
    folder = sum(file.stat().st_size for file in Path(record.log_folder).rglob("*") if file.is_file())
    return {"driver": own, "rank": max(grown.values()), "folder": folder / 1e6, "rate": count / seconds}


def _resident(record: Any) -> dict[int, int]:
    pids = [os.getpid(), *(rank.pid for rank in record.ranks)]
    return {pid: psutil.Process(pid).memory_info().rss for pid in pids}


# ── What they share ───────────────────────────────────────────────────────────


@contextlib.contextmanager
def _gang(columns: int, rows: int) -> Iterator[None]:
    """Start two warm ranks that have a model, and each rank's share `x`, `y` of a micro-batch."""
    run_cell("%gang start -n -2 --framework torch")
    try:
        run_cell(f"""%%torchrun
import collections, time
import numpy as np
{cell("streaming")}
torch.distributed.init_process_group("gloo")
model, optimizer = make({columns})
x, y = np.zeros(({rows // 2}, {columns}), "float32"), np.zeros({rows // 2}, "float32")
""")
        yield
    finally:
        run_cell("%gang stop")


def _arrays(batch: Any) -> tuple[Any, Any]:
    rows = batch.toPandas()
    return np.stack(rows["x"]), rows["y"].to_numpy()


def _names() -> dict[str, Any]:
    """Return the names of the cell, whose functions are sent by value, as in a notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(cell("streaming"), names)
    return names


def _rows(number: int, rows: int, columns: int) -> Rows:
    x = np.random.default_rng(number).standard_normal((rows, columns), "float32")
    return {"x": x, "y": x.sum(1)}


def _items(count: int, rows: int = ROWS, columns: int = COLUMNS) -> Iterator[Rows]:
    """Yield `count` dicts of arrays. Only eight different ones are made, since the source is not measured."""
    made = [_rows(number, rows, columns) for number in range(8)]
    return (made[number % 8] for number in range(count))


def _write_files(folder: Path, count: int, rows: int, columns: int) -> None:
    """Write a Parquet file for each micro-batch."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for number in range(count):
        made = _rows(number, rows, columns)
        x = pa.ListArray.from_arrays(np.arange(0, made["x"].size + 1, columns, "int32"), made["x"].ravel())
        pq.write_table(pa.table({"x": x, "y": made["y"]}), folder / f"{number:04}.parquet")


def _from_files(folder: Path) -> Any:
    spark_session().conf.set("spark.sql.execution.arrow.pyspark.enabled", "true")  # for toPandas()
    reader = spark_session().readStream.schema("x array<float>, y float").option("maxFilesPerTrigger", 1)
    return reader.parquet(str(folder))


def _saving(home: Path) -> str:
    return f"--checkpoint-dir {tempfile.mkdtemp(dir=home)} --state model,optimizer"
