"""torch.distributed on every launcher: code written for torchrun runs unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from texts import mentions

from sparkring import TorchDistributor
from sparkring.errors import OptionsError, RunFailed

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


@pytest.mark.pair
@pytest.mark.standalone("the ranks meet at the executors' addresses")
def test_distributed_data_parallel(ring, notebook_cell):
    """Ranks that train on different data end with equal weights, and an all_reduce includes every rank.

    A model whose class the notebook defined can be gathered, saved, loaded and compiled on the ranks.
    """
    first, second = ring.run(DDP, framework="torch", namespace=notebook_cell(NET)).values
    assert first[0] == second[0] == 1.0
    assert first[1] == second[1]
    assert first[3:] == second[3:] == [[True] * 3, [-3.0, 6.0]]


def test_a_wrapped_model_comes_back_as_the_bare_model(pair):
    """By --pull and as the value, also in other objects. One notice says what was left out."""
    namespace: dict[str, Any] = {}
    result = pair.run(
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        class Trainer: pass
        trainer = Trainer()
        trainer.model, trainer.optimizer = model, torch.optim.SGD(model.parameters(), 0.1)
        dist.destroy_process_group()
        {"best": model}
        """,
        framework="torch",
        pull=("model", "trainer"),
        namespace=namespace,
    )
    models = [namespace["model"], namespace["trainer"].model, *(value["best"] for value in result.values)]
    assert {type(model).__name__ for model in models} == {"Linear"}
    assert len({tuple(model.weight.flatten().tolist()) for model in models}) == 1
    (notice,) = result.record.notices
    assert "the value, `model` and `trainer` without DistributedDataParallel" in notice.text


@pytest.mark.slow
def test_two_groups_one_after_another(pair, tmp_path):
    """A process group can be closed and opened again in one cell, at the same address.

    The ranks wait for rank 0 to close: torch's next group could otherwise connect to the store of the previous one.
    """
    result = pair.run(
        """
        import pathlib, time, torch, torch.distributed as dist
        sums = []
        for turn in range(2):
            dist.init_process_group("gloo")
            value = torch.tensor(rank + turn)
            dist.all_reduce(value)
            sums.append(int(value))
            dist.destroy_process_group()
            closed = pathlib.Path(folder, str(turn))
            if rank == 0:
                closed.touch()
            while not closed.exists():
                time.sleep(0.01)
        sums
        """,
        framework="torch",
        namespace={"folder": str(tmp_path)},
    )
    assert result.values == [[1, 3], [1, 3]]


@pytest.mark.slow
def test_fully_sharded(pair):
    """FSDP shards the parameters among the ranks, and trains one model on different data.

    The whole model comes back, although the process group has been destroyed by then.
    """
    result = pair.run(
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
        pull=("model", "optimizer"),
    )
    first, second = result.values
    model, optimizer = result.pulled.values()
    assert [type(layer).__name__ for layer in (model, *model)] == ["Sequential", "Linear", "ReLU", "Linear"]
    assert [parameter.flatten().tolist() for parameter in model.parameters()] == first[3]
    assert [type(each) for each in optimizer.param_groups[0]["params"]] == [type(each) for each in model.parameters()]
    assert first[3] == second[3]
    assert first[2] + second[2] == 8 * 16 + 16 + 16 + 1
    assert all(end < start / 5 for start, end, *_ in (first, second))


def train(learning_rate: float, *, steps: int) -> tuple[Any, ...]:
    """The example of pyspark's documentation, but on the CPU."""
    import torch
    import torch.distributed

    torch.distributed.init_process_group(backend="gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 1), float(rank))).mean().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()
    return rank, size, model.module


@pytest.mark.slow
@pytest.mark.extended("library", "test_torch_distributor_with_a_script, and HorovodRunner with functions")
def test_torch_distributor_with_a_function(local):
    """The function gets the positional and keyword arguments, and rank 0's value is returned, even a model."""
    distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=True)
    rank, size, model = distributor.run(train, 1e-3, steps=2)
    assert (rank, size) == (0, 2)
    assert model.weight.shape == (1, 1)
    with pytest.raises(OptionsError, match="unexpected keyword argument 'tol'"):
        distributor.run(train, 1e-3, steps=2, tol=1)


SCRIPT = """
import argparse
import json
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float)
parser.add_argument("--out")


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    y = torch.arange(1797) % 10
    data = TensorDataset(8.0 * torch.nn.functional.one_hot(y, 64), y)
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), args.learning_rate)
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        losses.append(torch.nn.functional.cross_entropy(model(images), labels))
        losses[-1].backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with open(args.out, "w") as file:
            json.dump([losses[0].item(), losses[-1].item(), dist.get_world_size(), sys.argv[0]], file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


@pytest.mark.standalone("the script goes to the executors")
def test_torch_distributor_with_a_script(tasks, tmp_path):
    """The script is sent to Spark's executors, and has its arguments in sys.argv."""
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    assert distributor.run(str(script), "--learning-rate=1e-2", f"--out={out}") is None
    first, last, size, name = json.loads(out.read_text())
    assert (size, name) == (2, str(script))
    assert last < first
    for wrong, words in (
        ((str(script), {"lr": 3}), "pass the script's arguments as strings"),
        ((str(tmp_path / "gone.py"), {}), "there is no file"),
        ((3, {}), "takes a function or the path of a script, not int"),
    ):
        with pytest.raises(OptionsError, match=words):
            distributor.run(wrong[0], **wrong[1])
    with pytest.raises(OptionsError, match="num_processes must be"):
        TorchDistributor(0)


TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)

def fit(model, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).pow(2).mean().backward()
        optimizer.step()
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""


@pytest.mark.forked("torch")
def test_ranks_that_train_alone(local_gang):
    """If the ranks train without exchanging anything, a notice says so, unless the code divides the work by rank.

    If they have exchanged values, but end with different weights, another one says so.
    When a rank has once exchanged values, it may do so again in later cells without being noticed.
    """
    local_gang.start(2, framework="torch")

    def notices(code: str, *ranks: int, **options: Any) -> str:
        local_gang.cell(code, *ranks, framework="torch", **options)
        return "\n".join(notice.text for notice in local_gang.view.record.notices)

    assert not notices(TRAIN)
    assert not notices("fit(model, [0.1, 0.2][rank])")
    assert not notices("fit(model)", 1)
    assert not notices("fit(model)", independent=True)
    assert mentions(notices("fit(model)\nif rank == 0:\n    print(size)"), "nothing", "trained alone", "2 models")
    alone = notices(f"{GROUP}\nfit(model)\ndist.barrier()\nrank, dist.get_rank()")
    assert mentions(alone, "nothing", "although", "connected")
    assert "DistributedDataParallel(model)" in alone
    assert not notices("model = torch.nn.parallel.DistributedDataParallel(model)\nfit(model)")
    assert not notices("fit(model)")
    odd = "with torch.no_grad():\n    next(model.parameters()).add_(rank)\nfit(model)"
    assert mentions(notices(odd), "`DistributedDataParallel`", "rank 1", "rank 0")
    assert not notices("fit(model)", independent=True)
    assert not notices("dist.destroy_process_group()\ndel model")


@pytest.mark.forked("torch")
def test_ranks_that_train_alone_for_long_are_told_before_the_end(local_gang):
    """While the ranks still train, the notice says that they exchange nothing so far. Their group makes it vanish."""
    local_gang.start(2, framework="torch")
    local_gang.cell(f"{TRAIN}\nfrom sparkring.worker.rank import exchange\nexchange.EARLY_S = 0.3", framework="torch")
    told = set()
    local_gang.view.on_refresh = lambda record: told.update(notice.text for notice in record.notices)
    local_gang.cell("import time\nfor _ in range(20):\n    fit(model)\n    time.sleep(0.1)", framework="torch")
    early, end = sorted(told, key=lambda text: "each trained alone" in text)
    assert mentions(early, "nothing so far", "trains alone")
    assert [notice.text for notice in local_gang.view.record.notices] == [end]


@pytest.mark.slow
@pytest.mark.forked("torch")
@pytest.mark.parametrize(
    ("framework", "code", "alone"),
    [
        ("torch", f"{TRAIN}{GROUP}fit(model)\nfor p in model.parameters():\n    dist.all_reduce(p.data)", False),
        (
            "torch",
            f"{TRAIN}\nimport tempfile\nimport torch.distributed as dist\n"
            "dist.init_process_group('gloo', rank=0, world_size=1, init_method='file://' + tempfile.mktemp())\n"
            "fit(torch.nn.parallel.DistributedDataParallel(model))",
            True,
        ),
        pytest.param(
            "horovod",
            f"{TRAIN}\nimport horovod.torch as hvd\nhvd.init()\nfit(model)",
            True,
            marks=pytest.mark.extended("library", "the same with torch.distributed"),
        ),
        pytest.param(
            "horovod",
            f"{TRAIN}\nimport horovod.torch as hvd\nhvd.init()\nfit(model)\nhvd.allreduce(torch.ones(1))",
            False,
            marks=pytest.mark.extended("library", "the same with torch.distributed"),
        ),
    ],
)
def test_what_counts_as_an_exchange(local, framework, code, alone):
    """An average at the end is an exchange. A group that a rank has made for itself alone is none."""
    local.run(code, framework=framework)
    assert any("each trained alone" in notice.text for notice in local.view.record.notices) == alone


def test_processes_that_a_rank_would_start(local):
    """mp.spawn() would start a ring on each rank, so it is refused. torchrun as a program only gets a notice."""
    spawn = "import torch.multiprocessing as mp\nmp.spawn(print, nprocs={})"
    with pytest.raises(RunFailed, match=r"cell already runs .* 2 ranks\. Call .*training function itself"):
        local.run(spawn.format(2), framework="torch")
    local.run("import subprocess\nsubprocess.run('true torchrun x', shell=True)", framework="torch")
    assert "each of the 2 ranks starts `torchrun`" in local.view.record.ranks[0].tail[-1].text
