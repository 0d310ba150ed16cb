"""Saves the state of TensorFlow's and Keras 2's objects to a checkpoint's tree, and restores it.

These objects are Keras models (with their optimizers, even if Horovod has wrapped them), layers, optimizers without
a model, modules, variables and tensors. Importing this module does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparkring.capture.reducers.tensorflow import seeds_of, variables_of
from sparkring.checkpointing.tree import NotYet, Raw
from sparkring.checkpointing.variables import Variables, check_compiled, optimizer_advice, raw_or_array
from sparkring.errors import CheckpointError
from sparkring.runtime import world
from sparkring.runtime.packages import require

_WHAT = "a checkpoint of TensorFlow's variables"
STREAM = 1 << 40  # how many random numbers lie between the starts of two ranks' streams


# ── kinds of objects ──────────────────────────────────────────────────────────


def is_model(value: Any) -> bool:
    """Return whether a value is a Keras 2 model."""
    return _made_by_keras(value, "Model")


def is_optimizer(value: Any) -> bool:
    """Return whether a value is one of Keras 2's optimizers, new or legacy."""
    return _made_by_keras(value, "optimizers.Optimizer", "optimizers.legacy.Optimizer")


def is_of_tf(name: str, value: Any) -> bool:
    """Return whether a value is an instance of TensorFlow's class `name`, such as "Variable"."""
    return _is(value, sys.modules.get("tensorflow"), name)


def _made_by_keras(value: Any, *names: str) -> bool:
    homes = [module for module in map(sys.modules.get, ("keras", "tf_keras")) if _is_keras_2(module)]
    return any(_is(value, module, name) for module in homes for name in names)


def _is_keras_2(module: Any) -> bool:
    return str(getattr(module, "__version__", "")).startswith("2.")


def _is(value: Any, module: Any, name: str) -> bool:
    for part in name.split("."):
        module = getattr(module, part, None)
    return isinstance(module, type) and isinstance(value, module)


def keras_of(model: Any) -> Any:
    """Return the Keras module (keras or tf_keras) that a model belongs to."""
    return sys.modules["keras" if _is(model, sys.modules.get("keras"), "Model") else "tf_keras"]


# ── values ────────────────────────────────────────────────────────────────────


def leaf(value: Any) -> Any:
    """Return the value of a variable or tensor as a leaf. TensorFlow does not change the leaf's memory afterwards."""
    tensor = value.read_value() if hasattr(value, "read_value") else value
    try:
        values = np.asarray(memoryview(tensor))
    except (TypeError, ValueError):  # the dtype lacks the buffer protocol, or the tensor is on another device
        values = np.asarray(tensor.numpy())
    if values.dtype.kind in "OS":  # bytes objects of any length: save the shape and a list of the objects
        return [list(values.shape), values.reshape(-1).tolist()]
    return raw_or_array(values)


def array(saved_leaf: Any) -> Any:
    """Convert what leaf() returned to a NumPy array."""
    tf = require("tensorflow", _WHAT, CheckpointError)
    if isinstance(saved_leaf, Raw):
        dtype = tf.as_dtype(saved_leaf.dtype_name).as_numpy_dtype
        return np.frombuffer(saved_leaf.buffer, np.uint8).view(dtype).reshape(saved_leaf.shape)
    if isinstance(saved_leaf, list):
        strings = np.empty(len(saved_leaf[1]), object)
        strings[:] = saved_leaf[1]
        return strings.reshape(saved_leaf[0])
    return np.asarray(saved_leaf)


def tensor(saved_leaf: Any) -> Any:
    """Convert what leaf() returned to a tensor."""
    tf = require("tensorflow", _WHAT, CheckpointError)
    return tf.constant(array(saved_leaf))


VARIABLES = Variables(
    name=lambda variable: variable.name,
    shape=lambda variable: None if variable.shape.rank is None else variable.shape.as_list(),
    dtype=lambda variable: np.dtype(variable.dtype.base_dtype.as_numpy_dtype).name,
    leaf=leaf,
    array=array,
)


def put_module(module: Any, tree: dict[str, Any], path: str) -> None:
    """Assign a module's saved variables. Raises CheckpointError if they do not fit."""
    VARIABLES.put(variables_of(module), tree, path, "the module", "Build the module, or call it once, before restore()")


# ── optimizers ────────────────────────────────────────────────────────────────


