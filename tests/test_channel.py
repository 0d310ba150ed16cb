"""Tests of the connection between driver and member: both prove themselves, and frames arrive whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pickle
import select
import socket
import sys
import threading
import time

import pytest
from waiting import DEADLINE_S

from sparkring.executor.handshake import GREETING, NONCE_BYTES, PROOF_BYTES, proof_of
from sparkring.runtime.resume_point import Here
from sparkring.wire import channel
from sparkring.wire.channel import (
    PREFIX,
    ChannelClosed,
    Listener,
    ProtocolError,
    dial,
    pair,
)
from sparkring.wire.messages import Beat, CellCode, NotebookState, Output, Run, Stack, UserMessage
from sparkring.worker.member.network import free_port

SECRET = b"s" * 32


def run(*parts) -> Run:
    """Return a message with these parts."""
    return Run(CellCode("1"), (), True, False, {}, {}, NotebookState(), Here(), parts)


class Door:
    """A listener. Connections that it accepts put what they receive into `messages`, and answer each message."""

    def __init__(self, most: int = 4, port: int = 0, secret: bytes = SECRET) -> None:
        self.messages: list = []
        self.welcomed = 0
        self.ended = threading.Event()
        self.listener = Listener("127.0.0.1", port, secret, self.serve, most=most)

    def serve(self, connection) -> None:
        self.welcomed += 1
        try:
            while True:
                message = connection.receive()
                self.messages.append(message)
                connection.send(UserMessage(f"answer to {type(message).__name__}"))
        except ChannelClosed:
            self.ended.set()

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.listener.port), timeout=DEADLINE_S)


@pytest.fixture
def door(watch):
    found = Door()
    yield found
    found.listener.close()


def test_messages_go_both_ways(door):
    """A message arrives with its fields and parts, and the answer arrives, too."""
    connection = dial("127.0.0.1", door.listener.port, SECRET)
    connection.send(run(b"one", b"", b"three")._replace(what=CellCode("ünï")))
    assert connection.receive() == UserMessage("answer to Run")
    (message,) = door.messages
    assert message.what == CellCode("ünï")
    assert [bytes(part) for part in message.parts] == [b"one", b"", b"three"]
    assert connection.local_host() == "127.0.0.1"
    connection.close()


def test_frames_with_many_and_large_parts():
    """A thousand parts, and parts that are too large for one write, arrive as they were sent."""
    left, right = pair()
    parts = tuple(bytes([n % 256]) * n for n in range(1000))
    large = [bytes(3 * channel.CHUNK_BYTES + 7), memoryview(b"abcd" * 10).cast("I"), b"x"]
    sender = threading.Thread(target=lambda: (left.send(run(*parts)), left.send(run(*large))))
    sender.start()
    assert right.receive().parts == parts
    assert [bytes(part) for part in right.receive().parts] == [bytes(part) for part in large]
    sender.join()
    left.close()
    right.close()


def test_a_frame_is_passed_on_without_being_held():
    """pass_on() hands a frame of any size from one connection to another."""
    (a, b), (c, d) = pair(), pair()
    body = [b"1" * (2 * channel.CHUNK_BYTES + 1), b"2"]
    threads = [threading.Thread(target=lambda: a.send(run(*body))),
               threading.Thread(target=lambda: b.pass_on(b.receive_head(), c))]  # fmt: skip
    for thread in threads:
        thread.start()
    message = d.receive()
    assert (message.what, [bytes(part) for part in message.parts]) == (CellCode("1"), body)
    for thread in threads:
        thread.join()
    for connection in (a, b, c, d):
        connection.close()


def test_frames_of_several_threads_do_not_mix():
    """Sending is safe from any thread."""
    left, right = pair()
    threads = [threading.Thread(target=lambda n=n: [left.send(run(b"%d" % n * 999)) for _ in range(50)])
               for n in range(4)]  # fmt: skip
    for thread in threads:
        thread.start()
    for _ in range(200):
        (part,) = right.receive().parts
        assert bytes(part) == part[:1] * 999
    for thread in threads:
        thread.join()
    left.close()
    right.close()


def test_the_wrong_secret_is_refused(door):
    """The driver does not accept a member with the wrong secret, and the member gets an error."""
    with pytest.raises(ChannelClosed):
        dial("127.0.0.1", door.listener.port, b"t" * 32)
    assert door.welcomed == 0


def test_a_driver_that_does_not_know_the_secret_is_refused():
    """A member does not talk to a listener that cannot prove that it knows the secret."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(GREETING + bytes(NONCE_BYTES))
                sock.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
                sock.sendall(bytes(PROOF_BYTES))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(ChannelClosed, match=r"not know .*gang's secret"):
            dial("127.0.0.1", server.getsockname()[1], SECRET)
        thread.join()


