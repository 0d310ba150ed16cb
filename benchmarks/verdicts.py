"""Plants reasons for slow runs, and counts how often the verdict names the kind, the rank and the place.

    python benchmarks/verdicts.py [--turns N] [--only WORDS] [--balanced N] [--seconds S]

Each case runs a cell on ranks of this machine. Lines with a planted reason end with `# *`. A verdict is right if it has
the case's kind, names its ranks, and a line or function with the mark. In balanced runs, no rank may be accused.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import time
from dataclasses import dataclass

from sparkring.engine.run.api import run_spec
from sparkring.engine.run.options import Options
from sparkring.engine.run.spec import Cell, RunSpec
from sparkring.history import describe
from sparkring.history.record import RunRecord

SEED = 7
SECONDS = 11.0  # of each cell's loop: a verdict needs some 8 s
_TORCH = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
SETUP
dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
DEFINITIONS
def busy(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
def step(x):
    for _ in range(4):
        busy(0.005)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
def all_over():
    flag = torch.tensor(float(time.time() > until))
    dist.all_reduce(flag)
    return flag.item() > 0
until = time.time() + SECONDS
LOOP
dist.destroy_process_group()
"""
_PLAIN_LOOP = """
while not all_over():
    x = load()
    step(x)
"""
_LOAD = """
def load():
    return torch.randn(64, 256)
"""
_LOADER = """
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, at):
        if rank in SLOW:
            time.sleep(0.002)  # *
        return torch.ones(256)
def load():
    return next(iter(torch.utils.data.DataLoader(Images(), 64)))  # *
"""
_HOROVOD = """
import time, torch, horovod.torch as hvd
hvd.init()
torch.manual_seed(SEED)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
def busy(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
def augment(x):
    if rank in SLOW:
        busy(0.06)  # *
    return x
until = time.time() + SECONDS
while not hvd.allreduce(torch.tensor(float(time.time() > until))).item() > 0:
    x = augment(torch.randn(64, 256))
    for _ in range(4):
        busy(0.005)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""
_KERAS = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import time, numpy, tensorflow as tf, horovod.tensorflow.keras as hvd
hvd.init()
tf.keras.utils.set_random_seed(SEED)
model = tf.keras.Sequential([tf.keras.layers.Dense(256, activation="relu"), tf.keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), "mse")
def rows():
    while True:
        if rank in SLOW:
            time.sleep(0.04)  # *
        yield numpy.ones((256, 256), "float32"), numpy.ones((256, 1), "float32")  # *
shape = tf.TensorSpec((256, 256)), tf.TensorSpec((256, 1))
data = tf.data.Dataset.from_generator(rows, output_signature=shape)
steps = int(SECONDS * (20 if SLOW else 40))
model.fit(data.take(steps), epochs=1, verbose=0)  # *
"""

_TENSORFLOW = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import time, numpy, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(256, activation="relu"), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.01), "mse")
def rows():
    while True:
        if rank in SLOW:
            time.sleep(0.04)  # *
        yield numpy.ones((256, 256), "float32"), numpy.ones((256, 1), "float32")  # *
shape = tf.TensorSpec((256, 256)), tf.TensorSpec((256, 1))
off = tf.data.Options()
off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
data = tf.data.Dataset.from_generator(rows, output_signature=shape).with_options(off)
model.fit(data.take(int(SECONDS * 20)), epochs=1, verbose=0)  # *
"""
_JAX = """
import time, jax, jax.numpy as jnp, numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.distributed.initialize()
sharding = NamedSharding(Mesh(jax.devices(), ("x",)), PartitionSpec("x"))
@jax.jit
def total(x):
    return jnp.sum(x * x)
def augment(x):
    if rank in SLOW:
        time.sleep(0.1)  # *
    return x
for step in range(int(SECONDS * 9)):
    x = augment(numpy.ones((1, 1000), "float32"))
    loss = float(total(jax.make_array_from_process_local_data(sharding, x)))
"""


@dataclass(frozen=True)
class Planted:
    """A cell with a reason to be slow: the verdict's expected `kinds` and `ranks`, and the phases that it may name."""

    name: str
    code: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    phases: tuple[str, ...] = ()
    framework: str = "torch"
    size: int = 2
    slow: tuple[int, ...] = (1,)


def _torch(definitions: str = _LOAD, loop: str = _PLAIN_LOOP, setup: str = "") -> str:
    return (
        _TORCH.replace("SETUP", setup).replace("DEFINITIONS", definitions.strip("\n")).replace("LOOP", loop.strip("\n"))
    )