def take_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's variables and variable settings, and the gradients that Horovod has accumulated."""
    helper = getattr(optimizer, "_agg_helper", None)
    gradients = getattr(helper, "locally_aggregated_grads", None)
    return {
        **VARIABLES.take(variables_of(optimizer)),
        "settings": {name: leaf(variable) for name, variable in _settings(optimizer).items()},
        "inner": take_optimizer(optimizer.inner_optimizer) if hasattr(optimizer, "inner_optimizer") else None,
        # Each rank has accumulated its own gradients. They are lost on ranks that do not write the checkpoint.
        "gradients": {key: leaf(sum) for key, sum in gradients.items()} if isinstance(gradients, dict) else {},
    }


def put_optimizer(optimizer: Any, tree: dict[str, Any], path: str, trainable: Sequence[Any] | None = None) -> None:
    """Assign what take_optimizer() returned. With `trainable`, first build the optimizer if it is not built yet.

    An optimizer that was saved before it was built is not built here. If `optimizer` is already built, its variables
    get their initial values.
    """
    saved = len(tree["values"])
    if trainable is not None and len(variables_of(optimizer)) != saved:
        _build_optimizer(optimizer, trainable)
    if tree["inner"] is not None and hasattr(optimizer, "inner_optimizer"):
        put_optimizer(optimizer.inner_optimizer, tree["inner"], path, trainable)
    variables = variables_of(optimizer)
    if trainable is not None and len(variables) > saved <= 1:  # it was not built: only its iterations were saved
        anew = _without_horovod(optimizer).from_config(optimizer.get_config())
        _build_optimizer(anew, trainable)
        for variable, initial in zip(variables, variables_of(anew), strict=True):
            variable.assign(initial)
        variables = variables[:saved]
    advice = optimizer_advice(trainable, _builder(optimizer))
    VARIABLES.put(variables, tree, path, "the optimizer", advice)
    here = _settings(optimizer)
    known = [(here[name], saved_leaf) for name, saved_leaf in tree["settings"].items() if name in here]
    VARIABLES.assign(known, path, "the optimizer")
    helper = getattr(optimizer, "_agg_helper", None)
    if helper is not None and tree["gradients"]:
        import tensorflow as tf

        for key, saved_leaf in tree["gradients"].items():
            if key in helper.locally_aggregated_grads:
                helper.locally_aggregated_grads[key].assign(array(saved_leaf))
            else:  # Horovod makes this variable in the first step, unless it exists by then
                helper.locally_aggregated_grads[key] = tf.Variable(array(saved_leaf), trainable=False)


def _build_optimizer(optimizer: Any, trainable: Sequence[Any]) -> None:
    getattr(optimizer, _builder(optimizer))(trainable)


def _builder(optimizer: Any) -> str:
    return "build" if hasattr(optimizer, "build") else "_create_all_weights"  # a legacy optimizer has no build()


def _without_horovod(optimizer: Any) -> Any:
    """Return the class of an optimizer, without Horovod's wrapping."""
    return next(kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("horovod."))


def _settings(optimizer: Any) -> dict[str, Any]:
    """Return the variables of an optimizer that `optimizer.variables` leaves out, by name."""
    scale = getattr(optimizer, "_loss_scale", None)
    helper = getattr(optimizer, "_agg_helper", None)
    candidates = {
        "learning_rate": getattr(optimizer, "_learning_rate", None),
        "scheduled": getattr(optimizer, "_current_learning_rate", None),
        "loss_scale": getattr(scale, "current_loss_scale", None),
        "good_steps": getattr(scale, "counter", None),
        "passes": getattr(helper, "counter", None),
        **(getattr(optimizer, "_hyper", None) or {}),
    }
    return {name: value for name, value in candidates.items() if is_of_tf("Variable", value)}


