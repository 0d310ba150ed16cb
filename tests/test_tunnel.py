"""Tests of the tunnel with a relay of its own, without Spark: its tasks run in this process."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from waiting import DEADLINE_S, until

from sparkring.cluster.base import Address
from sparkring.errors import SlotsError
from sparkring.executor.archive import archive
from sparkring.executor.orders import RelayOrder
from sparkring.launchers import tunnel
from sparkring.wire.channel import ChannelClosed, Listener, dial
from sparkring.wire.messages import UserMessage
from sparkring.wire.tunnel import WINDOW_BYTES
from sparkring.worker.relay_task import Exchange, RelayStart, exchange, start_relay

SECRET = b"s" * 32
UNREACHED = "nobody can connect."
packed = functools.cache(archive)


class Tasks:
    """Stands for a cluster with `slots` slots, whose tasks run in this process. The first `failing` jobs fail."""

    reachable_by = "Open the port."

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.failing = 0

    def address(self) -> Address:
        return Address("127.0.0.2", "127.0.0.1", 0)

    def setting(self, name: str, default: str = "") -> str:
        return default

    def total_slots(self, gpus: int = 0) -> int:
        return self.slots

    def archive(self, *, with_nvml: bool) -> bytes:
        return packed(with_nvml)

    def begin_group(self, group: str, what: str) -> None:
        pass

    def thread(self, target, name: str) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)

    def collect(self, size: int, task) -> list:
        values = list(task([]))
        if self.failing:  # the task has run, but its result was lost
            self.failing -= 1
            raise RuntimeError("an executor was lost")
        return values


@pytest.fixture
def tasks():
    return Tasks()


@pytest.fixture
def route(tasks):
    """A route whose relay has ended when the test ends."""
    route = tunnel.TunnelRoute(tasks)
    yield route
    route.close()
    until(lambda: not relays(), "the relay has ended")


def relays() -> list[psutil.Process]:
    """Return the relays on this machine that belong to this test."""
    ours = []
    for process in psutil.process_iter():
        try:
            if "sparkring.worker.relay" in process.cmdline() and process.environ().get("SPARKRING_TEST") == MARKED:
                ours.append(process)
        except psutil.Error:
            pass
    return ours


MARKED = ""


@pytest.fixture(autouse=True)
def mark(watch):
    global MARKED
    MARKED = watch.mark


def answering(connection) -> None:
    """Answer each message with its own data."""
    try:
        while True:
            message = connection.receive()
            connection.send(message)
    except ChannelClosed:
        pass


@pytest.fixture
def listener():
    listener = Listener("127.0.0.1", 0, SECRET, answering, most=8)
    yield listener
    listener.close()


def test_connections(route, listener):
    """Members and driver prove themselves to one another through the relay, which does not know the secret."""
    route.open(listener.port, UNREACHED)
    with ThreadPoolExecutor() as others:
        members = list(others.map(lambda _: dial(*route.relay, SECRET), range(3)))
    for number, member in enumerate(members):
        member.send(UserMessage(f"from {number}"))
    for number, member in enumerate(members):
        assert member.receive() == UserMessage(f"from {number}")
    with pytest.raises(ChannelClosed):
        dial(*route.relay, b"x" * 32)
    large = UserMessage("x" * (3 * WINDOW_BYTES))
    members[0].send(large)
    assert members[0].receive() == large
    members[0].close()
    listener.close()
    with pytest.raises(ChannelClosed):
        members[1].receive()


def test_lost_results(tasks, route, listener, monkeypatch):
    """The relay gives the same answer again if Spark has lost a result, and no byte comes twice."""
    monkeypatch.setattr(tunnel, "_AGAIN_S", 0.0)
    route.open(listener.port, UNREACHED)
    member = dial(*route.relay, SECRET)
    for number in range(5):
        tasks.failing = 2
        member.send(UserMessage(f"number {number}"))
        assert member.receive() == UserMessage(f"number {number}")
    member.close()


def test_a_slow_reader(route):
    """It holds up only its own connection, of which the tunnel holds a limited number of bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        route.open(server.getsockname()[1], UNREACHED)
        fast, slow = (socket.create_connection(route.relay) for _ in range(2))
        with fast, slow:
            fast.sendall(b"fast")
            slow.sendall(b"slow")
            here = dict(sorted((sock.recv(4), sock) for sock, _ in (server.accept(), server.accept())))
            sent = 0
            while select.select([], [slow], [], 2.0)[1] and sent < 20 * WINDOW_BYTES:
                sent += slow.send(bytes(1 << 20), socket.MSG_DONTWAIT)
            assert sent < 4 * WINDOW_BYTES
            fast.sendall(b"more")
            assert here[b"fast"].recv(4) == b"more"
            for sock in here.values():
                sock.close()


def test_a_relay_that_is_killed(route, listener):
    """The members' connections break, and the launcher can say why. The next route has a new relay."""
    route.open(listener.port, UNREACHED)
    member = dial(*route.relay, SECRET)
    (relay,) = relays()
    relay.send_signal(signal.SIGKILL)
    with pytest.raises(ChannelClosed):
        member.receive()
    until(lambda: "messages no longer go through Spark jobs" in route.problem, "the tunnel knows it")
    other = tunnel.TunnelRoute(route._cluster)
    other.open(listener.port, UNREACHED)
    dial(*other.relay, SECRET).close()
    route.close()
    assert tunnel._tunnels[route._cluster].problem == ""
    other.close()


def test_a_relay_that_nobody_asks():
    """It exits by itself, which ends the members' connections. Whoever does not know the token gets nothing."""
    token = os.urandom(32)
    ((host, port),) = start_relay(RelayStart(packed(False), "127.0.0.1", RelayOrder(token.hex(), 3.0)), [])
    ask = Exchange(host, port, token, 1, 1, 0.0, {"do": "open", "route": 1}, b"")
    (wrong,) = exchange(ask._replace(token=os.urandom(32)), [])
    assert b"error" in wrong
    answer = list(exchange(ask, []))
    assert list(exchange(ask, [])) == answer  # the same task again
    assert list(exchange(ask._replace(number=2, received=2, request={}), []))
    assert json.loads(*exchange(ask, [])) == {"port": 0, "sequence": 0}  # the driver has the answer
    with socket.create_connection((host, json.loads(answer[0])["port"])) as member:
        member.settimeout(DEADLINE_S)
        assert member.recv(1) == b""
    until(lambda: not relays(), "the relay has ended")
    assert b"Connection refused" in next(exchange(ask, []))


def test_too_few_slots(listener):
    """There must be a slot beside those of the launches."""
    with pytest.raises(SlotsError, match=r"need .*task slot beside .*ranks"):
        tunnel.TunnelRoute(Tasks(0)).open(listener.port, UNREACHED)
