"""Listens on the address to which members connect, so that tasks can find out whether they reach the driver."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time

from sparkring.wire.channel import wake

_READ_S = 1.0  # a task sends its token as soon as it has connected


class DriverListener:
    """A context manager that answers each connection that sends `token` with this machine's time in seconds.

    Connections that send anything else are closed without an answer. Entering it raises OSError if the port is in use.
    """

    def __init__(self, host: str, port: int) -> None:
        self.token = secrets.token_hex(16).encode()
        self._at = host, port
        self._closing = False

    def __enter__(self) -> DriverListener:
        family = socket.AF_INET6 if ":" in self._at[0] else socket.AF_INET
        self._socket = socket.create_server(self._at, family=family, backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="sparkring-doctor-listener", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        wake(self._socket)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_READ_S)
                received = b""
                while len(received) < len(self.token) and (part := connection.recv(len(self.token) - len(received))):
                    received += part
                if hmac.compare_digest(received, self.token):
                    connection.sendall(repr(time.time()).encode())
