"""What reducers share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

# What `object.__reduce_ex__` returns.
Reduced: TypeAlias = tuple[Any, ...]
# Returns None to leave a value to pickle.
Reducer: TypeAlias = Callable[[Any], Reduced | None]


class Layout(NamedTuple):
    """The memory layout of an array: the address of its first element, and strides in bytes."""

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bounds(self) -> tuple[int, int]:
        """The addresses of the first byte and of the one after the last. The array must not be empty."""
        reach = [(length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)]
        start = self.address + sum(step for step in reach if step < 0)
        return start, self.address + sum(step for step in reach if step > 0) + self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether every byte between the bounds belongs to one element."""
        start, end = self.bounds
        return end - start == self.itemsize * math.prod(self.shape)
