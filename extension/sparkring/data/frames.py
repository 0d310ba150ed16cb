"""Checks whether a Spark DataFrame can be used as data, and whether two DataFrames have the same rows.

To compare DataFrames, this module computes a version of each: a string that changes if the rows change. If a
DataFrame's plan has only Spark's own expressions over files, the plan and the files determine the rows. The version is
then computed from the plan and from the sizes and modification times of the files. In other cases (rows from the
notebook, a Python function, JDBC, a cached DataFrame, the time of day), and in case of doubt, a Spark job computes the
version from the rows: from their number and from two sums of 64-bit hashes, which do not depend on the order of the
rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sparkring.capture.picklability import type_name
from sparkring.cluster.partitions import arrow_schema, not_in_arrow
from sparkring.cluster.session import cluster_of
from sparkring.data.where import nearest
from sparkring.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

    from sparkring.cluster.base import Cluster


def cluster_behind(frame: Any, called: str = "the DataFrame") -> Cluster:
    """Return the cluster of a Spark DataFrame.

    Raise DataError if `frame` is not a Spark DataFrame, or if its session has been stopped.
    """
    roots = {(base.__module__.partition(".")[0], base.__name__) for base in type(frame).__mro__}
    if ("pyspark", "DataFrame") not in roots:
        raise DataError(f"{called} is a `{type_name(frame)}`, not a Spark DataFrame.")
    cluster = cluster_of(frame.sparkSession)
    if cluster.is_stopped():
        raise DataError(
            f"the SparkSession of {called} has been stopped: make a new one with SparkSession.builder.getOrCreate(), "
            "and use it to make the DataFrame again."
        )
    try:
        frame.schema  # noqa: B018
    except Exception as error:  # pyspark has several classes for this error
        raise _not_in_python(cluster, frame, error, called) from error
    return cluster


def _not_in_python(cluster: Cluster, frame: DataFrame, error: Exception, called: str) -> DataError:
    """Return the error for a column whose type pyspark does not know, such as that of make_interval()."""
    if (column := cluster.unknown_column(frame)) is None:
        return DataError(f"pyspark cannot represent a column of {called}: {error}")
    name, kind = column
    return DataError(
        f"column `{name}` of {called} is {kind}, which pyspark cannot represent: cast it to another type, or leave it "
        f"out with df.drop({name!r})."
    )


def check_names(frame: DataFrame, names: Iterable[str], option: str = "") -> None:
    """Raise DataError unless the DataFrame has exactly one column of each name. The message begins with `option`."""
    same = same_names(frame)
    for name in names:
        if name not in frame.columns:
            raise DataError(f"{option}the DataFrame has no column `{name}`: {nearest(name, frame.columns)}")
        if len(several := same(name)) > 1:
            called = " and ".join(f"`{column}`" for column in dict.fromkeys(several))
            raise DataError(
                f"{option}the DataFrame has {len(several)} columns called {called}: rename or drop all but one."
            )


def same_names(frame: DataFrame) -> Callable[[str], list[str]]:
    """Return a function that returns the columns for which Spark takes a name, whatever its case by default."""
    exact = frame.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    spelled: dict[str, list[str]] = {}
    for name in frame.columns:
        spelled.setdefault(name if exact else name.lower(), []).append(name)
    return lambda name: spelled.get(name if exact else name.lower(), [])


def name_of(columns: Sequence[str]) -> str:
    """Return the name of a DataFrame for messages. It is made from the names of the first columns."""
    return f"DataFrame[{', '.join(columns[:4])}{', …' if len(columns) > 4 else ''}]"


def for_arrays(frame: DataFrame) -> DataFrame:
    """Return the same rows in types that every Parquet reader knows.

    MLlib's vectors become arrays. Timestamps, which Spark would write in UTC, become the session's local times without
    a time zone, as in toPandas(). Columns without a type, which have only nulls, become strings.
    """
    changed = {field.name: column for field in frame.schema.fields if (column := for_array(field)) is not None}
    if not changed:
        return frame
    from pyspark.sql import functions

    return frame.select([
        changed[name].alias(name) if name in changed else functions.col(quoted(name)) for name in frame.columns
    ])  # fmt: skip


def for_array(field: StructField) -> Column | None:
    """Return the expression with which for_arrays() changes a column, or None if the column is not changed."""
    from pyspark.sql import functions

    column = functions.col(quoted(field.name))
    if _has_vectors(field.dataType):
        return _without_vectors(column, field.dataType)
    return column.cast(_stored(field.dataType)) if _changes(field.dataType) else None


def _has_vectors(kind: DataType) -> bool:
    """Return whether a type is that of MLlib's vectors, or of arrays of them."""
    from pyspark.sql.types import ArrayType

    return _has_vectors(kind.elementType) if isinstance(kind, ArrayType) else type(kind).__name__ == "VectorUDT"


