"""Reducers for torch's tensors (with their gradients), for parametrized modules, for DataLoaders whose workers have
started, and for the results of `torch.compile` and `torch.jit`.

Only functions that run on ranks import torch: a driver that has one of torch's objects has already imported torch.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from sparkring.capture.picklability import Kind, Refused
from sparkring.capture.reducers.base import WRAPPED, ArrayLayout, Reduced, Reducer

_DATA_LOADER = ("torch.utils.data.dataloader", "DataLoader")
_COMPILED = Kind(
    "compiled by torch.compile in a way that cannot be repeated",
    "pass the original, and call `torch.compile` in the cell",
)


def reducer_for(cls: type) -> Reducer | None:
    """Return the reducer for the values of a type, if it needs one. Plain tensors are left to ArrayMemory.reduce()."""
    if "torch" not in sys.modules:
        return None
    if cls is types.FunctionType:
        return _compiled_function
    names = {(base.__module__, base.__name__) for base in cls.__mro__}
    if ("torch._dynamo.eval_frame", "OptimizedModule") in names:
        return _compiled_module
    if not names.isdisjoint({("torch.jit._script", "RecursiveScriptModule"), ("torch.jit", "ScriptFunction")}):
        return _scripted
    if any(module == "horovod.torch.optimizer" for module, _ in names):
        return _wrapped
    if (cls.__module__, cls.__name__[:12]) == ("torch.nn.utils.parametrize", "Parametrized"):
        return _parametrized
    return _data_loader if _DATA_LOADER in names else None


def _wrapped(optimizer: Any) -> Reduced:
    # Only a part of its state is packed, and step() would then fail on the rank.
    raise Refused(WRAPPED)


# ── Tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def tensor_types() -> tuple[type, ...]:
    """Return the types of plain tensors; none if torch has not been imported."""
    nn: Any = sys.modules.get("torch.nn")
    return (sys.modules["torch"].Tensor, nn.Parameter) if hasattr(nn, "Parameter") else ()


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor; not if torch has not been imported."""
    return isinstance(value, tensor_types())


def layout(tensor: Any) -> ArrayLayout | None:
    """Return the layout of a plain tensor in this machine's memory; None for tensors that torch packs itself."""
    torch = sys.modules["torch"]
    if (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._backward_hooks
        or tensor.numel() == 0
        or tensor.data_ptr() == 0
    ):
        return None
    size = tensor.element_size()
    return ArrayLayout(tensor.data_ptr(), size, tuple(tensor.shape), tuple(step * size for step in tensor.stride()))


