"""Predictions for Parquet files: the rows are divided into parts, and ranks score parts and write the predictions."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import posixpath
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from sparkring.data.dataset import DataFile, Dataset
from sparkring.data.folders import storage_errors
from sparkring.data.plan import RowRange
from sparkring.data.reader import READ_BYTES, Ahead, windows
from sparkring.errors import DataError
from sparkring.executor.orders import ModelOrder
from sparkring.history import describe
from sparkring.runtime import report
from sparkring.runtime.storage import locate
from sparkring.runtime.world import world
from sparkring.worker.member import process
from sparkring.worker.model.outputs import PredictedColumn
from sparkring.worker.model.task import Process

# Data is divided into about PARTS parts, provided that each then has between LEAST_BYTES and MOST_BYTES before
# compression. A part has at least one row group.
PARTS, LEAST_BYTES, MOST_BYTES = 64, 4_000_000, 128_000_000
REQUEST_ROWS = 16_384  # the most rows to send to the model process at a time; fewer if the rows are large
ROW_GROUP_BYTES = 32_000_000  # the size of the row groups that are written, before compression
REPORT_EVERY_S = 1.0
END_S = 2.0  # a model process that was asked to exit is killed after this time


class FilePart(NamedTuple):
    """The rows that become one file of predictions: row groups of `files`, in order."""

    number: int
    files: tuple[DataFile, ...]
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        return sum(row_range.rows for row_range in self.ranges)

    def __repr__(self) -> str:
        first = posixpath.basename(self.files[0].path)
        groups = [row_range.row_group for row_range in self.ranges]
        if len(self.files) > 1:
            return f"{first} and {describe.counted(len(self.files) - 1, 'more file')}"
        if len(groups) == len(self.files[0].row_groups):
            return first
        named = f"row group {groups[0]}" if len(groups) == 1 else f"row groups {groups[0]} to {groups[-1]}"
        return f"{first}, {named}"

    def place(self, row: int) -> str:
        """Return how errors name row `row` of this part (counted from 0): by the row's number in its file."""
        for row_range in self.ranges:
            if row < row_range.rows:
                break
            row -= row_range.rows
        file = self.files[row_range.file]
        before = sum(group.rows for group in file.row_groups[: row_range.row_group])
        return f"row {before + row_range.start + row:,} of {posixpath.basename(file.path)}"


class Written(NamedTuple):
    """A part that has been written: the name of its file, its rows, and how many of them have no prediction.

    `process` is the host and the id of the model process, and `load_s` is how long the process took to load the model.
    """

    file: str
    rows: int
    nulls: int
    size_bytes: int
    seconds: float
    process: str = ""
    load_s: float = 0.0


