"""torch.distributed on every launcher: code written for torchrun runs unchanged."""

from __future__ import annotations

DDP = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
torch.manual_seed(rank)                      # the ranks start apart …
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.full((8, 4), float(rank + 1))   # … and see different data
for step in range(5):
    optimizer.zero_grad()
    model(data).pow(2).mean().backward()
    optimizer.step()
total = torch.tensor(float(rank))
dist.all_reduce(total)
gathered = [None] * size
dist.all_gather_object(gathered, net)
dist.destroy_process_group()
file = io.BytesIO()
torch.save(net, file)
file.seek(0)
nets = [*gathered, torch.load(file, weights_only=False)]
scripted = torch.jit.script(net)
[total.item(), [p.detach().flatten().tolist() for p in model.parameters()], os.environ["LOCAL_RANK"],
 [type(each) is type(net) for each in nets], [scripted(torch.tensor([x])).item() for x in (-3.0, 3.0)]]
"""

NET = """
import io
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        if bool(x.sum() > 0):
            return x * 2
        return x

net = Net()
"""


def test_distributed_data_parallel(ring, notebook_cell):
    """Ranks agree on the weights that they trained on different data, and an all_reduce sees every rank.

    A model of the notebook's class can be gathered, saved, loaded and compiled there.
    """
    first, second = ring.run(DDP, framework="torch", namespace=notebook_cell(NET)).values
    assert first[0] == second[0] == 1.0
    assert first[1] == second[1]
    assert first[3:] == second[3:] == [[True] * 3, [-3.0, 6.0]]


def test_two_groups_one_after_another(local):
    """A process group can be closed and opened again in one cell."""
    result = local.run(
        """
        import torch, torch.distributed as dist
        sums = []
        for turn in range(2):
            dist.init_process_group("gloo")
            value = torch.tensor(rank + turn)
            dist.all_reduce(value)
            sums.append(int(value))
            dist.destroy_process_group()
        sums
        """,
        framework="torch",
    )
    assert result.values == [[1, 3], [1, 3]]


def test_fully_sharded(local):
    """FSDP shares the parameters out among the ranks, and trains one model on data that differ."""
    first, second = local.run(
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        mesh = init_device_mesh("cpu", (size,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank))
        losses = []
        for step in range(20):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        whole = [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]
        mine = sum(parameter.to_local().numel() for parameter in model.parameters())
        dist.destroy_process_group()
        [losses[0], losses[-1], mine, whole]
        """,
        framework="torch",
    ).values
    assert first[3] == second[3]
    assert first[2] + second[2] == 8 * 16 + 16 + 16 + 1
    assert all(end < start / 5 for start, end, *_ in (first, second))
