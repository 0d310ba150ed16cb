"""Runs a streaming query, and moves the rows of its micro-batches from Spark's tasks to where the ranks can read them.

If the previous micro-batch was small, the driver collects the rows. Otherwise, tasks return small partitions to the
driver, and write other partitions as Arrow files to a folder that the ranks can reach, so these rows do not go through
the driver.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.session import pandas_unused
from sparkring.data.columns import changes_with_nulls
from sparkring.data.frames import cluster_behind, for_arrays, serialized_schema
from sparkring.data.micro_batches import StoredPiece, StoredRows, as_ipc
from sparkring.data.stage_task import COLUMNS, Staging, stage
from sparkring.errors import DataError
from sparkring.executor.tasks import task_for
from sparkring.runtime.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

# Partitions of at most this size go through the driver.
INLINE_BYTES = 256_000
# If a micro-batch has at most this size, the next one is collected.
SMALL_BYTES = 16_000_000
_LOOK_EVERY_S = 0.1


class StreamStopping(Exception):
    """The stream is ending, so a micro-batch that Spark delivers now is not used, and Spark must not commit it."""


def check_stream(frame: DataFrame, called: str) -> None:
    """Raise DataError if a DataFrame cannot be used as a stream."""
    cluster = cluster_behind(frame, f"`{called}`")
    if not cluster.calls_back:
        raise DataError(
            f"`{called}` belongs to Spark Connect, whose foreachBatch() runs on the server and cannot reach the "
            "notebook: use %%stream with an iterable of batches, or make the stream in a classic SparkSession."
        )
    if not frame.isStreaming:
        raise DataError(
            f"`{called}` is not a streaming DataFrame: make one with spark.readStream, or read its rows with "
            f"sparkring.shards({called}) in a %%horovod cell."
        )
    serialized_schema(for_arrays(frame).schema, frame.sparkSession)


class Stager:
    """Moves the rows of micro-batches to where ranks can read them; files are written to `folder`.

    If the previous micro-batch was small, the rows are collected as Arrow batches, which takes a third of the time of a
    job with Python tasks. With `keeps`, all rows are written to files, so that they can be read again later.
    """

    def __init__(self, folder: Location, *, keeps: bool) -> None:
        self._folder = folder
        self._keeps = keeps
        self._is_small = False
        self._schema: pa.Schema | None = None

    def stage(self, frame: DataFrame, batch_id: int) -> StoredRows:
        """Compute a micro-batch, and return its rows."""
        rows = for_arrays(frame)
        if self._schema is None:
            schema = serialized_schema(rows.schema, rows.sparkSession)
            self._schema = pa.ipc.read_schema(pa.py_buffer(schema)).remove_metadata()
        collected = self._collected(rows) if self._is_small else None
        return self._by_tasks(rows, batch_id) if collected is None else self._by_driver(collected, batch_id)

    def _collected(self, rows: DataFrame) -> pa.Table | None:
        """Return the rows as a table; None if Spark cannot collect them, for example because there are too many."""
        assert self._schema is not None
        try:
            if hasattr(rows, "toArrow"):
                return rows.toArrow().cast(self._schema)
            batches = rows._collect_as_arrow()
        except Exception:  # any of Java's errors; if the rows cannot be computed at all, the tasks will say why
            return None
        return pa.Table.from_batches(batches).cast(self._schema) if batches else self._schema.empty_table()

    def _by_driver(self, table: pa.Table, batch_id: int) -> StoredRows:
        assert self._schema is not None
        nulls = frozenset(name for name in self._nullable() if table.column(name).null_count)
        data = as_ipc(table)
        self._is_small = data.size <= SMALL_BYTES
        place: Location | bytes = data.to_pybytes()
        if self._keeps:
            place = self._folder / f"{batch_id}-driver-{secrets.token_hex(6)}.arrow"
            place.fs.makedirs(self._folder.path, exist_ok=True)
            with place.fs.open(place.path, "wb") as file:
                file.write(data)
        pieces = [StoredPiece(place, table.num_rows)] if table.num_rows else []
        return StoredRows(self._schema.serialize().to_pybytes(), pieces, nulls)

    def _by_tasks(self, rows: DataFrame, batch_id: int) -> StoredRows:
        assert self._schema is not None
        folder, inline_bytes = self._folder, 0 if self._keeps else INLINE_BYTES
        where = folder.path if folder.local else folder.url
        task = task_for(stage, Staging(where, folder.local, str(batch_id), inline_bytes, self._nullable()))
        try:
            with pandas_unused():
                parts = sorted(rows.mapInArrow(task, COLUMNS).collect())
        except Exception as error:  # Java's errors, as py4j or pyspark show them
            raise DataError(f"Spark could not compute batch {batch_id}: {root_cause(str(error))}") from error
        self._is_small = sum(part.bytes for part in parts) <= SMALL_BYTES
        pieces = [StoredPiece(folder / part.name if part.name else bytes(part.data), part.rows) for part in parts]
        nulls = frozenset(name for part in parts for name in part.nulls)
        return StoredRows(self._schema.serialize().to_pybytes(), pieces, nulls)

    def _nullable(self) -> list[str]:
        return [field.name for field in self._schema or () if changes_with_nulls(field.type)]


def run_query(
    frame: DataFrame,
    *,
    name: str,
    checkpoint: Location | None,
    trigger: Mapping[str, Any],
    train: Callable[[DataFrame, int], None],
    stops: Callable[[], bool],
    started: Callable[[StreamingQuery], None],
) -> None:
    """Run a query that calls `train` for each micro-batch, until the stream ends or `stops()` becomes true.

    `trigger` are arguments of DataStreamWriter.trigger(); it may be empty.

    A micro-batch that `train` has begun is finished first. If `train` raises an error, this error is raised. Raises
    DataError if the query fails.
    """
    training, trained, stopping = threading.Lock(), threading.Event(), threading.Event()
    error: BaseException | None = None

    def deliver(batch: DataFrame, batch_id: int) -> None:
        nonlocal error
        if stopping.is_set() or error is not None:
            raise StreamStopping
        with training:
            try:
                train(batch, batch_id)
            except BaseException as failure:  # of any type: it is raised again in the run's thread
                error = failure
                raise
            if stops():
                # Do not return before the query is stopped. Otherwise, Spark would begin another micro-batch, and this
                # function would have to raise an error, which Spark would log.
                trained.set()
                stopping.wait()
                while query.isActive:
                    time.sleep(_LOOK_EVERY_S / 10)

    writer = frame.writeStream.foreachBatch(deliver)
    if name:
        writer = writer.queryName(name)
    if checkpoint is not None:
        writer = writer.option("checkpointLocation", checkpoint.for_spark())
    if trigger:
        writer = writer.trigger(**trigger)
    try:
        query = writer.start()
    except Exception as exception:  # Java's errors, as py4j or pyspark show them
        raise DataError(f"Spark could not start the stream: {root_cause(str(exception))}") from exception
    started(query)
    try:
        while query.isActive and not stops():
            time.sleep(_LOOK_EVERY_S)
        while training.locked() and not trained.wait(_LOOK_EVERY_S / 10):
            pass  # wait until the ranks have trained on the current micro-batch
    finally:
        stopping.set()
        with contextlib.suppress(Exception):  # the query has ended, or its session has
            query.stop()
    if error is not None and not isinstance(error, StreamStopping):
        raise error
    failed = None if stops() else query.exception()
    if failed is not None:
        raise DataError(f"Spark ended the stream: {root_cause(str(failed))}") from failed


def waiting_rows(progress: Mapping[str, Any] | None) -> int | None:
    """Return how many rows wait in the sources of a query, according to its last progress; None if it does not say.

    A source such as Kafka has the offsets of its partitions: `{"topic": {"0": 120, "1": 80}}`. The rows between the
    offsets up to which the query has read and the latest offsets are waiting.
    """
    sources = [] if progress is None else progress["sources"]
    counts = [_between(source.get("endOffset"), source.get("latestOffset")) for source in sources]
    return None if not counts or None in counts else sum(rows for rows in counts if rows is not None)


def _between(read: Any, latest: Any) -> int | None:
    """Return the number of rows between two offsets of a source; None if they do not count rows by partition."""
    offsets: list[dict[tuple[str, str], int]] = []
    for position in (read, latest):
        topics = json.loads(position) if isinstance(position, str) else position
        if not isinstance(topics, Mapping) or not all(isinstance(of_topic, Mapping) for of_topic in topics.values()):
            return None
        offsets.append({(topic, number): offset for topic, parts in topics.items() for number, offset in parts.items()})
    if not all(isinstance(offset, int) for by_partition in offsets for offset in by_partition.values()):
        return None
    return sum(offset - offsets[0].get(partition, offset) for partition, offset in offsets[1].items())
