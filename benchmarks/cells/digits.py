"""A small convolutional net on scikit-learn's digits, for a given time; rank 0 prints images per second."""

import os
import time

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

COPIES, BATCH = 8, 64

hvd.init()
# The same for every launcher: one compute thread per rank.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.keras.utils.set_random_seed(1)

digits = load_digits()
x = np.tile((digits.images / 16).astype("float32")[..., None], (COPIES, 1, 1, 1))[hvd.rank() :: hvd.size()]
y = np.tile(digits.target, COPIES)[hvd.rank() :: hvd.size()]
steps = COPIES * len(digits.target) // hvd.size() // BATCH

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(32, 3, activation="relu", padding="same", input_shape=(8, 8, 1)),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Conv2D(64, 3, activation="relu", padding="same"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001))
model.compile(optimizer, "sparse_categorical_crossentropy", ["accuracy"])


class UntilTimeIsUp(tf.keras.callbacks.Callback):
    """Ends the training after BENCHMARK_SECONDS, on all ranks after the same epoch."""

    def on_epoch_end(self, epoch, logs=None):
        now = time.perf_counter()
        if epoch == 0:  # the first one builds the graph
            self.begun, self.epochs = now, 0
            return
        self.epochs += 1
        self.seconds = now - self.begun
        longest = hvd.allreduce(np.float32(self.seconds), average=True)
        self.model.stop_training = float(longest) > float(os.environ["BENCHMARK_SECONDS"])


clock = UntilTimeIsUp()
model.fit(
    tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(BATCH, drop_remainder=True).take(steps),
    epochs=100_000,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), clock],
)
if hvd.rank() == 0:
    print("images/s", clock.epochs * steps * BATCH * hvd.size() / clock.seconds)
