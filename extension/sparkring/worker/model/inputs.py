"""Converts Arrow columns to the arrays that a model is called with."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from sparkring.data.columns import Making, changes_with_nulls, has_nulls, holds_nulls, replacement, to_numpy
from sparkring.data.layout import Array, Batch, BatchLayout
from sparkring.errors import DataError


class Described:
    """Inputs as a BatchLayout describes them. All rows must have the shapes and types of the first rows."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout

    def learn(self, batch: pa.RecordBatch) -> Batch:
        """Learn the shapes and types from the first rows, and return the arrays of these rows."""
        self._check_nulls(batch)
        self._layout.learn(batch)
        return self.arrays(batch)

    def arrays(self, batch: pa.RecordBatch) -> Batch:
        """Return a dict of arrays [rows, …]. Raise DataError if the rows cannot become arrays."""
        return self.transformed(self.converted(batch), len(batch))

    def converted(self, rows: pa.RecordBatch) -> Batch:
        """Return the rows of one or more batches as arrays that are not yet transformed. Raise DataError if needed."""
        self._check_nulls(rows)
        if not self._layout.spec:  # there was no probe
            self._layout.learn(rows)
        arrays, _ = self._layout.arrays([rows], len(rows), None, len(rows), "these rows")
        return arrays

    def transformed(self, batch: Batch, rows: int) -> Batch:
        """Return what the model gets for the converted rows of one batch."""
        return batch if self._layout.transform is None else self._layout.transformed(batch, rows, "these rows")

    def _check_nulls(self, batch: pa.RecordBatch) -> None:
        making = self._layout.making
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if not column.null_count or field.name in making.fill:
                continue
            if field.name in making.raw or not holds_nulls(field.type) or changes_with_nulls(field.type):
                value = replacement(field.type)
                raise has_nulls(field.name, column.null_count, len(column), value=value, caller=making.caller)


def reshaped(array: Array, shape: Sequence[int], row: str) -> Array:
    """Return an array with rows of this shape. If this is impossible, raise a DataError that begins with `row`."""
    try:
        return array.reshape(len(array), *shape)
    except ValueError:
        raise DataError(f"{row} has the shape {list(array.shape[1:])}, which cannot become {list(shape)}.") from None


class AsTheyAre:
    """Inputs in which each column becomes an array of the same name, for predict_udf(), which has no BatchLayout."""

    def arrays(self, batch: pa.RecordBatch) -> Batch:
        return self.converted(batch)

    def converted(self, rows: pa.RecordBatch) -> Batch:
        making = Making({}, {}, caller="estimator")  # predict_udf() has none of the options, either
        columns = zip(rows.schema.names, rows.columns, strict=True)
        return {name: to_numpy(column, name, making) for name, column in columns}

    def transformed(self, batch: Batch, rows: int) -> Batch:
        return batch
