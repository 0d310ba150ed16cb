"""Converts pyarrow's values to Spark's Python values.

pyarrow returns maps as lists of pairs, rows as dicts, and values of user-defined types, such as Spark ML's vectors, as
they are stored. With the types in Spark's schema, these functions make the values that Spark itself would return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkring.runtime.packages import require

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


def collected(column: Any, kind: DataType, *, zoned: bool) -> list[Any]:
    """Return the values of a column as DataFrame.collect() returns them. If `zoned` is true, times keep their zone."""
    values: list[Any] = column.to_pylist()
    rebuild = rebuilding(kind, zoned)
    return values if rebuild is None else [None if value is None else rebuild(value) for value in values]


def series_of(column: Any, kind: DataType, convert: Callable[[Any], Any] | None = None) -> Any:
    """Return a column as DataFrame.toPandas() returns it when Arrow is not enabled in Spark.

    `convert` is the result of converter() for the session's settings; the default is converter(kind).
    """
    pandas = require("pandas", "a column of Spark's own types")
    return (convert or converter(kind))(pandas.Series(collected(column, kind, zoned=True), dtype=object))


def converter(kind: DataType, *, nullable: bool = True, timezone: str = "UTC", structs: str = "row") -> Any:
    """Return the function that toPandas() itself, in Spark 3.5 and later, applies to the pandas Series of a column."""
    from pyspark.sql.pandas.types import _create_converter_to_pandas

    return _create_converter_to_pandas(
        kind, nullable, timezone=timezone, struct_in_pandas=structs, error_on_duplicated_field_names=False
    )


def rebuilding(kind: DataType, zoned: bool) -> Callable[[Any], Any] | None:
    """Return a function that makes Spark's value of type `kind` from pyarrow's, or None if they are the same.

    The function does not accept None.
    """
    import pyspark
    from pyspark.sql import Row
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType, TimestampType, UserDefinedType

    def inner(kind: DataType) -> Callable[[Any], Any]:
        rebuild = rebuilding(kind, zoned)
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
    if isinstance(kind, ArrayType) and rebuilding(kind.elementType, zoned) is not None:
        convert = inner(kind.elementType)
        return lambda value: [convert(item) for item in value]
    if isinstance(kind, BinaryType):
        major, minor = map(int, pyspark.__version__.split(".")[:2])
        return None if (major, minor) >= (4, 1) else bytearray  # what collect() returns by default
    if isinstance(kind, TimestampType) and not zoned:
        return lambda value: value.replace(tzinfo=None)
    return None
