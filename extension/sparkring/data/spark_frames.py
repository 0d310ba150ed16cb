"""Turns Arrow batches into the rows that DataFrame.collect() returns, or the pandas.DataFrame that toPandas() returns.

The metadata of the Arrow schema contains Spark's own schema, which says which type each column has in Spark.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparkring.data.spark_values import collected, converter, series_of
from sparkring.errors import DataError
from sparkring.executor.orders import SPARK_SCHEMA
from sparkring.runtime.packages import require

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


class Values:
    """Converts Arrow batches into the Python values that Spark itself would return. `schema` is their Arrow schema."""

    def __init__(self, schema: Any) -> None:
        # Unpickling is safe: the schema comes from the driver, through the Spark task that has started this rank.
        spark_schema, self._timezone, self._by_arrow, self._structs = pickle.loads(schema.metadata[SPARK_SCHEMA])
        self._fields = spark_schema.fields

    def rows(self, batch: Any) -> list[Any]:
        """Return each row of a batch as a pyspark.sql.Row, with times in the session's time zone."""
        from pyspark.sql import Row

        make = Row(*batch.schema.names)
        columns = []
        for column, field in zip(_without_zones(batch), self._fields, strict=True):
            with representable(field.name):
                columns.append(collected(column, field.dataType, zoned=False))
        return [make(*values) for values in zip(*columns, strict=True)]

    def to_pandas(self, table: Any) -> Any:
        """Return a batch or table as the pandas.DataFrame that toPandas() returns with the session's settings."""
        pandas = require("pandas", "an item that is a pandas DataFrame")
        # The series are copied, because pandas could not write to Arrow's memory.
        columns = []
        for column, field in zip(_without_zones(table), self._fields, strict=True):
            with representable(field.name):
                columns.append(self._series(column, field).copy())
        if not columns:
            return pandas.DataFrame(index=range(table.num_rows))
        frame = pandas.concat(columns, axis="columns")
        frame.columns = [field.name for field in self._fields]
        return frame

    def _series(self, column: Any, field: Any) -> Any:
        convert = converter(field.dataType, nullable=field.nullable, timezone=self._timezone, structs=self._structs)
        if not (self._by_arrow or _is_plain(field.dataType)):
            return series_of(column, field.dataType, convert)
        series = column.to_pandas()
        if series.dtype.kind in "mM":
            from pyspark.sql.pandas.types import _to_corrected_pandas_type

            # toPandas() raises an error for times that nanoseconds cannot represent. Here, they stay in microseconds.
            with contextlib.suppress(ValueError):  # pandas' OutOfBoundsDatetime and OutOfBoundsTimedelta
                return series.astype(_to_corrected_pandas_type(field.dataType))  # in microseconds from pandas 3 on
            return series
        return convert(series)


@contextlib.contextmanager
def representable(name: str) -> Iterator[None]:
    """Raise DataError if Python or pandas cannot represent a date or time of a column, for example in the year 10000.

    toPandas() raises an error for such values, too.
    """
    try:
        yield
    except (OverflowError, ValueError) as error:  # pandas' OutOfBoundsDatetime is a ValueError
        raise DataError(
            f"column `{name}` has values that pandas cannot represent: {str(error).rstrip('.')}. Leave these rows out, "
            "or cast the column to a string."
        ) from error


def _is_plain(kind: DataType) -> bool:
    """Return whether pandas makes the same values from Arrow as from a list of Python values."""
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType, UserDefinedType

    return not isinstance(kind, (ArrayType, BinaryType, MapType, StructType, UserDefinedType))


def _without_zones(table: Any) -> list[Any]:
    """Return the columns of a batch or table. Times in the session's time zone become local times without a zone."""
    import pyarrow
    import pyarrow.compute

    return [
        pyarrow.compute.local_timestamp(column)
        if pyarrow.types.is_timestamp(column.type) and column.type.tz
        else column
        for column in table.columns
    ]
