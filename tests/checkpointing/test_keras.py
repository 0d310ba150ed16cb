"""TensorFlow's and Keras' objects in a state, and the callback: a resumed training ends as if never interrupted."""

import copy
import itertools
import json
import sys

import numpy as np
import pytest
from fake_launcher import received
from versions import keras_2

from sparkring import shards
from sparkring.checkpointing import keras as resuming
from sparkring.checkpointing import parts, tensorflow_state, tree
from sparkring.errors import CheckpointError, NotFiniteError, OptionsError
from sparkring.runtime import going, report
from sparkring.wire.messages import CheckpointRemoved, CheckpointSaved
from sparkring.worker import keras_hooks

pytestmark = keras_2

STEPS = 20


@pytest.fixture(autouse=True, scope="module")
def frameworks():
    """Use TensorFlow and Horovod before the tests. On first use, they open files that they never close.

    They are imported here, because every worker of pytest-xdist imports this module, but only one runs the tests.
    """
    global tf
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    hvd.init()
    tf.constant(1) + 1
    hvd.shutdown()


@pytest.fixture(autouse=True)
def clean():
    """Give every test the state of a new process."""
    begin_anew(7)


def begin_anew(seed):
    """Number layers from the start again, and set other random states."""
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(seed)


class Memory:
    """A store that keeps each save as JSON and copied arrays."""

    def __init__(self):
        self.saved = []

    def save(self, step, state, metrics):
        skeleton, leaves = tree.flatten(parts.tree_of({"state": state, "random": parts.random_states()}))
        self.saved.append((step, json.dumps(skeleton), copy.deepcopy(leaves), metrics))

    def restore(self, state):
        if not self.saved:
            return 0
        step, skeleton, leaves, _ = self.saved[-1]
        found = tree.rebuild(json.loads(skeleton), copy.deepcopy(leaves))
        parts.put_back(state, found["state"])
        parts.set_random_states(found["random"])
        return step

    def wait(self):
        pass


class Stop(Exception):
    """Interrupts the training."""


def stop_after(batches):
    """Return a callback that raises Stop after this many batches."""
    left = iter(range(batches - 1, -1, -1))

    def count(batch, logs):
        if not next(left):
            raise Stop

    return tf.keras.callbacks.LambdaCallback(on_train_batch_end=count)


def numbered_shards(path, **more):
    return shards(path, 16, columns={"x": ["x", "y"], "y": "y"}, seed=3, **more)


def make(optimizer=None, dropout=0.5):
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Rescaling(1 / 320, input_shape=(2,)),
            tf.keras.layers.Dense(16, "relu"),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Dropout(dropout),
            tf.keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer or tf.keras.optimizers.Adam(0.01), "mse", ["mae"])
    return model


def watched(data, seen):
    """Return data.as_tf(). The rows that are taken from it are added to `seen`."""

    def note(x):
        seen.append(x[:, 0].astype(int).tolist())
        return np.int32(0)

    def tell(x, y):
        told = tf.numpy_function(note, [x], tf.int32, stateful=True)
        with tf.control_dependencies([told]):
            return tf.identity(x), y

    # This is the last step of the pipeline, so only rows that training really gets are noted.
    return data.as_tf("x", "y").map(tell)


def all_variables(model):
    return [v.numpy() for v in (*model.weights, *model.optimizer.variables(), model.optimizer.learning_rate)]


def equal(these, those):
    return all(np.array_equal(a, b) for a, b in zip(these, those, strict=True))


@pytest.fixture(scope="module")
def untorn(numbered):
    """Train four epochs without an interruption. Return the variables, the rows of each batch, and the history."""
    begin_anew(7)
    seen = []
    data, model = numbered_shards(numbered), make()
    resume = resuming.resume(Memory(), model, data=data)
    model.fit(watched(data, seen), epochs=4, callbacks=[resume], verbose=0)
    assert len(seen) == 4 * STEPS
    assert data.epoch == 5
    return all_variables(model), seen, resume.history


