"""Scores the rows of a Spark task: sends them to a model process on this machine, and returns its answers.

This module is sent to executors by value. It uses only the standard library, the package `executor`, and the packages
that pandas UDFs need: NumPy, pandas, pyarrow and pyspark.

A machine has one model process. If tasks have GPUs, it has one for each GPU, and tasks with the same GPU share it.
Each model process has a folder that only this user can enter:

    sparkring-model-<key>/    or sparkring-model-<key>-<digest of the GPU's address>/
        lock      locked while the process loads its model, or is exiting
        socket    the process listens on it, and answers only tasks that know the token
        log       the output of the process
        pid       the id of the process
        loaded    the seconds that loading the model took; written when the model has been loaded

If no model process is running, the first task that notices this starts one, and the other tasks wait for the lock. The
model process gets the lock from the task that starts it, so the lock is still held if this task is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import pickletools
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sparkring.executor.archive import unpacked
from sparkring.executor.boot import SHORT, start_detached, use_temporary_folder
from sparkring.executor.orders import ModelOrder, changed
from sparkring.runtime.limits import cores

# The keys under which the metadata of a request says which task, or which streaming query, has sent it.
TASK, STREAM = b"sparkring.task", b"sparkring.stream"
_ATTEMPTS = 3  # if the model process exits this many times during a request, the request's rows count as the cause
_EXACT = 2**53  # integers up to this one are exact in float64
_LOGGED = 600  # the largest number of characters of a log that an error quotes


class _Ended(Exception):
    """The model process exited before it answered."""


class Scoring(NamedTuple):
    """How the rows of a task are scored. Tasks without a GPU of their own are spread over the GPUs in `spread_over`.

    `model` is a broadcast variable, or an Artifact, with sparkring's archive and the packed model. `types` is the Arrow
    schema of the columns, serialized; if it is None, the types are inferred from the values.
    """

    process: ModelOrder
    model: Any
    types: bytes | None
    batch_size: int
    spread_over: Sequence[str]


def score(order: Scoring, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the predictions for the batches of a partition, as a pandas iterator UDF."""
    import pyarrow

    schema = None if order.types is None else pyarrow.ipc.read_schema(pyarrow.py_buffer(order.types))
    process = _OfPartition(order)
    try:
        for request in _requests(batches, schema, order.batch_size):
            yield _as_pandas(process.ask(request))
        process.finish()
    finally:
        process.close()
        _forget_zip_files()


def _forget_zip_files() -> None:
    """Let the next task of this worker begin sooner.

    At the beginning of each task, Spark calls importlib.invalidate_caches(). Before Python 3.13, this reads the list of
    contents of each known zip file again and again, once for each package in it. With the zip files of pyspark, this
    takes longer than many a task. A file that has been forgotten is read when a module is next looked for in it.
    """
    import zipimport

    contents = getattr(zipimport, "_zip_directory_cache", {})
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            sys.path_importer_cache.pop(path, None)
            contents.pop(finder.archive, None)


# ── Rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _requests(batches: Iterable[Any], schema: Any, batch_size: int) -> Iterator[Any]:
    """Yield the rows as Arrow tables whose lengths are multiples of `batch_size`, except for the last one.

    This way, the batch of a row depends only on the partition.
    """
    kept: list[Any] = []
    rows = 0
    for batch in _sent(batches, schema):
        kept.append(_as_arrow(batch, schema))
        rows += len(kept[-1])
        if ready := rows - rows % batch_size:
            table = _joined(kept)
            yield table.slice(0, ready)
            kept, rows = table.slice(ready).to_batches(), rows - ready
    if rows:
        yield _joined(kept)


def _sent(batches: Iterable[Any], schema: Any) -> Iterator[Any]:
    """Yield the batches that Spark sends. Raise RuntimeError if Spark cannot convert dates or times for pandas."""
    try:
        yield from batches
    except (OverflowError, ValueError) as error:  # pandas' OutOfBoundsDatetime is a ValueError
        raise RuntimeError(f"sparkring: {not_in_pandas(schema, error)}") from error


def not_in_pandas(schema: Any, error: Exception) -> str:
    """Return the message about dates or times that Python or pandas cannot represent."""
    from pyarrow import types

    named = [f"`{field.name}`" for field in schema or () if types.is_temporal(field.type)]
    return (
        f"the rows cannot be sent to Python, which cannot represent dates or times in "
        f"{', '.join(named) or 'one of the columns'}: {error}. Leave these rows out, or cast the column to a string."
    )


