"""Gives a %%barrier cell its additional variables: the Spark task's context and the rows of the task's partition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparkring.data.spark_frames import Values
from sparkring.errors import DataError
from sparkring.executor.orders import ROWS_END


def names(rows: int) -> dict[str, Any]:
    """Return the variables that the cell is given. `rows` is the field of the Ticket."""
    from pyspark import BarrierTaskContext

    return {"context": BarrierTaskContext.get(), "rows": TaskRows(rows)}


class TaskRows(Iterator[Any]):
    """The rows of this rank's partition. They can be read only once, and arrive from Spark while they are being read.

    Iterating yields each row as a pyspark.sql.Row. `pandas()` yields a pandas.DataFrame for each batch of rows, and
    `arrow()` a pyarrow.RecordBatch; spark.sql.execution.arrow.maxRecordsPerBatch limits the rows of a batch.
    `to_pandas()` returns the whole partition as one DataFrame. A Row has the values that collect() returns, and a
    DataFrame has the values that toPandas() returns, including vectors and other user-defined types. Times are in the
    session's time zone, but are not marked with it. Without --data there are no rows. Reading the rows twice raises
    DataError.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._form = ""  # how the rows are being read, for the error message; '' if reading has not begun
        self._each: Iterator[Any] | None = None
        self._schema: Any = None
        self._values: Values  # set before the first batch
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        if self._each is None or self._ended:
            self._each = self._one_by_one(self._batches("row by row"))
        return self

    def __next__(self) -> Any:
        return next(self._each if self._each is not None else iter(self))

    def arrow(self) -> Iterator[Any]:
        """Yield a pyarrow.RecordBatch for each batch. User-defined types, such as vectors, are as Spark stores them."""
        return self._batches("as Arrow batches")

    def pandas(self) -> Iterator[Any]:
        """Yield a pandas.DataFrame for each batch, with the values that toPandas() returns."""
        return (self._values.to_pandas(batch) for batch in self._batches("as pandas DataFrames"))

    def to_pandas(self) -> Any:
        """Return the whole partition as one pandas.DataFrame, in memory, with the values that toPandas() returns."""
        import pyarrow

        batches = list(self._batches("as one DataFrame"))
        if self._schema is None:
            return pyarrow.table({}).to_pandas()
        return self._values.to_pandas(pyarrow.Table.from_batches(batches, self._schema))

    def _batches(self, form: str) -> Iterator[Any]:
        if self._form:
            have_been = "have been read" if self._ended else "are being read"
            raise DataError(
                f"`rows` can be read only once, and {have_been} {self._form}. Keep what you need, for example `frame = "
                "rows.to_pandas()`."
            )
        self._form = form
        return self._read()

    def _read(self) -> Iterator[Any]:
        if self._descriptor >= 0:
            import pyarrow

            with open(self._descriptor, "rb") as pipe:
                reader = pyarrow.ipc.open_stream(pipe)
                self._values = Values(reader.schema)
                self._schema = reader.schema.remove_metadata()
                for batch in reader:
                    yield pyarrow.RecordBatch.from_arrays(batch.columns, schema=self._schema)
                if pipe.read() != ROWS_END:
                    raise DataError("the rows are incomplete: Spark has ended the task.")
        self._ended = True

    def _one_by_one(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield from self._values.rows(batch)
