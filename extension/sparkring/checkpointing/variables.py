"""Saves the variables of TensorFlow and Keras to a checkpoint's tree, and restores them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkring.checkpointing.tree import Raw
from sparkring.errors import CheckpointError


@dataclass(frozen=True)
class Variables:
    """How the properties and values of a framework's variables are read, and how values are assigned."""

    name: Callable[[Any], str]
    # A None in a shape stands for a dimension of any length. None instead of a shape stands for any shape.
    shape: Callable[[Any], Sequence[int | None] | None]
    dtype: Callable[[Any], str]
    leaf: Callable[[Any], Any]
    array: Callable[[Any], Any]

    def take(self, variables: Sequence[Any]) -> dict[str, Any]:
        """Return the names of `variables`, and their values as leaves."""
        return {"names": [self.name(variable) for variable in variables], "values": [self.leaf(v) for v in variables]}

    def by_name(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the values in `tree`, which take() returned, as a dict from variable names to arrays."""
        return {name: self.array(leaf) for name, leaf in zip(tree["names"], tree["values"], strict=True)}

    def put(self, variables: Sequence[Any], tree: dict[str, Any], path: str, owner: str, advice: str) -> None:
        """Assign the values in `tree`, which take() returned, to `variables`.

        `owner` is the name that messages use for the object with these variables. `advice` says what to do if the
        number of variables differs. Raises CheckpointError if the values do not fit.
        """
        names, values = tree["names"], tree["values"]
        if len(variables) != len(values):
            arrays = f"{len(values):,} array{'' if len(values) == 1 else 's'}"
            raise CheckpointError(
                f"{path}: the checkpoint has {arrays} for {owner}, which here has {len(variables):,}. {advice}."
            )
        here = [self.name(variable) for variable in variables]
        if len(set(here)) == len(here) and set(here) == set(names):
            # Match by name where possible: the order of variables depends on which layers are trainable.
            known = dict(zip(names, values, strict=True))
            values = [known[name] for name in here]
        self.assign(zip(variables, values, strict=True), path, owner)

    def assign(self, pairs: Iterable[tuple[Any, Any]], path: str, owner: str) -> None:
        """Assign leaves to the variables of `owner`. If a leaf does not fit, assign none, and raise CheckpointError."""
        ready = [(variable, self.array(leaf)) for variable, leaf in pairs]
        for variable, array in ready:
            shape, dtype = self.shape(variable), self.dtype(variable)
            if not _fits(shape, array.shape) or dtype != array.dtype.name:
                raise CheckpointError(
                    f"{path}: `{self.name(variable)}` of {owner} has the shape {shape and list(shape)} and the dtype "
                    f"{dtype}, but in the checkpoint it has {list(array.shape)} and {array.dtype.name}. Make it the "
                    "same as when it was saved, or start over with --fresh."
                )
        for variable, array in ready:
            variable.assign(array)


def optimizer_advice(trainable: Sequence[Any] | None, build: str = "build") -> str:
    """Return the advice to show when an optimizer's variables do not fit.

    `trainable` is None for an optimizer without a model. `build` is the name of the method that builds the optimizer.
    """
    if trainable is None:
        return (
            f"Call optimizer.{build}(variables) with the trained variables before restore(), or use the same optimizer"
        )
    return "Use the same optimizer with the same trainable layers, or start over with --fresh"


def check_compiled(tree: dict[str, Any], path: str) -> None:
    """Raise CheckpointError if the model in `tree` was saved without an optimizer."""
    if tree["optimizer"] is None:
        raise CheckpointError(
            f"{path}: the model is compiled, but was not when it was saved, so the checkpoint has no state for its "
            "optimizer. Compile it after restore(), or start over with --fresh."
        )


def _fits(shape: Sequence[int | None] | None, saved_shape: tuple[int, ...]) -> bool:
    return shape is None or (
        len(shape) == len(saved_shape)
        and all(here in (None, length) for here, length in zip(shape, saved_shape, strict=True))
    )


def raw_or_array(array: Any) -> Any:
    """Return the leaf for an array: a Raw if NumPy itself lacks the dtype (such as bfloat16), otherwise the array."""
    if array.dtype.kind == "V":
        return Raw(array.dtype.name, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return array
