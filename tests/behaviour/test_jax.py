"""jax.distributed on every launcher: initialize() needs no arguments, and code for several processes runs unchanged."""

from __future__ import annotations

import importlib.util

import pytest

from sparkring.frameworks.base import Endpoint, Start
from sparkring.frameworks.jax import Jax
from sparkring.runtime import world as worlds
from sparkring.runtime.world import World
from sparkring.worker.rank import jax_ring

pytestmark = pytest.mark.versions("JAX changes how processes find each other")
needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None,
    reason="needs JAX, which does not fit TensorFlow 2.15's ml_dtypes; the newest set has it",
)

SUM = """
import os
import jax
from jax.experimental import multihost_utils

jax.distributed.initialize()
assert (jax.process_index(), jax.process_count()) == (rank, size)
mesh = jax.sharding.Mesh(jax.devices(), ("ranks",))
by_rank = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
mine = jax.make_array_from_process_local_data(by_rank, jax.numpy.full((jax.local_device_count(), 2), rank + 1.0))
total = jax.jit(lambda x: x.sum(0), out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))(mine)
gathered = multihost_utils.process_allgather(jax.numpy.array([rank]))
[total.tolist(), gathered.ravel().tolist(), os.environ["JAX_PROCESS_ID"]]
"""

TRAIN = """
import jax
import jax.numpy as jnp

jax.distributed.initialize()
mesh = jax.sharding.Mesh(jax.devices(), ("ranks",))
by_rank = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
x_all = jax.make_array_from_process_local_data(by_rank, x[rank::size])
y_all = jax.make_array_from_process_local_data(by_rank, y[rank::size])

@jax.jit
def step(weights, x, y):
    gradient = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(weights)
    return weights - 0.1 * gradient

weights = jax.device_put(start, everywhere)
for _ in range(20):
    weights = step(weights, x_all, y_all)
weights.addressable_data(0).tolist()
"""

AGAIN = """
try:
    jax.distributed.initialize()
except RuntimeError as error:
    told = str(error)
told
"""


@needs_jax
@pytest.mark.standalone("the ranks meet at the executors' addresses")
def test_a_sum_over_all_ranks(ring):
    """initialize() without arguments connects the ranks, and a sum includes every rank."""
    assert ring.run(SUM, framework="jax").values == [
        [[3.0, 3.0], [0, 1], "0"],
        [[3.0, 3.0], [0, 1], "1"],
    ]


@needs_jax
def test_training_on_shards(local):
    """Two ranks that train on halves of the data get the same weights as one process that trains on all of it.

    The weights at the start are an array of JAX, which the ranks can rebuild only after initialize().
    """
    import jax.numpy as jnp
    import numpy as np

    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 3)).astype("float32"), random.normal(size=64).astype("float32")
    start = jnp.ones(3)
    alone = np.ones(3)
    for _ in range(20):
        alone -= 0.1 * 2 / 64 * x.T @ (x @ alone - y)
    first, second = local.run(TRAIN, framework="jax", namespace={"x": x, "y": y, "start": start}).values
    assert first == second == pytest.approx(alone.tolist(), rel=1e-4)


@needs_jax
def test_cells_of_a_warm_gang(local_gang):
    """JAX is initialised once, in the first cell that needs it; later cells go on, and a second call is an error."""
    local_gang.start(2, framework="jax")
    assert [value[0] for value in local_gang.cell(SUM, framework="jax").values] == [[3.0, 3.0]] * 2
    told = local_gang.cell(AGAIN, framework="jax").values
    assert all("once" in error or "before" in error for error in told)
    later = SUM.replace("jax.distributed.initialize()", "")
    assert [value[0] for value in local_gang.cell(later, framework="jax").values] == [[3.0, 3.0]] * 2


def test_the_environment_names_the_coordinator():
    """The coordinator is rank 0, and listens only on the address that the other ranks use."""
    endpoints = [Endpoint("a", "10.0.0.1", "eth0", 4040), Endpoint("b", "10.0.0.2", "", 4041)]
    framework = Jax(endpoints)
    first, second = (framework.environment(World(rank, 2), Start("run", 0, 0)) for rank in (0, 1))
    assert first["JAX_COORDINATOR_ADDRESS"] == first["JAX_COORDINATOR_BIND_ADDRESS"] == "10.0.0.1:4040"
    assert second["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:4040"
    assert [(each["JAX_PROCESS_ID"], each["JAX_NUM_PROCESSES"]) for each in (first, second)] == [("0", "2"), ("1", "2")]
    assert first["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "GLOO_SOCKET_IFNAME" not in second


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        ((), None, []),
        (("1",), None, [1]),
        (("3",), "1,3", [1]),
        (("1", "3"), "0,1, 3", [1, 2]),
        (("GPU-1",), "GPU-0,GPU-1", [1]),
        (("GPU-1",), None, []),
    ],
)
def test_a_rank_uses_its_own_gpus(gpus, visible, expected, monkeypatch):
    """CUDA numbers the GPUs that a rank sees in the order of CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(worlds, "_current", World(gpus=gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert jax_ring.own_gpus() == expected
