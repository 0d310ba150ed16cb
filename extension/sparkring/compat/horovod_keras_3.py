"""Adapts Horovod 0.28's Keras functions to Keras 3. Without this module, they would average no gradients.

Keras 3 calls none of the methods that Horovod's DistributedOptimizer overrides, so each rank would train on its own,
without an error. This module makes optimizers that average gradients in `apply()`, which Keras 3 calls in every `fit()`
and `apply_gradients()`. For Keras 2 and tf-keras, Horovod's functions stay as they are. Tested with Keras 3.15.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from sparkring.errors import SparkringError


class HorovodKerasError(SparkringError):
    """Raised for a feature that Horovod does not support with Keras 3."""


def adapt(module: types.ModuleType) -> None:
    """Adapt `horovod._keras` to Keras 3. Both horovod.keras and horovod.tensorflow.keras call its functions."""
    signature = inspect.signature(module.create_distributed_optimizer)

    def create(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return _create(module.hvd, given.arguments)

    _replace(
        module, "create_distributed_optimizer", create, lambda keras, optimizer, *_, **__: _is_optimizer(optimizer)
    )
    _replace(module, "load_model", _load_model, lambda keras, *_, **__: keras.__version__.startswith("3."))


def adapt_callbacks(module: types.ModuleType) -> None:
    """Adapt `horovod._keras.callbacks` to Keras 3."""
    broadcast, schedule = module.BroadcastGlobalVariablesCallbackImpl, module.LearningRateScheduleCallbackImpl
    _replace(broadcast, "on_batch_end", _broadcast, lambda callback, *_, **__: _is_model(callback.model))
    _replace(broadcast, "register_local_var", _register_local, lambda callback, var: _is_variable(var))
    _replace(schedule, "_adjust_learning_rate", _adjust, lambda callback, _: _is_optimizer(callback.model.optimizer))


def adapt_elastic(module: types.ModuleType) -> None:
    """Adapt `horovod.tensorflow.elastic` to Keras 3, so that KerasState can save, restore and broadcast its models."""
    state = module.TensorFlowKerasState
    _replace(state, "_save_model", _save, lambda state: _is_model(state.model))
    _replace(state, "_load_model", _load, lambda state: _is_model(state.model))
    _replace(module, "_broadcast_model", _broadcast_model, lambda model, *_, **__: _is_model(model))


def _replace(owner: Any, name: str, adapted: Callable[..., Any], applies: Callable[..., bool]) -> None:
    """Make the function `name` of `owner` call `adapted()` if `applies()` is true for the arguments."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (adapted if applies(*args, **kwargs) else real)(*args, **kwargs)

    setattr(owner, name, chosen)


def _is_of_keras_3(name: str, value: Any) -> bool:
    keras = sys.modules.get("keras")
    # The module `keras` may also be Keras 2.
    return keras is not None and keras.__version__.startswith("3.") and isinstance(value, getattr(keras, name))


_is_model = functools.partial(_is_of_keras_3, "Model")
_is_optimizer = functools.partial(_is_of_keras_3, "Optimizer")
_is_variable = functools.partial(_is_of_keras_3, "Variable")

# The options of create_distributed_optimizer() that _make_allreduce_grads_fn() has, too.
_REDUCING = (
    "device_dense",
    "device_sparse",
    "compression",
    "sparse_as_dense",
    "op",
    "gradient_predivide_factor",
    "groups",
    "process_set",
)


def _create(hvd: Any, options: dict[str, Any]) -> Any:
    """Return a copy of a Keras 3 optimizer. The copy averages its gradients over the ranks."""
    optimizer = options["optimizer"]
    _check(optimizer, options["backward_passes_per_step"])
    label = options["name"] or f"Distributed{type(optimizer).__name__}"
    reduce = hvd._make_allreduce_grads_fn(name=label, **{name: options[name] for name in _REDUCING})
    made = type(optimizer).from_config(optimizer.get_config())
    return _distribute(made, reduce, options["process_set"].size() if options["scale_local_gradients"] else 1)


def _check(optimizer: Any, backward_passes_per_step: int) -> None:
    """Raise HorovodKerasError if gradients cannot be averaged for this optimizer."""
    backend = sys.modules["keras"].backend.backend()
    if backend != "tensorflow":
        raise HorovodKerasError(
            f"horovod.tensorflow.keras averages TensorFlow's gradients, but Keras computes with {backend}: "
            "set KERAS_BACKEND=tensorflow, or average torch's gradients with horovod.torch."
        )
    if backward_passes_per_step != 1:
        raise HorovodKerasError(
            f"backward_passes_per_step={backward_passes_per_step} is not supported for Keras 3's optimizers: pass "
            f"gradient_accumulation_steps={backward_passes_per_step} to the optimizer itself, which then averages the "
            "gradients."
        )
    if _scales_loss(optimizer):
        raise HorovodKerasError(
            "under the policy mixed_float16, ranks have to agree on whether a step is skipped: wrap "
            "the optimizer in a keras.optimizers.LossScaleOptimizer, and pass that to DistributedOptimizer."
        )
    if getattr(type(optimizer), "_sparkring_distributed", False):
        raise HorovodKerasError(
            f"the optimizer `{type(optimizer).__name__}` is already a DistributedOptimizer: wrap it only once."
        )


