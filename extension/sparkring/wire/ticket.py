"""What a launcher gives to a member: the driver's address, and what the member needs to start its rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

# How a member's Python is started. The ticket comes on stdin, so that the secret is never in argv or in
# an environment. stdin stays open: when it is closed, the member ends. '' (the working folder) is
# removed from sys.path first: a json.py beside the notebook must not be run.
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
    """`first` and `last` are put before and after sys.path; `cleanup` is a folder to remove at the end, or ''.

    `prefix` is sys.prefix of the notebook's Python. `gpus` are the addresses of the GPUs that the rank has for itself.
    In a Spark task, `context` is what its BarrierTaskContext holds, packed by worker/spark_task.py, and `rows` is the
    open file descriptor from which its rank reads the rows of its partition, or -1.
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
