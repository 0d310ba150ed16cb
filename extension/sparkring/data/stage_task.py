"""Stages a partition of a micro-batch for the ranks: returns its rows if they are few, or writes them to a file.

This module is sent to executors, and to the server of Spark Connect, by value. It uses only the standard library and
the packages that pandas UDFs need. Folders that are not local need fsspec, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sparkring.executor.orders import changed

COLUMNS = "part int, rows bigint, bytes bigint, nulls array<string>, name string, data binary"
# The file with which the notebook says that it is alive, and which micro-batch its ranks have taken; and the end of the
# names of the files with which the server offers micro-batches.
LEASE, OFFER = "lease.json", "-offer.json"
_POLLS_S = 0.005, 0.1, 0.5  # the time between two looks: at first, at most in a local folder, and at most in others


class Staging(NamedTuple):
    """Where the rows of a micro-batch go.

    Partitions of at most `inline_bytes` are returned. Others are written to `folder`, as a file whose name begins with
    `prefix`. `local` says whether the folder is in the file system of each machine; otherwise, it is a URL, which
    fsspec opens. Of the columns in `null_columns`, those that have nulls are named. `names` replace the names of the
    columns, unless it is empty.
    """

    folder: str
    local: bool
    prefix: str
    inline_bytes: int
    null_columns: Sequence[str]
    names: Sequence[str] = ()


class HandingOver(NamedTuple):
    """Where the server of Spark Connect offers micro-batches to the notebook: a folder, like that of a Staging.

    The rows go where `staging` says. The server stops waiting when the notebook has not changed its lease for `lease_s`
    seconds, and then removes the folder.
    """

    folder: str
    local: bool
    staging: Staging
    lease_s: float


def hand_over(order: HandingOver, frame: Any, batch_id: int) -> None:
    """Stage a micro-batch, offer it to the notebook, and wait until the ranks have taken it.

    The server calls this for foreachBatch(), in a process of its own, which Spark kills when the query is stopped.
    Raise TimeoutError if the notebook has gone. Spark then does not count the micro-batch as done.
    """
    began, done = time.monotonic(), threading.Event()
    threading.Thread(target=_end_with, args=(os.getppid(), done), daemon=True).start()
    try:
        _offer(order, frame, batch_id, began)
    finally:
        done.set()


def _end_with(server: int, done: threading.Event) -> None:
    """End this process if the server dies. Otherwise, pyspark would try to reach the server for half an hour."""
    while not done.wait(1.0):
        if os.getppid() != server:
            os._exit(1)


def _offer(order: HandingOver, frame: Any, batch_id: int, began: float) -> None:
    staging = changed(order.staging, prefix=str(batch_id))
    # mapInArrow() looks columns up by name, which fails if a name has a backtick.
    rows = frame.toDF(*map(str, range(len(frame.columns))))
    parts = sorted(rows.mapInArrow(lambda batches: stage(staging, batches), COLUMNS).collect())
    seen_s = time.monotonic()
    offer = {
        "pieces": [(part.name, part.rows) for part in parts],
        "nulls": sorted({name for part in parts for name in part.nulls}),
        "moving_s": seen_s - began,
    }
    write(order, f"{batch_id}{OFFER}", json.dumps(offer).encode())
    pause_s, longest_s = _POLLS_S[0], _POLLS_S[1 if order.local else 2]
    lease = b""
    while True:
        news = _read(order, LEASE)
        if news and news != lease:
            lease, seen_s = news, time.monotonic()
            if json.loads(news)["taken"] == batch_id:
                return
        if time.monotonic() - seen_s > order.lease_s:
            for part in parts:
                _remove(staging, part.name)
            _remove(order, "")
            if order.local:
                with contextlib.suppress(OSError):  # it has files of other micro-batches
                    os.rmdir(staging.folder)
            raise TimeoutError(f"batch {batch_id} was not taken: the notebook has been silent for {order.lease_s:g} s")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)


def stage(order: Staging, batches: Iterable[Any]) -> Iterator[Any]:
    """Stage the batches of a partition, for mapInArrow(). Yield one row with the COLUMNS, or none without rows."""
    import pyarrow as pa
    from pyspark import TaskContext

    filled = [batch for batch in batches if batch.num_rows]
    if not filled:
        return
    context = TaskContext.get()
    part = context.partitionId() if context is not None else 0
    table = pa.Table.from_batches(filled)
    table = table.rename_columns(list(order.names)) if order.names else table
    nulls = [name for name in order.null_columns if table.column(name).null_count]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data, name = sink.getvalue().to_pybytes(), ""
    size_bytes = len(data)
    if size_bytes > order.inline_bytes:
        name = f"{order.prefix}-{part}-{secrets.token_hex(6)}.arrow"
        write(order, name, data)
        data = b""
    yield pa.RecordBatch.from_pydict({
        "part": pa.array([part], pa.int32()),
        "rows": pa.array([table.num_rows], pa.int64()),
        "bytes": pa.array([size_bytes], pa.int64()),
        "nulls": pa.array([nulls], pa.list_(pa.string())),
        "name": pa.array([name], pa.string()),
        "data": pa.array([data], pa.binary()),
    })  # fmt: skip


def write(order: Staging | HandingOver, name: str, data: bytes) -> None:
    """Write a file. A file that is only half written keeps a name that nobody reads."""
    if order.local:
        os.makedirs(order.folder, exist_ok=True)
        path = os.path.join(order.folder, name)
        try:
            with open(f"{path}.part", "wb") as file:
                file.write(data)
            os.rename(f"{path}.part", path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(f"{path}.part")
            raise
        return
    fs, path = _remote(order, name)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, data)


def _read(order: HandingOver, name: str) -> bytes:
    """Return the content of a file, or b"" if it cannot be read now."""
    try:
        if order.local:
            with open(os.path.join(order.folder, name), "rb") as file:
                return file.read()
        fs, path = _remote(order, name)
        return bytes(fs.cat_file(path))
    except Exception:  # each of fsspec's packages raises its own errors
        return b""


def _remove(order: Staging | HandingOver, name: str) -> None:
    """Remove a file in the folder, or the whole folder if `name` is ''."""
    with contextlib.suppress(Exception):  # each of fsspec's packages raises its own errors
        if order.local:
            path = os.path.join(order.folder, name)
            shutil.rmtree(path) if not name else os.remove(path)
        else:
            fs, path = _remote(order, name)
            fs.rm(path, recursive=not name)


def _remote(order: Staging | HandingOver, name: str) -> tuple[Any, str]:
    import fsspec

    fs, path = fsspec.core.url_to_fs(f"{order.folder}/{name}".rstrip("/"))
    return fs, str(path)