def test_another_service_is_told():
    """The error says that the service is not a driver of this version."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def web() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n".ljust(len(GREETING) + NONCE_BYTES))
                sock.recv(1)

        thread = threading.Thread(target=web)
        thread.start()
        with pytest.raises(ChannelClosed, match="not a sparkring driver"):
            dial("127.0.0.1", server.getsockname()[1], SECRET)
        thread.join()


def test_a_replayed_proof_is_refused(door):
    """A proof is valid for one connection only, because each connection has new nonces."""
    connection = dial("127.0.0.1", door.listener.port, SECRET)
    connection.close()
    first, second = door.raw(), door.raw()
    with first, second:
        nonce = first.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)[len(GREETING) :]
        ours = bytes(NONCE_BYTES)
        proof = ours + proof_of(SECRET, b"member", nonce, ours)
        first.sendall(proof)
        assert len(first.recv(PROOF_BYTES, socket.MSG_WAITALL)) == PROOF_BYTES
        second.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        second.sendall(proof)
        assert second.recv(1) == b""


@pytest.mark.parametrize("proof", [bytes(NONCE_BYTES + PROOF_BYTES), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64)])
def test_nothing_is_parsed_before_the_proof(door, monkeypatch, proof):
    """From a peer without the proof, only a fixed number of bytes is read; no JSON, no pickle."""

    def never(*arguments: object, **keywords: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(json, "loads", never)
    monkeypatch.setattr(pickle, "loads", never)
    with door.raw() as sock:
        greeting = sock.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        assert greeting.startswith(GREETING)
        sock.sendall(proof)
        assert sock.recv(1) == b"", "closed without another word"
    assert (door.welcomed, door.messages) == (0, [])


def test_a_silent_peer_does_not_block_others(door):
    """Peers that connect and send nothing do not keep other peers from connecting."""
    with contextlib.ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(door.raw())
        connection = dial("127.0.0.1", door.listener.port, SECRET)
        connection.send(Beat())
        assert connection.receive() == UserMessage("answer to Beat")
        connection.close()


def test_a_peer_that_does_not_read_for_a_while_stays_connected(door, monkeypatch):
    """A suspended process sends nothing during the handshake, and then reads nothing. It is not taken for a lost one.

    With TCP_USER_TIMEOUT, the system would end its connection, although its system acknowledges what arrives.
    """
    monkeypatch.setattr(channel, "CONNECT_TIMEOUT_S", 0.05)
    accept = channel._Port._accept_proof
    monkeypatch.setattr(channel._Port, "_accept_proof", lambda *peer: (time.sleep(0.2), accept(*peer))[1])
    connection = dial("127.0.0.1", door.listener.port, SECRET)
    for sock in (connection._sock, *door.listener.open):
        assert not hasattr(socket, "TCP_USER_TIMEOUT") or not sock.getsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
        )
    connection.close()


def test_a_silent_peer_is_given_up(monkeypatch, watch):
    """A peer that does not prove itself in time is closed."""
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.05)
    found = Door()
    with found.raw() as sock:
        sock.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        assert sock.recv(1) == b""
    found.listener.close()


def test_half_a_frame_is_no_frame(door):
    """If a connection breaks in the middle of a frame, the part that has arrived is discarded."""
    connection = dial("127.0.0.1", door.listener.port, SECRET)
    header = json.dumps({"message": "Output", "stream": "stdout", "sizes": [100]}).encode()
    connection._sock.sendall(PREFIX.pack(len(header), 100) + header + b"half")
    connection.close()
    assert door.ended.wait(DEADLINE_S)
    assert door.messages == []


@pytest.mark.parametrize(
    "header",
    [
        b'{"message": "Output", "stream": "stdout", "sizes": [5]}',  # the sum in the prefix is different
        b'{"message": "Output", "stream": "stdout", "sizes": [200, -100]}',
        b'{"message": "Output", "stream": "stdout", "sizes": ["100"]}',
        b'{"message": "Output", "stream": "stdout", "sizes": 100}',
        b'{"message": "Output", "stream": "stdout"}',
        b'{"message": "Output", "stream": "stdin", "sizes": [100]}',
        b'{"message": "Output", "sizes": [100]}',
        b'{"message": "Ouput", "stream": "stdout", "sizes": [100]}',
        b'{"message": ["Output"], "stream": "stdout", "sizes": [100]}',
        b'{"stream": "stdout", "sizes": [100]}',
        b'["Output"]',
        b'{"message": "Output"',
        b'"\xff"',
        b"[" * 100_000,
    ],
)
def test_what_is_no_message_ends_the_connection(header):
    """If a header is cut off, contradicts its prefix, or does not describe a message, nothing after it is read."""
    left, right = pair()
    left._sock.sendall(PREFIX.pack(len(header), 100) + header + bytes(100))
    with pytest.raises(ProtocolError):
        right.receive()
    left.close()
    right.close()


def test_text_in_the_place_of_a_frame():
    """Text is refused as soon as its first bytes arrive. Otherwise, they would be read as the size of a header."""
    left, right = pair()
    left._sock.sendall(b"Traceback (most recent call last):")
    with pytest.raises(ProtocolError, match="Traceback"):
        right.receive()
    left.close()
    right.close()


def test_a_part_that_no_memory_can_hold():
    """If a part is too large for the memory, the receiver closes the connection with an error."""
    left, right = pair()
    header = json.dumps({"message": "Output", "stream": "stdout", "sizes": [1 << 62]}).encode()
    left._sock.sendall(PREFIX.pack(len(header), 1 << 62) + header)
    with pytest.raises(ChannelClosed, match="no memory"):
        right.receive()
    left.close()
    right.close()


def test_nothing_follows_half_a_frame():
    """After a send that was cut short, the connection refuses further frames rather than garble them."""
    left, right = pair()
    left._sock.settimeout(0.1)  # the send is cut short, because nobody reads
    with pytest.raises((ChannelClosed, TimeoutError)):
        left.send(Output("stdout", bytes(64 << 20)))
    with pytest.raises(ChannelClosed, match="middle of a frame"):
        left.send(Stack("running", ""))
    left.close()
    right.close()


def test_what_was_sent_last_arrives(watch):
    """A member's last messages arrive, even if the driver reads slowly and has sent what the member has not read."""
    heard, slowly, ended = [], threading.Event(), threading.Event()

    def serve(connection) -> None:
        connection.send(Beat())
        assert slowly.wait(DEADLINE_S)
        try:
            while True:
                heard.append(len(connection.receive().data))
        except ChannelClosed:
            ended.set()

    listener = Listener("127.0.0.1", 0, SECRET, serve, most=1)
    connection = dial("127.0.0.1", listener.port, SECRET)
    sizes = [100_000] * 20
    for size in sizes:
        connection.send(Output("stdout", bytes(size)))
    threading.Timer(0.2, slowly.set).start()
    connection.finish()
    assert ended.wait(DEADLINE_S)
    listener.close()
    assert heard == sizes


