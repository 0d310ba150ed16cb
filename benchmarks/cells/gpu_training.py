"""A convolutional net on random images on each rank's GPU, for a given time; rank 0 prints images per second.

BENCHMARK_RING is "torch" (DistributedDataParallel with NCCL) or "horovod".
"""

import os
import time

import torch

BATCH, WARM_UP, BETWEEN = 256, 10, 10
device = os.environ.get("BENCHMARK_DEVICE", "cuda")
local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("HOROVOD_LOCAL_RANK", "0")))
if device == "cuda":
    torch.cuda.set_device(local_rank)
    device = f"cuda:{local_rank}"
torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 64, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(64, 128, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(4),
    torch.nn.Flatten(),
    torch.nn.Linear(2048, 1024),
    torch.nn.ReLU(),
    torch.nn.Linear(1024, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
if os.environ["BENCHMARK_RING"] == "horovod":
    import horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def longest(seconds):
        return max(hvd.allgather(torch.tensor([seconds])).tolist())
else:
    import torch.distributed as dist

    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=None if device == "cpu" else [local_rank])

    def longest(seconds):
        found = torch.tensor(seconds, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()


images = torch.randn(BATCH, 3, 32, 32, device=device)
labels = torch.randint(10, (BATCH,), device=device)


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    loss.item()  # waits for the device


train(WARM_UP)
begun, steps, seconds = time.perf_counter(), 0, 0.0
while longest(seconds) < float(os.environ["BENCHMARK_SECONDS"]):  # all ranks end after the same step
    train(BETWEEN)
    steps += BETWEEN
    seconds = time.perf_counter() - begun
if rank == 0:
    print("images/s", steps * BATCH * size / seconds)
if os.environ["BENCHMARK_RING"] == "horovod":
    hvd.shutdown()
else:
    dist.destroy_process_group()