def _without_vectors(column: Column, kind: DataType) -> Column:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType

    if isinstance(kind, ArrayType):
        inner = kind.elementType
        return functions.transform(column, lambda item: _without_vectors(item, inner))
    return functions.when(column.isNotNull(), vector_to_array(column))  # vector_to_array() rejects nulls


def numbered(frame: DataFrame) -> DataFrame:
    """Return the same rows in columns called c0, c1, …, because some column names are not possible in a Parquet file.

    Timestamps and columns without a type change as in for_arrays(). The other types stay as they are, so the schema of
    the result is needed to read the values.
    """
    from pyspark.sql import functions

    columns = [f"c{number}" for number in range(len(frame.columns))]
    return frame.toDF(*columns).select([
        functions.col(name).cast(_stored(field.dataType)).alias(name)
        if _changes(field.dataType)
        else functions.col(name)
        for name, field in zip(columns, frame.schema.fields, strict=True)
    ])  # fmt: skip


def serialized_schema(schema: StructType, session: SparkSession) -> bytes:
    """Return a Spark schema as a serialized Arrow schema. Raise DataError if Arrow cannot represent a column."""
    try:
        return arrow_schema(schema, session)
    except Exception as error:  # pyspark has several classes for this error
        raise DataError(not_in_arrow(schema, error)) from error


def nested_types(frame: DataFrame) -> dict[str, DataType]:
    """Return the Spark types of those columns of for_arrays(frame) that hold rows or maps."""
    return {field.name: field.dataType for field in for_arrays(frame).schema.fields if _is_nested(field.dataType)}


def _is_nested(kind: DataType) -> bool:
    from pyspark.sql.types import MapType, StructType

    return _any_part(kind, lambda part: isinstance(part, MapType | StructType))


def proleptic(frame: DataFrame) -> DataFrame:
    """Return the same rows, for which Spark writes dates before 1582-10-15 to Parquet as they are."""
    if not any(_has_dates(field.dataType) for field in frame.schema.fields):
        return frame
    return cluster_of(frame.sparkSession).proleptic(frame)


def _has_dates(kind: DataType) -> bool:
    from pyspark.sql.types import DateType

    return _any_part(kind, lambda part: isinstance(part, DateType))


def _any_part(kind: DataType, holds: Callable[[DataType], bool]) -> bool:
    """Return whether `holds` is true of a type, or of a type inside it."""
    from pyspark.sql.types import ArrayType, MapType, StructType, UserDefinedType

    parts: list[DataType] = []
    if isinstance(kind, ArrayType):
        parts = [kind.elementType]
    elif isinstance(kind, MapType):
        parts = [kind.keyType, kind.valueType]
    elif isinstance(kind, StructType):
        parts = [field.dataType for field in kind.fields]
    elif isinstance(kind, UserDefinedType):
        parts = [kind.sqlType()]
    return holds(kind) or any(_any_part(part, holds) for part in parts)


def _has_times(kind: DataType) -> bool:
    from pyspark.sql.types import TimestampType

    return _any_part(kind, lambda part: isinstance(part, TimestampType))


