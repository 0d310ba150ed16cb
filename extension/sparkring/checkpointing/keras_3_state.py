"""Saves the state of Keras 3's models, layers, optimizers and variables, on any of its backends, and restores it.

Importing this module does not import Keras. Tested with Keras 3.15 on TensorFlow.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sparkring.checkpointing.tensorflow_state import or_none
from sparkring.checkpointing.tree import NotYet, Raw
from sparkring.checkpointing.variables import Variables, check_compiled, optimizer_advice, raw_or_array
from sparkring.errors import CheckpointError
from sparkring.runtime import world

_SEED = "seed_generator_state"
# The configuration of a model uses these class names for plain values, so they are not classes to look up.
_VALUES = ("__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__slice__", "__ellipsis__")


def backend() -> str:
    """Return the name of Keras' backend."""
    return str(sys.modules["keras"].backend.backend())


def _is(name: str, value: Any) -> bool:
    keras = sys.modules.get("keras")
    return _is_keras_3(keras) and isinstance(value, getattr(keras, name))


def _is_keras_3(module: Any) -> bool:
    return str(getattr(module, "__version__", "")).startswith("3.")


is_layer = partial(_is, "Layer")  # models are layers, too
is_model = partial(_is, "Model")
is_optimizer = partial(_is, "Optimizer")
is_variable = partial(_is, "Variable")


# ── variables ─────────────────────────────────────────────────────────────────


def leaf(variable: Any) -> Any:
    """Return a copy of a variable's current value."""
    return raw_or_array(np.array(sys.modules["keras"].ops.convert_to_numpy(variable.value)))


def array(saved_leaf: Any) -> Any:
    """Return the leaf `saved_leaf` as a NumPy array."""
    if isinstance(saved_leaf, Raw):
        import ml_dtypes  # Keras 3 depends on it

        dtype = np.dtype(getattr(ml_dtypes, saved_leaf.dtype_name))
        return np.frombuffer(saved_leaf.buffer, np.uint8).view(dtype).reshape(saved_leaf.shape)
    return np.asarray(saved_leaf)


VARIABLES = Variables(
    name=lambda variable: variable.path,
    shape=lambda variable: variable.shape,
    dtype=lambda variable: str(variable.dtype),
    leaf=leaf,
    array=array,
)


# ── layers, models and optimizers ─────────────────────────────────────────────


def take_layer(layer: Any, path: str) -> dict[str, Any]:
    """Return the variables of a layer or model, and the state of a compiled model's optimizer."""
    if not layer.built:
        raise NotYet(f"{path}: the {_called(layer)} is not built yet, so it has no weights. Build it, or call it once.")
    if hasattr(layer, "jax_state_sync"):
        layer.jax_state_sync()  # during fit() on JAX, the variables do not have the current values
    optimizer = getattr(layer, "optimizer", None)
    return {
        **VARIABLES.take(layer.variables),
        "optimizer": take_optimizer(optimizer) if is_optimizer(optimizer) else None,
        "rank": world.world().rank,
        "architecture": or_none(layer.to_json) if is_model(layer) else None,
    }


def put_layer(layer: Any, tree: dict[str, Any], path: str) -> None:
    """Assign the values that take_layer() returned. Raises CheckpointError if they do not fit."""
    if not layer.built:
        raise CheckpointError(
            f"{path}: the {_called(layer)} is not built yet, so the checkpoint's weights cannot be loaded. Build it, "
            "or call it once."
        )
    # A rank that restores another rank's state keeps its own seeds, or Dropout would drop the same units on both.
    own_seeds = [] if tree["rank"] == world.world().rank else _seeds(layer)
    kept = [leaf(variable) for variable in own_seeds]
    what = f"the {_called(layer)}"
    VARIABLES.put(
        layer.variables, tree, path, what, "Make it the same as when it was saved, or start over with --fresh"
    )
    for variable, before in zip(own_seeds, kept, strict=True):
        variable.assign(np.array([before[0], leaf(variable)[1]], before.dtype))
    optimizer = getattr(layer, "optimizer", None)
    if is_optimizer(optimizer):
        check_compiled(tree, path)
        put_optimizer(optimizer, tree["optimizer"], path, layer.trainable_variables)


def plain_layer(tree: dict[str, Any]) -> Any:
    """Return a new model made from what was saved, compiled if the saved model was.

    If the configuration was not saved, or if Keras 3 is not installed, return the arrays by name instead. A checkpoint
    must not run code. So if the configuration names a class or function that is neither Keras' own nor registered with
    Keras, warn, and return the arrays, too.
    """
    by_name = VARIABLES.by_name(tree)
    architecture = tree.get("architecture")  # version 0.1 did not save it
    if architecture is None:
        return by_name
    try:
        import keras
    except ImportError:
        return by_name
    if not _is_keras_3(keras):
        return by_name
    if unknown := _unknown(json.loads(architecture), keras):
        warnings.warn(
            f"A {tree['class']} in the checkpoint uses `{unknown}`, which Keras does not know here: the model's "
            "arrays are returned by name. To get the model, register the class with "
            "keras.saving.register_keras_serializable().",
            stacklevel=2,
        )
        return by_name
    model = keras.models.model_from_json(architecture)
    put_layer(model, tree, "the model")
    return model


def _unknown(config: Any, keras: Any) -> str:
    """Return the name of the first class or function in a configuration that Keras does not know, or ''."""
    if isinstance(config, list):
        return next(filter(None, (_unknown(item, keras) for item in config)), "")
    if not isinstance(config, dict):
        return ""
    name = config.get("class_name")
    if isinstance(name, str) and name not in _VALUES:
        registered = config.get("registered_name") or name
        ours = f"{config.get('module')}.".startswith("keras.")
        if name == "__lambda__" or not (ours or keras.saving.get_registered_object(registered)):
            called = config.get("config")
            return str(called) if name == "function" else name
    return _unknown(list(config.values()), keras)


def take_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's variables, which include the learning rate and the loss scale."""
    return VARIABLES.take(optimizer.variables)


def put_optimizer(optimizer: Any, tree: dict[str, Any], path: str, trainable: Sequence[Any] | None = None) -> None:
    """Assign the values that take_optimizer() returned. First build the optimizer for `trainable` if necessary."""
    if trainable is not None and not optimizer.built and len(tree["values"]) != len(optimizer.variables):
        optimizer.build(trainable)
    VARIABLES.put(optimizer.variables, tree, path, "the optimizer", optimizer_advice(trainable))


def _seeds(layer: Any) -> list[Any]:
    return [variable for variable in layer.variables if variable.name == _SEED]


def _called(layer: Any) -> str:
    return "model" if is_model(layer) else "layer"
