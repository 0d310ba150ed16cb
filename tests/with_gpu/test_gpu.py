"""Checks that need an NVIDIA GPU: `make test-gpu` sets up what they need and runs them.

Cells can read DEVICE and BACKEND, which are "cuda" and "nccl", except in a trial of the checks on CPUs
(SPARKRING_GPU_CHECKS_ON_CPU=1).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gpu_checks import A_GPU, FSDP, HOROVOD, MIG, NVML, TENSORFLOW, TWO_GPUS
from gpu_machine import HOROVOD as HOROVOD_BUILD
from waiting import until

import sparkring
from sparkring.errors import RunFailed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("released")]

LIMIT_S = 90.0  # of one run; much more than it needs, so that a run that hangs fails
STOPPED_S = 45.0  # of a run that is stopped

# A cell that trains the same small net on a device. The data and the first weights are the same on all devices.
TRAINING = """
import torch

def make(device):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    x = torch.randn(256, 20)
    return model, x.to(device), x.sum(1, keepdim=True).to(device)

def train(model, optimizer, x, y, steps=20):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def weights(model):
    return torch.cat([each.detach().flatten().cpu() for each in model.parameters()]).tolist()

def on_the_cpu():
    model, x, y = make("cpu")
    losses = train(model, torch.optim.SGD(model.parameters(), 0.05), x, y)
    return losses, weights(model)
"""
# A call that never returns to Python: a kernel that spins. On a CPU, a mutex that is locked twice takes its place.
FOREVER = """
import ctypes, os, signal, threading, time
import torch

def forever():
    if DEVICE == "cuda":
        torch.cuda._sleep(10**13)  # clock cycles: more than an hour
        torch.cuda.synchronize()
    else:
        mutex = ctypes.create_string_buffer(128)
        lock = ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex), lock(mutex)

torch.ones(1, device=DEVICE).sum().item()  # CUDA is initialised
"""


@pytest.fixture
def run(local, machine):
    """`run(source, n, …)` runs a cell on n local ranks."""

    def run_cell(source, n=1, **options):
        return local.run(source, n, namespace=machine.cell_names(), timeout_s=LIMIT_S, **options)

    return run_cell


@pytest.fixture
def failed(run, local):
    """`failed(source)` runs a cell whose rank 1 of 2 fails, and returns the error, which names rank 1, and its record.

    Rank 0 does not use the GPU, and would go on.
    """

    def run_cell(source):
        cell = "import time\nif rank == 0:\n    time.sleep(600)\n" + source
        with pytest.raises(RunFailed) as caught:
            run(cell, n=2)
        assert caught.value.record.failed_rank == 1, caught.value
        assert "rank 1" in str(caught.value)
        return caught.value

    return run_cell


@pytest.fixture
def horovod():
    """Fails the check if Horovod could have been built here, but the build has failed."""
    outcome, _, why = os.environ.get(HOROVOD_BUILD, "").partition(": ")
    if outcome == "failed":
        pytest.fail(f"Horovod was not built: {why}", pytrace=False)


def assert_close(found, expected):
    """Compare losses and weights. CPU and GPU add in different orders, and the difference grows with the steps."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-2, atol=1e-4)


# ── Training ──────────────────────────────────────────────────────────────────

ON_RANKS = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group({backend})
index = {index}
device = DEVICE if DEVICE == "cpu" else f"cuda:{{index}}"
if DEVICE == "cuda":
    torch.cuda.set_device(index)
total = torch.full((1000,), rank + 1.0, device=device)
dist.all_reduce(total)
model, x, y = make(device)
wrapped = DistributedDataParallel(model, device_ids=None if DEVICE == "cpu" else [index])
share = len(x) // size
x, y = x[rank * share:(rank + 1) * share], y[rank * share:(rank + 1) * share]
train(wrapped, torch.optim.SGD(model.parameters(), 0.05), x, y)
with torch.no_grad():
    whole = [torch.nn.functional.mse_loss(model(x), y).item()]
