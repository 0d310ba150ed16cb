"""A shard as a tf.data.Dataset. Of small batches TensorFlow gets several at a time, and takes them apart itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sparkring.data.shards import Shards

LARGE_BYTES = 256_000  # of a batch: from here on TensorFlow is given one at a time


def as_tf(data: Shards, names: Sequence[str]) -> Any:
    """Shards.as_tf()."""
    import tensorflow as tf

    take = data.taking(names)
    size = data.batch_size
    whole = data.remainder != "join"  # all batches are full

    def kind(dtype: np.dtype[Any]) -> Any:
        return tf.string if dtype.kind in "OSU" else tf.int64 if dtype.kind in "mM" else tf.as_dtype(dtype)

    batch = {
        name: tf.TensorSpec([size if whole else None, *spec.shape], kind(spec.dtype))
        for name, spec in data.spec.items()
    }
    # Each call from TensorFlow into Python costs as much as copying a few hundred kB.
    row_bytes = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in data.spec.values())
    several = size * row_bytes < LARGE_BYTES

    def batches() -> Iterator[Any]:
        """Batches, and with each the epoch that it is the last of, or 0; `several` at a time, one more dimension."""
        epoch, left = data.epoch, data.steps
        for arrays in data.chunks():
            rows = len(next(iter(arrays.values())))
            full = rows // size * size
            for begin, end, each in ((0, full, size), (full, rows, rows - full)):
                if begin == end:
                    continue
                ends = np.zeros((end - begin) // each, np.int64)
                ends[left - 1 : left] = epoch
                left -= len(ends)
                stacked = {name: _tensor(array[begin:end], each) for name, array in arrays.items()}
                if several:
                    yield ends, stacked
                else:
                    for at in range(len(ends)):
                        yield ends[at], {name: array[at] for name, array in stacked.items()}

    def handed_out(ends: Any, batch: Any) -> Any:
        over = tf.cond(
            ends > 0,
            lambda: tf.numpy_function(data.ended, [ends], [], stateful=True),
            tf.no_op,
        )
        with tf.control_dependencies([over]):
            return tf.nest.map_structure(tf.identity, take(batch))

    signature = (tf.TensorSpec([], tf.int64), batch)
    if several:
        pieces = tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), signature)
        found = tf.data.Dataset.from_generator(batches, output_signature=pieces).prefetch(1).unbatch()
    else:
        found = tf.data.Dataset.from_generator(batches, output_signature=signature)
    # Nothing is read ahead behind the last step: what it hands out, the training has.
    found = found.prefetch(tf.data.AUTOTUNE).map(handed_out)
    if not data.start.legs:  # the rest of an epoch is shorter than those to come
        found = found.apply(tf.data.experimental.assert_cardinality(data.steps))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
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
