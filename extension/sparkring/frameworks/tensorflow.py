"""Sets the environment variable TF_CONFIG, which lists the workers for TensorFlow's MultiWorkerMirroredStrategy.

The format of TF_CONFIG is documented under tf.distribute.cluster_resolver.TFConfigClusterResolver.
"""

from __future__ import annotations

import json
from typing import ClassVar

from sparkring.frameworks.base import Endpoint, Framework, Lesson, Start
from sparkring.runtime.world import World


class TensorFlow(Framework):
    """Ranks that are workers of one cluster, each with its own server on the port of its endpoint."""

    lesson = Lesson(
        "tensorflow",
        "the workers of a TensorFlow cluster; TF_CONFIG is set on each rank",
        """
        import tensorflow as tf
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model, optimizer = make_model(), tf.keras.optimizers.SGD(0.1)
        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, batch)
        """,
        "make_model, x, y",
    )
    makes_ring: ClassVar = {
        "keras": "make and compile the model in `with tf.distribute.MultiWorkerMirroredStrategy().scope():`"
    }

    def __init__(self, endpoints: list[Endpoint]) -> None:
        super().__init__(endpoints)
        # The ports in `endpoints` change, but the ports in TF_CONFIG must not. A rank's process has one TensorFlow
        # server as long as the gang exists, and the strategies of later cells use this server again.
        self._workers = [endpoint.host_and_port for endpoint in endpoints]

    def environment(self, world: World, start: Start) -> dict[str, str]:
        task = {"type": "worker", "index": world.rank}
        return {"TF_CONFIG": json.dumps({"cluster": {"worker": self._workers}, "task": task})}