backend = dist.get_backend()
dist.barrier()
dist.destroy_process_group()
"""


def test_torchrun_with_nccl_on_one_rank(run, machine):
    """DistributedDataParallel on the GPU gives the same losses and weights as the CPU."""
    cell = (
        TRAINING
        + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group(BACKEND)
total = torch.full((1000,), 3.0, device=DEVICE)
dist.all_reduce(total)
model, x, y = make(DEVICE)
wrapped = DistributedDataParallel(model)
losses = train(wrapped, torch.optim.SGD(model.parameters(), 0.05), x, y)
backend = dist.get_backend()
dist.destroy_process_group()
backend, total.unique().tolist(), next(model.parameters()).device.type, (losses, weights(model)), on_the_cpu()
"""
    )
    backend, total, device, found, expected = run(cell, framework="torch").value
    assert (backend, total, device) == (machine.backend, [3.0], machine.device)
    assert_close(found, expected)


def test_two_ranks_share_a_gpu_with_gloo(run):
    """Two ranks train on halves of the data, on the same GPU, and end with the weights of the whole data on the CPU."""
    cell = (
        TRAINING
        + ON_RANKS.format(backend='"gloo"', index=0)
        + "\ntotal.unique().tolist(), weights(model), on_the_cpu()"
    )
    first, second = run(cell, n=2, framework="torch").values
    assert first[0] == second[0] == [3.0]
    assert first[1] == second[1]
    np.testing.assert_allclose(first[1], first[2][1], rtol=1e-2, atol=1e-4)


def test_sparkring_run_with_torch(machine, notebook_cell):
    """sparkring.run(framework="torch") runs a function of the notebook on the GPU."""
    names = notebook_cell(
        """
        def product(device, backend):
            import torch
            import torch.distributed as dist
            dist.init_process_group(backend)
            found = torch.arange(6.0, device=device).reshape(2, 3)
            found = found @ found.T
            dist.all_reduce(found)
            dist.destroy_process_group()
            return found.device.type, found.tolist()
        """
    )
    result = sparkring.run(
        names["product"], machine.device, machine.backend, np=-1, framework="torch", timeout_s=LIMIT_S
    )
    assert result.value == (machine.device, [[5.0, 14.0], [14.0, 50.0]])


@pytest.mark.needs(TWO_GPUS)
def test_two_ranks_on_two_gpus_with_nccl(run):
    """Each rank has a GPU of its own. The weights are those of the whole data on the CPU."""
    cell = TRAINING + ON_RANKS.format(backend="BACKEND", index="local_rank")
    cell = cell.replace("index =", "import os\nlocal_rank = int(os.environ['LOCAL_RANK'])\nindex =")
    cell += "\nbackend, total.unique().tolist(), sparkring.world().gpus, weights(model), on_the_cpu()"
    first, second = run("import sparkring\n" + cell, n=2, framework="torch", gpus=1).values
    assert first[:2] == second[:2] == ("nccl", [3.0])
    assert set(first[2]).isdisjoint(second[2])
    assert first[3] == second[3]
    np.testing.assert_allclose(first[3], first[4][1], rtol=1e-2, atol=1e-4)


@pytest.mark.needs(MIG)
def test_a_mig_instance_for_each_rank(run, machine):
    """Under MIG, each rank sees one device, and no two ranks see the same one."""
    cell = """
import torch
free, total = torch.cuda.mem_get_info()
torch.cuda.device_count(), str(torch.cuda.get_device_properties(0).uuid), torch.ones(9, device="cuda").sum().item()
"""
    several = machine.mig[:2]
    found = run(cell, n=len(several), gpus=1, env=(("CUDA_VISIBLE_DEVICES", ",".join(several)),)).values
    assert [(count, total) for count, _, total in found] == [(1, 9.0)] * len(several)
    assert len({uuid for _, uuid, _ in found}) == len(several)


