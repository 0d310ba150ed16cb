"""Trains a Keras model on a Horovod rank. Ranks import this module, so it does not need pyspark."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sparkring.checkpointing import keras_3_state, tensorflow_state
from sparkring.checkpointing.store import checkpoints
from sparkring.errors import OptionsError
from sparkring.ml.training import History, TrainedModel, Training
from sparkring.runtime.report import numbers
from sparkring.runtime.resume_point import here
from sparkring.worker.model.predictors import is_keras

if TYPE_CHECKING:
    from sparkring.data.layout import Spec
    from sparkring.data.shards import Shards


def train(
    training: Training, model: Any, optimizer: Any, data: Shards, validation: Shards | None
) -> TrainedModel | None:
    """Train the model on this rank's shard. Return the weights and the history on rank 0, and None on other ranks."""
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    if training.random_seed is not None:
        tf.keras.utils.set_random_seed(training.random_seed)
    made = new_model(model, {name: data.spec[name] for name in training.feature_cols})
    keras = _keras_of(made)
    made.compile(
        optimizer=hvd.DistributedOptimizer(
            _optimizer(optimizer, keras), compression=training.gradient_compression or hvd.Compression.none
        ),
        loss=training.loss,
        loss_weights=training.loss_weights,
        metrics=list(training.metrics) or None,
        jit_compile=False,  # Horovod is built without its operations for XLA
    )
    store = checkpoints() if here().directory else None
    resume = None if store is None else store.keras(made, data)
    fitted = made.fit(
        _batches(data, training, training.train_steps_per_epoch),
        epochs=training.epochs,
        initial_epoch=0 if resume is None else resume.initial_epoch,
        validation_data=(
            None if validation is None else _batches(validation, training, training.validation_steps_per_epoch)
        ),
        verbose=0 if hvd.rank() else training.verbose,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            *training.callbacks,
            *([] if resume is None else [resume]),
        ],
    )
    if hvd.rank():
        return None
    return TrainedModel(made.get_weights(), _history(fitted) if resume is None else resume.history)


def new_model(given: Any, specs: dict[str, Spec]) -> Any:
    """Return a new model that has weights. If `given` is a function, call it; if it is a model, copy it.

    `specs` has the shape and the dtype of the rows of each input.
    """
    made = _keras_of(given).models.clone_model(given) if is_keras(given) else given()
    if not is_keras(made):
        raise OptionsError(f"model: the function returned a `{type(made).__name__}`, which is not a Keras model.")
    if not made.built:
        import tensorflow as tf

        rows = [tf.zeros([1, *spec.shape], tf.as_dtype(spec.dtype)) for spec in specs.values()]
        made(rows[0] if len(rows) == 1 else rows)
    return made


def _keras_of(model: Any) -> Any:
    return sys.modules["keras"] if keras_3_state.is_model(model) else tensorflow_state.keras_of(model)


def _optimizer(given: Any, keras: Any) -> Any:
    """Return a new optimizer, since a model may already use the given one."""
    if hasattr(given, "get_config") and not isinstance(given, type):
        return type(given).from_config(given.get_config())
    return given() if callable(given) else keras.optimizers.get(given)


def _batches(data: Shards, training: Training, most: int | None) -> Any:
    """Return a tf.data.Dataset of the rank's batches, at most `most` of them in an epoch."""
    features, labels, weight = training.feature_cols, training.label_cols, training.sample_weight_col
    if len(features) == len(labels) == 1:
        batches = data.as_tf(*features, *labels, *filter(None, [weight]))
        return batches if most is None else batches.take(most)

    def parts(batch: dict[str, Any]) -> tuple[Any, ...]:
        inputs, targets = (
            batch[names[0]] if len(names) == 1 else tuple(batch[name] for name in names) for names in (features, labels)
        )
        return (inputs, targets, batch[weight]) if weight else (inputs, targets)

    batches = data.as_tf().map(parts)
    return batches if most is None else batches.take(most)


def _history(fitted: Any) -> History:
    return {name: [number for value in values for number in numbers({name: value}).values()]
            for name, values in fitted.history.items()}  # fmt: skip
