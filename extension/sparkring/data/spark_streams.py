"""Runs a streaming query, and moves the rows of its micro-batches from Spark's tasks to where the ranks can read them.

A partition with few rows goes through the driver, as part of the result of Spark's job. Tasks write other partitions
as Arrow files to a folder that the ranks can reach, so that these rows do not go through the driver.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.session import pandas_unused
from sparkring.data.columns import changes_with_nulls
from sparkring.data.frames import for_arrays, serialized_schema, session_of
from sparkring.data.micro_batches import Piece, StoredRows
from sparkring.data.stage_task import COLUMNS
from sparkring.errors import DataError
from sparkring.launchers.archive import by_value
from sparkring.runtime.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

# Partitions of at most this size go through the driver.
INLINE_BYTES = 256_000
_LOOK_EVERY_S = 0.1


class StreamStopping(Exception):
    """The stream is ending, so a micro-batch that Spark delivers now is not used, and Spark must not commit it."""


def check_stream(frame: DataFrame, called: str) -> None:
    """Raise DataError if a DataFrame cannot be used as a stream."""
    session_of(frame, f"`{called}`")
    if not frame.isStreaming:
        raise DataError(
            f"`{called}` is not a streaming DataFrame: make one with spark.readStream, or read the table with "
            f"sparkring.shards({called}) in a %%horovod cell."
        )
    serialized_schema(for_arrays_schema(frame), frame.sparkSession)


def for_arrays_schema(frame: DataFrame) -> Any:
    """Return the schema of the rows that the ranks get."""
    return for_arrays(frame).schema


def stage(frame: DataFrame, folder: Location, prefix: str, inline_bytes: int) -> StoredRows:
    """Compute a micro-batch, and return its rows, which are where stage_task.py has put them."""
    rows = for_arrays(frame)
    schema = pa.ipc.read_schema(pa.py_buffer(serialized_schema(rows.schema, rows.sparkSession))).remove_metadata()
    nullable = [field.name for field in schema if changes_with_nulls(field.type)]
    where = folder.path if folder.local else folder.url
    task = by_value("sparkring.data", "stage_task.py")["staging"](where, folder.local, prefix, inline_bytes, nullable)
    with pandas_unused():
        found = sorted(rows.mapInArrow(task, COLUMNS).collect())
    pieces = [Piece(folder / each.name if each.name else bytes(each.data), each.rows) for each in found]
    nulls = frozenset(name for each in found for name in each.nulls)
    return StoredRows(schema.serialize().to_pybytes(), pieces, nulls)


def run_query(
    frame: DataFrame,
    *,
    name: str,
    checkpoint: Location | None,
    trigger_s: float | None,
    train: Callable[[DataFrame, int], None],
    stops: Callable[[], bool],
    started: Callable[[StreamingQuery], None],
) -> None:
    """Run a query that calls `train` for each micro-batch, until the stream ends or `stops()` becomes true.

    A micro-batch that `train` has begun is finished first. If `train` raises an error, this error is raised. Raises
    DataError if the query fails.
    """
    turn, stopping = threading.Lock(), False
    error: BaseException | None = None

    def deliver(batch: DataFrame, batch_id: int) -> None:
        nonlocal error
        with turn:
            if stopping or error is not None:
                raise StreamStopping
            try:
                train(batch, batch_id)
            except BaseException as found:  # of any type: it is raised again in the run's thread
                error = found
                raise

    writer = frame.writeStream.foreachBatch(deliver)
    if name:
        writer = writer.queryName(name)
    if checkpoint is not None:
        writer = writer.option("checkpointLocation", checkpoint.for_spark())
    if trigger_s:
        writer = writer.trigger(processingTime=f"{trigger_s * 1000:.0f} milliseconds")
    try:
        query = writer.start()
    except Exception as found:  # Java's errors, as py4j or pyspark show them
        raise DataError(f"Spark could not start the stream: {root_cause(found)}") from found
    started(query)
    try:
        while query.isActive and not stops():
            time.sleep(_LOOK_EVERY_S)
    finally:
        with turn:  # wait for the current micro-batch
            stopping = True
        with contextlib.suppress(Exception):  # the query has ended, or its session has
            query.stop()
    if error is not None and not isinstance(error, StreamStopping):
        raise error
    failed = None if stops() else query.exception()
    if failed is not None:
        raise DataError(f"Spark ended the stream: {root_cause(failed)}") from failed


def waiting_rows(query: StreamingQuery) -> int | None:
    """Return how many rows wait in the sources of a query, if they tell; otherwise, None."""
    progress = query.lastProgress
    found = [] if progress is None else [source.get("metrics") or {} for source in progress["sources"]]
    behind = [
        int(float(value)) for metrics in found for key, value in metrics.items() if key == "avgOffsetsBehindLatest"
    ]
    return sum(behind) if behind and len(behind) == len(found) else None