def _scales_loss(optimizer: Any) -> bool:
    """Return whether compile() will wrap the optimizer in a LossScaleOptimizer.

    The LossScaleOptimizer would call apply() of the averaging optimizer only on ranks whose own gradients are finite.
    So some ranks could average while others skip the step.
    """
    keras = sys.modules["keras"]
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return keras.config.dtype_policy().name == "mixed_float16" and not is_scaled


def _distribute(optimizer: Any, reduce: Any, local_divisor: int) -> Any:
    """Change a Keras 3 optimizer so that it averages its gradients, and return it.

    The optimizer's new class has the name of the old class, because models are saved with that name. Gradients of
    variables that are registered as local are not averaged, but divided by `local_divisor`.
    """
    base = type(optimizer)
    local: set[Any] = set()

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        # Keras has no public list of the variables that an optimizer trains, so this uses a private list of Keras 3.15.
        known = self._trainable_variables if trainable_variables is None else trainable_variables
        variables = [getattr(variable, "value", variable) for variable in known]
        shared = [i for i, variable in enumerate(variables) if variable.ref() not in local]
        for i, mean in zip(shared, reduce([grads[i] for i in shared], [variables[i] for i in shared]), strict=True):
            grads[i] = mean
        for i in set(range(len(grads))).difference(shared):
            grads[i] = None if grads[i] is None else grads[i] / local_divisor
        return base.apply(self, grads, trainable_variables)

    def register_local_var(self: Any, variable: Any) -> None:
        local.add(getattr(variable, "value", variable).ref())

    members = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "_sparkring_distributed": True,
        "apply": apply,
        # Horovod's callbacks for the learning rate read `lr`.
        "lr": property(lambda self: float(self.learning_rate)),
        "register_local_var": register_local_var,
    }
    optimizer.__class__ = type(base.__name__, (base,), members)
    return optimizer


def _load_model(
    keras: Any,
    wrap_optimizer: Any,
    filepath: Any,
    custom_optimizers: Any,
    custom_objects: Any,
    legacy_opts: Any = False,
) -> Any:
    classes = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**classes, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        # wrap_optimizer() makes a new optimizer, which lacks the state of the loaded optimizer. So the model keeps the
        # loaded optimizer, but with the class of the new optimizer.
        stateless = type(model.optimizer).from_config(model.optimizer.get_config())
        model.optimizer.__class__ = type(wrap_optimizer(lambda: stateless)())
    return model


def _broadcast(callback: Any, batch: Any, logs: Any = None) -> None:
    if callback.broadcast_done:
        return
    import horovod.tensorflow as hvd
    import tensorflow as tf

    values = _shared_values(callback.model, callback.model.optimizer)
    with tf.device(callback.device):
        shared = [value for value in values if value.ref() not in callback._local_vars]
        hvd.broadcast_variables(shared, root_rank=callback.root_rank)
    callback.broadcast_done = True


def _register_local(callback: Any, var: Any) -> None:
    callback._local_vars.add(var.value.ref())


def _adjust(callback: Any, epoch: float) -> None:
    """Set the learning rate for an epoch."""
    optimizer = callback.model.optimizer
    if callback.momentum_correction and getattr(optimizer, "momentum", 0):
        raise HorovodKerasError(
            f"{type(callback).__name__} cannot correct the momentum of Keras 3's `{type(optimizer).__name__}`, which "
            "is a constant: pass momentum_correction=False to the callback."
        )
    optimizer.learning_rate = callback.initial_lr * callback.multiplier(epoch)


def _save(state: Any) -> None:
    state._saved = [variable.numpy() for variable in _variables(state.model, state.optimizer)]


def _load(state: Any) -> None:
    for variable, saved in zip(_variables(state.model, state.optimizer), state._saved, strict=True):
        variable.assign(saved)


def _broadcast_model(model: Any, optimizer: Any, backend: Any) -> None:
    import horovod.tensorflow as hvd

    hvd.broadcast_variables(_shared_values(model, optimizer), root_rank=0)


def _variables(model: Any, optimizer: Any) -> list[Any]:
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return [*model.variables, *optimizer.variables]


def _shared_values(model: Any, optimizer: Any) -> list[Any]:
    """Return the values that all ranks begin with. Seeds are left out, so that Dropout differs between ranks."""
    return [variable.value for variable in _variables(model, optimizer) if variable.name != "seed_generator_state"]
