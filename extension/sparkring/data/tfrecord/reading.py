"""Reports to the notebook how far a rank has read its TFRecord files."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkring.data.progress import ReadProgress, Route
from sparkring.data.tfrecord.example import tensorflow
from sparkring.runtime import report
from sparkring.wire.messages import Piece

if TYPE_CHECKING:
    from sparkring.data.tfrecord.read import Records

# Several files are open at a time, and one record is read from each in turn. With shuffling, at most MOST_OPEN files
# are open; without it, at most OPEN_IN_ORDER.
MOST_OPEN, OPEN_IN_ORDER = 16, 256


class RecordReading:
    """How one rank reads its share. The object is created on the rank, since only the rank knows its share."""

    def __init__(self, records: Records) -> None:
        schema = records.schema
        self.share = records.share()
        self.at_once = min(len(self.share.parts), MOST_OPEN if records.shuffle else OPEN_IN_ORDER)
        self.record_bytes = max(1, schema.size_bytes // max(1, schema.records))
        self._seed = records.seed if records.shuffle else None
        self._rows, self._files = schema.batch_size, schema.files
        self._epoch = 0
        # Progress is not reported after every batch: a call from C++ into Python costs about as much as a small batch.
        self._every = max(1, min(64, self.share.steps // 100))
        self._progress = ReadProgress(
            name=records.folder.written,
            kind="tfrecord",
            columns=tuple(column.name for column in records.columns),
            version=hashlib.sha256(repr(schema).encode()).hexdigest()[:16],
            files=len(schema.files),
            rows=schema.rows,
            size_bytes=schema.size_bytes,
            batch_size=schema.batch_size,
        )
        if records.rank == 0:
            _advise(records)

    def begin(self) -> Any:
        """Begin the next epoch, and return the order in which the parts of the share are opened.

        Every pass over the data counts as an epoch, even if it ends early. So ranks may be in different epochs. This
        does no harm, since the share of a rank is the same in every epoch.
        """
        self._epoch += 1
        order = list(range(len(self.share.parts)))
        if self._seed is not None:
            random.Random(f"{self._seed} {self._epoch}").shuffle(order)
        self._progress.begin(self._epoch, self.share.steps * self._rows, self.share.steps, self._route(order))
        return np.array(order, np.int64)

    def _route(self, order: Sequence[int]) -> Route:
        """Return the files in the order in which they are opened. A window has the files that are read together."""
        parts = [self.share.parts[at] for at in order]
        pieces = [Piece(part.file, -1, part.take * self._rows) for part in parts]
        window = sum(piece.rows for piece in pieces[: self.at_once]) if self.at_once > 1 else 0
        return Route(pieces, lambda file: self._files[file].name, window=window)

    def counted(self, before: Any, batch: Any) -> tuple[Any, Any]:
        """Count one more batch than `before`. Return the new number and the batch.

        The number is reported every `_every` batches, and after the last batch.
        """
        tf = tensorflow()
        steps = before + 1
        due = tf.logical_or(tf.equal(steps % self._every, 0), tf.equal(steps, self.share.steps))
        return tf.cond(due, lambda: tf.numpy_function(self._tell, [steps], tf.int64), lambda: steps), batch

    def _tell(self, steps: Any) -> Any:
        several = (int(steps) - 1) % self._every + 1  # batches since the last report
        self._progress.batch(several * self._rows, several * self.record_bytes, steps=several)
        if steps == self.share.steps:
            self._progress.end()
        return steps


def _advise(records: Records) -> None:
    """Tell the user if some ranks read only parts of files, and if rows are left out."""
    schema, where, size = records.schema, records.folder.written, records.size
    if records.share().split:
        report.log_to_driver(
            f"{where}: {len(schema.files)} files cannot be divided evenly among {size} ranks, so ranks read parts of "
            f"files and skip the rest; write_tfrecord(…, ranks={size}) writes files that can be divided evenly."
        )
    if records.dropped:
        report.log_to_driver(
            f"{where}: {records.dropped:,} of {schema.rows:,} rows are left out of each epoch, so that every rank "
            f"takes {records.steps:,} steps of {schema.batch_size:,} rows; remainder='pad' reads them all."
        )
