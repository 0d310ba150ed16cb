"""The types that the modules of reducers share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from sparkring.capture.picklability import Kind

# How to rebuild a value, in the form that `object.__reduce_ex__` returns.
Reduced: TypeAlias = tuple[Any, ...]
# A reducer returns None if pickle should pack the value.
Reducer: TypeAlias = Callable[[Any], Reduced | None]

WRAPPED = Kind("an optimizer that Horovod has wrapped", "pass the optimizer, and wrap it in the cell")


class ArrayLayout(NamedTuple):
    """The memory layout of an array: the address of its first element, and strides in bytes."""

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the address of the first byte and the address after the last byte. The array must not be empty."""
        reach = [(length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)]
        start = self.address + sum(step for step in reach if step < 0)
        return start, self.address + sum(step for step in reach if step > 0) + self.itemsize

    @property
    def is_dense(self) -> bool:
        """Return whether every byte between the bounds belongs to exactly one element."""
        start, end = self.bounds
        return end - start == self.itemsize * math.prod(self.shape)
