"""The micro-batches of a streaming DataFrame."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkring.cluster.session import cluster_of
from sparkring.data.materialise import cache_folder
from sparkring.data.micro_batches import StoredRows
from sparkring.data.spark_streams import ANSWERS_S, BatchFeed, Calls, Stager, check_stream, run_query, waiting_rows
from sparkring.data.stream_offers import Offers, check_shared
from sparkring.engine.stream.options import StreamOptions
from sparkring.engine.stream.replay_log import ReplayLog
from sparkring.engine.stream.sources import MicroBatch
from sparkring.errors import CheckpointError
from sparkring.history import run_store
from sparkring.runtime.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

    from sparkring.checkpointing.directory import CheckpointDirectory


class SparkSource:
    """The micro-batches of `frame`. With a directory of checkpoints, a subfolder has Spark's own."""

    def __init__(
        self, frame: DataFrame, called: str, options: StreamOptions, directory: CheckpointDirectory | None
    ) -> None:
        check_stream(frame, called)
        self.described = called
        self._frame = frame
        self._options = options
        self._written: str = "" if directory is None else directory.location.written
        self._folder: Location | None = None
        self._log: ReplayLog | None = None
        home = cache_folder() if directory is None else directory.location
        self._staging = home / f"_stream-{run_store.new_id()}"
        if directory is not None:
            self._folder = home / f"_stream-{directory.lineage}"
            self._log = ReplayLog(self._folder / "batches")
            self._staging = self._log.folder
        self._cluster = cluster_of(frame.sparkSession)
        if not self._cluster.calls_back:
            check_shared(frame.sparkSession, home)
        self._query: StreamingQuery | None = None
        self._idle_since = time.perf_counter()

    def check(self, done: int) -> None:
        """Raise CheckpointError if Spark's checkpoint does not fit the checkpoint of the state."""
        if self._folder is None:
            return
        committed, offsets = self._numbers("commits"), self._numbers("offsets")
        if done >= 0 and not offsets:
            raise CheckpointError(
                f"{self._written} has the state after batch {done}, but Spark's part of the checkpoint, "
                f"{(self._folder / 'spark').written}, is missing: restore it, or start over with --fresh."
            )
        assert self._log is not None
        replayable = [logged.batch_id for logged in self._log.after(done)]
        last = max([done, *replayable])
        if committed and max(committed) > last:
            raise CheckpointError(
                f"{self._written} can be continued only up to batch {last}, but Spark is at batch "
                f"{max(committed)}: the batches in between cannot be used again. Start over with --fresh."
            )

    def run(
        self,
        done: int,
        position: str,
        train: Callable[[MicroBatch], None],
        stops: Callable[[], bool],
        notice: Callable[[str], None],
    ) -> None:
        """Train on the batches of the replay log, then on those that Spark delivers."""
        logged = [] if self._log is None else self._log.after(done)
        for entry in logged:
            if stops():
                return
            rows = StoredRows(b"", (), frozenset()) if entry.rows is None else entry.rows
            train(MicroBatch(entry.batch_id, rows, entry.position, replayed=True))

        keeps = self._log is not None and self._options.save_every > 1

        def deliver(rows: StoredRows, batch_id: int, moving_s: float) -> None:
            waited_s = max(0.0, time.perf_counter() - self._idle_since - moving_s)
            micro_batch = MicroBatch(batch_id, rows, self._offsets(batch_id), waited_s, moving_s, self._backlog)
            try:
                train(micro_batch)
            finally:
                if not keeps:
                    for file in rows.files():
                        with contextlib.suppress(Exception):  # each of fsspec's packages raises its own errors
                            file.fs.rm_file(file.path)
            self._idle_since = time.perf_counter()

        def started(query: StreamingQuery) -> None:
            self._query = query
            self._idle_since = time.perf_counter()

        feed: BatchFeed
        if self._cluster.calls_back:
            feed = Calls(self._frame, Stager(self._staging, keeps=keeps), deliver, stops)
        else:
            feed = Offers(self._frame, self._staging, deliver, stops)
        try:
            run_query(
                feed,
                name=self._options.name,
                checkpoint=None if self._folder is None else self._folder / "spark",
                trigger=_trigger(self._options),
                stops=stops,
                started=started,
            )
        finally:
            if self._log is None:
                with contextlib.suppress(Exception):
                    self._staging.fs.rm(self._staging.path, recursive=True)

    def batch_is_done(self, batch: MicroBatch) -> None:
        """Add the batch to the replay log, before Spark considers it done."""
        if self._log is not None and not batch.replayed:
            assert isinstance(batch.rows, StoredRows)
            self._log.add(batch.batch_id, batch.position, batch.rows if batch.rows.count else None)

    def forget(self, batch_id: int) -> None:
        """Remove the batch and all earlier ones from the replay log."""
        if self._log is not None:
            self._log.forget(batch_id)

    def _backlog(self) -> int | None:
        query = self._query
        try:
            return None if query is None else waiting_rows(self._cluster.within(ANSWERS_S, lambda: query.lastProgress))
        except TimeoutError:
            return None

    def _offsets(self, batch_id: int) -> str:
        """Return Spark's description of the offsets of a micro-batch; '' without a directory of checkpoints."""
        if self._folder is None:
            return ""
        file = self._folder / "spark" / "offsets" / str(batch_id)
        with contextlib.suppress(OSError), file.fs.open(file.path, "rb") as opened:
            return str(opened.read().decode())
        return ""

    def _numbers(self, kind: str) -> set[int]:
        assert self._folder is not None
        folder = self._folder / "spark" / kind
        names: list[Any] = []
        with contextlib.suppress(FileNotFoundError):
            names = folder.fs.ls(folder.path, detail=False)
        return {int(name) for name in (str(path).rpartition("/")[2] for path in names) if name.isdecimal()}


def _trigger(options: StreamOptions) -> dict[str, Any]:
    """Return the arguments of Spark's trigger() that correspond to the options; without any, Spark does not wait."""
    if options.available_now:
        return {"availableNow": True}
    return {"processingTime": f"{options.trigger_s * 1000:.0f} milliseconds"} if options.trigger_s else {}
