"""Splits a state of dicts, lists, numbers, text and arrays into JSON and named arrays, and puts it together again.

Nothing here is pickled: checkpoints are in shared storage, and reading them must not run code.

Values that JSON lacks are written as JSON objects with one key. These are the only JSON objects:

    {"dict": {…}}        a dict whose keys are all strings    {"float": hex}   a float that is not finite: its 8 bytes
    {"items": [[k, v]]}  any other dict                       {"int": hex}     an int of more than 63 bits
    {"tuple": [...]}     a tuple                              {"array": name}  an array, or a tensor, by its name
    {"bytes": name}      bytes, as an array of them           {"scalar": name} a NumPy scalar, as an array of one
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkring.capture.picklability import type_name
from sparkring.errors import CheckpointError

DEPTH = 100  # the largest number of levels in a state; with many more, readers of JSON fail or crash
_JSON_BITS = 63  # the most bits of a whole number that other readers of JSON accept

Array = npt.NDArray[Any]


class NotYet(CheckpointError):
    """The state of an object cannot be read yet, but it can be once the object has been used."""


@dataclass(frozen=True, eq=False)
class Raw:
    """A tensor whose dtype NumPy lacks: torch's dtype name ("bfloat16"), its shape, and its bytes in C order."""

    dtype_name: str
    shape: tuple[int, ...]
    buffer: Any


Leaf = Array | Raw


def flatten(state: Any, called: str = "state") -> tuple[Any, dict[str, Leaf]]:
    """Split `state` into a skeleton of JSON values and its arrays. The arrays are not copied.

    Each array is named by its path in the state, for example "model/0.weight". Subclasses are not kept: for an instance
    of a subclass of dict, list, tuple, str, int or float, rebuild() returns an instance of the built-in class.

    Raises CheckpointError for a value that cannot be saved. The message has its path, which begins with `called`.
    """
    taking = _Taking(called)
    return taking.apart(state, ()), taking.leaves


def rebuild(skeleton: Any, leaves: dict[str, Leaf]) -> Any:
    """Return the tree that flatten() split.

    Raises CheckpointError if the skeleton contains something that this version of sparkring does not know.
    """
    try:
        return _together(skeleton, leaves)
    except (KeyError, ValueError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"the checkpoint contains something that this version of sparkring does not know ({error!r}): read it with "
            "the version that wrote it, or a newer one."
        ) from error


class _Taking:
    """A state that is being taken apart: the leaves so far, and the containers around the current value."""

    def __init__(self, called: str) -> None:
        self.called = called
        self.leaves: dict[str, Leaf] = {}
        self._within: set[int] = set()

    def apart(self, value: Any, path: tuple[Any, ...]) -> Any:
        # NumPy's scalars come first, because its float64 is also a float, and its str_ also a str.
        if isinstance(value, np.generic):
            return {"scalar": self._leaf(self._checked(np.asarray(value), path), path)}
        if value is None or isinstance(value, bool | str | int | float):
            return _plain(value)
        if isinstance(value, bytes):
            return {"bytes": self._leaf(np.frombuffer(value, np.uint8), path)}
        if isinstance(value, Raw):
            return {"array": self._leaf(value, path)}
        if type(value) in (np.ndarray, np.memmap):
            return {"array": self._leaf(self._checked(value, path), path)}
        if isinstance(value, dict | list | tuple):
            return self._container(value, path)
        raise CheckpointError(
            f"{self._place(path)} is a `{type_name(value)}`, but a checkpoint holds numbers, text, bytes, None, NumPy "
            "arrays, tensors, dicts, lists, tuples, dataclasses, and objects with state_dict() and load_state_dict(). "
            "Leave it out, or save its parts."
        )

    def _container(self, value: dict[Any, Any] | list[Any] | tuple[Any, ...], path: tuple[Any, ...]) -> Any:
        if id(value) in self._within:
            raise CheckpointError(f"{self._place(path)} contains itself, so a checkpoint cannot hold it: leave it out.")
        if len(path) >= DEPTH:
            raise CheckpointError(
                f"{self._place(path[:3])}… has more than {DEPTH} levels, the most that a checkpoint can have: flatten "
                "it."
            )
        self._within.add(id(value))
        try:
            if not isinstance(value, dict):
                items = [self.apart(item, (*path, index)) for index, item in enumerate(value)]
                return {"tuple": items} if isinstance(value, tuple) else items
            if all(isinstance(key, str) and not isinstance(key, np.generic) for key in value):
                return {"dict": {_plain(key): self.apart(item, (*path, key)) for key, item in value.items()}}
            return {"items": [[self._key(key, path), self.apart(item, (*path, key))] for key, item in value.items()]}
        finally:
            self._within.discard(id(value))

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(key, tuple):
            return {"tuple": [self._key(part, path) for part in key]}
        if key is None or (isinstance(key, bool | str | int | float) and not isinstance(key, np.generic)):
            return _plain(key)
        raise CheckpointError(
            f"{self._place(path)} has the key {key!r}, a `{type_name(key)}`: the keys of a checkpoint can be text, "
            "numbers, bools, None and tuples of these."
        )

    def _checked(self, array: Array, path: tuple[Any, ...]) -> Array:
        dtype = array.dtype
        if dtype.hasobject:
            raise CheckpointError(
                f"{self._place(path)} is an array of Python objects, which a checkpoint cannot hold: give it a dtype, "
                "or make it a list."
            )
        if dtype.isbuiltin == 2:  # another package's dtype, which cannot be restored from its name alone
            raise CheckpointError(
                f"{self._place(path)} is an array of {dtype}, which is not one of NumPy's own dtypes: save it as "
                "float32, for example."
            )
        return array

    def _leaf(self, leaf: Leaf, path: tuple[Any, ...]) -> str:
        # A name must be readable and unique, but keys may contain slashes, look the same, or not be valid Unicode.
        nice = "/".join(map(_text, path)).encode("utf-8", "replace").decode() or "value"
        name, count = nice, 1
        while name in self.leaves:
            count += 1
            name = f"{nice}~{count}"
        self.leaves[name] = leaf
        return name

    def _place(self, path: tuple[Any, ...]) -> str:
        return self.called + "".join(f"[{_text(part, repr)}]" for part in path)


def _text(key: Any, how: Callable[[Any], str] = str) -> str:
    try:
        return how(key)
    except ValueError:  # Python does not convert integers of more than 4,300 digits to text
        return "…"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        whole = int(value)
        return whole if whole.bit_length() <= _JSON_BITS else {"int": hex(whole)}
    real = float(value)
    return real if math.isfinite(real) else {"float": struct.pack(">d", real).hex()}


def _together(part: Any, leaves: dict[str, Leaf]) -> Any:
    if isinstance(part, list):
        return [_together(item, leaves) for item in part]
    if not isinstance(part, dict):
        return part
    ((kind, held),) = part.items()
    match kind:
        case "dict":
            return {key: _together(item, leaves) for key, item in held.items()}
        case "items":
            return {_together(key, leaves): _together(item, leaves) for key, item in held}
        case "tuple":
            return tuple(_together(item, leaves) for item in held)
        case "array":
            return leaves[held]
        case "scalar":
            scalar = leaves[held]
            return scalar[()] if isinstance(scalar, np.ndarray) else scalar
        case "bytes":
            array = leaves[held]
            return array.tobytes() if isinstance(array, np.ndarray) else array
        case "int":
            return int(held, 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(held))[0]
    raise ValueError(kind)
