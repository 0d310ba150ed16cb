"""Gets the micro-batches of a query of Spark Connect, whose foreachBatch() runs on the server.

FOLDER/offers-<random>/
    lease.json          what the notebook says: that it is alive, and which micro-batch its ranks have taken
    <number>-offer.json the files with the rows of a micro-batch; the server waits until the ranks have taken it
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyarrow import parquet

from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.jobs import interruptibly
from sparkring.cluster.session import cluster_of
from sparkring.data.folders import entries, storage_errors
from sparkring.data.frames import for_arrays
from sparkring.data.materialise import CACHE
from sparkring.data.micro_batches import StoredPiece, StoredRows
from sparkring.data.spark_streams import ANSWERS_S, Train, nullable, schema_of, silent
from sparkring.data.stage_task import LEASE, OFFER, HandingOver, Staging, hand_over, write
from sparkring.errors import DataError
from sparkring.executor.tasks import batch_function_for
from sparkring.runtime.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

# The server stops waiting when the notebook has been silent for LEASE_S seconds.
LEASE_S, _BEAT_EVERY_S = 30.0, 3.0
_ASK_EVERY_S = 0.5  # how often Spark is asked whether the query has ended
_STOPS_S = 5.0
_OFFERS = "offers-"
_PROBE_ROWS = 1000


def check_shared(session: SparkSession, folder: Location) -> None:
    """Raise DataError unless the server and the executors of Spark Connect write to the same `folder` as this process.

    A job writes a few rows there, with a task for each slot.
    """
    probe = folder / f"probe-{secrets.token_hex(6)}"
    advice = f"use a folder that all share (dbfs:/…, s3://…, a network mount) with --checkpoint-dir or {CACHE}."

    def write_probe() -> None:
        session.range(_PROBE_ROWS).write.parquet(probe.for_spark())

    with storage_errors(f"{folder.written} cannot be used", f" {advice[:1].upper()}{advice[1:]}"):
        folder.fs.makedirs(folder.path, exist_ok=True)
        try:
            interruptibly(cluster_of(session), "checking the folder of the stream", write_probe)
        except Exception as error:  # pyspark has several classes for this error
            raise DataError(
                f"the server of Spark Connect cannot write to {folder.written}: {root_cause(str(error))}. "
                f"{advice[:1].upper()}{advice[1:]}"
            ) from error
        try:
            rows = sum(_rows(probe / name) for name in entries(probe) if name.startswith("part-"))
        except FileNotFoundError:
            rows = 0
        finally:
            with contextlib.suppress(Exception):  # each of fsspec's packages raises its own errors
                probe.fs.rm(probe.path, recursive=True)
    if rows != _PROBE_ROWS:
        who = "the executors of Spark Connect have" if rows else "the server of Spark Connect has"
        raise DataError(f"{folder.written} is on this machine only: {who} another disk at this path; {advice}")


def _rows(file: Location) -> int:
    with file.fs.open(file.path, "rb") as opened:
        return int(parquet.read_metadata(opened).num_rows)


class Offers:
    """A BatchFeed for Spark Connect. Tasks write the rows to `folder`, and the server offers each micro-batch there."""

    def __init__(self, frame: DataFrame, folder: Location, train: Train, stops: Callable[[], bool]) -> None:
        self.frame = for_arrays(frame)
        self._schema = schema_of(self.frame)
        self._rows_folder = folder
        with contextlib.suppress(Exception):  # each of fsspec's packages raises its own errors
            for name in entries(folder):
                if name.startswith(_OFFERS):  # of a kernel that was killed
                    folder.fs.rm((folder / name).path, recursive=True)
        self._folder = folder / f"{_OFFERS}{secrets.token_hex(6)}"
        self._train, self._stops = train, stops
        self._cluster = cluster_of(frame.sparkSession)
        staging = Staging(_path(folder), folder.local, "", 0, nullable(self._schema), self._schema.names)
        self._order = HandingOver(_path(self._folder), folder.local, staging, LEASE_S)
        self.function = batch_function_for(hand_over, self._order)
        self._taken, self._beats = -1, 0
        self._writing, self._ended = threading.Lock(), threading.Event()
        self._tell()
        self._thread = threading.Thread(target=self._beat, name="sparkring-stream-lease", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_EVERY_S):
            with contextlib.suppress(DataError):  # the next attempt may succeed; otherwise, the server gives up
                self._tell()

    def _tell(self) -> None:
        """Say that this process is alive, and which micro-batch has been taken."""
        with self._writing, storage_errors(f"{self._folder.written} cannot be written"):
            self._beats += 1
            write(self._order, LEASE, json.dumps({"taken": self._taken, "beat": self._beats}).encode())

    def follow(self, query: StreamingQuery) -> None:
        asked_s = time.monotonic()
        while not self._stops():
            if (batch_id := self._next()) is not None:
                self._train(*self._offer(batch_id))
                if self._stops():
                    return  # without taking the micro-batch: otherwise, Spark would begin another one
                self._taken = batch_id
                self._tell()
                with contextlib.suppress(Exception):  # each of fsspec's packages raises its own errors
                    self._folder.fs.rm_file((self._folder / f"{batch_id}{OFFER}").path)
            elif time.monotonic() - asked_s < _ASK_EVERY_S:
                time.sleep(0.01 if self._folder.local else 0.2)
            else:
                try:
                    if not self._cluster.within(ANSWERS_S, lambda: query.isActive, self._stops):
                        return
                except TimeoutError:
                    if self._stops():
                        return
                    raise silent() from None
                asked_s = time.monotonic()

    def _next(self) -> int | None:
        """Return the number of a micro-batch that is offered and has not been taken; None if there is none."""
        with storage_errors(f"{self._folder.written} cannot be read"):
            offered = (re.match(rf"(\d+){re.escape(OFFER)}$", name) for name in entries(self._folder))
            return max((number for match in offered if match and (number := int(match[1])) > self._taken), default=None)

    def _offer(self, batch_id: int) -> tuple[StoredRows, int, float]:
        file = self._folder / f"{batch_id}{OFFER}"
        with storage_errors(f"{file.written} cannot be read"):
            offer = json.loads(file.fs.cat_file(file.path))
        pieces = [StoredPiece(self._rows_folder / name, rows) for name, rows in offer["pieces"]]
        schema = self._schema.serialize().to_pybytes()
        return StoredRows(schema, pieces, frozenset(offer["nulls"])), batch_id, offer["moving_s"]

    def end(self, query: StreamingQuery | None) -> None:
        with contextlib.suppress(Exception):  # the query has ended, or the server does not answer
            if query is not None:
                self._cluster.within(_STOPS_S, query.stop)  # this kills the process that waits on the server
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(Exception):  # each of fsspec's packages raises its own errors
            self._folder.fs.rm(self._folder.path, recursive=True)


def _path(folder: Location) -> str:
    return folder.path if folder.local else folder.url
