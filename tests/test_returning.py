"""How a rank packs the values that it returns, and how the notebook rebuilds them."""

import pickle
import threading
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkring.capture.picklability import Refused
from sparkring.capture.returning import in_words, pack_value, salvaged, unpack_value
from sparkring.capture.sharded import TensorShard, joined


@pytest.fixture
def group():
    """A process group of one rank, without sockets."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def returned(value):
    """Return the value as the notebook gets it, and what was left out."""
    packed = pack_value(value)
    return unpack_value(packed.parts[0], packed.parts[1:], [packed.shards]).value, packed.without


class Trainer:
    def __init__(self, model):
        self.model, self.inner, self.call, self.group = model, model.module, model.forward, dist.group.WORLD
        self.optimizer = torch.optim.Adam(model.parameters())


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.lock = nn.Linear(2, 1), threading.Lock()


def test_wrappers_are_left_out_wherever_they_are(group):
    """A wrapped model in an object, a dict or another wrapper is the bare model, and what shares it still does."""
    wrapped = DistributedDataParallel(nn.Linear(2, 1))
    trainer, without = returned({"trainer": Trainer(wrapped), "compiled": torch.compile(wrapped, backend="eager")})
    made = trainer["trainer"]
    assert type(made.model) is nn.Linear
    assert made.model is made.inner is trainer["compiled"] is made.call.__self__
    assert made.optimizer.param_groups[0]["params"][0] is made.model.weight
    assert torch.equal(made.model.weight, wrapped.module.weight)
    assert made.group is None
    assert set(without) == {"DistributedDataParallel", "OptimizedModule", "ProcessGroup"}


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(nn.DataParallel(net), backend="eager")])
def test_wrappers_without_a_group(wrap):
    """DataParallel and torch.compile need no process group."""
    net = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.ReLU(), backend="eager"))
    made, _ = returned(wrap(net))
    assert [type(layer) for layer in (made, *made)] == [nn.Sequential, nn.Linear, nn.ReLU]


def test_other_values_are_left_as_they_are():
    """A bare model, and an object that only looks like a wrapper, come back unchanged."""
    looks_alike = types.SimpleNamespace(module=nn.Linear(1, 1), _orig_mod=3)
    made, without = returned([looks_alike, nn.Linear(1, 1)])
    assert (made[0]._orig_mod, type(made[0].module), type(made[1]), without) == (3, nn.Linear, nn.Linear, ())


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_model_of_fsdp_that_one_rank_has_as_a_whole(group, use_orig_params):
    """FullyShardedDataParallel on one rank, also in another one, comes back as the bare model."""
    fsdp = pytest.importorskip("torch.distributed.fsdp").FullyShardedDataParallel
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net[1].weight2 = net[1].weight  # a parameter with two names
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    cpu = torch.device("cpu")
    net[0] = fsdp(net[0], device_id=cpu, use_orig_params=use_orig_params)
    made, without = returned(fsdp(net, device_id=cpu, use_orig_params=use_orig_params))
    assert without == ("FullyShardedDataParallel",)
    assert [type(layer) for layer in made] == [nn.Linear, nn.Linear]
    assert made[1].weight is made[1].weight2
    assert all(torch.equal(value, kept[name]) for name, value in made.state_dict().items())
    assert sorted(made.state_dict()) == sorted(kept)


@pytest.mark.parametrize(
    ("dims", "shards"),
    [
        ((0,), lambda whole: {(0,): whole[:3], (1,): whole[3:5], (2,): whole[5:]}),
        ((1,), lambda whole: {(0,): whole[:, :2], (1,): whole[:, 2:], (2,): whole[:, :0]}),
        ((None, 0), lambda whole: {(copy, at): whole[at * 3 : at * 3 + 3] for copy in (0, 1) for at in (0, 1)}),
        ((1, 0), lambda whole: {(i, j): whole[j * 3 : j * 3 + 3, i * 2 : i * 2 + 2] for i in (0, 1) for j in (0, 1)}),
    ],
)
def test_shards_are_joined(dims, shards):
    """Along one or two dimensions of the mesh, also with copies and with empty shards."""
    whole = torch.arange(24.0).reshape(6, 4)
    pieces = shards(whole)
    mesh = tuple(max(at[level] for at in pieces) + 1 for level in range(len(dims)))
    made = joined([TensorShard((6, 4), mesh, at, dims, False, True, True, piece) for at, piece in pieces.items()])
    assert torch.equal(made, whole)
    assert isinstance(made, nn.Parameter)
    with pytest.raises(ValueError, match=r"not all .*returned"):
        joined([TensorShard((6, 4), mesh, (0,) * len(dims), dims, False, True, True, whole)])


def test_what_cannot_be_packed_is_salvaged():
    """Of a model, the state_dict() is packed; of other objects, the attributes and items that can be packed."""
    rest = salvaged(nn.DataParallel(Locked()))
    assert rest.is_state_dict
    assert list(pickle.loads(rest.parts[0])) == ["layer.weight", "layer.bias"]
    rest = salvaged({"trainer": types.SimpleNamespace(loss=0.5, lock=threading.Lock()), "nets": [Locked()]})
    kept = pickle.loads(rest.parts[0])
    assert kept["trainer"] == {"loss": 0.5}
    assert list(kept["nets"][0]) == ["layer.weight", "layer.bias"]
    assert (rest.is_state_dict, rest.left_out) == (False, ("['trainer'].lock",))
    assert salvaged(threading.Lock()) is None


def test_an_optimizer_whose_state_is_spread_is_refused():
    """The error says how to get the state of all ranks. The class stands for torch's, whose import takes long."""
    spread = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {"__module__": "torch.distributed.optim"})
    with pytest.raises(Refused) as caught:
        pack_value({"optimizer": spread(nn.Linear(1, 1).parameters())})
    assert "consolidate_state_dict" in in_words(caught.value)


def test_tensors_of_a_gpu_that_this_machine_lacks(monkeypatch):
    """They come back in the CPU's memory, and this is said."""
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda file, map_location, **kwargs: load(
            file, lambda storage, location: map_location(storage, "cuda:5"), **kwargs
        )
    )  # fmt: skip
    rebuilt = unpack_value(pickle.dumps([torch.ones(2)]))
    assert rebuilt.value[0].tolist() == [1.0, 1.0]
    assert rebuilt.was_on == "cuda:5"
