"""What a Spark task does: unpack sparkring, start a member, give it the partition's rows, wait until it ends.

Executors need not have sparkring: this file's text is compiled on the driver and its functions are pickled by value. So
it uses the standard library and pyspark only (and, for rows, pyarrow). Training runs in the member's child, never in
Spark's Python worker, which is reused between tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def task_for(
    archive: bytes,
    boot: str,
    ticket: dict[str, Any],
    environment: dict[str, str],
    gpus: int | None,
    size: int,
    schema: bytes | None,
    rows_end: bytes,
) -> Callable[[Iterable[Any]], Iterator[int]]:
    """The function for mapPartitions: yields the member's exit code.

    The rank gets the GPUs that Spark gave to the task, or the first `gpus` of them.
    With `schema` (a serialized Arrow schema), it is the function for mapInArrow, and yields nothing: the partition's
    batches go to the rank, and `rows_end` after the last.
    """

    def run_member(rows: Iterable[Any]) -> Iterator[int]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        tasks = len(context.getTaskInfos())
        if tasks != size:  # Spark may choose the number of partitions only when it has seen the data
            raise RuntimeError(
                f"sparkring: the DataFrame has {tasks} partitions, not {size}, because Spark adapted its plan to the "
                f"data: use .repartition({size})."
            )
        folder = tempfile.mkdtemp(prefix="sparkring-")
        found = {**ticket, **_of_task(context, _unpacked(archive, folder), gpus), "cleanup": folder}
        pipe, passed = None, []
        if schema is not None:
            found["rows"], written = os.pipe()
            pipe, passed = os.fdopen(written, "wb"), [found["rows"]]
        member = subprocess.Popen(
            [sys.executable, "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
            pass_fds=passed,
        )
        assert member.stdin is not None
        try:
            for descriptor in passed:
                os.close(descriptor)
            member.stdin.write(json.dumps(found).encode() + b"\n")
            member.stdin.flush()
            # stdin stays open: when Spark kills this worker, it closes, and the member ends.
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a rank that needs no more rows closes its end
                    _feed(pipe, rows, schema, rows_end)
            code = member.wait()
            if code != 0:  # this error makes Spark end the whole stage; else the other ranks would wait in vain
                raise RuntimeError(
                    f"sparkring: the process of task {context.partitionId()} on {socket.gethostname()} ended with "
                    f"code {code}; what it printed is in the executor's stderr. Does `{sys.executable}` start there?"
                )
            if pipe is None:
                yield code
        finally:
            member.stdin.close()
            member.wait()
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # not before the rank has ended: it would take this for the end of the rows
            shutil.rmtree(folder, ignore_errors=True)  # the member does this itself, unless it was killed

    return run_member


def _unpacked(archive: bytes, folder: str) -> str:
    path = os.path.join(folder, "sparkring.zip")
    with open(path, "wb") as file:
        file.write(archive)
    return path


def _of_task(context: Any, archive: str, gpus: int | None) -> dict[str, Any]:
    """The fields of the ticket that depend on this task."""
    from pyspark import SparkFiles

    # The files of addPyFile() on this executor: Spark puts them on the path of its own workers only.
    root = SparkFiles.getRootDirectory()
    held = context.resources().get("gpu")
    # The executor's port or path, and the secret. Their names and types differ between versions of pyspark, so all
    # attributes of these types are taken.
    shared = {
        name: value
        for name, value in vars(type(context)).items()
        if isinstance(value, (int, str)) and not name.startswith("__")
    }
    return {
        "member": context.partitionId(),
        "first": [archive, *(entry for entry in sys.path if entry.startswith(root))],
        "gpus": held.addresses[:gpus] if held else [],
        "context": pickle.dumps((vars(context), shared)).hex(),
    }


def _feed(pipe: Any, rows: Iterable[Any], schema: bytes | None, rows_end: bytes) -> None:
    """Give the rank the rows as it reads them."""
    import pyarrow

    described = pyarrow.ipc.read_schema(pyarrow.py_buffer(schema))
    writer = None
    for numbered in rows:
        batch = pyarrow.RecordBatch.from_arrays(numbered.columns, names=described.names)
        # Spark's batches have only Arrow's types; our schema's metadata has Spark's types.
        writer = writer or pyarrow.ipc.new_stream(pipe, batch.schema.with_metadata(described.metadata))
        writer.write_batch(batch)
        pipe.flush()
    if _broke_off():
        raise RuntimeError("sparkring: Spark could not compute the rows of this partition")
    writer = writer or pyarrow.ipc.new_stream(pipe, described)
    writer.close()
    pipe.write(rows_end)
    pipe.close()


def _broke_off() -> bool:
    """Whether Spark failed while it made the rows. It then closes the stream, which looks like the end of the rows.

    After a true end, Spark's worker (some frames up) still has something to read.
    """
    frame: Any = sys._getframe()
    while frame is not None and not hasattr(frame.f_locals.get("infile"), "peek"):
        frame = frame.f_back
    return frame is not None and not frame.f_locals["infile"].peek(1)