def reduced(tensor: Any, layout: ArrayLayout, block: object, offset: int) -> Reduced:
    """Pack a tensor as a view of a block of bytes, with its gradient and its added attributes."""
    strides = tuple(step // layout.itemsize for step in layout.strides)
    is_parameter = type(tensor) is not sys.modules["torch"].Tensor
    arguments = (block, offset, tensor.dtype, layout.shape, strides, tensor.requires_grad, is_parameter)
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is None and not vars(tensor):
        return _view, arguments
    return _view, arguments, (gradient, vars(tensor)), None, None, _complete


def _view(
    block: Any,
    offset: int,
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    import torch

    storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    tensor = torch.empty(0, dtype=dtype)
    tensor = tensor.set_(storage, offset // tensor.element_size(), shape, strides)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _complete(tensor: Any, state: tuple[Any, dict[str, Any]]) -> None:
    gradient, attributes = state
    tensor.grad = gradient
    vars(tensor).update(attributes)


def attributes(tensor: Any) -> list[tuple[str, Any]]:
    """Return what a tensor consists of besides its numbers."""
    gradient = [("grad", tensor.grad)] if tensor.is_leaf and tensor.grad is not None else []
    return [("requires_grad", tensor.requires_grad), *gradient, *vars(tensor).items()]


def content(tensor: Any) -> Any:
    """Return a digest of a tensor's numbers, to be compared with that of another time."""
    torch = sys.modules["torch"]
    parts = (str(tensor.dtype), tuple(tensor.shape))
    try:
        # As bytes, because NumPy lacks some of torch's types. The version would not tell of changes through `.data`.
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError):  # for example a sparse tensor, or one in a GPU's memory
        return (*parts, id(tensor), tensor._version)
    return (*parts, zlib.crc32(raw))


# ── Parametrized modules and DataLoaders ─────────────────────────────────────────────────────────────────────────────


def _parametrized(module: Any) -> Reduced:
    """Pack a module to which parametrizations, such as `weight_norm`, have given a class of its own."""
    cls: Any = type(module).__base__
    state = cls.__getstate__(module) if hasattr(cls, "__getstate__") else vars(module)
    return _bare, (cls,), state, None, None, _parametrize


def _bare(cls: Any) -> Any:
    return cls.__new__(cls)  # not copyreg.__newobj__: pickle would require that `cls` is the class of the value


def _parametrize(module: Any, state: Any) -> None:
    from torch.nn.utils import parametrize

    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


def transient(cls: type) -> frozenset[str]:
    """Return the names of attributes that are not packed, since they belong to this process."""
    is_loader = any((base.__module__, base.__name__) == _DATA_LOADER for base in cls.__mro__)
    return frozenset(("_iterator",) if is_loader else ())


def _data_loader(loader: Any) -> Reduced | None:
    """Pack a DataLoader without its persistent workers; its next iterator starts new ones."""
    if getattr(loader, "_iterator", None) is None:
        return None
    made, arguments, state, *more = loader.__reduce_ex__(5)
    return made, arguments, {**state, "_iterator": None}, *more


# ── torch.compile and torch.jit ──────────────────────────────────────────────────────────────────────────────────────


def _compiled_function(function: types.FunctionType) -> Reduced | None:
    """Pack the original of a compiled function, for the rank to compile again; return None for other functions."""
    attributes = vars(function)
    original = attributes.get("_torchdynamo_orig_callable")
    if original is None:
        return None
    if attributes.get("_torchdynamo_disable"):
        return _uncompiled, (original,)
    cells = getattr(attributes.get("get_compiler_config"), "__closure__", None) or ()
    context = next((cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "callback")), None)
    return _compiled, (original, _options(context))


def _compiled_module(module: Any) -> Reduced:
    return _compiled, (module._orig_mod, _options(module.dynamo_ctx))


def _options(context: Any) -> dict[str, Any]:
    """Return the arguments of the `torch.compile` call that made `context`."""
    try:
        from torch._dynamo.eval_frame import innermost_backend

        backend = innermost_backend(context.callback)
        options = {"fullgraph": context.fullgraph, "dynamic": context._dynamic}
        if hasattr(backend, "compiler_fn"):  # every backend except inductor has this attribute
            return {**options, "backend": backend.compiler_fn, **backend.kwargs}
        return {**options, "options": dict(backend.config)}
    except (ImportError, AttributeError) as error:  # this version of torch keeps the arguments elsewhere
        raise Refused(_COMPILED) from error


def _compiled(original: Any, options: dict[str, Any]) -> Any:
    import torch

    return torch.compile(original, **options)


def _uncompiled(original: Any) -> Any:
    import torch

    return torch.compiler.disable(original)


def _scripted(value: Any) -> Reduced:
    buffer = io.BytesIO()
    with _without_advice():
        sys.modules["torch"].jit.save(value, buffer)
    return _script, (buffer.getvalue(),)


def _script(saved: bytes) -> Any:
    import torch

    with _without_advice():
        return torch.jit.load(io.BytesIO(saved), map_location="cpu")


def _files(saved: bytes) -> list[Any]:
    """Return the files of a saved script, without the positions of its code in cells and the counters in its names."""
    import zipfile  # only here: every rank imports this module, and zipfile is rarely needed

    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        names = [name for name in archive.namelist() if not name.endswith((".debug_pkl", ".data/serialization_id"))]
        return [re.sub(rb"[./]___torch_mangle_\d+", b"", part) for name in names
                for part in (name.encode(), archive.read(name))]  # fmt: skip


COMPARABLE: dict[Any, Callable[..., Any]] = {_script: _files}


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Hide torch.jit's deprecation warning, which the user's own call has already shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
