"""Calls a model of any kind with a dict of arrays."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import numpy as np

from sparkring.checkpointing import keras_3_state, tensorflow_state
from sparkring.data.columns import writable
from sparkring.errors import DataError, OptionsError

Batch = dict[str, Any]
Predict = Callable[[Batch], Any]
Autocast = Literal["bfloat16", "float16"]

_SMALL_FLOP = 20e6  # for fewer operations, one thread is faster than several threads that wait for each other


def is_model(value: Any) -> bool:
    """Return whether a value is a torch module or a Keras model."""
    return is_torch(value) or is_keras(value)


def is_torch(value: Any) -> bool:
    """Return whether a value is a torch module."""
    nn: Any = sys.modules.get("torch.nn")
    return nn is not None and isinstance(value, nn.Module)


def is_keras(value: Any) -> bool:
    """Return whether a value is a model of Keras 2 or Keras 3."""
    return tensorflow_state.is_model(value) or keras_3_state.is_model(value)


def settled(model: Any, *, small: bool = False) -> Any:
    """Prepare a model for predictions, and return it. The model is changed, so it must belong to this process.

    A torch module is moved to the GPU if there is one, and computes no gradients. If it is `small`, it uses one thread.
    """
    if is_torch(model):
        import torch

        if small:
            _use_one_thread()
        model.eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.grad = None
        return model.to("cuda") if torch.cuda.is_available() else model
    return model


@contextlib.contextmanager
def borrowed(model: Any) -> Iterator[None]:
    """Prepare a model of the notebook for predictions within this context, and restore its modes afterwards."""
    training = [module for module in model.modules() if module.training] if is_torch(model) else []
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def is_small(predict: Predict, batch: Batch, batch_size: int) -> bool:
    """Return whether one thread is enough for what `predict` does in PyTorch, judged by its operations for a few rows.

    Times are not measured, because they differ from run to run, and the number of threads may affect the last bits of
    predictions.
    """
    if "torch" not in sys.modules:
        return False
    import torch

    log = logging.getLogger("torch.utils.flop_counter")
    log.disabled = True  # the import warns if triton is missing, which matters only to kernels in Triton
    try:
        from torch.utils.flop_counter import FlopCounterMode
    finally:
        log.disabled = False
    others = []  # modules whose operations PyTorch does not count, or that are not on the CPU

    def look(module: Any, _: Any) -> None:
        if isinstance(module, torch.nn.RNNBase) or any(
            parameter.device.type != "cpu" for parameter in module.parameters(recurse=False)
        ):
            others.append(module)

    seen = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        with FlopCounterMode(display=False) as counter:
            predict(batch)
    finally:
        seen.remove()
    rows = len(next(iter(batch.values())))
    operations = int(counter.get_total_flops()) / rows * batch_size
    return not others and 0 < operations < _SMALL_FLOP


def judged(predict: Predict, batch_size: int) -> Predict:
    """Return a function that calls `predict`, after letting PyTorch use one thread if the first batch is small.

    For this, the first batch is scored twice. `predict` may change its arrays, so the first call gets copies.
    """
    known = False

    def call(batch: Batch) -> Any:
        nonlocal known
        if not known:
            known = True
            with contextlib.suppress(Exception):  # the next line shows the error of the user's code
                if is_small(predict, {name: np.array(array) for name, array in batch.items()}, batch_size):
                    _use_one_thread()
        return predict(batch)

    return call


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def check_autocast(model: Any, autocast: Autocast | None) -> None:
    """Raise OptionsError if `autocast` is set for a model that is not a torch module."""
    if autocast is not None and not is_torch(model):
        raise OptionsError(
            f"autocast={autocast!r} is only for torch modules, but the model is a `{type(model).__name__}`: leave "
            "autocast=… out. A function can call torch.autocast() itself."
        )


def predictor_of(model: Any, *, by_name: bool, autocast: Autocast | None = None) -> Predict:
    """Return the function that calls a model with a dict of arrays.

    A function gets the dict. A torch module or a Keras model gets the arrays. Several arrays are passed by name if
    `by_name` is true and the model has inputs with these names, otherwise in the order of the dict. With `autocast`, a
    torch module computes under torch.autocast(). Raise OptionsError if this is impossible.
    """
    if hasattr(type(model), "predictor"):  # a model for each key
        predict: Predict = model.predictor(by_name=by_name, autocast=autocast)
        return predict
    check_autocast(model, autocast)
    if is_torch(model):
        return _of_torch(model, by_name, autocast)
    if is_keras(model):
        return _of_keras(model, by_name)
    return lambda batch: model(writable(batch))


def _of_torch(module: Any, by_name: bool, autocast: Autocast | None) -> Predict:
    import torch

    parameters = inspect.signature(module.forward).parameters
    weights = [weight for weight in module.parameters() if weight.is_floating_point()]
    dtype = weights[0].dtype if weights else None
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    casting = contextlib.nullcontext() if autocast is None else _autocast(device.type, autocast)

    def as_tensor(name: str, array: Any) -> Any:
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"the model is a torch module, but its input `{name}` is {array.dtype}, which no tensor can hold: turn "
                "it into numbers with transform=…."
            )
        tensor = torch.from_numpy(array if array.flags.writeable else np.array(array))
        # A floating-point tensor gets the type of the weights, because columns are often float64, and weights float32.
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    def predict(batch: Batch) -> Any:
        tensors = {name: as_tensor(name, array) for name, array in batch.items()}
        with torch.inference_mode(), casting:
            if by_name and len(tensors) > 1 and tensors.keys() <= parameters.keys():
                return _outputs(module(**tensors))
            return _outputs(module(*tensors.values()))

    return predict


def _outputs(results: Any) -> Any:
    """Return a model's outputs as a tuple if there are several. A list could also be the rows of one output."""
    return tuple(results) if isinstance(results, list) else results


def _autocast(device_type: str, autocast: Autocast) -> contextlib.AbstractContextManager[Any]:
    """Return torch.autocast() for this type of device. Raise OptionsError if PyTorch does not support it."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # otherwise, PyTorch might only warn, and compute in float32
            context: contextlib.AbstractContextManager[Any] = torch.autocast(device_type, getattr(torch, autocast))
            return context
    except (RuntimeError, UserWarning) as error:
        (other,) = {*get_args(Autocast)} - {autocast}
        raise OptionsError(
            f"PyTorch {torch.__version__} does not support autocast={autocast!r} on the device type `{device_type}`: "
            f"try autocast={other!r}, or leave autocast=… out."
        ) from error


def _of_keras(model: Any, by_name: bool) -> Predict:
    # A model of the user's own class does not know its inputs before its first call, but it may take a dict.
    names = {tensor.name for tensor in getattr(model, "inputs", None) or ()}

    def predict(batch: Batch) -> Any:
        if len(batch) == 1:
            (inputs,) = batch.values()
            return _outputs(model.predict_on_batch(inputs))
        inputs = batch if by_name and names in (set(), set(batch)) else list(batch.values())
        return _outputs(model.predict_on_batch(inputs))

    return predict
