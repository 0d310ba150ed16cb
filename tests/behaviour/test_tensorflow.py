"""TensorFlow's own multi-worker strategy on every launcher."""

from __future__ import annotations

import textwrap

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rings import shared
from versions import KERAS

import sparkring
from sparkring import MirroredStrategyRunner, shards
from sparkring.errors import OptionsError, RunFailed
from sparkring.frameworks import FRAMEWORKS


@pytest.fixture
def workers(watch, lasting_gangs):
    """Two warm ranks on this machine that import TensorFlow once for the tests of this file."""
    return shared("local", watch, 2, framework="tensorflow")


# With Keras 3, fit() does not work under this strategy. Ranks then use Keras 2, as the error advises.
LEGACY = {} if KERAS.major == 2 else {"TF_USE_LEGACY_KERAS": "1"}


FIT = """
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).random((64, 4)).astype("float32")
model.fit(x, x.sum(1), batch_size=16, epochs=2, verbose=0)

@tf.function
def halved(x):
    if x > 1:
        return x // 2
    return magnitude(x)

graphs = [*tf.data.Dataset.range(-1, 3).map(magnitude), halved(tf.constant(-8)), halved(tf.constant(8))]
weights = [w.tolist() for w in model.get_weights()]
[strategy.num_replicas_in_sync, strategy.cluster_resolver.task_id, weights, [int(value) for value in graphs]]
"""


@pytest.mark.slow
@pytest.mark.standalone("the ranks meet at the executors' addresses")
@pytest.mark.versions("of TensorFlow and Keras")
@pytest.mark.extended_on("spark", "test_distributed_data_parallel shows that the ranks meet")
def test_multi_worker_mirrored_strategy(ring, notebook_cell):
    """Each rank is a worker of one cluster, the replicas are in sync, and their weights are equal.

    Functions of the notebook and of the cell become graphs, and so do their branches.
    """
    namespace = notebook_cell("def magnitude(x):\n    if x < 0:\n        x = -x\n    return x")
    env = tuple(LEGACY.items())
    first, second = ring.run(FIT, framework="tensorflow", namespace=namespace, env=env).values
    assert (first[0], second[0]) == (2, 2)
    assert (first[1], second[1]) == (0, 1)
    assert first[2] == second[2]
    assert first[3] == second[3] == [1, 0, 1, 2, 8, 4]


@pytest.mark.slow
@pytest.mark.extended("library", "test_multi_worker_mirrored_strategy; test_two_groups_one_after_another")
def test_a_strategy_in_a_later_cell(workers):
    """The strategy can be made after other cells, and more than once."""
    assert workers.values("rank", framework="plain") == [0, 1]
    for _ in range(2):
        cell = "import tensorflow as tf\ntf.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync"
        assert workers.values(cell, framework="tensorflow") == [2, 2]
    # TensorFlow's servers listen on all interfaces, and nothing can change this: docs/security.md says so.
    listening = [
        each.laddr.ip for each in psutil.Process(workers.pids()[0]).net_connections() if each.status == "LISTEN"
    ]
    assert listening == ["::"]


SHARDS = """
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    model.compile("sgd", "mse")
model.fit(data.as_tf("x", "y"), epochs=2, verbose=0)
data.epoch
"""


@pytest.mark.forked("tensorflow")
@pytest.mark.slow
def test_a_shard_is_read_to_its_end(local, tmp_path):
    """TensorFlow divides each batch among the ranks, and fit() continues until every row has been used.

    The ranks are new: TensorFlow sometimes hangs in a process that has made a strategy before.
    """
    rows = pa.table({"x": np.arange(320, dtype="f4"), "y": np.zeros(320, "f4")})
    pq.write_table(rows, tmp_path / "data.parquet", row_group_size=100)
    namespace = {"data": shards(tmp_path / "data.parquet", 32)}
    result = local.run(SHARDS, framework="tensorflow", namespace=namespace, env=tuple(LEGACY.items()))
    assert result.values == [3, 3]
    for rank in result.record.ranks:
        assert [epoch.rows for epoch in rank.readings[0].ended] == [160, 160]


MISTAKE_AMONG_WORKERS = """
from sparkring.worker.rank.failures import as_failure
with strategy.scope():
    model.compile("sgd", "mse")
try:
    model.fit(x, y[:3], batch_size=16, verbose=0)
except ValueError as error:
    print("advice on a mistake:", repr(as_failure(error).advice))
"""
FIT_AMONG_WORKERS = """
with strategy.scope():
    model.compile("sgd", "mse")
model.fit(x, y, batch_size=16, verbose=0)
"""