HOROVOD_TRAINING = (
    TRAINING
    + """
import horovod.torch as hvd
hvd.init()
device = DEVICE
if DEVICE == "cuda":
    torch.cuda.set_device(hvd.local_rank())
model, x, y = make(device)
share = len(x) // size
x, y = x[rank * share:(rank + 1) * share], y[rank * share:(rank + 1) * share]
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
losses = train(model, optimizer, x, y)
total = hvd.allreduce(torch.full((1000,), rank + 1.0, device=device), op=hvd.Sum)
found = hvd.nccl_built() > 0, total.device.type, total.unique().tolist(), weights(model), losses, on_the_cpu()
hvd.shutdown()
found
"""
)


@pytest.mark.needs(HOROVOD)
def test_horovod_on_one_rank(horovod, run, machine):
    """Horovod has NCCL, and its optimizer on the GPU gives the same losses and weights as the CPU without Horovod."""
    nccl, device, total, weights, losses, expected = run(HOROVOD_TRAINING, framework="horovod").value
    assert nccl or machine.device == "cpu"
    assert (device, total) == (machine.device, [1.0])
    assert_close((losses, weights), expected)


@pytest.mark.needs(HOROVOD, TWO_GPUS)
def test_horovod_on_two_gpus(horovod, run):
    """Two ranks that train on halves of the data end with the weights of the whole data on the CPU."""
    first, second = run(HOROVOD_TRAINING, n=2, framework="horovod", gpus=1).values
    assert first[:3] == second[:3] == (True, "cuda", [3.0])
    assert first[3] == second[3]
    np.testing.assert_allclose(first[3], first[5][1], rtol=1e-2, atol=1e-4)


def test_mixed_precision(run, note):
    """autocast() computes in half precision, GradScaler scales the gradients, and the loss falls as on the CPU."""
    cell = (
        TRAINING
        + """
scaler_class = getattr(torch.amp, "GradScaler", None)
scaler = scaler_class(DEVICE) if scaler_class else torch.cuda.amp.GradScaler()
half = torch.float16 if DEVICE == "cuda" else torch.bfloat16
model, x, y = make(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
losses, types = [], set()
for _ in range(20):
    optimizer.zero_grad()
    with torch.autocast(DEVICE, dtype=half):
        out = model(x)
        loss = torch.nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    types |= {str(out.dtype), *(str(each.dtype) for each in model.parameters())}
sorted(types), str(half), scaler.get_scale(), losses, on_the_cpu()[0]
"""
    )
    types, half, scale, losses, expected = run(cell, framework="torch").value
    assert types == sorted({"torch.float32", half})
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] / 2
    assert abs(losses[-1] - expected[-1]) < 0.1 * expected[0]
    assert scale > 0
    note(f"the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}; on the CPU, to {expected[-1]:.2f}")


@pytest.mark.needs(FSDP)
def test_fully_sharded_on_one_rank(run):
    """fully_shard() on the GPU gives the same losses and weights as the CPU without it."""
    cell = (
        TRAINING
        + """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group(BACKEND)
mesh = init_device_mesh(DEVICE, (size,))
model, x, y = make(DEVICE)
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
losses = train(model, torch.optim.SGD(model.parameters(), 0.05), x, y)
local = torch.cat([each.to_local().detach().flatten().cpu() for each in model.parameters()]).tolist()
dist.destroy_process_group()
(losses, local), on_the_cpu()
"""
    )
    assert_close(*run(cell, framework="torch").value)


@pytest.mark.needs(TENSORFLOW)
def test_tensorflow_on_one_rank(run):
    """MultiWorkerMirroredStrategy trains on the GPU."""
    cell = """
import numpy as np
import tensorflow as tf
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
losses = model.fit(x, x.sum(1, keepdims=True), epochs=5, batch_size=64, shuffle=False, verbose=0).history["loss"]
len(tf.config.list_physical_devices("GPU")), tf.matmul(x, x, transpose_a=True).device, losses
"""
    count, device, losses = run(cell, framework="tensorflow").value
    assert count
    assert "GPU" in device
    assert losses[-1] < losses[0]


# ── Failures ──────────────────────────────────────────────────────────────────


