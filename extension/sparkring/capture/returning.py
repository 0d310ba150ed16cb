"""Packs the values that a rank returns, and rebuilds them in the notebook.

Wrappers that work only on a rank, such as DistributedDataParallel, are left out: the notebook gets what they wrap.
Keras' objects are packed as they are on the way to the ranks.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import cloudpickle

from sparkring.capture import sharded
from sparkring.capture.picklability import Kind, Refused
from sparkring.capture.reducers import standard, tensorflow, torch
from sparkring.capture.reducers.base import Reduced, Reducer

Buffer: TypeAlias = bytes | bytearray | memoryview

# What to return in place of a wrapper: the attribute with the wrapped object. A key is a top-level package and a class.
_WRAPPED = {
    ("torch", "DistributedDataParallel"): "module",
    ("torch", "DataParallel"): "module",
    ("torch", "OptimizedModule"): "_orig_mod",
    ("apex", "DistributedDataParallel"): "module",
    ("accelerate", "AcceleratedOptimizer"): "optimizer",
    ("accelerate", "AcceleratedScheduler"): "scheduler",
    ("lightning", "_FabricModule"): "module",
    ("lightning", "_FabricOptimizer"): "optimizer",
    ("lightning_fabric", "_FabricModule"): "module",
    ("lightning_fabric", "_FabricOptimizer"): "optimizer",
}
# What connects the ranks: the notebook gets None.
_CONNECTIONS = {("torch", "ProcessGroup"), ("torch", "DeviceMesh")}
_PARTIAL = Kind(
    "a ZeroRedundancyOptimizer, of whose state each rank has only a part",
    "call its consolidate_state_dict() in the cell, and return its state_dict()",
)
_DEPTH, _WIDTH = 4, 1_000  # how far salvaged() looks into an object


class ReturnedValue(NamedTuple):
    """A packed value: the pickle and its buffers. `without` names the wrappers that were left out.

    `shards` are this rank's shards of the sharded tensors in the value.
    """

    parts: Sequence[Buffer]
    without: tuple[str, ...] = ()
    shards: tuple[sharded.TensorShard, ...] = ()


def pack_value(value: Any) -> ReturnedValue:
    """Pack a value for the notebook. Raises any error, because packing calls the objects' own code."""
    pickler = _ReturnPickler()
    pickler.dump(value)
    return ReturnedValue(pickler.parts(), tuple(pickler.without), tuple(pickler.shards.values()))


def in_words(error: Exception) -> str:
    """Say why a value could not be packed."""
    if isinstance(error, Refused):
        return f"it contains {error.kind.noun}; {error.kind.advice}"
    return f"{type(error).__name__}: {error}"


