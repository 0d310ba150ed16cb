"""Reducers for TensorFlow's and Keras' objects: models, layers, optimizers, `tf.function` and `tf.data`.

A Keras model is rebuilt from its configuration and its weights, and from the notebook's classes and functions that the
model uses. Only functions that run on ranks import TensorFlow: a driver that has such an object has already imported
TensorFlow.
"""

from __future__ import annotations

import copyreg
import importlib
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from sparkring.capture.picklability import Kind, Refused, by_reference, walk
from sparkring.capture.reducers.base import WRAPPED, Reduced, Reducer

_SETTINGS = (bool, int, float, str)
_SEARCHED = 200  # at most this many objects in a layer's attribute are searched for classes and functions


def reducer_for(cls: type) -> Reducer | None:
    """Return the reducer for the values of a type, if it needs one."""
    kinds = _names(cls)
    refused = next((kind for name, kind in _REFUSED.items() if name in kinds), None)
    if refused is not None:
        return partial(_refuse, refused)
    if "polymorphic_function.Function" in kinds:
        return _function
    if "dataset_ops.DatasetV2" in kinds:
        return _dataset
    keras = _keras(cls)
    if keras is None or not hasattr(keras, "Model"):  # not a type of Keras, or Keras is still being imported
        return None
    if not keras.__version__.startswith("2."):
        return _reducer_of_keras_3(cls, keras)
    if issubclass(cls, keras.Model):
        return _model
    if issubclass(cls, keras.layers.Layer):
        return _adapted_layer if hasattr(cls, "adapt") else _layer
    if issubclass(cls, keras.optimizers.Optimizer | keras.optimizers.legacy.Optimizer):
        return _optimizer
    return None


def _reducer_of_keras_3(cls: type, keras: Any) -> Reducer | None:
    """Return the reducer for a Keras 3 type, if it needs one.

    Keras 3's own `__reduce__` fails for classes of the notebook, and loses the state of an optimizer.
    """
    container = next((kind for kind in (list, dict, set) if issubclass(cls, kind)), None)
    if container is not None and _is_theirs(cls):
        # Keras tracks a model's layers with containers that cannot be unpickled. Pack a plain container instead.
        return lambda value: (container, (container(value),))
    if not str(getattr(cls.__reduce__, "__module__", "")).startswith("keras."):
        return None  # the type is not part of Keras, or is a subclass with its own `__reduce__`
    if issubclass(cls, keras.Layer):
        return _model
    if issubclass(cls, keras.Optimizer):
        return _optimizer
    return _metric_or_loss if issubclass(cls, keras.Metric | keras.Loss) else None


_REFUSED = {
    "core.ConcreteFunction": Kind(
        "a concrete function, which is bound to this process",
        "pass the `tf.function`, and call `get_concrete_function()` in the cell",
    ),
    "iterator_ops.IteratorBase": Kind("an iterator over a dataset", "call `iter()` on the dataset in the cell"),
    "distribute_lib.StrategyBase": Kind("a tf.distribute strategy", "make it in the cell"),
    "checkpoint.Checkpoint": Kind("a tf.train.Checkpoint", "make it in the cell, from the objects that it saves"),
    "checkpoint_management.CheckpointManager": Kind("a tf.train.CheckpointManager", "make it in the cell"),
    "summary_ops_v2.SummaryWriter": Kind("a tf.summary writer", "make it in the cell, with a folder for each rank"),
    "lookup_ops.LookupInterface": Kind("a tf.lookup table", "make it in the cell, from its keys and values"),
    "load._UserObject": Kind("a loaded SavedModel", "pass its path, and call `tf.saved_model.load()` in the cell"),
    "backprop.GradientTape": Kind("a tf.GradientTape", "record and differentiate in the cell"),
}


def _refuse(kind: Kind, value: object) -> Reduced:
    raise Refused(kind)


def _names(cls: type) -> set[str]:
    """Return a type's bases in TensorFlow, as `module.Class`.

    `module` is only the last part of the module's name, because the other parts differ between versions.
    """
    return {
        f"{base.__module__.rpartition('.')[2]}.{base.__name__}"
        for base in cls.__mro__
        if base.__module__.startswith("tensorflow.")
    }