def test_finishing_does_not_wait_for_a_late_acknowledgement(door, monkeypatch):
    """The peer closes its end when it has read everything, even if its system has not acknowledged it yet."""
    monkeypatch.setattr(channel, "_unsent", lambda sock: 1)
    monkeypatch.setattr(channel, "FINISH_LIMIT_S", math.inf)
    connection = dial("127.0.0.1", door.listener.port, SECRET)
    connection.send(Beat())
    finishing = threading.Thread(target=connection.finish, daemon=True)
    finishing.start()
    finishing.join(DEADLINE_S)
    assert not finishing.is_alive()
    assert (door.messages, door.ended.is_set()) == ([Beat()], True)


def test_messages_that_are_held_back_arrive_in_order():
    """They are sent with the next message, or when that is asked for."""
    left, right = pair()
    left.send(UserMessage("1"), hold=True)
    assert not select.select([right], [], [], 0)[0], "it has been sent"
    left.send(UserMessage("2"))
    left.send(UserMessage("3"), hold=True)
    left.send(UserMessage("4"), hold=True)
    assert [right.receive().text, right.receive().text, right.pending] == ["1", "2", False]
    left.send_held()
    left.send_held()
    assert [right.receive().text, right.receive().text, right.pending] == ["3", "4", False]
    left.close()
    right.close()


