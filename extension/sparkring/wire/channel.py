"""The connection between the driver and a member: mutual authentication first (executor/handshake.py), then frames.

A frame carries one of the messages in messages/. It has a header in JSON (the name of the `message`, its fields, and
the `sizes` of the parts) and a binary body, which consists of the parts:

    header size  u32 │ body size  u64 │ header (JSON, UTF-8) │ body

A frame that is not a message ends the connection, because the bytes after it cannot be trusted either.

Until a peer has proved that it knows the gang's secret, only a fixed number of bytes is read from it. The connection is
authenticated, but not encrypted.

Members import this module at start-up, so it imports only light parts of the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import mmap
import os
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sparkring.executor.handshake import GREETING, NONCE_BYTES, PROOF_BYTES, proof_of, prove, read_exactly
from sparkring.wire.messages import KINDS, MalformedMessage, Message, decode, encode

CONNECT_TIMEOUT_S = 10.0
# The peer may be slow to answer: the driver's kernel may be suspended, or may run native code that holds the GIL.
HANDSHAKE_TIMEOUT_S = 60.0
ACCEPT_AGAIN_S = 0.1
# finish() waits at most this long for a peer that reads slowly, and looks this often.
FINISH_LIMIT_S, FINISH_LOOK_S = 10.0, 0.002
PREFIX = struct.Struct("!IQ")
# The largest size of a header. If a peer sends text instead of frames, the first bytes of the text are read as a size,
# which is much larger than this limit. Without the limit, receive() would wait for that many bytes.
HEADER_BYTES = 1 << 28
CHUNK_BYTES = 1 << 20
RELAY_BYTES = 256 * 1024  # pass_on() copies this much at a time, which fits into the processor's cache
READ_BYTES = 64 * 1024  # read this much at once, so that one system call is enough for several small frames
PAIR_BYTES = 1 << 22  # the requested size of the buffer between a member and its rank; the system may grant less


class ChannelClosed(ConnectionError):
    """The peer has closed the connection, or did not authenticate itself."""


class ProtocolError(ChannelClosed):
    """The peer sent an invalid message, or one that this process does not accept. Reading from the peer stops."""


class Head(NamedTuple):
    """A frame's header. `raw` holds the bytes before the body. The body, in parts of these `sizes`, is not read yet."""

    kind: type[Message]
    fields: dict[str, Any]
    sizes: list[int]
    raw: bytes