def _keras(cls: type) -> Any:
    """Return the Keras package that a class belongs to, `keras` or `tf_keras`; None for other classes."""
    roots = (base.__module__.partition(".")[0] for base in cls.__mro__)
    return next((sys.modules[root] for root in roots if root in ("keras", "tf_keras")), None)


# ── tf.function and tf.data ──────────────────────────────────────────────────────────────────────────────────────────


def _function(function: Any) -> Reduced:
    """Pack the decorated function. The rank traces it on the first call."""
    original = function.python_function
    bound: Any = getattr(original, "__original_wrapped__", None)
    if isinstance(bound, types.MethodType) and hasattr(bound.__self__, "weakrefself_target__"):
        # `function` is a method. TensorFlow makes it from the class's tf.function when the object's attribute is first
        # read, so on the rank, getattr() makes it.
        target: Any = bound.__self__
        return getattr, (target.target, bound.__func__.__name__)
    options = {
        "input_signature": function.input_signature,
        "autograph": function._autograph,
        "jit_compile": function._jit_compile,
        "reduce_retracing": function._reduce_retracing,
        "experimental_autograph_options": function._experimental_autograph_options,
        "experimental_attributes": function._attributes,
    }
    return _traced, (original, {name: value for name, value in options.items() if value is not None})


def _traced(original: Any, options: dict[str, Any]) -> Any:
    import tensorflow as tf

    return tf.function(original, **options)


def _dataset(dataset: Any) -> Reduced:
    """Pack a dataset as its graph. Refuse the dataset if its graph depends on this process."""
    tf: Any = sys.modules["tensorflow"]
    try:
        graph = dataset._as_serialized_graph(external_state_policy=tf.data.experimental.ExternalStatePolicy.FAIL)
    except tf.errors.OpError as error:
        reason = error.message.partition("pipeline graph: ")[2].partition(" [Op")[0] or type(error).__name__
        raise Refused(
            Kind(
                f"a tf.data.Dataset that depends on this process ({reason.rstrip('.')})",
                "make it in the cell, or write a function that returns it and call that in the cell",
            )
        ) from error
    return _dataset_of, (graph.numpy(), dataset.element_spec)


def _dataset_of(graph: bytes, element_spec: Any) -> Any:
    from tensorflow.python.data.ops.dataset_ops import _VariantDataset
    from tensorflow.python.ops.gen_experimental_dataset_ops import dataset_from_graph

    return _VariantDataset(dataset_from_graph(graph_def=graph), element_spec)


def _numbered(graph: bytes, element_spec: Any) -> tuple[Any, ...]:
    """Return the graph of a dataset as text, with new numbers for the names that have the number of a counter."""
    from tensorflow.core.framework.graph_pb2 import GraphDef

    parsed, arrays, numbers = GraphDef.FromString(graph), list[bytes](), dict[str, str]()
    for node in parsed.node:
        node.attr.pop("metadata", None)  # only the name of the dataset
        if node.op == "Const":
            arrays.append(node.attr["value"].tensor.tensor_content)
            node.attr["value"].tensor.tensor_content = b""

    functions = sorted(
        parsed.library.function, key=lambda function: int("0" + re.findall(r"\d*$", function.signature.name)[0])
    )
    parsed.ClearField("library")

    def number(name: re.Match[str]) -> str:
        return numbers.setdefault(name[0], f"{name[1]}{len(numbers)}")

    texts = [re.sub(r"(__inference_\w*_|SeedGenerator_)\d+", number, str(message)) for message in (parsed, *functions)]
    return texts, arrays, element_spec


COMPARABLE: dict[Any, Callable[..., Any]] = {_dataset_of: _numbered}


# ── Comparing objects with what they were ────────────────────────────────────────────────────────────────────────────