def parts_of(dataset: Dataset) -> list[FilePart]:
    """Divide a data set into parts. The parts depend only on the data set, so a later run has the same parts."""
    whole = sum(group.stored_bytes for file in dataset.files for group in file.row_groups)
    most = max(LEAST_BYTES, min(MOST_BYTES, whole // PARTS))
    parts: list[list[tuple[int, int]]] = []
    size = 0
    for number, file in enumerate(dataset.files):
        for at, group in enumerate(file.row_groups):
            if not group.rows:
                continue
            if not parts or size + group.stored_bytes > most:
                parts.append([])
                size = 0
            parts[-1].append((number, at))
            size += group.stored_bytes
    return [_part(number, dataset.files, groups) for number, groups in enumerate(parts)]


def _part(number: int, files: Sequence[DataFile], groups: Sequence[tuple[int, int]]) -> FilePart:
    used = list(dict.fromkeys(file for file, _ in groups))
    ranges = [RowRange(used.index(file), at, 0, files[file].row_groups[at].rows) for file, at in groups]
    return FilePart(number, tuple(files[file] for file in used), tuple(ranges))


@dataclass(frozen=True)
class Model:
    """The file with sparkring's archive and the packed model, and the file's SHA-256.

    The digest is checked before the file is loaded, because loading the file runs its code.
    """

    path: str
    digest: str


class ModelProcess(Process):
    """A connection to the model process of this machine, or to that of some `gpus`, for ranks that score parts.

    On the notebook's machine, the notebook starts and ends the process. Elsewhere, a rank does.
    """

    def __init__(self, order: ModelOrder, model: Model, gpus: Sequence[str] = ()) -> None:
        super().__init__(order, gpus)
        self._model = model
        self._part: FilePart | None = None
        self.ready = 0.0  # when a process with the model was found (time.monotonic())

    def begin(self, part: FilePart) -> None:
        """Count rows from the first row of this part on."""
        self._part, self._rows = part, 0

    def _connected(self) -> Any:
        connection = super()._connected()
        self.ready = time.monotonic()
        report.log(rows=0)  # from now on, the notebook knows that the model is loaded
        return connection

    def start(self) -> None:
        """Start the process, and return before the model is loaded. Ranks that connect wait until it is."""
        is_started = False
        while not is_started:
            lock = self._locked()
            try:
                if is_started := self._is_current(lock):  # another process may have removed the new folder
                    self._start(lock)
            finally:
                os.close(lock)

    def _start(self, lock: int) -> None:
        super()._start(lock)
        if report.connected():  # this is a rank, whose member would kill the process when the rank exits
            atexit.register(self.end)

    def loaded(self) -> tuple[str, float]:
        """Return the host and the id of the process, and how long it took to load the model."""
        with contextlib.suppress(OSError, ValueError):
            return f"{socket.gethostname()}:{self._read('pid')}", float(self._read("loaded"))
        return "", 0.0

    def end(self) -> None:
        """End the process if it is running on this machine, and remove its folder."""
        with contextlib.suppress(OSError, ValueError):
            pid, deadline = int(self._read("pid")), time.monotonic() + END_S
            if self._is_running():
                os.kill(pid, signal.SIGTERM)
                while process.state(pid) not in ("gone", "ended"):
                    if time.monotonic() > deadline:
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.01)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_running(self) -> bool:
        """Return whether the process is loading its model, with the folder locked, or is listening."""
        lock = os.open(os.path.join(self._folder, "lock"), os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket(socket.AF_UNIX) as dialled:
                return not dialled.connect_ex(os.path.join(self._folder, "socket"))
        except BlockingIOError:
            return True
        finally:
            os.close(lock)

    def _read(self, name: str) -> str:
        with open(os.path.join(self._folder, name)) as file:
            return file.read()

    def _model_file(self) -> str:
        """Copy the model's file into the folder of the process, which only this user can enter, and check the copy."""
        stored, digest = locate(self._model.path), hashlib.sha256()
        path = os.path.join(self._folder, "model")
        try:
            with stored.fs.open(stored.path, "rb") as file, open(path, "wb") as out:
                while block := file.read(1 << 22):
                    digest.update(block)
                    out.write(block)
        except OSError as error:
            raise DataError(
                f"{stored.written} cannot be copied to {path} on {socket.gethostname()}: {error.strerror or error}. "
                "All machines must be able to reach the folder to which predict() writes."
            ) from error
        if digest.hexdigest() != self._model.digest:
            os.unlink(path)
            raise DataError(f"{stored.written} was changed while predict() was running: run the cell again.")
        return path

    def _place(self, first: int, rows: int) -> str:
        assert self._part is not None
        begin = self._part.place(first)
        return begin if rows == 1 else f"{begin} and the {describe.counted(rows - 1, 'row')} after it"


# The connections of this rank. They stay open from one part to the next.
_connections: dict[str, ModelProcess] = {}


@dataclass(frozen=True)
class Job:
    """Scores parts of `dataset`, and writes them to `folder`. Ranks call it with a part.

    `dataset` has no files, because each part has its own. The columns in `used` are sent to the model. The columns in
    `kept` are written to the new files, followed by the predictions in `outputs`.
    """

    dataset: Dataset
    used: tuple[str, ...]
    kept: tuple[str, ...]
    outputs: tuple[PredictedColumn, ...]
    batch_size: int
    folder: str
    order: ModelOrder
    model: Model

    def __sparkring_content__(self) -> tuple[Any, ...]:
        return ()  # the folder has digests of everything on which its parts depend

    def __call__(self, part: FilePart) -> Written:
        began = time.monotonic()
        connection = _connections.setdefault(self.order.key, ModelProcess(self.order, self.model, world().gpus))
        connection.begin(part)
        # The name is random because a lost process may still be writing its file for this part.
        name = f"part-{part.number:05d}-{secrets.token_hex(4)}.parquet"
        target = locate(self.folder) / name
        reading = Ahead(lambda: self._tables(part), 1)
        rows = nulls = 0
        reported = began

        def log(now: float) -> None:
            rate = rows / max(now - max(began, connection.ready), 1e-6)
            values: dict[str, Any] = {describe.ROWS: rows, describe.ROWS_RATE: rate}
            report.log(**values)

        try:
            with target.fs.open(target.path, "wb") as out, pq.ParquetWriter(out, self._schema) as writer:
                waiting: list[pa.Table] = []
                for table, _ in reading:
                    waiting.append(self._scored(connection, table))
                    rows += len(table)
                    nulls += max(waiting[-1].column(output.name).null_count for output in self.outputs)
                    if sum(block.nbytes for block in waiting) >= ROW_GROUP_BYTES:
                        writer.write_table(pa.concat_tables(waiting))
                        waiting.clear()
                    now = time.monotonic()
                    if now > reported + REPORT_EVERY_S:
                        reported = now
                        log(now)
                if waiting:
                    writer.write_table(pa.concat_tables(waiting))
        except OSError as error:
            raise DataError(f"{target.written} cannot be written: {error.strerror or error}.") from error
        finally:
            reading.close()
        seconds = time.monotonic() - began
        log(began + seconds)
        return Written(name, rows, nulls, int(target.fs.size(target.path)), seconds, *connection.loaded())

    @property
    def _schema(self) -> pa.Schema:
        fields = [self.dataset.schema.field(name) for name in self.kept]
        return pa.schema([*fields, *((output.name, output.kind) for output in self.outputs)])

    def _tables(self, part: FilePart) -> Generator[pa.Table, None, None]:
        """Read a part as tables whose lengths are multiples of `batch_size`, except for the last one."""
        dataset = replace(self.dataset, files=part.files)
        most = min(REQUEST_ROWS, int(READ_BYTES / max(1.0, dataset.row_bytes())))
        rows = max(1, most // self.batch_size) * self.batch_size
        with storage_errors(f"{part!r} cannot be read"):  # another error would be told as one of the file to write
            for window in windows(dataset, part.ranges, rows):
                yield pa.Table.from_batches(window.batches)

    def _scored(self, connection: ModelProcess, table: pa.Table) -> pa.Table:
        """Return the columns to be written for some rows."""
        try:
            answer = connection.ask(table.select(self.used))
        except RuntimeError as error:
            raise DataError(str(error).removeprefix("sparkring: ")) from None
        columns = [*(table.column(name) for name in self.kept), *answer.columns]
        return pa.Table.from_arrays(columns, schema=self._schema)
