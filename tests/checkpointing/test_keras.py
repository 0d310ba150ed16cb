"""TensorFlow's and Keras' objects in a state, and the callback: a training that goes on is the one that was not torn."""

import copy
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from sparkring import events, report, shards
from sparkring.checkpointing import keras as resuming
from sparkring.checkpointing import parts, tree
from sparkring.errors import CheckpointError, OptionsError
from sparkring.worker import autolog

STEPS = 20


@pytest.fixture(autouse=True, scope="module")
def warm():
    """TensorFlow opens a file for good when it is first used."""
    tf.constant(1) + 1


@pytest.fixture(autouse=True)
def clean():
    """Every test begins as a process does."""
    begin_anew(7)


def begin_anew(seed):
    """Layers are numbered anew, and random states are others."""
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
    """The training is torn."""


def stop_after(batches):
    """A callback that raises after so many batches."""
    left = iter(range(batches - 1, -1, -1))

    def count(batch, logs):
        if not next(left):
            raise Stop

    return tf.keras.callbacks.LambdaCallback(on_train_batch_end=count)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """320 rows in row groups of 50: x counts on."""
    folder = tmp_path_factory.mktemp("numbered")
    x = np.arange(320)
    pq.write_table(pa.table({"x": x.astype("f4"), "y": (x % 7).astype("f4")}), folder / "a.parquet", row_group_size=50)
    return folder


def numbered_shards(path, **more):
    return shards(path, 16, columns={"x": ["x", "y"], "y": "y"}, seed=3, **more)


def make(optimizer=None):
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Rescaling(1 / 320, input_shape=(2,)),
            tf.keras.layers.Dense(16, "relu"),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Dropout(0.5),
            tf.keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer or tf.keras.optimizers.Adam(0.01), "mse", ["mae"])
    return model


def watched(data, seen):
    """data.as_tf() that notes what is taken from it."""

    def note(x):
        seen.append(x[:, 0].astype(int).tolist())
        return np.int32(0)

    def tell(x, y):
        told = tf.numpy_function(note, [x], tf.int32, stateful=True)
        with tf.control_dependencies([told]):
            return tf.identity(x), y

    # After the data set's own last step: what is noted was handed to the training.
    return data.as_tf("x", "y").map(tell)


def all_variables(model):
    return [v.numpy() for v in (*model.weights, *model.optimizer.variables(), model.optimizer.learning_rate)]


def equal(these, those):
    return all(np.array_equal(a, b) for a, b in zip(these, those, strict=True))


@pytest.fixture(scope="module")
def untorn(numbered):
    """Four epochs in one go: the variables, the rows of each batch, the history."""
    begin_anew(7)
    seen = []
    data, model = numbered_shards(numbered), make()
    resume = resuming.resume(Memory(), model, data=data)
    model.fit(watched(data, seen), epochs=4, callbacks=[resume], verbose=0)
    assert len(seen) == 4 * STEPS
    assert data.epoch == 5
    return all_variables(model), seen, resume.history


@pytest.mark.parametrize(("every", "torn", "kept"), [(7, 35, 35), ("epoch", 30, 20), (5, 42, 40)])
def test_a_training_that_goes_on_is_bit_equal(numbered, untorn, every, torn, kept):
    """Weights, Adam's moments, dropout, the order of the data: as if it had not been torn."""
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


# ── what Keras' own callbacks write ───────────────────────────────────────────


@pytest.fixture
def told(monkeypatch):
    """What is told of checkpoints, with Keras patched as on a rank."""
    import keras.src.callbacks
    import keras.src.engine.training

    found = []
    monkeypatch.setattr(report, "_tell", lambda kind, fields: found.append((kind, fields)))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for kind, name in (
        (keras.src.engine.training.Model, "fit"),
        (keras.src.callbacks.ModelCheckpoint, "_save_model"),
        (keras.src.callbacks.ModelCheckpoint, "_save_handler"),
        (keras.src.callbacks.BackupAndRestore, "_backup"),
        (keras.src.callbacks.BackupAndRestore, "on_train_end"),
    ):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    autolog.install()
    return lambda: [fields for kind, fields in found if kind == "checkpoint"]


def saved_events(told):
    return [events.CheckpointSaved(time=0, rank=0, **one["told"]) for one in told() if one["event"] == "saved"]


def test_what_model_checkpoint_writes_is_told(told, tmp_path):
    """Files, folders and TensorFlow's own, with the epoch, the size and its metrics; it writes what it always did."""
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


def test_a_model_that_is_not_the_best_is_not_told(told, tmp_path):
    """Only what is written is."""
    keep = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "best.h5"), monitor="loss", save_best_only=True)
    keep.set_model(make())
    for epoch, loss in enumerate((3.0, 4.0, 2.0)):
        keep.on_epoch_end(epoch, {"loss": loss})
    assert [(one.step, one.metrics) for one in saved_events(told)] == [(1, {"loss": 3.0}), (3, {"loss": 2.0})]


def test_what_backup_and_restore_writes_is_told(told, tmp_path):
    """With what goes again; and it still takes a training up where it was torn."""
    x = np.ones((64, 2), "f4")
    model = make()
    keep = tf.keras.callbacks.BackupAndRestore(str(tmp_path))
    with pytest.raises(Stop):
        model.fit(x, x[:, 0], epochs=3, batch_size=32, verbose=0, callbacks=[keep, stop_after(5)])
    first, second = saved_events(told)
    assert (first.kind, first.folder, first.name, first.step) == ("tensorflow", str(tmp_path), "chief/ckpt-1", 1)
    assert (second.name, second.step) == ("chief/ckpt-2", 2)
    assert second.size_bytes == sum(file.stat().st_size for file in (tmp_path / "chief").glob("ckpt-2.*")) > 0
    assert [one["event"] for one in told()] == ["saved", "removed", "saved"]
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
    assert [one["event"] for one in told()[3:]] == ["saved", "removed"]
    assert not (tmp_path / "chief").exists()


def test_what_goes_wrong_in_telling_hurts_no_training(told, tmp_path, monkeypatch):
    """The model is written, the fit goes on."""
    monkeypatch.setattr(autolog, "_size_bytes", lambda path: 1 / 0)
    x = np.ones((4, 2), "f4")
    make().fit(x, x[:, 0], verbose=0, callbacks=[tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "m.keras"))])
    assert (tmp_path / "m.keras").exists()
    assert told() == []
