"""What a launcher gives to a member: the driver's address, and what the member needs to start its rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

# How a member's Python is started. The ticket comes on stdin, so that the secret is never in argv or in
# an environment. stdin stays open, and the member ends when it is closed. '' (the working folder) is
# removed from sys.path first: a json.py beside the notebook must not be imported.
BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import json; "
    "ticket = json.loads(sys.stdin.buffer.readline()); "
    "sys.path[:0] = ticket['first']; sys.path += ticket['last']; "
    "from sparkring.worker.member.member import main; main(ticket)"
)

# Follows the last row, so that a stream that breaks off is not taken for a short partition.
ROWS_END = b"end of rows"
# The key of Spark's own schema in the metadata of the Arrow schema.
SPARK_SCHEMA = b"sparkring.spark"


class Ticket(NamedTuple):
    """`first` and `last` are entries to put before and after those of sys.path.

    `cleanup` is a folder to remove when the member ends, or ''. `prefix` is sys.prefix of the notebook's Python. `gpus`
    are the addresses of the GPUs that only this rank uses. In a Spark task, `context` is the content of the task's
    BarrierTaskContext, packed by worker/spark_task.py. `rows` is the open file descriptor from which the rank reads the
    rows of its partition, or -1.
    """

    member: int
    host: str
    port: int
    secret: str
    first: list[str]
    last: list[str]
    prefix: str = ""
    cleanup: str = ""
    gpus: Sequence[str] = ()
    context: str = ""
    rows: int = -1

    def line(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"
