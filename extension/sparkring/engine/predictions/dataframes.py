"""`predict(…)`: a DataFrame with a model's predictions as a new column."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.jobs import interruptibly
from sparkring.data.columns import is_object
from sparkring.data.frames import check_names, cluster_behind, for_array, for_arrays, quoted
from sparkring.engine.predictions.column import IDLE_S, Returned, arrow_types, returned, scoring_udf, spark_types
from sparkring.engine.predictions.queries import watch
from sparkring.engine.predictions.settings import PROBED_ROWS, Settings
from sparkring.errors import DataError, OptionsError
from sparkring.history.describe import counted, first_line
from sparkring.runtime.interrupts import interrupted
from sparkring.runtime.kernel import tell_progress
from sparkring.worker.model import outputs
from sparkring.worker.model.files import Files, files_of, row_numbers
from sparkring.worker.model.scorer import ModelSource
from sparkring.worker.model.task import in_numbers, not_in_pandas

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from sparkring.cluster.base import Cluster


def predict_frame(data: DataFrame, settings: Settings, *, idle_s: float = IDLE_S) -> DataFrame:
    """Return a DataFrame with the predictions of a model as one or more new columns.

    Raises DataError, OptionsError, CheckpointError or CaptureError.
    """
    if settings.refresh_s is not None and not data.isStreaming:
        raise OptionsError(
            "refresh_s=… is only for streaming DataFrames: leave it out. For another DataFrame, predict() uses the "
            "checkpoint that it finds when it is called."
        )
    cluster = cluster_behind(data)
    session = cluster.session
    used = _used(data, settings.used)
    types = _types(used, session)
    inputs, source, kinds = settings.described("the DataFrame"), settings.source(), settings.kinds()
    result = returned(settings.with_version(kinds, "bigint"), session, struct=False) if kinds else None
    for output in result.outputs if result is not None else ():
        if pa.types.is_struct(output.kind):
            fields = ", ".join(f"{field.name!r}: …" for field in output.kind)
            raise OptionsError(
                f"returns: {output.written!r} is not possible for a DataFrame: name its fields as columns, as in "
                f"returns={{{fields}}}, and combine them with struct() afterwards."
            )
    probe = None
    files = files_of(data, settings.used, types)
    rows = _first_rows(used, types, files, cluster) if settings.probe and not data.isStreaming else None
    if rows is not None:
        probe = settings.probed(source, inputs, rows)
    if probe is not None:
        if result is None:
            inferred = settings.with_version(outputs.types_of(probe.results, (), probe.rows), pa.int64())
            result = returned(spark_types(inferred), session, struct=False)
        outputs.columns_of(probe.results, settings.of_model(result.outputs), probe.rows)
    if result is None:
        why = "the DataFrame is empty" if rows is None else "none of the first rows can become arrays"
        if not settings.probe:
            why = "with probe=False the model is not tried on any rows"
        raise OptionsError(
            "the type of the predictions is not known, because "
            f"{'the DataFrame is a stream' if data.isStreaming else why}: set the type, as in returns='float'."
        )
    settings.check_new(result.outputs, data.columns, "the DataFrame")
    sent = types if files is None else pa.schema([("row", pa.int64())])
    scorer = settings.scorer(source, inputs, result.outputs, files=files, small=probe is not None and probe.small)
    title, code = _described(cluster, data, files, settings, source, rows)
    report = watch(cluster, title, code)
    types_sent = sent.serialize().to_pybytes()
    follows = settings.refresh_s is not None
    udf = scoring_udf(cluster, scorer, result.kind, types_sent, idle_s=idle_s, report=report, follows=follows)
    with cluster.own_python():
        if files is None:
            return _with(data, udf(*_columns(data, types, settings.fill or {})), result)
        # Spark would evaluate a single argument when it sends the rows, and keep the name of the file with each
        # row until the answer comes. An argument that is used twice is a column of its own, which is sent once.
        number = _new_name()
        return _with(data.withColumn(number, row_numbers()), udf(number, number), result).drop(number)


def _used(data: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the DataFrame's columns that the model uses. Raise DataError unless each name has exactly one column."""
    check_names(data, names)
    from pyspark.sql import functions

    return for_arrays(data.select([functions.col(quoted(name)) for name in names]))


