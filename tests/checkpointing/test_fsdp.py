"""Models that torch's fully_shard() shards over the ranks: each rank saves and restores its own piece."""

import copy
import json

import pytest
from packaging.version import Version
from versions import TORCH

from sparkring import checkpoints
from sparkring.checkpointing import tree
from sparkring.checkpointing.parts import plain, put_back, tree_of
from sparkring.errors import CheckpointError

pytestmark = pytest.mark.skipif(Version("2.6") > TORCH, reason=f"torch {TORCH} has no public fully_shard(); 2.6 does")

TRAIN = """
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from sparkring import checkpoints
dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (size,))

def begin():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(rank)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.01), "step": 0}

def train(state, last):
    model, optimizer = state["model"], state["optimizer"]
    while state["step"] < last:
        loss = (model(torch.randn(8, 4)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1

def pieces(state):
    kept = state["optimizer"].state_dict()["state"].values()
    tensors = [*state["model"].parameters(), *(moments[name] for moments in kept for name in ("exp_avg", "exp_avg_sq"))]
    return [tensor.to_local().detach().numpy().tobytes() for tensor in tensors]

calm, rough = begin(), begin()
store = checkpoints(sharded=True)
begun = store.restore(rough)
if not begun:
    train(rough, 3)
    store.save(3, rough)
    dist.barrier()
    while rank == 1:
        if store.latest():  # rank 0 commits when both files are there
            os._exit(3)
train(rough, 6)
found = pieces(rough)
torch.manual_seed(rank)
train(calm, 6)
dist.destroy_process_group()
begun, found, pieces(calm)
"""


@pytest.mark.slow
@pytest.mark.extended("library", "test_kills; the tests below save and restore with FSDP")
def test_a_lost_rank(local, spares, tmp_path):
    """Each rank's weights and Adam's moments equal those of an uninterrupted training, bit for bit."""

    def run(n):
        return local.run(TRAIN, n, framework="torch", checkpoint_dir=str(tmp_path), max_restarts=1)

    result = run(2)
    assert len(result.record.attempts) == 2
    for begun, rough, calm in result.values:
        assert begun == 3
        assert rough == calm
    assert result.values[0][1] != result.values[1][1]
    with pytest.raises(CheckpointError, match="in 2 shards: 1 ranks cannot"):
        run(1)


# ── As one of two ranks, without the other ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sit():
    """`sit(rank, size)` makes torch take this process for that rank. Collectives do nothing.

    Torch is imported here, because every worker of pytest-xdist imports this module, but only one runs the tests.
    """
    global torch, dist, DeviceMesh, init_device_mesh, fully_shard, DTensor, Replicate, Shard
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank, size=2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield start
    dist.destroy_process_group()


def training(mesh=(2,), steps=0, kind="Adam"):
    """Return a state of a model and its optimizer, sharded over a mesh of this shape, or unsharded for None."""
    model = torch.nn.Linear(5, 3)
    if isinstance(mesh, tuple):
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "pieces")[-len(mesh) :])
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = getattr(torch.optim, kind)(model.parameters(), 0.01)
    for _ in range(steps):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def kept(state):
    """Return the state as it would be read back from a file."""
    skeleton, leaves = tree.flatten(tree_of(state))
    return tree.rebuild(json.loads(json.dumps(skeleton)), copy.deepcopy(leaves))


def pieces(state):
    tensors = [*state["model"].parameters()]
    for moments in state["optimizer"].state.values():
        tensors += [value for value in moments.values() if isinstance(value, DTensor)]
    return [tensor.detach().to_local().clone() for tensor in tensors]


def spread(*placements, shape=(2,), value=1.0, rows=3):
    return DTensor.from_local(
        torch.full((rows, 4), value), init_device_mesh("cpu", shape), list(placements), run_check=False
    )


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_before_the_first_step(sit, kind, shape):
    """An optimizer that has no moments yet gets them, sharded like its parameters, and continues with them."""
    sit(1)
    state = training(shape, steps=2, kind=kind)
    found, fresh = kept(state), training(shape, kind=kind)
    weights = [id(weight) for weight in fresh["model"].parameters()]
    put_back(fresh, found)
    assert [id(weight) for weight in fresh["model"].parameters()] == weights
    for each in (state, fresh):
        each["model"](torch.ones(2, 5)).sum().backward()
        each["optimizer"].step()
    both = zip(pieces(state), pieces(fresh), strict=True)
    assert all(torch.equal(one, other) for one, other in both)