class _ReturnPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """With `lone`, the shards of the other ranks are lost, so each sharded tensor is packed as this rank's shard."""

    def __init__(self, *, lone: bool = False) -> None:
        self._stream = io.BytesIO()
        self._buffers: list[pickle.PickleBuffer] = []
        super().__init__(self._stream, protocol=5, buffer_callback=self._buffers.append)
        self.without: dict[str, None] = {}
        self.shards: dict[int, sharded.TensorShard] = {}
        self._lone = lone
        self._reducers: dict[type, tuple[Reducer, ...]] = {}
        self._flat: dict[int, dict[str, sharded.TensorShard]] = {}  # see sharded.flat_shards()

    def parts(self) -> list[Buffer]:
        buffers: list[Any] = [buffer.raw() for buffer in self._buffers]
        return [self._stream.getvalue(), *buffers]

    def reducer_override(self, value: Any) -> Any:
        cls = type(value)
        if cls not in self._reducers:
            self._reducers[cls] = tuple(self._reducers_of(cls))
        for reducer in self._reducers[cls]:
            if (reduced := reducer(value)) is not None:
                return reduced
        return super().reducer_override(value)

    def _reducers_of(self, cls: type) -> Iterable[Reducer]:
        if cls is types.MethodType:
            yield _method
        names = _names(cls)
        wrapped = _inner_attribute(cls)
        if wrapped is not None:
            yield lambda value: self._leave_out(value, getattr(value, wrapped))
        if not _CONNECTIONS.isdisjoint(names):
            yield lambda value: self._leave_out(value, None)
        if ("accelerate", "GradientState") in names:
            yield _gradient_state
        if ("torch", "ZeroRedundancyOptimizer") in names:
            yield _refuse_partial
        if any(root == "horovod" for root, _ in names) and ("torch", "Optimizer") in names:
            yield self._horovod_optimizer
        elif ("horovod", cls.__name__) in names and any(root in ("keras", "tf_keras") for root, _ in names):
            yield self._horovod_keras_optimizer
        if ("torch", "FullyShardedDataParallel") in names:
            yield self._fsdp
        if cls is sharded.TensorShard:
            yield self._shard
        if ("torch", "DTensor") in names:
            yield self._sharded
        elif ("torch", "Parameter") in names:
            yield sharded.refuse_flat
        if ("torch", "Module") in names:
            yield self._module
        yield from (reducer for module in (torch, tensorflow, standard) if (reducer := module.reducer_for(cls)))

    def _leave_out(self, wrapper: Any, inner: Any) -> Reduced:
        self.without[type(wrapper).__name__] = None
        return _itself, (inner,)

    def _horovod_optimizer(self, optimizer: Any) -> Reduced:
        bare = self._without_horovod(optimizer)
        state = {name: getattr(optimizer, name) for name in ("defaults", "state", "param_groups")}
        return _new, (bare,), state

    def _horovod_keras_optimizer(self, optimizer: Any) -> Reduced:
        self._without_horovod(optimizer)
        return tensorflow.bare_optimizer(optimizer)

    def _without_horovod(self, optimizer: Any) -> type:
        self.without["DistributedOptimizer"] = None
        return next(base for base in type(optimizer).__mro__ if not base.__module__.startswith("horovod."))

    # ── torch's modules ───────────────────────────────────────────────────────

    def _fsdp(self, wrapper: Any) -> Reduced:
        for module, shards in sharded.flat_shards(wrapper).items():
            self._flat.setdefault(module, {}).update(shards)
        return self._leave_out(wrapper, wrapper.module)

    def _shard(self, shard: sharded.TensorShard) -> Reduced:
        # Shards that belong together have the same number on all ranks, because the ranks pack equal objects.
        self.shards[len(self.shards)] = shard
        if self._lone:
            return _itself, (shard.values,)
        return _joined_shard, (len(self.shards) - 1,)

    def _sharded(self, tensor: Any) -> Reduced:
        self.without["FSDP"] = None
        return self._shard(sharded.shard_of(tensor))

    def _module(self, module: Any) -> Reduced | None:
        """Pack a module without what fully_shard(), FullyShardedDataParallel and Accelerate have added to it."""
        attributes, flat, cls = vars(module), self._flat.get(id(module)), type(module)
        bases = [base.__name__ for base in cls.__bases__]
        is_fully_sharded = "FSDPModule" in bases and len(bases) > 1
        is_sharded = flat is not None or is_fully_sharded or sharded.has_shards(module)
        if not is_sharded and "_original_forward" not in attributes:
            return None
        if is_fully_sharded:
            module.reshard()  # otherwise, its parameters may be copies with less precision, made for the last forward()
        made, arguments, state, *more = module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(state, dict):
            return None
        if "_original_forward" in state:  # Accelerate's automatic mixed precision
            self.without["Accelerate's forward()"] = None
            state = {name: value for name, value in state.items() if name not in ("forward", "_original_forward")}
        if is_sharded:
            state = sharded.bare_state(state, flat or {})
        if is_fully_sharded:
            # Not with pickle's own function, because pickle checks that it makes an object of the class of `module`.
            made, arguments = _new, (cls.__bases__[1],)
        return made, arguments, state, *more


def _refuse_partial(value: Any) -> Reduced:
    raise Refused(_PARTIAL)


def _gradient_state(state: Any) -> Reduced:
    """Pack what Accelerate knows about gradient accumulation, without its weak references to DataLoaders."""
    return _new, (type(state),), {**vars(state), "_dataloader_references_ref": [None]}


def _names(cls: type) -> list[tuple[str, str]]:
    return [(str(base.__module__).partition(".")[0], base.__name__) for base in cls.__mro__]


def _inner_attribute(cls: type) -> str | None:
    return next((_WRAPPED[name] for name in _names(cls) if name in _WRAPPED), None)


def _method(method: types.MethodType) -> Reduced | None:
    """Pack a method of a wrapper as the method with this name of what it wraps; return None for other methods."""
    is_of_wrapper = _inner_attribute(type(method.__self__)) is not None
    return (getattr, (method.__self__, method.__func__.__name__)) if is_of_wrapper else None


def _itself(value: Any) -> Any:
    return value


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def _joined_shard(number: int) -> Any:
    raise ValueError("it has sharded tensors, which only a run's result can join")


# ── what cannot be packed ─────────────────────────────────────────────────────


class Salvaged(NamedTuple):
    """What could be packed of a value that cannot be packed as a whole. `left_out` are the paths of the rest."""

    parts: Sequence[Buffer]
    is_state_dict: bool
    left_out: tuple[str, ...]


