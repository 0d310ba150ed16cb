"""What both ends of a tunnel do. A tunnel carries members' connections if members cannot connect to the driver.

    member ──TCP──▶ relay ◀──TCP── task of a Spark job ◀──Spark── driver's end ──TCP──▶ the gang's listener

The relay is a process beside the executors. It and the driver's end exchange frames, each of which belongs to one
carried connection. The bytes inside are those of wire/channel.py: the tunnel neither reads nor changes them, and knows
no gang's secret.

    kind  u8 │ connection  u64 │ size  u32 │ data

Each end holds at most WINDOW_BYTES of a connection that the other end has not passed on yet. It reads no more from the
connection until then, so a peer that reads slowly slows down only its own connection.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import queue
import socket
import struct
import threading
from collections.abc import Callable

WINDOW_BYTES = 8 << 20
EXCHANGE_BYTES = 16 << 20  # one exchange carries about this many bytes at most
CHUNK_BYTES = 1 << 18
GATHER_S = 0.004  # frames that come shortly after one another go together
ALL_ROUTES = 0
_FRAME = struct.Struct("!BQI")
_TOTAL = struct.Struct("!Q")


class FrameKind(enum.IntEnum):
    """What a frame says about its connection."""

    OPEN = 1  # a member has connected; the data is the number of the route
    DATA = 2
    PASSED_ON = 3  # the sender of this frame has passed on so many bytes in all
    CLOSE = 4  # no more data comes
    END_ROUTE = 5  # the route with this number has ended; if it is ALL_ROUTES, the driver no longer needs the relay


Post = Callable[[FrameKind, int, bytes], None]


class _Carried:
    """One end of a carried connection. Frames that it makes go to `post`; `forget` is called when it has ended."""

    def __init__(self, number: int, sock: socket.socket, post: Post, forget: Callable[[int], object]) -> None:
        self._number, self._sock, self._post, self._forget = number, sock, post, forget
        self._arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # of limited size, because of the window
        self._sent = self._passed_on = 0
        self._ended = False
        self._changed = threading.Condition()
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._write, name="sparkring-tunnel-write", daemon=True).start()

    def deliver(self, data: bytes) -> None:
        """Pass on `data` as soon as possible. An empty `data` ends the connection after what came before it."""
        self._arrived.put(data)

    def note_passed_on(self, total: int) -> None:
        with self._changed:
            self._passed_on = max(self._passed_on, total)
            self._changed.notify_all()

    def end(self) -> None:
        """Close the connection, whatever has not been passed on yet."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._arrived.put(b"")

    def _write(self) -> None:
        reader = threading.Thread(target=self._read, name="sparkring-tunnel-read", daemon=True)
        reader.start()
        passed_on = reported = 0
        with contextlib.suppress(OSError):  # the peer has closed the connection
            while data := self._arrived.get():
                self._sock.sendall(data)
                passed_on += len(data)
                if passed_on - reported >= WINDOW_BYTES // 2:
                    self._post(FrameKind.PASSED_ON, self._number, _TOTAL.pack(passed_on))
                    reported = passed_on
        self.end()
        reader.join()
        self._sock.close()
        self._forget(self._number)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while self._has_room() and (data := self._sock.recv(CHUNK_BYTES)):
                self._sent += len(data)
                self._post(FrameKind.DATA, self._number, data)
        self._post(FrameKind.CLOSE, self._number, b"")

    def _has_room(self) -> bool:
        """Wait until the other end has passed on enough. Return False if the connection has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._sent - self._passed_on < WINDOW_BYTES)
            return not self._ended


class TunnelEnd:
    """One end of a tunnel: its carried connections, and the frames that wait for the next exchange.

    `connect(route)` returns a socket for a connection that the other end has accepted for a route. It may raise
    OSError. `end_route(route)` is called when the other end needs a route no longer.
    """

    def __init__(
        self,
        connect: Callable[[int], socket.socket] | None = None,
        end_route: Callable[[int], object] = lambda route: None,
    ) -> None:
        self._connect = connect
        self._end_route = end_route
        self._carried: dict[int, _Carried] = {}
        self._frames: collections.deque[bytes] = collections.deque()
        self._taken = 0  # how many times take() has returned frames
        self._released = False
        self._changed = threading.Condition()

    def add(self, number: int, sock: socket.socket) -> None:
        """Carry a connection from now on."""
        with self._changed:
            self._carried[number] = _Carried(number, sock, self.post, self._forget)

    def post(self, kind: FrameKind, number: int, data: bytes = b"") -> None:
        """Add a frame for the other end."""
        with self._changed:
            self._frames.append(_FRAME.pack(kind, number, len(data)) + data)
            self._changed.notify_all()

    def take(self, wait_s: float | None) -> tuple[int, bytes]:
        """Return frames for the other end. Wait up to `wait_s` for the first, or until release() if it is None.

        What is returned is numbered: the other end must handle it in this order. Without frames, the number is 0.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._frames or self._released, wait_s) and not self._released:
                self._changed.wait_for(lambda: self._released, GATHER_S)
            frames, size = [], 0
            while self._frames and size < EXCHANGE_BYTES:
                frames.append(self._frames.popleft())
                size += len(frames[-1])
            self._taken += bool(frames)
            return (self._taken if frames else 0), b"".join(frames)

    def release(self) -> None:
        """Let take() return at once from now on."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def handle(self, frames: bytes) -> None:
        """Do what the frames of the other end say."""
        at = 0
        while at < len(frames):
            kind, number, size = _FRAME.unpack_from(frames, at)
            at += _FRAME.size
            self._handle(FrameKind(kind), number, frames[at : at + size])
            at += size

    def _handle(self, kind: FrameKind, number: int, data: bytes) -> None:
        if kind is FrameKind.OPEN and self._connect is not None:
            try:
                self.add(number, self._connect(_TOTAL.unpack(data)[0]))
            except OSError:
                self.post(FrameKind.CLOSE, number)
            return
        if kind is FrameKind.END_ROUTE:
            self._end_route(number)
            return
        carried = self._carried.get(number)
        if carried is None:  # it has just ended
            return
        if kind is FrameKind.PASSED_ON:
            carried.note_passed_on(_TOTAL.unpack(data)[0])
        else:
            carried.deliver(data if kind is FrameKind.DATA else b"")

    def end(self, numbers: list[int] | None = None) -> None:
        """Close these connections, or all of them."""
        for number, carried in list(self._carried.items()):
            if numbers is None or number in numbers:
                carried.end()

    @property
    def connections(self) -> int:
        """How many connections are carried."""
        return len(self._carried)

    def _forget(self, number: int) -> None:
        with self._changed:
            self._carried.pop(number, None)
            self._changed.notify_all()


def route_data(route: int) -> bytes:
    """Return the data of a frame that opens a connection for a route."""
    return _TOTAL.pack(route)
