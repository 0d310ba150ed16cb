"""Horovod's rings, and HorovodRunner as notebooks use it, on every launcher."""

from __future__ import annotations

import builtins
import os

import pytest
from spares import prepared
from versions import KERAS

import sparkring
from sparkring import HorovodRunner
from sparkring.engine.run.options import Options
from sparkring.engine.run.prepare import prepare
from sparkring.engine.run.spec import Call, RunSpec
from sparkring.errors import OptionsError
from sparkring.launchers.local import LocalLauncher
from sparkring.worker.member.network import interface_of


def function(source: str, name: str):
    """Return a function as if a notebook had defined it."""
    namespace = {"__name__": "__main__", "__builtins__": builtins}
    exec(source, namespace)
    return namespace[name]


TWICE = """
import os

def train(base, *, step=1):
    import horovod.torch as hvd
    import torch
    from sparkring import world
    found = []
    for _ in range(2):
        hvd.init()
        mine = (hvd.rank(), hvd.local_rank()) == (world().rank, world().local_rank)
        total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum, name="total").item()
        found.append((mine, hvd.size(), total))
        rank = hvd.rank()
        hvd.shutdown()
    return found, base + step * rank, os.getpid()
"""


@pytest.mark.slow
@pytest.mark.standalone("the ranks meet at the executors' addresses")
@pytest.mark.versions("of PyTorch, for which Horovod was built")
@pytest.mark.extended_on("spark", "test_runner_with_every_slot makes a ring on the cluster")
def test_a_ring_that_is_made_twice(ring, spares):
    """HorovodRunner calls the function with its arguments on each rank, and returns what rank 0 returned.

    Ranks have the right numbers in Horovod and compute sums, and hvd.init() works again after hvd.shutdown().
    """
    if ring.where == "local":
        prepared(spares, 3, "torch", "horovod.torch")
    returned = HorovodRunner(np=ring.np(3)).run(function(TWICE, "train"), base=10, step=5)
    values = sparkring.last_result.values
    assert returned == values[0]
    assert [found for found, _, _ in values] == [[(True, 3, 6.0)] * 2] * 3
    assert [computed for _, computed, _ in values] == [10, 15, 20]
    assert len({os.getpid(), *(pid for _, _, pid in values)}) == 4


ELASTIC_TORCH = """
import psutil
import torch
import horovod.torch as hvd

def listening():
    return {each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}

before = listening()
hvd.init()
torch.manual_seed(rank)
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
seen, resets = [], []

@hvd.elastic.run
def train(state):
    for state.step in range(state.step, 6):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank))).sum().backward()
        optimizer.step()
        if state.step == 4 and not resets:
            hvd.allreduce(torch.zeros(rank + 1), name="of no common shape")
        seen.append(state.step)
        if state.step % 2:
            state.commit()

state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
listen = listening() - before
hvd.shutdown()
seen, resets, [weight.tolist() for weight in model.parameters()], listen
"""

ELASTIC_KERAS = """
import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()
tf.keras.utils.set_random_seed(rank)
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
x, y = tf.random.normal((32, 4)), tf.zeros((32, 1))

@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, 2),
    ]
    model.fit(x, y, batch_size=8, epochs=3 - state.epoch, callbacks=callbacks, verbose=0)

state = hvd.elastic.KerasState(model, batch=0, epoch=0)
train(state)
known = [weights.tolist() for weights in model.get_weights()]
state.commit()
model.set_weights([weights + 1 for weights in model.get_weights()])
state.restore()
hvd.shutdown()
state.epoch, known, [weights.tolist() for weights in model.get_weights()] == known
"""


@pytest.mark.slow
def test_an_elastic_training_in_a_ring_that_stays(pair):
    """Training goes back to its last commit when a collective fails on all ranks, and continues in a new ring.

    No socket listens meanwhile: Horovod's own service would listen on all interfaces, and unpickle what arrives.
    """
    first, second = pair.run(ELASTIC_TORCH, framework="horovod").values
    assert first == second
    assert first[:2] == ([0, 1, 2, 3, 3, 4, 5], [2])
    assert first[3] == set()


AUTOGRAPH = """
import tensorflow as tf
import horovod.tensorflow as hvd
from horovod.tensorflow.keras import DistributedOptimizer

class Halved(hvd.Compression.none):
    @staticmethod
    def compress(tensor):
        return (tensor / 2 if tf.reduce_sum(tensor) > 0 else tensor), None

@tf.function
def gradient(variable, compression):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable) * (rank + 1)
        if loss < 0:
            loss = -loss
    return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])[0]

hvd.init()
variable = tf.Variable([2.0])
kinds = hvd.Compression.none, Halved
made = [DistributedOptimizer(tf.keras.optimizers.SGD(), f"with {kind}", compression=kind) for kind in kinds]
converted = [each._allreduce_grads._autograph for each in made if hasattr(each, "_allreduce_grads")]
converted, [gradient(variable, kind).numpy().tolist() for kind in kinds]
"""


