"""`tfrecords(…)`: this rank's share of TFRecord files, batch by batch."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkring.data.dataset import Dataset, Source
from sparkring.data.layout import Columns, Transform, groups_of, members_of
from sparkring.data.plan import seat
from sparkring.data.shards import Shards, shards
from sparkring.data.tfrecord.example import decoded, tensorflow
from sparkring.data.tfrecord.open import Features, of_schema, open_records
from sparkring.data.tfrecord.reading import RecordReading
from sparkring.data.tfrecord.schema import (
    RecordColumn,
    RecordShare,
    Remainder,
    Schema,
    has_schema,
    read_schema,
    share_out,
)
from sparkring.data.where import nearest
from sparkring.errors import DataError, OptionsError
from sparkring.runtime import world
from sparkring.runtime.storage import Location, locate

if TYPE_CHECKING:
    from sparkring.capture.names import MethodCall

SHUFFLED_BYTES = 64_000_000  # the most bytes in the buffer in which records are shuffled
MOST_SHUFFLED = 64  # the most records in this buffer

BATCH_SIZE = 32


def tfrecords(
    path: Source,
    *,
    batch_size: int | None = None,
    columns: Columns | None = None,
    schema: Features | None = None,
    batched: bool = False,
    fill: Mapping[str, Any] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    remainder: Remainder = "drop",
    transform: Transform | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> Records | Shards:
    """Return this rank's share of TFRecord files, whether write_tfrecord(), TensorFlow or Spark has written them.

        schema = {"image": ("uint8", (32, 32, 3)), "label": "int64"}
        data = tfrecords("s3://bucket/images/*.tfrecord.gz", batch_size=64, schema=schema)
        model.fit(data.as_tf("image", "label"))

    Each tf.train.Example or SequenceExample is a row. All ranks take the same number of steps. On the driver, the
    share is the whole data set. Call tfrecords() in the notebook, and use its result in the cell, so that errors are
    raised before the launch, and the records are counted only once. The files may be compressed with gzip or zlib. They
    are read without TensorFlow and tensorflow-io.

    path: a folder, with its subfolders, a file or a glob (dbfs:, file:, or any URL that fsspec supports), or a list of
        these.
    batch_size: the number of rows in a batch of this rank; default: 32. A folder of write_tfrecord() has its own.
    columns: the names of the features to read, or a dict of arrays as for shards(); default: all.
    schema: the features to read and their types: a dtype, "bytes" or "string", or a pair of a type and the shape of a
        row. Numbers that are stored as bytes are the memory of an array. A first dimension of -1 has any length.
        Default: what the first 1,000 records have.
    batched: whether each Example holds a batch of rows. `schema` then has the shape of one row.
    fill: a dict from features to the values that replace missing ones and fill up lists that are too short.
    shuffle: whether to read the records in a new order every epoch. The order depends on `seed`; 0 is a seed like
        any other.
    remainder: what to do so that all ranks get the same number of full batches: "drop" leaves out the last rows, "pad"
        repeats some rows.
    transform: a function that takes a batch and returns the model's input. For a folder of write_tfrecord(), it takes
        and returns tensors, and runs in TensorFlow's graph; otherwise, it takes and returns arrays, as for shards().
    rank, size: the rank whose share to return, and the number of ranks to divide the files among; default: those of
        this process. Give both or neither.

    Returns Records for a folder of write_tfrecord() that TensorFlow can read, and otherwise Shards.

    Raises DataError if there is no file or no row, a file is truncated or damaged, a feature does not exist, a record
    does not have the types of the first records, or there are fewer rows than ranks.
    """
    if remainder not in ("drop", "pad"):
        raise OptionsError(f"remainder={remainder!r}: expected 'drop' or 'pad'.")
    options: dict[str, Any] = {
        "columns": columns,
        "shuffle": shuffle,
        "seed": seed,
        "remainder": remainder,
        "transform": transform,
        "rank": rank,
        "size": size,
    }
    groups = groups_of(columns)
    names = None if groups is None else [name for group in groups.values() for name in members_of(group)]
    if not isinstance(path, str | os.PathLike) or not has_schema(path):
        dataset = open_records(path, names, schema, fill or {}, batched=batched)
        return shards(dataset, batch_size or BATCH_SIZE, fill=fill, **options)
    written, folder = read_schema(path), locate(path)
    if batch_size not in (None, written.batch_size) or schema is not None or fill is not None:
        raise OptionsError(
            f"{folder.written} was written by write_tfrecord(), with a schema and batches of {written.batch_size:,} "
            "rows: leave out batch_size=, schema= and fill=."
        )
    known = [column.name for column in written.columns]
    for name in names or ():
        if name not in known:
            raise DataError(f"{folder.written} has no column `{name}`: {nearest(name, known)}")
    if isinstance(columns, Mapping) or not _tensorflow_reads(folder):
        return shards(of_schema(written, folder, names), written.batch_size, **options)
    chosen = tuple(column for column in written.columns if names is None or column.name in names)
    records = Records(folder, written, chosen, shuffle, seed, remainder, transform, seat(rank, size))
    records.share()
    return records


def _tensorflow_reads(folder: Location) -> bool:
    """Return whether TensorFlow is installed and can read this folder."""
    if importlib.util.find_spec("tensorflow") is None:
        return False
    return folder.local or folder.url.partition("://")[0] in tensorflow().io.gfile.get_registered_schemes()


@dataclass(frozen=True)
class Records:
    """TFRecord files, divided among the ranks. `len()` is the number of steps that each rank takes in an epoch.

    Iterating reads one epoch, and yields each batch as a dict of NumPy arrays [batch, …].
    """

    folder: Location
    schema: Schema
    columns: tuple[RecordColumn, ...]
    shuffle: bool
    seed: int
    remainder: Remainder
    transform: Transform | None
    seat: tuple[int, int] | None

    @property
    def rank(self) -> int:
        """The rank whose share this is: this process's rank, unless another was given."""
        return self.seat[0] if self.seat else world.world().rank

    @property
    def size(self) -> int:
        """The number of ranks that the files are divided among."""
        return self.seat[1] if self.seat else world.world().size

    def share(self) -> RecordShare:
        """Return the records that this rank reads. Raise DataError if there are fewer records than ranks."""
        return share_out(self.schema, self.rank, self.size, self.remainder)

    @property
    def batch_size(self) -> int:
        """The number of rows in a batch."""
        return self.schema.batch_size

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The files as a data set, for `%shards`."""
        return of_schema(self.schema, self.folder, [column.name for column in self.columns])

    @property
    def steps(self) -> int:
        """The number of batches per epoch, the same on every rank."""
        return self.share().steps

    @property
    def dropped(self) -> int:
        """The number of rows that no rank reads in an epoch."""
        return max(0, self.schema.rows - self.steps * self.size * self.schema.batch_size)

    def __len__(self) -> int:
        return self.steps

    def __sparkring_validate__(self, size: int, calls: Iterable[MethodCall] = ()) -> None:
        """Raise, before any rank is started, the error that ranks would raise if there are too few records."""
        share_out(self.schema, 0, self.size if self.seat else size, self.remainder)

    def __repr__(self) -> str:
        schema = self.schema
        ranks = f" on each of {self.size} ranks" if self.size > 1 else ""
        return (
            f"<tfrecords of {self.folder.written}: {schema.rows:,} rows in {len(schema.files):,} files; "
            f"{self.steps:,} steps of {schema.batch_size:,} rows per epoch{ranks}>"
        )

    def __iter__(self) -> Iterator[Any]:
        tf = tensorflow()

        def own(value: Any) -> Any:  # TensorFlow's arrays are read-only
            return np.require(value, requirements="W") if isinstance(value, np.ndarray) else value

        try:
            for batch in self._batches.as_numpy_iterator():
                yield tf.nest.map_structure(own, batch)
        except tf.errors.DataLossError as error:
            raise self._damaged() or error from None

    def as_tf(self, *names: str) -> Any:
        """Return a tf.data.Dataset of batches with static shapes.

        Without `names`, a batch is a dict of tensors; with one name, it is the tensor of that name; with several names,
        it is a tuple of their tensors. Each pass over the Dataset is an epoch; with `shuffle`, each epoch has a new
        order. TensorFlow does not divide the Dataset among ranks, since the Dataset is already this rank's share.
        """
        tf = tensorflow()
        schema, reading = self.schema, self._reading
        share = reading.share
        paths = tf.constant([self._path(part.file) for part in share.parts])
        skips = tf.constant([part.skip for part in share.parts], tf.int64)
        takes = tf.constant([part.take for part in share.parts], tf.int64)

        def begin(_: Any) -> Any:
            # This runs when an epoch begins, because the order depends on the epoch's number, which is known only then.
            order = tf.numpy_function(reading.begin, [], tf.int64)
            return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(order, [len(share.parts)]))

        def open_part(index: Any) -> Any:
            records = tf.data.TFRecordDataset(paths[index], schema.compression or "", buffer_size=1 << 20)
            return records.skip(skips[index]).take(takes[index])

        order = tf.data.Dataset.range(1).flat_map(begin)
        dataset = order.interleave(open_part, cycle_length=reading.at_once, num_parallel_calls=tf.data.AUTOTUNE)
        if self.shuffle:
            buffer = max(2, min(MOST_SHUFFLED, SHUFFLED_BYTES // reading.record_bytes))
            dataset = dataset.shuffle(buffer, seed=self.seed, reshuffle_each_iteration=True)

        def batch(record: Any) -> Any:
            return self._taken(decoded(record, self.columns, schema.batch_size, pad=self.remainder == "pad"), names)

        dataset = dataset.take(share.steps).map(batch, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = dataset.prefetch(tf.data.AUTOTUNE).scan(tf.constant(0, tf.int64), reading.counted)
        options = tf.data.Options()
        options.deterministic = True
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return dataset.apply(tf.data.experimental.assert_cardinality(share.steps)).with_options(options)

    @functools.cached_property
    def _batches(self) -> Any:
        return self.as_tf()

    @functools.cached_property
    def _reading(self) -> RecordReading:
        return RecordReading(self)

    def __getstate__(self) -> dict[str, Any]:
        # Only the fields are pickled. The values of cached properties are useful only in this process.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _path(self, index: int) -> str:
        location = self.folder / self.schema.files[index].name
        return location.path if location.local else location.url

    def _taken(self, batch: dict[str, Any], names: Sequence[str]) -> Any:
        """Return the transformed batch, or the parts of it that `names` ask for."""
        result = batch if self.transform is None else self.transform(batch)
        if names and not isinstance(result, Mapping):
            raise OptionsError(
                f"as_tf({', '.join(names)}): transform returned a `{type(result).__name__}`, not a dict."
            )
        for name in names:
            if name not in result:
                raise DataError(f"a batch has no column `{name}`: {nearest(name, list(result))}")
        taken = tuple(result[name] for name in names)
        return taken[0] if len(taken) == 1 else taken or result

    def _damaged(self) -> DataError | None:
        """Return a DataError about the first of this rank's files that is damaged, or None."""
        tf = tensorflow()
        for index in sorted({part.file for part in self.share().parts}):
            count = 0
            try:
                for _ in tf.data.TFRecordDataset(self._path(index), self.schema.compression or ""):
                    count += 1
            except tf.errors.DataLossError as error:
                written = (self.folder / self.schema.files[index].name).written
                reason = error.message.partition("} ")[2].partition(" [Op:")[0]
                return DataError(f"{written} is damaged after record {count:,} ({reason}): write the data again.")
        return None
