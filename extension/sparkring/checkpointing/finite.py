"""Finds NaN and infinity in what a checkpoint saves, while its file is written.

What counts are the arrays of the models and optimizers in a state or, if it has none, all its arrays (NumPy, and
single tensors). Infinity counts only in a torch model's parameters, in a Keras model's variables and in the state of an
optimizer: elsewhere, it may be meant, for example as -inf in a buffer with an attention mask. Numbers never count,
since a best value so far may begin with infinity.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from sparkring.checkpointing import parts, torch_state
from sparkring.checkpointing.tensors import CHUNK_BYTES, FileLayout
from sparkring.checkpointing.tree import Leaf, Raw

# For each floating dtype of safetensors: unsigned integers of the same size, and the bits of infinity. Without its
# sign, a value with larger bits is NaN. Integers are compared, because NumPy is slow with floats of 16 bits.
_BITS = {"F64": ("u8", 0x7FF << 52), "F32": ("u4", 0xFF << 23), "F16": ("u2", 0x1F << 10), "BF16": ("u2", 0xFF << 7)}
_OBJECTS = {"keras", "keras 3", "optimizer", "keras 3 optimizer", "module"}  # kinds of TensorFlow's and Keras' objects


class Watched(NamedTuple):
    """An array that is checked: its name for the user, and whether infinity counts in it."""

    name: str
    infinity: bool


def watched(state: Any, tree: Any, leaves: Mapping[str, Leaf]) -> dict[str, Watched]:
    """Return the arrays to check, by their names in `leaves`. `tree` is the tree of `state`."""
    pairs = list(_arrays(state, tree, ()))
    of_objects = [(array, watch) for array, watch, is_object in pairs if is_object]
    chosen = {id(array): watch for array, watch in of_objects or (pair[:2] for pair in pairs)}
    return {name: chosen[id(leaf)] for name, leaf in leaves.items() if id(leaf) in chosen}


class Check:
    """Passes on the bytes of a file's arrays, and notes in `words` the first that is not finite, as in `NaN in w`."""

    def __init__(self, layout: FileLayout, watch: Mapping[str, Watched]) -> None:
        self.words = ""
        self._layout, self._watch = layout, watch

    def pieces(self, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the bytes of `buffers` in pieces, each of which is checked while a core's cache has it."""
        source = iter(buffers)
        room = memoryview(b"")
        for info in self._layout.arrays:
            left = info.stop - info.start
            while left:
                room = room or next(source)
                piece, room = room[: min(left, CHUNK_BYTES)], room[min(left, CHUNK_BYTES) :]
                left -= len(piece)
                watch = self._watch.get(info.name)
                if watch is not None and not self.words and info.code in _BITS:
                    self.words = _words(piece, info.code, watch)
                yield piece


def _words(piece: memoryview, code: str, watch: Watched) -> str:
    dtype, infinity = _BITS[code]
    numbers = np.frombuffer(piece, dtype)
    largest = int((numbers & (np.iinfo(numbers.dtype).max >> 1)).max())
    if largest > infinity:
        return f"NaN in {watch.name}"
    return f"infinity in {watch.name}" if largest == infinity and watch.infinity else ""


def _arrays(value: Any, tree: Any, path: tuple[str, ...]) -> Iterator[tuple[Leaf, Watched, bool]]:
    """Yield the arrays of a tree, and whether they belong to a model or an optimizer."""
    kind = tree.get(parts.MARK, "") if isinstance(tree, dict) else ""
    if kind in _OBJECTS:
        yield from _of_object(tree, path, infinity=True)
    elif kind == "state_dict" and torch_state.is_module(value):
        # With the same name, a shared parameter appears once only, but state_dict() has all its names.
        parameters = {name for name, _ in value.named_parameters(remove_duplicate=False)}
        for name, item in tree["value"].items():
            yield from _of_object(item, (*path, name), infinity=name in parameters)
    elif kind == "state_dict" and isinstance(value, _optimizer_class()):
        yield from _of_object(tree["value"], path, infinity=True)
    elif kind == "dataclass":
        for name, item in tree["value"].items():
            yield from _arrays(getattr(value, name, None), item, (*path, name))
    elif kind and kind != "random":
        yield from ((array, watch, False) for array, watch, _ in _of_object(tree["value"], path, infinity=False))
    elif isinstance(tree, dict) and isinstance(value, dict) and not kind:
        for name, item in tree.items():
            yield from _arrays(value.get(name), item, (*path, str(name)))
    elif isinstance(tree, list | tuple) and isinstance(value, list | tuple):
        for index, (one, item) in enumerate(zip(value, tree, strict=False)):
            yield from _arrays(one, item, (*path, str(index)))
    elif _is_array(tree):
        yield tree, Watched("/".join(path), infinity=False), False


def _of_object(tree: Any, path: tuple[str, ...], *, infinity: bool) -> Iterator[tuple[Leaf, Watched, bool]]:
    """Yield the arrays of the tree of one object. Arrays with a single number count only if infinity does."""
    if isinstance(tree, dict):
        if "names" in tree and "values" in tree:  # what Variables.take() returns
            variables = dict(zip(tree["names"], tree["values"], strict=True))
            tree = {**tree, "values": variables, "names": ()}
        for name, item in tree.items():
            inner = path if name in ("value", "values") else (*path, str(name))
            yield from _of_object(item, inner, infinity=infinity)
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from _of_object(item, (*path, str(index)), infinity=infinity)
    elif _is_array(tree) or (infinity and isinstance(tree, np.ndarray)):
        yield tree, Watched("/".join(path), infinity), True


def _is_array(tree: Any) -> bool:
    return isinstance(tree, Raw) or (isinstance(tree, np.ndarray) and tree.ndim > 0)


def _optimizer_class() -> Any:
    torch = sys.modules.get("torch")
    return () if torch is None else torch.optim.Optimizer