def _optimizer_config(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's configuration, without Horovod's wrapping."""
    kind = _without_horovod(optimizer)
    config = optimizer.get_config()
    if hasattr(optimizer, "inner_optimizer") and "inner_optimizer" in config:
        config["inner_optimizer"] = _optimizer_config(optimizer.inner_optimizer)
    return {"module": kind.__module__, "class_name": kind.__name__, "config": config, "registered_name": None}


# ── models ────────────────────────────────────────────────────────────────────


def take_model(model: Any, path: str) -> dict[str, Any]:
    """Return a model's weights, the states of its optimizer and of its random layers, and its configuration."""
    if not model.built:
        raise NotYet(f"{path}: the model is not built yet, so it has no weights. {_BUILD}")
    optimizer = getattr(model, "optimizer", None)
    return {
        **VARIABLES.take(model.weights),
        "optimizer": take_optimizer(optimizer) if is_optimizer(optimizer) else None,
        "random": [_random_state(source) for source in _random_sources(model)],
        "rank": world.world().rank,
        "architecture": or_none(model.to_json),
        "build": or_none(lambda: json.dumps(model.get_build_config())),
        "compile": or_none(lambda: _compile_config(model)),
    }


def put_model(model: Any, tree: dict[str, Any], path: str) -> None:
    """Assign what take_model() returned, in the scope of the model's strategy.

    Raises CheckpointError if the values do not fit the model.
    """
    strategy = getattr(model, "distribute_strategy", None)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        if not model.built:
            _build(model, tree, path)
        VARIABLES.put(
            model.weights,
            tree,
            path,
            "the model",
            "Make the model the same as when it was saved, or start over with --fresh",
        )
        optimizer = getattr(model, "optimizer", None)
        if is_optimizer(optimizer):
            check_compiled(tree, path)
            put_optimizer(optimizer, tree["optimizer"], path, model.trainable_variables)
        sources = _random_sources(model)
        if len(sources) == len(tree["random"]):
            for source, state in zip(sources, tree["random"], strict=True):
                if state is not None:
                    _set_random_state(source, state, world.world().rank - tree["rank"])


def plain_model(tree: dict[str, Any]) -> Any:
    """Return a model made from what take_model() returned, compiled if the saved model was.

    If there is no configuration, return the arrays by name instead. A checkpoint must not run code. So if the
    configuration names a Lambda layer, or something that is neither Keras' own nor registered with Keras, return the
    arrays, too.
    """
    by_name = VARIABLES.by_name(tree)
    if tree["architecture"] is None:
        return by_name
    keras = require("tensorflow", _WHAT, CheckpointError).keras
    # From a Keras 2 configuration, Keras 3 would make a different model.
    is_keras_2 = _is_keras_2(sys.modules[keras.Model.__module__.partition(".")[0]])
    if not is_keras_2 or not _known(json.loads(tree["architecture"]), keras):
        return by_name
    model = keras.models.model_from_json(tree["architecture"])
    if not model.built:
        _build(model, tree, "the model")
    VARIABLES.put(model.weights, tree, "the model", "the model", "It was saved by another version of Keras")
    if tree["compile"] is not None:
        config = json.loads(tree["compile"])
        if _known(config, keras):
            _compile(model, config)
            if tree["optimizer"] is not None:
                put_optimizer(model.optimizer, tree["optimizer"], "the model", model.trainable_variables)
    return model


def _compile(model: Any, config: dict[str, Any]) -> None:
    try:
        model.compile_from_config(config)
    except AttributeError:
        # Keras 2.13 calls optimizer.build() last. Legacy optimizers lack this method, and do not need it.
        if hasattr(model.optimizer, "build"):
            raise


_BUILD = "Build it (model.build(input_shape)), or call it once."


def _build(model: Any, tree: dict[str, Any], path: str) -> None:
    """Build a model for the shapes for which the saved model was built."""
    if tree["build"] is not None:
        with contextlib.suppress(Exception):  # build() of a subclass can raise any exception
            model.build_from_config(json.loads(tree["build"]))
    if not model.built or (not model.weights and tree["values"]):
        raise CheckpointError(
            f"{path}: the model is not built yet, so the checkpoint's weights cannot be loaded. {_BUILD}"
        )


def _compile_config(model: Any) -> str | None:
    config = model.get_compile_config()
    if not config:
        return None
    return json.dumps({**config, "optimizer": _optimizer_config(model.optimizer)}, default=lambda number: number.item())


def or_none(make: Callable[[], str | None]) -> str | None:
    """Return make(), or None if it fails. A user's own model that has no configuration is saved without one."""
    try:
        return make()
    except Exception:  # a user's layer can raise any exception
        return None


_CLASSES = ("models", "layers", "initializers", "regularizers", "constraints")
_FUNCTIONS = ("activations", "losses", "metrics", "initializers", "regularizers", "constraints")


def _known(config: Any, keras: Any) -> bool:
    """Return whether everything that a configuration names is Keras' own or registered. Other things could run code."""
    if isinstance(config, list):
        return all(_known(item, keras) for item in config)
    if not isinstance(config, dict):
        return True
    name, module = config.get("class_name"), config.get("module")
    if name in ("Lambda", "__lambda__"):
        return False
    if isinstance(name, str):
        registered = keras.saving.get_registered_object(config.get("registered_name") or name) is not None
        if name == "function" and module == "builtins":
            called = config.get("config")
            ours = isinstance(called, str) and any(hasattr(getattr(keras, home), called) for home in _FUNCTIONS)
        elif module is None:
            ours = name == "Functional" or any(hasattr(getattr(keras, home), name) for home in _CLASSES)
        else:
            ours = str(module).startswith(("keras.", "tf_keras.")) and name.isidentifier()
        if not (registered or ours):
            return False
    return all(_known(item, keras) for item in config.values())


# ── random layers ─────────────────────────────────────────────────────────────


def keep_random(model: Any) -> None:
    """Have the random layers of a model (Dropout, …) draw from generators, whose states can be saved.

    By default they draw from TensorFlow's older operations, whose state cannot be read. The numbers are as random as
    before. Models under a strategy with several replicas stay as they are.
    """
    import tensorflow as tf

    if tf.distribute.has_strategy() or replicas(model) > 1:
        return
    changed = [_draw_from_generator(source) for source in _random_sources(model)]
    if any(changed):
        # The current train_function may have been traced with the older operations. Keras replaces None by a new one.
        model.train_function = None


def replicas(model: Any) -> int:
    """Return the number of replicas in a model's strategy, on all ranks together; 1 without a strategy."""
    return int(getattr(getattr(model, "distribute_strategy", None), "num_replicas_in_sync", 1))


def _random_sources(model: Any) -> list[Any]:
    """Return the sources from which a model's layers draw random numbers, in the order of the layers."""
    sources: dict[int, Any] = {}
    for layer in model._flatten_layers():
        source = getattr(layer, "_random_generator", None)
        if hasattr(source, "_rng_type") and hasattr(source, "_maybe_init"):
            sources.setdefault(id(source), source)
    return list(sources.values())


def _draw_from_generator(source: Any) -> bool:
    """If a source draws from older operations, make it draw from a generator. Return whether it was changed."""
    is_legacy: bool = source._rng_type == source.RNG_LEGACY_STATEFUL
    if is_legacy:
        source._rng_type, source._built = source.RNG_STATEFUL, False
    source._maybe_init()
    return is_legacy


def _random_state(source: Any) -> Any:
    generator = getattr(source, "_generator", None)
    return None if generator is None else leaf(generator.state)


def _set_random_state(source: Any, state: Any, ranks_on: int) -> None:
    """Make a source continue from a saved state, in this rank's random stream.

    `ranks_on` is this rank's number minus the number of the rank that saved the state.
    """
    _draw_from_generator(source)
    if source._generator is not None:
        source._generator.reset(array(state))
        if ranks_on:
            source._generator.skip(ranks_on % (1 << 16) * STREAM)


def random_states(of_random: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the states of the global random generators of TensorFlow and Keras, if they are imported."""
    states: dict[str, Any] = {}
    if "tensorflow" in sys.modules:
        from tensorflow.python.eager import context
        from tensorflow.python.ops import stateful_random_ops

        here, shared = context.context(), stateful_random_ops.global_generator
        states["tensorflow"] = {
            "seed": here._seed,
            # Once a global seed is set, operations outside of functions take their seeds from this generator.
            "operations": None if here._seed is None else of_random(here._rng),
            "generator": None if shared is None else leaf(shared.state),
        }
    for name in ("keras", "tf_keras"):
        generator = getattr(seeds_of(name), "generator", None)
        if generator is not None:
            states[name] = of_random(generator)
    return states


def set_random_states(tree: dict[str, Any], set_random: Callable[[Any, Any], None]) -> None:
    """Restore the states that random_states() returned, for the packages that are imported now."""
    if "tensorflow" in sys.modules and "tensorflow" in tree:
        import tensorflow as tf
        from tensorflow.python.eager import context

        saved = tree["tensorflow"]
        if saved["seed"] is not None:
            tf.random.set_seed(saved["seed"])
            set_random(context.context()._rng, saved["operations"])
        if saved["generator"] is not None:
            tf.random.get_global_generator().reset(array(saved["generator"]))
    for name in ("keras", "tf_keras"):
        seeds = seeds_of(name)
        if seeds is not None and name in tree:
            seeds.generator = random.Random()
            set_random(seeds.generator, tree[name])
