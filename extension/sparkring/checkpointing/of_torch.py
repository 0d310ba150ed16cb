"""What a checkpoint takes of torch's tensors, and gives back to them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sparkring.checkpointing.tree import Raw
from sparkring.errors import CheckpointError


def is_tensor(value: Any) -> bool:
    """Is it one of torch's tensors?"""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def leaf(tensor: Any, path: str) -> Any:
    """Its values, in its own memory if that is the CPU's; Raw where NumPy lacks its dtype.

    CheckpointError, with the path, for a tensor that cannot be kept.
    """
    import torch

    if _spread(tensor):
        raise CheckpointError(_spread_words(path))
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else tensor.device if tensor.is_meta else tensor.layout
        raise CheckpointError(
            f"{path} is a tensor of a kind that a checkpoint cannot hold ({kind}): keep a dense one, as to_dense() "
            "or dequantize() gives it, or leave it out."
        )
    here = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return here.numpy()
    except TypeError:  # bfloat16 and the small floats
        name = str(here.dtype).removeprefix("torch.")
        return Raw(name, tuple(here.shape), here.contiguous().reshape(-1).view(torch.uint8).numpy())


def tensor(found: Any) -> Any:
    """The tensor of a leaf. It shares the leaf's memory, unless that may not be written to."""
    import torch

    if isinstance(found, Raw):
        data = np.frombuffer(found.buffer, np.uint8)
        return torch.from_numpy(_writeable(data)).view(getattr(torch, found.dtype_name)).reshape(found.shape)
    return torch.from_numpy(_writeable(np.asarray(found)))


def put(value: Any, found: Any, path: str) -> Any:
    """Copy a leaf into a tensor, whatever device that is on; what stands in its place where it does not fit."""
    import torch

    saved = tensor(found)
    if saved.shape == value.shape and saved.dtype == value.dtype:
        with torch.no_grad():
            value.copy_(saved)
        return value
    if isinstance(value, torch.nn.Parameter):
        raise CheckpointError(
            f"{path}: the checkpoint has a {_words(saved)}, here is a {_words(value)}. Make it as it was when it was "
            "saved, or begin anew."
        )
    return saved.to(value.device)


def refuse_spread(value: Any, path: str) -> None:
    """CheckpointError for a module whose parts lie with several ranks: one that asks for its state waits for all."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if isinstance(value, torch.nn.Module):
        wrapped = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
        if any(isinstance(module, wrapped) for module in value.modules()) or any(map(_spread, value.parameters())):
            raise CheckpointError(_spread_words(path))


def _spread(tensor: Any) -> bool:
    distributed = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(tensor, distributed)


def _spread_words(path: str) -> str:
    return (
        f"{path} is spread over the ranks (FSDP): gather it on every rank first, with get_model_state_dict(…, "
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) from "
        "torch.distributed.checkpoint.state_dict, and keep what that gives."
    )


def _words(tensor: Any) -> str:
    return f"tensor of shape {list(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"


def _writeable(array: Any) -> Any:
    return array if array.flags.writeable else np.array(array)