@pytest.mark.slow
@pytest.mark.versions("of TensorFlow, whose AutoGraph converts functions")
@pytest.mark.extended("library", "the same functions under torch, in test_torch.py")
def test_what_autograph_converts(pair):
    """AutoGraph converts the user's function and compressor, but not Horovod's functions, which would take seconds."""
    # With Keras 3, sparkring's own optimizer is used, which has no `_allreduce_grads`.
    expected = ([False, True] if KERAS.major == 2 else [], [[1.5], [0.75]])
    assert pair.run(AUTOGRAPH, framework="horovod").values == [expected, expected]


@pytest.mark.slow
@pytest.mark.extended("library", "test_an_elastic_training_in_a_ring_that_stays")
def test_an_elastic_training_with_keras(pair):
    """KerasState and its callbacks work."""
    first, second = pair.run(ELASTIC_KERAS, framework="horovod").values
    assert first == second
    assert first[0] == 3
    assert first[2]


def test_runner_with_one_process_is_still_a_process_of_its_own(watch):
    """With np=-1, the function does not run in the driver."""
    assert HorovodRunner(np=-1).run(function("import os\ndef train(): return os.getpid()", "train")) != os.getpid()


@pytest.mark.parametrize(("verbosity", "shown"), [("all", {"printed", "sent"}), ("log_callback_only", {"sent"})])
def test_runner_verbosity(capsys, verbosity, shown):
    """driver_log_verbosity decides whether everything that ranks print is shown, or only text from log_to_driver()."""
    train = function("def train():\n    from sparkdl.horovod import log_to_driver\n"
                     "    print('printed')\n    log_to_driver('sent')", "train")  # fmt: skip
    HorovodRunner(np=-1, driver_log_verbosity=verbosity).run(train)
    out = capsys.readouterr().out
    assert {word for word in ("printed", "sent") if word in out} == shown


def test_runner_arguments():
    """np must be a keyword and a whole number, and driver_log_verbosity must have one of two values."""
    with pytest.raises(TypeError):
        HorovodRunner(2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="whole number"):
        HorovodRunner(np=1.5)  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="driver_log_verbosity"):
        HorovodRunner(np=-1, driver_log_verbosity="loud")
    with pytest.raises(OptionsError, match=r"run\(\) takes .*function, not NoneType: .* instead .*calling"):
        HorovodRunner(np=-1).run(print())  # type: ignore[arg-type, func-returns-value]


@pytest.mark.standalone("the slots are counted on the cluster")
def test_runner_with_every_slot(spark):
    """np=0 is deprecated, and takes every task slot."""
    with pytest.warns(DeprecationWarning, match="np=0"):
        runner = HorovodRunner(np=0)
    train = function("def train():\n    from sparkring import world\n    return world().size", "train")
    assert runner.run(train) == 4
    restarted = prepare(RunSpec(Call(train), Options(np=0, max_restarts=1), "plain"))
    assert (restarted.launch.place.name, restarted.launch.size) == ("spark", 4)


TRAIN = """
import os

def train(base, step):
    import horovod.torch as hvd
    import torch
    from sparkring import checkpoints, world
    hvd.init()
    store, state = checkpoints(), {"sum": base}
    begun = store.restore(state)
    if not begun:
        state["sum"] += step
        store.save(1, state)
        store.wait()
        hvd.allreduce(torch.zeros(1), name="saved")
        if world().rank == 1:
            os._exit(3)
    return begun, state["sum"], hvd.size()
"""


@pytest.mark.slow
@pytest.mark.any_launcher
def test_run_is_the_runner_with_options(ring, spares, tmp_path):
    """run() takes HorovodRunner's keywords and a launch magic's options, and passes other keywords to the function."""
    if ring.where == "local":
        prepared(spares, 2, "torch", "horovod.torch")
    options = {"np": ring.np(2), "checkpoint_dir": tmp_path, "max_restarts": 1}
    train = function(TRAIN, "train")
    found = sparkring.run(train, 10, **options, driver_log_verbosity="log_callback_only", step=5)
    assert found.values == [(1, 15, 2)] * 2
    assert [attempt.step for attempt in found.record.attempts] == [0, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"framework": "mxnet"}, "one of horovod, "),
        ({"framework": "barrier"}, "one of horovod, "),
        ({"fresh": True}, "--fresh needs a --checkpoint-dir"),
        ({"driver_log_verbosity": "some"}, "driver_log_verbosity must be"),
        ({"np": 1.5}, "np must be a whole number"),
    ],
)
def test_run_refuses(options, words):
    """Invalid options raise an error before anything is started."""
    with pytest.raises((OptionsError, ValueError, TypeError), match=words):
        sparkring.run(print, **options)


def torch_sum():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"], total.item()


@pytest.mark.slow
@pytest.mark.forked("torch", "horovod.torch")
def test_rings_over_ipv6(watch, monkeypatch):
    """Where there is only IPv6, ranks of Horovod and torch connect over the interface that has the address."""
    interface = interface_of("::1")
    if not interface:
        pytest.skip("this machine has no IPv6")
    for name in ("host", "bind_host"):
        monkeypatch.setattr(LocalLauncher, name, "::1")
    assert sparkring.run(torch_sum, np=-2, framework="torch").values == [("::1", interface, 2.0)] * 2
    assert HorovodRunner(np=-2).run(function(TWICE, "train"), base=10)[0] == [(True, 2, 3.0)] * 2
