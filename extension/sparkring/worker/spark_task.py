"""Starts a member in a Spark task, sends the rows of the partition to the rank, and waits for the member to exit.

Executors need not have sparkring: the driver compiles this file's text and pickles its functions by value. So they use
only the standard library, pyspark (and, for rows, pyarrow) and constants, and the task writes an archive of sparkring
to a folder for the member. The rank is a process of its own, because Spark reuses its Python workers for other tasks.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sparkring.wire.channel import GREETING
from sparkring.wire.ticket import UNREACHED

_CONNECT_S = 5.0


def task_for(
    archive: bytes,
    boot: str,
    ticket: dict[str, Any],
    environment: dict[str, str],
    gpus: int | None,
    size: int,
    schema: bytes | None,
    rows_end: bytes,
    fork: Callable[[bytes, str, dict[str, Any]], Any] | None,
) -> Callable[[Iterable[Any]], Iterator[int | str]]:
    """Return the function that each Spark task calls.

    `size` is the number of tasks of the barrier stage; 0 if the task belongs to an ordinary stage. Without `schema`,
    the function is for mapPartitions, and yields the member's exit code or, in an ordinary stage, a sentence that says
    why the member could not connect to the driver. With `schema` (a serialized Arrow schema), the
    function is for mapInArrow: it sends the partition's batches and then `rows_end` to the rank, and yields nothing.
    `fork` is forked() of spark_spare.py, without its first argument; if it is None, each member is a new process.
    The rank gets the GPUs that Spark has assigned to the task or, if `gpus` is a number, only the first `gpus` of them.
    """

    def run_member(rows: Iterable[Any]) -> Iterator[int | str]:
        from pyspark import BarrierTaskContext, SparkFiles, TaskContext

        context = BarrierTaskContext.get() if size else TaskContext.get()
        tasks = len(context.getTaskInfos()) if size else 0
        if tasks != size:  # Spark may change the number of partitions when it has seen the data
            raise RuntimeError(
                f"sparkring: the DataFrame has {tasks} partitions, not {size}, because Spark adapted its plan to the "
                f"data: use .repartition({size})."
            )
        found = {**ticket, **_of_task(context, gpus)}
        member: Any = None if fork is None else fork(archive, SparkFiles.getRootDirectory(), found)
        is_new = member is None
        if is_new:
            found["cleanup"] = tempfile.mkdtemp(prefix="sparkring-")
            path = os.path.join(found["cleanup"], "sparkring.zip")
            with open(path, "wb") as file:
                file.write(archive)
            found["first"] = [path, *found["first"]]
        pipe, passed = None, []
        if schema is not None:
            found["rows"], written = os.pipe()
            pipe, passed = os.fdopen(written, "wb"), [found["rows"]]
        if is_new:
            member = subprocess.Popen(
                [sys.executable, "-c", boot],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **environment},
                start_new_session=True,
                pass_fds=passed,
            )
        try:
            for descriptor in passed:
                os.close(descriptor)
            if is_new:
                with contextlib.suppress(BrokenPipeError):  # the member has exited at once; its code is reported below
                    member.stdin.write(json.dumps(found).encode() + b"\n")
                    member.stdin.flush()
            # The member's stdin stays open while the member runs. If Spark kills this process, stdin is closed, which
            # ends the member.
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a rank that needs no more rows closes its end
                    _feed(pipe, rows, schema, rows_end)
            code = member.wait()
            which = f"the process of task {context.partitionId()} on {socket.gethostname()}"
            if code < 0:
                _end_session(member.pid)
                raise RuntimeError(
                    f"sparkring: {which} was killed by signal {-code}. Another process or the operating system sent "
                    "the signal. Run `dmesg` on that machine to see whether it ran out of memory."
                )
            if code == UNREACHED:
                unreached = _unreached(ticket["host"], ticket["port"])
                if size:
                    raise ConnectionError(f"sparkring: {unreached}")
                yield unreached  # Spark would run the task again after an error, with the same result
                return
            if code != 0:  # the error makes Spark end the stage; otherwise, the other ranks would wait forever
                raise RuntimeError(
                    f"sparkring: {which} exited with code {code}; what it printed is in the executor's stderr. "
                    f"Does `{sys.executable}` start there?"
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
            if is_new:
                shutil.rmtree(found["cleanup"], ignore_errors=True)  # the member does this, unless it was killed

    return run_member


def _unreached(host: str, port: int) -> str:
    """Return a sentence that says why a member could not connect to the driver. This function connects once more."""
    try:
        with socket.create_connection((host, port), _CONNECT_S) as connection:
            is_driver = connection.recv(len(GREETING)) == GREETING
        why = "the driver took too long to answer" if is_driver else "another program answered"
    except OSError as error:
        why = error.strerror or str(error)
    return f"the executor on {socket.gethostname()} cannot connect to the driver at {host}:{port}: {why}."


def _end_session(member: int) -> None:
    """Kill what a member that was killed has left: the processes of its session.

    This is a part of kill_orphans() in worker/member/process.py, which the task cannot import.
    """
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has exited
            with open(path) as file:
                fields = file.read().rpartition(")")[2].split()
            if int(fields[3]) == member:
                os.kill(int(path.split("/")[2]), signal.SIGKILL)


def _of_task(context: Any, gpus: int | None) -> dict[str, Any]:
    """Return the fields of the Ticket that are different for each task."""
    from pyspark import SparkFiles

    # Files from addPyFile() are below this folder, on the sys.path of Spark's workers only. In an executor of a
    # standalone cluster, it is relative to the working folder, which will be another one on the rank.
    root = SparkFiles.getRootDirectory()
    held = context.resources().get("gpu")
    # The rank's context needs the port or path of the executor's socket, and the secret. These are attributes of the
    # class. Their names differ between versions of pyspark, so take all attributes that are strings or numbers.
    kind = type(context)
    shared = {
        name: value for name, value in vars(kind).items() if isinstance(value, (int, str)) and not name.startswith("__")
    }
    return {
        "member": context.partitionId(),
        "first": [os.path.abspath(entry) for entry in sys.path if entry.startswith(root)],
        "gpus": held.addresses[:gpus] if held else [],
        "context": pickle.dumps((kind, vars(context), shared, os.path.abspath(root))).hex(),
    }


def _feed(pipe: Any, rows: Iterable[Any], schema: bytes | None, rows_end: bytes) -> None:
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
    pipe.write(rows_end)
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
