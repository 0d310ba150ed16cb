"""Receives the messages of a gang's members in one queue of limited size.

Each connection has a thread that puts its messages into the queue, and the gang takes them out. While the queue is
full, these threads wait. This slows ranks that print faster than the driver can read.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, get_args

from sparkring.wire.channel import ChannelClosed, Connection, Listener, ProtocolError
from sparkring.wire.messages import Hello, Report

# A message may be large, so few are kept: a rank that prints faster than the driver can read soon has to wait.
QUEUE_MESSAGES = 64
# The number of unknown peers that may be connected in addition to all members of the gang, such as port scanners. They
# must not keep members from connecting. While a launch is repeated, each member may also be connected twice.
STRANGERS = 16
_REPORTS = get_args(Report)


class Arrival(NamedTuple):
    """A message from a member. If `report` is None, the member's connection has ended, and `end` says why.

    `connection` is the connection on which it came.
    """

    member: int
    report: Report | None
    end: str = ""
    connection: Connection | None = None


_WAKE = Arrival(-1, None)  # an entry that only makes take() return
_END = Arrival(-2, None)  # the last entry in the queue


class Inbox:
    """Accepts the members' connections, and queues the messages that arrive.

    Two functions are called in the connection's thread. `admit(hello, connection)` returns whether the connection
    belongs to a member of this gang; if not, it is closed. `on_arrival()` is called whenever a message has been queued.
    """

    def __init__(self, size: int, admit: Callable[[Hello, Connection], bool], on_arrival: Callable[[], object]) -> None:
        self._size = size
        self._admit = admit
        self._on_arrival = on_arrival
        self._queue: queue.Queue[Arrival] = queue.Queue(QUEUE_MESSAGES)
        self._listener: Listener | None = None
        self._closed = threading.Event()

    def open(self, host: str, port: int, secret: bytes) -> int:
        """Listen for members, and return the port. Raise OSError if that fails."""
        self._listener = Listener(host, port, secret, self._read, most=2 * self._size + STRANGERS)
        return self._listener.port

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def take(self, timeout_s: float) -> list[Arrival]:
        """Wait up to `timeout_s` for an arrival; return it, and up to QUEUE_MESSAGES more that are in the queue."""
        arrivals: list[Arrival] = []
        with contextlib.suppress(queue.Empty):
            arrivals.append(self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait())
            for _ in range(QUEUE_MESSAGES):  # otherwise, ranks that never stop printing would keep this loop going
                arrivals.append(self._queue.get_nowait())
        return [arrival for arrival in arrivals if arrival is not _WAKE]

    def wake(self) -> None:
        """Wake a take() that is waiting in another thread."""
        with contextlib.suppress(queue.Full):  # if the queue is full, take() does not wait
            self._queue.put_nowait(_WAKE)

    def close(self, handle: Callable[[Arrival], object], end_members: Callable[[], None]) -> None:
        """Call `end_members()`, while a thread calls `handle(arrival)` for each arrival. Then close all connections."""
        # The gang no longer calls take(). If no thread emptied the queue, members would wait instead of exiting.
        drain = threading.Thread(target=self._drain, args=(handle,), name="sparkring-drain", daemon=True)
        drain.start()
        try:
            end_members()
        finally:
            # First stop those who put messages into the queue: _END must be its last entry.
            self._closed.set()
            if self._listener is not None:
                self._listener.close()
            self._queue.put(_END)
            drain.join()

    def _drain(self, handle: Callable[[Arrival], object]) -> None:
        while (arrival := self._queue.get()) is not _END:
            if arrival is not _WAKE:
                handle(arrival)

    def _read(self, connection: Connection) -> None:
        """Read a connection's messages until the connection ends. This runs in the connection's own thread."""
        member = -1
        try:
            hello = connection.receive()
            if not isinstance(hello, Hello) or not self._admit(hello, connection):
                return
            member = hello.member
            self._put(Arrival(member, hello, connection=connection))
            while True:
                report = connection.receive()
                if not isinstance(report, _REPORTS):
                    raise ProtocolError(f"{type(report).__name__} is not for the driver")
                self._put(Arrival(member, report, connection=connection))
        except ProtocolError as error:
            end = f"a message from the member cannot be read: {error}"
        except ChannelClosed:
            end = "the connection to its process broke"
        if member >= 0:
            self._put(Arrival(member, None, end, connection))

    def _put(self, arrival: Arrival) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(arrival, timeout=0.5)  # look now and then whether the gang has been closed
                self._on_arrival()
                return
            except queue.Full:
                continue
