"""Spark's values of what comes as Arrow: rows as DataFrame.collect() gives them, pandas as DataFrame.toPandas() does.

Arrow has a user-defined type, such as Spark ML's vectors, as it is stored, a map as pairs and a row as a dict. What
they are to Spark stands in Spark's own schema, which comes in the metadata of Arrow's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkring.worker.ticket import SPARK_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


class Values:
    """The columns of a DataFrame, of which `schema` is the Arrow schema, as Spark gives them to Python."""

    def __init__(self, schema: Any) -> None:
        # From the driver, through the task that has started this rank.
        found, self._timezone, self._by_arrow, self._structs = pickle.loads(schema.metadata[SPARK_SCHEMA])
        self._fields = found.fields

    def rows(self, batch: Any) -> list[Any]:
        """A batch as pyspark.sql.Row; times are those that a clock in the session's time zone shows."""
        from pyspark.sql import Row

        make = Row(*batch.schema.names)
        columns = [
            _objects(column, field.dataType, zoned=False)
            for column, field in zip(_without_zones(batch), self._fields, strict=True)
        ]
        return [make(*values) for values in zip(*columns, strict=True)]

    def to_pandas(self, found: Any) -> Any:
        """A batch or table as toPandas() gives it with the session's settings."""
        import pandas

        columns = [
            self._series(column, field) for column, field in zip(_without_zones(found), self._fields, strict=True)
        ]
        if not columns:
            return pandas.DataFrame(index=range(found.num_rows))
        frame = pandas.concat(columns, axis="columns")
        frame.columns = [field.name for field in self._fields]
        return frame

    def _series(self, column: Any, field: Any) -> Any:
        import pandas
        from pyspark.sql.pandas.types import _create_converter_to_pandas

        # What toPandas() itself makes the values of a column with, which has been so since Spark 3.5.
        convert = _create_converter_to_pandas(
            field.dataType,
            field.nullable,
            timezone=self._timezone,
            struct_in_pandas=self._structs,
            error_on_duplicated_field_names=False,
        )
        if self._by_arrow or _is_plain(field.dataType):
            series = column.to_pandas()
            if series.dtype.kind in "mM":
                return series.astype(f"{series.dtype.kind}8[ns]")
        else:
            series = pandas.Series(_objects(column, field.dataType, zoned=True), dtype=object)
        return convert(series)


def _is_plain(kind: DataType) -> bool:
    """Whether pandas has of Arrow what it has of a list of Python's values."""
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType, UserDefinedType

    return not isinstance(kind, (ArrayType, BinaryType, MapType, StructType, UserDefinedType))


def _without_zones(found: Any) -> list[Any]:
    """The columns of a batch or table, their times those that a clock in the session's time zone shows."""
    import pyarrow
    import pyarrow.compute

    return [
        pyarrow.compute.local_timestamp(column)
        if pyarrow.types.is_timestamp(column.type) and column.type.tz
        else column
        for column in found.columns
    ]


def _objects(column: Any, kind: DataType, *, zoned: bool) -> list[Any]:
    """A column's values as collect() gives them; times within rows, arrays and maps have a time zone if `zoned`."""
    values: list[Any] = column.to_pylist()
    rebuild = _rebuild(kind, zoned)
    return values if rebuild is None else [None if value is None else rebuild(value) for value in values]


def _rebuild(kind: DataType, zoned: bool) -> Callable[[Any], Any] | None:
    """Makes what Spark has of what pyarrow gives for a value of `kind` that is not null; None: it is the same."""
    from pyspark.sql import Row
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType, TimestampType, UserDefinedType

    def inner(kind: DataType) -> Callable[[Any], Any]:
        rebuild = _rebuild(kind, zoned)
        return (lambda value: value) if rebuild is None else (lambda value: None if value is None else rebuild(value))

    if isinstance(kind, UserDefinedType):
        stored = inner(kind.sqlType())
        deserialize: Callable[[Any], Any] = kind.deserialize
        return lambda value: deserialize(stored(value))
    if isinstance(kind, StructType):
        make: Callable[..., Any] = Row(*kind.names)
        parts = [(field.name, inner(field.dataType)) for field in kind.fields]
        return lambda value: make(*[part(value[name]) for name, part in parts])
    if isinstance(kind, MapType):
        to_value = inner(kind.valueType)
        to_key: Callable[[Any], Any] = bytes if isinstance(kind.keyType, BinaryType) else inner(kind.keyType)
        return lambda value: {to_key(key): to_value(item) for key, item in value}
    if isinstance(kind, ArrayType) and _rebuild(kind.elementType, zoned) is not None:
        each = inner(kind.elementType)
        return lambda value: [each(item) for item in value]
    if isinstance(kind, BinaryType):
        return bytearray
    if isinstance(kind, TimestampType) and not zoned:
        return lambda value: value.replace(tzinfo=None)
    return None