def _changes(kind: DataType) -> bool:
    return bool(_stored(kind) != kind)


def _stored(kind: DataType) -> DataType:
    """Return the type in which values are stored: timestamps without a time zone, and strings for `void`.

    This includes the parts of arrays, maps and rows.
    """
    from pyspark.sql.types import (
        ArrayType,
        MapType,
        NullType,
        StringType,
        StructField,
        StructType,
        TimestampNTZType,
        TimestampType,
    )  # fmt: skip

    if isinstance(kind, ArrayType):
        return ArrayType(_stored(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(_stored(kind.keyType), _stored(kind.valueType), kind.valueContainsNull)
    if isinstance(kind, StructType):
        return StructType([
            StructField(part.name, _stored(part.dataType), part.nullable, part.metadata) for part in kind.fields
        ])  # fmt: skip
    if isinstance(kind, NullType):
        return StringType()
    return TimestampNTZType() if isinstance(kind, TimestampType) else kind


def version_of(frame: DataFrame, *, by_partition: bool = False) -> str:
    """Return a string that is the same for two DataFrames, even in different kernels, only if they have the same rows.

    The order of the rows makes no difference. With `by_partition`, each partition must have the same rows, too. If the
    rows have timestamps, the string also depends on the session's time zone. If the plan does not determine the rows,
    one Spark job reads the rows. If this job fails, its error is raised.
    """
    version = _by_plan(frame) or _by_rows(frame, by_partition)
    if any(_has_times(field.dataType) for field in frame.schema.fields):
        version += f"-{frame.sparkSession.conf.get('spark.sql.session.timeZone')}"
    return version


# ── By the plan ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _by_plan(frame: DataFrame) -> str:
    try:
        facts = cluster_of(frame.sparkSession).plan_facts(frame)
    except Exception:  # Spark's internal classes may differ in this version; version_of() then uses the rows
        return ""
    return f"plan-{_digest(facts)}" if facts else ""


# ── By the rows ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _by_rows(frame: DataFrame, by_partition: bool) -> str:
    from pyspark.sql import functions

    schema = frame.schema.json()
    frame = frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))  # several may have the same name
    parts = [part for field in frame.schema.fields for part in _hashable(field)] or [functions.lit(0)]
    # The hashes are added as decimals, because a sum of integers could overflow, which is an error in ANSI mode. Spark
    # makes the sum a decimal of 30 digits, which are enough for the hashes of 10^11 rows.
    sums = [
        functions.sum(functions.xxhash64(functions.lit(salt), *parts).cast("decimal(20,0)")).alias(f"sum{salt}")
        for salt in (0, 1)
    ]
    grouped = frame.groupBy(*([functions.spark_partition_id().alias("partition")] if by_partition else []))
    rows = grouped.agg(functions.count(functions.lit(1)).alias("rows"), *sums).collect()
    return f"rows-{_digest([schema, *(str(value) for row in sorted(rows) for value in row)])}"


def _hashable(field: StructField) -> list[Column]:
    """Return the expressions to hash for a column.

    xxhash64 skips nulls, does not notice where an array ends, and rejects maps. So nulls and the lengths of arrays are
    hashed, too, and maps, rows and nested arrays are hashed as JSON.
    """
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, MapType, StructType

    column = functions.col(quoted(field.name))
    null_flags = [column.isNull()] if field.nullable else []
    kind = field.dataType
    if isinstance(kind, ArrayType) and not isinstance(kind.elementType, (ArrayType, MapType, StructType)):
        nulls = [functions.transform(column, lambda item: item.isNull())] if kind.containsNull else []
        return [column, functions.size(column), *nulls, *null_flags]
    if isinstance(kind, (ArrayType, MapType, StructType)):
        return [functions.to_json(column, {"ignoreNullFields": "false"}), *null_flags]
    return [column, *null_flags]


def quoted(name: str) -> str:
    """Return a column's name, quoted so that Spark's functions accept a dot as a part of the name."""
    return f"`{name.replace('`', '``')}`"


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