def test_closing_ends_everything(watch):
    """close() ends all waiting threads, whether peers are authenticated, silent or in between."""
    found = Door()
    connection = dial("127.0.0.1", found.listener.port, SECRET)
    with found.raw(), found.raw() as half:
        half.sendall(b"x" * 10)
        connection.send(Beat())
        connection.receive()
        found.listener.close()
        with pytest.raises(ChannelClosed):
            connection.receive()
    connection.close()


def test_a_failed_accept_does_not_end_the_listener(watch, monkeypatch):
    """After accept() has failed, the listener accepts the next connection."""
    accept, failures = socket.socket.accept, [ConnectionAbortedError(), OSError(errno.EMFILE, "Too many open files")]

    def failing(sock):
        if failures:
            raise failures.pop()
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)
    found = Door()
    connection = dial("127.0.0.1", found.listener.port, SECRET)
    connection.send(Beat())
    assert connection.receive() == UserMessage("answer to Beat")
    assert not failures
    connection.close()
    found.listener.close()


def test_a_taken_port_leaves_no_socket(watch):
    """A listener that cannot bind raises OSError and keeps nothing open."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", taken.getsockname()[1], SECRET, lambda _: None, most=1)


def test_listeners_share_a_port(watch):
    """A secret leads to its own listener. When a listener is closed, its secret is refused, and others go on."""
    port = free_port("127.0.0.1")
    doors = {secret: Door(port=port, secret=secret) for secret in (b"a" * 32, b"b" * 32, b"c" * 32)}
    connections = {secret: dial("127.0.0.1", port, secret) for secret in doors}
    for secret, connection in connections.items():
        connection.send(UserMessage(secret.decode()))
        assert connection.receive() == UserMessage("answer to UserMessage")
    assert {secret: door.messages for secret, door in doors.items()} == {
        secret: [UserMessage(secret.decode())] for secret in doors
    }
    doors[b"a" * 32].listener.close()
    with pytest.raises(ChannelClosed):
        connections[b"a" * 32].receive()
    with pytest.raises(ChannelClosed):
        dial("127.0.0.1", port, b"a" * 32)
    connections[b"b" * 32].send(Beat())
    assert connections[b"b" * 32].receive() == UserMessage("answer to Beat")
    for secret in (b"b" * 32, b"c" * 32):
        doors[secret].listener.close()
    with pytest.raises(ConnectionRefusedError):
        dial("127.0.0.1", port, b"c" * 32)
    for connection in connections.values():
        connection.close()
    Door(port=port).listener.close()  # the port is free again


def test_closing_needs_no_connection(watch, monkeypatch):
    """close() ends the thread that accepts connections even if this process cannot connect: no port may be free."""
    found = Door()
    connect = socket.create_connection
    if sys.platform.startswith("linux"):

        def failing(address, *arguments, **keywords):
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

        monkeypatch.setattr(socket, "create_connection", failing)
    closing = threading.Thread(target=found.listener.close, daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    monkeypatch.setattr(socket, "create_connection", connect)
    if is_stuck := closing.is_alive():
        channel.wake(found.listener._sock)
    assert not is_stuck


def test_a_forked_process_leaves_the_port_to_its_parent(door):
    """A process that the notebook has forked can close its copies of listeners, and listen on ports of its own."""
    if (pid := os.fork()) == 0:
        door.listener.close()
        other = Door()
        other.listener.close()
        os._exit(other.listener.port == door.listener.port)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    connection = dial("127.0.0.1", door.listener.port, SECRET)
    connection.send(Beat())
    assert connection.receive() == UserMessage("answer to Beat")
    connection.close()
