"""The messages that a member sends to the driver. A model process of predict() also sends GpuUsed.

Messages with `time` and `rank` are kept in the run's record. These two fields are not sent: the driver sets them.
"""

from typing import NamedTuple

from sparkring.wire.messages.fields import Count, Port, SignalNumber, Stream
from sparkring.wire.messages.gpus import GpuFault


class Hello(NamedTuple):
    """The first message: which member this is, where it runs, and the process of its rank.

    `interface` is the network interface that has `address`, and `port` is a port that is free on `address`. `gpus` are
    the addresses of the GPUs that only this rank uses. `packages` are the versions of the packages in the rank's
    Python, by module. `packages` is None if the rank uses the notebook's own Python. `launch` and `attempt` are those
    of the Ticket.
    """

    member: Count
    pid: Count
    host: str
    address: str
    interface: str
    port: Port
    python: str
    gpus: tuple[str, ...]
    packages: dict[str, str] | None
    launch: Count = 0
    attempt: Count = 0


class Beat(NamedTuple):
    """The member is alive."""


class Output(NamedTuple):
    """Bytes that the rank wrote: whole lines, or a part of a line if the end of the line does not arrive soon."""

    stream: Stream
    data: bytes
    time: float = 0.0
    rank: int = 0


class GpuUsed(NamedTuple):
    """The use of one of the sender's GPUs by all processes together; sent when it changes. Unknown numbers are None.

    `power_w` is in watts and `temperature_c` in degrees Celsius. For a MIG instance, they are those of the whole GPU.
    """

    address: str
    name: str
    used_bytes: Count | None
    total_bytes: Count | None
    busy_percent: int | None
    power_w: int | None = None
    temperature_c: int | None = None
    time: float = 0.0
    rank: int = 0

    def __str__(self) -> str:
        memory = "" if self.total_bytes is None else f", {self.total_bytes / 1e9:.0f} GB"
        return f"{self.address} ({self.name}{memory})"


class RankUsed(NamedTuple):
    """The use of the machine by the rank's process and by the processes that it has started; sent every few seconds.

    `cpu_percent` is the CPU time since the last report, in percent of one core, and `memory_bytes` is the memory in
    RAM. Memory that these processes share counts only once. The machine has `cores` cores and `total_bytes` of memory.
    """

    cpu_percent: Count
    memory_bytes: Count
    cores: Count
    total_bytes: Count
    time: float = 0.0
    rank: int = 0


class Stack(NamedTuple):
    """What the rank is doing: the `state` of its process, and its stack as `text`, '' if the stack is not known."""

    state: str
    text: str


class GivenBack(NamedTuple):
    """The member gives back this many waiting `requests`, because other ranks can run them sooner.

    Requests are given back if the driver asks for them, or if the request before them fails or is interrupted.
    """

    requests: Count


class TimelinePart(NamedTuple):
    """A piece of the timeline that Horovod has written on a rank. The pieces together are one zlib stream.

    `last` ends the stream. `cut` is the number of bytes that were left out because the file is too large. `data`
    goes into the run's folder, not into its record.
    """

    data: bytes
    last: bool = False
    cut: Count = 0
    time: float = 0.0
    rank: int = 0


class Exited(NamedTuple):
    """The last message: the rank's process has exited with a code, or was killed by a signal.

    `out_of_memory` says whether memory ran out: since the rank was given its last request, the kernel has killed a
    process of the rank's control group for this reason. `gpu` says what went wrong with a GPU, according to what a
    library printed when it aborted the process.
    """

    code: int | None
    signal: SignalNumber | None
    out_of_memory: bool
    peak_memory_bytes: Count
    gpu: GpuFault | None = None
