"""TFRecord files of whole batches, with a schema. They are divided evenly among the ranks.

    PATH/part-00007.tfrecord        or PATH/3f0a/part-00007.tfrecord, spread over prefixes for an object store
            one tf.train.Example per batch; each column is one bytes feature: for numbers, the array's memory,
            little-endian and in C order, as for tf.io.decode_raw; for strings, one value per string
    PATH/_schema.json               columns, files, rows; written last; without it, a folder is not read

Record i is in file i modulo the number of files, so files differ by at most one record.
"""

from sparkring.data.tfrecord.read import Records, tfrecords
from sparkring.data.tfrecord.schema import Schema, read_schema
from sparkring.data.tfrecord.write import write_tfrecord

__all__ = ["Records", "Schema", "read_schema", "tfrecords", "write_tfrecord"]