def content(value: Any) -> Any:
    """Return what an object of TensorFlow or Keras consists of, to be compared with its content at another time.

    Return None if only the identity of the object can be compared.
    """
    if isinstance(getattr(value, "python_function", None), types.FunctionType):
        return value.python_function
    keras = _keras(type(value))
    if keras is None or not hasattr(keras, "Model"):
        is_variable = not _names(type(value)).isdisjoint(
            {"variables.Variable", "resource_variable_ops.BaseResourceVariable"}
        )
        return value.numpy() if is_variable else None
    layers = list(value._flatten_layers()) if isinstance(value, keras.layers.Layer) else []
    optimizer = getattr(value, "optimizer", None)
    owners = [value, *layers, *([] if optimizer is None else [optimizer])]
    # predict() itself sets `training` and `stop_predicting`, and `predict_function`, which is None before.
    settings = [
        {
            name: item
            for name, item in vars(owner).items()
            if type(item) in _SETTINGS and name != "training" and not name.startswith(("_", "stop_"))
        }
        | {"trainable": getattr(owner, "trainable", None)}
        for owner in owners
    ]
    variables = [
        variable for owner in (value, optimizer) if hasattr(owner, "variables") for variable in variables_of(owner)
    ]
    rates = (getattr(owner, "_learning_rate", None) for owner in (value, optimizer))  # Keras 2 leaves them out
    variables += [rate for rate in rates if hasattr(rate, "numpy")]
    return settings, [variable.numpy() for variable in variables]


# ── Keras: classes and functions that are registered ────────────────────────────────────────────────────────────────


def registered_names(value: Any) -> dict[str, str]:
    """Map each Keras package that has registered `value`, a class or function, to the name of the registration."""
    names = {}
    for root in ("keras", "tf_keras"):
        saving = getattr(sys.modules.get(root), "saving", None)
        if saving is not None and ">" in (name := saving.get_registered_name(value)):
            names[root] = name
    return names


def set_registered(set_state: Callable[[Any, Any], object], names: dict[str, str], made: Any, state: Any) -> None:
    """Give a class or function its state, and register it with Keras under `names`, from registered_names()."""
    set_state(made, state)
    for root, registered in names.items():
        package, _, name = registered.partition(">")
        importlib.import_module(root).saving.register_keras_serializable(package, name)(made)


# ── Keras: models ────────────────────────────────────────────────────────────────────────────────────────────────────


def _model(model: Any) -> Reduced:
    """Pack a model, or one of Keras 3's layers."""
    keras = _keras(type(model))
    noun = "model" if isinstance(model, keras.Model) else "layer"
    with _refused_if_not_rebuilt(model, noun):
        custom = _custom_objects(model._flatten_layers(), keras)
        recipe = _model_recipe(model, keras, custom)
        weights = model.get_weights() if model.built else []
        adapted = [
            (at, *_learned(layer)) for at, layer in enumerate(model._flatten_layers()) if hasattr(layer, "adapt")
        ]
        if custom or not all(_is_theirs(type(layer)) for layer in model._flatten_layers()):
            # Rebuild the model on the driver, so that the user sees an error in its classes before ranks are started.
            with _same_random_numbers(keras):
                _remade(recipe, weights, adapted)
            # Make the recipe again, because from_config() may have changed the configuration in it.
            recipe = _model_recipe(model, keras, custom)
        compilation = _compilation(model)
    return _remade, (recipe, weights, adapted), compilation, None, None, _compile


def _model_recipe(model: Any, keras: Any, custom: dict[str, Any]) -> tuple[Any, ...]:
    with _named(custom):
        config = _config(model, keras)
    _name_lambdas(config, {layer.name: layer for layer in model._flatten_layers()}, custom)
    return type(model), config, model.get_build_config() if model.built else None, custom, keras.__name__


def _config(model: Any, keras: Any) -> dict[str, Any]:
    """Return a model's configuration. Raises ValueError if the arguments of `__init__()` are not known.

    In Keras 3, up to 3.15, the configuration has default values instead of these arguments if a subclass of Model
    defines `__init__()` but no get_config().
    """
    config: dict[str, Any] = model.get_config()
    cls = type(model)
    is_subclass = isinstance(model, keras.Model) and not _is_theirs(cls.__init__) and _is_theirs(cls.get_config)
    if keras.__version__.startswith("2.") or not is_subclass or "input_layers" in config:
        return config
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        kept = config
    else:
        kept = {parameter.name: config[parameter.name] for parameter in parameters if parameter.name in config}
    named = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if unknown := set(named) - {"name", "trainable", "dtype"}:
        raise ValueError(f"Keras does not know the value of the argument `{min(unknown)}` of its `__init__()`")
    return kept