@pytest.mark.parametrize(
    ("every", "torn", "kept"),
    [
        (7, 35, 35),
        pytest.param("epoch", 30, 20, marks=pytest.mark.extended("repetition", "every=7; tests below save by epoch")),
    ],
)
def test_a_training_that_goes_on_is_bit_equal(numbered, untorn, every, torn, kept):
    """Weights, Adam's moments, dropout and the order of the data are as if training had not been interrupted."""
    want, want_seen, want_history = untorn
    store, first = Memory(), []
    data, model = numbered_shards(numbered), make()
    resume = resuming.resume(store, model, data=data, every=every)
    assert resume.initial_epoch == 0
    with pytest.raises(Stop):
        model.fit(watched(data, first), epochs=4, callbacks=[resume, stop_after(torn)], verbose=0)
    assert store.saved[-1][0] == kept

    begin_anew(8)
    then, numbers = [], []
    data, model = numbered_shards(numbered), make()
    assert not equal(all_variables(model), want)
    resume = resuming.resume(store, model, data=data, every=every)
    assert resume.initial_epoch == kept // STEPS
    note = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: numbers.append(batch))
    model.fit(watched(data, then), epochs=4, initial_epoch=resume.initial_epoch, callbacks=[note, resume], verbose=0)
    assert equal(all_variables(model), want)
    assert first[:kept] + then == want_seen
    assert numbers == [number % STEPS for number in range(kept, 4 * STEPS)]
    assert store.saved[-1][0] == (4 * STEPS if every == "epoch" else 4 * STEPS // every * every)
    whole = [epoch for epoch in range(4) if epoch != kept // STEPS or kept % STEPS == 0]
    assert set(resume.history) == {"loss", "mae"}
    for name, values in resume.history.items():
        assert len(values) == 4
        assert [values[epoch] for epoch in whole] == [want_history[name][epoch] for epoch in whole]


def fit(model, data, *callbacks, **more):
    return model.fit(data.as_tf("x", "y"), verbose=0, callbacks=list(callbacks), **more)


@pytest.mark.parametrize("at", [5, 20])
def test_a_host_is_going(numbered, monkeypatch, at):
    """fit() saves after the batch, within an epoch and at its end, and goes on from there."""
    store, points = Memory(), itertools.count(1)
    monkeypatch.setattr(going, "point", lambda: next(points) == at)
    data, model = numbered_shards(numbered), make()
    with pytest.raises(Stop):
        fit(model, data, resuming.resume(store, model, data=data), stop_after(at), epochs=3)
    assert [step for step, *_ in store.saved] == [at]
    data, model = numbered_shards(numbered), make()
    resume = resuming.resume(store, model, data=data)
    assert (resume.initial_epoch, len(resume.history.get("loss", ()))) == (at // 20, at // 20)
    fit(model, data, resume, epochs=3)
    assert store.saved[-1][0] == 60
    assert len(resume.history["loss"]) == 3


def test_the_rest_of_an_epoch_on_more_ranks(numbered):
    """The rest of the epoch is divided among all ranks. Later epochs are whole, and the step numbers continue."""
    store = Memory()
    data, model = numbered_shards(numbered), make()
    with pytest.raises(Stop):
        fit(model, data, resuming.resume(store, model, data=data, every=4), stop_after(28), epochs=3)
    assert store.saved[-1][0] == 28
    ranks = []
    for rank in range(2):
        data, model, numbers = numbered_shards(numbered, rank=rank, size=2), make(), []
        resume = resuming.resume(store, model, data=data, every="epoch")
        note = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, to=numbers: to.append(batch))
        fit(model, data, resume, note, epochs=3)  # without initial_epoch, fit() begins at the right epoch, too
        assert numbers == [4, 5, 6, 7, 8, 9, *range(10)]
        assert data.epoch == 4
        ranks.append(store.saved.pop()[0])
        store.saved.pop()
    assert ranks == [28 + 6 + 10] * 2


def test_a_fit_that_is_stopped_in_an_epoch_and_goes_on_later(numbered):
    """The checkpoint has the position in the epoch. Another fit() in the same process starts the epoch over."""
    store = Memory()
    data, model = numbered_shards(numbered), make()
    resume = resuming.resume(store, model, data=data)
    halt = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", batch == 11)
    )
    fit(model, data, resume, halt, epochs=2)
    state = {"model": make(), "data": numbered_shards(numbered), "epoch": 0, "batch": 0, "history": {}}
    assert store.restore(state) == 12
    assert (state["epoch"], state["batch"], state["data"].steps, state["history"]) == (0, 12, 8, {})
    fit(model, data, resume, epochs=1)
    assert data.epoch == 2
    assert store.saved[-1][0] == 12 + STEPS
    again, data = make(), numbered_shards(numbered)
    assert resuming.resume(store, again, data=data).initial_epoch == 1
    assert data.start == (2, 3, ())


def test_a_training_that_has_two_parts(numbered):
    """If the first part is complete, its fit() trains nothing, and the second one begins within its epoch."""
    store, numbers = Memory(), []
    data, model = numbered_shards(numbered), make()
    resume = resuming.resume(store, model, data=data, every=7)
    fit(model, data, resume, epochs=1)
    with pytest.raises(Stop):
        fit(model, data, resume, stop_after(28 - STEPS), epochs=2, initial_epoch=1)
    data, model = numbered_shards(numbered), make()
    resume = resuming.resume(store, model, data=data, every=7)
    note = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: numbers.append(batch))
    for epochs in (1, 2):
        fit(model, data, resume, note, epochs=epochs, initial_epoch=resume.initial_epoch)
    assert numbers == list(range(28 - STEPS, STEPS))
    assert len(resume.history["loss"]) == 2


