"""Makes a tf.data.Dataset from a shard. Small batches are passed to TensorFlow several at a time, and split there."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkring.data.tensors import as_int64, check_values
from sparkring.runtime.packages import require

if TYPE_CHECKING:
    from sparkring.data.layout import Batch
    from sparkring.data.shards import Shards

LARGE_BYTES = 256_000  # batches of at least this size are passed to TensorFlow one at a time


def as_tf(data: Shards, names: Sequence[str]) -> Any:
    """Implement Shards.as_tf()."""
    tf = require("tensorflow", "as_tf()")
    take, specs = data.taking(names), {name: data.spec[name] for name in data.tensors(names)}
    whole = data.remainder != "join"  # whether all batches are full

    def kind(dtype: np.dtype[Any]) -> Any:
        return tf.string if dtype.kind in "OSU" else tf.int64 if dtype.kind in "mM" else tf.as_dtype(dtype)

    batch = {
        name: tf.TensorSpec([data.batch_size if whole else None, *spec.shape], kind(spec.dtype))
        for name, spec in specs.items()
    }
    # Each call from TensorFlow into Python takes as long as copying a few hundred kB, so one call returns several small
    # batches.
    row_bytes = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs.values())
    empty = any(0 in spec.shape for spec in specs.values())  # such tensors crash TensorFlow's unbatch()
    if data.batch_size * row_bytes < LARGE_BYTES and not empty:
        dataset = _several_at_a_time(data, take, batch)
    else:
        # No prefetch() is needed: the reader reads ahead, and TensorFlow uses the arrays without a copy. A prefetch
        # would delay the start of an epoch, and would need a function that reports which batches are handed out.
        dataset = tf.data.Dataset.from_generator(
            lambda: map(take, _one_by_one(data, batch)), output_signature=take(batch)
        )
    # The dataset's length is not declared in two cases. After resume() in the middle of an epoch, later epochs are
    # longer. Under MultiWorkerMirroredStrategy, TensorFlow splits each batch among its workers, but would still stop
    # after the declared number of batches, and never read most of the shard.
    if not data.start.legs and "TF_CONFIG" not in os.environ:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(data.steps))
    options = tf.data.Options()
    # Batches that leave the pipeline count as handed out, so TensorFlow must not add a prefetch to its end.
    options.experimental_optimization.inject_prefetch = False
    # TensorFlow must not divide the data among its workers, because the data is already only this rank's shard.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = dataset.with_options(options)
    if data.start.legs:
        # Keras 3 asks for the length once, for all epochs; if it is unknown, Keras counts the batches of the first
        # epoch, which in this case is only the rest of an epoch. The shorter first epoch still ends after its last row.
        dataset.cardinality = lambda: tf.constant(whole_steps(data), tf.int64)
    return dataset


def whole_steps(data: Shards) -> int:
    """Return the number of steps in a whole epoch, even if `data` begins in the middle of one."""
    return data.resume(data.start._replace(legs=())).steps


def _one_by_one(data: Shards, wanted: Iterable[str]) -> Iterator[Batch]:
    """Yield the batches of an epoch. When the last batch is handed out, the epoch counts as ended."""
    epoch, left, size = data.epoch, data.steps, data.batch_size
    for arrays in data.chunks():
        tensors = {name: _numbers(name, arrays[name]) for name in wanted}
        for begin in range(0, len(next(iter(tensors.values()))), size):
            left -= 1
            if not left:
                data.ended(epoch)
            yield {name: array[begin : begin + size] for name, array in tensors.items()}


def _several_at_a_time(data: Shards, take: Any, batch: dict[str, Any]) -> Any:
    """Return a dataset whose batches are passed to TensorFlow several at a time. TensorFlow prefetches them.

    When the dataset hands out the last batch of an epoch, it calls data.ended().
    """
    import tensorflow as tf

    size = data.batch_size

    def batches() -> Iterator[Any]:
        """Yield pairs (ends, arrays), where the arrays hold several batches, stacked along a new first axis.

        `ends` has one number for each of these batches. For the last batch of an epoch, it is the number of the epoch;
        for all other batches, it is 0.
        """
        epoch, left = data.epoch, data.steps
        for arrays in data.chunks():
            rows = len(next(iter(arrays.values())))
            full = rows // size * size
            for begin, end, length in ((0, full, size), (full, rows, rows - full)):
                if begin == end:
                    continue
                ends = np.zeros((end - begin) // length, np.int64)
                ends[left - 1 : left] = epoch
                left -= len(ends)
                yield (
                    ends,
                    {
                        name: _numbers(name, arrays[name][begin:end]).reshape(
                            len(ends), length, *arrays[name].shape[1:]
                        )
                        for name in batch
                    },
                )

    def handed_out(ends: Any, batch: Any) -> Any:
        over = tf.cond(ends > 0, lambda: tf.numpy_function(data.ended, [ends], [], stateful=True), tf.no_op)
        with tf.control_dependencies([over]):
            return tf.nest.map_structure(tf.identity, take(batch))

    signature = (tf.TensorSpec([], tf.int64), batch)
    pieces = tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), signature)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=pieces).prefetch(1).unbatch()
    # AutoGraph would warn on Spark, where it cannot find the source code of sparkring's functions.
    return dataset.prefetch(tf.data.AUTOTUNE).map(tf.autograph.experimental.do_not_convert(handed_out))


def _numbers(name: str, array: Any) -> Any:
    check_values(name, array)
    return as_int64(name, array) if array.dtype.kind in "mM" else array