class Connection:
    """One end of a stream of frames over a connected socket. Sending is safe from any thread.

    `heard_at` is when the last bytes arrived, on the monotonic clock. While a large frame is arriving over a slow
    network, each piece of the frame shows that the peer is alive.

    To wait for a connection with select(), first receive until nothing is `pending`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._broken = False
        self._came = bytearray()  # bytes that have been read from the socket, but not returned yet
        self._room = memoryview(bytearray(READ_BYTES))
        self._held = bytearray()  # frames that send() or pass_on() has held back
        self.held_since: float | None = None  # when the first of these frames was held back
        self.heard_at = time.monotonic()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether a part of the next frame, or all of it, has already been read from the socket."""
        return bool(self._came)

    def send(self, message: Message, *, hold: bool = False) -> None:
        """Send one message. Raise ChannelClosed if the connection has been closed or lost.

        With `hold`, a small message may wait: it is sent together with whatever is sent next, or by send_held().
        """
        fields, parts = encode(message)
        views = [memoryview(part).cast("B") for part in parts]
        sizes = [view.nbytes for view in views]
        header = json.dumps({**fields, "message": type(message).__name__, "sizes": sizes}).encode()
        prefix = PREFIX.pack(len(header), sum(sizes)) + header
        with self._send_lock:
            if self._broken:
                raise ChannelClosed("the connection was lost in the middle of a frame")
            if hold and len(prefix) + sum(sizes) <= RELAY_BYTES:
                self._hold(b"".join([prefix, *views]))
                return
            prefix = self._take_held() + prefix
            try:
                if sum(sizes) <= CHUNK_BYTES:
                    self._sock.sendall(b"".join([prefix, *views]))
                else:
                    self._sock.sendall(prefix)
                    for view in views:
                        self._sock.sendall(view)
            except BaseException as error:  # raised again below
                # Perhaps only part of the frame was sent, for example because of an interrupt. The peer would take the
                # next frame for the rest of this one.
                self._broken = True
                if isinstance(error, OSError):
                    raise ChannelClosed(str(error)) from error
                raise

    def receive(self) -> Message:
        """Wait for a message. Raise ChannelClosed if the connection ends, and ProtocolError for an invalid message."""
        return self.receive_body(self.receive_head())

    def receive_head(self) -> Head:
        """Wait for a frame's header. receive_body(), receive_frame() or pass_on() must be called next."""
        prefix = self._exactly(PREFIX.size)
        header_bytes, body_bytes = PREFIX.unpack(prefix)
        if header_bytes > HEADER_BYTES:
            raise ProtocolError(f"a frame begins with {bytes(prefix)!r}")
        raw = bytes(self._exactly(header_bytes))
        try:
            fields = json.loads(raw)
            kind, sizes = KINDS[fields.pop("message")], fields.pop("sizes")
            if any(type(size) is not int or size < 0 for size in sizes) or sum(sizes) != body_bytes:
                raise ProtocolError("a frame's parts do not add up to its body")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"a frame's header is not valid: {raw[:60]!r}") from error
        return Head(kind, fields, sizes, bytes(prefix) + raw)

    def receive_body(self, head: Head) -> Message:
        try:
            return decode(head.kind, head.fields, [self._exactly(size) for size in head.sizes])
        except MalformedMessage as error:
            raise ProtocolError(str(error)) from error

    def receive_frame(self, head: Head) -> bytes:
        """Return the whole frame whose header has just been received, for send_frame()."""
        return head.raw + bytes(self._exactly(sum(head.sizes)))

    def send_frame(self, frame: bytes) -> None:
        """Send a frame that came from another connection, unchanged."""
        with self._send_lock:
            try:
                self._sock.sendall(self._take_held() + frame)
            except OSError as error:
                self._broken = True
                raise ChannelClosed(str(error)) from error

    def send_held(self) -> None:
        """Send the frames that were held back, if any."""
        if self._held:
            self.send_frame(b"")

    def pass_on(self, head: Head, other: Connection, *, hold: bool = False) -> None:
        """Send to `other` the frame whose header has just been received. A large body is never in memory as a whole.

        With `hold`, a small frame may wait: it is sent together with whatever is sent to `other` next.
        """
        left = sum(head.sizes)
        if left <= RELAY_BYTES:  # a small frame is sent in one piece, so that the receiving process wakes only once
            frame = self.receive_frame(head)
            if hold:
                other._hold(frame)
            else:
                other.send_frame(frame)
            return
        with other._send_lock:
            came = bytes(self._came[:left])
            del self._came[:left]
            left -= len(came)
            buffer = memoryview(bytearray(min(left, RELAY_BYTES)))
            try:
                other._sock.sendall(other._take_held() + head.raw + came)
                while left:
                    got = self._read(buffer[:left])
                    other._sock.sendall(buffer[:got])
                    left -= got
            except OSError as error:
                other._broken = True
                raise ChannelClosed(str(error)) from error

    def _hold(self, frame: bytes) -> None:
        if self.held_since is None:
            self.held_since = time.monotonic()
        self._held += frame

    def _take_held(self) -> bytes:
        held = bytes(self._held)
        self._held.clear()
        self.held_since = None
        return held

    def close(self) -> None:
        """Close both directions. A receive() that is waiting in another thread raises ChannelClosed."""
        _shut_down(self._sock)
        self._sock.close()

    def finish(self) -> None:
        """Close the connection as soon as the peer's system has received everything that was sent.

        If a socket is closed while something from the peer has not been read, its system drops what it has yet to send.
        """
        deadline = time.monotonic() + FINISH_LIMIT_S
        with contextlib.suppress(OSError):  # the peer has closed it
            # The peer then closes its end at once. The system would delay its acknowledgement by up to 40 ms.
            self._sock.shutdown(socket.SHUT_WR)
            while _unsent(self._sock) and time.monotonic() < deadline:
                if select.select([self._sock], [], [], FINISH_LOOK_S)[0] and not self._sock.recv(READ_BYTES):
                    break
        self.close()

    def release(self) -> None:
        """Close the socket in this process only. After a fork, the other process continues to use the connection."""
        self._sock.close()

    def local_host(self) -> str:
        """Return this end's address, on the network interface that leads to the peer."""
        return str(self._sock.getsockname()[0])

    def _exactly(self, size: int) -> bytearray | memoryview:
        if size <= CHUNK_BYTES:
            while len(self._came) < size:
                got = self._read(self._room)
                self._came += self._room[:got]
            data = self._came[:size]
            del self._came[:size]
            return data
        try:  # a bytearray would be written twice: first with zeros, and then with the data
            view = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        except (OSError, OverflowError) as error:
            raise ChannelClosed(f"no memory for {size:,} bytes from the peer") from error
        filled = len(self._came)
        view[:filled] = self._came
        self._came.clear()
        while filled < size:
            filled += self._read(view[filled:])
        return view

    def _read(self, buffer: memoryview) -> int:
        """Wait for data, read it into `buffer`, and return its length."""
        try:
            got = self._sock.recv_into(buffer)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not got:
            self._came.clear()  # the remaining bytes of this frame will not arrive
            raise ChannelClosed("the peer closed the connection")
        self.heard_at = time.monotonic()
        return got