@contextmanager
def _refused_if_not_rebuilt(value: Any, noun: str) -> Iterator[None]:
    """Turn any error that the classes of a Keras object raise into Refused, with advice on what to change."""
    try:
        yield
    except Exception as error:  # classes of the notebook may raise anything
        reason = " ".join(str(error).split())
        called = ", call the model once on data" if noun == "model" else ""
        raise Refused(
            Kind(
                f"a Keras {noun}, `{type(value).__name__}`, that cannot be rebuilt from its configuration "
                f"({reason if len(reason) <= 200 else f'{reason[:199]}…'})",
                "define a `get_config()` in each of its classes that returns the arguments of its `__init__()`"
                f"{called}, or write a function that builds it and call that in the cell",
            )
        ) from error


def _remade(recipe: tuple[Any, ...], weights: list[Any], adapted: list[tuple[int, Any, Any]]) -> Any:
    cls, config, build_config, custom, keras = recipe
    with importlib.import_module(keras).utils.custom_object_scope(custom):
        model = cls.from_config(config)
        if build_config is not None and not model.built:
            model.build_from_config(build_config)
        if weights:
            model.set_weights(weights)
        layers = list(model._flatten_layers())
        for at, variables, files in adapted:
            _learn(layers[at], variables, files)
    return model


def _custom_objects(owners: Iterable[Any], keras: Any) -> dict[str, Any]:
    """Return the classes and functions that Keras objects use and ranks lack, by their names in configurations."""
    parts = [part for owner in owners for part in (type(owner), *vars(owner).values())]
    objects: dict[str, Any] = {}
    # Objects of frameworks are not searched: a tf.function holds wrappers that have the name of its function.
    walks = (
        walk(part, limit=_SEARCHED, enters=lambda value: not _is_frameworks(type(value)))
        for part in parts
        if not _is_theirs(type(part))
    )
    for value in (step.value for steps in walks for step in steps):
        is_code = isinstance(value, (type, types.FunctionType))
        if not is_code or by_reference(value) or _is_theirs(value) or any(value is other for other in objects.values()):
            continue
        name = keras.utils.get_registered_name(value)
        if name in objects and ">" in name:
            raise ValueError(f"two of its classes or functions are registered as `{name}`")
        is_unique = name not in objects and name != "<lambda>"
        objects[name if is_unique else f"{name.strip('<>')} {len(objects)}"] = value
    return objects


def _is_frameworks(value: Any) -> bool:
    return value.__module__.partition(".")[0] in ("keras", "tf_keras", "tensorflow", "horovod", "torch", "jax", "numpy")


def _is_theirs(value: Any) -> bool:
    """Return whether a class or function belongs to a framework or to the standard library, and is not a builtin."""
    root = value.__module__.partition(".")[0]
    return _is_frameworks(value) or (root in sys.stdlib_module_names and root != "builtins")


@contextmanager
def _named(custom: dict[str, Any]) -> Iterator[None]:
    """Set the name of each object in `custom` to its key, and restore the names on exit.

    Configurations refer to objects by name, and several objects, such as lambdas, may share a name.
    """
    own = {key: value.__name__ for key, value in custom.items() if ">" not in key and value.__name__ != key}
    try:
        for key in own:
            custom[key].__name__ = key
        yield
    finally:
        for key, name in own.items():
            custom[key].__name__ = name


def _name_lambdas(config: Any, layers: dict[str, Any], custom: dict[str, Any]) -> None:
    """Make Lambda layers in `config` refer to their functions by name, and add the functions to `custom`.

    Keras would put the byte code of a lambda into the configuration, without the globals that the lambda uses.
    """
    if isinstance(config, list | tuple):
        for item in config:
            _name_lambdas(item, layers, custom)
    elif isinstance(config, dict):
        settings = config.get("config")
        if config.get("class_name") == "Lambda" and isinstance(settings, dict) and settings.get("name") in layers:
            layer = layers[settings["name"]]
            for key, function in (("function", layer.function), ("mask", layer.mask)):
                if settings.get(f"{key}_type") == "lambda":
                    name = f"{key} of {layer.name}"
                    custom[name] = function
                    settings.update({key: name, f"{key}_type": "function"})
        else:
            for item in config.values():
                _name_lambdas(item, layers, custom)


class ModelPart(NamedTuple):
    """A layer or a variable of a model: the one with this `number` in _parts()."""

    model: Any
    number: int