def _joined(batches: Sequence[Any]) -> Any:
    """Return the rows of several batches as a table. Types that were inferred may differ from batch to batch."""
    import pyarrow

    kinds = zip(*(batch.schema.types for batch in batches), strict=True)
    schema = pyarrow.schema(list(zip(batches[0].schema.names, map(_common_type, kinds), strict=True)))
    return pyarrow.concat_tables([pyarrow.Table.from_batches([batch]).cast(schema) for batch in batches])


def _common_type(kinds: Iterable[Any]) -> Any:
    """Return the type that holds the values of all types: a column of integers is float64 in batches with nulls."""
    from pyarrow import list_, null, types

    typed = [kind for kind in dict.fromkeys(kinds) if not types.is_null(kind)]
    if len(typed) > 1 and all(map(types.is_list, typed)):
        return list_(_common_type(kind.value_type for kind in typed))
    return next(filter(types.is_floating, typed), typed[0] if typed else null())


def _as_arrow(batch: Any, schema: Any) -> Any:
    """Return a pandas UDF's batch (a Series, a DataFrame for a struct, or a tuple of these) as Arrow columns.

    Without a schema, the names of the columns are numbers, and the names of a struct's fields contain a dot. Columns
    beyond those of the schema are ignored.
    """
    import pandas
    import pyarrow

    series_by_name: dict[str, Any] = {}
    for number, part in enumerate(batch if isinstance(batch, tuple) else (batch,)):
        if isinstance(part, pandas.DataFrame):
            series_by_name.update((f"{number}.{at}", part.iloc[:, at]) for at in range(part.shape[1]))
        else:
            series_by_name[str(number)] = part
    fields = [None] * len(series_by_name) if schema is None else schema
    columns = [_column(series, field) for series, field in zip(series_by_name.values(), fields, strict=False)]
    if schema is None:
        return pyarrow.RecordBatch.from_arrays(columns, names=list(series_by_name))
    return pyarrow.RecordBatch.from_arrays([in_numbers(column) for column in columns], names=schema.names)


def in_numbers(column: Any) -> Any:
    """Return day-time intervals, or lists of them, as int64 microseconds, as shards() does. Return others unchanged."""
    import pyarrow

    def stored(kind: Any) -> Any:
        if pyarrow.types.is_list(kind):
            return pyarrow.list_(stored(kind.value_type))
        return pyarrow.int64() if pyarrow.types.is_duration(kind) else kind

    inner = column.type
    while pyarrow.types.is_list(inner):
        inner = inner.value_type
    return column.cast(stored(column.type)) if pyarrow.types.is_duration(inner) else column


def _column(series: Any, field: Any) -> Any:
    import numpy
    import pyarrow

    kind = None if field is None else field.type
    values = series.to_numpy()
    if values.dtype.kind == "f":
        if kind is None or pyarrow.types.is_floating(kind):
            return pyarrow.array(values, kind)  # a NaN stays a NaN
        if (numpy.abs(values) >= _EXACT).any():  # these are integers beside nulls, which Spark sends as float64
            raise RuntimeError(
                f"sparkring: column `{field.name}` has nulls, and integers beyond ±2**53, which pandas would round: "
                f"replace the nulls with fill={{{field.name!r}: 0}}, or leave these rows out with df.dropna()."
            )
    if len(values) and values.dtype == object and (kind is None or pyarrow.types.is_list(kind)):
        # Arrow's own conversion of many small arrays takes much longer.
        with contextlib.suppress(TypeError, ValueError):  # a null, or arrays of arrays
            lengths = numpy.fromiter(map(len, values), numpy.int32, len(values))
            if all(type(value) is numpy.ndarray for value in values):
                flat = numpy.concatenate(values)
                if flat.dtype.kind in "biuf":
                    offsets = numpy.concatenate([[0], lengths.cumsum()]).astype(numpy.int32)
                    inner = pyarrow.array(flat, None if kind is None else kind.value_type)
                    made = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), inner)
                    return made if kind is None else made.cast(kind)
    return pyarrow.array(series, kind, from_pandas=True)


