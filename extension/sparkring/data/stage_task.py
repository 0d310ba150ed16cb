"""Stages a partition of a micro-batch for the ranks: returns its rows if they are few, or writes them to a file.

This module is sent to executors by value. It uses only the standard library and the packages that pandas UDFs need.
Folders that are not local need fsspec, too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

COLUMNS = "part int, rows bigint, bytes bigint, nulls array<string>, name string, data binary"


class Staging(NamedTuple):
    """Where the rows of a micro-batch go.

    Partitions of at most `inline_bytes` are returned. Others are written to `folder`, as a file whose name begins with
    `prefix`. `local` says whether the folder is in the file system of each machine; otherwise, it is a URL, which
    fsspec opens. Of the columns in `null_columns`, those that have nulls are named.
    """

    folder: str
    local: bool
    prefix: str
    inline_bytes: int
    null_columns: Sequence[str]


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
    nulls = [name for name in order.null_columns if table.column(name).null_count]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data, name = sink.getvalue().to_pybytes(), ""
    size_bytes = len(data)
    if size_bytes > order.inline_bytes:
        name = f"{order.prefix}-{part}-{secrets.token_hex(6)}.arrow"
        _write(order, name, data)
        data = b""
    yield pa.RecordBatch.from_pydict({
        "part": pa.array([part], pa.int32()),
        "rows": pa.array([table.num_rows], pa.int64()),
        "bytes": pa.array([size_bytes], pa.int64()),
        "nulls": pa.array([nulls], pa.list_(pa.string())),
        "name": pa.array([name], pa.string()),
        "data": pa.array([data], pa.binary()),
    })  # fmt: skip


def _write(order: Staging, name: str, data: bytes) -> None:
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
    import fsspec

    fs, path = fsspec.core.url_to_fs(f"{order.folder}/{name}")
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, data)
