"""Makes a torch DataLoader for a shard."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkring.data.tensors import as_int64, check_values
from sparkring.runtime.packages import require

if TYPE_CHECKING:
    from sparkring.data.shards import Shards


def as_torch(data: Shards, names: Sequence[str], workers: int) -> Any:
    """Implement Shards.as_torch()."""
    require("torch", "as_torch()")
    import torch

    wanted, take = data.tensors(names), data.taking(names)
    size = data.batch_size

    def tensors(batch: dict[str, Any]) -> dict[str, Any]:
        return {name: _tensor(name, batch[name]) for name in wanted}

    class Reader(torch.utils.data.IterableDataset):  # type: ignore[misc]
        """Yields the batches of an epoch. In one of n worker processes, it yields every n-th chunk instead.

        The loader takes one chunk from each worker in turn, so that it receives the chunks in their order.
        """

        def __len__(self) -> int:
            return len(data)

        def __iter__(self) -> Iterator[Any]:
            here = torch.utils.data.get_worker_info()
            if here is None:
                return (take(tensors(batch)) for batch in data.batches())
            # A forked worker has copies of its parent's objects. If the worker's garbage collector finalised the copy
            # of a connection, such as the one to Spark, the parent's connection could end. freeze() hides the copies
            # from the garbage collector.
            gc.freeze()
            chunks = data.read(here.id, here.num_workers, whole=True)
            return (replace(chunk, data=tensors(chunk.data)) for chunk in chunks)

    class Loader(torch.utils.data.DataLoader):  # type: ignore[misc]
        """Cuts the workers' chunks into batches, in the process that uses the batches."""

        def __iter__(self) -> Iterator[Any]:
            read = super().__iter__()
            return map(take, data.handed_out(_timed(read), cut)) if workers else read

    def cut(tensors: dict[str, Any], begin: int) -> dict[str, Any]:
        return {name: tensor[begin : begin + size] for name, tensor in tensors.items()}

    # At the beginning of each epoch, torch draws a seed for the workers. The state of the training's generator, which
    # is restored from checkpoints, must not depend on how often this happens, so the loader has its own generator.
    own = torch.Generator().manual_seed(data.start.seed + data.rank)
    # The items of the Reader are already whole batches, so torch must not collate them.
    # The workers are forked even if another start method is the default, because a Reader cannot be pickled.
    context = "fork" if workers else None
    return Loader(
        Reader(),
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        generator=own,
        multiprocessing_context=context,
    )


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
    """Return an array as a tensor, or as a list if it holds strings."""
    import torch

    check_values(name, array)
    if array.dtype.kind in "OSU":
        return array.tolist()
    if array.dtype.kind in "mM":
        array = as_int64(name, array)
    # from_numpy() needs an array that can be written to. An array in Arrow's memory is read-only, so it is copied.
    return torch.from_numpy(array if array.flags.writeable else np.array(array))
