"""Takes apart torch's tensors that are sharded over ranks (FSDP), on the ranks, and joins them in the notebook.

No rank has such a tensor as a whole. Each rank sends its shard, and the notebook joins the shards of all ranks, so the
ranks need no collective for it: the process group may have been destroyed by then.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparkring.capture.picklability import Kind, Refused

_UNEVEN = Kind("a tensor that is sharded in a way that sparkring cannot join", "call `full_tensor()` in the cell")
_FLAT = Kind(
    "a part of a FullyShardedDataParallel that no rank has as a whole (for an optimizer: its state)",
    "gather it in the cell, with FullyShardedDataParallel.full_optim_state_dict() or summon_full_params()",
)
# How the names of the attributes begin that fully_shard() and FullyShardedDataParallel add to modules.
_OF_TORCH = ("__composable_api", "_fsdp_", "_is_fsdp_")


class TensorShard(NamedTuple):
    """One rank's shard of a tensor of `shape`.

    `mesh` is the shape of the mesh of ranks, and `at` the rank's coordinate in it. For each dimension of the mesh,
    `dims` has the dimension of the tensor that is divided along it, or None if the ranks hold copies. If `flat` is set,
    the shards are parts of the flattened tensor.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    at: tuple[int, ...]
    dims: tuple[int | None, ...]
    flat: bool
    is_parameter: bool
    requires_grad: bool
    values: Any


def shard_of(tensor: Any) -> TensorShard:
    """Return this rank's shard of a DTensor. Raises Refused if shards of this kind cannot be joined."""
    import torch

    mesh, dims = tensor.device_mesh, list[int | None]()
    for placement in tensor.placements:
        if type(placement).__name__ not in ("Shard", "Replicate"):
            raise Refused(_UNEVEN)
        dims.append(placement.dim if placement.is_shard() else None)
    at = mesh.get_coordinate()
    if at is None:
        raise Refused(_UNEVEN)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    values = tensor.detach().to_local().cpu()
    place = tuple(tensor.shape), tuple(mesh.shape), tuple(at), tuple(dims)
    return TensorShard(*place, flat=False, is_parameter=is_parameter, requires_grad=tensor.requires_grad, values=values)


def has_shards(module: Any) -> bool:
    """Return whether a module has DTensors as its own parameters, not only in inner modules."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return any(isinstance(parameter, dtensor) for parameter in module._parameters.values())


def flat_shards(wrapper: Any) -> dict[int, dict[str, TensorShard]]:
    """Return this rank's shards of the parameters of a FullyShardedDataParallel, without those of its inner ones.

    The result maps the id() of each module to the shards of its parameters, by name. A parameter that two modules share
    is the same TensorShard. Raises Refused if this version of torch keeps the parameters in another way.
    """
    try:
        return _flat_shards(wrapper)
    except AttributeError as error:
        raise Refused(_FLAT) from error


def _flat_shards(wrapper: Any) -> dict[int, dict[str, TensorShard]]:
    handle, group = wrapper._handle, wrapper.process_group
    if handle is None:
        return {}
    flat = handle.flat_param
    is_divided = handle.uses_sharded_strategy
    # There is no `_local_shard` before the first forward(). During a forward(), `flat` is the whole parameter.
    data = (getattr(flat, "_local_shard", flat) if is_divided else flat).detach().cpu()
    views = () if is_divided else [view.detach().cpu() for view in handle._get_unflat_views()]
    shards: dict[int, dict[str, TensorShard]] = {id(wrapper.module): {}}
    for index, (name, module, _) in enumerate(flat._param_infos):
        info = flat._shard_param_infos[index]
        if is_divided:
            begin = info.offset_in_shard if info.in_shard else 0
            values = data[begin : begin + (info.numel_in_shard if info.in_shard else 0)].clone()
        else:
            values = views[index].reshape(-1)
        mesh, at = ((group.size(),), (group.rank(),)) if is_divided else ((1,), (0,))
        place = tuple(flat._shapes[index]), mesh, at, (0,)
        shard = TensorShard(*place, flat=True, is_parameter=True, requires_grad=flat.requires_grad, values=values)
        shards.setdefault(id(module), {})[name] = shard
    for name, module, _, first_name, first_module, _ in flat._shared_param_infos:
        shards.setdefault(id(module), {})[name] = shards[id(first_module)][first_name]
    return shards


def local_parameters(module: Any) -> dict[str, TensorShard]:
    """Return this rank's parts of the parameters of a module that contains FullyShardedDataParallel."""
    return {name: _local(parameter.detach().clone().cpu()) for name, parameter in module.named_parameters()}


def _local(values: Any) -> TensorShard:
    place = tuple(values.shape), (1,), (0,), (0,)
    return TensorShard(*place, flat=False, is_parameter=False, requires_grad=False, values=values)


def refuse_flat(parameter: Any) -> None:
    """Raise Refused for a parameter of a FullyShardedDataParallel that is met outside of its module."""
    if getattr(parameter, "_fsdp_flattened", False):
        raise Refused(_FLAT)


def bare_state(state: dict[str, Any], shards: Mapping[str, TensorShard]) -> dict[str, Any]:
    """Return the attributes of a sharded module as those of the bare module.

    `shards` are the parameters that FullyShardedDataParallel keeps elsewhere.
    """
    hooks = {name: value for name, value in state.items() if "_hooks" in name and isinstance(value, dict)}
    of_torch = {key for value in hooks.values() for key, hook in value.items() if _is_of_torch(hook)}
    bare = {
        name: type(value)((key, hook) for key, hook in value.items() if key not in of_torch) if name in hooks else value
        for name, value in state.items()
        if not name.startswith(_OF_TORCH) and name not in shards
    }
    kept = {name: value for name, value in state["_parameters"].items() if name != "_flat_param"}
    return {**bare, "_parameters": {**kept, **shards}}


def _is_of_torch(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # of a _WrappedHook
    owner = getattr(hook, "__self__", None)
    modules = (getattr(hook, "__module__", ""), type(owner).__module__)
    return any(str(module).startswith("torch.distributed.") for module in modules)


def joined(shards: Sequence[TensorShard]) -> Any:
    """Join the shards of a tensor, one from each rank. Raises ValueError if shards are missing."""
    import torch

    first = shards[0]
    by_place = {shard.at: shard.values for shard in shards}

    def join(at: tuple[int, ...]) -> Any:
        level = len(at)
        if level == len(first.mesh):
            if at not in by_place:
                ranks = math.prod(first.mesh)
                raise ValueError(f"it is sharded over {ranks} ranks, and not all of them have returned their shard")
            return by_place[at]
        dim = first.dims[level]
        if dim is None:
            return join((*at, 0))
        return torch.cat([join((*at, index)) for index in range(first.mesh[level])], dim)

    whole = join(()).reshape(first.shape)
    return torch.nn.Parameter(whole, first.requires_grad) if first.is_parameter else whole