def test_without_data_and_with_validation():
    """The save after an epoch's last batch waits for the validation, and includes its metrics."""
    store, x = Memory(), np.ones((40, 2), "f4")
    model = make()
    resume = resuming.resume(store, model, every=5)
    model.fit(x, x[:, 0], batch_size=4, epochs=2, verbose=0, callbacks=[resume], validation_data=(x, x[:, 0]))
    assert [(step, sorted(metrics)) for step, _, _, metrics in store.saved] == [
        (5, ["loss", "mae"]),
        (10, ["loss", "mae", "val_loss", "val_mae"]),
        (15, ["loss", "mae"]),
        (20, ["loss", "mae", "val_loss", "val_mae"]),
    ]
    again = make()
    resume = resuming.resume(store, again, every="epoch")
    assert resume.initial_epoch == 2
    assert equal(all_variables(again), all_variables(model))
    again.fit(x, x[:, 0], batch_size=4, epochs=3, initial_epoch=2, verbose=0, callbacks=[resume])
    assert store.saved[-1][0] == 30


def test_a_data_set_whose_length_nobody_knows():
    """Checkpoints are saved even within the first epoch of a generator, whose length is not known yet."""
    store, x = Memory(), np.ones((4, 2), "f4")
    rows = tf.data.Dataset.from_generator(
        lambda: ((x, x[:, 0]) for _ in range(5)),
        output_signature=(tf.TensorSpec((4, 2)), tf.TensorSpec((4,))),
    )
    model = make()
    model.fit(rows, epochs=2, verbose=0, callbacks=[resuming.resume(store, model, every=2)])
    assert [step for step, *_ in store.saved] == [2, 4, 6, 8, 10]


def test_replicas_take_no_data(numbered, monkeypatch):
    """`data` is refused, since TensorFlow divides batches among replicas, and so their position is unknown."""
    monkeypatch.setattr(tensorflow_state, "replicas", lambda model: 2)
    with pytest.raises(CheckpointError, match=r"trains on 2 replicas.*leave data out"):
        resuming.resume(Memory(), make(), data=numbered_shards(numbered))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: resuming.resume(Memory(), make(), every=0), "every=0: expected"),
        (lambda: resuming.resume(Memory(), make(), every=True), "every=True: expected"),
        (lambda: resuming.resume(Memory(), tf.keras.Sequential([])), "no optimizer"),
        (lambda: resuming.resume(Memory(), 3), "for a Keras model, not a `int`"),
    ],
)
def test_what_cannot_be_resumed(wrong, message):
    """The error is raised before training starts."""
    with pytest.raises((CheckpointError, OptionsError), match=message):
        wrong()


# ── models, optimizers, variables ─────────────────────────────────────────────


def kept(state):
    """Return the state as it would be read back from a file."""
    skeleton, leaves = tree.flatten(parts.tree_of(state))
    return tree.rebuild(json.loads(json.dumps(skeleton)), copy.deepcopy(leaves))


