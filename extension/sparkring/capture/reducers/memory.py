"""Packs NumPy arrays and torch tensors so that those that share memory in the notebook also share it on the rank.

Pickle would write each array separately. If the memory of several arrays overlaps, this memory is written once, as a
block of bytes, and each of the arrays is written as a view of the block.
"""

from __future__ import annotations

import bisect
import pickle
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from sparkring.capture.reducers import torch
from sparkring.capture.reducers.base import ArrayLayout, Reduced

# Blocks start at multiples of this number, because torch needs offsets that are multiples of an element's size.
_ALIGNMENT = 16
# How many candidates NumPy tries when it searches for an element that two arrays share. If this number is not enough,
# the arrays are assumed to share an element.
_EFFORT = 10_000


class MemoryBlock:
    """The bytes between two addresses, in the memory of `owner`."""

    def __init__(self, start: int, end: int, owner: object) -> None:
        start = _aligned(start)
        self.start, self.end = start, end
        # The content is a NumPy array, because the garbage collector tracks memoryviews and ctypes arrays, and could
        # clear them while they are being read.
        self._content = _numpy().asarray(_Memory(ArrayLayout(start, 1, (end - start,), (1,)), "|u1", owner))

    def __contains__(self, layout: ArrayLayout) -> bool:
        start, end = layout.bounds
        return self.start <= start and end <= self.end

    def __reduce_ex__(self, protocol: object) -> Reduced:
        return _writable, (pickle.PickleBuffer(self._content),)


def _aligned(address: int) -> int:
    """Return the aligned start of a block. The bytes before `address` can be read: they are on the same memory page."""
    return address - address % _ALIGNMENT


def _writable(buffer: Any) -> Any:
    return bytearray(buffer) if memoryview(buffer).readonly else buffer


class _Array(NamedTuple):
    layout: ArrayLayout
    value: Any  # kept so that its memory is not used for another array before the search is done


class ArrayMemory:
    """The memory of all arrays that are packed together.

    reduce() packs an array that lies in one of `blocks` as a view of that block, and other arrays separately. When all
    arrays are packed, shared() returns blocks for the arrays that were packed separately although they share memory.
    The caller then packs everything again with these blocks.
    """

    def __init__(self, blocks: Sequence[MemoryBlock] = ()) -> None:
        self._blocks = blocks
        self._starts = [block.start for block in blocks]
        self._arrays: list[_Array] = []

    @staticmethod
    def is_array(cls: type) -> bool:
        return _numpy() is not None and (cls is _numpy().ndarray or cls in torch.tensor_types())

    def reduce(self, value: Any) -> Reduced | None:
        """Pack an array: as a view if it lies in a block, otherwise separately."""
        is_tensor = type(value) is not _numpy().ndarray
        layout = torch.layout(value) if is_tensor else _layout(value)
        if layout is None:
            return None
        at = bisect.bisect_right(self._starts, layout.bounds[0]) - 1
        if at >= 0 and layout in (block := self._blocks[at]):
            offset = layout.address - block.start
            if is_tensor:
                return torch.reduced(value, layout, block, offset)
            return _view, (block, offset, value.dtype, value.shape, value.strides, value.flags.writeable)
        self._arrays.append(_Array(layout, value))
        if not is_tensor:
            return None
        dense = value if layout.is_dense else value.detach().contiguous()
        layout = torch.layout(dense)
        assert layout is not None
        block = MemoryBlock(*layout.bounds, dense)
        return torch.reduced(value, layout, block, layout.address - block.start)

    def shared(self) -> tuple[MemoryBlock, ...]:
        """Return blocks, in the order of their addresses, for separately packed arrays that share memory."""
        ranges: list[tuple[int, int, object]] = []
        open_: list[_Array] = []  # earlier arrays that reach beyond the start of the current one
        for array in sorted(self._arrays, key=lambda array: array.layout.bounds):
            start, end = array.layout.bounds
            open_ = [before for before in open_ if before.layout.bounds[1] > start]
            for before in open_:
                if _shared(before.layout, array.layout):
                    first, last = before.layout.bounds
                    ranges.append((_aligned(first), max(last, end), (before.value, array.value)))
            open_.append(array)
        merged: list[tuple[int, int, tuple[object, ...]]] = []
        for start, end, owners in sorted(ranges, key=lambda span: span[:2]):
            if merged and start < merged[-1][1]:
                first, last, others = merged.pop()
                start, end, owners = first, max(last, end), (others, owners)
            merged.append((start, end, (owners,)))
        return tuple(MemoryBlock(*span) for span in merged)


def _shared(one: ArrayLayout, other: ArrayLayout) -> bool:
    """Return whether two arrays whose bounds overlap have an element in common."""
    if one.is_dense and other.is_dense:
        return True
    try:
        return bool(_numpy().shares_memory(_probe(one), _probe(other), max_work=_EFFORT))
    except RuntimeError:  # NumPy's TooHardError, which older versions have in another module
        return True


class _Memory:
    """Describes memory to NumPy, which then makes an array of it. `owner` keeps the memory alive."""

    def __init__(self, layout: ArrayLayout, typestr: str, owner: object = None) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "typestr": typestr,
            "data": (layout.address, False),
            "shape": layout.shape,
            "strides": layout.strides,
        }


def _probe(layout: ArrayLayout) -> Any:
    return _numpy().asarray(_Memory(layout, f"|V{layout.itemsize}"))


def _numpy() -> Any:
    """Return NumPy if it has been imported, otherwise None. Importing torch also imports NumPy."""
    return sys.modules.get("numpy")


def _layout(array: Any) -> ArrayLayout | None:
    """Return the layout of an array; None if the array holds objects or is empty."""
    if array.dtype.hasobject or array.size == 0:
        return None
    return ArrayLayout(array.__array_interface__["data"][0], array.itemsize, array.shape, array.strides)


def _view(
    block: Any, offset: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], writeable: bool
) -> Any:
    import numpy

    array: Any = numpy.ndarray(shape, dtype, block, offset, strides)
    array.flags.writeable = writeable
    return array
