"""Keras 3 in a ring: Horovod's functions, which were written for Keras 2, average as they do with Keras 2."""

from __future__ import annotations

from versions import keras_3

FIT = """
import keras
import numpy as np
import horovod.tensorflow.keras as hvd

hvd.init()
keras.utils.set_random_seed(rank)
random = np.random.default_rng(rank)
x = random.random((64, 3)).astype("float32")
y = x @ np.array([[1.0], [2.0], [3.0]], "float32")

def fitted(optimizer, *callbacks):
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer, "mse")
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=list(callbacks))
    return model, history.history

hvd.broadcast_weights = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model, history = fitted(
    hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)),
    hvd.broadcast_weights,
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.05, warmup_epochs=1),
)
path = os.path.join(folder, f"{rank}.keras")
model.save(path)
plain = keras.models.load_model(path)
loaded = hvd.load_model(path)
kept = [bool(np.array_equal(a, b)) for a, b in zip(loaded.optimizer.variables, model.optimizer.variables)]
loaded.fit(x, y, verbose=0)

# One step of plain gradient descent, against the mean of both ranks' gradients.
line = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
line.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
line.fit(x, y, batch_size=64, verbose=0)
gradient = 2 * (x.T @ (x @ np.ones((3, 1)) - y)) / 64

refused = []
for options in ({"backward_passes_per_step": 2}, {}):
    try:
        hvd.DistributedOptimizer(model.optimizer if not options else keras.optimizers.SGD(), **options)
    except Exception as error:
        refused.append(f"{type(error).__name__}: {error}")
local = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
local.compile(keras.optimizers.SGD(0.1), "mse")
local.fit(x, y, verbose=0)
def numbers(model):
    return [w.tolist() for w in model.get_weights()]
[numbers(model), numbers(loaded), numbers(local), history["loss"], kept, type(plain.optimizer).__name__,
 type(plain.optimizer).__module__, line.get_weights()[0].ravel().tolist(), gradient.ravel().tolist(), refused,
 float(model.optimizer.learning_rate)]
"""


@keras_3
def test_horovods_optimizer_averages_the_gradients_of_keras_3(local, tmp_path):
    """Ranks end with equal weights, those of the mean gradient; callbacks and load_model() work as well."""
    import os

    first, second = local.run(FIT, framework="horovod", namespace={"os": os, "folder": str(tmp_path)}).values
    assert first[0] == second[0]
    assert first[1] == second[1] != first[0]
    assert first[2] != second[2]  # without Horovod
    assert first[3] == second[3]
    assert all(first[4] + second[4])
    assert first[5:7] == ["Adam", "keras.src.optimizers.adam"]
    means = [(a + b) / 2 for a, b in zip(first[8], second[8], strict=True)]
    assert all(abs(w - (1 - 0.1 * mean)) < 1e-4 for w, mean in zip(first[7], means, strict=True))
    assert first[7] == second[7]
    passes, again = first[9]
    assert "gradient_accumulation_steps=2" in passes
    assert "wrap it once" in again
    assert abs(first[10] - 0.05) < 1e-6
