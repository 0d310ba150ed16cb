"""What a %%barrier cell finds beside `rank` and `size`: Spark's own task context, and the rows of its partition.

Spark's BarrierTaskContext asks the executor over a socket on the machine itself: what it holds, a port and a secret or
a path, can serve another process there as well, and does: the rank, a child of Spark's Python worker.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

from sparkring.errors import DataError
from sparkring.worker.ticket import ROWS_END


def names(context: str, rows: int) -> dict[str, Any]:
    """What the cell is given by name; the arguments are those of the Ticket."""
    return {"context": _enter(context), "rows": Rows(rows)}


def _enter(packed: str) -> Any:
    """Make this process's TaskContext that of the task which it belongs to, as pyspark's own worker does."""
    from pyspark import BarrierTaskContext, TaskContext

    held, shared = pickle.loads(bytes.fromhex(packed))
    for name, value in shared.items():
        setattr(BarrierTaskContext, name, value)
    context = BarrierTaskContext._getOrCreate()
    vars(context).update(held)
    TaskContext._setTaskContext(context)
    return context


class Rows(Iterator[Any]):
    """The rows of this rank's partition, once through, read from Spark as they are asked for.

    Iterating gives pyspark.sql.Row; `pandas()` a pandas.DataFrame and `arrow()` a pyarrow.RecordBatch per batch (of
    spark.sql.execution.arrow.maxRecordsPerBatch rows); `to_pandas()` one DataFrame of the whole partition. Times are
    those of the session's time zone, without one. Without --data there are no rows. DataError on a second pass.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._form = ""  # in which they are being read
        self._each: Iterator[Any] | None = None
        self._schema: Any = None
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        if self._each is None or self._ended:
            self._each = self._one_by_one(self._batches("row by row"))
        return self

    def __next__(self) -> Any:
        return next(self._each if self._each is not None else iter(self))

    def arrow(self) -> Iterator[Any]:
        """The rows as pyarrow.RecordBatch."""
        return self._batches("as Arrow batches")

    def pandas(self) -> Iterator[Any]:
        """The rows as pandas.DataFrame, one per batch."""
        return (_without_zones(batch).to_pandas() for batch in self._batches("as pandas DataFrames"))

    def to_pandas(self) -> Any:
        """The whole partition as one pandas.DataFrame, in memory."""
        import pyarrow

        batches = list(self._batches("as one DataFrame"))
        if self._schema is None:
            return pyarrow.table({}).to_pandas()
        return _without_zones(pyarrow.Table.from_batches(batches, self._schema)).to_pandas()

    def _batches(self, form: str) -> Iterator[Any]:
        if self._form:
            have_been = "have been read" if self._ended else "are being read"
            raise DataError(
                f"`rows` can be read once, and {have_been} {self._form}: they are not kept. Keep what you need of "
                "them, for example `frame = rows.to_pandas()`."
            )
        self._form = form
        return self._read()

    def _read(self) -> Iterator[Any]:
        if self._descriptor >= 0:
            import pyarrow

            with open(self._descriptor, "rb") as pipe:
                reader = pyarrow.ipc.open_stream(pipe)
                self._schema = reader.schema
                yield from reader
                if pipe.read() != ROWS_END:
                    raise DataError("the rows broke off: Spark has ended the task.")
        self._ended = True

    def _one_by_one(self, batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark.sql import Row

        for batch in batches:
            make = Row(*batch.schema.names)
            columns = [_values(column) for column in _without_zones(batch).columns]
            yield from (make(*values) for values in zip(*columns, strict=True))


def _without_zones(found: Any) -> Any:
    """A batch or table whose times are those that a clock in the session's time zone shows, as in pyspark."""
    import pyarrow
    import pyarrow.compute

    columns = [
        pyarrow.compute.local_timestamp(column)
        if pyarrow.types.is_timestamp(column.type) and column.type.tz
        else column
        for column in found.columns
    ]
    return type(found).from_arrays(columns, names=found.schema.names)


def _values(column: Any) -> list[Any]:
    """A column's values as a Row has them."""
    values: list[Any] = column.to_pylist()
    rebuild = _rebuild(column.type)
    return values if rebuild is None else [rebuild(value) for value in values]


def _rebuild(kind: Any) -> Callable[[Any], Any] | None:
    """Makes of what pyarrow gives for `kind` what Spark does: Rows of structs, dicts of maps. None: it is the same."""
    import pyarrow.types
    from pyspark.sql import Row

    def same(value: Any) -> Any:
        return value

    if pyarrow.types.is_struct(kind):
        make = Row(*[field.name for field in kind])
        inner = [(field.name, _rebuild(field.type) or same) for field in kind]
        return lambda value: None if value is None else make(*[each(value[name]) for name, each in inner])
    if pyarrow.types.is_map(kind):
        to_key, to_value = _rebuild(kind.key_type) or same, _rebuild(kind.item_type) or same
        return lambda value: None if value is None else {to_key(key): to_value(item) for key, item in value}
    if pyarrow.types.is_list(kind):
        each = _rebuild(kind.value_type)
        if each is not None:
            return lambda value: None if value is None else [each(item) for item in value]
    return None