def parts_of_models(values: Iterable[object]) -> dict[int, ModelPart]:
    """Return, by id, the layers and variables of the Keras models that `values` are or contain."""
    models: dict[int, Any] = {}
    if "keras" in sys.modules or "tf_keras" in sys.modules:
        for value in values:
            steps = walk(value, limit=_SEARCHED, enters=lambda value: not _is_frameworks(type(value)))
            models |= {id(step.value): step.value for step in steps if is_model(step.value)}
    parts: dict[int, ModelPart] = {}
    # A model that is part of another one is packed as that part, so begin with the largest.
    for model in sorted(models.values(), key=lambda model: -len(list(model._flatten_layers()))):
        if id(model) not in parts:
            for number, part in enumerate(_parts(model)):
                if part is not model:
                    parts.setdefault(id(part), ModelPart(model, number))
    return parts


def _parts(model: Any) -> list[Any]:
    return [*model._flatten_layers(), *(model.weights if model.built else [])]


def part_of_model(model: Any, number: int) -> Any:
    """On a rank: return a layer or a variable of a model that has been rebuilt."""
    return _parts(model)[number]


def with_shared_layers(model: Any, reduced: Reduced, parts: Mapping[int, ModelPart]) -> Reduced:
    """Let a model share its layers with other models when it is rebuilt. `parts` are those of the other models."""
    shared = {layer.name: part for layer in model.layers if (part := parts.get(id(layer))) and part.model is not model}
    if not shared or not by_reference(type(model)) or not hasattr(model, "inputs"):
        return reduced
    make, arguments, *state = reduced
    return _with_shared_layers, (make, arguments, {name: tuple(part) for name, part in shared.items()}), *state


def _with_shared_layers(make: Callable[..., Any], arguments: Iterable[Any], shared: dict[str, tuple[Any, int]]) -> Any:
    model = make(*arguments)
    layers = {name: part_of_model(*part) for name, part in shared.items()}
    clone: Any = importlib.import_module(_keras(type(model)).__name__).models.clone_model
    return clone(model, clone_function=lambda layer: layers.get(layer.name, layer))


def is_model(value: Any) -> bool:
    """Return whether a value is a Keras model."""
    keras = _keras(type(value))
    return keras is not None and isinstance(value, getattr(keras, "Model", ()))


def _compilation(model: Any) -> dict[str, Any] | None:
    """Return the arguments of a model's last compile(), with its optimizer; None if it has not been compiled."""
    # Keras 2 has `_is_compiled`, and Keras 3 has `compiled`. Both keep the arguments in `_compile_config`, up to 3.15.
    if not getattr(model, "_is_compiled", getattr(model, "compiled", False)):
        return None
    return {**model._compile_config.config, "optimizer": model.optimizer}


def _compile(model: Any, arguments: dict[str, Any] | None) -> None:
    if arguments is not None:
        model.compile(**arguments)
        if model.built and hasattr(model.optimizer, "build"):
            model.optimizer.build(model.trainable_variables)


def seeds_of(keras: str) -> Any:
    """Return the object from which layers of the package `keras` get their seeds; None if it is not imported."""
    return getattr(sys.modules.get(f"{keras}.src.backend"), "_SEED_GENERATOR", None)


