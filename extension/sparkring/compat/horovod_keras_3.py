"""Adapts Horovod 0.28's Keras functions to Keras 3. Without this module, they would average no gradients.

Keras 3 calls none of the methods that Horovod's DistributedOptimizer overrides, so each rank would train on its own,
without an error. The optimizer that this module makes averages in `apply()`, which Keras 3 calls in every `fit()` and
`apply_gradients()`.
For Keras 2 and tf-keras, Horovod's functions stay as they are. Tested with Keras 3.15 on TensorFlow 2.21.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from sparkring.errors import SparkringError


class HorovodKerasError(SparkringError):
    """Horovod cannot do with Keras 3 what was asked for."""


def adapt(module: types.ModuleType) -> None:
    """Adapt `horovod._keras` to Keras 3: both horovod.keras and horovod.tensorflow.keras call its functions."""
    module.create_distributed_optimizer = _create(module)  # type: ignore[attr-defined]
    module.load_model = _load_model(module.load_model)  # type: ignore[attr-defined]


def adapt_callbacks(module: types.ModuleType) -> None:
    """Adapt `horovod._keras.callbacks` to Keras 3."""
    broadcast, schedule = module.BroadcastGlobalVariablesCallbackImpl, module.LearningRateScheduleCallbackImpl
    broadcast.on_batch_end = _broadcast(broadcast.on_batch_end)
    broadcast.register_local_var = _register_local(broadcast.register_local_var)
    schedule._adjust_learning_rate = _adjust_learning_rate(schedule._adjust_learning_rate)


def adapt_elastic(module: types.ModuleType) -> None:
    """Adapt `horovod.tensorflow.elastic` to Keras 3, so that KerasState can save, restore and broadcast its models."""
    state = module.TensorFlowKerasState
    state._save_model, state._load_model = _save(state._save_model), _load(state._load_model)
    module._broadcast_model = _broadcast_model(module._broadcast_model)  # type: ignore[attr-defined]


def _is_of_keras_3(value: Any, name: str) -> bool:
    keras = sys.modules.get("keras")
    # The module `keras` may also be Keras 2.
    if keras is None or not keras.__version__.startswith("3."):
        return False
    kind = keras
    for part in name.split("."):
        kind = getattr(kind, part)
    return isinstance(value, kind)  # type: ignore[arg-type]


def _create(module: types.ModuleType) -> Any:
    real, hvd = module.create_distributed_optimizer, module.hvd

    @functools.wraps(real)
    def create(
        keras: Any,
        optimizer: Any,
        name: str | None,
        device_dense: str,
        device_sparse: str,
        compression: Any,
        sparse_as_dense: bool,
        gradient_predivide_factor: float,
        op: Any,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        groups: Any = None,
        process_set: Any = hvd.global_process_set,
        scale_local_gradients: bool = True,
    ) -> Any:
        # The order is that of the parameters of _make_allreduce_grads_fn(), which is called with them below.
        reducing = (device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, groups)
        if not _is_of_keras_3(optimizer, "optimizers.Optimizer"):
            return real(
                keras,
                optimizer,
                name,
                *reducing[:4],
                gradient_predivide_factor,
                op,
                backward_passes_per_step,
                average_aggregated_gradients,
                groups,
                process_set,
                scale_local_gradients,
            )
        backend = sys.modules["keras"].backend.backend()
        if backend != "tensorflow":
            raise HorovodKerasError(
                f"horovod.tensorflow.keras averages TensorFlow's gradients, but Keras computes with {backend}: "
                "set KERAS_BACKEND=tensorflow, or average torch's gradients with horovod.torch."
            )
        if backward_passes_per_step != 1:
            raise HorovodKerasError(
                f"backward_passes_per_step={backward_passes_per_step} is not supported for Keras 3's optimizers: give "
                f"the optimizer itself gradient_accumulation_steps={backward_passes_per_step}, which averages the "
                "gradients."
            )
        if _scales_loss(optimizer):
            raise HorovodKerasError(
                "under the policy mixed_float16, ranks have to agree on whether a step is skipped: give "
                "DistributedOptimizer a keras.optimizers.LossScaleOptimizer around the optimizer."
            )
        label = name or f"Distributed{type(optimizer).__name__}"
        reduce = hvd._make_allreduce_grads_fn(label, *reducing, process_set=process_set)
        if getattr(type(optimizer), "_sparkring_distributed", False):
            raise HorovodKerasError(
                f"the optimizer `{type(optimizer).__name__}` is already a DistributedOptimizer: wrap it only once."
            )
        made = type(optimizer).from_config(optimizer.get_config())
        return _distribute(made, reduce, process_set.size() if scale_local_gradients else 1)

    return create


def _scales_loss(optimizer: Any) -> bool:
    """Whether compile() will wrap the optimizer in a LossScaleOptimizer.

    The LossScaleOptimizer would call apply() of the averaging optimizer only on ranks whose own gradients are finite.
    So some ranks could average while others skip the step.
    """
    keras = sys.modules["keras"]
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return keras.config.dtype_policy().name == "mixed_float16" and not is_scaled


def _distribute(optimizer: Any, reduce: Any, local_divisor: int) -> Any:
    """Change a Keras 3 optimizer so that it averages its gradients, and return it.

    The optimizer gets a new class. This class has the name of the old one, because models are saved with that name.
    Gradients of variables that are registered as local are not averaged, but divided by `local_divisor`.
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