def salvaged(value: Any) -> Salvaged | None:
    """Pack what can be packed of a value: the state_dict() of a torch module, the items or attributes of others.

    Return None if nothing can be packed.
    """
    left_out: list[str] = []
    kept = _packable(value, "", left_out, 0)
    if kept is _NOTHING:
        return None
    pickler = _ReturnPickler(lone=True)
    pickler.dump(kept)
    left_out += [_OTHERS] if pickler.shards else []
    return Salvaged(pickler.parts(), _is_module(value) and not left_out, tuple(left_out))


_NOTHING = object()
_OTHERS = "the other ranks' shards"


def _packable(value: Any, path: str, left_out: list[str], depth: int) -> Any:
    try:
        pack_value(value)
    except Exception:  # packing calls the objects' own code, which may raise anything
        inner = _inside(value) if depth < _DEPTH else {}
    else:
        return value
    kept = {}
    for key, (label, item) in inner.items():
        part = _packable(item, path + label, left_out, depth + 1)
        if part is not _NOTHING:
            kept[key] = part
    if not kept:
        del left_out[len(left_out) - len(inner) :]  # it is enough to name the whole
        left_out.append(path)
    return kept or _NOTHING


def _inside(value: Any) -> dict[Any, tuple[str, Any]]:
    """Return the parts of a value by their keys, each with its label."""
    try:
        if _is_module(value):
            module = _bare(value)
            # The state_dict() of a FullyShardedDataParallel is a collective, and this rank may be the only one here.
            flat = any(type(submodule).__name__ == "FullyShardedDataParallel" for submodule in module.modules())
            items = sharded.local_parameters(module) if flat else module.state_dict()
            return {key: (f"[{key!r}]", item) for key, item in items.items()}
        if isinstance(value, Mapping):
            return {key: (f"[{key!r}]", item) for key, item in itertools.islice(value.items(), _WIDTH)}
        if isinstance(value, list | tuple):
            return {index: (f"[{index}]", item) for index, item in enumerate(value[:_WIDTH])}
        names = [*getattr(value, "__dict__", ()), *copyreg._slotnames(type(value))]  # type: ignore[attr-defined]
        return {name: (f".{name}", getattr(value, name)) for name in names if hasattr(value, name)}
    except Exception:  # state_dict(), and the attributes of a user's class, may raise anything
        return {}


def _is_module(value: Any) -> bool:
    nn = sys.modules.get("torch.nn")
    return isinstance(value, getattr(nn, "Module", ()))


def _bare(value: Any) -> Any:
    """Return what a wrapper wraps, or the value itself."""
    while (inner := _inner_attribute(type(value))) is not None:
        value = getattr(value, inner)
    return value


# ── in the notebook ───────────────────────────────────────────────────────────


class Rebuilt(NamedTuple):
    """A value in the notebook. If tensors that were on a GPU are on the CPU now, `was_on` is that GPU, as `cuda:0`."""

    value: Any
    was_on: str = ""


def unpack_value(
    payload: Buffer, buffers: Iterable[Buffer] = (), shards: Sequence[Sequence[sharded.TensorShard]] = ()
) -> Rebuilt:
    """Rebuild a value. `shards` has the shards of its tensors, from each rank. Raises any error of the objects' code.

    Unpickling is safe only if the sender is as trusted as this process.
    """
    unpickler = _ReturnUnpickler(payload, buffers, shards)
    value = unpickler.load()
    return Rebuilt(value, unpickler.was_on)


class _ReturnUnpickler(pickle.Unpickler):
    def __init__(
        self, payload: Buffer, buffers: Iterable[Buffer], shards: Sequence[Sequence[sharded.TensorShard]]
    ) -> None:
        super().__init__(io.BytesIO(payload), buffers=buffers)
        self._shards = shards
        self.was_on = ""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return self._storage
        if (module, name) == (__name__, _joined_shard.__name__):
            return lambda number: sharded.joined([of_rank[number] for of_rank in self._shards])
        return super().find_class(module, name)

    def _storage(self, saved: bytes) -> Any:
        """Load a tensor's memory. If this machine lacks the GPU on which it was, load it into the CPU's memory."""
        import torch

        def place(storage: Any, location: str) -> Any:
            kind, _, number = location.partition(":")
            if kind != "cuda" or int(number or 0) < torch.cuda.device_count():
                return None  # where it was
            self.was_on = location
            return storage

        return torch.load(io.BytesIO(saved), map_location=place, weights_only=False)
