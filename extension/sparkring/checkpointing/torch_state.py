"""Saves the state of torch's tensors to a checkpoint's tree, and restores it."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sparkring.checkpointing.tree import NotYet, Raw
from sparkring.errors import CheckpointError
from sparkring.runtime.packages import require

# The names under which wrappers of modules keep what they wrap.
_WRAPPERS = frozenset({"module", "_orig_mod", "_forward_module", "_original_module", "_checkpoint_wrapped_module"})


def is_tensor(value: Any) -> bool:
    """Return whether a value is one of torch's tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_module(value: Any) -> bool:
    """Return whether a value is one of torch's modules."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def leaf(tensor: Any, path: str) -> Any:
    """Return a tensor's values as a leaf: a NumPy array, or Raw if NumPy lacks the dtype.

    If the tensor is on the CPU, the leaf shares the tensor's memory where possible, so copy the leaf before the
    tensor changes. Raises CheckpointError, with the path, for a tensor that cannot be saved.
    """
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        raise NotYet(
            f"{path} belongs to a lazy module, and has no shape yet: call the module once before its state is saved."
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        kinds = {"quantized": tensor.is_quantized, tensor.device: tensor.is_meta, "nested": tensor.is_nested}
        kind = next((kind for kind, matches in kinds.items() if matches), tensor.layout)
        raise CheckpointError(
            f"{path} is a tensor of a kind that a checkpoint cannot hold ({kind}): save a dense one, from to_dense() "
            "or dequantize(), or leave it out."
        )
    here = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return here.numpy()
    except TypeError:  # NumPy has no bfloat16 and no floats of 8 bits or less
        name = str(here.dtype).removeprefix("torch.")
        return Raw(name, tuple(here.shape), here.contiguous().reshape(-1).view(torch.uint8).numpy())


def tensor(saved_leaf: Any) -> Any:
    """Convert a leaf to a tensor, which shares the leaf's memory unless that memory is read-only."""
    torch = require("torch", "a checkpoint of PyTorch tensors", CheckpointError)
    if isinstance(saved_leaf, Raw):
        data = np.frombuffer(saved_leaf.buffer, np.uint8)
        return torch.from_numpy(_writeable(data)).view(getattr(torch, saved_leaf.dtype_name)).reshape(saved_leaf.shape)
    return torch.from_numpy(_writeable(np.asarray(saved_leaf)))


def put(value: Any, saved_leaf: Any, path: str) -> Any:
    """Copy a leaf into the tensor `value`, on any device, and return `value`.

    If the shapes or dtypes differ, or if elements of `value` share memory (expand()), return a new tensor instead, or
    raise CheckpointError if `value` is a Parameter.
    """
    import torch

    saved = tensor(saved_leaf)
    expanded = any(size > 1 and not step for size, step in zip(value.shape, value.stride(), strict=True))
    if saved.shape == value.shape and saved.dtype == value.dtype and not expanded:
        # Tensors that were made in inference mode can be changed only in inference mode.
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            value.copy_(saved)
        return value
    if isinstance(value, torch.nn.Parameter):
        raise CheckpointError(
            f"{path}: the checkpoint has a {_words(saved)}, but here it is a {_words(value)}. Make it the same as when "
            "it was saved, or start over with --fresh."
        )
    return saved.to(value.device)


# ── tensors that are spread over the ranks (DTensors: FSDP2, tensor parallelism) ─────────────────────────────────────


class MeshLayout(NamedTuple):
    """How a tensor is spread over the ranks, and which piece of it is this rank's.

    `shape` is the shape of the whole tensor, and `mesh` is the shape of the mesh of ranks. `at` is this rank's
    coordinate in the mesh, None if this rank has no piece. `placements` has torch's short name for the placement along
    each dimension of the mesh: "S(0)" is sharded along dimension 0, "R" is replicated.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    at: tuple[int, ...] | None
    placements: tuple[str, ...]


def is_spread(value: Any) -> bool:
    """Return whether a value is a tensor that is spread over the ranks."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def piece(tensor: Any, path: str) -> dict[str, Any]:
    """Return this rank's piece of a spread tensor, and the tensor's layout. Does not wait for other ranks."""
    return {"value": leaf(tensor.detach().to_local(), path), "layout": tuple(_layout(tensor))}


def put_piece(value: Any, saved_piece: dict[str, Any], path: str) -> None:
    """Copy a piece into a spread tensor. Raises CheckpointError if the tensor is spread differently."""
    import torch

    with torch.no_grad():
        value.to_local().copy_(joined(saved_piece, value, path).to_local())


def joined(saved_piece: dict[str, Any], like: Any, path: str) -> Any:
    """Make a spread tensor from this rank's saved piece. Raises CheckpointError if `like` is spread differently."""
    from torch.distributed.tensor import DTensor

    saved = MeshLayout(*saved_piece["layout"])
    now = _layout(like) if is_spread(like) else None
    if saved != now:
        raise CheckpointError(
            f"{path} was saved as {_layout_words(saved)}, but here it is {_layout_words(now)}. Before restore(), "
            "shard the model as it was when it was saved, or start over with --fresh."
        )
    local = tensor(saved_piece["value"]).to(like.to_local().device)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def refuse_unlike(saved_piece: dict[str, Any], like: Any, path: str) -> None:
    """Raise CheckpointError if a piece and its parameter, `like`, are spread differently, since joined() would fail."""
    saved, now = MeshLayout(*saved_piece["layout"]), _layout(like) if is_spread(like) else None
    if saved != now:
        raise CheckpointError(
            f"{path} is {_layout_words(saved)}, but its parameter is {_layout_words(now)}: an optimizer's state can be "
            "restored only if both are sharded alike. Leave the optimizer out, or save its state in another form."
        )


