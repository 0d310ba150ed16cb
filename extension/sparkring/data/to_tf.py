"""A shard as a tf.data.Dataset. Python hands TensorFlow several batches at a time, which it takes apart itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sparkring.data.shards import Shards


def as_tf(data: Shards, names: Sequence[str]) -> Any:
    """Shards.as_tf()."""
    import tensorflow as tf

    take = data.taking(names)
    size = data.batch_size
    whole = data.remainder != "join"  # all batches are full

    def kind(dtype: np.dtype[Any]) -> Any:
        return tf.string if dtype.kind in "OSU" else tf.int64 if dtype.kind in "mM" else tf.as_dtype(dtype)

    signature = {
        name: tf.TensorSpec([None, size if whole else None, *spec.shape], kind(spec.dtype))
        for name, spec in data.spec.items()
    }
    epoch = 0

    def chunks() -> Iterator[Any]:
        nonlocal epoch
        epoch = data.epoch
        for arrays in data.chunks():
            rows = len(next(iter(arrays.values())))
            full = rows // size * size
            for begin, end, each in ((0, full, size), (full, rows, rows - full)):
                if begin < end:
                    yield {name: _tensor(array[begin:end], each) for name, array in arrays.items()}

    def end() -> Iterator[Any]:
        # Nothing is read ahead from here on: whoever asks has had the whole epoch.
        data.ended(epoch)
        yield from ()

    found = tf.data.Dataset.from_generator(chunks, output_signature=signature)
    found = found.prefetch(1).unbatch().map(take)
    last = tf.data.Dataset.from_generator(end, output_signature=found.element_spec)
    found = found.prefetch(tf.data.AUTOTUNE).concatenate(last)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF  # it is a shard
    return found.with_options(options)


def _tensor(array: Any, each: int) -> Any:
    """Batches of `each` rows, one after another."""
    if array.dtype.kind in "mM":
        array = as_int64(array)
    return array.reshape(len(array) // each, each, *array.shape[1:])


def as_int64(array: Any) -> Any:
    """Times as int64 nanoseconds, those of dates and timestamps since 1970."""
    return array.astype(f"{array.dtype.kind}8[ns]").view(np.int64)