@contextmanager
def _same_random_numbers(keras: Any) -> Iterator[None]:
    """Restore, on exit, the state of the random generators from which initial weights are drawn."""
    import random

    seeds = getattr(seeds_of(keras.__name__), "generator", None)
    context = sys.modules.get("tensorflow.python.eager.context")  # None if Keras 3 runs without TensorFlow
    drawing = (random._inst, seeds, getattr(context.context(), "_rng", None) if context else None)
    generators = [generator for generator in drawing if generator is not None]
    states = [generator.getstate() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.setstate(state)


# ── Keras: layers and optimizers ─────────────────────────────────────────────────────────────────────────────────────


def _layer(layer: Any) -> Reduced:
    """Pack a layer without the models that it is part of."""
    state = {**layer.__getstate__(), "_inbound_nodes_value": [], "_outbound_nodes_value": []}
    return copyreg.__newobj__, (type(layer),), state  # type: ignore[attr-defined]


def _adapted_layer(layer: Any) -> Reduced:
    """Pack a preprocessing layer as its configuration and its adapted state."""
    build_config = layer.get_build_config() if layer.built else None
    return _preprocessing, (type(layer), layer.get_config(), build_config, *_learned(layer))


def _preprocessing(
    cls: Any, config: dict[str, Any], build_config: Any, variables: dict[str, Any], files: dict[str, bytes]
) -> Any:
    layer = cls.from_config(config)
    if build_config:
        layer.build_from_config(build_config)
    _learn(layer, variables, files)
    return layer


def _learned(layer: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return what a layer has learned in adapt(): its variables, and its vocabulary as files (name → contents)."""
    variables: dict[str, Any] = {}
    if not layer.built and not hasattr(layer, "get_vocabulary"):
        return {}, {}
    layer.save_own_variables(variables)
    if not (hasattr(layer, "get_vocabulary") and layer.get_vocabulary(include_special_tokens=False)):
        return variables, {}
    import tempfile  # only where it is used: every rank imports this module, and ranks should start quickly

    files = {}
    with tempfile.TemporaryDirectory() as folder:
        layer.save_assets(folder)
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), "rb") as file:
                files[name] = file.read()
    return variables, files


def _learn(layer: Any, variables: dict[str, Any], files: dict[str, bytes]) -> None:
    if variables:
        layer.load_own_variables(variables)
        if hasattr(layer, "bin_boundaries"):
            # Unlike other layers, Discretization does not call finalize_state() in load_own_variables().
            layer.finalize_state()
    if files:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(content)
            layer.load_assets(folder)


def _optimizer(optimizer: Any) -> Reduced:
    if any(base.__module__.startswith("horovod.") for base in type(optimizer).__mro__):
        raise Refused(WRAPPED)
    return bare_optimizer(optimizer)


def bare_optimizer(optimizer: Any) -> Reduced:
    """Pack an optimizer, without what Horovod may have wrapped around it."""
    values = [variable.numpy() for variable in variables_of(optimizer)]
    is_legacy = isinstance(optimizer.variables, types.MethodType)
    if not getattr(optimizer, "built", getattr(optimizer, "_built", is_legacy)):  # Keras 2 has `_built`
        values = values[:1]  # if an optimizer is not built, only its number of iterations is sent
    return _from_config, _recipe(optimizer, "optimizer"), values, None, None, _give_variables


def _metric_or_loss(value: Any) -> Reduced:
    values = [variable.numpy() for variable in getattr(value, "variables", [])]
    return _from_config, _recipe(value, "metric" if values else "loss"), values or None, None, None, _assign


def _recipe(value: Any, noun: str) -> tuple[Any, ...]:
    """Return the arguments with which _from_config() rebuilds an optimizer, metric or loss."""
    keras = _keras(type(value))
    kind = type(value)
    # Horovod's DistributedOptimizer gives a Keras 3 optimizer a class that cannot be imported, so use its base.
    if _is_theirs(kind):
        kind = next(base for base in kind.__mro__ if by_reference(base))
    with _refused_if_not_rebuilt(value, noun):
        custom = _custom_objects([value], keras)
        with _named(custom):
            config, tried = value.get_config(), value.get_config()
        if custom:
            # Rebuild the object on the driver, so that the user sees an error before ranks are started.
            _from_config(kind, tried, custom, keras.__name__)
    return kind, config, custom, keras.__name__


def _from_config(cls: Any, config: dict[str, Any], custom: dict[str, Any], keras: str) -> Any:
    with importlib.import_module(keras).utils.custom_object_scope(custom):
        return cls.from_config(config)


def _assign(owner: Any, values: list[Any]) -> None:
    variables = variables_of(owner)
    if variables:  # a metric may create its variables only when it is first used; they then start from zero
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def variables_of(owner: Any) -> list[Any]:
    """Return the variables of a layer or of an optimizer."""
    variables = owner.variables  # a list, a method that returns a list, or, in Horovod's optimizers, a callable list
    return list(variables() if callable(variables) else variables)


def _give_variables(optimizer: Any, values: list[Any]) -> None:
    """Make an optimizer assign `values` to its variables as soon as it has created them.

    An optimizer creates most of its variables only when it is given the model's weights. The first value, the number of
    iterations, is assigned at once.
    """
    # Legacy optimizers have `_create_all_weights()` in place of `build()`.
    name = "build" if hasattr(optimizer, "build") else "_create_all_weights"
    make: Callable[[Any], Any] = getattr(optimizer, name)

    def make_and_assign(weights: Any) -> Any:
        object.__delattr__(optimizer, name)
        made = make(weights)
        _assign(optimizer, values)
        return made

    if values:
        optimizer.iterations.assign(values[0])
    if len(values) > 1:
        object.__setattr__(optimizer, name, make_and_assign)