def test_out_of_memory(failed, machine):
    """The error names the rank and the cause. The memory that the rank held is free afterwards."""
    error = failed(
        """
import torch
if DEVICE == "cuda":
    free, total = torch.cuda.mem_get_info()
    held = torch.empty(free * 9 // 10, dtype=torch.uint8, device="cuda")
else:
    total = 2**60
torch.empty(total, dtype=torch.uint8, device=DEVICE)
"""
    )
    failure = error.record.failure
    assert failure.is_exception
    if machine.device == "cuda":
        assert failure.error.endswith("OutOfMemoryError")
        assert "out of memory" in failure.summary
    assert "torch.empty(total" in failure.frames[-1].source[-1].text
    assert "memory" in str(error)


def test_an_index_out_of_bounds(failed, machine):
    """On a GPU, this is a device-side assert. The error names the rank and the cause."""
    error = failed(
        """
import torch
torch.zeros(2, device=DEVICE)[torch.tensor([5], device=DEVICE)]
if DEVICE == "cuda":
    torch.cuda.synchronize()
"""
    )
    assert error.record.failure.is_exception
    assert ("device-side assert" if machine.device == "cuda" else "out of bounds") in error.record.failure.summary


@pytest.mark.needs(A_GPU)
def test_an_illegal_memory_access(failed):
    """A kernel reads an address at which there is no memory. The error names the rank and the cause."""
    error = failed(
        """
import torch
small = torch.zeros(1, dtype=torch.uint8, device="cuda")

class Beyond:  # a view of 256 GiB, of which only the first byte exists
    __cuda_array_interface__ = {"shape": (2**38,), "typestr": "|u1", "data": (small.data_ptr(), False), "version": 2}

(torch.as_tensor(Beyond(), device="cuda")[-4096:] + 1).sum()
torch.cuda.synchronize()
"""
    )
    assert error.record.failure.is_exception
    assert "illegal memory access" in error.record.failure.summary


def test_a_rank_is_killed_during_a_kernel(failed):
    """The error names the rank and the signal, although a kernel was running."""
    error = failed(FOREVER + "\nthreading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()\nforever()")
    assert error.record.failure.signal == "SIGKILL"


LOOP = """
x = torch.ones(2000, 2000, device=DEVICE)
while True:
    x = (x @ x) / 2000
"""


@pytest.mark.parametrize("work", [LOOP, "forever()"], ids=["a loop of kernels", "a kernel that never ends"])
def test_stop(local, machine, note, work):
    """Stop ends ranks that are running kernels. Both ranks use the same GPU."""
    import time

    source = FOREVER + "\nprint('computes', flush=True)\n" + work
    running = local.in_background(source, 2, namespace=machine.cell_names())
    until(lambda: sum(line.text == "computes" for line in running.record.recent) == 2, "both ranks compute", LIMIT_S)
    begun = time.monotonic()
    running.stop(wait=False)
    until(lambda: running.done, "the run has ended", STOPPED_S)
    note(f"ended {time.monotonic() - begun:.1f} s after Stop")
    with pytest.raises(KeyboardInterrupt, match="interrupted, 2 ranks ended"):
        running.result()
    assert [rank.state for rank in running.record.ranks] == ["stopped"] * 2


HELD = """
def held():
    import gc
    if DEVICE == "cuda":
        return torch.cuda.memory_allocated()
    return sum(each.nbytes for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.nbytes > 1_000_000)
"""


def test_a_warm_gang_after_an_error(local_gang, machine):
    """After an ordinary error, the ranks go on, and the memory of what the failed cell computed is free."""
    local_gang.start(2)
    local_gang.notebook |= machine.cell_names()
    kept = local_gang.values(f"import torch\n{HELD}\nkept = torch.ones(4_000_000, device=DEVICE)\nheld()")
    pids = local_gang.pids()
    with pytest.raises(RunFailed) as caught:
        local_gang.cell(
            """
            def compute():
                large = torch.ones(64_000_000, device=DEVICE)
                assert held() > 200_000_000
                raise ValueError("an ordinary error")
            compute()
            """,
            timeout_s=LIMIT_S,
        )
    assert caught.value.record.failure.error == "builtins.ValueError"
    assert local_gang.values("held()", timeout_s=LIMIT_S) == kept
    assert min(kept) >= 16_000_000
    assert local_gang.values("kept.sum().item()", timeout_s=LIMIT_S) == [4_000_000.0] * 2
    assert local_gang.pids() == pids


