"""Tests of Gloo's key-value store, which accepts only Horovod's keys, and whose copies get the other ranks' keys."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from waiting import DEADLINE_S

from sparkring.cluster.classic import Classic
from sparkring.frameworks.base import Endpoint, Start
from sparkring.frameworks.jax import Jax
from sparkring.frameworks.tensorflow import TensorFlow
from sparkring.runtime.world import World
from sparkring.wire.messages import StoredKey
from sparkring.worker.rank import rendezvous
from sparkring.worker.rank.rendezvous import RendezvousStore


@contextlib.contextmanager
def serving(tell: Callable[[StoredKey], object] = bool) -> Iterator[RendezvousStore]:
    with RendezvousStore(tell) as store:
        thread = threading.Thread(target=store.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield store
        finally:
            store.shutdown()
            thread.join()


@pytest.fixture
def store(watch):
    with serving() as store:
        yield store


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
    "local_node-fd00::2",
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
    monkeypatch.setattr(rendezvous, "MOST_KEYS_PER_RANK", 2)
    assert [ask(store, "PUT", f"/global/{key}", b"1")[0] for key in "abca"] == [200, 200, 507, 200]


@pytest.mark.parametrize("method", ["POST", "OPTIONS", "HEAD", "TRACE"])
def test_other_methods_are_refused(store, method):
    """Only PUT, GET and DELETE are accepted."""
    assert ask(store, method, "/global/0")[0] == 501


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


def test_copies_get_the_keys_of_other_ranks(watch):
    """A key of one rank is there for another. What a rank deletes, its own copy forgets with the rest of the scope."""
    with serving(lambda stored: second.take(stored)) as first, serving() as second:
        assert ask(first, "PUT", "/global/0", b"zero")[0] == 200
        assert ask(first, "PUT", "/cross_0/0", b"zero")[0] == 200
        assert ask(second, "PUT", "/global/1", b"one")[0] == 200
        assert ask(second, "GET", "/global/0") == (200, b"zero")
        assert ask(second, "DELETE", "/global/1")[0] == 200
        assert [ask(second, "GET", f"/{key}")[0] for key in ("global/0", "global/1", "cross_0/0")] == [404, 404, 200]
        assert ask(first, "GET", "/global/0")[0] == 200


def test_addresses_of_ipv6():
    """Spark's brackets are removed, and those of TensorFlow and JAX are added."""
    settings = {"spark.driver.host": "[fd00::1]", "spark.driver.bindAddress": "[::]"}
    context = SimpleNamespace(master="spark://[fd00::1]:7077", getConf=lambda: settings)
    assert Classic(context).address() == ("fd00::1", "::", 0)
    endpoints, start = [Endpoint("a", "fd00::2", "", 1234)], Start("run", 0, 0)
    variables = TensorFlow(endpoints).environment(World(), start)
    assert json.loads(variables["TF_CONFIG"])["cluster"] == {"worker": ["[fd00::2]:1234"]}
    assert Jax(endpoints).environment(World(), start)["JAX_COORDINATOR_ADDRESS"] == "[fd00::2]:1234"