def _as_pandas(batch: Any) -> Any:
    """Return the answer as the UDF's result: a Series, or a DataFrame if the UDF returns a struct."""
    import pandas

    columns = {name: _as_series(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    if batch.schema.metadata and b"struct" in batch.schema.metadata:
        return pandas.DataFrame(columns)
    return next(iter(columns.values()))


def _as_series(column: Any) -> Any:
    """Return a Series from which Spark gets exactly the values of an Arrow column.

    From a Series of NumPy numbers, Spark would make nulls of all NaNs, and integers beside nulls would be rounded.
    """
    import pandas
    import pyarrow

    if pyarrow.types.is_map(column.type):
        return pandas.Series([None if pairs is None else dict(pairs) for pairs in column.to_pylist()], dtype=object)
    if not (pyarrow.types.is_floating(column.type) or pyarrow.types.is_integer(column.type)):
        return column.to_pandas()

    class Exact(pandas.arrays.ArrowExtensionArray):  # type: ignore[misc]
        def __arrow_array__(self, type: Any = None) -> Any:
            return super().__arrow_array__(type).combine_chunks()  # Spark needs an array without chunks

    return pandas.Series(Exact(column))


# ── The model process ────────────────────────────────────────────────────────────────────────────────────────────────


class Process:
    """A connection to the model process of this machine, or to that of some `gpus`. It is opened when first needed.

    A subclass says where the model is, and how errors name the rows.
    """

    def __init__(self, order: ModelOrder, gpus: Sequence[str] = ()) -> None:
        self._order, self._gpus = order, sorted(gpus)
        name = f"sparkring-model-{order.key}"
        if gpus:  # addresses may be long, and may have characters that file names cannot have
            name += f"-{hashlib.sha256(','.join(self._gpus).encode()).hexdigest()[:8]}"
        self._folder = os.path.join(_temporary(), name)
        self._connection: Any = None
        self._rows = 0  # how many rows have been scored
        self._about: dict[bytes, bytes] | None = None  # the Arrow metadata of each request

    def _model_file(self) -> str:
        """Return the path of the file with sparkring's archive and the packed model. The folder is locked."""
        raise NotImplementedError

    def _place(self, first: int, rows: int) -> str:
        """Return how errors name `rows` rows from row `first` on."""
        raise NotImplementedError

    def ask(self, rows: Any) -> Any:
        """Return the model's answer for an Arrow table, as an Arrow batch."""
        import pyarrow

        rows, sink = rows.replace_schema_metadata(self._about), pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        sent = sink.getvalue()
        output = "none"
        for _ in range(_ATTEMPTS):
            try:
                if self._connection is None:
                    self._connection = self._connected()
                self._connection.send_bytes(sent)
                answer = json.loads(self._connection.recv_bytes())
                if "error" in answer:
                    raise RuntimeError(self._error(answer, len(rows)))
                outputs = pyarrow.ipc.open_stream(self._connection.recv_bytes()).read_next_batch()
                self._rows += len(rows)
                return outputs
            except (OSError, EOFError, _Ended) as error:
                output = str(error) if isinstance(error, _Ended) else self._output()
                self.close()
        self._remove()
        on = f" on GPU {', '.join(self._gpus)}" if self._gpus else ""
        raise RuntimeError(
            f"sparkring: the process with the model{on} exited {_ATTEMPTS} times before it had scored "
            f"{self._place(self._rows, len(rows))}. Perhaps it ran out of memory. Its last output: {output}"
        )

    def _error(self, answer: dict[str, Any], rows: int) -> str:
        if not answer["of_rows"]:
            return f"sparkring: {answer['error']}"
        row = answer["row"]
        place = self._place(self._rows, rows) if row is None else self._place(self._rows + row, 1)
        return f"sparkring: {place}: {answer['error']}"

    def finish(self) -> None:
        """Tell the process that all rows have been sent."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(b"")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> Any:
        """Return a connection to the model process. Start the process if it is not running.

        Raise _Ended, with the last output of the process, if the process exits before it listens.
        """
        started = False
        while True:
            with contextlib.suppress(OSError, EOFError):
                return self._dialled()
            lock = self._locked()
            try:
                if not self._is_current(lock):  # the process has just exited, and has removed its folder
                    continue
                # The model process may have begun to listen while this process waited for the lock.
                with contextlib.suppress(OSError, EOFError):
                    return self._dialled()
                if started:
                    output = self._output()
                    shutil.rmtree(self._folder, ignore_errors=True)
                    raise _Ended(output)
                self._start(lock)
                started = True
            finally:
                os.close(lock)

    def _dialled(self) -> Any:
        from multiprocessing.connection import Client

        _check_private(self._folder)
        return Client(os.path.join(self._folder, "socket"), "AF_UNIX", authkey=bytes.fromhex(self._order.token))

    def _locked(self) -> int:
        """Wait until no process is starting or exiting in the folder, and lock it. Return the open file of the lock."""
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
            with contextlib.suppress(FileNotFoundError):  # a process that is exiting has just removed its folder
                _check_private(self._folder)
                lock = os.open(os.path.join(self._folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
                return lock

    def _is_current(self, lock: int) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(lock), os.stat(os.path.join(self._folder, "lock")))
        return False

    def _remove(self) -> None:
        """Remove the folder, unless a process is listening in it."""
        lock = self._locked()
        try:
            with contextlib.suppress(OSError, EOFError):
                self._dialled().close()
                return
            shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            os.close(lock)

    def _start(self, lock: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, "socket"))  # left by a process that was killed
        path = self._model_file()
        order = changed(self._order, model=path, folder=self._folder, lock=lock, gpus=self._gpus)
        with open(path, "rb") as file:  # without unpickling the model, read the first item of the tuple
            archive = next(value for _, value, _ in pickletools.genops(file) if isinstance(value, bytes))
        with open(os.path.join(self._folder, "log"), "wb") as log:
            pid = start_detached(
                "sparkring.worker.model.server",
                # The parent of a task's process is Spark's daemon, which lives as long as the executor.
                order if order.watch else changed(order, watch=os.getppid()),
                {**os.environ, **_threads(), **_visible(self._gpus), **order.environment},
                log,
                first=[unpacked(archive, self._folder)],
                last=[*sys.path, *order.path],
                passed=[lock],
            )
        # If this has failed, _connected() notices the failure when it has the lock again.
        if pid:
            with open(os.path.join(self._folder, "pid"), "w") as file:
                file.write(str(pid))

    def _output(self) -> str:
        with contextlib.suppress(OSError), open(os.path.join(self._folder, "log"), "rb") as log:
            return log.read().decode(errors="replace").strip()[-_LOGGED:] or "none"
        return "none"


class _OfPartition(Process):
    """The connection of a Spark task, which scores the rows of a partition."""

    def __init__(self, order: Scoring) -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        self._partition = context.partitionId() if context is not None else 0
        super().__init__(order.process, _gpus_of(context, order.spread_over))
        self._model = order.model
        if context is not None:
            query = context.getLocalProperty("spark.sql.execution.id") or ""
            place = [context.taskAttemptId(), query, context.stageId(), self._partition]
            if stream := context.getLocalProperty("sql.streaming.queryId"):  # each micro-batch would have a record
                self._order = changed(self._order, of_stream=True)
                self._about = {STREAM: stream.encode()}
            else:
                self._about = {TASK: json.dumps(place).encode()}

    def _model_file(self) -> str:
        path: str | None = getattr(self._model, "path", None) or getattr(self._model, "_path", None)
        if path is None or not os.path.exists(path):  # if Spark encrypts what it writes to disk, there is no file
            path = os.path.join(self._folder, "model")
            with open(path, "wb") as file:
                pickle.dump(self._model.value, file)
            vars(self._model).pop("_value", None)  # this process need not keep the model
        return path

    def _place(self, first: int, rows: int) -> str:
        which = f"row {first:,}" if rows == 1 else f"rows {first:,} to {first + rows - 1:,}"
        return f"{which} of partition {self._partition}"


def _gpus_of(context: Any, spread_over: Sequence[str]) -> Sequence[str]:
    """Return the addresses of the task's GPUs. If Spark assigns none, the task gets one of those in `spread_over`."""
    if context is None:
        return ()
    held = context.resources().get("gpu")
    if held is not None:
        addresses: Sequence[str] = held.addresses
        return addresses
    return [spread_over[context.partitionId() % len(spread_over)]] if spread_over else ()


def _visible(gpus: Sequence[str]) -> dict[str, str]:
    """Return settings that let the model process see only these GPUs. Without GPUs, it sees what the task sees."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _temporary() -> str:
    """Return the folder for temporary files, or /tmp if a socket's path would then be longer than macOS allows."""
    use_temporary_folder()
    folder = tempfile.gettempdir()
    return folder if len(folder) <= SHORT else "/tmp"


def _threads() -> dict[str, str]:
    """Return settings that let the model process use all cores, instead of the number that Spark sets for a task.

    Its threads sleep while they wait for work, because the tasks need the cores then.
    """
    return {"OMP_NUM_THREADS": str(cores()), "OMP_WAIT_POLICY": "PASSIVE"}


def _check_private(folder: str) -> None:
    """Raise an error unless only this user can enter a folder. Raise FileNotFoundError if it does not exist."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise RuntimeError(f"sparkring: {folder} belongs to another user, or others can enter it: remove the folder.")