def refuse_whole(saved: Any, like: Any, path: str) -> None:
    """Raise CheckpointError if a tensor was saved whole, but would have to be restored into a spread tensor."""
    if is_spread(like) and tuple(saved.shape) == tuple(like.shape):
        raise CheckpointError(
            f"{path} was saved unsharded, but here it is {_layout_words(_layout(like))}. Restore the model before "
            "fully_shard(), and leave its optimizer out of the state that you pass to restore(), or start over with "
            "--fresh."
        )


def counterparts(value: Any) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that takes keys in an object's state_dict(), and returns the object's own tensor at these keys.

    The function returns None if there is no such tensor. For an optimizer, it returns the parameter whose state is at
    these keys, because an optimizer has no tensors of its own before its first step.
    """
    if hasattr(value, "param_groups"):
        parameters = dict(enumerate(parameter for group in value.param_groups for parameter in group["params"]))
        return lambda keys: parameters.get(keys[1]) if keys[0] == "state" and len(keys) > 1 else None
    state = functools.cache(value.state_dict)  # called only when it is needed: for most objects, never

    def at(keys: tuple[Any, ...]) -> Any:
        with contextlib.suppress(KeyError, IndexError, TypeError):
            return functools.reduce(operator.getitem, keys, state())
        return None

    return at


def fitted(module: Any, saved: dict[str, Any], metadata: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a saved state_dict() and its metadata with the keys that `module` has, if only one of the two is wrapped.

    Wrappers such as DistributedDataParallel and torch.compile add a part to each key, as in `module.0.weight`. Both are
    returned unchanged if keys cannot be told apart without these parts.
    """
    own: Any = {} if is_flattened(module) else module.state_dict()  # of a flattened one, this would be a collective
    keys = {_bare(key): key for key in own}
    if saved.keys() == set(own) or len(keys) < len(own) or len(set(map(_bare, saved))) < len(saved):
        return saved, metadata
    # A wrapper and the module that it wraps have the same bare key: the module, whose key is longer, counts.
    of_modules = {_bare(key): key for key in sorted(own._metadata, key=len)}
    versions = sorted(metadata.items(), key=lambda item: len(item[0]))
    return (
        {keys.get(_bare(key), key): value for key, value in saved.items()},
        {of_modules.get(_bare(key), key): value for key, value in versions},
    )


def _bare(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def has_pieces(value: Any) -> bool:
    """Return whether a value is a module that is spread over the ranks, or the optimizer of such a module."""
    return any(map(is_spread, _parameters(value)))


def refuse_flattened(value: Any, path: str) -> None:
    """Raise CheckpointError for a FullyShardedDataParallel or its optimizer: one rank alone cannot read its state."""
    if is_flattened(value):
        raise CheckpointError(
            f"{path} is sharded by FullyShardedDataParallel, whose state cannot be read on one rank alone: use "
            f"fully_shard() and checkpoints(sharded=True), or {_GATHER}."
        )


def is_flattened(value: Any) -> bool:
    """Return whether a value is a FullyShardedDataParallel, contains one, or is the optimizer of one."""
    wrapped = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if wrapped is None:
        return False
    if isinstance(value, sys.modules["torch"].nn.Module):
        return any(isinstance(module, wrapped) for module in value.modules())
    return any(getattr(parameter, "_fsdp_flattened", False) for parameter in _parameters(value))


def _parameters(value: Any) -> Iterable[Any]:
    """Return the parameters of a module or an optimizer; none for any other object."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        return value.parameters()  # type: ignore[no-any-return]
    groups = value.param_groups if torch is not None and isinstance(value, torch.optim.Optimizer) else []
    return [parameter for group in groups for parameter in group["params"]]


def refuse_piece(path: str) -> NoReturn:
    """Raise a CheckpointError that says why sharded=False cannot save a piece, and what to do instead."""
    raise CheckpointError(
        f"{path} is sharded over the ranks (FSDP), but with sharded=False only rank 0 saves its part: save the parts "
        f"of all ranks with checkpoints(sharded=True), or {_GATHER}."
    )


_GATHER = (
    "gather it on every rank first with get_model_state_dict(…, options=StateDictOptions(full_state_dict=True, "
    "cpu_offload=True)), or get_optimizer_state_dict for the optimizer (both from "
    "torch.distributed.checkpoint.state_dict), and save the result"
)


def _layout(tensor: Any) -> MeshLayout:
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    placements = tuple(map(str, tensor.placements))
    return MeshLayout(tuple(tensor.shape), tuple(mesh.shape), None if at is None else tuple(at), placements)


def _layout_words(layout: MeshLayout | None) -> str:
    if layout is None:
        return "a tensor that is not sharded"
    shape, mesh, at, placements = layout
    place = "no piece" if at is None else f"the piece at {list(at)}"
    return (
        f"a tensor of shape {list(shape)} spread over a mesh of {' × '.join(map(str, mesh))} ranks as "
        f"{', '.join(placements)}, with {place} on this rank"
    )


def _words(tensor: Any) -> str:
    return f"tensor of shape {list(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"


def _writeable(array: Any) -> Any:
    return array if array.flags.writeable else np.array(array)
