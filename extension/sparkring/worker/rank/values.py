"""Turns Arrow batches into Spark's values: rows as from DataFrame.collect(), pandas as from DataFrame.toPandas().

Arrow has user-defined types, such as Spark ML's vectors, in their stored form, a map as pairs and a row as a dict.
Spark's own schema, in the metadata of the Arrow schema, says what they are in Spark.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkring.wire.ticket import SPARK_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


class Values:
    """Makes Spark's Python values of batches of a DataFrame, whose Arrow schema is `schema`."""

    def __init__(self, schema: Any) -> None:
        # Trusted: it comes from the driver, through the task that has started this rank.
        found, self._timezone, self._by_arrow, self._structs = pickle.loads(schema.metadata[SPARK_SCHEMA])
        self._fields = found.fields

    def rows(self, batch: Any) -> list[Any]:
        """A batch as pyspark.sql.Row, with times in the session's time zone."""
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

        # The converter that toPandas() itself uses since Spark 3.5.
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
    """Whether pandas makes the same values from Arrow as from a list of Python's values."""
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType, UserDefinedType

    return not isinstance(kind, (ArrayType, BinaryType, MapType, StructType, UserDefinedType))


def _without_zones(found: Any) -> list[Any]:
    """The columns of a batch or table, with times as local times of the session's time zone."""
    import pyarrow
    import pyarrow.compute

    return [
        pyarrow.compute.local_timestamp(column)
        if pyarrow.types.is_timestamp(column.type) and column.type.tz
        else column
        for column in found.columns
    ]


def _objects(column: Any, kind: DataType, *, zoned: bool) -> list[Any]:
    """The values of a column as collect() gives them; with `zoned`, times inside other types keep their time zone."""
    values: list[Any] = column.to_pylist()
    rebuild = _rebuild(kind, zoned)
    return values if rebuild is None else [None if value is None else rebuild(value) for value in values]


def _rebuild(kind: DataType, zoned: bool) -> Callable[[Any], Any] | None:
    """A function from pyarrow's non-null value of type `kind` to Spark's value; None if they are the same."""
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
