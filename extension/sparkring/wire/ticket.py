"""The data that a launcher gives to a member: the driver's address, and all that the member needs to start its rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

# The code with which a member's Python starts. The ticket is read from stdin, so that the secret in it is never in argv
# or in an environment, where other processes could read it. stdin then stays open, and the member exits when stdin is
# closed. Before `json` is imported, '' (the working folder) is removed from sys.path, because otherwise a json.py in
# that folder would be imported instead.
BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import json; "
    "ticket = json.loads(sys.stdin.buffer.readline()); "
    "sys.path[:0] = ticket['first']; sys.path += ticket['last']; "
    "from sparkring.worker.member.member import main; main(ticket)"
)

# The code with which a spare process starts; its only argument is a path to add to sys.path. A driver and its spare
# process talk over a socket, which is the stdin of the spare process. The driver sends a SpareOrder; once the modules
# are imported, the spare process sends SPARE_READY, followed by the names of all frameworks that it has imported. Then
# it forks a member for each ticket that it gets.
SPARE_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append(sys.argv.pop()); "
    "from sparkring.worker.member.spare import main; main()"
)
SPARE_READY = b"ready "

# The Spark task sends these bytes after the last row of its partition. If they are missing, the rank knows that the
# stream has broken off, and that rows of the partition are missing.
ROWS_END = b"end of rows"
# The key under which the metadata of the Arrow schema holds Spark's own schema.
SPARK_SCHEMA = b"sparkring.spark"


# The exit code of a member that could not connect to the driver. The Spark task then finds out why.
UNREACHED = 69
PORT_SETTING = "spark.sparkring.driver.port"
MAKE_REACHABLE = (
    f"Set spark.driver.host to an address of this machine that they can reach, or {PORT_SETTING} to a port that the "
    "firewall lets through, before the session starts."
)


class SpareOrder(NamedTuple):
    """What a spare process should import, and when it should exit.

    It imports at a low priority, unless `is_awaited` says that a launch is waiting for it. It exits after `idle_s`
    seconds without members, or if less than `least_bytes` of memory is available.
    """

    modules: Sequence[str]
    is_awaited: bool
    idle_s: float
    least_bytes: int

    def line(self) -> bytes:
        return json.dumps(self._asdict()).encode()


class Ticket(NamedTuple):
    """What a member reads from stdin when it starts.

    `first` and `last` are paths that the member adds at the beginning and at the end of its sys.path. `cleanup` is a
    folder to remove when the member exits, or ''. `prefix` is sys.prefix of the notebook's Python. `gpus` are the
    addresses of the GPUs that only this rank uses. In a Spark task, `context` is the content of the task's
    TaskContext, packed by worker/spark_task.py. `rows` is the open file descriptor from which the rank reads the
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