def trained(model, steps=3):
    """Train a few steps in a loop, which is faster than fit()."""
    x = np.random.default_rng(0).random((8, 2)).astype("f4")
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
            if hasattr(model.optimizer, "get_scaled_loss"):
                loss = model.optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(list(zip(gradients, model.trainable_variables, strict=True)))
    return model


@pytest.fixture
def horovod():
    """A ring of one rank."""
    import horovod.tensorflow.keras as hvd

    hvd.init()
    yield
    hvd.shutdown()


def horovods(optimizer, **more):
    import horovod.tensorflow.keras as hvd

    return hvd.DistributedOptimizer(optimizer, **more)


OPTIMIZERS = {
    "adam": lambda: tf.keras.optimizers.Adam(0.01, amsgrad=True, use_ema=True),
    "sgd": lambda: tf.keras.optimizers.SGD(0.01, momentum=0.9),
    "schedule": lambda: tf.keras.optimizers.Adam(tf.keras.optimizers.schedules.CosineDecay(0.1, 100)),
    "legacy": lambda: tf.keras.optimizers.legacy.Adam(0.01),
    "loss scale": lambda: tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.Adam(0.01)),
    "horovod": lambda: horovods(tf.keras.optimizers.Adam(0.01)),
    "horovod legacy": lambda: horovods(tf.keras.optimizers.legacy.SGD(0.01, momentum=0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_all_kinds(horovod, name):
    """Variables, learning rate and loss scale are restored into a new model. load() returns a model with them."""
    model = trained(make(OPTIMIZERS[name](), 0.0))
    if name != "schedule":
        model.optimizer.learning_rate = 0.125
    if name == "loss scale":
        model.optimizer._loss_scale.current_loss_scale.assign(64.0)
    found = kept({"model": model})
    wanted = all_variables(model)
    again = make(OPTIMIZERS[name](), 0.0)
    parts.put_back({"model": again}, found)
    assert equal(all_variables(again), wanted)
    anew = parts.plain(found)["model"]
    assert equal(all_variables(anew), wanted)
    assert not type(anew.optimizer).__module__.startswith("horovod")
    assert type(anew.optimizer).__name__ == type(model.optimizer).__name__
    if name == "loss scale":
        assert float(again.optimizer.loss_scale) == float(anew.optimizer.loss_scale) == 64.0
    assert equal(all_variables(trained(again)), all_variables(trained(model)))


@pytest.mark.parametrize("name", ["adam", "legacy", "loss scale", "horovod"])
def test_a_model_that_was_saved_before_its_training(horovod, name):
    """Its optimizer has no variables for the weights yet. It is restored as new, even into a trained model."""
    model, new, used = (make(OPTIMIZERS[name](), 0.0) for _ in range(3))
    found = kept({"model": model})
    parts.put_back({"model": new}, found)
    parts.put_back({"model": trained(used)}, found)
    trained(model)
    assert int(model.optimizer.iterations) > 0
    for each in (new, used, parts.plain(found)["model"]):
        assert equal(all_variables(trained(each)), all_variables(model))


def test_what_horovod_has_added_up(horovod):
    """Gradients that were not yet applied are restored, even before Horovod has created its variables."""
    model = trained(make(horovods(tf.keras.optimizers.SGD(0.1), backward_passes_per_step=4), 0.0), 2)
    found = kept(model)
    trained(model, 2)
    again = make(horovods(tf.keras.optimizers.SGD(0.1), backward_passes_per_step=4), 0.0)
    parts.put_back(again, found)
    trained(again, 2)
    assert equal(all_variables(again), all_variables(model))


def test_what_is_taken_of_a_model_is_a_snapshot_without_a_copy():
    """After a variable's memory has been handed out, TensorFlow writes the variable's new values elsewhere."""
    model = make()
    taken = parts.tree_of(model)["values"]
    before = [value.copy() for value in taken]
    assert not any(value.flags.owndata for value in taken if value.size > 1)
    for variable in model.weights:
        variable.assign_add(tf.ones_like(variable))
    assert equal(taken, before)


def test_layers_that_were_frozen_since():
    """Freezing a layer changes the order of the weights, but each weight is restored to its own layer."""

    class Two(tf.keras.layers.Layer):
        def build(self, shape):
            self.a, self.b = tf.keras.layers.Dense(2, name="a"), tf.keras.layers.Dense(2, name="b")
            super().build(shape)

        def call(self, x):
            return self.b(self.a(x))

    def make():
        tf.keras.backend.clear_session()
        return tf.keras.Sequential([Two(input_shape=(2,))])

    model = make()
    found, wanted = kept(model), {weight.name: weight.numpy() for weight in model.weights}
    again = make()
    again.layers[0].a.trainable = False
    assert [weight.name for weight in again.weights] != [weight.name for weight in model.weights]
    parts.put_back(again, found)
    assert all(np.array_equal(weight, wanted[weight.name]) for weight in again.weights)


def test_a_model_that_is_not_built_yet():
    """restore() builds the model with the shapes of the saved model. A model must be built before it can be saved."""

    def make():
        return tf.keras.Sequential([tf.keras.layers.Dense(3), tf.keras.layers.Dense(1)])

    model, again = make(), make()
    with pytest.raises(CheckpointError, match=r"state\['m'\]: .*model .*not built yet.*call it once"):
        parts.tree_of({"m": model})
    model(np.ones((1, 2), "f4"))
    parts.put_back({"m": again}, kept({"m": model}))
    assert equal(again.weights, model.weights)


def test_models_that_do_not_fit():
    """The error gives the two numbers of arrays, or an array and its two shapes. The model is left unchanged."""
    found = kept({"model": make()})
    other = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
    with pytest.raises(CheckpointError, match=r"state\['model'\]: the checkpoint has 8 arrays .*model, .* 2\."):
        parts.put_back({"model": other}, found)
    wider = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,)), tf.keras.layers.Dense(3)])
    narrow = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,)), tf.keras.layers.Dense(4)])
    before = wider.get_weights()
    with pytest.raises(CheckpointError, match=r"state: `dense.*kernel:0` of the model .* \[1, 3\] .* \[1, 4\]"):
        parts.put_back(wider, kept(narrow))
    assert equal(wider.get_weights(), before)
    uncompiled = tf.keras.models.clone_model(make())
    with pytest.raises(CheckpointError, match=r"compiled.*--fresh"):
        parts.put_back(make(), kept(uncompiled))


