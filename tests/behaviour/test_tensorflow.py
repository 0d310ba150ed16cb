"""TensorFlow's own multi-worker strategy on every launcher."""

from __future__ import annotations

FIT = """
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).random((64, 4)).astype("float32")
model.fit(x, x.sum(1), batch_size=16, epochs=2, verbose=0)
[strategy.num_replicas_in_sync, strategy.cluster_resolver.task_id, [w.tolist() for w in model.get_weights()]]
"""


def test_multi_worker_mirrored_strategy(ring):
    """Each rank is a worker of one cluster, the replicas are in sync, and the weights equal."""
    first, second = ring.run(FIT, framework="tensorflow").values
    assert (first[0], second[0]) == (2, 2)
    assert (first[1], second[1]) == (0, 1)
    assert first[2] == second[2]
