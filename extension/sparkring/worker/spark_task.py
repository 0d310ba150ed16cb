"""Starts a member in a Spark task, sends the rows of the partition to the rank, and waits for the member to exit.

This module is sent to executors by value. It uses only the standard library, the package `executor`, pyspark and, for
rows, pyarrow. The rank is a process of its own, because Spark reuses its Python workers for other tasks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sparkring.executor.archive import unpacked
from sparkring.executor.boot import start, use_temporary_folder
from sparkring.executor.environment import EnvironmentOrder, unpacked_environment
from sparkring.executor.handshake import GREETING
from sparkring.executor.orders import ROWS_END, UNREACHED, Ticket, changed
from sparkring.executor.processes import kill_orphans

_CONNECT_S = 5.0


class MemberTask(NamedTuple):
    """The member that each task of a stage runs. Its task completes the `ticket`.

    `size` is the number of members of the ring; 0 if each member is alone, as those of a pool may be. `barrier` says
    whether the tasks are a barrier stage. If the stage has rows, `schema` is their serialized Arrow schema. The rank
    gets the GPUs that Spark has assigned to the task or, if `gpus` is a number, only the first `gpus` of them. The
    member runs the Python of the `environment_pack`, if there is one.
    """

    archive: Any
    ticket: Ticket
    environment: Mapping[str, str]
    gpus: int | None
    size: int
    barrier: bool
    schema: bytes | None
    environment_pack: EnvironmentOrder | None = None


def run_member(order: MemberTask, rows: Iterable[Any]) -> Iterator[int | str]:
    """Run a member in a task.

    Without a schema, this is a function for mapPartitions. It yields the member's exit code or, if the member is alone,
    a sentence that says why the member could not connect to the driver. With a schema, it is a function for mapInArrow:
    it sends the partition's batches and then ROWS_END to the rank, and yields nothing.

    Spark may run an ordinary task again, or run a copy of it (speculation). Then the driver lets this member wait until
    the ring has ended, unless it has to replace a lost one. The task then raises an error: if a copy returned, Spark
    would end the original. It does not raise one earlier, since Spark ends a stage after a few errors of a task.
    """
    from pyspark import BarrierTaskContext, SparkFiles, TaskContext

    size = order.size
    context: Any = BarrierTaskContext.get() if order.barrier else TaskContext.get()
    # Spark may change the number of partitions when it has seen the data.
    tasks = len(context.getTaskInfos()) if order.barrier else max(size, context.partitionId() + 1)
    if size and tasks != size:
        raise RuntimeError(f"sparkring: {partitions_differ(tasks, size)}")
    # In an executor of a standalone cluster, this is relative to the working folder, which is another one on the rank.
    root = SparkFiles.getRootDirectory()
    # Files from addPyFile() are below this folder, on the sys.path of Spark's workers only.
    first, root = [os.path.abspath(entry) for entry in sys.path if entry.startswith(root)], os.path.abspath(root)
    use_temporary_folder()
    folder, read, pipe = tempfile.mkdtemp(prefix="sparkring-"), -1, None
    if order.schema is not None:
        read, written = os.pipe()
        pipe = os.fdopen(written, "wb")
    python, used = sys.executable, -1
    if order.environment_pack is not None:
        python, used = unpacked_environment(order.environment_pack)
    member = start(
        "sparkring.worker.member.member",
        changed(order.ticket, cleanup=folder, rows=read, **_of_task(context, root, order)),
        {**os.environ, **order.environment},
        first=[unpacked(order.archive, folder), *first],
        passed=[descriptor for descriptor in (read, used) if descriptor >= 0],
        python=python,
    )
    if used >= 0:
        os.close(used)  # the member keeps the environment
    assert member.stdin is not None
    try:
        # The member's stdin stays open while the member runs. If Spark kills this process, stdin is closed, which ends
        # the member.
        if pipe is not None:
            os.close(read)
            with contextlib.suppress(BrokenPipeError):  # a rank that needs no more rows closes its end
                _feed(pipe, rows, order.schema)
        code = member.wait()
        which = f"the process of task {context.partitionId()} on {socket.gethostname()}"
        if code < 0:
            kill_orphans(member.pid)
            raise RuntimeError(
                f"sparkring: {which} was killed by signal {-code}. Another process or the operating system sent "
                "the signal. Run `dmesg` on that machine to see whether it ran out of memory."
            )
        if code == UNREACHED:
            unreached = _unreached(order.ticket.host, order.ticket.port)
            if size or context.attemptNumber():
                raise ConnectionError(f"sparkring: {unreached}")
            yield unreached  # Spark would run the task again after an error, with the same result
            return
        if code != 0:  # the error makes Spark end the stage; otherwise, the other ranks would wait forever
            raise RuntimeError(
                f"sparkring: {which} exited with code {code}; what it printed is in the executor's stderr. "
                f"Does `{python}` start there?"
            )
        if pipe is None:
            yield code
    finally:
        with contextlib.suppress(BrokenPipeError):
            member.stdin.close()
        member.wait()
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # not before the member exits: the rank would take it for the end of the rows
        shutil.rmtree(folder, ignore_errors=True)  # the member does this, unless it was killed


def partitions_differ(tasks: int, size: int) -> str:
    """Return a sentence for a DataFrame that has other partitions than there are ranks."""
    return (
        f"the DataFrame has {tasks} partitions, not {size}, because Spark adapted its plan to the data: use "
        f".repartition({size})."
    )


def _unreached(host: str, port: int) -> str:
    """Return a sentence that says why a member could not connect to the driver. This function connects once more."""
    try:
        with socket.create_connection((host, port), _CONNECT_S) as connection:
            is_driver = connection.recv(len(GREETING)) == GREETING
        why = "the driver took too long to answer" if is_driver else "another program answered"
    except OSError as error:
        why = error.strerror or str(error)
    return f"the executor on {socket.gethostname()} cannot connect to the driver at {host}:{port}: {why}."


def _of_task(context: Any, root: str, order: MemberTask) -> dict[str, Any]:
    """Return the fields of the ticket that are different for each task."""
    held = context.resources().get("gpu")
    # The rank's context needs the port or path of the executor's socket, and the secret. These are attributes of the
    # class. Their names differ between versions of pyspark, so take all attributes that are strings or numbers.
    kind = type(context)
    shared = {
        name: value for name, value in vars(kind).items() if isinstance(value, (int, str)) and not name.startswith("__")
    }
    packed = pickle.dumps((kind, vars(context), shared, root, bool(order.size)))
    return {
        "member": context.partitionId(),
        "attempt": context.attemptNumber(),
        "gpus": held.addresses[: order.gpus] if held else [],
        "context": packed.hex(),
    }


def _feed(pipe: Any, rows: Iterable[Any], schema: bytes | None) -> None:
    """Write the rows to `pipe`, from which the rank reads them. Block while the rank is not reading."""
    import pyarrow

    described = pyarrow.ipc.read_schema(pyarrow.py_buffer(schema))
    writer = None
    for numbered in rows:
        batch = pyarrow.RecordBatch.from_arrays(numbered.columns, names=described.names)
        # Spark's batches have only Arrow types. The metadata of `schema` contains the columns' types in Spark.
        writer = writer or pyarrow.ipc.new_stream(pipe, batch.schema.with_metadata(described.metadata))
        writer.write_batch(batch)
        pipe.flush()
    if _broke_off():
        raise RuntimeError("sparkring: Spark could not compute the rows of this partition")
    writer = writer or pyarrow.ipc.new_stream(pipe, described)
    writer.close()
    pipe.write(ROWS_END)
    pipe.close()


def _broke_off() -> bool:
    """Return whether Spark failed while it computed the rows, and closed the stream that the Python worker reads.

    After the true end of the rows, the stream still has something to read. The stream is the variable `infile` in a
    frame of the Python worker.
    """
    frame: Any = sys._getframe()
    while frame is not None and not hasattr(frame.f_locals.get("infile"), "peek"):
        frame = frame.f_back
    return frame is not None and not frame.f_locals["infile"].peek(1)