def test_models_of_ones_own_and_code_in_checkpoints():
    """Weights of custom models are restored. load() returns arrays by name if it would otherwise run code."""

    class Own(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model, again = Own(), Own()
    model(np.ones((1, 3), "f4"))
    found = kept(model)
    parts.put_back(again, found)
    assert equal(again.weights, model.weights)
    assert set(parts.plain(found)) == {weight.name for weight in model.weights}

    code = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,)), tf.keras.layers.Lambda(lambda x: x * 2)])
    assert isinstance(parts.plain(kept(code)), dict)
    for module, name in (("os", "system"), ("builtins", "function"), ("keras.src.callbacks", "os.system")):
        bad = kept(tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))]))
        config = json.loads(bad["architecture"])
        config["config"]["layers"][-1]["config"]["activation"] = {
            "module": module,
            "class_name": name,
            "config": "eval",
            "registered_name": None,
        }
        assert isinstance(parts.plain({**bad, "architecture": json.dumps(config)}), dict)


def test_layers_modules_variables_tensors_and_optimizers_on_their_own():
    """All these kinds of objects can be saved and restored, as training loops without fit() need."""
    layer = tf.keras.layers.Dense(2)
    layer.build((None, 3))
    optimizer = tf.keras.optimizers.Adam(0.5)
    optimizer.build(layer.trainable_variables)
    metric = tf.keras.metrics.Mean()
    metric.update_state([1.0, 2.0])
    state = {
        "layer": layer,
        "optimizer": optimizer,
        "metric": metric,
        "step": tf.Variable(3, dtype=tf.int64),
        "half": tf.Variable([0.5, -1.0], dtype=tf.bfloat16),
        "tensor": tf.constant([["a", "b"]]),
        "draws": tf.random.Generator.from_seed(5),
    }
    found = kept(state)
    other = tf.keras.layers.Dense(2)
    other.build((None, 3))
    fresh = {
        "layer": other,
        "optimizer": tf.keras.optimizers.Adam(0.1),
        "metric": tf.keras.metrics.Mean(),
        "step": tf.Variable(0, dtype=tf.int64),
        "half": tf.Variable([0.0, 0.0], dtype=tf.bfloat16),
        "tensor": tf.constant(["x"]),
        "draws": tf.random.Generator.from_seed(6),
    }
    with pytest.raises(CheckpointError, match=r"state\['optimizer'\]: .* Call optimizer\.build"):
        parts.put_back(fresh, found)
    with pytest.raises(CheckpointError, match=r"Call optimizer\._create_all_weights\(variables\)"):
        parts.put_back(tf.keras.optimizers.legacy.Adam(0.1), found["optimizer"])
    fresh["optimizer"].build(other.trainable_variables)
    parts.put_back(fresh, found)
    assert equal(other.weights, layer.weights)
    assert float(fresh["optimizer"].learning_rate) == 0.5
    assert float(fresh["metric"].result()) == 1.5
    assert int(fresh["step"]) == 3
    assert fresh["half"].numpy().tolist() == [0.5, -1.0]
    assert fresh["tensor"].numpy().tolist() == [[b"a", b"b"]]
    assert equal(fresh["draws"].uniform([3]), state["draws"].uniform([3]))
    made = parts.plain(found)
    assert made["step"] == 3
    assert made["tensor"].numpy().tolist() == [[b"a", b"b"]]
    assert set(made["optimizer"]) == {variable.name for variable in optimizer.variables}


