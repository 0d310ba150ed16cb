"""Converts a batch to a serialised tf.train.Example, and an Example to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkring.data.tfrecord.batches import Batch
from sparkring.data.tfrecord.schema import STRING, RecordColumn
from sparkring.errors import DataError
from sparkring.runtime.packages import require

LARGEST_RECORD = 2**31 - 2**20  # bytes; protobuf's own limit is 2 GiB
# decode_raw cannot read these unsigned types, so they are read as signed numbers, whose bits are then reinterpreted.
_SIGNED = {"uint32": "int32", "uint64": "int64"}


def encoded(batch: Batch, called: str) -> bytes:
    """Return a batch as a record: a serialised Example. Raise DataError if the batch is too large for one record."""
    tf = tensorflow()
    features, size = {}, 0
    for name, array in batch.items():
        values = [array.tobytes()]
        if array.dtype.kind in "OUS":
            values = [value.encode() if isinstance(value, str) else bytes(value) for value in array.ravel()]
        size += sum(map(len, values))
        features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if size > LARGEST_RECORD:
        raise DataError(
            f"{called}: a record of {size / 1e9:.1f} GB is more than the format allows. Use a smaller batch_size."
        )
    return bytes(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def decoded(record: Any, columns: Sequence[RecordColumn], batch_size: int, *, pad: bool) -> dict[str, Any]:
    """Return columns of a record as tensors [batch, …]. With `pad`, rows are repeated to fill the batch."""
    tf = tensorflow()
    text = tf.io.FixedLenSequenceFeature([], tf.string, allow_missing=True)
    one = tf.io.FixedLenFeature([], tf.string)
    features = tf.io.parse_single_example(
        record, {column.name: text if column.dtype == STRING else one for column in columns}
    )
    return {column.name: _tensor(features[column.name], column, batch_size, pad) for column in columns}


def _tensor(values: Any, column: RecordColumn, batch_size: int, pad: bool) -> Any:
    tf = tensorflow()
    if column.dtype in _SIGNED:
        values = tf.bitcast(tf.io.decode_raw(values, _SIGNED[column.dtype]), column.dtype)
    elif column.dtype != STRING:
        values = tf.io.decode_raw(values, column.dtype)
    if pad:
        rows = tf.reshape(values, [-1, *column.shape])
        count = tf.shape(rows)[0]
        values = tf.cond(count == batch_size, lambda: rows, lambda: tf.gather(rows, tf.range(batch_size) % count))
    return tf.reshape(values, [batch_size, *column.shape])


def tensorflow() -> Any:
    """Import TensorFlow and return it. Raise DataError if the import fails."""
    return require("tensorflow", "TFRecord", DataError)
