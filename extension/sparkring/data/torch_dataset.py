"""A shard as a torch DataLoader."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkring.data.tensors import as_int64, check_values
from sparkring.errors import DataError

if TYPE_CHECKING:
    from sparkring.data.shards import Shards


def as_torch(data: Shards, names: Sequence[str], workers: int) -> Any:
    """Implement Shards.as_torch()."""
    import torch

    if workers < 0:
        raise DataError(
            f"workers={workers}: expected a number of processes, at least 0; with 0, the rank itself reads the rows."
        )
    wanted, take = data.tensors(names), data.taking(names)
    size = data.batch_size

    def tensors(batch: dict[str, Any]) -> dict[str, Any]:
        return {name: _tensor(name, batch[name]) for name in wanted}

    class Reader(torch.utils.data.IterableDataset):  # type: ignore[misc]
        """The batches of an epoch; in a worker, every n-th chunk. The loader takes a chunk from each worker in turn."""

        def __len__(self) -> int:
            return len(data)

        def __iter__(self) -> Iterator[Any]:
            here = torch.utils.data.get_worker_info()
            if here is None:
                return (take(tensors(batch)) for batch in data.batches())
            gc.freeze()  # so that the worker does not finalise what it inherited, such as a connection to Spark
            chunks = data.read(here.id, here.num_workers, whole=True)
            return (replace(chunk, data=tensors(chunk.data)) for chunk in chunks)

    class Loader(torch.utils.data.DataLoader):  # type: ignore[misc]
        """Cuts the workers' chunks into batches. This is done in the process that uses the batches."""

        def __iter__(self) -> Iterator[Any]:
            read = super().__iter__()
            return map(take, data.handed_out(_timed(read), cut)) if workers else read

    def cut(tensors: dict[str, Any], begin: int) -> dict[str, Any]:
        return {name: tensor[begin : begin + size] for name, tensor in tensors.items()}

    # For each iterator, torch draws a seed for the workers. It draws the seed from a separate generator: the
    # training's generator is restored from checkpoints, and its state must not depend on how often an epoch was begun.
    own = torch.Generator().manual_seed(data.start.seed + data.rank)
    # The items are batches already, so they are not collated.
    return Loader(Reader(), batch_size=None, num_workers=workers, collate_fn=_as_it_is, generator=own)


def _timed(items: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Yield each item with the seconds that the caller has waited for it."""
    waiting = iter(items)
    while True:
        began = time.monotonic()
        try:
            item = next(waiting)
        except StopIteration:
            return
        yield item, time.monotonic() - began


def _as_it_is(batch: Any) -> Any:
    return batch


def _tensor(name: str, array: Any) -> Any:
    """An array as a tensor; strings become a list."""
    import torch

    check_values(name, array)
    if array.dtype.kind in "OSU":
        return array.tolist()
    if array.dtype.kind in "mM":
        array = as_int64(name, array)
    # torch needs arrays that can be written to. Arrow's own memory is read-only, so it is copied.
    return torch.from_numpy(array if array.flags.writeable else np.array(array))
