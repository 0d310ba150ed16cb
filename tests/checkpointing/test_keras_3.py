"""Keras 3's objects continue with bit-equal numbers after a restore, and fit()'s own checkpoints are reported."""

import os
import sys
from importlib import metadata

import numpy as np
import pytest
from fake_launcher import received
from versions import keras_3

from sparkring import checkpoints, shards
from sparkring.checkpointing import keras_3_state
from sparkring.errors import CheckpointError
from sparkring.runtime import report
from sparkring.wire.messages import CheckpointRemoved, CheckpointSaved
from sparkring.worker import keras_hooks

pytestmark = keras_3

X = np.random.default_rng(0).random((64, 3)).astype("float32")
Y = X.sum(1)


@pytest.fixture(scope="module")
def keras():
    """The module keras. It is imported once, because TensorFlow opens files and never closes them."""
    import keras

    keras.ops.ones(1)
    return keras


def make(keras, optimizer=None, seed=7):
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def fit(model, epochs=1, **options):
    model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, **options)


def numbers(owner):
    return [variable.numpy().tobytes() for variable in owner.variables]


@pytest.mark.parametrize("scaled", [False, True], ids=["adam", "loss scale"])
def test_a_restored_model_goes_on_with_the_same_numbers(keras, tmp_path, scaled):
    """Weights, averages, the optimizer with its learning rate, and dropout's random numbers are restored."""

    def optimizer():
        inner = keras.optimizers.Adam(0.05)
        return keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2) if scaled else inner

    whole = make(keras, optimizer())
    fit(whole)
    whole.optimizer.learning_rate = 0.02
    store = checkpoints(tmp_path)
    store.save(4, {"model": whole, "layer": whole.layers[0], "number": keras.Variable(2.5, dtype="bfloat16")})
    store.wait()
    fit(whole, 2)

    resumed = make(keras, optimizer(), seed=1)
    number = keras.Variable(0.0, dtype="bfloat16")
    layer = keras.layers.Dense(4)
    layer.build((None, 3))
    assert checkpoints(tmp_path).restore({"model": resumed, "layer": layer, "number": number}) == 4
    assert float(resumed.optimizer.learning_rate) == np.float32(0.02)
    assert float(number) == 2.5
    assert numbers(layer) == numbers(resumed.layers[0])
    fit(resumed, 2)
    assert numbers(resumed) == numbers(whole)
    assert numbers(resumed.optimizer) == numbers(whole.optimizer)


def test_an_optimizer_on_its_own_and_arrays_without_objects(keras, tmp_path):
    """An optimizer can be saved without its model. A saved model's arrays can be read by name."""
    model = make(keras)
    fit(model)
    store = checkpoints(tmp_path)
    store.save(1, {"optimizer": model.optimizer})
    store.wait()
    other = make(keras)
    other.optimizer.build(other.trainable_variables)
    store.restore({"optimizer": other.optimizer})
    assert numbers(other.optimizer) == numbers(model.optimizer)
    tree = keras_3_state.take_layer(model, "model")
    kernels = [array for name, array in keras_3_state.VARIABLES.by_name(tree).items() if name.endswith("dense/kernel")]
    assert np.array_equal(kernels[0], model.layers[0].kernel)


def test_a_model_is_rebuilt_from_a_checkpoint_alone(keras, tmp_path):
    """load() returns a compiled model with its optimizer's state. For an unknown class, it warns and returns arrays."""

    class Twice(keras.layers.Layer):
        def call(self, x):
            return x * 2

    model = make(keras)
    fit(model)
    at = keras.Input((3,))
    unknown = keras.Model(at, Twice()(keras.layers.Dense(1)(at)))
    older = {**keras_3_state.take_layer(model, "model")}
    store = checkpoints(tmp_path)
    store.save(1, {"model": model, "unknown": unknown})
    store.wait()
    with pytest.warns(UserWarning, match=r"uses `Twice`, .*Keras .*not know here"):
        found = checkpoints(tmp_path).load()
    assert [array.tolist() for array in found["unknown"].values()] == [w.tolist() for w in unknown.get_weights()]
    made = found["model"]
    assert numbers(made) == numbers(model)
    assert numbers(made.optimizer) == numbers(model.optimizer)
    assert made.loss == "mse"
    fit(model)
    fit(made)
    assert numbers(made) == numbers(model)
    del older["architecture"]  # as version 0.1 saved it
    assert isinstance(keras_3_state.plain_layer(older), dict)


def test_what_does_not_fit_is_said(keras, tmp_path):
    model = make(keras)
    fit(model)
    tree = keras_3_state.take_layer(model, "model")
    fewer = make(keras, keras.optimizers.SGD())
    with pytest.raises(CheckpointError, match=r"model: .*checkpoint .* \d+ arrays .*optimizer"):
        keras_3_state.put_layer(fewer, tree, "model")
    other = make(keras)
    before = numbers(other)
    tree["values"][0] = np.ones((5, 4), "f4")
    with pytest.raises(CheckpointError, match=r"has the shape \[3, 4\] .*dtype float32, .*checkpoint"):
        keras_3_state.put_layer(other, tree, "model")
    assert numbers(other) == before
    with pytest.raises(CheckpointError, match=r"model .*not built yet"):
        keras_3_state.take_layer(keras.Sequential([keras.layers.Dense(1)]), "model")


