"""What a %%barrier cell has in addition to `rank` and `size`: Spark's task context, and the rows of its partition.

Spark's BarrierTaskContext talks to the executor through a local socket. It needs only a port and a secret, or a path,
so it also works in the rank, which is another process on the same machine.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from sparkring.errors import DataError
from sparkring.wire.ticket import ROWS_END
from sparkring.worker.rank.values import Values


def names(context: str, rows: int) -> dict[str, Any]:
    """The variables that the cell is given; the arguments are those of the Ticket."""
    return {"context": _enter(context), "rows": Rows(rows)}


def _enter(packed: str) -> Any:
    """Give this process the TaskContext of the task that it belongs to, as pyspark's own worker does."""
    from pyspark import BarrierTaskContext, TaskContext

    held, shared = pickle.loads(bytes.fromhex(packed))
    for name, value in shared.items():
        setattr(BarrierTaskContext, name, value)
    context = BarrierTaskContext._getOrCreate()
    vars(context).update(held)
    TaskContext._setTaskContext(context)
    return context


class Rows(Iterator[Any]):
    """The rows of this rank's partition. They can be read only once, and arrive from Spark while they are read.

    Iterating gives pyspark.sql.Row. `pandas()` gives a pandas.DataFrame for each batch, and `arrow()` a
    pyarrow.RecordBatch; spark.sql.execution.arrow.maxRecordsPerBatch limits the rows of a batch. `to_pandas()` returns
    the whole partition as one DataFrame. Values are those that collect() and toPandas() give, including vectors and
    other user-defined types; times are naive, in the session's time zone. Without --data there are no rows. DataError
    on a second pass.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._form = ""  # how the rows are being read
        self._each: Iterator[Any] | None = None
        self._schema: Any = None
        self._values: Values  # set with the first batch
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        if self._each is None or self._ended:
            self._each = self._one_by_one(self._batches("row by row"))
        return self

    def __next__(self) -> Any:
        return next(self._each if self._each is not None else iter(self))

    def arrow(self) -> Iterator[Any]:
        """The rows as pyarrow.RecordBatch. User-defined types, such as vectors, are as Spark stores them."""
        return self._batches("as Arrow batches")

    def pandas(self) -> Iterator[Any]:
        """The rows as pandas.DataFrame, one per batch, with the values that toPandas() gives."""
        return (self._values.to_pandas(batch) for batch in self._batches("as pandas DataFrames"))

    def to_pandas(self) -> Any:
        """The whole partition as one pandas.DataFrame, in memory, with the values that toPandas() gives."""
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