def test_tensorflows_random_states_come_back():
    """Operations outside functions, the global generator and Keras' layers draw the same numbers again."""

    def draw():
        shared = tf.random.get_global_generator().uniform([2]).numpy().tolist()
        return tf.random.uniform([2]).numpy().tolist(), shared, tf.keras.initializers.GlorotUniform().seed

    tf.random.get_global_generator().reset_from_seed(1)
    draw()
    found = kept(parts.random_states())
    wanted = draw()
    tf.keras.utils.set_random_seed(9)
    tf.random.get_global_generator().reset_from_seed(2)
    assert draw() != wanted
    parts.set_random_states(found)
    assert draw() == wanted


# ── what Keras' own callbacks write ───────────────────────────────────────────


@pytest.fixture
def told(monkeypatch):
    """The reports about checkpoints, with Keras patched as on a rank."""
    import keras.src.callbacks
    import keras.src.engine.training

    found = []
    monkeypatch.setattr(report, "_tell", lambda message: found.append(received(message)))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for kind, name in (
        (keras.src.engine.training.Model, "fit"),
        (keras.src.callbacks.ModelCheckpoint, "_save_model"),
        (keras.src.callbacks.ModelCheckpoint, "_save_handler"),
        (keras.src.callbacks.ModelCheckpoint, "_get_file_path"),
        (keras.src.callbacks.BackupAndRestore, "_backup"),
        (keras.src.callbacks.BackupAndRestore, "on_train_end"),
    ):
        if hasattr(kind, name):  # older versions of Keras lack some of them
            monkeypatch.setattr(kind, name, getattr(kind, name))
    keras_hooks.report_fits(True)
    return lambda: [message for message in found if isinstance(message, CheckpointSaved | CheckpointRemoved)]


def saved_events(told):
    return [message for message in told() if isinstance(message, CheckpointSaved)]


def test_what_model_checkpoint_writes_is_told(told, tmp_path):
    """Files, folders and TensorFlow's checkpoints are reported, with epoch, size and metrics, and written as usual."""
    x = np.ones((32, 2), "f4")
    make().fit(
        x,
        x[:, 0],
        epochs=2,
        verbose=0,
        callbacks=[
            tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "one-{epoch}.keras")),
            tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "weights" / "two-{epoch}"), save_weights_only=True),
            tf.keras.callbacks.ModelCheckpoint(
                str(tmp_path / "best.h5"), monitor="loss", mode="max", save_best_only=True
            ),
        ],
    )
    found = saved_events(told)
    assert {(one.name, one.step) for one in found} >= {("one-1.keras", 1), ("one-2.keras", 2), ("two-2", 2)}
    for one in found:
        assert one.kind == "keras"
        assert one.folder == str(tmp_path / "weights" if one.name.startswith("two") else tmp_path)
        assert one.best == (one.name == "best.h5")
        assert set(one.metrics) == {"loss", "mae"}
        assert one.took_s == one.blocked_s > 0
    sizes = {one.name: one.size_bytes for one in found}
    assert sizes["one-2.keras"] == (tmp_path / "one-2.keras").stat().st_size
    assert sizes["two-2"] == sum(file.stat().st_size for file in (tmp_path / "weights").glob("two-2.*")) > 0
    assert tf.keras.models.load_model(tmp_path / "one-2.keras").count_params() == make().count_params()


