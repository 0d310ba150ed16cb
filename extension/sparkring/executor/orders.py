"""The orders that processes get when they start, and how they are written as a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

_Order = TypeVar("_Order")

# A driver and its spare process talk over a socket, which is the stdin of the spare process. Once the spare process has
# imported its modules, it sends SPARE_READY, followed by the names of all frameworks that it has imported. It forks
# a member for each ticket that it gets.
SPARE_READY = b"ready "

# The Spark task sends these bytes after the last row of its partition. If they are missing, the rank knows that the
# stream has broken off, and that rows of the partition are missing.
ROWS_END = b"end of rows"
# The key under which the metadata of the Arrow schema holds Spark's own schema.
SPARK_SCHEMA = b"sparkring.spark"


# The exit code of a member that could not connect to the driver. The Spark task then finds out why.
UNREACHED = 69
PORT_SETTING = "spark.sparkring.driver.port"
HOST_SETTING = "spark.sparkring.driver.host"  # if it differs from spark.driver.host, the server's with Spark Connect
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


class Ticket(NamedTuple):
    """What a member reads from stdin when it starts.

    `cleanup` is a folder to remove when the member exits, or ''. `prefix` is sys.prefix of the notebook's Python.
    `gpus` are the addresses of the GPUs that only this rank uses. In a Spark task, `context` is the content of the
    task's TaskContext, packed by worker/spark_task.py. `rows` is the open file descriptor from which the rank reads the
    rows of its partition, or -1. A gang may have to launch its members again: `launch` counts the launches, from 0.
    `attempt` is how often Spark has started the task before.
    """

    member: int
    host: str
    port: int
    secret: str
    prefix: str = ""
    cleanup: str = ""
    gpus: Sequence[str] = ()
    context: str = ""
    rows: int = -1
    launch: int = 0
    attempt: int = 0


class ModelOrder(NamedTuple):
    """What a model process should do. The process exits when process `watch` has exited, and when no task needs it.

    Tasks find it by the `key`, and prove that they know the `token` (hexadecimal). A task that starts the process adds
    `path` to the end of the process's sys.path, sets `environment`, and fills in the last fields: the file with the
    packed model, the folder of the process, the descriptor of the folder's lock, and the process's GPUs.

    idle_s: the process exits when it has not been used for this long.
    watch: 0 stands for the parent of the process that starts it.
    report: how the process reaches the driver, for a Reporter; None if it should not report.
    follows: whether the model takes up new checkpoints.
    of_stream: whether the process was started by a task of a streaming query.
    """

    key: str
    token: str
    path: Sequence[str]
    environment: Mapping[str, str]
    idle_s: float
    watch: int = 0
    report: Mapping[str, Any] | None = None
    follows: bool = False
    of_stream: bool = False
    model: str = ""
    folder: str = ""
    lock: int = -1
    gpus: Sequence[str] = ()


class RelayOrder(NamedTuple):
    """What a relay should do: carry the connections of members, for whoever knows the `token` (hexadecimal).

    It exits when nobody has asked it for `lease_s`. The task that starts the process fills in the last fields: the
    address to listen on, the descriptor of the socket on which it is asked, and the folder with its code,
    which it removes.
    """

    token: str
    lease_s: float
    host: str = ""
    listener: int = -1
    folder: str = ""


def sent(order: Any) -> Any:
    """Return what a task gets as its order: a namespace with the same attributes, also for the orders inside.

    A class would have to be sent by value, and unpickling it takes about a millisecond, for each task again.
    """
    if not hasattr(order, "_asdict"):
        return order
    fields = {name: sent(value) for name, value in order._asdict().items()}
    return SimpleNamespace(kind=type(order).__name__, **fields)


def changed(order: _Order, **fields: Any) -> _Order:
    """Return a copy of an order, or of what a task has got as its order, with other values in these fields."""
    return type(order)(**{**_fields(order), **fields})


def encode(order: Any, *, first: Sequence[str] = (), last: Sequence[str] = (), detached: bool = False) -> bytes:
    """Return the line that tells a process what to do. It adds `first` and `last` to the two ends of its sys.path.

    `order` is one of the orders above. A `detached` process stays when the process that has started it exits.
    """
    fields = {"kind": type(order).__name__, **_fields(order)}
    return json.dumps({"first": first, "last": last, "detached": detached, "order": fields}).encode() + b"\n"


def decode(line: bytes) -> Any:
    """Return the order that a line contains."""
    fields = json.loads(line)["order"]
    return globals()[fields.pop("kind")](**fields)


def _fields(order: Any) -> dict[str, Any]:
    fields: dict[str, Any] = order._asdict() if hasattr(order, "_asdict") else vars(order)
    return fields
