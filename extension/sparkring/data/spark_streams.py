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
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from sparkring.cluster.base import pandas_unused
from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.session import cluster_of
from sparkring.data.columns import changes_with_nulls
from sparkring.data.frames import cluster_behind, for_arrays, serialized_schema
from sparkring.data.micro_batches import StoredPiece, StoredRows, as_ipc
from sparkring.data.stage_task import COLUMNS, Staging, stage
from sparkring.errors import DataError
from sparkring.executor.tasks import task_for
from sparkring.runtime.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

# Partitions of at most this size go through the driver.
INLINE_BYTES = 256_000
# If a micro-batch has at most this size, the next one is collected.
SMALL_BYTES = 16_000_000
ANSWERS_S = 120.0  # how long Spark may take to tell about a query, however busy it is: a silent server ends the stream
_LOOK_EVERY_S = 0.1


class StreamStopping(Exception):
    """The stream is ending, so a micro-batch that Spark delivers now is not used, and Spark must not commit it."""


def check_stream(frame: DataFrame, called: str) -> None:
    """Raise DataError if a DataFrame cannot be used as a stream."""
    cluster_behind(frame, f"`{called}`")
    if not frame.isStreaming:
        raise DataError(
            f"`{called}` is not a streaming DataFrame: make one with spark.readStream, or read its rows with "
            f"sparkring.shards({called}) in a %%horovod cell."
        )
    serialized_schema(for_arrays(frame).schema, frame.sparkSession)


def schema_of(rows: DataFrame) -> pa.Schema:
    """Return the schema of a DataFrame's rows in Arrow."""
    return pa.ipc.read_schema(pa.py_buffer(serialized_schema(rows.schema, rows.sparkSession))).remove_metadata()


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
            self._schema = schema_of(rows)
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
        return nullable(self._schema)


def nullable(schema: pa.Schema | None) -> list[str]:
    """Return the names of the columns whose arrays have another type if they have nulls."""
    return [field.name for field in schema or () if changes_with_nulls(field.type)]


Train = Callable[[StoredRows, int, float], None]


class BatchFeed(Protocol):
    """How the micro-batches of a query reach this process.

    foreachBatch() gets `function`, with rows of `frame`. follow() returns when the query has ended or is to end. Until
    then, `train` is called for each micro-batch, with its rows, its number and how many seconds it took to move the
    rows. A micro-batch that `train` has begun is finished first. If `train` raises an error, Spark does not count the
    micro-batch as done, and follow() raises the error. end() stops the query, which is None if it did not start.
    """

    frame: DataFrame
    function: Callable[[Any, int], None]

    def follow(self, query: StreamingQuery) -> None: ...
    def end(self, query: StreamingQuery | None) -> None: ...


class Calls:
    """A BatchFeed for classic sessions, which call functions of this process."""

    def __init__(self, frame: DataFrame, stager: Stager, train: Train, stops: Callable[[], bool]) -> None:
        self.frame = frame
        self.function: Callable[[Any, int], None] = self._deliver
        self._stager, self._train, self._stops = stager, train, stops
        self._training, self._trained, self._stopping = threading.Lock(), threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._query: StreamingQuery | None = None

    def _deliver(self, batch: DataFrame, batch_id: int) -> None:
        if self._stopping.is_set() or self._error is not None:
            raise StreamStopping
        with self._training:
            try:
                began = time.perf_counter()
                rows = self._stager.stage(batch, batch_id)
                self._train(rows, batch_id, time.perf_counter() - began)
            except BaseException as failure:  # of any type: it is raised again in the run's thread
                self._error = failure
                raise
            if self._stops():
                # Do not return before the query is stopped. Otherwise, Spark would begin another micro-batch, and this
                # function would have to raise an error, which Spark would log.
                self._trained.set()
                self._stopping.wait()
                while self._query is not None and self._query.isActive:
                    time.sleep(_LOOK_EVERY_S / 10)

    def follow(self, query: StreamingQuery) -> None:
        self._query = query
        while query.isActive and not self._stops():
            time.sleep(_LOOK_EVERY_S)
        while self._training.locked() and not self._trained.wait(_LOOK_EVERY_S / 10):
            pass  # wait until the ranks have trained on the current micro-batch
        if self._error is not None and not isinstance(self._error, StreamStopping):
            raise self._error

    def end(self, query: StreamingQuery | None) -> None:
        self._stopping.set()
        if query is not None:
            with contextlib.suppress(Exception):  # the query has ended, or its session has
                query.stop()


def run_query(
    feed: BatchFeed,
    *,
    name: str,
    checkpoint: Location | None,
    trigger: Mapping[str, Any],
    stops: Callable[[], bool],
    started: Callable[[StreamingQuery], None],
) -> None:
    """Run a query whose micro-batches `feed` passes on, until the stream ends or `stops()` becomes true.

    `trigger` are arguments of DataStreamWriter.trigger(); it may be empty. Raises the errors of follow(), and DataError
    if the query fails.
    """
    cluster, query = cluster_of(feed.frame.sparkSession), None
    try:
        writer = feed.frame.writeStream.foreachBatch(feed.function)
        if name:
            writer = writer.queryName(name)
        if checkpoint is not None:
            writer = writer.option("checkpointLocation", checkpoint.for_spark())
        if trigger:
            writer = writer.trigger(**trigger)
        query = _started(writer)
        started(query)
        feed.follow(query)
    finally:
        feed.end(query)
    try:
        failed = None if stops() else cluster.within(ANSWERS_S, query.exception)
    except TimeoutError:
        raise silent() from None
    if failed is not None:
        raise DataError(f"Spark ended the stream: {root_cause(str(failed))}") from failed


def _started(writer: DataStreamWriter) -> StreamingQuery:
    for is_last in (False, False, False, False, True):
        try:
            return writer.start()
        except Exception as exception:  # Java's errors, as py4j or pyspark show them
            # A busy server of Spark Connect may need more than the 10 s in which Spark lets a Python process start.
            if is_last or "Python worker failed to connect back" not in str(exception):
                raise DataError(f"Spark could not start the stream: {root_cause(str(exception))}") from exception
    raise AssertionError


def silent() -> DataError:
    """Return the error for a server of Spark Connect that does not answer."""
    return DataError("the server of Spark Connect does not answer: once it is there again, run the cell again.")


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
