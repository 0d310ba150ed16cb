"""Trains a torch module with DistributedDataParallel. Ranks import this module, so it does not need pyspark."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sparkring.checkpointing.store import checkpoints
from sparkring.errors import OptionsError
from sparkring.ml.training import TrainedModel, Training
from sparkring.runtime import report
from sparkring.runtime.resume_point import here
from sparkring.runtime.world import world
from sparkring.wire.messages import Metrics
from sparkring.worker.model.predictors import is_torch

if TYPE_CHECKING:
    from sparkring.data.shards import Shards

REPORT_EVERY_S = 0.2

# A function of an output, its label and the weights of the rows, which are None if there is no column of weights.
Measure = Callable[[Any, Any, Any], Any]


def train(
    training: Training, model: Any, optimizer: Any, data: Shards, validation: Shards | None
) -> TrainedModel | None:
    """Train the module on this rank's shard. Return the weights and the history on rank 0, and None on other ranks."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", world().local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if training.random_seed is not None:
        torch.manual_seed(training.random_seed)
    # A module that was sent to the rank is not copied again, because the optimizer may refer to the module's
    # parameters.
    module = (model if is_torch(model) else new_model(model)).to(device)
    trained = _Loop(training, module, _optimizer(optimizer, module), device).run(data, validation)
    if own:
        dist.barrier()  # without it, PyTorch 2.1 can hang in destroy_process_group()
        dist.destroy_process_group()
    return trained


class _Loop:
    """Trains for the epochs that remain after the checkpoint from which the run resumes, if there is one."""

    def __init__(self, training: Training, module: Any, optimizer: Any, device: Any) -> None:
        self._training = training
        self._module, self._optimizer, self._device = module, optimizer, device
        self._losses = [_loss(loss, bool(training.sample_weight_col)) for loss in _listed(training.loss)]
        floats = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
        self._dtype = floats[0] if floats else None
        several = len(training.label_cols) > 1
        self._names = [
            f"{label}_{_name_of(metric)}" if several else _name_of(metric)
            for metric in training.metrics
            for label in training.label_cols
        ]

    def run(self, data: Shards, validation: Shards | None) -> TrainedModel | None:
        from torch.nn.parallel import DistributedDataParallel

        training, epochs = self._training, self._training.epochs
        store = checkpoints() if here().directory else None
        state = {"model": self._module, "optimizer": self._optimizer, "data": data, "epoch": 0, "history": {}}
        if store is not None:
            store.restore(state)
        history: dict[str, list[float]] = state["history"]
        parallel = DistributedDataParallel(self._module)
        for epoch in range(state["epoch"] + 1, epochs + 1):
            self._module.train()
            values = self._epoch(parallel, data, epoch)
            if validation is not None:
                self._module.eval()
                values |= {f"val_{name}": value for name, value in self._epoch(self._module, validation, 0).items()}
            for name, value in values.items():
                history.setdefault(name, []).append(value)
            report.tell(Metrics(values, epoch=epoch, epochs=epochs, ends_epoch=True))
            if training.verbose and not world().rank:
                shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
                sys.stdout.write(f"epoch {epoch}/{epochs}: {shown}\n")
            stop = self._any([bool(callback(epoch, values)) for callback in training.callbacks])
            state["epoch"] = epochs if stop else epoch
            if store is not None:
                store.save(epoch, state, values)
            if stop:
                break
        if store is not None:
            store.wait()
        if world().rank:
            return None
        return TrainedModel({name: value.cpu() for name, value in self._module.state_dict().items()}, history)

    def _epoch(self, model: Any, data: Shards, epoch: int) -> dict[str, float]:
        """Read one epoch, and train the model unless `epoch` is 0. Return averages over the rows of all ranks."""
        import torch
        import torch.distributed as dist

        sums = torch.zeros(len(self._names) + 2, dtype=torch.float64)
        training = self._training
        most = training.train_steps_per_epoch if epoch else training.validation_steps_per_epoch
        reported_at, steps = time.monotonic(), min(data.steps, most or data.steps)
        with torch.set_grad_enabled(bool(epoch)):
            for step, batch in enumerate(itertools.islice(data.as_torch(), most), 1):
                loss, metrics, rows = self._measured(model, batch)
                if epoch:
                    self._optimizer.zero_grad()
                    loss.backward()
                    self._optimizer.step()
                sums += torch.tensor([float(value) * rows for value in (loss.detach(), *metrics, 1)])
                if epoch and time.monotonic() - reported_at >= REPORT_EVERY_S:
                    reported_at = time.monotonic()
                    report.log(step=step, epoch=epoch, steps=steps, epochs=self._training.epochs, loss=loss)
        sums = sums.to(self._device)
        dist.all_reduce(sums)
        *totals, rows = sums.tolist()
        return dict(zip(["loss", *self._names], (total / rows for total in totals), strict=True))

    def _measured(self, model: Any, batch: dict[str, Any]) -> tuple[Any, list[Any], int]:
        """Return the loss of a batch, its metrics and the number of its rows."""
        import torch

        training = self._training
        tensors = {name: tensor.to(self._device) for name, tensor in batch.items()}
        inputs = [tensors[name] for name in training.feature_cols]
        try:
            outputs = model(*(tensor.to(self._dtype) if tensor.is_floating_point() else tensor for tensor in inputs))
        except RuntimeError as error:
            if "shape" not in str(error) or all(tensor.ndim > 1 for tensor in inputs):
                raise
            shapes = [[-1, *tensor.shape[1:]] if tensor.ndim > 1 else [-1, 1] for tensor in inputs]
            raise OptionsError(
                f"the model failed: {error}. A column of numbers is an array of shape [rows]: for [rows, 1], set "
                f"input_shapes={shapes}; for several columns as one array, use VectorAssembler."
            ) from error
        outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
        if len(outputs) != len(training.label_cols):
            raise OptionsError(
                f"the model returned {len(outputs)} outputs, but label_cols names {len(training.label_cols)}: "
                f"{', '.join(training.label_cols)}."
            )
        labels = [_as_label(tensors[name], output) for name, output in zip(training.label_cols, outputs, strict=True)]
        row_weights = tensors[training.sample_weight_col] if training.sample_weight_col else None
        losses = self._losses * len(labels) if len(self._losses) == 1 else self._losses
        shares = training.loss_weights or [1.0] * len(labels)
        loss = sum(
            share * measure(output, label, row_weights)
            for share, measure, output, label in zip(shares, losses, outputs, labels, strict=True)
        )
        with torch.no_grad():
            metrics = [metric(*pair) for metric in training.metrics for pair in zip(outputs, labels, strict=True)]
        return loss, metrics, len(inputs[0])

    def _any(self, votes: Sequence[bool]) -> bool:
        """Return whether a callback of any rank votes to stop, so that all ranks stop together."""
        import torch
        import torch.distributed as dist

        vote = torch.tensor(float(any(votes)), device=self._device)
        dist.all_reduce(vote, dist.ReduceOp.MAX)
        return bool(vote)


