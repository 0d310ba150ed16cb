"""The key-value store through which Gloo's ranks find each other. It answers PUT, GET and DELETE for /scope/key.

Horovod's client cannot authenticate itself, so the store is restricted: it listens only on the interface in use and
only as long as the gang exists, answers only the hosts of authenticated members, accepts only Horovod's scopes, and
limits the length of a key, the size of a value and the number of keys. It never interprets a value.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sparkring.wire.channel import wake

MOST_VALUE_BYTES = 64 * 1024
MOST_KEY_CHARACTERS = 256
# A rank stores a key for its own address in each of the three scopes of each process set, and one key per peer.
MOST_KEYS_PER_RANK = 4_096
REQUEST_TIMEOUT_S = 30.0

# The scopes of horovod/common/gloo/gloo_context.cc. The scope of a process set ends in a hash of the set's ranks.
_SCOPE = re.compile(r"(?:global|local_[\w.\-]{1,255}|cross_\d{1,6})(?:_process_set_hash_[0-9a-fA-F]{1,32})?", re.ASCII)


class RendezvousStore:
    """The store for a gang of `ranks` ranks, on a free port of `host`. It answers only the addresses in `peers`."""

    def __init__(self, host: str, *, peers: set[str], ranks: int) -> None:
        self._server = _RendezvousServer((host, 0), peers, MOST_KEYS_PER_RANK * ranks)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve, name="sparkring-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.closing = True
        wake(self._server.socket)
        self._thread.join()
        self._server.end_connections()
        self._server.server_close()


class _RendezvousServer(ThreadingHTTPServer):
    daemon_threads = False  # server_close() then waits for the threads
    request_queue_size = 1024  # all ranks connect at once

    def __init__(self, address: tuple[str, int], peers: set[str], most_keys: int) -> None:
        self.values: dict[tuple[str, str], bytes] = {}
        self.most_keys = most_keys
        self._peers = peers
        self._open: set[socket.socket] = set()
        self.closing = False
        super().__init__(address, _Handler)

    def serve(self) -> None:
        """Accept connections until close(); serve_forever() would notice close() only after its poll interval."""
        while not self.closing:
            self.handle_request()

    def server_bind(self) -> None:
        # HTTPServer.server_bind() is not called, because it looks up the host's name, which can take seconds.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return client_address[0] in self._peers

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a broken connection need not be reported: if the rank is lost, its member reports the loss


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_TIMEOUT_S
    disable_nagle_algorithm = True
    server: _RendezvousServer

    def do_GET(self) -> None:
        place = self._place()
        if place is not None:
            value = self.server.values.get(place)
            self._reply(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        place = self._place()
        if place is None:
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MOST_VALUE_BYTES:
            self._refuse(413)
            return
        value = self.rfile.read(int(length))
        if place not in self.server.values and len(self.server.values) >= self.server.most_keys:
            self._refuse(507)
            return
        self.server.values[place] = value
        self._reply(200)

    def do_DELETE(self) -> None:
        # The key must really be removed. Otherwise, a second hvd.init() would find addresses from the first.
        place = self._place()
        if place is not None:
            self.server.values.pop(place, None)
            self._reply(200)

    def _place(self) -> tuple[str, str] | None:
        scope, slash, key = self.path.lstrip("/").partition("/")
        if not (slash and key and len(key) <= MOST_KEY_CHARACTERS and _SCOPE.fullmatch(scope)):
            self._refuse(403)
            return None
        return scope, key

    def _refuse(self, status: int) -> None:
        self.close_connection = True
        self._reply(status)

    def _reply(self, status: int, body: bytes = b"") -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
