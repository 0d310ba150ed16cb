"""Scores rows: turns them into arrays, calls the model on one batch after another, and turns its results into columns.

The same code runs in the model processes and, for the first rows, on the driver.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from sparkring.data.layout import Batch
from sparkring.errors import SparkringError
from sparkring.worker.model.files import FileRows, Files
from sparkring.worker.model.inputs import AsTheyAre, Described
from sparkring.worker.model.outputs import PredictedColumn, columns_of
from sparkring.worker.model.predictors import Autocast, Predict, predictor_of, settled

OnError = Literal["raise", "null"]
_CONVERTED_BYTES = 8 << 20  # about how many bytes of rows are read and converted at once
STRUCT = {"struct": "1"}  # the metadata of a batch with several outputs, which are the fields of a struct


class RowsError(Exception):
    """Rows could not be scored.

    `row` is the number (from 0) of the first row that cannot be scored even alone, or None if there is no such row.
    """

    def __init__(self, message: str, row: int | None) -> None:
        super().__init__(message)
        self.row = row


class ModelSource(Protocol):
    """Where a model comes from.

    load() returns the model, in the process that uses it. `label` is the model's name in messages. `step` is the step
    of the checkpoint that was loaded last, or None if the model does not come from a checkpoint.
    """

    @property
    def label(self) -> str: ...

    @property
    def step(self) -> int | None: ...

    def load(self) -> Any: ...


class _Used(NamedTuple):
    """A model that is ready for use, and the step of its checkpoint."""

    predict: Predict
    step: int | None


class Scorer:
    """Scores Arrow tables with the model that `model` loads.

    `outputs` describes the columns of the results. The one called `version`, if any, gets the step of the checkpoint
    that made the predictions; the model makes the others. With `by_name`, a model with several inputs gets them by
    name. If there are `files`, the tables have one column, whose integers stand for rows of these files. A `small`
    model uses one thread. `autocast` is as for predictor_of().
    """

    def __init__(
        self,
        model: ModelSource,
        inputs: Described | AsTheyAre,
        outputs: Sequence[PredictedColumn],
        *,
        by_name: bool,
        batch_size: int,
        on_error: OnError,
        files: Files | None = None,
        small: bool = False,
        autocast: Autocast | None = None,
        version: str | None = None,
    ) -> None:
        self._inputs, self._all, self._version = inputs, tuple(outputs), version
        self._outputs = tuple(output for output in outputs if output.name != version)
        self._small, self._by_name, self._autocast = small, by_name, autocast
        loaded = model.load()
        self.use(loaded, model.step)
        self._batch_size, self._on_error = batch_size, on_error
        self._together = batch_size  # how many rows are read and converted at once
        self._one_at_a_time = threading.Lock()
        self._file_rows = None if files is None else FileRows(files)

    def use(self, model: Any, step: int | None) -> None:
        """Use this model, which comes from the checkpoint of `step`, for the tables that are passed to score() later.

        Tables that are being scored are finished with the model with which they began.
        """
        model = settled(model, small=self._small)
        self._used = _Used(predictor_of(model, by_name=self._by_name, autocast=self._autocast), step)

    def score(self, rows: pa.Table) -> pa.RecordBatch:
        """Return the predictions. Raise RowsError if rows cannot be scored, and DataError if they cannot be read."""
        used, parts = self._used, list[list[pa.Array]]()
        begin = 0
        while begin < len(rows):
            (some,) = rows.slice(begin, self._together).combine_chunks().to_batches()
            if self._file_rows is not None:
                some = self._file_rows.read(some)
            self._score(used.predict, some, begin, parts)
            begin += len(some)
            self._together = (
                max(1, _CONVERTED_BYTES * len(some) // max(some.nbytes * self._batch_size, 1)) * self._batch_size
            )
        made = iter([pa.concat_arrays([part[number] for part in parts]) for number in range(len(self._outputs))])
        step = pa.array(np.full(len(rows), used.step)) if self._version is not None else None
        columns = [step if output.name == self._version else next(made) for output in self._all]
        batch = pa.RecordBatch.from_arrays(columns, names=[output.name for output in self._all])
        return batch.replace_schema_metadata(STRUCT if self._all[0].of_struct else None)

    def _score(self, predict: Predict, rows: pa.RecordBatch, first: int, parts: list[list[pa.Array]]) -> None:
        """Append the predictions for the rows of one or more batches. `first` is the number of the first row."""
        whole = None
        if len(rows) > self._batch_size:
            with contextlib.suppress(Exception):  # the batches are then converted one at a time, to find the rows
                whole = self._inputs.converted(rows)
        for begin in range(0, len(rows), self._batch_size):
            batch = rows.slice(begin, self._batch_size)
            end = begin + len(batch)
            converted = None if whole is None else {name: array[begin:end] for name, array in whole.items()}
            try:
                parts.append(self._scored(predict, batch, converted))
            except Exception as error:  # the model and `transform` are the user's code
                if self._on_error == "null":
                    parts += self._apart(predict, batch)
                    continue
                row = self._failing(predict, batch)
                raise RowsError(error_text(error), None if row is None else first + begin + row) from error

    def _scored(self, predict: Predict, batch: pa.RecordBatch, converted: Batch | None = None) -> list[pa.Array]:
        """Return the predictions of a batch, whose rows may have been converted to arrays already."""
        if converted is None:
            converted = self._inputs.converted(batch)
        arrays = self._inputs.transformed(converted, len(batch))
        with self._one_at_a_time:
            results = predict(arrays)
        return columns_of(results, self._outputs, len(batch))

    def _apart(self, predict: Predict, batch: pa.RecordBatch) -> Iterator[list[pa.Array]]:
        """Yield the predictions of a batch in parts, with nulls for the rows that cannot be scored."""
        if len(batch) == 1:
            yield [pa.nulls(1, output.kind) for output in self._outputs]
            return
        half = len(batch) // 2
        for part in (batch.slice(0, half), batch.slice(half)):
            try:
                scored = self._scored(predict, part)
            except Exception:  # the model and `transform` are the user's code
                yield from self._apart(predict, part)
            else:
                yield scored

    def _failing(self, predict: Predict, batch: pa.RecordBatch) -> int | None:
        """Halve a batch that cannot be scored until one row is left, and return the number of this row.

        Return None if a part fails, but neither of its halves does.
        """
        begin = 0
        while len(batch) > 1:
            half = len(batch) // 2
            first = batch.slice(0, half)
            if self._fails(predict, first):
                batch = first
                continue
            batch, begin = batch.slice(half), begin + half
            if not self._fails(predict, batch):
                return None
        return begin

    def _fails(self, predict: Predict, batch: pa.RecordBatch) -> bool:
        with contextlib.suppress(Exception):  # the model and `transform` are the user's code
            self._scored(predict, batch)
            return False
        return True


def error_text(error: BaseException) -> str:
    """Return the text of an error, with the error's type unless it is one of sparkring's errors."""
    return str(error) if isinstance(error, SparkringError) else f"{type(error).__name__}: {error}"