@pytest.mark.slow
@pytest.mark.extended("library", "test_multi_worker_mirrored_strategy")
def test_the_help_of_tensorflow_runs_with_every_keras(local, notebook_cell):
    """With Keras 3, only fit() fails, and its error is followed by advice on what to use instead."""
    namespace = notebook_cell(
        "import numpy as np\nx = np.random.default_rng(0).random((64, 4)).astype('float32')\n"
        "y = x.sum(1, keepdims=True)\n"
        "def make_model():\n    import tensorflow as tf\n"
        "    return tf.keras.Sequential([tf.keras.layers.InputLayer((4,)), tf.keras.layers.Dense(1)])"
    )
    example = textwrap.dedent(FRAMEWORKS["tensorflow"].lesson.example)
    weights = "\n[w.tolist() for w in model.get_weights()]"
    if KERAS.major == 2:
        first, second = local.run(
            example + FIT_AMONG_WORKERS + weights, framework="tensorflow", namespace=namespace
        ).values
        assert first == second
        return
    with pytest.raises(RunFailed) as failure:
        local.run(
            f"{example}\nprint({weights.strip()})\n{MISTAKE_AMONG_WORKERS}{FIT_AMONG_WORKERS}",
            framework="tensorflow",
            namespace=namespace,
        )
    assert "TF_USE_LEGACY_KERAS=1" in failure.value.record.ranks[failure.value.record.failed_rank].failure.advice
    first, second = (
        next(line.text for line in rank.tail if line.text.startswith("[[")) for rank in failure.value.record.ranks
    )
    assert first == second
    for rank in failure.value.record.ranks:  # no advice about Keras follows an error of the user's own
        assert "advice on a mistake: ''" in [line.text for line in rank.tail]


def digits():
    """Return random images in place of MNIST, which would have to be downloaded."""
    import numpy as np

    draw = np.random.default_rng(0)
    return (draw.random((1797, 28, 28)) * 255, draw.integers(10, size=1797)), None


def train():
    """The example of spark-tensorflow-distributor's README, on other images.

    Returns the number of replicas and the losses of the epochs.
    """
    import tensorflow as tf

    buffer_size = 10000
    batch_size = 64

    def make_datasets():
        (mnist_images, mnist_labels), _ = digits()
        dataset = tf.data.Dataset.from_tensor_slices(
            (tf.cast(mnist_images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(mnist_labels, tf.int64))
        )
        return dataset.repeat().shuffle(buffer_size).batch(batch_size)

    def build_and_compile_cnn_model():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(32, 3, activation="relu", input_shape=(28, 28, 1)),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(
            loss=tf.keras.losses.sparse_categorical_crossentropy,
            optimizer=tf.keras.optimizers.SGD(learning_rate=0.001),
            metrics=["accuracy"],
        )
        return model

    train_datasets = make_datasets()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    train_datasets = train_datasets.with_options(options)
    multi_worker_model = build_and_compile_cnn_model()
    history = multi_worker_model.fit(x=train_datasets, epochs=3, steps_per_epoch=5, verbose=0)
    return tf.distribute.get_strategy().num_replicas_in_sync, history.history["loss"]


@pytest.mark.extended("library", "HorovodRunner in test_horovod.py, and test_torch_distributor_with_a_script")
def test_mirrored_strategy_runner(tasks, monkeypatch):
    """A function without a strategy trains on all ranks in sync. Ranks get the notebook's environment variables."""
    for name, value in LEGACY.items():
        monkeypatch.setenv(name, value)
    replicas, losses = MirroredStrategyRunner(num_slots=2, use_gpu=False).run(train)
    assert replicas == 2
    assert len(losses) == 3
    first, second = sparkring.last_result.values
    assert first == second


def makes_its_own(n):
    import tensorflow as tf

    return n, tf.distribute.has_strategy()


@pytest.mark.extended("library", "test_mirrored_strategy_runner")
def test_mirrored_strategy_runner_with_a_strategy_of_the_functions_own(local, monkeypatch):
    """A function that makes its own strategy is called without one. A machine without GPUs runs it, with a notice."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    runner = MirroredStrategyRunner(num_slots=1, local_mode=True, use_custom_strategy=True)
    assert runner.run(makes_its_own, n=3) == (3, False)
    assert "has no GPUs" in sparkring.last_result.record.notices[0].text
    with pytest.raises(OptionsError, match=r"missing .*required argument: 'n'"):
        runner.run(makes_its_own)
    with pytest.raises(OptionsError, match="takes a function"):
        runner.run("train.py")
    with pytest.raises(OptionsError, match="num_slots must be"):
        MirroredStrategyRunner(num_slots=0)
    with pytest.raises(OptionsError, match=r"only name .* 'gpu'"):
        MirroredStrategyRunner(num_slots=1, gpu_resource_name="fpga")