def test_a_file_with_nan_is_told(told, tmp_path):
    """A file of ModelCheckpoint or BackupAndRestore is marked if the model's weights are NaN."""
    x = np.ones((4, 2), "f4")
    model = make()
    model.layers[-1].bias.assign([np.nan])
    keep = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "one.keras"))
    back_up = tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    model.fit(x, x[:, 0], verbose=0, callbacks=[keep, back_up])
    assert {one.kind for one in saved_events(told) if one.not_finite.startswith("NaN in ")} == {"keras", "tensorflow"}


def test_nan_ends_fit(told, monkeypatch):
    """With --stop-on nan, fit() ends after the batch in which the loss is NaN, although few batches are reported."""
    x = np.ones((20, 2), "f4")
    y = np.where(np.arange(20) < 14, 1.0, np.nan).astype("f4")
    batches = []
    count = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    monkeypatch.setattr(report, "_stops_on_nan", True)
    with pytest.raises(NotFiniteError, match=r"loss .*NaN .*rank 0 .*epoch 1, step 8\b"):
        make().fit(x, y, batch_size=2, shuffle=False, verbose=0, callbacks=[count])
    assert batches == list(range(8))


def test_a_model_that_is_not_the_best_is_not_told(told, tmp_path):
    """Only checkpoints that are written are reported."""
    keep = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "best.h5"), monitor="loss", save_best_only=True)
    keep.set_model(make())
    for epoch, loss in enumerate((3.0, 4.0, 2.0)):
        keep.on_epoch_end(epoch, {"loss": loss})
    assert [(one.step, one.metrics) for one in saved_events(told)] == [(1, {"loss": 3.0}), (3, {"loss": 2.0})]


def test_what_backup_and_restore_writes_is_told(told, tmp_path):
    """The files that BackupAndRestore writes and removes are reported, and it still resumes an interrupted fit()."""
    x = np.ones((64, 2), "f4")
    model = make()
    keep = tf.keras.callbacks.BackupAndRestore(str(tmp_path))
    with pytest.raises(Stop):
        model.fit(x, x[:, 0], epochs=3, batch_size=32, verbose=0, callbacks=[keep, stop_after(5)])
    first, second = saved_events(told)
    assert (first.kind, first.folder, first.name, first.step) == ("tensorflow", str(tmp_path), "chief/ckpt-1", 1)
    assert (second.name, second.step) == ("chief/ckpt-2", 2)
    assert second.size_bytes == sum(file.stat().st_size for file in (tmp_path / "chief").glob("ckpt-2.*")) > 0
    assert list(map(type, told())) == [CheckpointSaved, CheckpointRemoved, CheckpointSaved]
    again = make()
    epochs = []
    note = tf.keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    again.fit(
        x,
        x[:, 0],
        epochs=3,
        batch_size=32,
        verbose=0,
        callbacks=[tf.keras.callbacks.BackupAndRestore(str(tmp_path)), note],
    )
    assert epochs == [2]
    assert list(map(type, told()[3:])) == [CheckpointSaved, CheckpointRemoved]
    assert not (tmp_path / "chief").exists()


def test_what_goes_wrong_in_telling_hurts_no_training(told, tmp_path, monkeypatch):
    """If a report fails, the model is still written, and fit() continues."""
    monkeypatch.setattr(keras_hooks, "_size_bytes", lambda path: 1 / 0)
    x = np.ones((4, 2), "f4")
    make().fit(x, x[:, 0], verbose=0, callbacks=[tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "m.keras"))])
    assert (tmp_path / "m.keras").exists()
    assert told() == []