def _columns(data: DataFrame, types: pa.Schema, fill: Mapping[str, Any]) -> list[Column]:
    from pyspark.sql import functions

    fields = {field.name: field for field in data.schema.fields}
    columns = []
    for name, kind in zip(types.names, types.types, strict=True):
        column = for_array(fields[name])
        column = functions.col(quoted(name)) if column is None else column
        columns.append(_filled(column, fields[name].dataType, kind, fill.get(name)))
    return columns


def _filled(column: Column, spark_kind: DataType, kind: pa.DataType, value: Any) -> Column:
    """Return a column, or the items of an array, with the nulls replaced, if Spark has to do this."""
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType

    if isinstance(spark_kind, ArrayType) and value is not None and not isinstance(value, Sequence):
        item_kind = spark_kind.elementType
        return functions.transform(column, lambda item: _filled(item, item_kind, kind.value_type, value))
    replacement = _replacement(value, kind)
    return column if replacement is None else functions.coalesce(column, functions.lit(replacement).cast(spark_kind))


def _replacement(value: Any, kind: pa.DataType) -> Any:
    """Return the number with which Spark must replace nulls, or None if the model process can replace them.

    pandas cannot distinguish a null from a NaN, and rounds integers beside nulls. If the column cannot hold the value,
    the model process raises the error.
    """
    if pa.types.is_floating(kind):
        return value
    if pa.types.is_integer(kind):
        with contextlib.suppress(pa.ArrowException, OverflowError, TypeError, ValueError):
            return pa.scalar(value, kind).as_py()
    return None


def _types(used: DataFrame, session: SparkSession) -> pa.Schema:
    types = arrow_types(used.schema, session)
    for field, own in zip(types, used.schema.fields, strict=True):
        if is_object(field.type):
            raise DataError(
                f"column `{field.name}` is {own.dataType.simpleString()}, which no array can hold: make columns of its "
                f"parts, as in df.withColumn('part', df['{field.name}']['part'])."
            )
    return types


def _first_rows(used: DataFrame, types: pa.Schema, files: Files | None, cluster: Cluster) -> pa.RecordBatch | None:
    """Return the first rows that the model would get, or None if the DataFrame is empty.

    If it is certain that the DataFrame has all rows of its files, this process reads the rows without a Spark job.
    """
    if files is not None and not files.filtered and (batch := files.first_rows(PROBED_ROWS)) is not None:
        return batch
    try:
        rows = interruptibly(cluster, "the first rows for predict()", lambda: used.take(PROBED_ROWS), tell_progress)
    except KeyboardInterrupt:
        raise interrupted("") from None
    except (OverflowError, ValueError) as error:
        raise DataError(not_in_pandas(types, error)) from error
    except Exception as error:  # pyspark and py4j have several classes for this error
        raise DataError(f"Spark could not compute the first rows of the DataFrame: {root_cause(str(error))}") from error
    if not rows:
        return None
    columns = [
        pa.array([bytes(row[at]) if isinstance(row[at], bytearray) else row[at] for row in rows], field.type)
        for at, field in enumerate(types)
    ]
    return pa.RecordBatch.from_arrays([in_numbers(column) for column in columns], names=types.names)


def _described(
    cluster: Cluster,
    data: DataFrame,
    files: Files | None,
    settings: Settings,
    source: ModelSource,
    rows: pa.RecordBatch | None,
) -> tuple[str, str]:
    """Return a title and code for the records of queries. The code is a call of predict() with comments."""
    if files is not None:
        paths = sorted(set(files.paths.values()))
        name = paths[0] if len(paths) == 1 else os.path.commonpath(paths)
        about = f"{counted(len(paths), 'file')} in {name}"
    else:
        name = "a DataFrame"
        about = cluster.describe(data)
    probed = (
        f"\n# The model has scored the first {counted(len(rows), 'row')} in the notebook." if rows is not None else ""
    )
    code = f"sparkring.predict({name}, {source.label}, inputs={settings.inputs!r})\n# {first_line(about, 300)}{probed}"
    return f"predict {name} with {source.label}", code


def _with(data: DataFrame, column: Column, result: Returned) -> DataFrame:
    """Return the DataFrame with the column of a UDF. If the UDF returns a struct, add its fields as columns instead."""
    names = [output.name for output in result.outputs]
    if len(names) == 1:
        return data.withColumn(names[0], column)
    from pyspark.sql import functions

    struct = _new_name()
    scored = data.withColumn(struct, column)
    fields = [functions.col(f"{struct}.{quoted(name)}").alias(name) for name in names]
    return scored.select("*", *fields).drop(struct)


def _new_name() -> str:
    return f"sparkring_{secrets.token_hex(4)}"
