"""Stages a partition of a micro-batch for the ranks: returns its rows if they are few, or writes them to a file.

Executors need not have sparkring: the driver compiles this file's text and pickles its functions by value. So this file
uses only the standard library and the packages that pandas UDFs need. Folders that are not local need fsspec, too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

COLUMNS = "part int, rows bigint, bytes bigint, nulls array<string>, name string, data binary"


def staging(
    folder: str, local: bool, prefix: str, inline_bytes: int, null_columns: list[str]
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return the function of a task, for mapInArrow(). It yields one row with the COLUMNS, or none without rows.

    Partitions of at most `inline_bytes` are returned in `data`. Others are written to `folder`, as a file whose name
    begins with `prefix`. `nulls` lists those of `null_columns` that have nulls.
    """

    def stage(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark import TaskContext

        found = [batch for batch in batches if batch.num_rows]
        if not found:
            return
        context = TaskContext.get()
        part = context.partitionId() if context is not None else 0
        table = pa.Table.from_batches(found)
        nulls = [name for name in null_columns if table.column(name).null_count]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        data, name = sink.getvalue().to_pybytes(), ""
        size_bytes = len(data)
        if len(data) > inline_bytes:
            name = f"{prefix}-{part}-{secrets.token_hex(6)}.arrow"
            _write(folder, local, name, data)
            data = b""
        yield pa.RecordBatch.from_pydict({
            "part": pa.array([part], pa.int32()),
            "rows": pa.array([table.num_rows], pa.int64()),
            "bytes": pa.array([size_bytes], pa.int64()),
            "nulls": pa.array([nulls], pa.list_(pa.string())),
            "name": pa.array([name], pa.string()),
            "data": pa.array([data], pa.binary()),
        })  # fmt: skip

    def _write(folder: str, local: bool, name: str, data: bytes) -> None:
        """Write a file. A file that is only half written keeps a name that nobody reads."""
        if local:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, name)
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

        fs, path = fsspec.core.url_to_fs(f"{folder}/{name}")
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(path, data)

    return stage