def _load_model(real: Any) -> Any:
    @functools.wraps(real)
    def load_model(
        keras: Any,
        wrap_optimizer: Any,
        filepath: Any,
        custom_optimizers: Any,
        custom_objects: Any,
        legacy_opts: bool = False,
    ) -> Any:
        if not keras.__version__.startswith("3."):
            return real(keras, wrap_optimizer, filepath, custom_optimizers, custom_objects, legacy_opts)
        classes = {kind.__name__: kind for kind in custom_optimizers or ()}
        model = keras.models.load_model(filepath, custom_objects={**classes, **(custom_objects or {})})
        if getattr(model, "optimizer", None) is not None:
            # wrap_optimizer() makes a new optimizer, which lacks the state of the loaded one. So the model keeps the
            # loaded optimizer, which only gets the class of the new one.
            stateless = type(model.optimizer).from_config(model.optimizer.get_config())
            model.optimizer.__class__ = type(wrap_optimizer(lambda: stateless)())
        return model

    return load_model


def _broadcast(real: Any) -> Any:
    @functools.wraps(real)
    def on_batch_end(self: Any, batch: Any, logs: Any = None) -> None:
        if self.broadcast_done or not _is_of_keras_3(self.model, "Model"):
            real(self, batch, logs)
            return
        import horovod.tensorflow as hvd
        import tensorflow as tf

        values = _shared_values(self.model, self.model.optimizer)
        with tf.device(self.device):
            shared = [value for value in values if value.ref() not in self._local_vars]
            hvd.broadcast_variables(shared, root_rank=self.root_rank)
        self.broadcast_done = True

    return on_batch_end


def _variables(model: Any, optimizer: Any) -> list[Any]:
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return [*model.variables, *optimizer.variables]


def _shared_values(model: Any, optimizer: Any) -> list[Any]:
    """The values that all ranks begin with. Seeds are left out, so that dropout drops different units on each rank."""
    return [variable.value for variable in _variables(model, optimizer) if variable.name != "seed_generator_state"]


def _save(real: Any) -> Any:
    @functools.wraps(real)
    def save_model(self: Any) -> None:
        if not _is_of_keras_3(self.model, "Model"):
            real(self)
            return
        self._saved = [variable.numpy() for variable in _variables(self.model, self.optimizer)]

    return save_model


def _load(real: Any) -> Any:
    @functools.wraps(real)
    def load_model(self: Any) -> None:
        if not _is_of_keras_3(self.model, "Model"):
            real(self)
            return
        for variable, saved in zip(_variables(self.model, self.optimizer), self._saved, strict=True):
            variable.assign(saved)

    return load_model


def _broadcast_model(real: Any) -> Any:
    @functools.wraps(real)
    def broadcast_model(model: Any, optimizer: Any, backend: Any) -> None:
        if not _is_of_keras_3(model, "Model"):
            real(model, optimizer, backend)
            return
        import horovod.tensorflow as hvd

        hvd.broadcast_variables(_shared_values(model, optimizer), root_rank=0)

    return broadcast_model


def _register_local(real: Any) -> Any:
    @functools.wraps(real)
    def register_local_var(self: Any, var: Any) -> None:
        real(self, getattr(var, "value", var) if _is_of_keras_3(var, "Variable") else var)

    return register_local_var


def _adjust_learning_rate(real: Any) -> Any:
    @functools.wraps(real)
    def adjust(self: Any, epoch: float) -> None:
        optimizer = self.model.optimizer
        if not _is_of_keras_3(optimizer, "optimizers.Optimizer"):
            real(self, epoch)
            return
        if self.momentum_correction and getattr(optimizer, "momentum", 0):
            raise HorovodKerasError(
                f"{type(self).__name__} cannot correct the momentum of Keras 3's `{type(optimizer).__name__}`, where "
                "it is a constant: give the callback momentum_correction=False."
            )
        optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    return adjust
