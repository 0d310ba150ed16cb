"""Writes TFRecord files of whole batches, with a schema, and reads these and all other TFRecord files.

tfrecords() divides the records evenly among the ranks. write_tfrecord() writes

    PATH/part-00007.tfrecord        or PATH/3f0a/part-00007.tfrecord, if files are spread over several folders, for
            an object store. A file has one tf.train.Example (a record) per batch, in which each column is one bytes
            feature. For numbers, the feature's only value is the array's memory, little-endian and in C order, as for
            tf.io.decode_raw. For strings, the feature has one value per string.
    PATH/_schema.json               the columns, the files and the number of rows; until it is written, last, a file of
            this name says that the folder is incomplete, and it is not read.

Record number i is in file number i modulo the number of files, so files differ by at most one record.
"""

from sparkring.data.tfrecord.read import Records, tfrecords
from sparkring.data.tfrecord.schema import Schema, read_schema
from sparkring.data.tfrecord.write import write_tfrecord

__all__ = ["Records", "Schema", "read_schema", "tfrecords", "write_tfrecord"]
