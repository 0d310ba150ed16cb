"""Keras 3 in a ring: Horovod's functions, which were written for Keras 2, average as they do with Keras 2."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from versions import keras_3

from sparkring.compat.legacy_keras import VARIABLE, is_used
from sparkring.engine.run.options import Options
from sparkring.engine.run.prepare import prepare
from sparkring.engine.run.spec import Call, RunSpec

pytestmark = pytest.mark.versions("of Keras and TensorFlow")

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
    """Ranks end with equal weights, as if trained on the mean gradient. Callbacks and load_model() work, too."""
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
    assert "already a DistributedOptimizer" in again
    assert abs(first[10] - 0.05) < 1e-6


TF_KERAS = """
import os
import numpy as np
import tensorflow as tf
import tf_keras
import horovod.tensorflow.keras as hvd
import sparkring

hvd.init()
tf_keras.utils.set_random_seed(rank)
random = np.random.default_rng(rank)
x = random.random((64, 3)).astype("float32")
y = x @ np.array([[1.0], [2.0], [3.0]], "float32")
model = tf_keras.Sequential([tf_keras.Input((3,)), tf_keras.layers.Dense(4), tf_keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.Adam(0.05)), "mse")
store = sparkring.checkpoints(folder)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.05, warmup_epochs=1),
    store.keras(model),
]
history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
hvd.allreduce(0.0)  # rank 0 has then written its checkpoints
kept = store.load()["model"]
compiled = kept.optimizer is not None and kept.loss
equal = all(np.array_equal(a, b) for a, b in zip(kept.get_weights(), model.get_weights()))
[[w.tolist() for w in model.get_weights()], history.history["loss"], compiled, equal,
 issubclass(tf.keras.Model, tf_keras.Model), "TF_USE_LEGACY_KERAS" in os.environ]
"""


@keras_3
def test_horovod_with_tf_keras(local, tmp_path):
    """If a cell imports tf_keras, tf.keras is tf_keras on its ranks, so Horovod's callbacks work with its models."""
    pytest.importorskip("tf_keras")
    result = local.run(TF_KERAS, framework="horovod", namespace={"folder": str(tmp_path)})
    first, second = result.values
    assert first[:2] == second[:2]
    assert first[2:] == ["mse", True, True, True]
    assert any("tf_keras" in notice.text for notice in result.record.notices)


def test_ranks_get_the_keras_that_the_cell_uses():
    """Checks when ranks use tf_keras. They must not if the cell's values are from Keras 3."""
    assert is_used("import tf_keras as keras", ())
    assert is_used("    from tf_keras.layers import Dense", ())
    assert is_used("model.fit(x)", {"tf_keras", "numpy"})
    assert not is_used("import tf_keras", {"keras"})
    assert not is_used("import keras  # not tf_keras", {"tensorflow"})


def imports_it():
    import tf_keras

    return tf_keras


def calls_what_imports_it():
    return imports_it()


class Trainer:
    def __call__(self):
        import tf_keras

        return tf_keras


def test_functions_whose_ranks_get_tf_keras(monkeypatch):
    """Only the function's own source counts, not the functions that it calls. A setting of the notebook is kept."""

    def is_legacy(function, framework="horovod"):
        prepared = prepare(RunSpec(Call(function, (), {}), Options(np=-2), framework))
        return prepared.request.run.environment.get(VARIABLE) == "1"

    monkeypatch.delenv(VARIABLE, raising=False)
    assert is_legacy(imports_it)
    assert not is_legacy(imports_it, "tensorflow")
    assert not is_legacy(calls_what_imports_it)
    assert not is_legacy(Trainer())
    monkeypatch.setenv(VARIABLE, "0")
    assert not is_legacy(imports_it)


GOES_ON = """
import os, signal
import keras
import numpy as np
from sparkring import checkpoints

keras.config.disable_interactive_logging()
x = np.random.default_rng(0).random((64, 3)).astype("float32")

def fitted(model=None, epochs=1):
    "Train a model, or a new one, further, as if both were in one process."
    if model is None:
        keras.utils.clear_session()
        keras.utils.set_random_seed(7)
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
    model.fit(x, x.sum(1), batch_size=16, epochs=epochs, shuffle=False, verbose=0, callbacks=[
        keras.callbacks.ModelCheckpoint(os.path.join(folder, "last.weights.h5"), save_weights_only=True)
    ])
    return model

def numbers(*owners):
    return [np.asarray(keras.ops.convert_to_numpy(each)).tobytes() for owner in owners for each in owner.variables]

store = checkpoints()
if store.latest() is None:
    store.save(4, {"model": fitted()})
    store.wait()
    os.kill(os.getpid(), signal.SIGKILL)
model = fitted(epochs=0)
step = store.restore({"model": model})
fitted(model)
whole = fitted(fitted())
data = numbers(model, model.optimizer)
[keras.backend.backend(), step, data == numbers(whole, whole.optimizer), len(data),
 store.load()["model"].__class__.__name__]
"""


@keras_3
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_other_backends_of_keras(local, tmp_path, backend):
    """A rank that was killed continues from its checkpoint with the same numbers; fit() reports its metrics."""
    result = local.run(
        GOES_ON,
        1,
        namespace={"folder": str(tmp_path)},
        env=(("KERAS_BACKEND", backend),),
        checkpoint_dir=str(tmp_path / "run"),
        max_restarts=1,
    )
    assert result.values == [[backend, 4, True, 23, "Sequential"]]
    assert [each.failure.summary for each in result.record.attempts if each.failure] == ["killed by SIGKILL"]
    assert {m.epoch for m in result.record.metrics if m.ends_epoch and "loss" in m.values} == {1}
    assert (str(tmp_path), "last.weights.h5") in [each.place for each in result.record.checkpoints]


@keras_3
def test_the_loops_in_the_docs(local, notebook_cell):
    """Ranks that run the training loops of docs/versions.md, on TensorFlow and on PyTorch, end with equal weights."""
    page = (Path(__file__).parents[2] / "docs" / "versions.md").read_text(encoding="utf-8")
    namespace = notebook_cell("""
        import numpy as np
        x = np.random.default_rng(0).random((64, 3)).astype("float32")
        y = x.sum(1, keepdims=True)
        def make_model():
            import keras
            return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    """)
    loops = re.findall(r"(?s)```python\n%%horovod -n -2(?: --env (\w+)=(\w+))?\n(.*?)```", page)
    assert [value for _, value, _ in loops] == ["", "torch"]
    for name, value, cell in loops:
        env = ((name, value),) if name else ()
        # Without Horovod, the weights would differ: each rank starts with other random weights, and reads other rows.
        first, second = local.run(cell, framework="horovod", namespace=namespace, env=env).values
        assert all(map(np.array_equal, first, second))
        assert len(first) == 4