_AUGMENT = """
def load():
    return augment(torch.randn(64, 256))
def augment(x):
    if rank in SLOW:
        busy(0.06)  # *
    return x
"""
_CROP = _AUGMENT.replace("        busy(", '        with sparkring.phase("crop"):\n            busy(')
CASES = (
    Planted("slow augment on one rank", _torch(_AUGMENT), ("slow rank",), (1,), ("compute",)),
    Planted(
        "the same, named by hand",
        _torch(_CROP, setup="import sparkring"),
        ("slow rank",), (1,), ("crop",),
    ),
    Planted("slow augment on one of three", _torch(_AUGMENT), ("slow rank",), (2,), ("compute",), size=3, slow=(2,)),
    Planted("slow reader on one rank", _torch(_LOADER), ("slow rank",), (1,), ("data",)),
    Planted("slow reader on all ranks", _torch(_LOADER), ("data",), (), ("data",), slow=(0, 1)),
    Planted(
        "uneven shards",
        _torch(loop="""
for _ in range(40):
    step(load())
if rank in SLOW:
    for _ in range(80):
        with model.no_sync():
            step(load())  # *
all_over()
"""),
        ("slow rank",), (1,),
    ),
    Planted(
        "a thread holds the GIL",
        _torch(loop="""
import threading
def hog():
    while time.time() < until:
        sum(range(10_000))
if rank in SLOW:
    threading.Thread(target=hog, daemon=True).start()
while not all_over():
    step(load())
"""),
        ("slow rank",), (1,),
    ),
    Planted(
        "slow save on rank 0",
        _torch(setup="import os, tempfile", loop="""
folder = tempfile.mkdtemp()
while not all_over():
    step(load())
    if rank == 0:
        torch.save({"x": torch.zeros(24_000_000)}, f"{folder}/model.pt")  # *
"""),
        ("slow rank",), (0,), ("save",),
    ),
    Planted("late joiner", _torch(setup="if rank in SLOW:\n    time.sleep(6)  # *"), ("slow rank",), (1,), ("idle",)),
    Planted("slow augment, Horovod", _HOROVOD, ("slow rank",), (1,), ("compute",), framework="horovod"),
    Planted("slow reader on one rank, Keras", _KERAS, ("slow rank",), (1,), ("data",), framework="horovod"),
    Planted("slow reader on all ranks, Keras", _KERAS, ("data",), (), ("data",), framework="horovod", slow=(0, 1)),
    Planted("slow reader on one rank, TensorFlow", _TENSORFLOW, ("slow rank",), (1,), ("data",), "tensorflow"),
    Planted("slow augment, JAX", _JAX, ("slow rank",), (1,), ("idle",), framework="jax"),
    Planted(
        "slow reader, one rank",
        """
import time
def read():
    time.sleep(0.05)  # *
    return range(100_000)
until = time.time() + SECONDS
while time.time() < until:
    sum(read())
""",
        ("idle", "data"), (), ("idle", "data"), framework="plain", size=1,
    ),
)  # fmt: skip
BALANCED = (
    Planted("balanced", _torch(_AUGMENT), (), slow=()),
    Planted("balanced, three ranks", _torch(_AUGMENT), (), size=3, slow=()),
    Planted("balanced, Horovod", _HOROVOD, (), framework="horovod", slow=()),
    Planted("balanced, Keras", _KERAS, (), framework="horovod", slow=()),
)


def run(case: Planted, seconds: float) -> RunRecord:
    """Run the cell of a case, and return the record."""
    records: list[RunRecord] = []

    class View:
        def refresh(self, record: RunRecord) -> None:
            pass

        def close(self, record: RunRecord) -> None:
            records.append(record)

        again = refresh

    names = {"SEED": SEED, "SECONDS": seconds, "SLOW": case.slow}
    run_spec(
        RunSpec(
            Cell(f"\n{case.code}", names), Options(np=-case.size), case.framework, case.name, f"%%run\n{case.code}"
        ),
        View(),
    )
    return records[-1]


def is_right(case: Planted, record: RunRecord) -> bool:
    """Return whether the verdict names the reason: for a balanced case, whether it accuses nobody."""
    judged = describe.verdict(record)
    if not case.kinds:
        return judged is None or judged.kind != "slow rank"
    if judged is None or judged.kind not in case.kinds or judged.ranks != case.ranks:
        return False
    place = judged.place
    if case.phases and (place is None or place.phase not in case.phases):
        return False
    lines = record.code.splitlines()
    marked = [at for at, line in enumerate(lines, 1) if line.endswith("# *")]
    return not (marked and case.phases) or (place is not None and any(call.line in marked for call in place.calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=1, help="how often each case with a reason runs")
    parser.add_argument("--balanced", type=int, default=1, help="how often each balanced case runs")
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each loop takes")
    chosen = parser.parse_args()
    cases = [(case, chosen.turns) for case in CASES] + [(case, chosen.balanced) for case in BALANCED]
    print("| case | right | verdict |\n|---|---|---|")
    right = {True: 0, False: 0}
    runs = {True: 0, False: 0}
    for case, turns in cases:
        if not re.search(chosen.only, case.name) or not _has(case.framework):
            continue
        rights, words = 0, ""
        for _ in range(turns):
            record = run(case, chosen.seconds)
            is_one = is_right(case, record)
            rights += is_one
            if not words or not is_one:
                words = describe.verdict_words(record) or "(none)"
        right[bool(case.kinds)] += rights
        runs[bool(case.kinds)] += turns
        print(f"| {case.name} | {rights} of {turns} | {words} |", flush=True)
        time.sleep(0.1)
    accused = runs[False] - right[False]
    print(f"\n{right[True]} of {runs[True]} verdicts are right")
    print(f"{accused} false accusations in {runs[False]} balanced runs")


def _has(framework: str) -> bool:
    return framework == "plain" or importlib.util.find_spec(framework) is not None


if __name__ == "__main__":
    main()