def test_seeds_of_other_ranks_stay_their_own(keras):
    """A rank that restores rank 1's state keeps its own seeds, but restores how many numbers were drawn."""
    model, other = make(keras, seed=1), make(keras, seed=2)
    fit(model)
    tree = {**keras_3_state.take_layer(model, "model"), "rank": 1}
    own = [seed.numpy() for seed in keras_3_state._seeds(other)]
    keras_3_state.put_layer(other, tree, "model")
    for before, after, theirs in zip(own, keras_3_state._seeds(other), keras_3_state._seeds(model), strict=True):
        assert after.numpy().tolist() == [before[0], theirs.numpy()[1]]


def resumed_fit(keras, folder, data, seed, *, stop=0, every=7, callbacks=(), **options):
    """Run fit() with store.keras(). It ends with a KeyError after `stop` batches, unless `stop` is 0."""
    model, taken, store = make(keras, seed=seed), [], checkpoints(folder)
    resume = store.keras(model, data=data, every=every)

    def count(batch, logs):
        taken.append(batch)
        if len(taken) == stop:
            store.wait()
            raise KeyError

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=count)
    model.fit(data.as_tf("x", "y"), epochs=4, verbose=0, callbacks=[*callbacks, resume, watch], **options)
    return model, resume, taken


def numbered_shards(path):
    return shards(path, 16, columns={"x": ["x", "y", "x"], "y": "y"}, seed=3, dtype="float32")


@pytest.mark.parametrize(("every", "torn"), [(7, 35), ("epoch", 30)])
def test_a_fit_that_was_torn_goes_on_with_the_same_numbers(keras, numbered, tmp_path, every, torn):
    """fit() continues within the epoch, and the weights and losses equal those of an uninterrupted training."""
    whole, history, _ = resumed_fit(keras, tmp_path / "whole", numbered_shards(numbered), 7, every=every)
    with pytest.raises(KeyError):
        resumed_fit(keras, tmp_path / "torn", numbered_shards(numbered), 7, every=every, stop=torn)
    data = numbered_shards(numbered)
    again, resume, taken = resumed_fit(keras, tmp_path / "torn", data, 1, every=every)
    assert resume.initial_epoch == 1
    assert [*map(len, (resume.history["loss"], taken))] == [4, 80 - (35 if every == 7 else 20)]
    assert taken[:21] == ([*range(5), *range(16)] if every == 7 else [*range(20), 0])
    assert resume.history["loss"][2:] == history.history["loss"][2:]
    assert data.epoch == 5
    assert numbers(again) == numbers(whole)
    assert numbers(again.optimizer) == numbers(whole.optimizer)
    assert again._initial_epoch is None  # an attribute of Keras 3.15, which fit() and BackupAndRestore use


def test_an_end_that_another_callback_wants_and_data_of_unknown_length(keras, numbered, tmp_path):
    with pytest.raises(KeyError):
        resumed_fit(keras, tmp_path, numbered_shards(numbered), 7, stop=35)
    data = numbered_shards(numbered)
    end = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(end.model, "stop_training", True))
    assert resumed_fit(keras, tmp_path, data, 1, callbacks=[end])[2] == [*range(5)]
    model, data = make(keras), numbered_shards(numbered)
    data = data.resume(data.position(step=15))
    resume = checkpoints(tmp_path / "other").keras(model, data=data)
    with pytest.raises(CheckpointError, match=r"Keras .*batches .*epoch"):
        model.fit(data.as_tf("x", "y").map(lambda x, y: (x, y)), callbacks=[resume])


def test_epochs_after_the_rest_of_one_are_whole(keras, numbered):
    """Later epochs are whole without the callback, too. Keras 3 alone would expect them to be as short as the rest."""
    data, taken = numbered_shards(numbered), []
    data = data.resume(data.position(step=15))
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: taken.append(batch))
    make(keras).fit(data.as_tf("x", "y"), epochs=3, verbose=0, callbacks=[watch])
    assert taken == [*range(5), *range(20), *range(20)]
    assert data.epoch == 4


def test_what_keras_writes_is_told(keras, tmp_path, monkeypatch):
    """The files of ModelCheckpoint and BackupAndRestore are reported. Keras 3.15 has the attributes patched here."""
    from keras.src import callbacks

    found = []
    monkeypatch.setattr(report, "_tell", lambda message: found.append(received(message)))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for kind, name in (
        (keras.Model, "fit"),
        (callbacks.ModelCheckpoint, "_save_model"),
        (callbacks.ModelCheckpoint, "_should_save_model"),
        (callbacks.BackupAndRestore, "_save_model"),
        (callbacks.BackupAndRestore, "on_train_end"),
    ):
        assert hasattr(kind, name), metadata.version("keras")
        monkeypatch.setattr(kind, name, getattr(kind, name))
    keras_hooks.report_fits(True)
    best = keras.callbacks.ModelCheckpoint(
        str(tmp_path / "best.keras"), monitor="loss", mode="max", save_best_only=True, initial_value_threshold=1e9
    )
    each = keras.callbacks.ModelCheckpoint(str(tmp_path / "of-{epoch}.weights.h5"), save_weights_only=True)
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    fit(make(keras), 2, callbacks=[each, best, backup])

    told = [message for message in found if isinstance(message, CheckpointSaved)]
    assert [(one.kind, one.name, one.step) for one in told] == [
        ("keras", "of-1.weights.h5", 1),
        ("tensorflow", "latest.weights.h5", 1),
        ("keras", "of-2.weights.h5", 2),
        ("tensorflow", "latest.weights.h5", 2),
    ]
    assert told[0].size_bytes == os.path.getsize(tmp_path / "of-1.weights.h5")
    assert set(told[0].metrics) == {"loss", "mae"}
    assert told[0].took_s > 0
    assert all(one.size_bytes > 0 for one in told)
    removed = [message for message in found if isinstance(message, CheckpointRemoved)]
    assert [one.name for one in removed] == ["latest.weights.h5"] * 2
