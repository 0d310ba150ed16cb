"""The tasks of a tunnel: one starts the relay on an executor, the others exchange frames with it.

This module is sent to executors by value. It uses only the standard library and the package `executor`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sparkring.executor.archive import unpacked
from sparkring.executor.boot import start_detached
from sparkring.executor.orders import RelayOrder, changed

_CONNECT_S = 10.0
_ANSWERS_S = 30
_PIECE_BYTES = 1 << 20  # Spark Connect sends results in messages of limited size


class RelayStart(NamedTuple):
    """The relay that a task starts. It listens on the address of the interface that leads to the host `towards`."""

    archive: Any
    towards: str
    relay: RelayOrder


class Exchange(NamedTuple):
    """One exchange with the relay at `host` and `port`, which knows the `token`.

    `number` tells it from other exchanges: a task that Spark runs again gets the same answer. The driver has the
    answers to all exchanges below `received`. `request` is what the relay should do, and `frames` are for its
    connections. The relay waits up to `wait_s` for frames from members.
    """

    host: str
    port: int
    token: bytes
    number: int
    received: int
    wait_s: float
    request: Mapping[str, Any]
    frames: bytes


def start_relay(order: RelayStart, rows: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """Start the relay, and yield its host and the port for exchanges."""
    host = _address_towards(order.towards)
    folder = tempfile.mkdtemp(prefix="sparkring-relay-")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener, open(os.path.join(folder, "log"), "wb") as log:
        pid = start_detached(
            "sparkring.worker.relay",
            changed(order.relay, host=host, listener=listener.fileno(), folder=folder),
            os.environ,
            log,
            first=[unpacked(order.archive, folder)],
            passed=[listener.fileno()],
        )
        port = listener.getsockname()[1]
    if not pid:
        with open(os.path.join(folder, "log"), errors="replace") as log:
            output = log.read().strip()[-600:] or sys.executable
        shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(
            f"sparkring: no process could be started on {socket.gethostname()}: {output or sys.executable}"
        )
    yield host, port


def _address_towards(towards: str) -> str:
    """Return this machine's address on the way to another host. Executors can usually reach one another there."""
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def exchange(order: Exchange, rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield the relay's answer as JSON, and then its frames in pieces.

    If the relay cannot be reached, only yield JSON with an "error": Spark would run the task again after an exception.
    """
    from multiprocessing import AuthenticationError
    from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

    try:
        connected = socket.create_connection((order.host, order.port), _CONNECT_S)
        connected.settimeout(None)
        connected.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(order.wait_s) + _ANSWERS_S, 0)
        )
        with Connection(connected.detach()) as connection:
            answer_challenge(connection, order.token)
            deliver_challenge(connection, order.token)
            fields = {"number": order.number, "received": order.received, "wait_s": order.wait_s}
            connection.send_bytes(json.dumps({**fields, "request": dict(order.request)}).encode())
            connection.send_bytes(order.frames)
            answer, frames = connection.recv_bytes(), connection.recv_bytes()
    except (OSError, EOFError, AuthenticationError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        yield json.dumps({"error": f"the relay at {order.host}:{order.port}: {why}"}).encode()
        return
    yield answer
    for at in range(0, len(frames), _PIECE_BYTES):
        yield frames[at : at + _PIECE_BYTES]
