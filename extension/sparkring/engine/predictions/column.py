"""The Spark column that scores rows, as a pandas iterator UDF whose tasks share the model processes of a machine."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from sparkring.capture import own_modules
from sparkring.capture.packing import pack_call
from sparkring.cluster.base import pandas_unused
from sparkring.cluster.formation import gpus_per
from sparkring.data.frames import serialized_schema
from sparkring.errors import DataError, OptionsError
from sparkring.executor.archive import archive
from sparkring.executor.orders import ModelOrder
from sparkring.executor.tasks import task_for
from sparkring.runtime.packages import require
from sparkring.runtime.storage import root_for_ranks
from sparkring.worker.member import gpus
from sparkring.worker.model.outputs import PredictedColumn
from sparkring.worker.model.scorer import Scorer
from sparkring.worker.model.task import Scoring, score

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import DataType, StructType

    from sparkring.cluster.base import Cluster

IDLE_S = 300.0  # how long a process keeps the model while no task is using it
_THREADS = "OMP_NUM_THREADS"


class Returned(NamedTuple):
    """The Spark type that a UDF returns, and the Arrow columns of this type."""

    kind: DataType
    outputs: tuple[PredictedColumn, ...]


def scoring_udf(
    cluster: Cluster,
    settings: Mapping[str, Any],
    kind: DataType,
    types: bytes | None,
    *,
    idle_s: float,
    report: Mapping[str, Any] | None = None,
    follows: bool = False,
) -> Any:
    """Return the UDF that scores its arguments with Scorer(**settings), and returns values of the Spark type `kind`.

    `types` is the Arrow schema of the arguments, serialized; if it is None, the types are inferred from the rows.
    `report` tells the Reporter in each model process how to reach the driver. With `follows`, the model is a Followed
    one, which takes up new checkpoints. Raise CaptureError if the model cannot be sent.
    """
    require("pandas", "a pandas UDF of Spark")
    import pandas
    from pyspark.sql.functions import pandas_udf

    here = cluster.is_local
    with_nvml = gpus_per(cluster, "task") > 0
    model = cluster.shared(packed_scorer(settings, with_nvml=with_nvml, here=cluster.runs_this_python))
    threads = cluster.setting(f"spark.executorEnv.{_THREADS}")
    process = ModelOrder(
        key=secrets.token_hex(8),
        token=secrets.token_hex(32),
        path=[os.path.abspath(entry) for entry in sys.path] if here else [],
        environment={**root_for_ranks(), **({_THREADS: threads} if threads else {})},
        idle_s=idle_s,
        report=report,
        follows=follows,
    )
    task = task_for(score, Scoring(process, model, types, settings["batch_size"], gpus.visible() if here else []))
    # From these annotations, Spark learns that the function takes an iterator of batches.
    task.__annotations__ = {"rows": Iterator[pandas.Series], "return": Iterator[pandas.Series]}
    with pandas_unused():
        udf = pandas_udf(task, kind)
    # Spark may evaluate a deterministic UDF twice, once for a filter and once for the column. The second prediction of
    # a row could then be that of a newer checkpoint.
    return udf.asNondeterministic() if follows else udf


def packed_scorer(settings: Mapping[str, Any], *, with_nvml: bool = False, here: bool) -> tuple[Any, ...]:
    """Return sparkring's archive, the user's own modules, and the packed Scorer.

    Model processes on this machine (`here`) need no modules, because they import the notebook's files. Raise
    CaptureError if the model cannot be sent.
    """
    packed = pack_call(Scorer, dict(settings), getattr(sys.modules.get("__main__"), "__dict__", {}))
    modules = None if here else own_modules.packed(own_modules.own_modules())
    # A task that unpickles this has no class of sparkring.
    return (archive(with_nvml), modules and tuple(modules), packed.payload, *map(bytearray, packed.buffers))


def arrow_types(schema: StructType, session: SparkSession) -> pa.Schema:
    """Return the Arrow types of columns. Raise DataError if Arrow cannot represent one of them."""
    return pa.ipc.read_schema(pa.py_buffer(serialized_schema(schema, session))).remove_metadata()


def returned(kinds: Mapping[str, str | DataType], session: SparkSession, *, struct: bool) -> Returned:
    """Return the type of a UDF that returns these columns.

    If there are several columns, or if `struct` is true, the UDF returns a struct whose fields are the columns. Raise
    OptionsError if a type is not a Spark type.
    """
    from pyspark.sql.types import StructField, StructType

    types = {name: _spark_type(name, kind, session) for name, kind in kinds.items()}
    schema = StructType([StructField(name, kind) for name, kind in types.items()])
    of_struct = struct or len(types) > 1
    outputs = tuple(
        PredictedColumn(field.name, field.type, types[field.name].simpleString(), of_struct)
        for field in arrow_types(schema, session)
    )
    return Returned(schema if of_struct else next(iter(types.values())), outputs)


def spark_types(kinds: Mapping[str, pa.DataType]) -> dict[str, DataType]:
    """Return the Spark types for the Arrow types of columns. Raise DataError if Spark has no type for one of them."""
    from pyspark.sql.pandas.types import from_arrow_type

    types = {}
    for name, kind in kinds.items():
        try:
            types[name] = from_arrow_type(kind)
        except Exception as error:  # pyspark has several classes for this error
            raise DataError(
                f"the model returned {kind} for `{name}`, but Spark has no such type: set a Spark type with returns=…."
            ) from error
    return types


def _spark_type(name: str, kind: Any, session: SparkSession) -> DataType:
    from pyspark.sql.functions import lit
    from pyspark.sql.types import DataType

    if isinstance(kind, DataType):
        return kind
    if not isinstance(kind, str):
        raise OptionsError(f"returns: the type of `{name}` is {kind!r}: expected a Spark type, as in 'array<float>'.")
    try:
        return session.range(0).select(lit(None).cast(kind)).schema.fields[0].dataType
    except Exception as error:  # pyspark has several classes for this error
        raise OptionsError(f"returns: {kind!r} is not a Spark type: expected one such as 'array<float>'.") from error
