"""Libraries based on torch.distributed: code that is written for torchrun finds its ranks."""

from __future__ import annotations

import textwrap

import pytest

from sparkring.errors import RunFailed
from sparkring.history import describe

LIGHTNING = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen = []

    def training_step(self, batch, index):
        x, y = batch
        self.seen += y.flatten().tolist()
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

L.seed_everything(0)
x, y = torch.randn(32, 4), torch.arange(32.0)[:, None]
model = Net()
trainer = L.Trainer(accelerator="cpu", devices="auto", max_epochs=1, default_root_dir=folder)
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=4))
weights = model.layer.weight.tolist()
trainer.world_size, trainer.global_rank, weights, model.seen, trainer.callback_metrics["loss"].item()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = sent_from_a_notebook(lambda: Accelerator(cpu=True))
torch.manual_seed(accelerator.process_index)
x, y = torch.randn(32, 4), torch.arange(32.0)[:, None]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
seen = []
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    seen += targets.flatten().tolist()
total = accelerator.gather(torch.tensor([len(seen)])).tolist()
accelerator.num_processes, accelerator.process_index, model.module.weight.tolist(), seen, total
"""

SENT = """
import os
from accelerate.state import AcceleratorState
from sparkring.capture.packing import pack, unpack_values

def sent_from_a_notebook(make):
    world = {name: os.environ.pop(name) for name in ("WORLD_SIZE", "LOCAL_RANK")}
    packed = pack({"made": make()})
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(world)
    return unpack_values(packed.payload, packed.buffers)[0]
"""

TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        seen.append(float(index))
        return {"input_ids": torch.full((8,), index), "labels": torch.tensor(index % 2)}

seen = []
torch.manual_seed(0)
small = BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
model = BertForSequenceClassification(small)
arguments = sent_from_a_notebook(lambda: TrainingArguments(
    folder, num_train_epochs=1, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no"
))
trainer = Trainer(model, arguments, train_dataset=Numbers())
done = trainer.train()
arguments.world_size, arguments.process_index, model.classifier.weight.tolist(), seen, done.global_step
"""


@pytest.mark.slow
@pytest.mark.extended("library", "test_distributed_data_parallel")
def test_libraries_train_on_all_ranks(pair, tmp_path, monkeypatch, wait_until):
    """The ranks train one model, and each row is read by one rank. Lightning runs twice on the same warm gang.

    The Accelerator and the TrainingArguments are made where there is only one process, as in a notebook.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pair.notebook["folder"] = str(tmp_path)
    for cell in (LIGHTNING, LIGHTNING, SENT + ACCELERATE, SENT + TRAINER):
        first, second = pair.values(textwrap.dedent(cell), framework="torch")
        assert (first[:2], second[:2]) == ((2, 0), (2, 1))
        assert first[2] == second[2], "the ranks train one model"
        assert (len(first[3]), sorted(first[3] + second[3])) == (16, [float(row) for row in range(32)])
        assert first[4] == second[4]
    # These strategies of Lightning would start processes of their own on each rank.
    with pytest.raises(RunFailed, match=r"cell already runs .* 2 ranks\. Use strategy=\"ddp\" instead"):
        pair.run(LIGHTNING.replace("devices=", 'strategy="ddp_notebook", devices='), framework="torch")
    # notebook_launcher() would start a ring on each rank. With one process, it only calls the function.
    pair.run("AcceleratorState._reset_state(reset_partial_state=True)", framework="torch")
    launch = "import accelerate\naccelerate.notebook_launcher(print, ('called',), num_processes={})"
    with pytest.raises(RunFailed, match=r"cell already runs .* 2 ranks\. Call .*training function itself"):
        pair.run(launch.format(2), framework="torch")
    pair.run(launch.format(1), framework="torch")
    assert pair.view.record.ranks[1].tail[-1].text == "called"
    # Other tests use these ranks afterwards, so the process group of the last library must not remain.
    pair.run("import torch\ntorch.distributed.destroy_process_group()", framework="torch")

    # Lightning resets signal handlers, even the handler that writes stacks, and a rank without a stack is not idle.
    # Ranks become idle some time after a cell, because they first drop the cell's objects.
    def states():
        return [row[2] for row in describe.stacks_table(pair.gang.stacks())]

    wait_until(lambda: states() == ["idle"] * 2, "both ranks wait for a cell, and their stacks say so")