def _unsent(sock: socket.socket) -> int:
    """Return how many bytes the other end has not acknowledged; 0 on systems other than Linux, which do not say."""
    if not sys.platform.startswith("linux"):
        return 0
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer has already closed it


def pair() -> tuple[Connection, Connection]:
    """Return two connected ends: one for a process, and one for the child that it forks."""
    left, right = socket.socketpair()
    for end in (left, right):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PAIR_BYTES)
    return Connection(left), Connection(right)


def dial(host: str, port: int, secret: bytes) -> Connection:
    """Return a connection to the driver. Each side proves to the other that it knows the gang's secret."""
    # The name is passed as bytes: for a str, Python would import the idna codec and Unicode's tables, which takes 2 ms.
    name: Any = host.encode() if host.isascii() else host
    sock = socket.create_connection((name, port), timeout=CONNECT_TIMEOUT_S)
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        prove(sock, secret)
    except BaseException as error:  # raised again below; the socket must not be left open
        sock.close()
        if isinstance(error, ConnectionError):
            raise ChannelClosed(f"{host}:{port} {error}") from error
        raise
    return _established(sock)


class Listener:
    """Accepts the driver's connections with peers that prove that they know `secret`.

    All listeners of this process on the same host and port share one socket: a peer's proof shows whose peer it is.

    `welcome(connection)` is called in a separate thread for each connection that is accepted. When it returns, the
    connection is closed. At most `most` connections are served at once; further ones wait. For each listener, `most`
    other peers may be connected without having proved that they know a secret. If one more connects, the oldest of
    these connections is closed. So peers that send nothing do not keep others from connecting.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, welcome: Callable[[Connection], None], *, most: int
    ) -> None:
        self.secret = secret
        self.welcome = welcome
        self.most = most
        self.places = threading.Semaphore(most)
        self.open: dict[socket.socket, threading.Thread] = {}
        with _opening:
            if (host, port) not in _ports:
                _ports[host, port] = _Port(host, port)
            self._at = _ports[host, port]
            self._at.listeners.append(self)
        self.port = self._at.number

    def close(self) -> None:
        """Stop listening, close every connection, and wait for the threads to end."""
        self._at.leave(self)


class _Port:
    """The socket on which this process listens at an address, as long as there is a Listener for it."""

    def __init__(self, host: str, port: int) -> None:
        self.listeners: list[Listener] = []
        self._address = host, port
        self._unproved: dict[socket.socket, threading.Thread] = {}  # oldest first
        self._lock = threading.Lock()
        self.closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Without this option, bind() may fail for a while on a port that was in use until recently.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((host, port))
            self._sock.listen(128)
        except OSError:
            self._sock.close()
            raise
        self.number = int(self._sock.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="sparkring-accept", daemon=True)
        self._acceptor.start()

    def leave(self, listener: Listener) -> None:
        """End the connections of a listener, and listen no more if it was the last one."""
        with _opening:
            with self._lock:
                if listener in self.listeners:
                    self.listeners.remove(listener)
                ending = dict(listener.open)
                if last := not (self.listeners or self.closed):
                    ending |= self._unproved
                    self.closed = True
            if last:
                del _ports[self._address]
                wake(self._sock)
                self._acceptor.join()  # before close(): another socket could get the descriptor that it still uses
                self._sock.close()
        for sock in ending:
            _shut_down(sock)
        for thread in ending.values():
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:  # the peer has gone, or this process has too many open files
                if self.closed:
                    return
                time.sleep(ACCEPT_AGAIN_S)
                continue
            with self._lock:
                if self.closed:
                    sock.close()
                    return
                thread = threading.Thread(target=self._serve, args=(sock,), name="sparkring-connection", daemon=True)
                self._unproved[sock] = thread
                # A member proves itself at once, so it is not the oldest for long.
                if len(self._unproved) > sum(listener.most for listener in self.listeners):
                    oldest = next(iter(self._unproved))
                    del self._unproved[oldest]
                    _shut_down(oldest)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        listener = None
        try:
            proved = self._accept_proof(sock)
            with self._lock:
                self._unproved.pop(sock, None)
                if proved is None or proved[0] not in self.listeners:  # the listener may have been closed meanwhile
                    return
                listener, connection = proved
                listener.open[sock] = threading.current_thread()
            with listener.places:
                listener.welcome(connection)
        finally:
            with self._lock:
                if listener is not None:
                    del listener.open[sock]
                sock.close()

    def _accept_proof(self, sock: socket.socket) -> tuple[Listener, Connection] | None:
        """Do the driver's half of the handshake. Return None if the peer knows no listener's secret."""
        try:
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            ours = os.urandom(NONCE_BYTES)
            sock.sendall(GREETING + ours)
            reply = read_exactly(sock, NONCE_BYTES + PROOF_BYTES)
            theirs, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
            for listener in list(self.listeners):
                if hmac.compare_digest(proof, proof_of(listener.secret, b"member", ours, theirs)):
                    sock.sendall(proof_of(listener.secret, b"driver", theirs, ours))
                    return listener, _established(sock)
        except OSError:
            pass
        return None


_ports: dict[tuple[str, int], _Port] = {}
_opening = threading.Lock()


def _forget_ports() -> None:
    """Leave the ports to the parent of this forked process, which has the threads."""
    global _opening
    for port in _ports.values():
        port.closed = True  # so that nothing here shuts down the socket, which is the parent's, too
    _ports.clear()
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_forget_ports)


def wake(listening: socket.socket) -> None:
    """Wake the thread that waits in accept() or select(). On some systems, closing the socket does not wake it.

    On Linux, shutdown() wakes it. Elsewhere, shutdown() fails, but a connection wakes it. A connection is not the first
    choice, because it fails if no port or no file descriptor is free.
    """
    try:
        listening.shutdown(socket.SHUT_RDWR)
        return
    except OSError:
        pass
    try:
        socket.create_connection(listening.getsockname()[:2], timeout=1.0).close()
    except OSError:
        pass  # the backlog is full: the thread has connections to accept, so it is not waiting


def _established(sock: socket.socket) -> Connection:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # otherwise, a small frame waits for an acknowledgement
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that is gone closes no connection
    # TCP_USER_TIMEOUT is not set: the system would also end connections to a peer that only does not read for a while,
    # such as a suspended kernel. The gang notices by itself that a member is silent.
    return Connection(sock)
