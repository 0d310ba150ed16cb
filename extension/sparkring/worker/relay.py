"""The relay: a process beside the executors to which members connect if they cannot connect to the driver.

It listens for members on a port for each route (each gang), and for the tasks of short Spark jobs on another port.
These tasks bring and take the frames of wire/tunnel.py, and must prove that they know the relay's token.

The relay exits when no task has come for `lease_s`, or when the driver says goodbye. This closes the members'
connections, and so ends the members.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from sparkring.executor.orders import RelayOrder
from sparkring.wire.channel import wake
from sparkring.wire.tunnel import ALL_ROUTES, FrameKind, TunnelEnd, route_data

_SILENT_S = 10  # a stranger that sends nothing must not keep a thread for longer
_GOODBYE_S = 0.5  # after a goodbye, what members are being sent and the last answers take at most this long
_LOOK_S = 0.5
_MOST_CONNECTIONS = 1024  # of members and strangers together: the relay cannot tell them apart
_MOST_TASKS = 64


class _MemberRoute:
    """Listens for the members of one gang."""

    def __init__(self, number: int, host: str, tunnel: TunnelEnd, numbers: itertools.count[int]) -> None:
        self._number, self._tunnel, self._numbers = number, tunnel, numbers
        self._accepted: list[int] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, 0), family=family, backlog=1024)
        self.port = int(self._sock.getsockname()[1])
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="sparkring-route", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        wake(self._sock)
        self._thread.join()
        self._sock.close()
        self._tunnel.end(self._accepted)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError:  # the peer has gone, or this process has too many open files
                self._closed.wait(0.1)
                continue
            if self._closed.is_set() or self._tunnel.connections >= _MOST_CONNECTIONS:
                sock.close()
                continue
            number = next(self._numbers)
            self._accepted.append(number)
            self._tunnel.post(FrameKind.OPEN, number, route_data(self._number))
            self._tunnel.add(number, sock)


class Relay:
    """Serves exchanges, each in a thread of its own."""

    def __init__(self, order: RelayOrder) -> None:
        self._host, self._token, self._lease_s = order.host, bytes.fromhex(order.token), order.lease_s
        self._tunnel = TunnelEnd(end_route=self._end_route)
        self._numbers = itertools.count(1)
        self._routes: dict[int, _MemberRoute] = {}
        self._answers: dict[int, Future[tuple[bytes, bytes]]] = {}  # by the exchange's number
        self._received = 0  # the driver has the answers to all exchanges below this number
        self._changing = threading.Lock()
        self._tasks = threading.Semaphore(_MOST_TASKS)
        self._served_at = time.monotonic()
        self._goodbye = False

    def run(self, listener: socket.socket) -> None:
        listener.settimeout(_LOOK_S)
        while not self._goodbye and time.monotonic() - self._served_at < self._lease_s:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                if not self._tasks.acquire(blocking=False):
                    sock.close()
                    continue
                threading.Thread(target=self._serve, args=(sock,), name="sparkring-exchange", daemon=True).start()
        listener.close()
        if self._goodbye:
            time.sleep(_GOODBYE_S)

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _SILENT_S, 0))
        try:
            with Connection(sock.detach()) as connection:
                deliver_challenge(connection, self._token)
                answer_challenge(connection, self._token)
                self._served_at = time.monotonic()
                asked, frames = json.loads(connection.recv_bytes()), connection.recv_bytes()
                for part in self._answer(asked, frames):
                    connection.send_bytes(part)
                self._served_at = time.monotonic()
        except (OSError, EOFError, AuthenticationError):
            pass  # a stranger, or a task that Spark has ended
        finally:
            self._tasks.release()

    def _answer(self, asked: Mapping[str, Any], frames: bytes) -> tuple[bytes, bytes]:
        """Return the answer to an exchange: JSON and frames. An exchange that comes again gets the same answer."""
        number = asked["number"]
        with self._changing:
            self._received = max(self._received, asked["received"])
            for old in [old for old in self._answers if old < self._received]:
                del self._answers[old]
            if number < self._received:  # a second task for an exchange whose answer the driver has
                return json.dumps({"port": 0, "sequence": 0}).encode(), b""
            answer, is_new = self._answers.get(number), number not in self._answers
            if answer is None:
                answer = self._answers[number] = Future()
        if is_new:
            try:
                answer.set_result(self._do(asked, frames))
            except Exception as error:  # also for a task that comes again
                answer.set_result((json.dumps({"error": str(error), "sequence": 0}).encode(), b""))
        return answer.result()

    def _do(self, asked: Mapping[str, Any], frames: bytes) -> tuple[bytes, bytes]:
        self._tunnel.handle(frames)
        port = self._obey(**asked["request"])
        sequence, taken = self._tunnel.take(asked["wait_s"])
        return json.dumps({"port": port, "sequence": sequence}).encode(), taken

    def _obey(self, do: str = "", route: int = 0) -> int:
        """Do what the driver asks for. Return the port of what was opened, or 0."""
        if do == "open":
            self._routes[route] = _MemberRoute(route, self._host, self._tunnel, self._numbers)
            return self._routes[route].port
        return 0

    def _end_route(self, route: int) -> None:
        if route == ALL_ROUTES:
            self._goodbye = True
            self._tunnel.release()
        elif route in self._routes:
            self._routes.pop(route).close()


def main(order: RelayOrder) -> None:
    """Relay until the driver no longer needs it."""
    shutil.rmtree(order.folder, ignore_errors=True)  # all has been imported, so a relay that is killed leaves none
    Relay(order).run(socket.socket(fileno=order.listener))
