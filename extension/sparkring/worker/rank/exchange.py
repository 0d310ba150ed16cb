"""Finds out whether a rank trains alone: it trains a model, but exchanges nothing with the other ranks.

If ranks have exchanged values, it sums up the weights of the rank's model, which should be the same on all ranks.

A rank that trains alone usually shows a mistake: the code was written for one process, so all ranks do the same, or its
model is not wrapped, so each rank gets a different model. There are hooks where a framework takes an optimizer's step,
and where ranks begin to exchange values. A hook only sets a mark, and those in torch's process groups remove themselves
when the first value is exchanged. If in doubt, the rank counts as one that exchanges values.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import math
import re
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from sparkring.runtime.world import world
from sparkring.wire.messages import CellCode, FunctionCall, ModelWeights, Run, TrainsAlone
from sparkring.worker.rank import script
from sparkring.worker.rank.imports import when_imported
from sparkring.worker.rank.own_modules import own_files

# Before its request has ended, a rank says that it trains alone if it has trained for this long without a group.
EARLY_S = 20.0
SUMMED = 65_536  # at most this many numbers of each weight are summed up: enough to see that ranks differ
_COLLECTIVE = re.compile(r"reduce|broadcast|gather|scatter|alltoall|send|recv")
# With these packages, a program exchanges values or divides its work in ways that are not watched here.
_OTHER_WAYS = ("jax", "mpi4py", "optuna", "ray", "redis", "torch_xla")
# Where Keras applies gradients: in Keras 2 (with the older optimizers), in tf-keras, and in Keras 3.
_KERAS = {
    "keras.src.optimizers.optimizer": ("Optimizer", "apply_gradients"),
    "keras.src.optimizers.legacy.optimizer_v2": ("OptimizerV2", "apply_gradients"),
    "tf_keras.src.optimizers.optimizer": ("Optimizer", "apply_gradients"),
    "keras.src.optimizers.base_optimizer": ("BaseOptimizer", "apply"),
}

Check = Callable[[Run, Mapping[str, Any], object], TrainsAlone | None]

_trained: list[Literal["torch", "keras"]] = []  # the library that trained first in this request; [] before that
_trained_since = 0.0  # about when that was, as a time.monotonic() time
_exchanged = False  # whether this process has ever exchanged values with other ranks
_functional: list[bool] = []  # not empty if this process has called a functional collective of torch
_connected = False  # whether this process has ever been in a group with other ranks


def prepare() -> None:
    """Set the hooks as soon as the libraries are imported."""
    when_imported("torch.optim.optimizer", _watch_torch_steps)
    when_imported("torch.distributed.distributed_c10d", _watch_torch_groups)
    when_imported("torch.nn.parallel.distributed", lambda it: _mark_calls(it.DistributedDataParallel, "__init__"))
    when_imported("torch.distributed.device_mesh", lambda it: _mark_calls(it.DeviceMesh, "__init__"))
    when_imported("torch.distributed.rpc", lambda it: _mark_calls(it, "init_rpc"))
    when_imported("torch.distributed._functional_collectives", _watch_functional_collectives)
    when_imported("horovod.torch.mpi_ops", _watch_horovod_torch)
    when_imported("horovod.tensorflow.mpi_ops", _watch_horovod_tensorflow)
    for name in _KERAS:
        when_imported(name, _watch_keras_steps)


def begin() -> None:
    """Begin a request."""
    global _trained_since
    _trained.clear()
    _trained_since = 0.0


def early(request: Run, namespace: Mapping[str, Any], called: object) -> TrainsAlone | None:
    """Return alone() when it is clear during the request that the rank trains alone. This is to be called often."""
    global _trained_since
    if not _trained or _trained_since < 0:
        return None
    now = time.monotonic()
    _trained_since = _trained_since or now
    if now - _trained_since < EARLY_S:
        return None
    _trained_since = -1.0
    return None if _is_connected() else alone(request, namespace, called, ended=False)


def alone(request: Run, namespace: Mapping[str, Any], called: object, *, ended: bool = True) -> TrainsAlone | None:
    """Return a message if the rank has trained, but has exchanged nothing, and its code does not divide the work.

    `namespace` holds the variables of the rank's `__main__`, and `called` is the function that the request calls.
    """
    code = request.what
    if not _trained or world().size == 1 or not isinstance(code, CellCode | FunctionCall) or _exchanges():
        return None
    cell = code if isinstance(code, CellCode) else CellCode("")
    if any(script.module for script in cell.scripts):  # its code is not here
        return None
    from sparkring.capture.rank_use import divides_by_rank  # needed only by ranks that have trained

    sources = [cell.source, *("".join(linecache.getlines(name)) for name in (*script.files, *own_files()))]
    if any(map(divides_by_rank, sources)) or any(map(_divides, _codes([called, *namespace.values()]))):
        return None
    return TrainsAlone(_library(), _is_connected(), ended)


def _library() -> Literal["torch", "lightning", "accelerate", "keras"]:
    """Return the library whose advice helps: the one that makes a ring of the training, if it has been imported."""
    if _trained[0] == "torch":
        if not sys.modules.keys().isdisjoint(("lightning", "pytorch_lightning")):
            return "lightning"
        if getattr(getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None), "_shared_state", None):
            return "accelerate"
    return _trained[0]


def weights(values: Iterable[object]) -> ModelWeights | None:
    """Return the sums of the weights of the largest model among `values`, if it was trained together with other ranks.

    All ranks should then have the same weights, unless a model is spread over the ranks.
    """
    if not _trained or world().size == 1 or not (_exchanged or _functional):
        return None
    if _in_tensorflow_cluster() or not sys.modules.keys().isdisjoint(_OTHER_WAYS):
        return None
    from sparkring.worker.rank.usage import measured_model

    try:
        model: Any = max(values, key=measured_model)
        if _trained[0] == "torch":
            tensors = [tensor.detach() for tensor in model.parameters() if tensor.requires_grad]
            if any(hasattr(tensor, "device_mesh") for tensor in tensors):
                return None
            parts = [tensor.reshape(-1)[:SUMMED].double().cpu().numpy() for tensor in tensors]
        else:
            parts = [weight.numpy().reshape(-1)[:SUMMED].astype("f8") for weight in model.trainable_weights]
        total, magnitude = sum(float(part.sum()) for part in parts), sum(float(abs(part).sum()) for part in parts)
    except Exception:  # this reads the user's objects, and must not fail the run
        return None
    if not (math.isfinite(total) and magnitude):
        return None
    return ModelWeights(type(model).__name__, _library(), measured_model(model).parameters, total, magnitude)


def _exchanges() -> bool:
    return _exchanged or bool(_functional) or not sys.modules.keys().isdisjoint(_OTHER_WAYS) or _in_tensorflow_cluster()


def _in_tensorflow_cluster() -> bool:
    """Whether this process belongs to a cluster of TensorFlow, as with MultiWorkerMirroredStrategy."""
    module = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(module, "_context", None)  # context() would make one
    return any(getattr(context, name, None) is not None for name in ("_server_def", "_collective_ops_server_def"))


def _is_connected() -> bool:
    horovod = (sys.modules.get(f"horovod.{name}.mpi_ops") for name in ("torch", "tensorflow"))
    return _connected or any(module is not None and module.is_initialized() for module in horovod)


# ── Hooks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _watch_torch_steps(module: types.ModuleType) -> None:
    module.register_optimizer_step_post_hook(_torch_has_stepped)


def _torch_has_stepped(*_: object) -> None:
    if not _trained:  # torch.compile() understands these lines
        _trained.append("torch")


def _watch_keras_steps(module: types.ModuleType) -> None:
    name, method = _KERAS[module.__name__]

    def mark(*_: object, **__: object) -> None:
        if not _trained:
            _trained.append("keras")

    _call_first(getattr(module, name, None), method, mark)


def _watch_torch_groups(module: types.ModuleType) -> None:
    """Mark when this process joins a group with others, and when it calls a collective of such a group from Python."""

    def join(*args: Any, **kwargs: Any) -> None:
        global _connected
        (group,) = (*args, *kwargs.values())
        _connected |= group is not None and group.size() > 1

    _call_first(module, "_update_default_pg", join)
    kind: Any = module.ProcessGroup
    originals = {name: method for name, method in vars(kind).items() if _COLLECTIVE.search(name) and callable(method)}

    def mark(group: Any, *_: object, **__: object) -> None:
        global _exchanged
        if group.size() > 1 and not _exchanged:
            _exchanged = True
            for name, method in originals.items():
                setattr(kind, name, method)

    for name in originals:
        _call_first(kind, name, mark)


def _mark_calls(owner: Any, name: str) -> None:
    """Count each call of a function of torch that makes ranks exchange values later, without further calls of Python.

    A DistributedDataParallel model, for example, does so in C++.
    """

    def mark(*_: object, **__: object) -> None:
        global _exchanged
        distributed = sys.modules["torch.distributed"]
        _exchanged |= not distributed.is_initialized() or distributed.get_world_size() > 1

    _call_first(owner, name, mark)


def _watch_functional_collectives(module: types.ModuleType) -> None:
    def mark(*_: object, **__: object) -> None:
        if not _functional:  # torch.compile() understands these lines
            _functional.append(True)

    for name in ("_resolve_group", "_resolve_group_name", "_expand_group"):  # depending on torch's version
        _call_first(module, name, mark)


def _watch_horovod_torch(module: types.ModuleType) -> None:
    _call_first(module, "_check_function", lambda *_, **__: _mark_horovod(module))


def _watch_horovod_tensorflow(module: types.ModuleType) -> None:
    library = module.MPI_LIB
    for name in vars(library):
        if _COLLECTIVE.search(name) and callable(getattr(library, name)):
            _call_first(library, name, lambda *_, **__: _mark_horovod(module))


def _mark_horovod(module: Any) -> None:
    global _exchanged
    _exchanged = _exchanged or not module.is_initialized() or module.size() > 1


def _call_first(owner: Any, name: str, mark: Callable[..., object]) -> None:
    """Make the function or method `name` of `owner` call `mark` with its arguments before it runs."""
    original = getattr(owner, name, None)
    if original is None:  # another version of the library
        return

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        mark(*args, **kwargs)
        return original(*args, **kwargs)

    marked.autograph_info__ = {}  # type: ignore[attr-defined] # TensorFlow's AutoGraph calls this without converting it
    setattr(owner, name, marked)


# ── The user's code ──────────────────────────────────────────────────────────────────────────────────────────────────


def _codes(values: Iterable[object]) -> Iterator[types.CodeType]:
    """Yield the code of functions and of the methods of classes, if the notebook defines them."""
    pending, seen = list(values), set[int]()
    while pending:
        value = pending.pop()
        value = getattr(value, "__func__", value) if isinstance(value, staticmethod | classmethod) else value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
            yield value.__code__
            pending += [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
        elif isinstance(value, type) and value.__module__ == "__main__":
            pending += vars(value).values()
        elif isinstance(value, functools.partial):
            pending.append(value.func)


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _divides(code: types.CodeType) -> bool:
    from sparkring.capture.rank_use import divides_by_rank, may_divide_by_rank

    if not may_divide_by_rank(code):
        return False
    try:
        return divides_by_rank(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError):  # there is no source
        return True