def check(loss: Any, optimizer: Any) -> None:
    """Raise OptionsError if a loss or the optimizer cannot be used."""
    from torch.nn import functional

    for candidate in _listed(loss):
        if not callable(candidate) and not (
            isinstance(candidate, str) and callable(getattr(functional, candidate, None))
        ):
            raise OptionsError(
                f"TorchEstimator: loss={candidate!r}: expected a function of an output and its label, such as "
                "torch.nn.MSELoss(), or the name of a function in torch.nn.functional, such as 'mse_loss'."
            )
    if not (callable(optimizer) or hasattr(optimizer, "param_groups")):
        raise OptionsError(
            f"TorchEstimator: optimizer={optimizer!r}: expected an optimizer, or a function that takes the parameters "
            "and returns one, as in lambda params: torch.optim.Adam(params, 0.01)."
        )


def new_model(given: Any) -> Any:
    """Return a new module. If `given` is a function, call it; if it is a module, copy it."""
    made = copy.deepcopy(given) if is_torch(given) else given()
    if not is_torch(made):
        raise OptionsError(f"model: the function returned a `{type(made).__name__}`, which is not a torch module.")
    return made


def hollow(module: Any) -> Any:
    """Return a copy of a module without the values of the tensors that belong to its state."""
    return _replaced(copy.deepcopy(module).cpu(), lambda tensor: tensor.to("meta"))


def filled(module: Any) -> Any:
    """Allocate memory for the values of a module's tensors, which hollow() removed, and return the module."""
    import torch

    return _replaced(module, lambda tensor: torch.empty_like(tensor, device="cpu"))


def _replaced(module: Any, change: Callable[[Any], Any]) -> Any:
    """Replace the parameters of a module and those buffers that belong to its state. Shared tensors stay shared."""
    import torch

    done: dict[int, tuple[Any, Any]] = {}  # keeps the old tensors, so that no other object gets their ids

    def replaced(old: Any) -> Any:
        if id(old) not in done:
            new = change(old.detach())
            is_parameter = isinstance(old, torch.nn.Parameter)
            done[id(old)] = (old, torch.nn.Parameter(new, old.requires_grad) if is_parameter else new)
        return done[id(old)][1]

    for submodule in module.modules():
        for tensors, apart in (
            (submodule._parameters, ()),
            (submodule._buffers, submodule._non_persistent_buffers_set),
        ):
            for name, tensor in tensors.items():
                if tensor is not None and name not in apart:
                    tensors[name] = replaced(tensor)
    return module


def _optimizer(given: Any, module: Any) -> Any:
    """Return an optimizer for the module's parameters.

    `given` is an optimizer, or a function that takes the parameters and returns an optimizer.
    If the optimizer has parameters of another module, return a new optimizer with the same settings.
    """
    import torch

    if not isinstance(given, torch.optim.Optimizer):
        return given(module.parameters())
    held = {id(parameter) for group in given.param_groups for parameter in group["params"]}
    if held <= {id(parameter) for parameter in module.parameters()}:
        return given
    takes = inspect.signature(type(given)).parameters
    return type(given)(module.parameters(), **{name: value for name, value in given.defaults.items() if name in takes})


def _as_label(label: Any, output: Any) -> Any:
    """Return a label in the form that losses expect for its output.

    A label with as many numbers as the output is converted to the output's shape and type. Class numbers, which have
    one dimension less than the output, are converted to int64, because StringIndexer returns floating-point numbers.
    """
    if label.numel() == output.numel():
        return label.reshape(output.shape).to(output.dtype)
    return label.long() if label.ndim == output.ndim - 1 else label


def _loss(given: Any, weighted: bool) -> Measure:
    """Return a loss as a function of an output, its label and the weights of the rows.

    With weights, the loss is computed for each row (reduction="none"), as in horovod.spark.
    """
    import torch

    if isinstance(given, str):
        given = getattr(torch.nn.functional, given)
    if not weighted:
        return lambda output, label, weights: given(output, label)
    if is_torch(given):
        given.reduction = "none"

    def weigh(output: Any, label: Any, weights: Any) -> Any:
        losses = given(output, label) if is_torch(given) else given(output, label, reduction="none")
        return (losses.reshape(len(weights), -1).mean(1) * weights).mean()

    return weigh


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _name_of(metric: Any) -> str:
    return str(getattr(metric, "__name__", type(metric).__name__))
