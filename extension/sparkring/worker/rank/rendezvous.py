"""The key-value store through which Gloo's ranks find each other. Each rank has a copy, which its Gloo asks over HTTP.

A key that a rank stores is sent to the driver, and from there to all other ranks. So ranks need no connection to the
driver or to another rank for this. Gloo deletes its key when all ranks have found each other. The whole scope is then
out of date, and a second hvd.init() must not find addresses from the first, so the rank deletes the scope in its copy.

Horovod's client cannot authenticate itself, so the store is restricted: it listens only on loopback, accepts only
Horovod's scopes, and limits the length of a key, the size of a value and the number of keys. It never interprets a
value.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sparkring.runtime.world import world
from sparkring.wire.messages import StoredKey

MOST_VALUE_BYTES = 64 * 1024
MOST_KEY_CHARACTERS = 256
# A rank stores a key for its own address in each of the three scopes of each process set, and one key per peer.
MOST_KEYS_PER_RANK = 4_096
REQUEST_TIMEOUT_S = 30.0

# The scopes of horovod/common/gloo/gloo_context.cc. The scope of a process set ends in a hash of the set's ranks.
_SCOPE = re.compile(r"(?:global|local_[\w.:\-]{1,255}|cross_\d{1,6})(?:_process_set_hash_[0-9a-fA-F]{1,32})?", re.ASCII)


class RendezvousStore(ThreadingHTTPServer):
    """This rank's copy of the store, on a free port of loopback. `tell` sends a key to the other ranks' copies."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, tell: Callable[[StoredKey], None]) -> None:
        self.tell = tell
        self.values: dict[str, dict[str, bytes]] = {}  # by scope
        self.changing = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = int(self.socket.getsockname()[1])

    def server_bind(self) -> None:
        # HTTPServer.server_bind() is not called, because it looks up the host's name, which can take seconds.
        self.socket.bind(self.server_address)

    def take(self, stored: StoredKey) -> bool:
        """Store a value. Return whether there was room for it."""
        with self.changing:
            scope = self.values.setdefault(stored.scope, {})
            room = MOST_KEYS_PER_RANK * world().size - sum(map(len, self.values.values()))
            if room <= 0 and stored.key not in scope:
                return False
            scope[stored.key] = stored.value
            return True

    def forget(self, scope: str) -> None:
        with self.changing:
            self.values.pop(scope, None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_TIMEOUT_S
    disable_nagle_algorithm = True
    server: RendezvousStore

    def do_GET(self) -> None:
        place = self._place()
        if place is not None:
            value = self.server.values.get(place[0], {}).get(place[1])
            self._reply(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        place = self._place()
        if place is None:
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MOST_VALUE_BYTES:
            self._refuse(413)
            return
        stored = StoredKey(*place, self.rfile.read(int(length)))
        if not self.server.take(stored):
            self._refuse(507)
            return
        self.server.tell(stored)
        self._reply(200)

    def do_DELETE(self) -> None:
        place = self._place()
        if place is not None:
            self.server.forget(place[0])
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

    def log_message(self, format: str, *args: object) -> None:
        pass


_store: RendezvousStore | None = None
_making = threading.Lock()


def store(tell: Callable[[StoredKey], None]) -> RendezvousStore:
    """Return this rank's store, which lasts as long as the process."""
    global _store
    with _making:  # the main thread and the thread that receives messages may both be the first
        if _store is None:
            _store = RendezvousStore(tell)
            threading.Thread(target=_store.serve_forever, name="sparkring-rendezvous", daemon=True).start()
        return _store