@pytest.mark.parametrize("which", ["model", "optimizer"])
def test_another_spread(sit, which):
    """The error describes how the model or optimizer was sharded, and how it is sharded now."""
    sit(1)
    found = {which: kept(training(steps=1))[which]}
    told = r"^state\['{}'\]\[.* saved as a tensor of shape \[3, 5\] spread over a mesh of 2 ranks as S\(0\), with the "
    told = told.format(which) + r"piece at \[1\] on this rank, but here it is "
    with pytest.raises(CheckpointError, match=told + r"a tensor .* a mesh of 1 × 2 ranks .*R, S\(0\)"):
        put_back({which: training((1, 2))[which]}, found)
    with pytest.raises(CheckpointError, match=told + "a tensor .*not sharded"):
        put_back({which: training(None)[which]}, found)
    whole = {which: kept(training(None, steps=1))[which]}
    with pytest.raises(CheckpointError, match=r"saved unsharded, .*here .*tensor .*shape \[3, 5\] spread"):
        put_back({which: training()[which]}, whole)
    turned = DeviceMesh("cpu", [1, 0])
    with pytest.raises(CheckpointError, match=told + r"a tensor .*piece .* \[0\] on this rank"):
        put_back({which: training(turned)[which]}, found)


def test_tensors_by_themselves(sit):
    """Tensors with the same sharding are restored in place; load() returns this rank's piece."""
    sit(0)
    found = kept({"x": spread(Shard(0)), "list": [spread(Replicate())]})
    assert torch.equal(plain(found)["x"], torch.ones(3, 4))
    state = {"x": spread(Shard(0), value=2.0), "list": [spread(Replicate(), value=2.0)]}
    x = state["x"]
    put_back(state, found)
    assert state["x"] is x
    assert torch.equal(x.to_local(), torch.ones(3, 4))
    assert torch.equal(state["list"][0].to_local(), torch.ones(3, 4))
    for other in (spread(Shard(1)), spread(Shard(0), rows=2)):
        with pytest.raises(CheckpointError, match=r"state\['x'\] was saved as .*\[6, 4\].* S\(0\)"):
            put_back({"x": other, "list": []}, found)
    for nothing in (None, torch.ones(3, 4)):
        with pytest.raises(CheckpointError, match=r"state\['x'\] was saved as .*tensor .*not sharded"):
            put_back({"x": nothing, "list": []}, found)


def test_moments_of_another_kind(sit):
    """A state that could not be restored later is refused when it is saved."""
    sit(0)
    state = training(steps=1)
    state["optimizer"].state[state["model"].weight]["rows"] = spread(Replicate())
    with pytest.raises(CheckpointError, match=r"\['state'\]\[0\]\['rows'\] is .*\[3, 4\] .* R.*its parameter .*S\(0\)"):
        tree_of(state)


def test_the_older_kind(sit):
    """FullyShardedDataParallel and its optimizer are refused, because one rank alone cannot read their state."""
    sit(0)
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    for name, found in state.items():
        with pytest.raises(CheckpointError, match=rf"state\['{name}'\] is sharded .* fully_shard\(\).*sharded=True"):
            tree_of({name: found})


def test_through_a_store(sit, tmp_path):
    """A single rank can save and restore its piece, too."""
    sit(0, 1)
    state, fresh = training((1,), steps=2), training((1,))
    store = checkpoints(tmp_path, sharded=True)
    store.save(2, state)
    assert store.restore(fresh) == 2
    both = zip(pieces(state), pieces(fresh), strict=True)
    assert all(torch.equal(one, other) for one, other in both)


def test_not_by_rank_0_alone(sit, tmp_path):
    """Without sharded=True, a sharded model is refused, and the error names both alternatives."""
    sit(0)
    store = checkpoints(tmp_path)
    both = r".* is sharded over the ranks .*checkpoints\(sharded=True\).*get_model_state_dict"
    with pytest.raises(CheckpointError, match=r"^state\['model'\]\['weight'\]" + both):
        store.save(1, training())
    with pytest.raises(CheckpointError, match=r"^state\['some'\]\[0\]" + both):
        store.save(1, {"some": [spread(Shard(0))]})
    assert not list(tmp_path.iterdir())