# ── What is reported, and predictions ─────────────────────────────────────────


@pytest.mark.needs(NVML)
def test_usage_arrives_in_the_record(local, machine, note, tmp_path):
    """While a rank computes, the record has the use of its GPU, as does the saved run."""
    from sparkring.history import run_store

    seen = tmp_path / "seen"

    def look(record):
        gpus = record.ranks[0].gpus if record.ranks else ()
        if gpus and record.ranks[0].used and any(gpu.used_bytes and gpu.busy_percent != 0 for gpu in gpus):
            seen.touch()

    local.view.on_refresh = look
    result = local.run(
        """
        import os, time, torch
        x = torch.ones(3000, 3000, device=DEVICE)
        until = time.monotonic() + 50
        while not os.path.exists(seen) and time.monotonic() < until:
            for _ in range(20):
                x = (x @ x) / 3000
            x.sum().item()
        os.path.exists(seen)
        """,
        1,
        namespace={**machine.cell_names(), "seen": str(seen)},
        gpus=1,
        timeout_s=LIMIT_S,
    )
    assert result.value
    (rank,) = run_store.load(run_store.find("")).ranks
    (gpu,) = rank.gpus
    assert rank.gpus == result.record.ranks[0].gpus
    assert gpu.name in machine.names
    assert 0 < gpu.used_bytes < gpu.total_bytes
    assert any(sample.gpu_bytes for sample in rank.samples)
    busy = [sample.gpu_percent for sample in rank.samples if sample.gpu_percent is not None]
    note(f"{max(busy):.0f} % busy, {gpu.used_bytes / 1e9:.1f} GB in use" if busy else "the GPU reports no utilisation")


def test_predictions(machine, notebook_cell, tmp_path):
    """The model process computes on the GPU, and the predictions equal those of the CPU."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = notebook_cell(
        """
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

            def forward(self, x):
                y = self.layers(x).squeeze(1)
                return {"y": y, "on_gpu": torch.full_like(y, float(x.is_cuda))}

        torch.manual_seed(1)
        net = Net()
        """
    )
    torch, net = names["torch"], names["net"]
    x = np.random.default_rng(0).normal(size=(5000, 8)).astype(np.float32)
    pq.write_table(pa.table({"x": list(x)}), tmp_path / "data.parquet", row_group_size=1000)
    written = sparkring.predict(
        tmp_path / "data.parquet",
        net,
        inputs=["x"],
        returns={"y": "float", "on_gpu": "float"},
        to=tmp_path / "predictions",
        np=-1,
    )
    assert (written.rows, written.nulls) == (5000, 0)
    found = pq.read_table(tmp_path / "predictions")
    assert set(found["on_gpu"].to_pylist()) == {float(machine.device == "cuda")}
    with torch.inference_mode():
        expected = net.eval()(torch.from_numpy(x))["y"].numpy()
    np.testing.assert_allclose(found["y"].to_numpy(), expected, rtol=1e-4, atol=1e-5)
    until(lambda: not list(Path(os.environ["TMPDIR"]).glob("sparkring-model-*")), "no model process is left")


# This check is the last one in the file, so it runs last.
@pytest.mark.needs(NVML)
def test_nothing_is_left_on_the_gpus(at_first, machine, note):
    """After all checks, NVML lists no process that was not there before them, and the memory is free."""
    from gpu_checks import Held

    left = ""

    def is_free():
        nonlocal left
        now = Held.now()
        left = now.more_than(at_first)
        used = ", ".join(f"{each / 1e9:.2f} GB" for each in now.used_bytes)
        listed = "NVML lists no processes here, so only memory was compared; " if now.pids is None else ""
        note(f"{listed}in use: {used}")
        return not left

    until(is_free, "the memory of the GPUs is free", 15.0)
