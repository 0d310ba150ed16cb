"""Tests of Gloo's key-value store, which accepts only Horovod's keys, and answers only hosts that take part."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from types import SimpleNamespace

import pytest
from waiting import DEADLINE_S

from sparkring.cluster.classic import Classic
from sparkring.errors import LaunchError
from sparkring.frameworks import rendezvous
from sparkring.frameworks.base import Endpoint, Start
from sparkring.frameworks.horovod import Horovod
from sparkring.frameworks.rendezvous import RendezvousStore
from sparkring.frameworks.tensorflow import TensorFlow
from sparkring.runtime.world import World


@pytest.fixture
def store(watch):
    found = RendezvousStore("127.0.0.1", peers={"127.0.0.1"}, ranks=1)
    yield found
    found.close()


def ask(store: RendezvousStore, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Send one request on a new connection, and return the status and the body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", store.port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


SCOPES = [
    "global",
    "local_my-host.local",
    "cross_0",
    "cross_12",
    "global_process_set_hash_1a2b",
    "local_h_process_set_hash_9",
]


@pytest.mark.parametrize("scope", SCOPES)
def test_put_get_delete(store, scope):
    """A value is stored byte for byte, and a value that is deleted is gone."""
    value = bytes(range(256))
    assert ask(store, "GET", f"/{scope}/0")[0] == 404
    assert ask(store, "PUT", f"/{scope}/0", value)[0] == 200
    assert ask(store, "GET", f"/{scope}/0") == (200, value)
    assert ask(store, "DELETE", f"/{scope}/0")[0] == 200
    assert ask(store, "GET", f"/{scope}/0")[0] == 404


@pytest.mark.parametrize(
    "path",
    ["/", "/global", "/global/", "/other/0", "/cross_x/0", "/cross_1234567/0", "/../etc/passwd", "/global%2f0/1",
     f"/global/{'k' * 257}", f"/local_{'h' * 256}/0", "/global_process_set_hash_xyz/0", "/worker_addresses/0"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_other_paths_are_refused(store, method, path):
    """Only requests for Horovod's scopes, with keys of a reasonable length, are answered."""
    assert ask(store, method, path, b"x" if method == "PUT" else None)[0] == 403


def test_values_are_bounded(store):
    """Values up to the limit are accepted. Larger values are not, whatever length their sender declares."""
    most = rendezvous.MOST_VALUE_BYTES
    assert ask(store, "PUT", "/global/a", bytes(most))[0] == 200
    assert ask(store, "PUT", "/global/b", bytes(most + 1))[0] == 413
    for length in ("-1", "1e9", "", "99999999999999999999"):
        assert ask(store, "PUT", "/global/c", b"", **{"Content-Length": length})[0] == 413
    assert ask(store, "GET", "/global/c")[0] == 404


def test_their_number_is_bounded(store, monkeypatch):
    """When the limit is reached, no new keys are accepted, but existing values can still be changed."""
    monkeypatch.setattr(store._server, "most_keys", 2)
    assert [ask(store, "PUT", f"/global/{key}", b"1")[0] for key in "abca"] == [200, 200, 507, 200]


@pytest.mark.parametrize("method", ["POST", "OPTIONS", "HEAD", "TRACE"])
def test_other_methods_are_refused(store, method):
    """Only PUT, GET and DELETE are accepted."""
    assert ask(store, method, "/global/0")[0] == 501


def test_strangers_are_not_answered(watch):
    """A host that has no member gets no answer at all."""
    store = RendezvousStore("127.0.0.1", peers={"192.0.2.7"}, ranks=1)
    try:
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(store, "GET", "/global/0")
    finally:
        store.close()


def test_many_ranks_at_once(store):
    """Requests of many connections at the same time are all answered."""
    found: list[int] = []
    threads = [threading.Thread(target=lambda n=n: found.append(ask(store, "PUT", f"/global/{n}", b"x")[0]))
               for n in range(50)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 50


def test_closing_ends_connections_that_wait(watch):
    """close() returns even if peers keep their connections open, whether silent or half-way through a request."""
    store = RendezvousStore("127.0.0.1", peers={"127.0.0.1"}, ranks=1)
    with socket.create_connection(("127.0.0.1", store.port)) as silent:
        with socket.create_connection(("127.0.0.1", store.port)) as half:
            half.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc")
            assert ask(store, "GET", "/global/0")[0] == 404
            store.close()
            assert half.recv(1) == b""
        assert silent.recv(1) == b""


def test_addresses_of_ipv6():
    """Spark's brackets are removed, TensorFlow's are added, and Horovod, which cannot use such an address, says so."""
    settings = {"spark.driver.host": "[fd00::1]", "spark.driver.bindAddress": "[::]"}
    context = SimpleNamespace(master="spark://[fd00::1]:7077", getConf=lambda: settings)
    assert Classic(context).address() == ("fd00::1", "::", 0)
    endpoints = [Endpoint("a", "fd00::2", "", "fd00::2", 1234)]
    variables = TensorFlow("fd00::1", "::", endpoints).environment(World(), Start("run", 0, 0))
    assert json.loads(variables["TF_CONFIG"])["cluster"] == {"worker": ["[fd00::2]:1234"]}
    with pytest.raises(LaunchError, match="IPv6"):
        Horovod("fd00::1", "::", endpoints)
