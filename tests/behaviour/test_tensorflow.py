"""TensorFlow's own multi-worker strategy on every launcher."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkring import shards

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


def test_multi_worker_mirrored_strategy(ring, notebook_cell):
    """Each rank is a worker of one cluster, the replicas are in sync, and the weights equal.

    Functions of the notebook and of the cell become graphs, their branches too.
    """
    namespace = notebook_cell("def magnitude(x):\n    if x < 0:\n        x = -x\n    return x")
    first, second = ring.run(FIT, framework="tensorflow", namespace=namespace).values
    assert (first[0], second[0]) == (2, 2)
    assert (first[1], second[1]) == (0, 1)
    assert first[2] == second[2]
    assert first[3] == second[3] == [1, 0, 1, 2, 8, 4]


SHARDS = """
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    model.compile("sgd", "mse")
model.fit(data.as_tf("x", "y"), epochs=2, verbose=0)
data.epoch
"""


def test_a_shard_is_read_to_its_end(local, tmp_path):
    """TensorFlow takes each batch apart, a part for each rank, and a fit goes on until all parts have had a step."""
    rows = pa.table({"x": np.arange(320, dtype="f4"), "y": np.zeros(320, "f4")})
    pq.write_table(rows, tmp_path / "data.parquet", row_group_size=100)
    result = local.run(SHARDS, framework="tensorflow", namespace={"data": shards(tmp_path / "data.parquet", 32)})
    assert result.values == [3, 3]
    for rank in result.record.ranks:
        assert [epoch.rows for epoch in rank.readings[0].ended] == [160, 160]
